"""Which configuration for a model and a need: recorded rows, filtered by the gate of quality; the fastest is taken.

Ratios compare within one run and nowhere else. So the run that is nearest to the need is found first, and its rows are
the candidates. Beyond a factor of `FAR` in any direction there is no advice. Nothing is calculated or measured here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from t5accel import machine
from t5accel.api import TUNED_FOR
from t5accel.checkpoints import BUNDLED, HUB_ALIASES, allowed_names, data_folder, hub_snapshot
from t5accel.checks import as_count, read_json_object
from t5accel.errors import InputError, ModelUnavailableError, T5AccelError, UnknownModelError
from t5accel.graphs.numbers.recipes import RECIPES
from t5accel.lab.peers import OURS, OURS_GENERATE, OURS_INT4, OURS_INT8, OURS_INT8_THROUGHPUT
from t5accel.lab.peers import REFERENCE as PEERS_REFERENCE
from t5accel.lab.rows import aligned
from t5accel.lab.techniques import REFERENCE
from t5accel.t5.lively import RANDOM_SIZES
from t5accel.t5.roofline import decoder_weights_per_step
from t5accel.t5.sizes import T5Dims

METRICS = {"translation": "bleu", "summaries": "rougeL", "questions": "exact_match"}
LABELS = {"bleu": "BLEU", "rougeL": "ROUGE-L", "exact_match": "exact match"}
MATTERS = ("latency", "throughput", "memory", "quality")
USUAL_LOSS = 1.0  # of each score, where nothing else is asked for
FAR = 8.0
# What `line` and `call` give, by the names that boards, peers and recipes have for it.
SYSTEMS = {
    OURS, OURS_GENERATE, OURS_INT8, OURS_INT8_THROUGHPUT, OURS_INT4, *RECIPES, "ONNX Runtime, generate()",
    *(f"ONNX Runtime, our loop, {name}" for name in ("numpy feeds", *RECIPES)),
}  # fmt: skip
WORK = ("batch", "beams", "source_tokens", "new_tokens")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Need:
    """What is wanted: a model, one of `METRICS`' tasks or ``None`` for all, one of `MATTERS`, and a typical call.

    Attributes:
        batch: by default 32 where throughput matters, else 1.
        max_loss: what each score may be lower than in fp32; by default 1.0 of each score of the task, and nothing
            where quality matters.
        threads: by default those that this process may use.

    Raises:
        InputError: a value is not one that it can have.

    >>> Need(matters="throughput").batch, Need(task="summaries").limits
    (32, {'rougeL': 1.0})
    """

    model: str = "mini"
    task: str | None = None
    matters: str = "latency"
    batch: int | None = None
    beams: int = 1
    source_tokens: int = 64
    new_tokens: int = 64
    max_loss: Mapping[str, float] = field(default_factory=dict)
    device: str = "cpu"
    threads: int | None = None

    def __post_init__(self) -> None:
        choices = {"task": (None, *METRICS), "matters": MATTERS, "device": ("cpu", "cuda")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"{name} is {getattr(self, name)!r}; give one of {', '.join(filter(None, allowed))}.")
        if self.batch is None:
            object.__setattr__(self, "batch", 32 if self.matters == "throughput" else 1)
        for name in (*WORK, *(["threads"] if self.threads is not None else [])):
            object.__setattr__(self, name, as_count(getattr(self, name), name, at_least=1))
        for name, value in self.max_loss.items():
            if name not in METRICS.values() or not (math.isfinite(value) and value >= 0):
                raise InputError(f"max_loss is {self.max_loss!r}; give numbers of 0 or more for {', '.join(LABELS)}.")

    @property
    def limits(self) -> dict[str, float]:
        """What each score that counts may lose."""
        names = METRICS.values() if self.task is None else [METRICS[self.task]]
        return dict(self.max_loss) or dict.fromkeys(names, 0.0 if self.matters == "quality" else USUAL_LOSS)


@dataclass(frozen=True)
class Found:
    """A recorded row, the file that it stands in and its number there, and what the file says of itself."""

    row: Row
    file: str
    number: int
    about: Mapping[str, Any]

    def __str__(self) -> str:
        on = "{cpu}, {usable_threads} threads".format(**self.about["machine"])
        return f"{self.file}, row {self.number} ({on}; {self.about['date']})"


@dataclass(frozen=True)
class Advice:
    """What is recommended, and what it rests on.

    Attributes:
        run: the rows of the run that is nearest to the need, the best first; empty where it is too far.
        losses: by precision, what each score loses against fp32 on the need's model; without what was never scored.
        allowed: those rows that lose no more than the need's limits and are faster than transformers.
        far: by what the nearest run differs from the need, as factors.
        beside: drafts and smaller models of the recommended precision.
    """

    need: Need
    run: tuple[Found, ...] = ()
    losses: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    allowed: tuple[Found, ...] = ()
    far: Mapping[str, float] = field(default_factory=dict)
    beside: tuple[Found, ...] = ()

    @property
    def recommended(self) -> Found | None:
        return self.allowed[0] if self.allowed else None


def advise(need: Need, *, results: Iterable[str | os.PathLike[str]] = ()) -> Advice:
    """Advice from the results that come with the package, and from more files or folders of such.

    Raises:
        InputError: a place of results is missing or damaged.
        UnknownModelError, ModelUnavailableError, NotT5Error: there is no such model, or it has no sizes.

    >>> advice = advise(Need("mini", task="translation"))
    >>> advice.recommended.row["ratio"] > 1, set(advice.far.values())
    (True, {1.0})
    """
    size, here = weights_per_step(need.model), machine.facts(gpu=False)
    record = list(_recorded([data_folder() / "results", *results]))
    runs: dict[Any, list[Found]] = {}  # within one, ratios compare
    for found in record:
        if _is_evidence(found, need):
            same = (found.row.get(key) for key in ("cell", "model", "reference", "threads", *WORK))
            runs.setdefault((found.file, *same), []).append(found)

    def factors(run: Sequence[Found]) -> dict[str, float]:
        row = run[0].row
        sizes = 1.0 if row["model"] == need.model else _size(row["model"]) / (size or math.nan)
        return {"model size": sizes, **{key.replace("_", " "): row[key] / getattr(need, key) for key in WORK}}

    def preference(run: Sequence[Found]) -> tuple[Any, ...]:
        doublings = sum(abs(math.log2(factor)) for factor in factors(run).values())
        return (doublings, not same_machine(run[0].about["machine"], here), -len(run))

    able = [run for run in runs.values() if not math.isnan(factors(run)["model size"])]
    nearest = min(able, key=preference, default=None)
    if nearest is None:
        return Advice(need)
    far = factors(nearest)
    if max(max(factor, 1 / factor) for factor in far.values()) > FAR:
        return Advice(need, far=far)
    in_memory = all("peak_memory_bytes" in found.row for found in nearest)
    size_key = "peak_memory_bytes" if in_memory else "size_bytes"

    def rank(found: Found) -> tuple[float, float]:  # less is better
        return (found.row.get(size_key, math.inf) if need.matters == "memory" else 0, -found.row["ratio"])

    rows = sorted(nearest, key=rank)
    losses = _losses(need, record)
    allowed = [found for found in rows if _passes(need, found.row["precision"], losses) and found.row["ratio"] > 1]
    beside = [found for found in record if allowed and _is_beside(found, need, allowed[0].row["precision"])]
    return Advice(need, tuple(rows), losses, tuple(allowed), far, tuple(beside))


def same_machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two machines are alike in processor, instructions and threads, as far as `machine.facts` tells."""
    return all(one.get(name) == other.get(name) for name in ("cpu", "usable_threads", "cpu_flags"))


