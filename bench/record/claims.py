"""Write `data/results/claims.json` and `docs/claims.md`: the claims that the course tests again, with our figures.

`data/claims.toml` holds verdicts, sentences and reasons, written by hand; their gaps are filled with figures computed
from recorded rows. Run it whenever a file under `data/results/` was recorded anew:

    python -m bench.record.claims
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from math import hypot, inf
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from bench.results import DATA, LIBRARIES, get_path, write_json

COMMAND = "python -m bench.record.claims"
NOT_MEASURED, UNDECIDED = "not measured here", "undecided here"
PAGE = DATA.parent / "docs" / "claims.md"


class ClaimError(ValueError):
    """A figure is missing or in several rows, or a verdict does not follow from its bounds."""


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
    places, found = [], []
    for row in rows:
        wanted = {**common, **spec.get("row", {}), **({"system": row} if isinstance(row, str) else row)}
        file = wanted.pop("file")
        place = {"file": f"data/results/{file}", "row": wanted, "key": spec.get("key", KEYS.get(kind))}
        places.append(place)
        found.append(_find(folder / file, wanted, place["key"]))
    times, key = spec.get("times", 1), places[0]["key"]
    value = times * HOW[how](*(get_path(row, key) for row in found))
    bounds = {name: spec[name] for name in ("least", "most") if name in spec}
    if not within(value, bounds):
        raise ClaimError(f"{value} has left the bounds of its verdict, {dict(spec)}. Write the verdict anew.")
    spread = _spread(how, key, found)
    sign = "+" if spec.get("signed", how == "difference") else ""
    text = f"{{:{sign}.{spec.get('digits', DIGITS.get(kind, 2))}f}}"
    return {
        "text": text.format(value), "value": value, "how": how, "times": spec.get("times", 1), "format": text,
        "of": places, **bounds,
        **({"low": times * spread[0], "high": times * spread[1], "n": spread[2]} if spread else {}),
    }  # fmt: skip


def within(value: float, bounds: Mapping[str, Any]) -> bool:
    """Whether a value keeps the bounds ``least`` and ``most``, where they are given."""
    return bounds.get("least", -inf) <= value <= bounds.get("most", inf)


def straddles(one: Mapping[str, Any]) -> bool:
    """Whether the scatter of a figure reaches across a bound of its verdict."""
    return "low" in one and not (within(one["low"], one) and within(one["high"], one))


def _spread(how: str, key: str, rows: list[Mapping[str, Any]]) -> tuple[float, float, int] | None:
    """The least and largest ratio of all pairs of runs and their number; two standard errors for a ratio of means."""
    samples = rows[0].get(f"{key}_samples", [])
    if how in ("pairwise", "highest"):
        samples = [a / b for a, b in zip(*(get_path(row, key) for row in rows), strict=True)]
    elif how == "inverse":
        samples = [1 / one for one in samples]
    elif how == "quotient" and key == "mean_s":
        times = [row["latency_s"] for row in rows]
        error = 2 * hypot(*(stdev(one) / len(one) ** 0.5 / mean(one) for one in times))
        ratio = rows[0][key] / rows[1][key]
        return ratio * (1 - error), ratio * (1 + error), min(map(len, times))
    elif len(rows) > 1:
        return None  # no sample is of both
    return (min(samples), max(samples), len(samples)) if samples else None


def _find(path: Path, wanted: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The one row that fits and has ``key``. Wanted texts may hold ``*``."""
    rows = [row for row in _content(path)["rows"] if all(k in row and _fits(row[k], v) for k, v in wanted.items())]
    if len(rows) != 1 or get_path(rows[0], key) is None:
        raise ClaimError(f"{path.name} must have one row of {dict(wanted)} with {key}, got {len(rows)} rows.")
    return rows[0]


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
    """The row of ``claims.json``.

    Raises `ClaimError` for a figure that is missing or out of bounds, for a verdict that is decided inside the scatter
    of a figure, and for an undecided one without such a figure.
    """
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
    if any(map(straddles, figures)) != (claim["verdict"] == UNDECIDED):
        scattered = [(one["text"], one["low"], one["high"]) for one in figures if straddles(one)]
        raise ClaimError(f"{claim['id']} is {claim['verdict']!r}, but reaching across its bounds are {scattered}.")
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


