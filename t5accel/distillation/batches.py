"""Draw seeded examples, tokenise them and pack them into batches of equal cost.

The steps of a block follow from (seed, block number) alone, so a resumed run sees the batches it would have seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from t5accel.errors import InputError

Example = tuple[str, str]  # source, prefix included, and target
Draw = Callable[[random.Random], Example]
Encode = Callable[[list[str]], list[list[int]]]
Batch = tuple[list[list[int]], list[list[int]]]  # token ids of sources and of targets
TaskBatch = tuple[str, Batch]  # with the name of its task


@dataclass(frozen=True)
class Part:
    """One task's share of a step."""

    task: str
    tokens: int  # most per batch, padded encoder plus padded decoder tokens
    per_step: float = 1  # batches per step; 0.5 is one in every second step on average
    weight: float | None = None  # of a batch's mean loss against the other batches; None counts every label alike


@dataclass(frozen=True)
class Phase:
    """Parts of every step from ``from_step`` on: the first part once, the others ``per_step`` times."""

    from_step: int
    parts: tuple[Part, ...]
    dropout: float | None = None  # replaces the run's own

    def weights(self, batches: list[TaskBatch]) -> tuple[float, ...]:
        """One weight for each batch of a step; they sum to 1."""
        weight = {part.task: part.weight for part in self.parts}
        raw = [sum(map(len, targets)) if weight[task] is None else weight[task] for task, (_, targets) in batches]
        return tuple(value / sum(raw) for value in raw)


@dataclass(frozen=True)
class Mixture:
    """Examples by task, and the curriculum that mixes them."""

    examples: Mapping[str, Sequence[Example] | Draw]  # by task: a list to draw from, or a function that draws one
    curriculum: tuple[Phase, ...]  # from steps 0 < … , multiples of steps_per_block
    forbidden: frozenset[str] = frozenset()  # sources never trained on, such as those of the evaluation sets
    steps_per_block: int = 50
    by_teacher: bool = False  # the targets of lists were written by the teacher, as the loss "sequence" needs

    def __post_init__(self) -> None:
        starts = [phase.from_step for phase in self.curriculum]
        if starts[:1] != [0] or starts != sorted(set(starts)) or any(start % self.steps_per_block for start in starts):
            raise InputError(
                f"curriculum must have phases from 0 and rising multiples of {self.steps_per_block}, got {starts}."
            )

    def phase(self, step: int) -> Phase:
        """The phase that ``step`` belongs to."""
        return [phase for phase in self.curriculum if phase.from_step <= step][-1]

    def with_teacher_outputs(self, texts: Mapping[str, Sequence[Example]]) -> Mixture:
        """Replace the examples of these tasks by the teacher's outputs."""
        return replace(self, examples={**self.examples, **texts}, by_teacher=True)


def pack(sources: list[list[int]], targets: list[list[int]], tokens: int) -> list[Batch]:
    """Cut examples, sorted by length, into batches of at most ``tokens`` padded tokens (encoder + decoder).

    >>> [len(source) for source, _ in pack([[1]] * 4, [[1, 1]] * 4, tokens=6)]
    [2, 2]
    """
    order = sorted(range(len(sources)), key=lambda i: (len(sources[i]), len(targets[i])))
    batches: list[Batch] = []
    rows: list[int] = []
    longest_source = longest_target = 0
    for i in order:
        source = max(longest_source, len(sources[i]))
        target = max(longest_target, len(targets[i]))
        if rows and (source + target) * (len(rows) + 1) > tokens:
            batches.append(([sources[r] for r in rows], [targets[r] for r in rows]))
            rows = []
            source = len(sources[i])
            target = len(targets[i])
        rows.append(i)
        longest_source, longest_target = source, target
    if rows:
        batches.append(([sources[r] for r in rows], [targets[r] for r in rows]))
    return batches


def encode_and_pack(examples: Sequence[Example], encode: Encode, tokens: int) -> list[Batch]:
    """Tokenise examples and `pack` them."""
    return pack(encode([source for source, _ in examples]), encode([target for _, target in examples]), tokens)


def draw_batches(
    example: Callable[[], Example],
    encode: Encode,
    tokens: int,
    count: int,
    forbidden: frozenset[str],
    rng: random.Random,
) -> list[Batch]:
    """Draw ``count`` shuffled batches of one task, without ``forbidden`` sources.

    Raises ``InputError`` if all sources are forbidden.
    """
    batches: list[Batch] = []
    while len(batches) < count:
        examples = [e for e in (example() for _ in range(64 * count)) if e[0] not in forbidden]
        if not examples:
            raise InputError(f"All {64 * count} examples drawn are in the evaluation sets: give others.")
        batches += encode_and_pack(examples, encode, tokens)
    rng.shuffle(batches)
    return batches[:count]


def draw_block(mixture: Mixture, encode: Encode, seed: int, number: int) -> Iterator[list[TaskBatch]]:
    """Yield the steps of block ``number``: a batch of the phase's first part, and the others dealt out evenly."""
    rng = random.Random(f"{seed}/{number}")
    steps = mixture.steps_per_block
    first, *rest = mixture.phase(number * steps).parts

    def draw(part: Part) -> list[TaskBatch]:
        given = mixture.examples[part.task]
        example = partial(given, rng) if callable(given) else partial(rng.choice, given)
        batches = draw_batches(example, encode, part.tokens, round(steps * part.per_step), mixture.forbidden, rng)
        return [(part.task, batch) for batch in batches]

    leading = draw(first)
    others = [batch for part in rest for batch in draw(part)]
    rng.shuffle(others)
    for i, batch in enumerate(leading):
        yield [batch, *others[i::steps]]


def steps_from(mixture: Mixture, encode: Encode, seed: int, step: int) -> Iterator[list[TaskBatch]]:
    """Yield the batches of steps ``step``, ``step + 1``, … without end."""
    number, offset = divmod(step, mixture.steps_per_block)
    while True:
        yield from islice(draw_block(mixture, encode, seed, number), offset, None)
        number, offset = number + 1, 0