def weights_per_step(name: str) -> int | None:
    """How many decoder weights a step of a model reads, from its configuration alone: nothing is loaded or downloaded.

    ``None`` for a hub id whose configuration is not on this machine. Raises ``UnknownModelError`` for what is no
    model's name, and as `T5Dims.from_config` does.

    >>> weights_per_step("mini"), weights_per_step("google-t5/t5-small") == weights_per_step("random:t5-small")
    (5721344, True)
    """
    hub_id = HUB_ALIASES.get(name, name)
    owner = next((owner for owner in ("random:", "google-t5/", "google/") if hub_id.startswith(owner)), hub_id)
    if os.path.isdir(name) or name in BUNDLED:
        folder = data_folder() / BUNDLED[name] if name in BUNDLED else Path(name)
    elif (size := hub_id.removeprefix(owner)) in RANDOM_SIZES:
        return decoder_weights_per_step(T5Dims.from_config(RANDOM_SIZES[size], name))
    elif "/" not in hub_id or owner == "random:":
        raise UnknownModelError(f"No model {name!r}. {allowed_names()}")
    elif (folder := hub_snapshot(name)) is None:
        return None
    config = read_json_object(folder / "config.json", ModelUnavailableError)
    return decoder_weights_per_step(T5Dims.from_config(config, name))


