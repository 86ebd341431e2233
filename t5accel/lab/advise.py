"""Which configuration for a model and a need: chosen from measured rows, each of them named; nothing is calculated.

Ratios are ranked within one run and nowhere else. So the run that is nearest to the need is found first, and its
configurations are the candidates. How far it is from the need is part of the advice, and beyond a factor of 8 in any
direction there is none.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from t5accel import machine
from t5accel.advice.evidence import Draft, Record, Relative, Scores, Source, Speed
from t5accel.advice.model_size import weights_per_step
from t5accel.advice.need import Distance, Need
from t5accel.advice.recorded import read_record
from t5accel.checkpoints import data_folder
from t5accel.errors import T5AccelError
from t5accel.timing import Ratio

# What is known of a candidate's quality on this very model.
SAME, WITHIN, TOO_MUCH, UNKNOWN, RANDOM = (
    "same tokens", "within the limit", "loses too much", "not measured", "random weights"
)  # fmt: skip
ALLOWED = (SAME, WITHIN, RANDOM)


@dataclass(frozen=True)
class Candidate:
    """A configuration, as it was measured in a run.

    Attributes:
        quality: one of `SAME`, `WITHIN`, `TOO_MUCH`, `UNKNOWN` and `RANDOM`.
        losses: scores in fp32 minus its own, on this model; ``None`` where they were not measured.
        scored_in: the row that says so.
        bytes_on_disk, peak_memory_bytes: of the model that was measured, from this row or another one of its recipe
            (the peak: of equal work, too).
    """

    speed: Speed
    quality: str
    losses: Mapping[str, float] | None = None
    scored_in: Source | None = None
    bytes_on_disk: int | None = None
    peak_memory_bytes: int | None = None

    @property
    def allowed(self) -> bool:
        return self.quality in ALLOWED

    @property
    def worst_loss(self) -> float:
        """The largest loss; what is gained is chance and counts as nothing."""
        return max([0.0, *(self.losses or {}).values()])


@dataclass(frozen=True)
class Advice:
    """What is recommended, and what it rests on.

    Attributes:
        weights: that a step of the model reads; ``None``: unknown, so no run can be near.
        distance: of the run that all ``candidates`` are from; ``None`` where none fits.
        candidates: best first, by what matters. ``apart``: configurations that only other runs have.
        recommended: ``None`` where nothing is allowed, fits, or is faster than transformers.
        tied: candidates that were not slower than the recommended one in each round.
        if_gated: better than the recommended one, of a quality that nobody measured on this model.
        nearest: the run that is nearest, where none fits.
        drafts, relatives: guessing and smaller models, each against the recommended recipe alone.
    """

    need: Need
    weights: int | None
    here: Mapping[str, Any]
    record: Record
    distance: Distance | None = None
    candidates: tuple[Candidate, ...] = ()
    recommended: Candidate | None = None
    tied: tuple[Candidate, ...] = ()
    if_gated: Candidate | None = None
    apart: tuple[tuple[Candidate, Distance], ...] = ()
    nearest: tuple[Speed, Distance] | None = None
    drafts: tuple[Draft, ...] = ()
    relatives: tuple[Relative, ...] = ()


def recommend(need: Need, *, results: Iterable[str | os.PathLike[str]] = (), measure: bool = False) -> Advice:
    """Advice from the results that come with the package, from more files or folders, and from measuring now.

    Raises:
        InputError: a place of results is missing or damaged; or ``measure`` with beams or another device.
        UnknownModelError, ModelUnavailableError, NotT5Error: there is no such model, or it has no sizes.

    >>> from t5accel.advice.need import Need
    >>> advice = recommend(Need("mini", task="translation"))
    >>> advice.recommended.allowed, advice.distance.fits
    (True, True)
    """
    weights_per_step(need.model)  # what is no model is refused before anything is read or measured
    record = read_record([data_folder() / "results", *results])
    if measure:
        from t5accel.advice.measure_now import measure_now

        record += measure_now(need)  # which may bring a configuration from the hub
    return advise(need, record, weights=weights_per_step(need.model), here=machine.facts(gpu=False))


def advise(
    need: Need, record: Record, *, weights: int | None, here: Mapping[str, Any],
    size_of: Callable[[str], int | None] = weights_per_step,
) -> Advice:  # fmt: skip
    """Advice from a record alone.

    Args:
        weights: decoder weights per step of the needed model. Without them only runs of this very model count.
        here: `machine.facts` of the machine that the advice is for.
        size_of: the same number for the models that were measured.

    >>> from t5accel.advice.need import Need
    >>> advise(Need(), Record(), weights=1000, here={}).recommended is None
    True
    """
    sizes: dict[str, int | None] = {need.model: weights}
    for model in {speed.setting.model for speed in record.of(Speed)} - sizes.keys():
        sizes[model] = _size(size_of, model)
    known = [
        (speed, _distance(need, speed, sizes))
        for speed in record.of(Speed)
        if need.device == "cpu" and (speed.setting.beams == 1) == (need.beams == 1)  # greedy search is no beam search
        and (speed.setting.model == need.model or weights and sizes[speed.setting.model])
    ]  # fmt: skip
    advice = Advice(need, weights, here, record)
    fitting = [(speed, distance) for speed, distance in known if distance.fits]
    if not fitting:
        nearest = min(known, key=lambda one: one[1].doublings, default=None)
        return replace(advice, nearest=nearest)
    runs: dict[Any, list[Speed]] = {}
    for speed, _ in fitting:
        runs.setdefault(_run(speed), []).append(speed)
    distances = {_run(speed): distance for speed, distance in fitting}

    def preference(run: Any) -> tuple[Any, ...]:
        first, distance = runs[run][0], distances[run]
        here_too = first.source.fresh or same_machine(first.source.machine, here)
        return (not distance.is_near, not first.source.fresh, not here_too, distance.doublings, -len(runs[run]), run[0])

    order = sorted(runs, key=preference)
    measured = [_candidate(need, speed, record) for speed in runs[order[0]]]
    chosen = sorted(measured, key=lambda one: _rank(need, one, measured))
    recommended, tied = _best(need, chosen)
    there = {(one.speed.recipe, one.speed.loop) for one in chosen}
    apart = []
    for run in order[1:]:
        for speed in runs[run]:
            if (speed.recipe, speed.loop) not in there:
                there.add((speed.recipe, speed.loop))
                apart.append((_candidate(need, speed, record), distances[run]))
    drafts, relatives = _beside(advice, recommended)
    return replace(
        advice, distance=distances[order[0]], candidates=tuple(chosen), recommended=recommended, tied=tied,
        if_gated=_better_if_gated(need, chosen, recommended), apart=tuple(apart), drafts=drafts, relatives=relatives,
    )  # fmt: skip


def same_machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two machines are alike in processor, instructions and threads, as far as `machine.facts` tells.

    >>> same_machine({"cpu": "A", "usable_threads": 2}, {"cpu": "A", "usable_threads": 4})
    False
    """
    return all(one.get(name) == other.get(name) for name in ("cpu", "usable_threads", "cpu_flags"))


