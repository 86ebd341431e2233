"""Stories whose topics are composed, for training alone: a verb, a thing, what is told of it and of people.

The families of `story_templates` are few, so that a small model learns them by heart. Here a family is drawn for each
story: what people did with what, and the facts beside it, in wordings put together from `story_phrases`. Then it is
told and asked as the others are: `stories` fills in who, what and where, and sees to it that only one of them answers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from t5accel.mini import story_phrases
from t5accel.mini.report_templates import NAMES_HELD_OUT
from t5accel.mini.report_templates import NAMES_SEEN as REPORT_NAMES
from t5accel.mini.stories import Question, attempt, crowd
from t5accel.mini.story_templates import HALVES, Family, Half

_IN_TIME = {"day", "year", "clock", "season"}  # one asks for each of them with "when", so a story tells but one
_IN_PLACE = {"town", "spot"}
_NAMED = {"kin", "pal", "maker", "helper", "client", "seller"}
_TWICE = {
    "colour",
    "number",
    "reason",
    "hours",
    "minutes",
    "pal",
    "age",
}  # questions tell two facts of such a kind apart
_CONFUSED = {"gear carry", "gear pack", "meal eat", "spot2 keep", "spot2 leave", "sum give", "maker make", "maker cook",
             "pet find", "hobby like"}  # one question would ask for two facts  # fmt: skip
_TITLES = ("Professor", "Inspector", "Coach", "Judge", "Sergeant", "Chef", "Senator", "Major", "Agent", "Uncle")
_Adjunct = tuple[tuple[str, ...], str, list[str], list[str]]
_Fact = tuple[tuple[str, ...], str, list[str], list[str], list[str]]


class _Thing(NamedTuple):
    """A class of things and a verb for it, with the wordings of both."""

    kind: str  # the class that facts are chosen by
    slot: str
    intro: str  # as it is told first: "{a_item}"
    the: str  # and later: "the {item}"
    be: str
    lemma: str
    past: str
    participle: str | None  # None: there is no passive
    ask: tuple[str, ...]  # "What", "Which animal": how one asks for it; a gap is where a preposition goes
    nouns: tuple[str, ...]


def _rows(text: str) -> list[list[str]]:
    lines = re.sub(r"\n +", " ", text).strip().split("\n")
    return [[part.strip() for part in line.removesuffix(" |").split(" | ")] for line in lines]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.replace("_", " ") for word in text.split())


def _table(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in re.sub(r"\n +", " ", text).strip().split("\n"))


@cache
def _things() -> list[tuple[str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
    found = []
    for form, labels, verbs, nouns in _rows(story_phrases.THINGS):
        things = tuple(noun.strip() for noun in nouns.split(","))
        kind = things[0] if form in "ans" else labels.split()[0].lower()
        found.append((form, kind, _words(labels), _words(verbs), things))
    return found


@cache
def _prepositional() -> list[tuple[str, tuple[str, ...]]]:
    pairs = (row.split(": ") for row in re.sub(r"\s*\n", " ", story_phrases.AT).strip().split(" | "))
    return [(lemma, tuple(kinds.split())) for lemma, kinds in pairs]


@cache
def _irregular() -> dict[str, tuple[str, str]]:
    return {row.split()[0]: tuple(row.split()[1:]) for row in re.sub(r"\s+", " ", story_phrases.IRREGULAR).split(",")}


@cache
def _facts() -> list[_Fact]:
    return [
        (tuple(of.split()), slot, told.split(" // "), asked.split(" // "), who.split(" // ") if who else [])
        for of, slot, told, asked, who in ((*row, "")[:5] for row in _rows(story_phrases.FACTS))
    ]


@cache
def _adjuncts() -> list[_Adjunct]:
    return [
        (tuple(verbs.split()), slot, told.split(" // "), asked.split(" // "))
        for verbs, slot, told, asked in _rows(story_phrases.ADJUNCTS)
    ]


@cache
def _lists() -> dict[str, tuple[str, ...]]:
    return {name: _words(words) for name, words in _table(story_phrases.LISTS).items()}


@cache
def _pools() -> dict[str, tuple[tuple[str, ...], ...]]:
    pools = {}
    for name, words in _table(story_phrases.POOLS).items():
        parts = [_words(part) for part in words.split(" + ")]
        if name in ("season", "reason", "title"):  # whole words: a space between
            parts[0] = tuple(f"{word} " for word in parts[0])
        pools[name] = tuple(parts)
    minutes = tuple(f"{minute:02d}" for minute in range(5, 60, 5))
    pools |= {
        "clock": (tuple(f"{hour}:" for hour in range(6, 24)), minutes),
        "home": pools["town"],
        "spot2": pools["spot"],
    }
    return pools | {"lake": pools["town"]}


@cache
def _numbers(low: int, high: int) -> tuple[str, ...]:
    return tuple(map(str, range(low, high + 1)))


@cache
def training_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Real first names of the seen halves, and invented ones; none is a name of a held-out half."""
    held_out = {*HALVES[True].names, *NAMES_HELD_OUT.first}
    first, middle, last = _pools()["first"]
    rng = random.Random(0)
    invented = {"".join((rng.choice(first), rng.choice(middle), rng.choice(last))) for _ in range(6000)}
    real = {*HALVES[False].names, *REPORT_NAMES.first}
    return tuple(sorted(real - held_out)), tuple(sorted(invented - real - held_out))