def _size(model: str) -> float:
    try:
        return weights_per_step(model) or math.nan
    except T5AccelError:  # a folder of another machine, for one
        return math.nan


def _recorded(places: Iterable[str | os.PathLike[str]]) -> Iterator[Found]:
    for place in map(Path, places):
        if not place.exists():
            raise InputError(f"No results at {place}: `t5accel bench --json {place}` writes some.")
        for file in sorted(place.glob("*.json")) if place.is_dir() else [place]:
            try:
                content = read_json_object(file, InputError)
                for number, row in enumerate(content["rows"]):
                    yield Found(row, file.name, number, content)
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{file} is no file of results ({error!r}); `t5accel bench` writes some.") from error


def _is_current(row: Row) -> bool:
    """Whether its recipe is still what this package means by the name."""
    name = row.get("precision")
    return name in RECIPES and row.get("recipe_hash") == RECIPES[name].hash


def _is_evidence(found: Found, need: Need) -> bool:
    row, on_gpu = found.row, bool(found.about["machine"].get("gpu"))
    return (
        row.get("system") in SYSTEMS and row.get("reference") in (REFERENCE, PEERS_REFERENCE) and "latency_s" in row
        and _is_current(row) and (row["precision"] != "fp32" or row.get("equal") == row.get("of"))
        and on_gpu == (need.device == "cuda") and (row["beams"] == 1) == (need.beams == 1)
    )  # fmt: skip


def _losses(need: Need, record: Sequence[Found]) -> dict[str, dict[str, float]]:
    """From the first file that scored a recipe, and fp32, on this very model and on the whole sets."""
    scored: dict[tuple[str, str], Row] = {}
    for found in record:
        row = found.row
        is_own = row.get("model") == need.model and row.get("system", "fp32") in SYSTEMS and "quality_of" not in row
        if is_own and _is_current(row) and {*METRICS.values()} <= row.keys() and "limit" not in row:
            scored.setdefault((found.file, row["precision"]), row)
    losses = {"fp32": dict.fromkeys(need.limits, 0.0)}
    for (file, precision), row in scored.items():
        if whole := scored.get((file, "fp32")):
            losses.setdefault(precision, {name: whole[name] - row[name] for name in need.limits})
    return losses


def _passes(need: Need, precision: str, losses: Mapping[str, Mapping[str, float]]) -> bool:
    if need.matters == "quality" and not need.max_loss:  # that no score fell is no proof where tokens change
        return precision == "fp32"
    if precision not in losses:
        return need.model.startswith("random:")  # which has nothing to lose
    return all(losses[precision][name] <= most for name, most in need.limits.items())


def _is_beside(found: Found, need: Need, precision: str) -> bool:
    row = found.row
    if row.get("precision") != precision or not _is_current(row) or "ratio" not in row:
        return False
    is_draft = row.get("reference") == "greedy" and row["system"] != "greedy" and row["model"] == need.model
    return (row.get("made_from") == need.model and "bundled" in row) or (
        is_draft and row["encoder"] == "included" and need.task in (None, row["task"]) and need.beams == 1
    )


def line(need: Need, precision: str) -> str:
    """The line of Python that makes the model.

    >>> print(line(Need("mini", threads=4), "int8-dynamic"))
    model = accelerate("mini", precision="int8", tuned_for="throughput", threads=4)
    """
    tuned = {own: f'"{of}", tuned_for="{what}"' for what, others in TUNED_FOR.items() for of, own in others.items()}
    how = "" if precision == "fp32" else f", precision={tuned.get(precision, json.dumps(precision))}"
    threads = "" if need.threads is None else f", threads={need.threads}"
    return f"model = accelerate({json.dumps(need.model, ensure_ascii=False)}{how}{threads})"


def call(need: Need, row: Row) -> str:
    """The call that was measured: our own loops skip what ``generate()`` keeps account of."""
    if "generate()" in row["system"]:
        return f"model.generate(**batch, num_beams={need.beams}, do_sample=False)"
    search, beams = ("beam_search", f", num_beams={need.beams}") if need.beams > 1 else ("greedy", "")
    return f'{search}(model.backend, batch["input_ids"], batch["attention_mask"]{beams}).sequences'


