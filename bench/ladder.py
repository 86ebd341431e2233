"""Ladders from the naive loop to the fastest system; each rung adds one idea."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from bench import evaluation
from bench.harness import ratio, run_comparison
from bench.precision import generated_scores
from bench.results import Row
from bench.scoreboard import Job, as_contender, sizes
from bench.systems import LOOKUP, SYSTEMS, THEIR_LOOP, THROUGHPUT, BenchModel, Generate, System
from t5accel import machine
from t5accel.checks import as_count
from t5accel.errors import InputError
from t5accel.tokenization import TokenizerFile

MODEL, STUDENT = "mini", "mini-d1"
AT_ONCE = 32  # texts of a batch, where many are answered together
GATE = dict.fromkeys(evaluation.MAIN_SCORES, 1.0)  # how many points of a score a rung may lose
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Rung:
    """A way of generating, and the rung that it adds an idea to."""

    name: str  # of this rung, once in a ladder
    adds: str  # the idea, in a few words
    on: str | None  # the name of the rung that it is added to; ``None`` for the first one
    system: System
    model: str | None = None  # another than the ladder's, with the same tokenizer
    batch: int = 1  # texts that are answered at once. More than one is throughput: the first answer comes with the last

    def __post_init__(self) -> None:
        as_count(self.batch, "batch", at_least=1)

    @property
    def is_exact(self) -> bool:
        """Whether it has to give the first rung's tokens."""
        return self.system.recipe.name == "fp32" and self.model is None


_LOOP, _INT8 = "ONNX Runtime, our loop", SYSTEMS["ONNX Runtime, our loop, int8"]
_BELOW = (
    Rung("naive", "the naive loop", None, SYSTEMS["transformers without cache"]),
    Rung("cache", "a cache of keys and values", "naive", SYSTEMS["transformers with cache"]),
    Rung("onnx", "our graphs, ONNX Runtime", "cache", THEIR_LOOP),
    Rung("loop", "our own loop", "onnx", SYSTEMS[f"{_LOOP}, all logits"]),
)


def forced_rungs() -> tuple[Rung, ...]:
    """For random weights at a published size: no student, nothing to look up, one text at once.

    >>> [rung.name for rung in forced_rungs()]
    ['naive', 'cache', 'onnx', 'loop', 'shortlist', 'bound', 'fused', 'int8', 'int4']
    """
    return (
        *_BELOW,
        Rung("shortlist", "a shortlist for the head", "loop", SYSTEMS[f"{_LOOP}, numpy feeds"]),
        Rung("bound", "bound buffers", "shortlist", SYSTEMS[f"{_LOOP}, bound"]),
        Rung("fused", "a fused step, buffers that stay", "shortlist", SYSTEMS[f"{_LOOP}, fused step"]),
        Rung("int8", "8 bits", "fused", _INT8),
        Rung("int4", "4 bits in place of 8", "int8", SYSTEMS[f"{_LOOP}, int4"]),
    )


def natural_rungs() -> tuple[Rung, ...]:
    """For the bundled model and real texts; first those of latency, then those that answer many texts at once."""
    return (
        *_BELOW,
        Rung("fused", "a fused step, buffers that stay", "loop", SYSTEMS[f"{_LOOP}, fused step"]),
        Rung("int8", "8 bits", "fused", _INT8),
        Rung("int4", "4 bits in place of 8", "int8", SYSTEMS[f"{_LOOP}, int4"]),
        Rung("lookup", "drafts copied from the source", "int8", LOOKUP),
        Rung("student", "a student", "int8", _INT8, STUDENT),
        Rung("student, lookup", "drafts, with the student", "student", LOOKUP, STUDENT),
        Rung("naive, batches", f"{AT_ONCE} texts at once, naive", "naive", _BELOW[0].system, batch=AT_ONCE),
        Rung("batches", f"{AT_ONCE} texts at once", "int8", _INT8, batch=AT_ONCE),
        Rung("dynamic, batches", "8 bits tuned for throughput", "batches", THROUGHPUT, batch=AT_ONCE),
        Rung("student, batches", "a student, in batches", "dynamic, batches", THROUGHPUT, STUDENT, AT_ONCE),
    )


def climb(
    rungs: Sequence[Rung], job: Job, *, model: str, ladder: str = "", rounds: int = 3, threads: int | None = None,
    max_loss: Mapping[str, float] = GATE, limit: int | None = None, peak_memory: bool = True,
    on_rung: Callable[[str], None] | None = None,
) -> list[Row]:  # fmt: skip
    """A row for each rung: time, factor over the rung below, ratio to the first, bytes, memory, quality.

    An fp32 rung must give the first one's tokens. The others are scored, each by its own way of generating, where the
    model has a tokenizer; then ``inside`` says whether they lose no more than ``max_loss``. All are timed interleaved,
    a whole job each.

    Args:
        rungs: the first one is the reference; each other stands on one before it.
        max_loss: points that a rung may lose, by the names of `evaluation.MAIN_SCORES`.
    """
    import torch

    _require_a_ladder(rungs, max_loss)
    threads = threads or machine.cpu_threads()
    torch.set_num_threads(threads)
    subjects = {name: BenchModel(name, 0, threads) for name in {model, *(rung.model or model for rung in rungs)}}
    answers = {name: job.answers(subject) for name, subject in subjects.items()}
    generators: dict[str, Generate] = {}
    ways = []
    for rung in rungs:
        own = rung.model or model
        ways.append(as_contender(rung.system, rung.name, subjects[own], answers[own], rung.batch, generators,
                           exact=rung.is_exact))  # fmt: skip
    work = job.work(subjects[model])
    rows = run_comparison(ways, work, rounds=rounds, on_built=on_rung, cell=ladder or model, texts=work.batch)

    exact = [rung for rung in rungs if rung.is_exact and rung.batch == 1]
    scored = limit != 0 and subjects[model].tokenizer is not None
    # Equal tokens have equal scores: the fastest exact rung is scored for all.
    expected = _scores(generators[exact[-1].name], subjects[model], 1, limit) if scored else None
    times = {row["system"]: row["latency_s"] for row in rows}
    for rung, row in zip(rungs, rows, strict=True):
        own = rung.model or model
        found = expected
        if scored and not rung.is_exact:
            found = _scores(generators[rung.name], subjects[own], rung.batch, limit)
        row |= {
            "rung": rung.name, "system": rung.system.name, "reference": rungs[0].system.name, "adds": rung.adds,
            "model": own, "batch": rung.batch, **ratio(times[rung.on or rung.name], times[rung.name], "factor"),
            **sizes(rung.system, subjects[own], job.once(rung.batch).answers(subjects[own]), rung.batch,
                    peak_memory),
            **judged(found, expected, max_loss, exact=rung.is_exact),
        }  # fmt: skip
        if rung.on:
            row["on"] = rung.on
    return rows


