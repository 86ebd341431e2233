"""Files of results, read as evidence.

Files under ``data/results/`` have rows of several kinds. `KINDS` lists those that are read here; others are left alone
and counted. A row counts only if its recipe is still what this package means by the recipe's name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from t5accel.advice.evidence import GENERATE, OUR_LOOP, Draft, Export, Record, Relative, Scores, Setting, Source, Speed
from t5accel.errors import InputError
from t5accel.graphs.recipes import RECIPES
from t5accel.peers import OURS, OURS_GENERATE, OURS_INT4, OURS_INT8, OURS_INT8_THROUGHPUT
from t5accel.peers import REFERENCE as PEERS_REFERENCE
from t5accel.quality import MAIN_SCORES, main_scores
from t5accel.techniques import REFERENCE
from t5accel.timing import Ratio

# What `accelerate` gives, by the names that the measurements use; other techniques and systems are no advice of ours.
TECHNIQUES = {
    "ONNX Runtime, generate()": GENERATE,
    "ONNX Runtime, our loop, numpy feeds": OUR_LOOP,
    "ONNX Runtime, our loop, int8": OUR_LOOP,
    "ONNX Runtime, our loop, int8-dynamic": OUR_LOOP,
    "ONNX Runtime, our loop, int4": OUR_LOOP,
}
SYSTEMS = {
    OURS: ("fp32", OUR_LOOP),
    OURS_GENERATE: ("fp32", GENERATE),
    OURS_INT8: ("int8", OUR_LOOP),
    OURS_INT8_THROUGHPUT: ("int8-dynamic", OUR_LOOP),
    OURS_INT4: ("int4", OUR_LOOP),
}


def read_record(places: Iterable[str | os.PathLike[str]]) -> Record:
    """The evidence in files of results, and in all ``*.json`` of folders.

    Raises ``InputError`` for a place that is missing, a file that is no JSON object with rows (in a folder: no JSON),
    or a row of a known kind with an impossible value.

    >>> from t5accel.checkpoints import data_folder
    >>> from t5accel.advice.evidence import Speed
    >>> record = read_record([data_folder() / "results"])
    >>> len(record.of(Speed)) > 100, "course.json" in record.left_out
    (True, True)
    """
    record, seen = Record(), set()
    for place in map(Path, places):
        if not place.exists():
            raise InputError(f"No results at {place}: `t5accel bench --json {place}` writes some.")
        for file in sorted(place.glob("*.json")) if place.is_dir() else [place]:
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except (ValueError, OSError) as error:
                raise InputError(f"{file} cannot be read as JSON: {error}.") from error
            if isinstance(content, dict) and isinstance(content.get("rows"), list):
                label = str(file) if file.name in seen else file.name  # a run is known by its file
                seen.add(label)
                record += read_rows(content, label)
            elif place.is_dir():
                record += Record(left_out={file.name: 0})
            else:
                raise InputError(f"{file} holds no rows: give a file as `t5accel bench --json FILE` writes it.")
        record += Record(looked_in=(str(place),))
    return record


def read_rows(content: Mapping[str, Any], file: str, *, fresh: bool = False) -> Record:
    """The evidence in the content of one file. Raises ``InputError`` for a row with an impossible value.

    >>> read_rows({"rows": [{"notebook": "00_start_here.ipynb", "seconds": 34.1}]}, "course.json").left_out
    {'course.json': 1}
    """
    rows, found, left_out = content["rows"], [], 0
    for number, row in enumerate(rows):
        kind = next((kind for kind in KINDS if isinstance(row, Mapping) and kind.fits(row)), None)
        if kind is None:
            left_out += 1
            continue
        about = [content.get(name) or {} for name in ("machine", "versions")]
        source = Source(file, number, *about, content.get("date", ""), content.get("commit"), fresh)
        try:
            found += kind.read(row, content, source)
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise InputError(f"{file}, row {number}: not as this version writes it ({error!r}).") from error
    return Record(tuple(found), left_out={file: left_out} if left_out else {})


# ------------------------------------------------------------------------------------------------------ kinds of rows


def _board(row: Mapping[str, Any], content: Mapping[str, Any], source: Source) -> list[Any]:
    """A row of a scoreboard (`scoreboard.Row`)."""
    recipe = row["precision"]
    if row["technique"] not in TECHNIQUES or row["reference"] != REFERENCE or not _current(recipe, row["recipe"]):
        return []
    setting = Setting(*(row[part.name] for part in fields(Setting)))
    speed = Speed(
        source, setting, recipe, TECHNIQUES[row["technique"]], _ratio(row["ratio"]["samples"]), row["tokens_per_s"],
        row["bytes_on_disk"], row["peak_memory_bytes"],
    )  # fmt: skip
    return [speed, *_scores(source, row["model"], recipe, row["quality"])]


def _ladder(row: Mapping[str, Any], content: Mapping[str, Any], source: Source) -> list[Any]:
    """A row of speed of ``scripts/precision.py``, which runs our loop."""
    if not _current(row.get("recipe"), row.get("hash")):
        return []
    setting = Setting(
        row["model"], row["batch"], 1, row["source_tokens"], row["new_tokens"], content["machine"]["usable_threads"]
    )
    speed = _per_second(setting, row["latency_s"])
    return [Speed(source, setting, row["recipe"], OUR_LOOP, _ratio(row["ratio"]["samples"]), speed,
                  sum(row["files"].values()))]  # fmt: skip


def _ladder_scores(row: Mapping[str, Any], content: Mapping[str, Any], source: Source) -> list[Any]:
    """A row of quality of ``scripts/precision.py``, which scores the bundled model."""
    if not _current(row["recipe"], row["hash"]):
        return []
    return [Scores(source, "mini", row["recipe"], {name: row[name] for name in ("bleu", "rougeL", "exact_match")})]


def _peers(row: Mapping[str, Any], content: Mapping[str, Any], source: Source) -> list[Any]:
    """A row of ``scripts/peers.py``; in fp32 its tokens have to be the reference's.

    Rows without a hash were written before recipes were noted; of these int4 was another one.
    """
    cell = ("batch", "source_tokens", "beams", "new_tokens")
    here = [other for other in content["rows"] if all(other.get(name) == row[name] for name in cell)]
    reference = next((other for other in here if other.get("system") == PEERS_REFERENCE), None)
    if row["system"] not in SYSTEMS or not row["latency_s"] or reference is None:
        return []
    recipe, loop = SYSTEMS[row["system"]]
    if recipe == "fp32" and row["agreement"] != 1:
        return []
    is_current = _current(recipe, row["hash"]) if "hash" in row else recipe != "int4"
    if not is_current:
        return []
    setting = Setting(content["model"], row["batch"], row["beams"], row["source_tokens"], row["new_tokens"],
                      content["threads"])  # fmt: skip
    samples = [theirs / ours for theirs, ours in zip(reference["latency_s"], row["latency_s"], strict=True)]
    return [Speed(source, setting, recipe, loop, _ratio(samples), _per_second(setting, row["latency_s"]))]


def _family(row: Mapping[str, Any], content: Mapping[str, Any], source: Source) -> list[Any]:
    """A row of `family.family_rows`: the whole model in fp32 is the first, and what the ratios of all refer to.

    A model that comes with the package is ``bundled`` under a name of its own.
    """
    name = row.get("bundled") or row["model"]
    if not _current(row["recipe"], row["hash"]):
        return []
    family = [other for other in content["rows"] if isinstance(other, Mapping) and FAMILY <= other.keys()]
    first = family[0]
    scores = _scores(source, name, row["recipe"], row["quality"])
    best = _scores(source, first["model"], first["recipe"], first["quality"])
    beside = [other for other in family if other["model"] == first["model"] and other["hash"] == row["hash"]]
    if row["model"] == first["model"] or first["recipe"] != "fp32" or not (beside and scores and best):
        return scores
    whole = beside[0]["ratio"]["samples"] if beside[0]["ratio"] else [1.0] * len(row["ratio"]["samples"])
    samples = [own / theirs for own, theirs in zip(row["ratio"]["samples"], whole, strict=True)]
    losses = {name: value - scores[0].values[name] for name, value in best[0].values.items()}
    return [*scores, Relative(source, name, first["model"], row["recipe"], row["batch"], _ratio(samples),
                              losses, row["size_bytes"])]  # fmt: skip


def _drafts(row: Mapping[str, Any], content: Mapping[str, Any], source: Source) -> list[Any]:
    """A row of ``scripts/drafts.py``; that with the encoder in the time, as a user waits for it."""
    if row["encoder"] != "included" or not _current(row["recipe"], row["hash"]):
        return []
    return [Draft(source, row["model"], row["task"], row["recipe"], row["batch"], row["system"],
                  _ratio(row["ratio"]["samples"]), row["equal"], row["answers"])]  # fmt: skip


def _export(row: Mapping[str, Any], content: Mapping[str, Any], source: Source) -> list[Any]:
    """A row of ``scripts/engine.py``."""
    return [Export(source, row["model"], float(row["seconds"]))]


@dataclass(frozen=True)
class Kind:
    """Rows of one kind have all ``keys``, and say that they are ``measured``, or do not say what."""

    read: Callable[[Mapping[str, Any], Mapping[str, Any], Source], Sequence[Any]]
    keys: frozenset[str]
    measured: str | None = None

    def fits(self, row: Mapping[str, Any]) -> bool:
        return row.get("measured") == self.measured and self.keys <= row.keys()


FAMILY = frozenset({"model", "recipe", "hash", "dims", "ratio", "quality", "size_bytes"})
KINDS = (
    Kind(_board, frozenset({"technique", "reference", "precision", "recipe", "ratio", "latency_s", "quality"})),
    Kind(_peers, frozenset({"system", "agreement", "beams", "latency_s"})),
    Kind(_family, FAMILY),
    Kind(_ladder, frozenset({"model", "batch", "system", "latency_s", "ratio", "files"}), "speed"),
    Kind(_ladder_scores, frozenset({"recipe", "hash", "bleu", "rougeL", "exact_match"}), "quality"),
    Kind(_drafts, frozenset({"model", "task", "recipe", "hash", "encoder", "system", "ratio", "equal"}), "drafts"),
    Kind(_export, frozenset({"model", "seconds"}), "export"),
)


def _current(name: Any, digest: Any) -> bool:
    return name in RECIPES and RECIPES[name].hash == digest


def _ratio(samples: Sequence[float]) -> Ratio:
    if min(samples) <= 0:
        raise ValueError(f"a ratio of {min(samples)}")
    return Ratio.of(samples)


def _per_second(setting: Setting, latency_s: Sequence[float]) -> float:
    return setting.batch * setting.new_tokens / median(latency_s)


def _scores(source: Source, model: str, recipe: str, report: Mapping[str, Any] | None) -> list[Scores]:
    """From a `quality.QualityReport` as JSON; a part of the sets is no evidence."""
    if report is None or report["limit"] is not None:
        return []
    scores = main_scores(report)
    return [Scores(source, model, recipe, {name: scores[name] for name in MAIN_SCORES})]
