"""Training tasks of the bundled models, and the curricula that mix them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from bench.evaluation import NAMES, rows, source_text
from t5accel.distillation.batches import Draw, Example, Mixture, Phase, TaskShare
from t5accel.errors import InputError
from t5accel.metrics import UNANSWERABLE
from t5accel.models.prefixes import SUMMARIZE, TRANSLATE
from training.exercises import (
    common_words,
    matching_example,
    recall_example,
    repetition_example,
)
from training.pairs import Pair, balance_pairs, join_pairs, read_pairs, split_pairs, to_british
from training.texts.composed_reports import make_composed_report, statements
from training.texts.composed_stories import make_composed_crowd, make_composed_question
from training.texts.reports import make_report
from training.texts.stories import Question, make_crowd, make_question

# Answers and summaries are few labels beside translation's: counted alike, copying words out of the source was not
# learned for long. So the other tasks get more say after 1,000 steps and more examples after 2,250. At 4,250 answers
# were still of the right kind and from nowhere: since then the model also repeats words, which teaches copying with
# every label, and reads short stories, of which a batch holds many. At 5,250 summaries were nearly learned;
# questions, which also ask *whose* fact it is, were not, and got what the summaries no longer needed. From 6,000 the
# model practises just that, whose what is: with two or three candidates a story punishes a guess too little to teach
# it soon.
CURRICULUM = (
    Phase(0, (TaskShare("translation", 5000), TaskShare("summaries", 2700, 0.5), TaskShare("questions", 2700, 0.5))),
    Phase(1000, (TaskShare("translation", 5000, weight=0.6), TaskShare("summaries", 2700, 0.5, 0.4),
                 TaskShare("questions", 2700, 0.5, 0.4))),
    Phase(2250, (TaskShare("translation", 4000, weight=0.5), TaskShare("summaries", 2500, weight=0.25),
                 TaskShare("questions", 2500, weight=0.25))),
    Phase(4250, (TaskShare("translation", 3000, weight=0.35), TaskShare("summaries", 2500, weight=0.2),
                 TaskShare("questions", 2500, weight=0.2), TaskShare("short questions", 2500, weight=0.15),
                 TaskShare("repetition", 1500, weight=0.1))),
    Phase(5250, (TaskShare("translation", 3500, weight=0.4), TaskShare("summaries", 1500, 0.5, 0.2),
                 TaskShare("questions", 2500, weight=0.25), TaskShare("short questions", 2500, weight=0.2),
                 TaskShare("repetition", 1000, 0.5, 0.1))),
    Phase(6000, (TaskShare("translation", 3500, weight=0.4), TaskShare("summaries", 1500, 0.5, 0.2),
                 TaskShare("questions", 2500, weight=0.2), TaskShare("short questions", 2500, weight=0.15),
                 TaskShare("matching", 2500, weight=0.15))),
)  # fmt: skip

# What a model that translates, summarises and copies learns next: to read whose fact a question asks for. Beside other
# tasks that was not learned in thousands of steps (half of the questions right, by the kind of answer alone); alone,
# and from near to far, in hundreds. Dropout comes back with the other tasks: it makes this much slower to find.
SECOND_CURRICULUM = (
    Phase(0, (TaskShare("near recall", 4500),), dropout=0.0),
    Phase(150, (TaskShare("recall", 5500),), dropout=0.0),
    Phase(900, (TaskShare("crowds", 5000), TaskShare("recall", 2500)), dropout=0.0),
    Phase(1400, (TaskShare("crowds", 3000, weight=0.35), TaskShare("questions", 3500, weight=0.35),
                 TaskShare("recall", 1500, 0.5, 0.1), TaskShare("translation", 2000, weight=0.2)), dropout=0.0),
    Phase(2000, (TaskShare("translation", 3500, weight=0.4), TaskShare("questions", 3500, weight=0.35),
                 TaskShare("crowds", 1500, 0.5, 0.15), TaskShare("summaries", 1500, 0.5, 0.15)), dropout=0.05),
)  # fmt: skip

# The third stage: version 3 grown, with new words, on longer sentences. Events and topics are composed anew for each
# example, since the templates, which are few, had been learnt by heart and held for nothing else; some reports and
# stories are of the templates' own families again, once the model has settled. Translation was soon as good as it had
# to be, so that reading (from 2,000) and reports (from 3,500) got more of every step: in the next 250 steps the loss on
# composed reports fell from 0.30 to 0.21. Without dropout: reading takes longer to learn with it, and nothing comes
# often enough to be learnt by heart.
THIRD_CURRICULUM = (
    Phase(0, (TaskShare("translation", 2800, weight=0.45), TaskShare("composed questions", 2200, weight=0.22),
              TaskShare("composed crowds", 1500, 0.5, 0.1), TaskShare("composed reports", 1800, 0.5, 0.13),
              TaskShare("recall", 1200, 0.5, 0.06), TaskShare("repetition", 800, 0.25, 0.04)), dropout=0.0),
    Phase(1500, (TaskShare("translation", 2800, weight=0.47), TaskShare("composed questions", 2400, weight=0.22),
                 TaskShare("composed crowds", 1500, 0.25, 0.05), TaskShare("composed reports", 1800, 0.5, 0.12),
                 TaskShare("questions", 1500, 0.25, 0.08), TaskShare("summaries", 1500, 0.25, 0.06)), dropout=0.0),
    Phase(2000, (TaskShare("translation", 2600, weight=0.42), TaskShare("composed questions", 3000, weight=0.27),
                 TaskShare("composed crowds", 1500, 0.25, 0.06), TaskShare("composed reports", 1800, 0.4, 0.12),
                 TaskShare("questions", 1500, 0.25, 0.08), TaskShare("summaries", 1500, 0.2, 0.05)), dropout=0.0),
    Phase(3500, (TaskShare("translation", 2000, weight=0.32), TaskShare("composed questions", 2800, weight=0.28),
                 TaskShare("composed reports", 2400, weight=0.22), TaskShare("composed crowds", 1500, 0.25, 0.05),
                 TaskShare("questions", 1500, 0.25, 0.07), TaskShare("summaries", 1500, 0.25, 0.06)), dropout=0.0),
)  # fmt: skip

# The fourth stage goes on with what the third one made: its French had had too little practice, and its summaries fell
# back on what they had been taught to say; of an unknown event they had the kind of sentence and not its words. So
# reports tell of people and towns of any syllables, and from 1,300 on of statements, the English of the pairs: whatever
# is said is repeated. Of half the unseen reports ROUGE-L was 31.2 before those came, and 35.3 after 550 steps of them:
# they were read to find what fails, and are not blind to this choice any more. From 4,300 on there is more French,
# pairs with rare words come more often, and fewer reports have a reason, which was made up where there was none; from
# 5,950 on a statement that names what the opening names is a fact without a marker.
FOURTH_CURRICULUM = (
    Phase(0, (TaskShare("translation", 4500, weight=0.55), TaskShare("composed reports", 2000, 0.75, 0.15),
              TaskShare("composed questions", 1800, 0.75, 0.18), TaskShare("repetition", 1000, 0.2, 0.04),
              TaskShare("questions", 1500, 0.25, 0.07), TaskShare("summaries", 1500, 0.2, 0.05)), dropout=0.0),
    Phase(1300, (TaskShare("translation", 4200, weight=0.52), TaskShare("composed reports", 1800, 0.4, 0.08),
                 TaskShare("reports of statements", 2000, 0.75, 0.14),
                 TaskShare("composed questions", 1800, 0.75, 0.18), TaskShare("repetition", 1000, 0.1, 0.02),
                 TaskShare("questions", 1500, 0.25, 0.07), TaskShare("summaries", 1500, 0.2, 0.05)), dropout=0.0),
    Phase(2000, (TaskShare("translation", 4000, weight=0.5), TaskShare("composed reports", 1800, 0.3, 0.06),
                 TaskShare("reports of statements", 2200, 0.9, 0.18), TaskShare("composed questions", 1800, 0.75, 0.18),
                 TaskShare("questions", 1500, 0.25, 0.07), TaskShare("summaries", 1500, 0.2, 0.05)), dropout=0.0),
    Phase(4300, (TaskShare("translation", 5500, weight=0.6), TaskShare("composed reports", 1800, 0.4, 0.08),
                 TaskShare("reports of statements", 1800, 0.6, 0.12), TaskShare("composed questions", 1800, 0.6, 0.12),
                 TaskShare("questions", 1500, 0.2, 0.04), TaskShare("summaries", 1500, 0.15, 0.04)), dropout=0.0),
    Phase(5950, (TaskShare("translation", 5200, weight=0.58), TaskShare("composed reports", 1800, 0.4, 0.08),
                 TaskShare("reports of statements", 2200, 0.9, 0.16), TaskShare("composed questions", 1800, 0.6, 0.11),
                 TaskShare("questions", 1500, 0.2, 0.04), TaskShare("summaries", 1500, 0.15, 0.03)), dropout=0.0),
)  # fmt: skip

# A student meets all tasks in every step, in the shares in which they are scored, and stories of many people besides:
# one decoder layer has to learn anew to find what the encoder marks as asked for. In trials of 400 steps the questions'
# loss was 0.90 without them, and 0.81 with a third of the weight. A longer run goes on with more questions: after 5,000
# steps of the first phase alone, a student of the model's version 2 had 29 right answers where that had 35.
STUDENTS_MIXTURE = (
    Phase(0, (TaskShare("translation", 2000, weight=0.4), TaskShare("composed reports", 1200, 0.25, 0.06),
              TaskShare("reports of statements", 1200, 0.5, 0.1), TaskShare("summaries", 1200, 0.25, 0.06),
              TaskShare("composed questions", 1500, weight=0.2), TaskShare("questions", 1500, 0.25, 0.08),
              TaskShare("composed crowds", 1500, 0.5, 0.1))),
    Phase(1000, (TaskShare("translation", 1500, weight=0.34), TaskShare("composed reports", 1200, 0.25, 0.06),
                 TaskShare("reports of statements", 1200, 0.5, 0.1), TaskShare("summaries", 1200, 0.25, 0.06),
                 TaskShare("composed questions", 1800, weight=0.22), TaskShare("questions", 1500, 0.25, 0.08),
                 TaskShare("composed crowds", 1200, 0.75, 0.14))),
)  # fmt: skip

# In these exercises the decoder does not see what is asked for, so that the encoder learns to mark the answer. Else the
# decoder looks up first what is asked and then where that is, for which it needs layers that a student of one has not.
HIDE_WHAT_IS_ASKED = frozenset({"near recall", "recall", "crowds", "composed crowds"})
CONTEXT = "▁context"  # the token between what is asked and where it is told


# Of a hundred sources that a teacher writes to, how many are of each task.
SHARES = {
    "translation": 70, "summaries": 4, "composed reports": 3, "reports of statements": 4, "questions": 7,
    "composed questions": 12,
}  # fmt: skip


def evaluation_sources() -> frozenset[str]:
    """The sources of the frozen evaluation sets as the model reads them, to be kept out of training."""
    return frozenset(source_text(name, row) for name in NAMES for row in rows(name))


def summary_example(rng: random.Random) -> Example:
    """A freshly generated report of a seen family and its summary."""
    report = make_report(rng)
    return SUMMARIZE + report.source, report.summary


def composed_summary_example(rng: random.Random, said: Sequence[str] = ()) -> Example:
    """A report whose event was composed, of statements where there are some, and its summary."""
    report = make_composed_report(rng, said)
    return SUMMARIZE + report.source, report.summary


def question_example(rng: random.Random, *, short: bool = False) -> Example:
    """A freshly generated question of a seen family; its first answer, or "unanswerable"."""
    return _asked(make_question(rng, short=short))


def composed_question_example(rng: random.Random) -> Example:
    """A question on a story whose topic was composed; its first answer, or "unanswerable"."""
    return _asked(make_composed_question(rng))


def _asked(question: Question) -> Example:
    source = source_text("questions", {"question": question.question, "context": question.context})
    return source, (*question.answers, UNANSWERABLE)[0]


def mini_examples(pairs: tuple[Pair, ...] = (), *, joined_share: float = 0.08) -> dict[str, Draw]:
    """By task and exercise, a function that draws an example.

    Only translation and the exercises in words need ``pairs``. Long ones and those with rare words come more often, and
    half of the English is in British spelling; ``joined_share`` of the translations join several pairs.

    >>> draw = mini_examples((("Go!", "Va !"),))
    >>> draw["translation"](random.Random(0))
    ('translate English to French: Go!', 'Va !')
    """

    chosen = balance_pairs(pairs)

    def translation(rng: random.Random) -> Example:
        english, french = join_pairs(chosen, rng, joined_share)
        return TRANSLATE + (to_british(english) if rng.random() < 0.5 else english), french

    words = cache(lambda: common_words(pairs))
    said = cache(lambda: statements(english for english, _ in pairs))
    return {
        "translation": translation,
        "summaries": summary_example,
        "composed reports": composed_summary_example,
        "reports of statements": lambda rng: composed_summary_example(rng, said()),
        "questions": question_example,
        "short questions": lambda rng: question_example(rng, short=True),
        "crowds": lambda rng: _asked(make_crowd(rng)),
        "composed questions": composed_question_example,
        "composed crowds": lambda rng: _asked(make_composed_crowd(rng)),
        "repetition": lambda rng: repetition_example(pairs, rng),
        "matching": lambda rng: matching_example(pairs, rng),
        "near recall": lambda rng: recall_example(words(), rng, distance=2),
        "recall": lambda rng: recall_example(words(), rng, distance=8),
    }


def mini_mixture(pairs: tuple[Pair, ...], curriculum: tuple[Phase, ...] = CURRICULUM) -> Mixture:
    """Training mixture of the bundled model, without the evaluation sets."""
    return Mixture(mini_examples(pairs), curriculum, evaluation_sources())


def student_mixture(pairs_file: str | Path, *, held_out: int = 1000) -> tuple[Mixture, list[Example]]:
    """Training mixture of the bundled students, and held-out translations for the validation loss."""
    split = split_pairs(read_pairs(pairs_file), held_out)
    held_out_pairs = [(TRANSLATE + english, references[0]) for english, references in split.held_out]
    return mini_mixture(split.train, STUDENTS_MIXTURE), held_out_pairs


def draw_sources(mixture: Mixture, count: int, seed: int) -> list[tuple[str, str]]:
    """Draw ``count`` different tasks and sources as training does, without evaluation sources.

    >>> found = draw_sources(mini_mixture((("Stay here.", "Reste ici."), ("Come in!", "Entre !"))), 8, seed=0)
    >>> len(found), len(set(found))
    (8, 8)
    """
    rng = random.Random(f"{seed}/teacher")
    found: dict[tuple[str, str], None] = {}
    for _ in range(20 * count):
        if len(found) == count:
            return list(found)
        task = rng.choices(list(SHARES), list(SHARES.values()))[0]
        text = mixture.examples[task](rng)[0]
        if text not in mixture.excluded_sources:
            found[task, text] = None
    raise InputError(f"Of {count} different sources only {len(found)} were found. Ask for fewer, or give more pairs.")
