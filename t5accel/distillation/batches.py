"""What a step of training is made of: examples drawn from a seed, tokenised, and packed into batches of equal cost.

A block of steps is a function of (seed, block number) alone: a run that was interrupted goes on with exactly the
batches it would have seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from t5accel.errors import InputError

Example = tuple[str, str]  # what the model reads, prefix included, and what it should write
Draw = Callable[[random.Random], Example]
Encode = Callable[[list[str]], list[list[int]]]
Batch = tuple[list[list[int]], list[list[int]]]  # token ids of sources and of targets
TaskBatch = tuple[str, Batch]  # with the name of its task


@dataclass(frozen=True)
class Part:
    """One task's share of a step.

    Attributes:
        tokens: the most that a batch may hold, padded encoder plus padded decoder tokens.
        per_step: batches a step; 0.5 is one in every second step on average.
        weight: of a batch's mean loss, against the other batches of its step; ``None`` counts every label alike.
    """

    task: str
    tokens: int
    per_step: float = 1
    weight: float | None = None


@dataclass(frozen=True)
class Phase:
    """What a step is made of from ``from_step`` on: the first part once, the others as often as they say.

    ``dropout`` takes the place of the run's own.
    """

    from_step: int
    parts: tuple[Part, ...]
    dropout: float | None = None

    def weights(self, batches: list[TaskBatch]) -> tuple[float, ...]:
        """One weight for each batch of a step; they sum to 1.

        >>> phase = Phase(0, (Part("translation", 5000, weight=0.6), Part("questions", 2700, weight=0.4)))
        >>> phase.weights([("translation", ([], [[1]])), ("questions", ([], [[1]]))])
        (0.6, 0.4)
        >>> Phase(0, (Part("translation", 5000),)).weights([("translation", ([], [[5, 1], [1]]))])
        (1.0,)
        """
        weight = {part.task: part.weight for part in self.parts}
        raw = [sum(map(len, targets)) if weight[task] is None else weight[task] for task, (_, targets) in batches]
        return tuple(value / sum(raw) for value in raw)


@dataclass(frozen=True)
class Mixture:
    """Examples by task, and how steps mix them.

    Attributes:
        examples: by task, a list to draw from, or a function that makes an example from a ``random.Random``.
        curriculum: what steps are made of, phase after phase.
        forbidden: sources that are never trained on, such as those of the evaluation sets.
        steps_per_block: batches are drawn for so many steps at a time.
        by_teacher: the targets of lists were written by the teacher, as the loss "sequence" needs them.

    Raises ``InputError`` unless the first phase begins at 0 and every other at a later multiple of ``steps_per_block``.
    """

    examples: Mapping[str, Sequence[Example] | Draw]
    curriculum: tuple[Phase, ...]
    forbidden: frozenset[str] = frozenset()
    steps_per_block: int = 50
    by_teacher: bool = False

    def __post_init__(self) -> None:
        starts = [phase.from_step for phase in self.curriculum]
        if starts[:1] != [0] or starts != sorted(set(starts)) or any(start % self.steps_per_block for start in starts):
            raise InputError(f"phases begin at {starts}; give 0 and rising multiples of {self.steps_per_block}.")

    def phase(self, step: int) -> Phase:
        """The phase that ``step`` belongs to."""
        return [phase for phase in self.curriculum if phase.from_step <= step][-1]

    def with_teacher_outputs(self, texts: Mapping[str, Sequence[Example]]) -> Mixture:
        """The same with what the teacher wrote, by task, in place of the examples of those tasks."""
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
        source, target = max(longest_source, len(sources[i])), max(longest_target, len(targets[i]))
        if rows and (source + target) * (len(rows) + 1) > tokens:
            batches.append(([sources[r] for r in rows], [targets[r] for r in rows]))
            rows, source, target = [], len(sources[i]), len(targets[i])
        rows.append(i)
        longest_source, longest_target = source, target
    if rows:
        batches.append(([sources[r] for r in rows], [targets[r] for r in rows]))
    return batches


def encode_and_pack(examples: Sequence[Example], encode: Encode, tokens: int) -> list[Batch]:
    """Examples as batches of token ids; `pack` says how.

    >>> encode_and_pack([("ab", "c")], lambda texts: [[ord(letter) for letter in text] for text in texts], tokens=9)
    [([[97, 98]], [[99]])]
    """
    return pack(encode([source for source, _ in examples]), encode([target for _, target in examples]), tokens)


def draw_batches(
    example: Callable[[], Example], encode: Encode, tokens: int, count: int, forbidden: frozenset[str],
    rng: random.Random,
) -> list[Batch]:  # fmt: skip
    """At least ``count`` batches of one task, shuffled, cut to ``count``. Sources in ``forbidden`` are skipped.

    Raises ``InputError`` if no source is left.
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
    """The steps of block ``number``: each a list of batches with the names of their tasks.

    The first is of the phase's first part; the others are dealt out evenly.
    """
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
    """The batches of steps ``step``, ``step + 1``, … without end."""
    number, offset = divmod(step, mixture.steps_per_block)
    while True:
        yield from islice(draw_block(mixture, encode, seed, number), offset, None)
        number, offset = number + 1, 0
