"""Write `data/results/claims.json`: the claims that the course tests again, each with a verdict and our figures.

`data/claims.toml` holds verdicts, sentences and reasons, written by hand; their gaps are filled with figures computed
from recorded rows. Run it whenever a file under `data/results/` was recorded anew:

    python -m bench.record.claims
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from bench.results import DATA, LIBRARIES, get_path, write_json

COMMAND = "python -m bench.record.claims"
NOT_MEASURED = "not measured here"


class ClaimError(ValueError):
    """A figure is missing, is in several rows, or has left the bounds of its verdict."""


def _number(found: Any) -> float:
    """A number itself; the median of a list of samples."""
    return float(median(found) if isinstance(found, list) else found)


HOW: dict[str, Callable[..., float]] = {
    "value": _number,
    "count": lambda one: float(len(one)),
    "inverse": lambda one: 1 / _number(one),
    "quotient": lambda one, other: _number(one) / _number(other),
    "less": lambda one, other: 1 - _number(one) / _number(other),
    "difference": lambda one, other: _number(one) - _number(other),
    "pairwise": lambda one, other: median(a / b for a, b in zip(one, other, strict=True)),  # of interleaved samples
    "highest": lambda one, other: max(a / b for a, b in zip(one, other, strict=True)),
}
KEYS = {"ratio": "ratio", "pairwise": "latency_s", "highest": "latency_s"}  # of rows, where a figure names no other
DIGITS = {"value": 0, "count": 0, "difference": 1}  # after the point, where a figure names no other; else 2


def figure(spec: Mapping[str, Any], common: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A number, with all that a reader needs to find and compute it again.

    Args:
        spec: a figure of the claims' file, which explains it.
        common: what all rows of the claim share, ``file`` among it.
        folder: of the files of results.
    """
    (kind,) = spec.keys() & (HOW.keys() | KEYS.keys())
    how = "value" if kind == "ratio" else kind
    rows = spec[kind] if isinstance(spec[kind], list) else [spec[kind]]
    places, values = [], []
    for row in rows:
        wanted = {**common, **spec.get("row", {}), **({"system": row} if isinstance(row, str) else row)}
        file = wanted.pop("file")
        place = {"file": f"data/results/{file}", "row": wanted, "key": spec.get("key", KEYS.get(kind))}
        places.append(place)
        values.append(_find(folder / file, wanted, place["key"]))
    value = spec.get("times", 1) * HOW[how](*values)
    if not spec.get("least", -inf) <= value <= spec.get("most", inf):
        raise ClaimError(f"{value} has left the bounds of its verdict, {dict(spec)}. Write the verdict anew.")
    sign = "+" if spec.get("signed", how == "difference") else ""
    text = f"{{:{sign}.{spec.get('digits', DIGITS.get(kind, 2))}f}}"
    return {
        "text": text.format(value), "value": value, "how": how, "times": spec.get("times", 1), "format": text,
        "of": places,
    }  # fmt: skip


def _find(path: Path, wanted: Mapping[str, Any], key: str) -> Any:
    """The value at ``key`` in the one row that fits. Wanted texts may hold ``*``."""
    rows = [row for row in _content(path)["rows"] if all(k in row and _fits(row[k], v) for k, v in wanted.items())]
    if len(rows) != 1 or (found := get_path(rows[0], key)) is None:
        raise ClaimError(f"{path.name} must have one row of {dict(wanted)} with {key}, got {len(rows)} rows.")
    return found


def _fits(found: Any, wanted: Any) -> bool:
    if isinstance(found, str) and isinstance(wanted, str):
        return fnmatchcase(found, wanted)
    return type(found) is type(wanted) and found == wanted


