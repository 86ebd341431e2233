"""What is recorded about a claim: sentences whose every number is read from a file of results, and a verdict.

A verdict is not written beside the figures but found from them, by cases that say when they apply. So a file that is
recorded again changes the sentence, and where it must, the verdict; figures that fit no case raise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

HOLDS, CONDITIONS, NO_LONGER = "holds", "holds with conditions", "no longer holds"
NOT_MEASURED = "not measured here"
FOLDER = "data/results"

Values = Mapping[str, float]


class ClaimError(ValueError):
    """A figure is not where a claim looks for it, or all figures together fit none of its cases."""


@dataclass(frozen=True)
class Place:
    """Numbers in a file of results.

    Attributes:
        file: under ``data/results``.
        row: what the row says, by key; exactly one row may fit. Texts may hold ``*``.
        key: of that row, with dots on the way down.
    """

    file: str
    row: Mapping[str, Any]
    key: str

    def look(self, folder: Path) -> Any:
        """What stands there. Raises `ClaimError` where there is not exactly one such row, or not that key."""
        rows = [row for row in _content(folder / self.file)["rows"] if _fits(row, self.row)]
        if len(rows) != 1:
            raise ClaimError(f"{self.file} has {len(rows)} rows with {dict(self.row)}; there has to be one.")
        found: Any = rows[0]
        for part in self.key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                raise ClaimError(f"The row of {self.file} with {dict(self.row)} has no {self.key}.")
            found = found[part]
        return found


@dataclass(frozen=True)
class Figure:
    """A number of a sentence.

    Attributes:
        of: where it stands, or what it is computed from.
        how: one of ``HOW``.
        times: what the result is multiplied by: 100 for per cent.
        text: how it is written.
    """

    of: tuple[Place, ...]
    how: str = "value"
    times: float = 1
    text: str = "{:.2f}"

    def value(self, folder: Path) -> float:
        """The number, unrounded."""
        return self.times * HOW[self.how](*(place.look(folder) for place in self.of))

    def to_json(self, folder: Path) -> dict[str, Any]:
        """What lets a reader find and compute the number again."""
        value = self.value(folder)
        of = [{"file": f"{FOLDER}/{place.file}", "row": dict(place.row), "key": place.key} for place in self.of]
        return {
            "text": self.text.format(value), "value": value, "how": self.how, "times": self.times,
            "format": self.text, "of": of,
        }  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A verdict, why, and for which figures; ``why`` may name figures as the sentence does."""

    verdict: str
    why: str
    when: Callable[[Values], bool] = lambda _: True


@dataclass(frozen=True)
class Reading:
    """One way to judge a claim, from figures by name.

    Attributes:
        measured: a sentence; ``{name}`` stands for a figure, and no other number may stand in it.
        cases: the first one that fits the figures gives the verdict.
        may_lack: its file may be there without these figures, as where a package was not installed.
    """

    figures: Mapping[str, Figure]
    measured: str
    cases: tuple[Case, ...] = ()
    may_lack: bool = False

    def files(self) -> list[str]:
        """Those that the figures stand in, the first one first."""
        return list(dict.fromkeys(place.file for figure in self.figures.values() for place in figure.of))

    def is_recorded(self, folder: Path) -> bool:
        if not all((folder / file).is_file() for file in self.files()):
            return False
        if self.may_lack:
            try:
                for figure in self.figures.values():
                    figure.value(folder)
            except ClaimError:
                return False
        return True


@dataclass(frozen=True)
class Claim:
    """What was claimed, in our words.

    Attributes:
        readings: the first whose files are all recorded is taken.
        needs: why it is not measured here, and what it would take; for a claim whose files are not recorded yet, what
            records them.
        beside: of a claim that is not measured, what was measured on this kind of machine instead; no verdict on it.
    """

    id: str
    claim: str
    needs: str
    readings: tuple[Reading, ...] = ()
    beside: Reading | None = None

    def to_row(self, folder: Path) -> dict[str, Any]:
        """The row of ``claims.json``. Raises `ClaimError` where figures are missing or fit no case."""
        reading = next((one for one in self.readings if one.is_recorded(folder)), None)
        if reading is not None:
            values = {name: figure.value(folder) for name, figure in reading.figures.items()}
            case = next((case for case in reading.cases if case.when(values)), None)
            if case is None:
                rounded = {name: round(value, 3) for name, value in values.items()}
                raise ClaimError(f"{self.id}: no case fits the figures {rounded}; judge this claim again.")
            return {
                "id": self.id, "claim": self.claim, "verdict": case.verdict,
                "measured": _filled(reading.measured, reading, folder),
                "result_file": f"{FOLDER}/{reading.files()[0]}", "why": _filled(case.why, reading, folder),
                "beside": "", **_origin(reading, folder),
            }  # fmt: skip
        beside = self.beside if self.beside is not None and self.beside.is_recorded(folder) else None
        return {
            "id": self.id, "claim": self.claim, "verdict": NOT_MEASURED, "measured": "", "result_file": None,
            "why": self.needs, "beside": _filled(beside.measured, beside, folder) if beside else "",
            **(_origin(beside, folder) if beside else {"figures": [], "recorded": None}),
        }  # fmt: skip


def record(claims: tuple[Claim, ...], folder: Path, *, command: str) -> dict[str, Any]:
    """The whole of ``claims.json``: machine, versions, date and commit are those of the newest file that is read."""
    rows = [claim.to_row(folder) for claim in claims]
    names = sorted({Path(place["file"]).name for row in rows for one in row["figures"] for place in one["of"]})
    newest = max((_content(folder / name) for name in names), key=lambda content: content["date"])
    return {**{key: newest[key] for key in ("machine", "versions", "date", "commit")}, "command": command, "rows": rows}


def _filled(sentence: str, reading: Reading, folder: Path) -> str:
    return sentence.format(**{name: figure.to_json(folder)["text"] for name, figure in reading.figures.items()})


def _origin(reading: Reading, folder: Path) -> dict[str, Any]:
    content = _content(folder / reading.files()[0])
    libraries = {name: content["versions"].get(name) for name in ("torch", "transformers", "onnxruntime")}
    machine = f"{content['machine']['cpu']}, {content['machine']['usable_threads']} threads"
    figures = [figure.to_json(folder) for figure in reading.figures.values()]
    return {"figures": figures, "recorded": {"machine": machine, "date": content["date"], "versions": libraries}}


@cache
def _content(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _fits(row: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(key in row and _same(row[key], value) for key, value in wanted.items())


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, str) and isinstance(wanted, str):
        return fnmatchcase(found, wanted)
    return type(found) is type(wanted) and found == wanted


def _number(found: Any) -> float:
    """A number as it stands; of a list of samples the median, of numbers by name their sum."""
    if isinstance(found, Mapping):
        return float(sum(found.values()))
    return float(median(found) if isinstance(found, list) else found)


def _count(found: Any) -> float:
    return float(len(found))


def _pairwise(slower: list[float], faster: list[float]) -> float:
    return median(one / other for one, other in zip(slower, faster, strict=True))


HOW: dict[str, Callable[..., float]] = {
    "value": _number,
    "count": _count,  # of a list, how long it is
    "inverse": lambda one: 1 / _number(one),
    "quotient": lambda one, other: _number(one) / _number(other),
    "less": lambda one, other: 1 - _number(one) / _number(other),
    "difference": lambda one, other: _number(one) - _number(other),
    "pairwise": _pairwise,  # of samples that were taken in turn: the median of their quotients
}
