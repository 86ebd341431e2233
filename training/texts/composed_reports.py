"""Reports whose events are composed from `report_phrases`, for training alone.

The events of `report_templates` are few, and a small model learns their summaries by heart. All follow one principle:
the first sentence is the opening in short with its thing, number and reason; the second tells who or how much else.
"Final", "in total" or "the reason" belongs there; "last year", "at first" or "had expected" does not.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from functools import cache

from training.texts import report_phrases
from training.texts.composed_stories import pools, rows, training_names, with_article, word_lists
from training.texts.report_templates import FILLERS_SEEN, NAMES_SEEN, Family, Names
from training.texts.reports import Report, report_of

_IN_TOTAL = ("in total", "in all", "in the end", "all in all", "finally")
_NOT_NOW = ("Last year,", "A year ago,", "At first,", "In the past,", "Some had expected that", "Elsewhere,")
_ONSETS = "b bl br c ch cl d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk st t th tr v w y z".split()
_VOWELS = "a ai e ea i o oo u".split()
_CODAS = ("", *"ck d l m n nd r s st t".split())
_RANGES = ((4, 60), (12, 190), (100, 890))


def _put(rng: random.Random, text: str, picks: dict[str, str]) -> str:
    """Fill in words: <place> the one in ``picks``, drawn when first asked for; <a_place> with its article."""

    def word(match: re.Match[str]) -> str:
        name = match[1].lower().removeprefix("a_")
        if name not in picks:
            base, number = name.rstrip("23"), name[len(name.rstrip("23")) :]
            forms, listed = word_lists(report_phrases.WORDS)[base]
            picks.update(zip((form + number for form in forms), rng.choice(listed), strict=True))
        text = with_article(picks[name]) if match[1][:2] in ("a_", "A_") else picks[name]
        return text[0].upper() + text[1:] if match[1][0].isupper() else text

    return re.sub(r"<(\w+)>", word, text)


def _in_total(rng: random.Random, text: str) -> str:
    """With a marker in place of ~: "In total it cost ...", "It cost ... in total"."""
    marker = rng.choice(_IN_TOTAL)
    return text.replace(" ~", f" {rng.choice(_IN_TOTAL[:3])}").replace(
        "~ ", f"{marker}{',' * (marker == 'all in all')} "
    )


def _named_again(rng: random.Random, text: str) -> str:
    """Half the time, what happened is named: "The flood lasted ..." for "It lasted ..."."""
    if rng.random() < 0.5:
        return text
    event = rng.choice(_named("fest", "harm", "work", "contest"))
    text = re.sub(r"^The (reason|cause)\b", rf"The \1 of the {event}", text)
    return re.sub(r"\b([Ii])t\b(?! was <boss)", lambda it: f"{'T' if it[1] == 'I' else 't'}he {event}", text, count=1)


def _plain(text: str) -> str:
    """Drop a fact's marker, as in a summary."""
    text = text.replace("~ ", "").replace(" ~", "").removesuffix(".")
    return re.sub(r"^It was (.*?) who ", r"\1 ", text)


@cache
def _named(*forms: str) -> tuple[str, ...]:
    """All the words that these lists have."""
    return tuple(word[0] for form in forms for word in word_lists(report_phrases.WORDS)[form][1])


def _things(rng: random.Random, kind: str) -> str:
    """Four things of a kind as `reports` wants them: one is the fact, the others are for decoys."""

    def thing() -> str:
        adjective = rng.choice(_named("adjective", "fine") if rng.random() < 0.6 else _named("noun", "place", "work"))
        if kind == "c" or (kind == "r" and rng.random() < 0.4):
            return f"{adjective} {rng.choice(_named('plural', 'units', 'folk'))}"
        named = f"{adjective} {rng.choice(_named('noun', 'place', 'work', 'ride'))}"
        return f"the {named}" if kind == "d" else with_article(named)

    return "|".join(dict.fromkeys(thing() for _ in range(4)))


