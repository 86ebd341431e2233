"""Stories whose topics are composed from `story_phrases`, for training alone.

The families of `story_templates` are few, and a small model learns them by heart. Here a family is drawn for each
story; `stories` fills in who, what and where, and keeps the answer unique.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from training.texts import story_phrases
from training.texts.report_templates import NAMES_HELD_OUT
from training.texts.report_templates import NAMES_SEEN as REPORT_NAMES
from training.texts.stories import Question, attempt, crowd
from training.texts.story_templates import HALVES, Family, Half

# One asks for each of them with the same word, so that a story tells but one.
_ALIKE = ({"day", "year", "clock", "season"}, {"town", "spot"}, {"tool", "ride"})
_NAMED = {"kin", "pal", "maker", "helper", "client", "seller"}
_TWICE = {"colour", "number", "reason", "hours", "minutes", "pal", "age"}  # questions tell two such facts apart
_CONFUSED = {  # a fact and a verb for which one question would ask for two things
    "gear carry", "gear pack", "meal eat", "spot2 keep", "spot2 leave", "sum give", "maker make", "maker cook",
    "pet find",
}  # fmt: skip
_TITLES = ("Professor", "Inspector", "Coach", "Judge", "Sergeant", "Chef", "Senator", "Major", "Agent", "Uncle")
Row = list[list[str]]  # columns, each with its wordings


@cache
def rows(text: str) -> list[Row]:
    """A table of phrases: its lines, of which indented ones go on, by columns and their alternatives."""
    lines = re.sub(r"\n +", " ", text).strip().split("\n")
    return [[part.strip().split(" // ") for part in line.removesuffix(" |").split(" | ")] for line in lines]


@cache
def word_lists(text: str) -> dict[str, tuple[tuple[str, ...], list[list[str]]]]:
    """By each form of a word, all its forms and the list of words."""
    found = {}
    for line in re.sub(r"\n +", " ", text).strip().split("\n"):
        forms, words = line.split(": ")
        listed = [word.replace("_", " ").split("/") for word in words.split()]
        found |= dict.fromkeys(forms.split("/"), (tuple(forms.split("/")), listed))
    return found


def with_article(word: str) -> str:
    """With "a" or "an"."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.replace("_", " ") for word in text.split())


@cache
def pools() -> dict[str, tuple[tuple[str, ...], ...]]:
    """What slots are filled with, by slot: the parts of each value, of which one after the other is drawn."""
    found = {}
    for line in re.sub(r"\n +", " ", story_phrases.POOLS).strip().split("\n"):
        name, words = line.split(": ")
        parts = [_words(part) for part in words.split(" + ")]
        if name in ("season", "reason", "title"):  # whole words: a space between
            parts[0] = tuple(f"{word} " for word in parts[0])
        found[name] = tuple(parts)
    found["clock"] = (tuple(f"{hour}:" for hour in range(6, 24)), tuple(f"{minute:02d}" for minute in range(5, 60, 5)))
    return found | {"home": found["town"], "lake": found["town"], "spot2": found["spot"]}