@cache
def _content(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def gaps(sentence: str) -> set[str]:
    """The names of the figures in a sentence."""
    return set(re.findall(r"{(\w+)}", sentence))


def to_row(claim: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The row of ``claims.json``. Raises `ClaimError` for a figure that is missing or out of bounds."""
    figures: list[dict[str, Any]] = []
    sentences: list[str] = []
    why = claim["why"]
    common = dict(claim.get("rows", {}))
    cards = common.pop("cards", None)
    if cards:  # a sentence for each recorded GPU, behind its name
        for card, sentence in zip(cards, claim["measured"], strict=True):
            file = f"gpu-{card}.json"
            texts = _add_figures(figures, claim, gaps(sentence), {**common, "file": file}, folder)
            name = _content(folder / file)["machine"]["gpu"]["name"]
            sentences.append(f"{name}: {sentence.format(**texts)}")
    elif claim["verdict"] != NOT_MEASURED:
        texts = _add_figures(figures, claim, gaps(claim["measured"]), common, folder)
        sentences.append(claim["measured"].format(**texts))
        why = why.format(**texts)
    files = list(dict.fromkeys(place["file"] for one in figures for place in one["of"]))
    return {
        "id": claim["id"], "claim": claim["claim"], "source": claim["source"], "url": claim["url"],
        "verdict": claim["verdict"], "measured": " ".join(sentences), "why": why, "beside": "",
        "result_file": files[0] if files else None, "figures": figures,
        "recorded": [{"file": file, **_origin(folder / Path(file).name)} for file in files],
    }  # fmt: skip


def _add_figures(
    figures: list[dict[str, Any]], claim: Mapping[str, Any], names: set[str], common: Mapping[str, Any], folder: Path
) -> dict[str, str]:
    """Compute the named figures of a claim, in its order, and return their texts."""
    found = {name: figure(spec, common, folder) for name, spec in claim["figures"].items() if name in names}
    figures += found.values()
    return {name: one["text"] for name, one in found.items()}


def _is_gpu(path: Path) -> bool:
    return path.name.startswith("gpu-")


def _origin(path: Path) -> dict[str, Any]:
    """Machine (of a GPU's file the GPU), date and versions of a file of results."""
    content = _content(path)
    facts = content["machine"]
    machine = f"{facts['cpu']}, {facts['usable_threads']} threads"
    if _is_gpu(path):
        gpu = facts["gpu"]
        machine = gpu["name"] + (f", driver {gpu['driver']}" if gpu.get("driver") else "")
    versions = {name: content["versions"].get(name) for name in LIBRARIES}
    return {"machine": machine, "date": content["date"], "versions": versions}


def read_claims(path: Path = DATA / "claims.toml") -> list[dict[str, Any]]:
    """The claims, each with its source in full."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    claims = []
    for claim in content["claim"]:
        source = content["source"][claim["source"]]
        about = {name: source.get(name) for name in ("title", "author", "year")}
        claims.append({**claim, "source": about, "url": claim.get("url", source.get("url"))})
    return claims


def record(claims: list[dict[str, Any]], folder: Path = DATA / "results") -> dict[str, Any]:
    """The content of ``claims.json``: machine, versions, date and commit are those of the newest file of a CPU."""
    _content.cache_clear()
    rows = [to_row(claim, folder) for claim in claims]
    paths = sorted({folder / Path(one["file"]).name for row in rows for one in row["recorded"]})
    of_cpus = [path for path in paths if not _is_gpu(path)]
    newest = max(map(_content, of_cpus), key=lambda content: content["date"])
    return {**{key: newest[key] for key in ("machine", "versions", "date", "commit")}, "command": COMMAND, "rows": rows}


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description="Write what was measured of every claim.")
    parser.add_argument("--json", type=Path, default=DATA / "results" / "claims.json", help="where it goes")
    args = parser.parse_args()
    content = record(read_claims())
    write_json(args.json, content)
    for row in content["rows"]:
        print(f"{row['id']:4}  {row['verdict']:21}  {row['measured'] or row['why']}")


if __name__ == "__main__":
    main()