def _lowered(sentence: str) -> str:
    return sentence if re.match(r"I\b|\{", sentence) else sentence[0].lower() + sentence[1:]


def statements(texts: Iterable[str]) -> tuple[str, ...]:
    """Plain sentences of 4 to 12 words among the texts, without their full stops; Tom, or Mary, becomes a gap.

    >>> statements(["Tom likes the sea.", "Is the sea cold?", "We saw it all. It was cold.", "The sea is cold."])
    ('{p} likes the sea', 'The sea is cold')
    """
    texts = list(dict.fromkeys(texts))
    usual = {word for text in texts for word in text.split()[1:] if word.islower()} | {"i", "tom", "mary"}
    plain = re.compile(r"([A-Z][A-Za-z]*)(?: [a-z][A-Za-z'-]*,?| I,?| (?:Tom|Mary)(?:'s)?){3,11}\.")
    found = []
    for text in texts:
        match = plain.fullmatch(text)
        if match and match[1].lower() in usual:
            statement, people = re.subn(r"\b(?:Tom|Mary)\b", "{p}", text.removesuffix("."))
            if people < 2:
                found.append(statement)
    return tuple(found)


@cache
def _by_noun(said: tuple[str, ...]) -> dict[str, list[str]]:
    """Statements that name the same thing, where there are 3 to 300 of them."""
    found: dict[str, list[str]] = {}
    for statement in said:
        nouns = re.findall(r"\b(?:[Tt]he|[Aa]n?|[Mm]y|[Hh]is|[Hh]er|[Oo]ur|[Tt]heir) ([a-z]{3,})\b", statement)
        for noun in dict.fromkeys(nouns):
            found.setdefault(noun, []).append(statement)
    return {noun: listed for noun, listed in found.items() if 3 <= len(listed) <= 300}


def composed_event(rng: random.Random, said: Sequence[str] = ()) -> Family:
    """Draw the facts, decoys and summary of one event, with gaps for names and numbers.

    With ``said``, some `statements`, one is the opening and others may be facts: these share a name with the opening or
    have a marker. A statement about "last year" or "at first" does not count.
    """
    picks: dict[str, str] = {}
    related: list[str] = []
    if said:
        core = rng.choice(said)
        if rng.random() < 0.65 and (by_noun := _by_noun(tuple(said))):
            core, *related = rng.sample(by_noun[rng.choice(list(by_noun))], 3)
        core += rng.choice(("", "", " in {t}"))
        openings, core = [f"{core}."], f"{core} +"
    else:
        openings, (core,) = rng.choice(rows(report_phrases.OPENINGS))
    facts = [_put(rng, rng.choice(openings), picks)]
    core = _put(rng, core, picks)
    slots = set(re.findall(r"\{(\w)\}", core))
    more = []
    for slot in rng.choice(("", "n", "n", "n", "r", "nr", "nr", "nc", "cr")):
        found = [row[1:] for row in rows(report_phrases.FIRST) if row[0] == [slot] and slot not in slots]
        if found:
            tellings, (phrase,) = rng.choice(found)
            if said and slot == "r" and rng.random() < 0.5:
                tellings, phrase = [f"{rng.choice(said).replace('{p}', '{e}')} because of {{r}}."], "because of {r}"
            facts.append(_put(rng, _named_again(rng, rng.choice(tellings)), picks))
            more.append(_put(rng, phrase, picks))
            slots.add(slot)
            if slot == "n":
                picks["thing"] = more[-1].rpartition("} ")[2]
    first = " ".join(phrase for phrase in more if phrase.startswith("with"))
    rest = " ".join(phrase for phrase in more if not phrase.startswith("with"))
    summary = " ".join(f"{core.replace('+', first)} {rest}".split())
    second = []
    kinds = ("s", "s", "sp", "sm", "xs") if said else ("p", "m", "d", "x", "pm", "pm", "pd", "dm", "xd")
    for kind in rng.choice(kinds):
        if kind == "s":
            sentence = (related[0] if related else rng.choice(said)).replace("{p}", "{o}")
            told = f"{sentence}." if related else rng.choice((f"~ {_lowered(sentence)}.", f"{sentence} ~."))
            facts.append(_in_total(rng, told))
            second.append(sentence)
            continue
        (tellings,) = rng.choice([row[1:] for row in rows(report_phrases.SECOND) if row[0] == [kind]])
        telling = _named_again(rng, rng.choice(tellings))
        if kind in "mx":
            picks["thing2"] = _put(rng, re.search(r"<(units2|folk|days2|money2)>", telling)[0], picks)
        telling = _put(rng, telling, picks)
        if "p" in slots:
            telling = telling.replace("{p}", "{q}")
        slots |= {kind, "m"} if kind == "x" else {kind}
        facts.append(_in_total(rng, telling))
        second.append(_plain(telling))
    second[1:] = map(_lowered, second[1:])
    summary += f". {', and '.join(second)}."
    event = _with_decoys(rng, Family("composed", {}, {}, tuple(facts), "", summary), slots, picks)
    if not related:
        return event
    past = f"{rng.choice(_NOT_NOW)} {_lowered(related[1].replace('{p}', '{P}'))}."
    return event._replace(decoys="|".join((event.decoys, past)))


