"""What was measured, as values: how fast, how good and how large a configuration was, and which row says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from t5accel.timing import Ratio

OUR_LOOP, GENERATE = "our loop", "generate()"  # what runs the model that `accelerate` returns


@dataclass(frozen=True)
class Source:
    """Where a row stands, and what it was measured on. ``fresh``: now, on this machine, and not read from a file."""

    file: str
    row: int
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str
    commit: str | None
    fresh: bool = False

    def __str__(self) -> str:
        return "measured now" if self.fresh else f"{self.file}, row {self.row}"


@dataclass(frozen=True)
class Setting:
    """What a run did. Ratios compare within one run, so a run is known by its file and its setting."""

    model: str
    batch: int
    beams: int
    source_tokens: int
    new_tokens: int
    threads: int


@dataclass(frozen=True)
class Speed:
    """A configuration against transformers with its cache: ``ratio`` has a sample for each round of its run.

    Attributes:
        recipe: the name of one of `recipes.RECIPES`.
        loop: ``OUR_LOOP`` (greedy or beam search of `t5accel.decoding`) or ``GENERATE``.
        bytes_on_disk, peak_memory_bytes: ``None`` where the row does not say.
    """

    source: Source
    setting: Setting
    recipe: str
    loop: str
    ratio: Ratio
    tokens_per_s: float
    bytes_on_disk: int | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class Scores:
    """Text scores of a model in a recipe, on the whole bundled sets; keys are those of `scoring.text_quality`."""

    source: Source
    model: str
    recipe: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Draft:
    """Guessing (``"lookup"`` or ``"speculative"``) against greedy search in the same precision, at natural length.

    ``equal`` of ``answers`` were, token by token, those of greedy search.
    """

    source: Source
    model: str
    task: str
    recipe: str
    batch: int
    system: str
    ratio: Ratio
    equal: int
    answers: int


@dataclass(frozen=True)
class Relative:
    """A smaller model made from ``whole``: ``ratio`` is the time of ``whole`` in the same recipe over its own.

    ``losses``: scores of ``whole`` in fp32 minus its own.
    """

    source: Source
    model: str
    whole: str
    recipe: str
    batch: int
    ratio: Ratio
    losses: Mapping[str, float]
    bytes_on_disk: int


@dataclass(frozen=True)
class Export:
    """How long a model took to be exported, once."""

    source: Source
    model: str
    seconds: float


@dataclass(frozen=True)
class Record:
    """All evidence that was found. ``left_out``: by file, how many of its rows are of no kind that is read here."""

    found: tuple[Speed | Scores | Draft | Relative | Export, ...] = ()
    looked_in: tuple[str, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    def of(self, kind: type) -> list[Any]:
        """The evidence of one kind, in the order of files and rows.

        >>> Record().of(Speed)
        []
        """
        return [one for one in self.found if isinstance(one, kind)]

    def __add__(self, other: Record) -> Record:
        looked_in = self.looked_in + other.looked_in
        return Record(self.found + other.found, looked_in, {**self.left_out, **other.left_out})