def beats(one: Ratio, other: Ratio) -> bool:
    """Whether it was the faster one in every round of the run that they share.

    >>> from t5accel.timing import Ratio
    >>> beats(Ratio((3.0, 4.0), 3.5, 3.0, 4.0), Ratio((2.0, 5.0), 3.5, 2.0, 5.0))
    False
    """
    return all(mine > theirs for mine, theirs in zip(one.samples, other.samples, strict=True))


def _size(size_of: Callable[[str], int | None], model: str) -> int | None:
    try:
        return size_of(model)
    except T5AccelError:  # a folder of another machine, for one
        return None


def _run(speed: Speed) -> Any:
    return (speed.source.file, speed.source.fresh, speed.setting)


def _what(speed: Speed) -> Any:
    return (speed.setting.model, speed.recipe, speed.loop)


def _distance(need: Need, speed: Speed, sizes: Mapping[str, int | None]) -> Distance:
    names = ("batch", "beams", "source_tokens", "new_tokens")
    work = {name: getattr(speed.setting, name) / getattr(need, name) for name in names}
    model = speed.setting.model
    return Distance(model_size=1.0 if model == need.model else sizes[model] / sizes[need.model], **work)


def _candidate(need: Need, speed: Speed, record: Record) -> Candidate:
    alike = [speed, *(one for one in record.of(Speed) if _what(one) == _what(speed))]
    disk = [one.bytes_on_disk for one in alike]
    peaks = [one.peak_memory_bytes for one in alike if one.setting == speed.setting]  # batch and lengths decide it
    sizes = [next((size for size in found if size is not None), None) for found in (disk, peaks)]
    return Candidate(speed, *_quality(need, speed.recipe, record), *sizes)