def _with_decoys(rng: random.Random, event: Family, slots: set[str], picks: dict[str, str]) -> Family:
    decoys = []
    for (slot,), wordings in rows(report_phrases.DECOYS):
        if slot in slots | {"p", "t"}:
            for wording in rng.sample(wordings, 2 if slot == "p" else 1):
                for drawn_anew in ("idled", "job", "boss3"):
                    picks.pop(drawn_anew, None)
                decoys.append(_put(rng, wording, picks))
    numbers = {slot: rng.choice(_RANGES) for slot in ("n", "m")}
    words = {slot: _things(rng, slot) for slot in "cdr" if slot in slots}
    return event._replace(numbers=numbers, words=words, decoys="|".join(decoys))


@cache
def _fillers() -> tuple[str, ...]:
    rng = random.Random(0)
    ((wordings,),) = rows(report_phrases.FILLERS)
    return (*FILLERS_SEEN.split("|"), *dict.fromkeys(_put(rng, rng.choice(wordings), {}) for _ in range(500)))


@cache
def _names() -> tuple[Names, ...]:
    """Real names, invented ones, and syllables in a row: a name to copy must not be known by heart."""
    parts, (real, invented) = pools(), training_names()
    open_ones = tuple(onset + vowel for onset in _ONSETS for vowel in _VOWELS)
    closed = tuple(syllable + coda for syllable in open_ones for coda in _CODAS)
    first, last = tuple(map(str.capitalize, open_ones)), tuple(map(str.capitalize, closed))
    new = [Names(list(invented), (last, closed), (first, closed)),
           Names(list(invented), (first, open_ones, closed), (last, closed))]  # fmt: skip
    known = [Names(list(names), parts["surname"], parts["town"]) for names in (real, invented)]
    return NAMES_SEEN, *known, *new


def make_composed_report(rng: random.Random, said: Sequence[str] = ()) -> Report:
    """Like `reports.make_report`, of an event composed for it; ``said`` are those of `composed_event`.

    >>> report = make_composed_report(random.Random(4))
    >>> report == make_composed_report(random.Random(4)), report.template
    (True, 'composed')
    """
    fillers: Sequence[str] = _fillers()
    if said:
        passing = [f"{one.replace('{p}', '{a}')}." for one in rng.sample(said, min(40, len(said)))]
        fillers = [*rng.sample(fillers, 20), *passing]
    # What opens a report of statements is known by its place alone, so that it comes first.
    return report_of(rng, composed_event(rng, said), rng.choice(_names()), fillers, opening_first=bool(said))