def _inflected(lemma: str) -> tuple[str, str]:
    """Past and participle; what stands behind the verb stays.

    >>> _inflected("dig up"), _inflected("carry")
    (('dug up', 'dug up'), ('carried', 'carried'))
    """
    verb, _, rest = lemma.partition(" ")
    regular = verb + "d" if verb[-1] == "e" else verb[:-1] + "ied" if re.search("[^aeiou]y$", verb) else verb + "ed"
    past, participle = _irregular().get(verb, (regular, regular))
    return f"{past} {rest}".strip(), f"{participle} {rest}".strip()


def _drawn_thing(rng: random.Random) -> _Thing:
    form, kind, labels, verbs, nouns = rng.choice(_things())
    if form == "l" and rng.random() < 0.6:  # of these there is less to tell
        return _drawn_thing(rng)
    lemma, preposition = rng.choice(verbs), False
    if rng.random() < 0.2:
        lemma, kinds = rng.choice(_prepositional())
        kind, preposition = rng.choice(kinds), True
        form, kind, labels, _, nouns = next(
            (row for row in _things() if row[1] == kind), ("town", kind, ("town",), (), ())
        )
    past, participle = _inflected(lemma)
    label, be, slot = rng.choice(labels), "was", "item"
    ask = ["What", "What", f"Which {label}", f"What {label}"]
    if form == "a":
        intro, the = "{a_item}", "the {item}"
    elif form == "n":
        intro, the, be = "{count} {item}", "the {item}", "were"
        ask = ["What", "What", f"Which {label}s", f"What kind of {label}s"]
    elif form == "s":
        intro, the = rng.choice(("{item}", "some {item}")), "the {item}"
    elif form == "x":
        head, slot = rng.choice(nouns), "topic"
        intro, the, ask = f"a{'n' * (head[0] in 'aeiou')} {head} {{topic}}", f"the {head} {{topic}}", []
        first = head.split()[0]
        if preposition:
            ask = ["What"]
        else:
            ask = [
                f"What {{}} a{'n' * (head[0] in 'aeiou')} {head}",
                f"{head.split()[-1].capitalize()} what {{}} a {first}",
            ]
            ask = ask[: 1 + (first[0] not in "aeiou")]
    elif form == "t":
        noun, slot = rng.choice(nouns), "title"
        the = "the {title}"
        intro = rng.choice((the, the, f"a{'n' * (noun[0] in 'aeiou')} {noun} called the {{title}}"))
        ask = [f"Which {noun}", f"What {noun}"]
    elif form == "l":
        slot, intro = "lake", f"{label} {{lake}}"
        the, ask = intro, [f"Which {label.lower()}", f"What {label.lower()}", "What"]
    else:
        slot, intro, the, ask = "town", "{town}", "{town}", ["Which town", "What town", "Which place", "Which city"]
    return _Thing(kind, slot, intro, the, be, lemma, past, None if preposition else participle, tuple(ask), nouns)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