def _quality(need: Need, recipe: str, record: Record) -> tuple[str, dict[str, float] | None, Source | None]:
    limits = need.limits
    if recipe == "fp32":
        return SAME, dict.fromkeys(limits, 0.0), None
    if need.model.startswith("random:"):
        return RANDOM, None, None
    scores = [one for one in record.of(Scores) if one.model == need.model]
    whole = {one.source.file: one for one in scores if one.recipe == "fp32"}  # scores of one file belong together
    for one in scores:
        if one.recipe == recipe and one.source.file in whole:
            losses = {name: whole[one.source.file].values[name] - one.values[name] for name in limits}
            passes = all(losses[name] <= limits[name] for name in limits)
            return WITHIN if passes else TOO_MUCH, losses, one.source
    return UNKNOWN, None, None


def _rank(need: Need, one: Candidate, all_of_them: Sequence[Candidate]) -> tuple[float, ...]:
    """Less is better."""
    if need.matters != "memory":
        return (-one.speed.ratio.median,)
    have_peaks = all(other.peak_memory_bytes is not None for other in all_of_them)
    size = one.peak_memory_bytes if have_peaks else one.bytes_on_disk
    return (math.inf if size is None else size, -one.speed.ratio.median)


def _best(need: Need, ranked: Sequence[Candidate]) -> tuple[Candidate | None, tuple[Candidate, ...]]:
    """The best one that is allowed, and those that it cannot be told apart from."""
    if need.matters == "memory":
        return next((one for one in ranked if one.allowed), None), ()
    allowed = [one for one in ranked if one.allowed and one.speed.ratio.median > 1]
    if need.matters == "quality" and not need.max_loss:  # that no score fell is no proof where tokens change
        allowed = [one for one in allowed if one.quality == SAME] or allowed
    if not allowed:
        return None, ()
    level = [one for one in allowed if one is allowed[0] or not beats(allowed[0].speed.ratio, one.speed.ratio)]
    best = min(level, key=lambda one: (one.worst_loss, one.bytes_on_disk or math.inf, -one.speed.ratio.median))
    return best, tuple(one for one in level if one is not best)


def _better_if_gated(need: Need, ranked: Sequence[Candidate], best: Candidate | None) -> Candidate | None:
    ahead = ranked[: ranked.index(best)] if best else ranked
    worth = [one for one in ahead if need.matters == "memory" or one.speed.ratio.median > 1]
    return next((one for one in worth if one.quality == UNKNOWN), None)


def _beside(advice: Advice, best: Candidate | None) -> tuple[tuple[Draft, ...], tuple[Relative, ...]]:
    """Guessing, at the nearest batch for each task, and smaller models, all in the recommended recipe."""
    if best is None:
        return (), ()
    need, recipe = advice.need, best.speed.recipe
    wanted = [
        one for one in advice.record.of(Draft)
        if (one.model, one.recipe) == (need.model, recipe) and need.task in (None, one.task) and need.beams == 1
    ]  # fmt: skip
    nearest: dict[Any, Draft] = {}
    for one in sorted(wanted, key=lambda one: -abs(math.log2(one.batch / need.batch))):
        nearest[one.task, one.system] = one
    relatives = [one for one in advice.record.of(Relative) if (one.whole, one.recipe) == (need.model, recipe)]
    return tuple(nearest.values()), tuple(relatives)