def judged(found: Row | None, expected: Row | None, max_loss: Mapping[str, float], *, exact: bool) -> Row:
    """Quality of a rung, and whether it is inside the gate."""
    row: Row = {"exact": exact, "settings": {f"max_loss_{name}": most for name, most in max_loss.items()}}
    if found is not None and expected is not None:
        return {**row, **found, "inside": all(expected[name] - found[name] <= most for name, most in max_loss.items())}
    return {**row, "inside": True} if exact else row


def with_quality_of(rows: Rows, scored: Rows, *, max_loss: Mapping[str, float] = GATE) -> list[Row]:
    """The rows, each with the quality of the same recipe (by its hash) on another ladder's model.

    For random weights, whose outputs cannot be scored; ``quality_of`` names the scored model. A recipe that was not
    ``scored`` there stays as it is.
    """
    exact = next((row for row in scored if row["exact"] and "bleu" in row), None)
    if exact is None:
        return [dict(row) for row in rows]
    found = {
        (row["system"], row["recipe_hash"]): row for row in scored
        if row["model"] == exact["model"] and row["batch"] == 1 and "bleu" in row
    }  # fmt: skip
    changed = []
    for row in rows:
        own = exact if row["exact"] else found.get((row["system"], row["recipe_hash"]))
        if own is not None:
            own_scores, whole = ({n: one[n] for n in evaluation.MAIN_SCORES if n in one} for one in (own, exact))
            row = {**row, **judged(own_scores, whole, max_loss, exact=row["exact"]), "quality_of": own["model"]}
        changed.append(dict(row))
    return changed


def by_ladder(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each ladder, by its name."""
    return {cell: [row for row in rows if row["cell"] == cell] for cell in dict.fromkeys(row["cell"] for row in rows)}


def inside(rows: Rows, *, at_once: bool) -> list[Mapping[str, Any]]:
    """Rows inside the gate that answer many texts at once, or one at a time."""
    return [row for row in rows if row.get("inside") and (row["batch"] > 1) == at_once]


def fastest(rows: Rows, *, at_once: bool = False) -> Mapping[str, Any]:
    """The row of the highest ratio `inside` the gate; raises ``InputError`` without such a rung."""
    able = inside(rows, at_once=at_once)
    if not able:
        raise InputError(f"No rung of {[row['rung'] for row in rows]} is inside the gate with that batch.")
    return max(able, key=lambda row: row["ratio"])


def way_to(rows: Rows, rung: str) -> list[Mapping[str, Any]]:
    """The rows from the first rung to this one, each on the one before."""
    by_name = {row["rung"]: row for row in rows}
    way, name = [], rung
    while name is not None:
        if name not in by_name:
            raise InputError(f"rung must be one of {', '.join(map(repr, by_name))}, got {name!r}.")
        way.append(by_name[name])
        name = by_name[name].get("on")
    return way[::-1]


def account(rows: Rows, rung: str) -> str:
    """The factors on the way to a rung, their product, and the ratio that was measured between its ends."""
    steps = way_to(rows, rung)[1:]
    factors = [row["factor"] for row in steps]
    named = " x ".join(f"{factor:.2f} ({row['adds']})" for row, factor in zip(steps, factors, strict=True))
    end_to_end = steps[-1]["ratio"] if steps else 1.0
    return f"{named} = {prod(factors):.1f}; measured from end to end: {end_to_end:.1f} times"


def _require_a_ladder(rungs: Sequence[Rung], max_loss: Mapping[str, float]) -> None:
    names = [rung.name for rung in rungs]
    if len(rungs) < 2 or len({*names}) < len(names):
        raise InputError(f"rungs must be two or more with different names, got {names}.")
    if rungs[0].on is not None or not rungs[0].is_exact:
        raise InputError(f"rungs must begin with one in fp32, of the ladder's model, on no other, got {names[0]!r}.")
    for place, rung in enumerate(rungs[1:], start=1):
        if rung.on not in names[:place]:
            raise InputError(f"rungs must stand on one before them, got {rung.name!r} on {rung.on!r}.")
    if unknown := {*max_loss} - {*evaluation.MAIN_SCORES}:
        raise InputError(f"max_loss must name scores of {', '.join(evaluation.MAIN_SCORES)}, got {sorted(unknown)}.")


def _scores(generate: Generate, subject: BenchModel, batch: int, limit: int | None) -> Row:
    return generated_scores(generate, TokenizerFile(subject.export()), batch_size=batch, limit=limit)
