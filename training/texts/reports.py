"""Short synthetic English reports with reference summaries, generated from a seed.

Each report mixes the facts of one event with irrelevant and confusable sentences (other people, other places, last
year's figure): picking the first name or number fails. The wording tells: facts say "final", "in total", "the reason",
decoys "last year", "had expected", "at first". The summary is a fixed function of the facts. Real news is too hard for
a tiny T5 and cannot be split cleanly; this task is learned in minutes, and still tells copying from memorising.

``held_out=True`` draws from other families, wordings, names and numbers: a score on that half measures the principle.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from training.texts.report_templates import (
    FILLERS_HELD_OUT,
    FILLERS_SEEN,
    HELD_OUT,
    NAMES_HELD_OUT,
    NAMES_SEEN,
    SEEN,
    Family,
    Names,
)

MIN_SENTENCES, MAX_SENTENCES = 6, 20


@dataclass(frozen=True)
class Report:
    """A report, its reference summary and the name of the family of templates that made it."""

    source: str
    summary: str
    template: str


@cache
def _numbers(low: int, high: int, held_out: bool) -> tuple[int, ...]:
    # A remainder splits even narrow ranges and leaves every digit familiar to a model that saw one half.
    return tuple(n for n in range(low, high + 1) if (n % 7 == 3 or n >= 900) == held_out)


class _Slots(dict[str, str]):
    """The values of one report, drawn when a template first asks for them and all different."""

    def __init__(self, rng: random.Random, family: Family, names: Names, held_out: bool) -> None:
        self.rng, self.family, self.names, self.held_out = rng, family, names, held_out

    def __missing__(self, slot: str) -> str:
        value = self._draw(slot.lower())
        while value in self.values():
            value = self._draw(slot.lower())
        self[slot] = value
        return value

    def _draw(self, kind: str) -> str:
        choice, names = self.rng.choice, self.names
        if kind in self.family.words:
            return choice(self.family.words[kind].split("|"))
        if kind in self.family.numbers or kind == "k":
            return str(choice(_numbers(*self.family.numbers.get(kind, (3, 60)), self.held_out)))
        if kind in "tub":
            return "".join(map(choice, names.town))
        surname = "".join(map(choice, names.surname))
        return surname if kind == "s" else f"{choice(names.first)} {surname}"

    def fill(self, template: str) -> str:
        text = template.format_map(self)
        return text[0].upper() + text[1:]

    def fill_filler(self, template: str) -> str:
        for slot in "abk":  # passers-by change from sentence to sentence
            self.pop(slot, None)
        return self.fill(template)


def make_report(rng: random.Random, *, held_out: bool = False) -> Report:
    """Draw one report with its summary; ``rng`` is the only source of chance."""
    family = rng.choice(HELD_OUT if held_out else SEEN)
    names, fillers = (NAMES_HELD_OUT, FILLERS_HELD_OUT) if held_out else (NAMES_SEEN, FILLERS_SEEN)
    return report_of(rng, family, names, fillers.split("|"), held_out=held_out)


def report_of(
    rng: random.Random, family: Family, names: Names, pool: Sequence[str], *, held_out: bool = False,
    opening_first: bool = False,
) -> Report:  # fmt: skip
    """A report of that family with irrelevant sentences of ``pool``, of which up to two may precede the opening."""
    slots = _Slots(rng, family, names, held_out)
    opening, *facts = [slots.fill(rng.choice(fact.split("|"))) for fact in family.facts]
    summary = ". ".join(map(slots.fill, family.summary.split(". ")))
    # Most reports are short to keep training cheap; the exponential tail exercises longer inputs.
    length = min(MAX_SENTENCES, MIN_SENTENCES + int(rng.expovariate(0.33)))
    extra = length - len(family.facts)
    decoys = family.decoys.split("|")
    chosen = rng.sample(decoys, min(extra, rng.randint(2, len(decoys))))
    fillers = [slots.fill_filler(filler) for filler in rng.sample(pool, extra - len(chosen))]
    # The opening names the event, so decoys make no sense before it; fillers do and vary its place.
    lead = 0 if opening_first else rng.choice((0, 0, 0, 1, 2))
    body = facts + [slots.fill(decoy) for decoy in chosen] + fillers[lead:]
    rng.shuffle(body)
    return Report(" ".join([*fillers[:lead], opening, *body]), summary, family.name)


def generate_reports(count: int, seed: int, *, held_out: bool = False) -> Iterator[Report]:
    """Yield ``count`` reports, the same ones for the same seed.

    >>> seen, unseen = ({r.template for r in generate_reports(200, 0, held_out=half)} for half in (False, True))
    >>> seen & unseen
    set()
    """
    rng = random.Random(seed)
    for _ in range(count):
        yield make_report(rng, held_out=held_out)
