"""How advice reads: what to run, the table it rests on, and what to mind."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from t5accel import machine
from t5accel.advice.evidence import Draft, Export, Relative, Setting, Speed
from t5accel.advice.lines import gate, program
from t5accel.advice.need import FAR, Distance, Need
from t5accel.advice.recorded import REFERENCE
from t5accel.advise import TOO_MUCH, UNKNOWN, Advice, Candidate, same_machine
from t5accel.checkpoints import BUNDLED, data_folder
from t5accel.graphs.recipes import RECIPES
from t5accel.records import aligned

LABELS = {"bleu": "BLEU", "rougeL": "ROUGE-L", "exact_match": "EM"}
# Instructions that multiply 8-bit integers; without one of them they are slower, and on x86 products may saturate.
FOR_INT8 = ("avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm")
COMPARED = ("onnxruntime", "transformers")  # versions that decide a ratio


def report(advice: Advice, *, versions: Mapping[str, str] | None = None) -> str:
    """The whole advice as plain text. ``versions``: those installed, by default `machine.versions`.

    >>> from t5accel.advise import advise
    >>> from t5accel.advice.evidence import Record
    >>> print(report(advise(Need("me/mine"), Record(), weights=None, here={})).splitlines()[0])
    me/mine, all tasks, for latency: batch 1, greedy, 64 source and 64 new tokens, on cpu
    """
    need, best = advice.need, advice.recommended
    beams = "greedy" if need.beams == 1 else f"{need.beams} beams"
    blocks = [[
        f"{need.model}, {need.task or 'all tasks'}, for {need.matters}: batch {need.batch}, {beams}, "
        f"{need.source_tokens} source and {need.new_tokens} new tokens, on {need.device}{_threads(advice)}"
    ]]  # fmt: skip
    if best:
        blocks.append([
            f"Recommended: {_name(best)}. {_ratio(best.speed)}{_changes(best)}.",
            *(f"  {text}" for text in program(best, need)),
        ])  # fmt: skip
    else:
        blocks.append(list(_why_none(advice)))
    if advice.if_gated:
        other = advice.if_gated
        blocks.append([
            f"Perhaps better: {_name(other)}, {_ratio(other.speed)}. Its quality on this model was never measured; if "
            "it passes, take it:", *(f"  {text}" for text in gate(other, need)),
        ])  # fmt: skip
    if advice.candidates:
        blocks.append([_run(advice), *_table(advice)])
    for title, texts in (
        ("Beside it", [*_beside(advice)]),
        ("Mind", [*_warnings(advice, machine.versions() if versions is None else versions)]),
        ("To measure it", [*_commands(advice)]),
    ):
        if texts:
            blocks.append([f"{title}:", *(f"- {text}" for text in texts)])
    aside = ", ".join(f"{count} of {file}" for file, count in advice.record.left_out.items() if count)
    unused = f" Rows of kinds that are no evidence: {aside}." if aside else ""
    with_package = str(data_folder() / "results")
    looked_in = ["data/results" if place == with_package else place for place in advice.record.looked_in]
    blocks.append([f"Looked in: {', '.join(looked_in) or 'no file'}.{unused}"])
    return "\n\n".join("\n".join(block) for block in blocks)


def _threads(advice: Advice) -> str:
    count = advice.need.threads or advice.here.get("usable_threads")
    return f", {count} threads" if count else ""


def _name(one: Candidate) -> str:
    return f"{one.speed.recipe}, {one.speed.loop}"


def _ratio(speed: Speed) -> str:
    return f"{speed.ratio} the speed of {REFERENCE}, {speed.source}"


def _changes(one: Candidate) -> str:
    if not one.losses:
        return f"; quality: {one.quality}"
    if one.scored_in is None:
        return f"; quality: {one.quality} as in fp32"
    changes = ", ".join(f"{LABELS[name]} {0 - loss:+.1f}" for name, loss in one.losses.items())
    return f"; quality against fp32: {changes}, {one.scored_in}"


def _setting(setting: Setting) -> str:
    beams = "greedy" if setting.beams == 1 else f"{setting.beams} beams"
    return (
        f"{setting.model}, batch {setting.batch}, {beams}, {setting.source_tokens} source and {setting.new_tokens} "
        f"forced new tokens, {setting.threads} threads"
    )


def _distance(distance: Distance) -> str:
    """What is not the same.

    >>> _distance(Distance(0.25, 1.0, 1.0, 1.0, 2.0))
    'model size 0.25 times, new tokens 2 times yours'
    """
    differing = [
        f"{name.replace('_', ' ')} {factor:.2g} times" for name, factor in distance.factors.items() if factor != 1
    ]  # fmt: skip
    return f"{', '.join(differing)} yours" if differing else "all as you need it"


def _run(advice: Advice) -> str:
    first = advice.candidates[0].speed
    source = first.source
    where = f"{source.machine.get('cpu')}, {source.date}" + (f", commit {source.commit}" if source.commit else "")
    name = "this machine, now" if source.fresh else source.file
    return f"Measured in one run ({name}; {where}): {_setting(first.setting)}.\nBeside your case: " + (
        f"{_distance(advice.distance)}."
    )


def _table(advice: Advice) -> Iterator[str]:
    names = list(advice.need.limits)
    header = ["", "configuration", "ratio", "spread", "tokens/s", "MB", "peak MB", *(LABELS[n] for n in names), "row",
              "quality"]  # fmt: skip
    lines = [header]
    for one in advice.candidates:
        mark = "*" if one is advice.recommended else "=" if one in advice.tied else ""
        ratio, losses = one.speed.ratio, one.losses
        megabytes = [_mb(one.bytes_on_disk), _mb(one.peak_memory_bytes)]
        changes = ["–" if losses is None else f"{0 - losses[name]:+.1f}" for name in names]
        lines.append([
            mark, _name(one), f"{ratio.median:.2f}x", f"{ratio.min:.2f}–{ratio.max:.2f}",
            f"{one.speed.tokens_per_s:.0f}", *megabytes, *changes, str(one.speed.source.row), one.quality,
        ])  # fmt: skip
    yield from aligned(lines, left={0, 1, len(header) - 1})
    if advice.tied:
        yield "(=: not slower than the recommended one in every round; of such the one that loses least is taken)"


def _mb(size_bytes: int | None) -> str:
    return "–" if size_bytes is None else f"{size_bytes / 1e6:.0f}"


def _why_none(advice: Advice) -> Iterator[str]:
    need = advice.need
    if advice.candidates:
        yield f"No recommendation: no measured configuration is allowed and faster than {REFERENCE}. Stay with that."
    elif need.device != "cpu":
        yield f"No recommendation: nothing that was recorded ran on {need.device}."
    elif advice.weights is None:
        yield (
            f"No recommendation: how large {need.model} is stands in its configuration, which is not on this machine. "
            "Load it once, or give a folder."
        )
    elif advice.nearest is None:
        yield f"No recommendation: nothing is recorded for {'beams' if need.beams > 1 else 'greedy search'}."
    else:
        speed, distance = advice.nearest
        yield (
            f"No recommendation: nothing recorded is within {FAR:g} times of your case. The nearest, {speed.source}: "
            f"{_setting(speed.setting)}; {_distance(distance)}."
        )


def _beside(advice: Advice) -> Iterator[str]:
    need, best = advice.need, advice.recommended
    for one, distance in advice.apart:
        yield f"{_name(one)}, of another run: {_ratio(one.speed)}; {_distance(distance)}; quality: {one.quality}"
    yield from map(_draft, advice.drafts)
    if best and need.beams == 1 and not advice.drafts:
        yield (
            "lookup(model.backend, …): not measured for this model and recipe; it pays only where an answer copies "
            "from its source at length, as summaries do (scripts/drafts.py measures mini)"
        )
    small = sorted(advice.relatives, key=lambda one: max(0.0, _excess(one, need)))  # those within the limits first
    inside = sum(_excess(one, need) <= 0 for one in small)
    for relative in small[: inside + 1]:
        yield _relative(relative, need)
    if (more := len(small) - inside - 1) > 0:
        yield f"{more} more smaller models lose more than that"
    models = [need.model, *([best.speed.setting.model] if best else [])]
    exports = [one for one in advice.record.of(Export) if one.model in models]
    for one in exports[:1]:
        yield f"the first call exports the model, once: {one.seconds:.1f} s for {one.model} ({one.source})"


def _draft(one: Draft) -> str:
    pays = "it pays" if one.ratio.min > 1 else "it does not pay" if one.ratio.median <= 1 else "not in every round"
    return (
        f"{one.system} on {one.task}, batch {one.batch}: {one.ratio} greedy search in {one.recipe}, {one.equal} of "
        f"{one.answers} answers equal ({one.source}): {pays}"
    )


def _excess(one: Relative, need: Need) -> float:
    """How many points a smaller model loses beyond what is allowed, of the score where that is most."""
    return max((loss - need.limits[name] for name, loss in one.losses.items() if name in need.limits), default=0.0)


def _relative(one: Relative, need: Need) -> str:
    changes = ", ".join(f"{LABELS[name]} {0 - one.losses[name]:+.1f}" for name in need.limits if name in one.losses)
    if _excess(one, need) > 0:
        verdict = TOO_MUCH
    elif one.ratio.min <= 1:
        verdict = "not faster in every round"
    else:
        verdict = f'take it: accelerate("{one.model}", …)' if one.model in BUNDLED else "within the limit; train it"
    return (
        f"smaller model {one.model}, {one.recipe}, batch {one.batch}: {one.ratio} {one.whole} in {one.recipe}, "
        f"{changes}, {one.bytes_on_disk / 1e6:.0f} MB ({one.source}): {verdict}"
    )


def _warnings(advice: Advice, versions: Mapping[str, str]) -> Iterator[str]:
    need, best = advice.need, advice.recommended
    if advice.candidates:
        source = advice.candidates[0].speed.source
        if not same_machine(source.machine, advice.here):
            theirs, ours = (
                f"{facts.get('cpu')}, {facts.get('usable_threads')} threads" for facts in (source.machine, advice.here)
            )
            yield f"measured on another machine ({theirs}; this one: {ours}): ratios differ between machines"
        flags = [{*(facts.get("cpu_flags") or ())} & {*FOR_INT8} for facts in (source.machine, advice.here)]
        of_integers = any(one and RECIPES[one.speed.recipe].integers for one in (best, advice.if_gated))
        if of_integers and flags[0] and not flags[1]:
            yield (
                "this processor has no instructions for 8-bit products, as far as can be seen: integers gain less, and "
                "on x86 their sums may saturate (Scheme(reduce_range=True) avoids it)"
            )
        run = advice.candidates[0].speed.setting
        if need.threads not in (None, run.threads):
            yield f"measured with {run.threads} threads, and you want {need.threads}"
        for name in COMPARED:
            there, here = source.versions.get(name), versions.get(name)
            if there and here and there != here:
                yield f"measured with {name} {there}; here is {here}"
        if not advice.distance.is_near:
            yield f"the run is far from your case ({_distance(advice.distance)}): measure before you rely on it"
    if best and best.losses and best.scored_in:
        yield "losses are those of the bundled evaluation sets, decoded greedily; your texts may lose more"
    if any(one.quality == UNKNOWN for one in advice.candidates):
        yield "what fewer bits cost in quality was not measured on this model, and no other model's loss stands for it"
    if need.beams > 1:
        yield "beam search cannot stream, and lookup and speculative decoding are greedy"


def _commands(advice: Advice) -> Iterator[str]:
    need = advice.need
    if need.device != "cpu":
        yield 'time accelerate(…, device="cuda") against your own model with t5accel.timing.compare'
    elif need.beams > 1:
        yield "time beam_search(model.backend, …) against your own model with t5accel.timing.compare"
    elif not (advice.candidates and advice.candidates[0].speed.source.fresh):
        model = shlex.quote(need.model)
        work = f"--batch {need.batch} --source-tokens {need.source_tokens} --new-tokens {need.new_tokens}"
        yield "t5accel advise --measure, with the same options: a short run on this machine"
        yield f"t5accel bench --model {model} {work} --json mine.json, then t5accel advise --results mine.json …"
