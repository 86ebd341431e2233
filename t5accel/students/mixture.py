"""The training mixture: tasks drawn from a seed, tokenised, and packed into batches of equal cost.

Every optimiser step sees a batch of translation and some of the other tasks. A block of steps is a function of
(seed, block number) alone: a run that was interrupted goes on with exactly the batches it would have seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from t5accel.errors import InputError
from t5accel.students.pairs import Pair, joined
from t5accel.students.practice import common_words, matching_example, recall_example, repetition_example
from t5accel.students.reports import make_report
from t5accel.students.stories import Question, make_crowd, make_question
from t5accel.tasks import NAMES, SUMMARIZE, TRANSLATE, UNANSWERABLE, rows, source_text

Example = tuple[str, str]
Batch = tuple[list[list[int]], list[list[int]]]
TaskBatch = tuple[str, Batch]  # with the name of its task


@dataclass(frozen=True)
class Part:
    """One task's share of a step.

    Attributes:
        tokens: of a batch, padded encoder plus padded decoder tokens, at most.
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


# Answers and summaries are few labels beside translation's: counted alike, copying words out of the source was not
# learned for long. So the other tasks get more say after 1,000 steps and more examples after 2,250. At 4,250 answers
# were still of the right kind and from nowhere: since then the model also repeats words, which teaches copying with
# every label, and reads short stories, of which a batch holds many. At 5,250 summaries were nearly learned;
# questions, which also ask *whose* fact it is, were not, and got what the summaries no longer needed. From 6,000 the
# model practises just that, whose what is: with two or three candidates a story punishes a guess too little to teach
# it soon.
CURRICULUM = (
    Phase(0, (Part("translation", 5000), Part("summaries", 2700, 0.5), Part("questions", 2700, 0.5))),
    Phase(1000, (Part("translation", 5000, weight=0.6), Part("summaries", 2700, 0.5, 0.4),
                 Part("questions", 2700, 0.5, 0.4))),
    Phase(2250, (Part("translation", 4000, weight=0.5), Part("summaries", 2500, weight=0.25),
                 Part("questions", 2500, weight=0.25))),
    Phase(4250, (Part("translation", 3000, weight=0.35), Part("summaries", 2500, weight=0.2),
                 Part("questions", 2500, weight=0.2), Part("short questions", 2500, weight=0.15),
                 Part("repetition", 1500, weight=0.1))),
    Phase(5250, (Part("translation", 3500, weight=0.4), Part("summaries", 1500, 0.5, 0.2),
                 Part("questions", 2500, weight=0.25), Part("short questions", 2500, weight=0.2),
                 Part("repetition", 1000, 0.5, 0.1))),
    Phase(6000, (Part("translation", 3500, weight=0.4), Part("summaries", 1500, 0.5, 0.2),
                 Part("questions", 2500, weight=0.2), Part("short questions", 2500, weight=0.15),
                 Part("matching", 2500, weight=0.15))),
)  # fmt: skip

# What a model that translates, summarises and copies learns next: to read whose fact a question asks for. Beside other
# tasks that was not learned in thousands of steps (half of the questions right, by the kind of answer alone); alone,
# and from near to far, in hundreds. Dropout comes back with the other tasks: it makes this much slower to find.
SECOND_CURRICULUM = (
    Phase(0, (Part("near recall", 4500),), dropout=0.0),
    Phase(150, (Part("recall", 5500),), dropout=0.0),
    Phase(900, (Part("crowds", 5000), Part("recall", 2500)), dropout=0.0),
    Phase(1400, (Part("crowds", 3000, weight=0.35), Part("questions", 3500, weight=0.35),
                 Part("recall", 1500, 0.5, 0.1), Part("translation", 2000, weight=0.2)), dropout=0.0),
    Phase(2000, (Part("translation", 3500, weight=0.4), Part("questions", 3500, weight=0.35),
                 Part("crowds", 1500, 0.5, 0.15), Part("summaries", 1500, 0.5, 0.15)), dropout=0.05),
)  # fmt: skip

# In these exercises the decoder does not see what is asked for, so that the encoder learns to mark the answer. Else the
# decoder looks up first what is asked and then where that is, for which it needs layers that a student of one has not.
HIDE_WHAT_IS_ASKED = frozenset({"near recall", "recall", "crowds"})
CONTEXT = "▁context"  # the token between what is asked and where it is told


@dataclass(frozen=True)
class Mixture:
    """Where examples come from.

    Attributes:
        pairs: translations.
        forbidden: sources of the frozen evaluation sets, as the model reads them: never trained on.
        joined_share: of translations that are made of several pairs.
        curriculum: what steps are made of, phase after phase.
        steps_per_block: batches are drawn for so many steps at a time.
        given: by task, examples to draw from in place of fresh ones.

    Raises ``InputError`` unless the first phase begins at 0 and every other at a later multiple of ``steps_per_block``.
    """

    pairs: tuple[Pair, ...]
    forbidden: frozenset[str] = frozenset()
    joined_share: float = 0.2
    curriculum: tuple[Phase, ...] = CURRICULUM
    steps_per_block: int = 50
    given: Mapping[str, Sequence[Example]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        starts = [phase.from_step for phase in self.curriculum]
        if starts[:1] != [0] or starts != sorted(set(starts)) or any(start % self.steps_per_block for start in starts):
            raise InputError(f"phases begin at {starts}; give 0 and rising multiples of {self.steps_per_block}.")

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Common words of the pairs, to be told of and asked for."""
        return common_words(self.pairs)

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


def question_example(rng: random.Random, *, short: bool = False) -> Example:
    """A freshly generated question of a seen family; its first answer, or "unanswerable"."""
    return _asked(make_question(rng, short=short))


def crowd_example(rng: random.Random) -> Example:
    """A freshly generated question on a story about many; its first answer, or "unanswerable"."""
    return _asked(make_crowd(rng))


def _asked(question: Question) -> Example:
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
) -> Iterator[list[TaskBatch]]:
    """The steps of block ``number``: each a list of batches with the names of their tasks.

    The first is of the phase's first part; the others are dealt out evenly.
    """
    rng = random.Random(f"{seed}/{number}")
    steps = mixture.steps_per_block
    first, *rest = mixture.phase(number * steps).parts

    def draw(part: Part) -> list[TaskBatch]:
        given = mixture.given.get(part.task)
        example = partial(rng.choice, given) if given else partial(_EXAMPLES[part.task], mixture, rng)
        batches = draw_batches(example, encode, part.tokens, round(steps * part.per_step), mixture.forbidden, rng)
        return [(part.task, batch) for batch in batches]

    leading = draw(first)
    others = [batch for part in rest for batch in draw(part)]
    rng.shuffle(others)
    for i, batch in enumerate(leading):
        yield [batch, *others[i::steps]]


_EXAMPLES: dict[str, Callable[[Mixture, random.Random], Example]] = {
    "translation": translation_example,
    "summaries": lambda _, rng: summary_example(rng),
    "questions": lambda _, rng: question_example(rng),
    "short questions": lambda _, rng: question_example(rng, short=True),
    "crowds": lambda _, rng: crowd_example(rng),
    "repetition": lambda mixture, rng: repetition_example(mixture.pairs, rng),
    "matching": lambda mixture, rng: matching_example(mixture.pairs, rng),
    "near recall": lambda mixture, rng: recall_example(mixture.words, rng, distance=2),
    "recall": lambda mixture, rng: recall_example(mixture.words, rng, distance=8),
}
