"""Auxiliary tasks that teach copying and recall; no model is scored on them.

A question on a story asks *whose* something is. Two or three candidates punish a wrong guess too little to teach that,
and where owner and thing stand some words apart, nothing is learned for thousands of steps.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence

from t5accel.distillation.batches import Example
from t5accel.errors import InputError
from t5accel.metrics import UNANSWERABLE
from training.pairs import Pair
from training.texts.stories import some_names

REPEAT, MATCH = "repeat: ", "match: "
_FORMS = ("{} has {}.", "{} got {}.", "{} is {}.", "The {} was {}.", "In {}, {}.", "{} was in {}.", "The {} of {}.")
_SYLLABLES = [
    c + v for c in "b c d f g h j k l m n p r s t v w z br cr dr gr st".split() for v in "a e i o u en ar".split()
]
_FILLERS = tuple(
    "the a in to was by of and with for on at from had has went got took put one worked as bought sold".split()
)
_ASKED = (
    "match: {} context:",
    "question: What did {} have? context:",
    "question: Where was {}? context:",
    "question: What was the work of {}? context:",
    "question: Which of them went to {}? context:",
    "question: How did {} get it? context:",
    "question: Who had {}? context:",
)


def common_words(pairs: Iterable[Pair], count: int = 4000) -> tuple[str, ...]:
    """The ``count`` most common words of more than two letters, without fillers; at least twelve.

    >>> common_words([("One sad cat saw six big red dogs run far off, far, far!", "Adieu, mes amis !")])[:3]
    ('far', 'One', 'sad')
    """
    words = (word.strip('.,!?;:"«»') for pair in pairs for text in pair for word in text.split())
    counted = Counter(word for word in words if len(word) > 2 and word.isalpha() and word not in _FILLERS)
    if len(counted) < 12:
        raise InputError(f"pairs must have at least 12 words of more than two letters, got {len(counted)}.")
    return tuple(word for word, _ in counted.most_common(count))


def _word(pairs: Sequence[Pair], rng: random.Random) -> str:
    """A word of the training pairs, an invented name, or a number."""
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(rng.choice(rng.choice(pairs)).split())
    if kind < 0.85:
        return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4))).capitalize()
    return str(rng.randrange(1000))


def repetition_example(pairs: Sequence[Pair], rng: random.Random) -> Example:
    """Words to repeat: practice in copying."""
    text = " ".join(_word(pairs, rng) for _ in range(rng.randint(1, 8)))
    return REPEAT + text, text


def matching_example(pairs: Sequence[Pair], rng: random.Random) -> Example:
    """Owners and their things; the answer names the things of some owners.

    >>> matching_example([("Stay here.", "Reste ici.")], random.Random(1))
    ('match: Zenca in: In Migi, ici. In Zenca, 399. In Grufen, 31.', '399')
    """
    count, form = rng.randint(2, 5), rng.choice(_FORMS)
    drawn = dict.fromkeys(_word(pairs, rng).strip(".,!?") for _ in range(4 * count))
    words = [word for word in drawn if word]
    told = list(zip(words[::2], words[1::2], strict=False))[:count]
    asked = rng.sample(told, rng.randint(1, len(told)))
    facts = " ".join(form.format(*pair) for pair in told)
    return MATCH + f"{' '.join(owner for owner, _ in asked)} in: {facts}", " ".join(thing for _, thing in asked)


def recall_example(words: Sequence[str], rng: random.Random, *, distance: int) -> Example:
    """Two to five clauses, each with a name and a thing of ``words``; one asks for the other.

    Up to ``distance`` words stand between a name and its thing, few more often than many. One question in ten has no
    answer: "unanswerable".

    >>> recall_example("dog red tea ici hier cat hat vin sel six dix pas".split(), random.Random(6), distance=2)
    ('match: Petra Mordez context: went Hiro Tamsky sold hier. went Petra Mordez sold vin.', 'vin')
    """
    count = rng.randint(2, 5)
    names, drawn = some_names(rng, count + 1), rng.sample(words, 2 * (count + 1))
    things = drawn[: count + 1]
    if rng.random() < 0.2:
        things = [
            thing if rng.random() < 0.5 else f"{thing} {more}" for thing, more in zip(things, drawn[::-1], strict=False)
        ]
    before, after = (rng.choices(_FILLERS, k=rng.choice((0, 0, 1, 2))) for _ in range(2))
    between = rng.choices(_FILLERS, k=rng.randint(0, rng.randint(0, distance)))
    things_first = rng.random() < 0.3
    clauses = []
    for name, thing in zip(names[:count], things[:count], strict=True):
        first, last = (thing, name) if things_first else (name, thing)
        clauses.append(" ".join((*before, first, *between, last, *after)) + ".")
    i = count if rng.random() < 0.1 else rng.randrange(count)
    asked, answer = (names[i], things[i]) if rng.random() < 0.5 else (things[i], names[i])
    if i == count:
        answer = UNANSWERABLE
    return rng.choice(_ASKED).format(asked) + " " + " ".join(clauses), answer