@cache
def training_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Real first names of the seen halves, and invented ones; none is a name of a held-out half."""
    held_out = {*HALVES[True].names, *NAMES_HELD_OUT.first}
    rng = random.Random(0)
    invented = {"".join(map(rng.choice, pools()["first"])) for _ in range(6000)}
    real = {*HALVES[False].names, *REPORT_NAMES.first}
    return tuple(sorted(real - held_out)), tuple(sorted(invented - real - held_out))


@cache
def _numbers() -> dict[str, tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]]:
    """Two ranges of numbers by slot, and the units that may follow."""
    found = {}
    for (slots,), (ranges,), *units in rows(story_phrases.NUMBERS):
        bounds = (map(int, text.split("-")) for text in ranges.split())
        numbers = tuple(tuple(map(str, range(low, high + 1))) for low, high in bounds)
        found |= dict.fromkeys(
            slots.split(), (numbers, tuple(f" {unit}" for unit in units[0][0].split()) if units else ("",))
        )
    return found


@cache
def _inflected(lemma: str) -> tuple[str, str]:
    """Past and participle; words behind the verb stay."""
    irregular = {row.split()[0]: row.split()[1:] for row in " ".join(story_phrases.IRREGULAR.split()).split(",")}
    verb, _, rest = lemma.partition(" ")
    regular = verb + "d" if verb[-1] == "e" else verb[:-1] + "ied" if re.search("[^aeiou]y$", verb) else verb + "ed"
    past, participle = irregular.get(verb, (regular, regular))
    return f"{past} {rest}".strip(), f"{participle} {rest}".strip()


class _Thing(NamedTuple):
    """A class of things and a verb for it, with the wordings of both."""

    kind: str  # the class that facts are chosen by
    slot: str
    intro: str  # as it is told first: "{a_item}"
    the: str  # and later: "the {item}"
    be: str
    ask: tuple[str, ...]  # "What", "Which animal": how one asks for it; a gap is where a preposition goes
    nouns: tuple[str, ...]
    lemma: str
    past: str
    participle: str | None  # None: there is no passive


@cache
def _classes() -> list[tuple[str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
    """Form, kind, labels, verbs and things of each class."""
    found = []
    for (form,), (labels,), (verbs,), (nouns,) in rows(story_phrases.THINGS):
        things = tuple(noun.strip() for noun in nouns.split(","))
        found.append(
            (form, things[0] if form in "ans" else labels.split()[0].lower(), _words(labels), _words(verbs), things)
        )
    return found


def _drawn_thing(rng: random.Random) -> _Thing:
    form, kind, labels, verbs, nouns = rng.choice(_classes())
    if form == "l" and rng.random() < 0.6:  # of these there is less to tell
        return _drawn_thing(rng)
    lemma, transitive = rng.choice(verbs), rng.random() > 0.2
    if not transitive:
        lemma, kinds = rng.choice(" ".join(story_phrases.AT.split()).split(" | ")).split(": ")
        kind = rng.choice(kinds.split())
        form, kind, labels, _, nouns = next((row for row in _classes() if row[1] == kind), ("", kind, (kind,), (), ()))
    label, noun, be = rng.choice(labels), rng.choice(nouns or ("",)), "was"
    if form in ("a", "s"):
        slot, intro, the = "item", "{a_item}" if form == "a" else rng.choice(("{item}", "some {item}")), "the {item}"
        ask = ["What", "What", f"Which {label}", f"What {label}"]
    elif form == "n":
        slot, intro, the, be = "item", "{count} {item}", "the {item}", "were"
        ask = ["What", "What", f"Which {label}s", f"What kind of {label}s"]
    elif form == "x":
        slot, intro, the = "topic", f"{with_article(noun)} {{topic}}", f"the {noun} {{topic}}"
        thing, _, preposition = noun.rpartition(" ")
        ask = [f"What {{}} {with_article(noun)}", f"{preposition.capitalize()} what {{}} {with_article(thing)}"]
        ask = ask if transitive else ["What"]
    elif form == "t":
        slot, the, ask = "title", "the {title}", [f"Which {noun}", f"What {noun}"]
        intro = rng.choice((the, the, f"{with_article(noun)} called the {{title}}"))
    elif form == "l":
        slot, intro, the = "lake", f"{label} {{lake}}", f"{label} {{lake}}"
        ask = [f"Which {label.lower()}", f"What {label.lower()}", "What"]
    else:
        slot, intro, the, ask = "town", "{town}", "{town}", ["Which town", "What town", "Which place", "Which city"]
    past, participle = _inflected(lemma)
    return _Thing(kind, slot, intro, the, be, tuple(ask), nouns, lemma, past, participle if transitive else None)


class _Composer:
    """One family under way: its sentences, its questions by slot, and what the slots are filled with."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.thing = thing = _drawn_thing(rng)
        self.sentences: list[str] = []
        self.questions: dict[str, list[str]] = {}
        self.taken = {"who", thing.slot, "count"}
        self.picked: set[str] = {thing.lemma, thing.past, *thing.nouns}
        self.asked = f"did {{who}} {thing.lemma}"
        self.title = rng.choice(_TITLES) if rng.random() < 0.12 else None

    def event(self, the: str, *told: str) -> str:
        """Ways to tell what was done with ``the`` thing, and the rest, of which a part may stand in front."""
        front, rest, said = f"{told[0]}, " if told else "", " ".join(told[1:]), " ".join(told)
        did = f"{self.thing.past} {the}"
        ways = [f"{{who}} {did} {said}", f"{front}{{who}} {did} {rest}", f"It was {{who}} who {did} {said}"]
        ways.append(f"The one who {did} {said} was {{who}}")
        if self.thing.participle and the != "{item}":
            be = f"{self.thing.be} {self.thing.participle}"
            ways += [f"{the} {be} by {{who}} {said}", f"{front}{the} {be} by {{who}} {rest}"]
            ways += [] if "{reason}" in said else [f"{the} {be} {said} by {{who}}"]
        chosen = dict.fromkeys(self.rng.choices(ways, (8, 6, 1, 1, 2, 2, 2)[: len(ways)], k=3))
        return " // ".join(text.rstrip().replace("  ", " ") + "." for text in chosen)

    def adjuncts(self) -> list[Row]:
        """What may stand behind the thing, in an order drawn: when and where, which are asked for most, rather last."""
        verb, _, rest = self.thing.lemma.partition(" ")
        closed, chosen = {self.thing.slot, *(_ALIKE[1] if self.thing.slot == "town" else ())}, []
        if not self.thing.participle:
            closed |= {"client", "tool"}
        table = rows(story_phrases.ADJUNCTS)
        for row in self.rng.sample(table, len(table)):
            (verbs,), (slot,), *_ = row
            fits = verbs == "*" or (verb in verbs.split() and (not rest or slot == "ride"))
            if fits and slot not in closed:
                chosen.append(row)
                closed |= {slot}.union(*(alike for alike in _ALIKE if slot in alike))
        often = _ALIKE[0] | _ALIKE[1]
        return sorted(chosen, key=lambda row: row[1][0] in often and self.rng.random() < 0.7)

    def begin(self, adjuncts: list[Row]) -> None:
        """The first sentence, which brings in the thing, and the questions on it."""
        thing, rng, ask, did = self.thing, self.rng, self.questions, self.asked
        told = [rng.choice(adjunct[2]) for adjunct in adjuncts]
        more = ["", *(f" {text}" for text in told)]
        self.sentences.append(self.event(thing.intro, *told))
        heads = rng.sample(thing.ask, min(2, len(thing.ask)))
        asked = [(head.format(did) if "{}" in head else f"{head} {did}") + rng.choice(more) for head in heads]
        titled = f"Which {self.title.lower()}" if self.title else "Who"
        who = rng.choice(("Who", titled, "Who was it that", "Which person", "Which of them"))
        whose = [f"{who} {thing.past} {thing.the}{rng.choice(more)}", f"Who {thing.past} {thing.the}"]
        if thing.participle:
            by = [" by {who}", *(f" by {{who}} {text}" for text in told), *more[1:]]
            be_done = f"{thing.be} {thing.participle}"
            if "{}" not in thing.ask[0]:
                asked.append(f"{rng.choice(thing.ask)} {be_done}{rng.choice(by)}")
            if thing.be == "were":
                ask["count"] = [
                    f"How many {{item}} {did}{rng.choice(more)}?",
                    f"How many {{item}} {be_done}{rng.choice(by)}?",
                ]
            whose.append(f"By whom {thing.be} {thing.the} {thing.participle}{rng.choice(more)}")
            whose += [f"Who {thing.past} something {text}" for text in told]
        elif thing.be == "were":
            ask["count"] = [f"How many {{item}} {did}{rng.choice(more)}?"]
        ask[thing.slot], ask["who"] = [f"{text}?" for text in asked], [f"{text}?" for text in whose]
        for adjunct, text in zip(adjuncts, told, strict=True):
            self.ask_adjunct(adjunct, text)

    def ask_adjunct(self, adjunct: Row, told: str) -> None:
        """Questions on what stands behind the thing."""
        thing, rng = self.thing, self.rng
        _, (slot,), _, heads = adjunct
        ways = [f"{rng.choice(heads)} {self.asked} {thing.the}?" for _ in range(2)]
        if thing.participle:
            by = rng.choice(("", " by {who}"))
            ways.append(f"{rng.choice(heads)} {thing.be} {thing.the} {thing.participle}{by}?")
        last = told.split()[0]
        if slot in _NAMED and last in ("with", "for", "to", "from"):
            ways.append(f"Who {self.asked} {thing.the} {last}?")
        self.taken.add(slot)
        self.questions[slot] = list(dict.fromkeys(ways))

    def add_adjunct(self, adjunct: Row) -> None:
        """A fact about what was done."""
        told = self.rng.choice(adjunct[2])
        self.sentences.append(self.event(self.thing.the, told))
        self.ask_adjunct(adjunct, told)
        if self.thing.participle:
            self.questions["who"].append(f"Who {self.thing.past} {self.thing.the} {told}?")

    def reference(self, text: str) -> str:
        """A question that may name thing or person by what was done."""
        thing, chance = self.thing, self.rng.random()
        if chance < 0.2 and "[the]" in text and "{who}" not in text and thing.slot != "town":
            by = f"{thing.the} of {{who}}"
            if chance > 0.12 or thing.slot == "lake":
                by = f"the {'ones' if thing.be == 'were' else 'one'} that {{who}} {thing.past}"
            return text.replace("[the]", by)
        if chance > 0.85 and "[the]" not in text:
            return text.replace("{who}", f"the {self.rng.choice(('person', 'one'))} who {thing.past} {thing.the}")
        return text

    def add_fact(self, fact: Row) -> None:
        """A fact about the person or the thing, unless it could be mistaken for another one."""
        _, (slot,), told, asked, *whose = fact
        thing, rng = self.thing, self.rng
        renamed = slot if slot not in self.taken else f"{slot}9"
        if (renamed != slot and slot not in _TWICE) or renamed in self.taken or f"{slot} {thing.lemma}" in _CONFUSED:
            return
        picks: dict[str, str] = {}
        for name in re.findall(r"<(\w+)>", told[0]):
            forms, listed = word_lists(story_phrases.LISTS)[name]
            picks |= dict(zip(forms, rng.choice(listed), strict=True))
        if self.picked & {*picks.values()}:
            return
        self.picked |= {*picks.values()}
        self.taken.add(renamed)

        def put(text: str) -> str:
            text = text.replace("[The]", thing.the[0].upper() + thing.the[1:]).replace("[the]", thing.the)
            for name, word in picks.items():
                text = text.replace(f"<{name}>", word)
            return text.replace("[be]", thing.be).replace(f"{slot}}}", f"{renamed}}}").replace("{a_item}", thing.intro)

        self.sentences.append(" // ".join(map(put, rng.sample(told, min(len(told), rng.randint(1, 3))))))
        self.questions[renamed] = [put(self.reference(text)) for text in rng.sample(asked, min(len(asked), 3))]
        if whose and rng.random() < 0.6:
            self.questions["who"].append(put(rng.choice(whose[0])))

    def half(self) -> Half:
        """The family and all that its slots are filled with, as `stories` wants it."""
        rng, parts = self.rng, {"surname": pools()["surname"]}
        real, invented = training_names()
        share = rng.choice((0, 20, 20, 40))
        names = (*rng.sample(real, share), *rng.sample(invented, 40 - share))
        friend = next((slot for slot in sorted(self.taken) if slot.rstrip("9") in _NAMED), "friend")
        for slot in sorted(self.taken - {"who"}):
            base = slot.rstrip("9")
            if base in _NAMED:
                parts[slot] = (names,)
            elif base in _numbers():
                ranges, units = _numbers()[base]
                parts[slot] = (rng.choice(ranges), (rng.choice(units),))
            elif base == "item":
                adjectives = tuple(f"{word} " for word in pools()["adjective"][0]) if rng.random() < 0.15 else ("",)
                parts[slot] = (adjectives, self.thing.nouns)
            else:
                parts[slot] = pools()[base]

        def final(text: str) -> str:
            text = text.replace(f"{{{friend}}}", "{friend}")  # of this one, too, `stories` tells the surname
            if not self.title:
                return text
            return re.sub(r"\{who\}", lambda who: f"{self.title} {who[0]}" if rng.random() < 0.6 else who[0], text)

        questions = {
            slot if slot != friend else "friend": final(" // ".join(texts)) for slot, texts in self.questions.items()
        }
        family = Family(
            f"composed {self.thing.lemma} {self.thing.kind}", {}, tuple(map(final, self.sentences)), questions
        )
        return Half((family,), names, parts, {}, {})


