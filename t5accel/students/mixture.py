"""The training mixture: three tasks drawn from a seed, tokenised, and packed into batches of equal cost.

Every optimiser step sees a batch of translation and one or two of the other tasks. A block of steps is a function of
(seed, block number) alone: a run that was interrupted goes on with exactly the batches it would have seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from t5accel.errors import InputError
from t5accel.students.pairs import Pair, joined
from t5accel.students.reports import make_report
from t5accel.students.stories import make_question
from t5accel.tasks import NAMES, SUMMARIZE, TRANSLATE, UNANSWERABLE, rows, source_text

Example = tuple[str, str]
Batch = tuple[list[list[int]], list[list[int]]]


@dataclass(frozen=True)
class Phase:
    """What a step is made of from ``from_step`` on. Token counts are padded encoder plus padded decoder tokens.

    With ``translation_weight`` every batch's mean loss counts by that weight, the others sharing the rest; without,
    every label counts alike.
    """

    from_step: int
    translation_tokens: int
    other_tokens: int
    others_per_step: int
    translation_weight: float | None = None

    def weights(self, batches: list[Batch]) -> tuple[float, ...]:
        """One weight for each batch of a step; they sum to 1.

        >>> Phase(0, 5000, 2700, 1, translation_weight=0.6).weights([([], [[1]]), ([], [[1]])])
        (0.6, 0.4)
        >>> Phase(0, 5000, 2700, 1).weights([([], [[5, 1], [1]]), ([], [[1]])])
        (0.75, 0.25)
        """
        if self.translation_weight is not None:
            others = len(batches) - 1
            return (self.translation_weight, *[(1 - self.translation_weight) / others] * others)
        labels = [sum(map(len, targets)) for _, targets in batches]
        return tuple(count / sum(labels) for count in labels)


# Answers and summaries are few labels beside translation's: counted alike, copying names out of the source was not
# learned for long. So the other tasks get more say after 1,000 steps, and more examples after 2,250.
CURRICULUM = (
    Phase(0, translation_tokens=5000, other_tokens=2700, others_per_step=1),
    Phase(1000, translation_tokens=5000, other_tokens=2700, others_per_step=1, translation_weight=0.6),
    Phase(2250, translation_tokens=4000, other_tokens=2500, others_per_step=2, translation_weight=0.5),
)


@dataclass(frozen=True)
class Mixture:
    """Where examples come from.

    Raises ``InputError`` unless the first phase begins at 0 and every other at a later multiple of ``steps_per_block``.
    """

    pairs: tuple[Pair, ...]
    forbidden: frozenset[str] = frozenset()  # sources of the frozen evaluation sets: never trained on
    joined_share: float = 0.2
    curriculum: tuple[Phase, ...] = CURRICULUM
    steps_per_block: int = 50

    def __post_init__(self) -> None:
        starts = [phase.from_step for phase in self.curriculum]
        if starts[:1] != [0] or starts != sorted(set(starts)) or any(start % self.steps_per_block for start in starts):
            raise InputError(f"phases begin at {starts}; give 0 and rising multiples of {self.steps_per_block}.")

    def phase(self, step: int) -> Phase:
        """The phase that ``step`` belongs to."""
        return [phase for phase in self.curriculum if phase.from_step <= step][-1]


def evaluation_sources() -> frozenset[str]:
    """The sources of the frozen evaluation sets as the model reads them, to be kept out of training."""
    return frozenset(source_text(name, row) for name in NAMES for row in rows(name))


def translation_example(mixture: Mixture, rng: random.Random) -> Example:
    """One training pair, or several joined, behind T5's prefix."""
    english, french = joined(mixture.pairs, rng, mixture.joined_share)
    return TRANSLATE + english, french


def summary_example(rng: random.Random) -> Example:
    """A freshly generated report of a seen family and its summary."""
    report = make_report(rng)
    return SUMMARIZE + report.source, report.summary


def question_example(rng: random.Random) -> Example:
    """A freshly generated question of a seen family; its first answer, or "unanswerable"."""
    question = make_question(rng)
    source = source_text("questions", {"question": question.question, "context": question.context})
    return source, (*question.answers, UNANSWERABLE)[0]


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


def draw_batches(
    example: Callable[[], Example], encode: Callable[[list[str]], list[list[int]]], tokens: int, count: int,
    forbidden: frozenset[str], rng: random.Random,
) -> list[Batch]:  # fmt: skip
    """At least ``count`` batches of one task, shuffled, cut to ``count``. Sources in ``forbidden`` are skipped.

    Raises ``InputError`` where nothing else is left.
    """
    batches: list[Batch] = []
    while len(batches) < count:
        examples = [e for e in (example() for _ in range(64 * count)) if e[0] not in forbidden]
        if not examples:
            raise InputError(f"All of {64 * count} examples drawn are in the evaluation sets: give other pairs.")
        batches += pack(encode([source for source, _ in examples]), encode([target for _, target in examples]), tokens)
    rng.shuffle(batches)
    return batches[:count]


def block(
    mixture: Mixture, encode: Callable[[list[str]], list[list[int]]], seed: int, number: int
) -> Iterator[list[Batch]]:
    """The steps of block ``number``: each a list of batches, the first of translation, the rest of other tasks."""
    rng = random.Random(f"{seed}/{number}")
    steps = mixture.steps_per_block
    phase = mixture.phase(number * steps)
    count = steps * phase.others_per_step

    def draw(example: Callable[[], Example], tokens: int, count: int) -> list[Batch]:
        return draw_batches(example, encode, tokens, count, mixture.forbidden, rng)

    translation = draw(lambda: translation_example(mixture, rng), phase.translation_tokens, steps)
    others = draw(lambda: summary_example(rng), phase.other_tokens, count // 2)
    others += draw(lambda: question_example(rng), phase.other_tokens, count - count // 2)
    rng.shuffle(others)
    for i, batch in enumerate(translation):
        yield [batch, *others[i * phase.others_per_step : (i + 1) * phase.others_per_step]]
