"""Short synthetic English stories with one question each, in the style of extractive SQuAD v2, from a seed.

A story is about two or three people (or buildings) that do similar things, so only the right one's sentence answers.
About a quarter of the questions have no answer: the story tells the fact of somebody else ("missing"), or the question
names an unknown person ("fresh") or crosses two people ("mixed"). A very small model learns this in minutes on two
cores, there is no data set to license, and an endless fresh supply leaves nothing to memorise.

``held_out=True`` draws from other families, names, things and number ranges: a score on it measures reading.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from training.texts.story_templates import HALVES, UNITS, Family, Half

_SLOT = re.compile(r"\{(a_)?(\w+)\}")


@dataclass(frozen=True)
class Question:
    """One question; `answers` is empty if the context does not answer it, else its first is the target.

    `template` is "family/asked slot", with "/missing", "/fresh" or "/mixed" added for unanswerable ones.
    """

    question: str
    context: str
    answers: tuple[str, ...]
    template: str


def _value(rng: random.Random, half: Half, family: Family, slot: str, used: set[str], surname: bool) -> str:
    """A value for the slot that the story does not have yet: nothing else in it may answer the question."""
    while True:
        if slot in ("who", "friend"):
            text = rng.choice(half.names)
        elif slot in half.parts:
            text = "".join(map(rng.choice, half.parts[slot]))
        elif slot in half.ranges:
            text = str(rng.choice(half.ranges[slot]))
            text += f":{rng.randrange(5, 60, 5):02d}" if slot == "time" else UNITS.get(slot, "")
        else:
            text = rng.choice((family.pools.get(slot) or half.pools[slot]).split(",")).strip()
        if text not in used:
            used.add(text)
            break
    if surname and slot in ("who", "friend"):
        text += _surname(rng, half)
    return text


def _surname(rng: random.Random, half: Half) -> str:
    return " " + "".join(map(rng.choice, half.parts["surname"]))


def _wording(rng: random.Random, text: str) -> str:
    chosen = rng.choice(text.split(" // "))
    return re.sub(r"\[([^\]]*)\]", lambda match: rng.choice(match[1].split("|")), chosen)


def _slots(text: str) -> list[str]:
    return list(dict.fromkeys(slot for _, slot in _SLOT.findall(text)))


def _fill(text: str, values: dict[str, str]) -> str:
    def put(match: re.Match[str]) -> str:
        value = values[match[2]]
        return f"{'an' if value[0] in 'aeiou' else 'a'} {value}" if match[1] else value

    text = _SLOT.sub(put, text)
    return text[0].upper() + text[1:]


def _tell(rng: random.Random, people: list[dict[str, str]], plan: list[tuple[int, str]]) -> tuple[str, list[set[str]]]:
    """A sentence for each (person, fact), and the slots that are told of each person."""
    told: list[set[str]] = [set() for _ in people]
    sentences = []
    for person, fact in plan:
        text = _wording(rng, fact)
        told[person].update(_slots(text))
        sentences.append(_fill(text, people[person]))
    return " ".join(sentences), told


def _of_others(
    people: list[dict[str, str]], told: list[set[str]], person: int, slots: list[str]
) -> list[tuple[str, str]]:
    """These slots of everybody else, as far as they are told."""
    return [(slot, other[slot]) for i, other in enumerate(people) if i != person for slot in slots if slot in told[i]]


def _answered(question: str, context: str, answer: str, template: str) -> Question:
    """With the answer as it is and, where the context has it so, behind its article."""
    found = re.search(rf"\b(?:an?|the|some|Mount) {re.escape(answer)}\b", context, re.IGNORECASE)
    return Question(question, context, (answer, found[0]) if found else (answer,), template)


def attempt(rng: random.Random, half: Half, kind: str, short: bool) -> Question | None:
    """One story and a question of that kind about it, or None where this story has no such question."""
    family = rng.choice(half.families)
    surnames = rng.random() < 0.3
    used: set[str] = set()
    slots = _slots("".join(family.sentences))
    count = rng.choice((1, 2, 2) if short else (2, 2, 3))
    people = [{slot: _value(rng, half, family, slot, used, surnames) for slot in slots} for _ in range(count)]
    # A few facts, each told of several people, so that the kind of answer alone does not give it away.
    facts = rng.sample(family.sentences[1:], 1 if short else rng.choice((2, 3)))
    extra = [(person, fact) for person in range(len(people)) for fact in facts]
    rng.shuffle(extra)
    del extra[max(0, rng.choice((3, 4, 5, 6, 6, 7)) - len(people)) :]
    if rng.random() < 0.5:  # else the people's facts stay interleaved
        extra.sort(key=lambda pair: pair[0])
        plan = [
            pair
            for person in range(len(people))
            for pair in [(person, family.sentences[0]), *(pair for pair in extra if pair[0] == person)]
        ]
    else:
        plan = [(person, family.sentences[0]) for person in range(len(people))] + extra
    context, told = _tell(rng, people, plan)
    person = rng.randrange(len(people))
    values = dict(people[person])
    elsewhere = set().union(*(told[i] for i in range(len(people)) if i != person))
    asked = rng.choice(list(family.questions))
    question = _wording(rng, family.questions[asked])
    needed = _slots(question)
    if not told[person].issuperset(needed) or (kind == "missing") == (asked in told[person]):
        return None
    if kind == "missing" and asked not in elsewhere and rng.random() < 0.7:
        return None  # prefer that somebody else's fact tempts the reader
    if kind == "fresh":
        slot = rng.choice(needed)
        values[slot] = _value(rng, half, family, slot, used, surnames)
    if kind == "mixed":
        others = _of_others(people, told, person, needed)
        if len(needed) < 2 or not others:
            return None
        slot, values[slot] = rng.choice(others)
    template = f"{family.name}/{asked}"
    if kind:
        return Question(_fill(question, values), context, (), f"{template}/{kind}")
    return _answered(_fill(question, values), context, values[asked], template)


def make_question(rng: random.Random, *, held_out: bool = False, short: bool = False) -> Question:
    """A story with a question, drawn from `rng` alone; about one in four has no answer.

    A short one is about one or two people and tells one fact of each beside the first: training warms up on these.
    """
    kind = rng.choices(("", "missing", "fresh", "mixed"), (75, 12, 7, 6))[0]
    while (made := attempt(rng, HALVES[held_out], kind, short)) is None:
        pass
    return made


def crowd(rng: random.Random, half: Half, kind: str) -> Question | None:
    """A story about many, who are told alike, and a question of that kind, or None where it has none."""
    family = rng.choice(half.families)
    facts = [family.sentences[0], *rng.sample(family.sentences[1:], rng.choice((0, 1)))]
    surnames = rng.random() < 0.3
    used: set[str] = set()
    people = [
        {slot: _value(rng, half, family, slot, used, surnames) for slot in _slots("".join(facts))}
        for _ in range(rng.randint(3, 6))
    ]
    everyone = range(len(people))
    plan = [(person, fact) for person in everyone for fact in facts]
    if rng.random() < 0.5:
        plan = [(person, fact) for fact in facts for person in rng.sample(everyone, len(people))]
    context, told = _tell(rng, people, plan)
    person = rng.choice(everyone)
    asked = rng.choice(list(family.questions))
    question = _wording(rng, family.questions[asked])
    needed = _slots(question)
    if not told[person].issuperset({asked, *needed}) or (kind == "mixed" and len(needed) < 2):
        return None
    values, template = dict(people[person]), f"{family.name}/{asked}"
    if not kind:
        return _answered(_fill(question, values), context, values[asked], template)
    if kind == "fresh":
        slot = rng.choice(needed)
        values[slot] = _value(rng, half, family, slot, used, surnames)
    else:
        slot, values[slot] = rng.choice(_of_others(people, told, person, needed))
    return Question(_fill(question, values), context, (), f"{template}/{kind}")


def make_crowd(rng: random.Random) -> Question:
    """A story about three to six people with the same few facts of each, and a question; one in four has no answer.

    For training alone: among that many people, guessing is mostly wrong.
    """
    kind = rng.choices(("", "fresh", "mixed"), (75, 10, 15))[0]
    while (made := crowd(rng, HALVES[False], kind)) is None:
        pass
    return made


def some_names(rng: random.Random, count: int) -> list[str]:
    """Different first names of the seen half, three times in ten with surnames."""
    half = HALVES[False]
    names = rng.sample(half.names, count)
    if rng.random() < 0.3:
        names = [name + _surname(rng, half) for name in names]
    return names


def generate_questions(count: int, seed: int, *, held_out: bool = False) -> Iterator[Question]:
    """`count` questions, the same ones for the same seed.

    >>> [len({one.context for one in generate_questions(4, 7, held_out=held_out)}) for held_out in (False, True)]
    [4, 4]
    """
    rng = random.Random(seed)
    for _ in range(count):
        yield make_question(rng, held_out=held_out)