def composed_family(rng: random.Random) -> Half:
    """A family drawn for one story, with the words for its slots."""
    composer = _Composer(rng)
    adjuncts, facts = composer.adjuncts(), rows(story_phrases.FACTS)
    at_once = [adjuncts.pop() for _ in range(rng.choice((0, 1, 1, 1, 2)))]
    composer.begin(sorted(at_once, key=lambda row: row[1] == ["reason"]))  # a clause stands last
    kind, general = composer.thing.kind, composer.thing.slot not in ("town", "lake")
    of_person = [fact for fact in facts if fact[0] == ["p"]]
    of_thing = [fact for fact in facts if kind in fact[0][0].split() or (general and fact[0] == ["*"])] or of_person
    for _ in range(12):
        if len(composer.sentences) == 5:
            break
        source = rng.random()
        if source < 0.25 and adjuncts:
            composer.add_adjunct(adjuncts.pop())
        else:
            composer.add_fact(rng.choice(of_thing if source < 0.65 else of_person))
    return composer.half()


def _made(rng: random.Random, kinds: dict[str, int], make: Callable[[Half, str], Question | None]) -> Question:
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    while True:
        half = composed_family(rng)
        for _ in range(8):
            if (made := make(half, kind)) is not None:
                return made


def make_composed_question(rng: random.Random) -> Question:
    """Like `stories.make_question`, of a family composed for it.

    >>> one = make_composed_question(random.Random(3))
    >>> one == make_composed_question(random.Random(3)), all(answer in one.context for answer in one.answers)
    (True, True)
    """
    kinds = {"": 75, "missing": 12, "fresh": 7, "mixed": 6}
    return _made(rng, kinds, lambda half, kind: attempt(rng, half, kind, False))


def make_composed_crowd(rng: random.Random) -> Question:
    """As `stories.make_crowd`, of a family composed for it."""
    return _made(rng, {"": 75, "fresh": 10, "mixed": 15}, lambda half, kind: crowd(rng, half, kind))