class _Composer:
    """One family under way: its sentences, its questions by slot, and what the slots are filled with."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.thing = _drawn_thing(rng)
        self.sentences: list[str] = []
        self.questions: dict[str, list[str]] = {}
        self.taken = {"who", self.thing.slot, "count"}
        self.picked: set[str] = {self.thing.lemma, self.thing.past, *self.thing.nouns}
        self.title = rng.choice(_TITLES) if rng.random() < 0.12 else None

    def event(self, the: str, *told: str) -> str:
        """Ways to tell what was done with ``the`` thing, and the rest, of which a part may stand in front."""
        thing, rng = self.thing, self.rng
        front, rest = (f"{told[0]}, ", " ".join(told[1:])) if told else ("", "")
        said = " ".join(told)
        did = f"{thing.past} {the}"
        ways = [f"{{who}} {did} {said}", f"{front}{{who}} {did} {rest}", f"It was {{who}} who {did} {said}"]
        ways.append(f"The one who {did} {said} was {{who}}")
        if thing.participle and the != "{item}":
            be = f"{thing.be} {thing.participle}"
            ways += [f"{the} {be} by {{who}} {said}", f"{front}{the} {be} by {{who}} {rest}"]
            ways += [] if "{reason}" in said else [f"{the} {be} {said} by {{who}}"]
        chosen = dict.fromkeys(rng.choices(ways, (8, 6, 1, 1, 2, 2, 2)[: len(ways)], k=3))
        return " // ".join(text.rstrip().replace("  ", " ") + "." for text in chosen)

    def adjuncts(self) -> list[_Adjunct]:
        verb, _, rest = self.thing.lemma.partition(" ")
        fit = [row for row in _adjuncts() if "*" in row[0] or verb in row[0] and (not rest or row[1] == "ride")]
        if self.thing.participle is None:
            fit = [row for row in fit if row[1] not in ("client", "tool")]
        self.rng.shuffle(fit)
        chosen, closed = [], {self.thing.slot}
        for row in fit:
            if row[1] not in closed:
                chosen.append(row)
                closed |= {row[1]} | next((group for group in (_IN_TIME, _IN_PLACE) if row[1] in group), set())
        return [row for row in chosen if not (row[1] in _IN_PLACE and self.thing.slot == "town")]

    def begin(self, adjuncts: list[_Adjunct]) -> None:
        """The first sentence, which brings in the thing, and the questions on it."""
        thing, rng, ask = self.thing, self.rng, self.questions
        told = [rng.choice(adjunct[2]) for adjunct in adjuncts]
        more = ["", *(f" {text}" for text in told)]
        self.sentences.append(self.event(thing.intro, *told))
        ask[thing.slot] = []
        for head in rng.sample(thing.ask, min(2, len(thing.ask))):
            verb = f"did {{who}} {thing.lemma}"
            ask[thing.slot].append(f"{head.format(verb) if '{}' in head else f'{head} {verb}'}{rng.choice(more)}?")
        if thing.participle and "{" not in "".join(thing.ask):
            by = rng.choice([" by {who}", *(f" by {{who}} {text}" for text in told), *more[1:]])
            ask[thing.slot].append(f"{rng.choice(thing.ask)} {thing.be} {thing.participle}{by}?")
        if thing.be == "were":
            by = rng.choice((" by {who}", *more[1:]))
            ask["count"] = [f"How many {{item}} did {{who}} {thing.lemma}{rng.choice(more)}?"]
            ask["count"].append(f"How many {{item}} were {thing.participle}{by}?")
        who = rng.choice(("Who", "Who", "Who was it that", "Which person", "Which of them"))
        ask["who"] = [f"{who} {thing.past} {thing.the}{rng.choice(more)}?", f"Who {thing.past} {thing.the}?"]
        if thing.participle:
            ask["who"].append(f"By whom {thing.be} {thing.the} {thing.participle}{rng.choice(more)}?")
            ask["who"] += [f"Who {thing.past} something {text}?" for text in told]
        for adjunct, text in zip(adjuncts, told, strict=True):
            self.adjunct_questions(adjunct, text)

    def adjunct_questions(self, adjunct: _Adjunct, told: str) -> None:
        thing, rng = self.thing, self.rng
        _, slot, _, heads = adjunct
        self.taken.add(slot)
        ways = [
            f"{rng.choice(heads)} did {{who}} {thing.lemma} {thing.the}?",
            f"{rng.choice(heads)} did {{who}} {thing.lemma} {thing.the}?",
        ]
        if thing.participle:
            ways.append(
                f"{rng.choice(heads)} {thing.be} {thing.the} {thing.participle}{rng.choice(('', ' by {who}'))}?"
            )
        last = told.split()[0]
        if slot in _NAMED and last in ("with", "for", "to", "from"):
            ways.append(f"Who did {{who}} {thing.lemma} {thing.the} {last}?")
        self.questions[slot] = list(dict.fromkeys(ways))

    def reference(self, text: str) -> str:
        """A question that may name thing or person by what was done."""
        thing, chance = self.thing, self.rng.random()
        if chance < 0.2 and "{who}" not in text and thing.slot != "town":
            label = "the one" if thing.slot in ("lake", "title") or thing.be == "were" else "the thing"
            by = (
                f"{thing.the} of {{who}}"
                if chance < 0.12 and thing.slot != "lake"
                else f"{label} that {{who}} {thing.past}"
            )
            by = by.replace("the one", "the ones") if thing.be == "were" else by
            return text.replace("[the]", by)
        if chance > 0.85 and "{item}" not in text and "[the]" not in text:
            return text.replace("{who}", f"the {self.rng.choice(('person', 'one'))} who {thing.past} {thing.the}")
        return text

    def add_adjunct(self, adjunct: _Adjunct) -> None:
        """A fact about what was done."""
        told = self.rng.choice(adjunct[2])
        self.sentences.append(self.event(self.thing.the, told))
        self.adjunct_questions(adjunct, told)
        if self.thing.participle:
            self.questions["who"].append(f"Who {self.thing.past} {self.thing.the} {told}?")

    def add_fact(self, fact: _Fact) -> None:
        """A fact about the person or the thing, unless it could be mistaken for another one."""
        _, slot, *wordings = fact
        thing, rng, renamed = self.thing, self.rng, slot
        if slot in self.taken:
            if slot not in _TWICE or f"{slot}9" in self.taken:
                return
            renamed = f"{slot}9"
        verb = thing.lemma.split()[0]
        if f"{slot} {verb}" in _CONFUSED:
            return
        picks: dict[str, str] = {}
        lists = _lists()
        for name in dict.fromkeys(re.findall(r"<(\w+)>", " ".join(wordings[0]))):
            both = next(key for key in lists if key.split("/")[0] == name)
            choices = [word for word in rng.sample(lists[both], 3) if not self.picked & {word, *word.split("/")}]
            if not choices:
                return
            self.picked |= {choices[0], *choices[0].split("/")}
            picks |= dict(zip(both.split("/"), choices[0].split("/"), strict=True))
        self.taken.add(renamed)

        capital = _capital(thing.the)

        def put(text: str) -> str:
            text = text.replace("[The]", capital).replace("[the]", thing.the).replace("[be]", thing.be)
            for name, word in picks.items():
                text = text.replace(f"<{name}>", word)
            if renamed != slot:
                text = text.replace(f"{slot}}}", f"{renamed}}}")
            return text.replace("{a_item}", thing.intro)

        told = [put(text) for text in rng.sample(wordings[0], min(len(wordings[0]), rng.randint(1, 3)))]
        asked = [put(self.reference(text)) for text in rng.sample(wordings[1], min(len(wordings[1]), 3))]
        self.sentences.append(" // ".join(told))
        self.questions[renamed] = asked
        if wordings[2] and rng.random() < 0.6:
            self.questions["who"].append(put(rng.choice(wordings[2])))

    def half(self) -> Half:
        """The family and all that its slots are filled with, as `stories` wants it."""
        rng = self.rng
        names = list(self.names())
        parts: dict[str, tuple[tuple[str, ...], ...]] = {}
        rename = {slot: "friend" for slot in self.taken if slot.rstrip("9") in _NAMED}
        rename = dict(rng.sample(sorted(rename.items()), min(1, len(rename))))  # of this one, too, the surname is told

        def final(text: str) -> str:
            for old, new in rename.items():
                text = text.replace(f"{{{old}}}", f"{{{new}}}")
            if self.title:
                text = re.sub(
                    r"\{who\}", lambda match: f"{self.title} {match[0]}" if rng.random() < 0.6 else match[0], text
                )
            return text

        for slot in self.taken - {"who"}:
            base = slot.rstrip("9")
            if base in _NAMED:
                parts[slot] = (tuple(names),)
            elif base in story_phrases.NUMBERS:
                narrow, wide, units = story_phrases.NUMBERS[base]
                unit = rng.choice(units.split("|"))
                parts[slot] = (_numbers(*(narrow if rng.random() < 0.6 else wide)), (f" {unit}".rstrip(),))
            elif base == "item":
                parts[slot] = (self.thing.nouns,)
                if rng.random() < 0.15:
                    parts[slot] = (tuple(f"{word} " for word in _pools()["adjective"][0]), self.thing.nouns)
            else:
                parts[slot] = _pools()[base]
        parts["surname"] = _pools()["surname"]
        questions = {rename.get(slot, slot): final(" // ".join(texts)) for slot, texts in self.questions.items()}
        name = f"composed {self.thing.lemma} {self.thing.kind}"
        family = Family(name, {}, tuple(map(final, self.sentences)), questions)
        return Half((family,), tuple(names), parts, {}, {})

    def names(self) -> tuple[str, ...]:
        """Forty of them: real, invented, or both."""
        real, invented = training_names()
        share = self.rng.choice((0, 20, 20, 40))
        return (*self.rng.sample(real, share), *self.rng.sample(invented, 40 - share))


def composed_family(rng: random.Random) -> Half:
    """A family drawn for one story, and what its slots are filled with.

    >>> half = composed_family(random.Random(2))
    >>> len(half.families), len(half.families[0].sentences) >= 3
    (1, True)
    """
    composer = _Composer(rng)
    adjuncts = composer.adjuncts()
    count = rng.choice((0, 1, 1, 1, 2))
    composer.begin(
        sorted((adjuncts.pop() for _ in range(count)), key=lambda row: row[1] == "reason")
    )  # clauses stand last
    kind = composer.thing.kind
    general = composer.thing.slot not in ("town", "lake")
    of_thing = [fact for fact in _facts() if kind in fact[0] or "*" in fact[0] and general]
    of_person = [fact for fact in _facts() if "p" in fact[0]]
    for _ in range(12):
        if len(composer.sentences) == 5:
            break
        source = rng.random()
        if source < 0.25 and adjuncts:
            composer.add_adjunct(adjuncts.pop())
        elif source < 0.65 and of_thing:
            composer.add_fact(rng.choice(of_thing))
        else:
            composer.add_fact(rng.choice(of_person))
    return composer.half()


def _made(
    rng: random.Random, kinds: tuple[str, ...], shares: tuple[int, ...], make: Callable[[Half, str], Question | None]
) -> Question:
    kind = rng.choices(kinds, shares)[0]
    while True:
        half = composed_family(rng)
        for _ in range(8):
            if (made := make(half, kind)) is not None:
                return made


def make_composed_question(rng: random.Random, *, short: bool = False) -> Question:
    """As `stories.make_question`, of a family composed for it; for training alone.

    >>> one = make_composed_question(random.Random(3))
    >>> one == make_composed_question(random.Random(3)), all(answer in one.context for answer in one.answers)
    (True, True)
    """
    return _made(
        rng, ("", "missing", "fresh", "mixed"), (75, 12, 7, 6), lambda half, kind: attempt(rng, half, kind, short)
    )


def make_composed_crowd(rng: random.Random) -> Question:
    """As `stories.make_crowd`, of a family composed for it."""
    return _made(rng, ("", "fresh", "mixed"), (75, 10, 15), lambda half, kind: crowd(rng, half, kind))
