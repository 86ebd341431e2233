"""Climb a ladder: each rung proven, then all timed interleaved in one run, with bytes, memory and quality beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from t5accel import machine, quality
from t5accel.bench import memory_alone
from t5accel.decoding.text import text_to_text
from t5accel.decoding.tokenizer_file import TokenizerFile
from t5accel.errors import InputError
from t5accel.ladder import WAYS, Job, Rung
from t5accel.techniques import Generate, Subject
from t5accel.timing import Candidate, Ratio, Work, compare

GATE = dict.fromkeys(quality.MAIN_SCORES, 1.0)  # how many points of a score a rung may lose
LONGEST = 64  # tokens of an answer that is scored


def climb(
    rungs: Sequence[Rung], job: Job, *, model: str, ladder: str = "", rounds: int = 3, threads: int | None = None,
    max_loss: Mapping[str, float] = GATE, limit: int | None = None, peak_memory: bool = True,
    on_rung: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each rung: its time, its factor over the rung below, its ratio to the first, bytes, memory, quality.

    A rung in fp32 has to give the first one's tokens. The others are scored, each by its own way of generating, where
    the model has a tokenizer; ``inside`` says whether they lose no more than ``max_loss``, and is ``None`` where
    nothing was scored. All are timed interleaved, a whole job each.

    Args:
        rungs: the first one is what all are compared with; each stands on one before it.
        job: what every rung does.
        model: of the ladder, as `checkpoints.load_t5` knows it.
        ladder: what the rows call it; by default the model.
        rounds: of the timing.
        threads: of torch and ONNX Runtime; by default those that this process may use.
        max_loss: points that a rung may lose, by the names of `quality.MAIN_SCORES`; others are not looked at.
        limit: rows of each length bucket or half that are scored; by default all, and with 0 none.
        peak_memory: measure it too, each rung in a process of its own.
        on_rung: is called with the name of each rung that was built and checked.

    Raises:
        InputError: the rungs are no ladder, the first one's answers do not vary, or ``max_loss`` names no score.
        ParityError: a rung in fp32 gives other tokens than the first; nothing is timed then.

    >>> from t5accel.ladder import Natural, natural_rungs
    >>> rungs = [rung for rung in natural_rungs() if rung.name in ("naive", "cache")]
    >>> rows = climb(rungs, Natural(texts=1), model="mini", rounds=1, limit=0, peak_memory=False)
    >>> [row["rung"] for row in rows], rows[1]["equal"], rows[1]["factor"] == rows[1]["ratio"]
    (['naive', 'cache'], 1, True)
    """
    import torch

    _require_a_ladder(rungs, max_loss)
    threads = threads or machine.cpu_threads()
    torch.set_num_threads(threads)
    subjects = {name: Subject(name, 0, threads) for name in {model, *(rung.model or model for rung in rungs)}}
    first = rungs[0]
    generators: dict[str, Generate] = {}
    runs: dict[str, Callable[[], np.ndarray]] = {}
    tokens: dict[str, np.ndarray] = {}
    for rung in rungs:
        subject = subjects[rung.model or model]
        generators[rung.name] = rung.technique.build(subject)
        runs[rung.name] = partial(job.answering(subject), generators[rung.name], rung.batch)
        tokens[rung.name] = runs[rung.name]()  # this also warms it up
        if rung is first:
            quality.assert_varied(tokens[first.name])
        elif rung.is_exact:
            quality.parity(tokens[rung.name], tokens[first.name], atol=0)
        if on_rung is not None:
            on_rung(rung.name)

    counts = {name: own.size if job.is_forced else np.count_nonzero(own) for name, own in tokens.items()}
    texts, source = len(tokens[first.name]), job.longest_source(subjects[model])
    work = Work(texts, source, counts[first.name] // texts, threads=threads, forced_length=job.is_forced)
    timed = compare(*(_candidate(name, run, work) for name, run in runs.items()), warmup=0, rounds=rounds)

    exact = [rung for rung in rungs if rung.is_exact and rung.batch == 1]
    scored = limit != 0 and subjects[model].tokenizer is not None
    # Equal tokens have equal scores, so those of the fastest way are everybody's.
    expected = _scores(generators[exact[-1].name], subjects[model], 1, limit) if scored else None
    rows = []
    for rung in rungs:
        subject, samples = subjects[rung.model or model], timed.latencies[rung.name].samples_s
        below = timed.latencies[rung.on].samples_s if rung.on else samples
        generate, own = generators[rung.name], tokens[rung.name]
        scores = expected if rung.is_exact or not scored else _scores(generate, subject, rung.batch, limit)
        base, peak = _memory(rung, job, subject) if peak_memory else (None, None)
        rows.append({
            "measured": "ladder", "ladder": ladder or model, "rung": rung.name, "adds": rung.adds, "on": rung.on,
            "technique": rung.technique.name, "model": rung.model or model, "recipe": rung.technique.recipe.name,
            "hash": rung.technique.recipe.hash, "batch": rung.batch, "texts": texts, "forced": job.is_forced,
            "source_tokens": source, "new_tokens": int(counts[rung.name]), "threads": threads,
            "latency_s": list(samples), "ms_per_text": median(samples) / texts * 1e3,
            "tokens_per_s": float(counts[rung.name] / median(samples)),
            "factor": _ratio(below, samples), "ratio": _ratio(timed.latencies[first.name].samples_s, samples),
            "size_bytes": rung.technique.bytes_on_disk(subject), "base_memory_bytes": base, "peak_memory_bytes": peak,
            "exact": rung.is_exact, "equal": int((own == tokens[first.name]).all(axis=1).sum()),
            "agreement": quality.token_agreement(own, tokens[first.name], pad_token_id=0),
            **judged(scores, expected, max_loss, exact=rung.is_exact),
        })  # fmt: skip
    return rows


def judged(
    scores: Mapping[str, float] | None, expected: Mapping[str, float] | None, max_loss: Mapping[str, float],
    *, exact: bool,
) -> dict[str, Any]:  # fmt: skip
    """The part of a row that says how good a rung is, and whether it is inside the gate.

    >>> judged({"bleu": 28.0}, {"bleu": 28.6}, {"bleu": 0.5}, exact=False)["inside"]
    False
    >>> judged(None, None, {"bleu": 0.5}, exact=True)
    {'quality': None, 'lost': None, 'max_loss': {'bleu': 0.5}, 'inside': True}
    """
    if scores is None or expected is None:
        return {"quality": None, "lost": None, "max_loss": dict(max_loss), "inside": True if exact else None}
    lost = {name: expected[name] - score for name, score in scores.items()}
    inside = all(lost[name] <= most for name, most in max_loss.items())
    return {"quality": dict(scores), "lost": lost, "max_loss": dict(max_loss), "inside": inside}


def with_quality_of(
    rows: Sequence[Mapping[str, Any]], scored: Sequence[Mapping[str, Any]], *, max_loss: Mapping[str, float] = GATE
) -> list[dict[str, Any]]:
    """The rows, each with the quality of the same recipe on another ladder's model, and how it stands in a gate.

    For random weights, which write nothing that could be scored: the recipe is the same, by its hash, the model is not,
    and ``quality_of`` says whose quality it is. A recipe that was not scored there is left as it is.

    Args:
        rows: of `climb`.
        scored: rows of `climb` on a model with a tokenizer; those that only add a recipe are looked at.
        max_loss: as of `climb`.

    >>> whole = dict(technique="loop", hash="a", model="mini", batch=1, exact=True, quality={"bleu": 28.6})
    >>> coarse = dict(technique="int8", hash="b", model="mini", batch=1, exact=False, quality={"bleu": 28.0})
    >>> random = dict(technique="int8", hash="b", model="random:t5-small", exact=False)
    >>> row = with_quality_of([random], [whole, coarse], max_loss={"bleu": 0.5})[0]
    >>> row["quality_of"], row["inside"]
    ('mini', False)
    """
    exact = next((row for row in scored if row["exact"] and row["quality"]), None)
    if exact is None:
        return [dict(row) for row in rows]
    found = {
        (row["technique"], row["hash"]): row for row in scored
        if row["model"] == exact["model"] and row["batch"] == 1 and row["quality"]
    }  # fmt: skip
    changed = []
    for row in rows:
        own = exact if row["exact"] else found.get((row["technique"], row["hash"]))
        if own is not None:
            judgement = judged(own["quality"], exact["quality"], max_loss, exact=row["exact"])
            row = {**row, **judgement, "quality_of": own["model"]}
        changed.append(dict(row))
    return changed


def _require_a_ladder(rungs: Sequence[Rung], max_loss: Mapping[str, float]) -> None:
    names = [rung.name for rung in rungs]
    if len(rungs) < 2 or len({*names}) < len(names):
        raise InputError(f"The rungs are {names}: give two or more, each name once.")
    if rungs[0].on is not None or not rungs[0].is_exact:
        raise InputError(f"The first rung, {names[0]!r}, has to be in fp32, of the ladder's model, and on no other.")
    for place, rung in enumerate(rungs[1:], start=1):
        if rung.on not in names[:place]:
            raise InputError(f"{rung.name!r} is on {rung.on!r}; it has to stand on one of {names[:place]}.")
    if unknown := sorted({*max_loss} - {*quality.MAIN_SCORES}):
        raise InputError(f"max_loss names {unknown[0]!r}; the scores are {', '.join(quality.MAIN_SCORES)}.")


def _candidate(name: str, run: Callable[[], np.ndarray], work: Work) -> Candidate:
    """At natural length integers may write other tokens, so only forced work is checked while it is timed."""

    def timed() -> Work | None:
        out = run()
        return replace(work, batch=len(out), new_tokens=out.shape[1]) if work.forced_length else None

    return Candidate(name, timed, work)


def _ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    return Ratio.of([there / here for there, here in zip(above, below, strict=True)]).to_json()


def _scores(generate: Generate, subject: Subject, batch: int, limit: int | None) -> dict[str, float]:
    """Of the bundled sets, so many texts answered at once."""
    tokenizer = TokenizerFile(subject.export())
    texts = text_to_text(tokenizer, lambda ids, mask: generate(ids, mask, 0, LONGEST))
    return quality.main_scores(quality.evaluate(texts, batch_size=batch, limit=limit).to_json())


def _memory(rung: Rung, job: Job, subject: Subject) -> tuple[int | None, int | None]:
    given = (rung.technique.name, rung.batch, job.once(rung.batch), subject.name, subject.threads)
    return memory_alone(rung.technique.libraries, subject.threads, _do_once, *given)


def _do_once(technique: str, batch: int, job: Job, model: str, threads: int) -> None:
    subject = Subject(model, 0, threads)
    job.answering(subject)(WAYS[technique].build(subject), batch)
