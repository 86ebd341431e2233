"""The training mixture: three tasks drawn from a seed, tokenised, and packed into batches of equal cost.

Every optimiser step sees one translation batch and one batch of another task, and a block of steps is a function of
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
class Mixture:
    """What a step is made of. Token counts are padded encoder tokens plus padded decoder tokens."""

    pairs: tuple[Pair, ...]
    forbidden: frozenset[str] = frozenset()  # sources of the frozen evaluation sets: never trained on
    translation_tokens: int = 5000
    other_tokens: int = 2700
    joined_share: float = 0.2
    summary_share: float = 0.5
    steps_per_block: int = 50


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
    """The steps of block ``number``: each a list of batches (one of translation, one of another task)."""
    rng = random.Random(f"{seed}/{number}")
    steps = mixture.steps_per_block
    summaries = round(steps * mixture.summary_share)

    def draw(example: Callable[[], Example], tokens: int, count: int) -> list[Batch]:
        return draw_batches(example, encode, tokens, count, mixture.forbidden, rng)

    translation = draw(lambda: translation_example(mixture, rng), mixture.translation_tokens, steps)
    others = draw(lambda: summary_example(rng), mixture.other_tokens, summaries)
    others += draw(lambda: question_example(rng), mixture.other_tokens, steps - summaries)
    rng.shuffle(others)
    for a, b in zip(translation, others, strict=True):
        yield [a, b]