def read_claims() -> list[dict[str, Any]]:
    """The claims, each with its source in full."""
    content = tomllib.loads((DATA / "claims.toml").read_text(encoding="utf-8"))
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


HEAD = """# Whose claims hold

The course began with five texts about fast T5s. Here is what they claim, what we measured of it, and under which
conditions. Notebook [32](../notebooks/32_scoreboard_and_claims.ipynb) shows how a verdict is found.

A figure's brackets hold the least and the largest ratio of its pairs of runs, and their number (for servers two
standard errors of the means, and the number of requests). A headline number, or the lower end of a range, counts as
reached from nine tenths of it; a gain of less than 1.1 times counts from nine tenths of what it adds to 1 (1.04: from
1.036), because nine tenths of the whole would be no gain. Where a claim has no number, the bound is ours: "faster" asks
for 1.1 to 1.3 times, "no faster" for at most 1.05, "a slight loss" for at most a point. *Refuted* is a claim that is
missed under every condition that we measured; *holds with conditions* says where it was seen to hold. A claim is
*undecided here* where the scatter reaches across the bound, and *not measured here* where the hardware or the build was
missing: nothing is estimated. `python -m bench.record.claims` writes this page from
[claims.json](../data/results/claims.json).
"""


def page(rows: list[Mapping[str, Any]]) -> str:
    """The rows of ``claims.json`` as a page for readers, source by source."""
    lines = [HEAD, "| | claim | verdict |", "|---|---|---|"]
    lines += [f"| [{row['id']}](#{row['id'].lower()}) | {row['claim']} | {row['verdict']} |" for row in rows]
    for title in dict.fromkeys(row["source"]["title"] for row in rows):
        of_source = [row for row in rows if row["source"]["title"] == title]
        source = of_source[0]["source"]
        lines += ["", f"## {title}", "", f"{source['author'][0].upper()}{source['author'][1:]}, {source['year']}."]
        for row in of_source:
            lines += ["", *_section(row)]
    return "\n".join(lines) + "\n"


def _section(row: Mapping[str, Any]) -> list[str]:
    claim = f"[{row['claim']}]({row['url']})" if row["url"] else row["claim"]
    verdict = f"**{row['verdict'][0].upper()}{row['verdict'][1:]}.** {row['why']}"
    lines = [f"### {row['id']}", "", f"> {claim}", "", verdict]
    if row["figures"]:
        lines += ["", f"*Measured:* {row['measured']}", ""]
        lines += ["| figure | measured | the verdict asks for |", "|---|---|---|"]
        several = len(row["recorded"]) > 1
        lines += [_line(one, several) for one in row["figures"] if {"low", "least", "most"} & one.keys()]
        files = [(one["file"], one["machine"], one["date"]) for one in row["recorded"]]
        named = (f"[{Path(file).name}](../{file}), {machine}, {date}" for file, machine, date in files)
        lines += ["", f"*Recorded:* {'; '.join(named)}."]
    return lines


def _line(one: Mapping[str, Any], with_file: bool) -> str:
    """A figure as a row of a table: whose, its value and scatter, its bounds."""
    texts = [[value if isinstance(value, str) else f"{key} {value}" for key, value in place["row"].items()]
             for place in one["of"]]  # fmt: skip
    own = [", ".join(text for text in of if any(text not in other for other in texts)) for of in texts]
    shared = ", ".join(text for text in texts[0] if all(text in other for other in texts))
    key = one["of"][0]["key"]
    files = ", ".join({Path(place["file"]).name: None for place in one["of"]}) if with_file else ""
    key = "" if key in KEYS.values() else key
    named = "; ".join(filter(None, [" beside ".join(filter(None, own)), shared, key, files]))
    spread = ""
    if "low" in one:
        spread = f" ({one['format'].format(one['low'])}–{one['format'].format(one['high'])}, n = {one['n']})"
    asked = " and ".join(f"at {name} {one[name]:g}" for name in ("least", "most") if name in one)
    return f"| {named} | {one['text']}{spread} | {asked or '–'} |"


def main() -> None:
    """Write the record, and the page beside it."""
    content = record(read_claims())
    write_json(DATA / "results" / "claims.json", content)
    PAGE.write_text(page(content["rows"]), encoding="utf-8")
    for row in content["rows"]:
        print(f"{row['id']:4}  {row['verdict']:21}  {row['measured'] or row['why']}")


if __name__ == "__main__":
    main()