def report(advice: Advice, *, explain: bool = False) -> str:
    """The advice as text of at most 15 lines; with ``explain`` all that was compared, below them.

    >>> print(report(advise(Need("mini"))).splitlines()[0])
    mini, all tasks, for latency: batch 1, greedy, 64 source and 64 new tokens, on cpu
    """
    need, best = advice.need, advice.recommended
    lines = [f"{need.model}, {need.task or 'all tasks'}, for {need.matters}: {_work(vars(need))}, on {need.device}"]
    differing = [f"{name} {factor:.2g} times" for name, factor in advice.far.items() if factor != 1]
    if best is None:
        lines.append(
            "No recommendation: " + (
                "no measured configuration is inside the limits and faster than transformers." if advice.run else
                f"the nearest run that is recorded is too far, with {', '.join(differing)} yours." if differing else
                f"nothing that is recorded says anything about it (beams {need.beams}, {need.device})."
            )
        )  # fmt: skip
    else:
        row = best.row
        low, high = min(row["ratio_samples"]), max(row["ratio_samples"])
        lines += [
            f"Recommended: {row['precision']}. {row['ratio']:.2f} times ({low:.2f}–{high:.2f}) as fast as transformers "
            "with its cache",
            f"  {line(need, row['precision'])}", f"  {call(need, row)}", f"Rests on {best}:",
            f"  {row['model']}, {_work(row)}, {row['threads']} threads; {row['system']}",
            f"Quality: {_lost(advice, row)}",
        ]  # fmt: skip
    lines += [f"Not measured: {text}" for text in _not_measured(advice, differing)]
    if best and not explain:
        lines.append("--explain shows what it was chosen from.")
    return "\n".join([*lines, *(_explained(advice) if explain else [])])


def _work(row: Mapping[str, Any]) -> str:
    beams = "greedy" if row["beams"] == 1 else f"{row['beams']} beams"
    return f"batch {row['batch']}, {beams}, {row['source_tokens']} source and {row['new_tokens']} new tokens"


def _lost(advice: Advice, row: Row) -> str:
    losses = advice.losses.get(row["precision"])
    if row["precision"] == "fp32":
        return "the same tokens"
    if losses is None:
        return "never scored on this model"
    return ", ".join(f"{LABELS[name]} {round(-lost, 1) + 0.0:+.1f}" for name, lost in losses.items()) + " against fp32"


def _not_measured(advice: Advice, differing: Sequence[str]) -> Iterator[str]:
    need, best, here = advice.need, advice.recommended, machine.facts(gpu=False)
    if best is None:
        return
    if differing:
        yield f"your case itself; the run has {', '.join(differing)} yours"
    if not same_machine(best.about["machine"], here):
        yield f"this machine ({here['cpu']}, {here['usable_threads']} threads): ratios differ between machines"
    if need.threads not in (None, best.row["threads"]):
        yield f"{need.threads} threads"
    ahead = advice.run[: advice.run.index(best)]
    unknown = [found.row for found in ahead if found.row["precision"] not in advice.losses]
    if unknown and not need.model.startswith("random:") and need.matters != "quality":
        yield (
            f"the quality of {unknown[0]['precision']} on this model, at {unknown[0]['ratio']:.2f} times the speed: "
            "take it if `quantize(…, score=text_quality(), max_loss=…)` lets it pass"
        )


def _explained(advice: Advice) -> Iterator[str]:
    if advice.run:
        cells = [("", "configuration", "ratio", "MB", "peak MB", "row", "quality")]
        for found in advice.run:
            row = found.row
            mark = "*" if found is advice.recommended else "" if found in advice.allowed else "no"
            sizes = [f"{row[key] / 1e6:.0f}" if key in row else "–" for key in ("size_bytes", "peak_memory_bytes")]
            name = f"{row['precision']}, {'generate()' if 'generate()' in row['system'] else 'our loop'}"
            cells.append((mark, name, f"{row['ratio']:.2f}x", *sizes, str(found.number), _lost(advice, row)))
        yield from ("", f"All of {advice.run[0].file} in that run (*: recommended, no: loses too much, or unknown)")
        yield from aligned(cells, left={0, 1, 6})
    for found in advice.beside:
        row = found.row
        what = f"smaller model {row['bundled']}" if "bundled" in row else f"{row['system']} on {row['task']}"
        of = f"{row['equal']} of {row['of']} answers equal; " if "of" in row else ""
        yield f"Beside it: {what}, batch {row['batch']}: {row['ratio']:.2f} times {row['reference']}; {of}{found}"
