"""Write `data/results/claims.json`: every claim that the course tests again, with our figures, a verdict and why.

`data/claims.toml` holds the claims: sentences with gaps, where the figure for each gap is recorded, and the verdicts as
cases over those figures. So a file that is recorded again changes the sentence and, where it must, the verdict; nobody
writes either by hand. Run this whenever a file under `data/results/` was recorded anew:

    python -m bench.record.claims
"""

from __future__ import annotations

import argparse
import json
import operator
import re
import tomllib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu.cards import recorded_cards
from bench.results import write_json

DATA = Path(__file__).resolve().parents[2] / "data"
COMMAND = "python -m bench.record.claims"
HOLDS, CONDITIONS, REFUTED, NOT_MEASURED = "holds", "holds with conditions", "refuted", "not measured here"
EVERY_CARD = "gpu-*.json"  # instead of a file's name: the claim is judged on each card that is recorded
Values = Mapping[str, float]


class ClaimError(ValueError):
    """The rows of a file cannot be what a claim looks for, or no case fits all figures together."""


class Missing(ClaimError):
    """A file lacks a row, or a row a number. Raised with the places that are missing."""


# ------------------------------------------------------------------------------------------------------------- figures


def _number(found: Any) -> float:
    """A number as it stands; of a list of samples the median."""
    return float(median(found) if isinstance(found, list) else found)


HOW: dict[str, Callable[..., float]] = {
    "value": _number,
    "count": lambda one: float(len(one)),
    "inverse": lambda one: 1 / _number(one),
    "quotient": lambda one, other: _number(one) / _number(other),
    "less": lambda one, other: 1 - _number(one) / _number(other),
    "difference": lambda one, other: _number(one) - _number(other),
    # Of samples that were taken in turn: the median of their quotients.
    "pairwise": lambda one, other: median(a / b for a, b in zip(one, other, strict=True)),
}
KEYS = {"ratio": "ratio", "pairwise": "latency_s"}  # of rows, where the claim names no other
DIGITS = {"value": 0, "count": 0, "difference": 1}  # behind the point, where the claim names no other; else 2


def figure(spec: Mapping[str, Any], common: Mapping[str, Any], folder: Path, file: str | None = None) -> dict[str, Any]:
    """A number, and all that lets a reader find and compute it again.

    Args:
        spec: of the claims' file, which explains it.
        common: what all rows of the claim share, ``file`` among it.
        folder: of the files of results.
        file: the file of one card, where ``common`` names that of every card.

    Raises:
        Missing: no such row, or not that key in it.
        ClaimError: several rows fit.
    """
    (kind,) = spec.keys() & (HOW.keys() | KEYS.keys())
    how = "value" if kind == "ratio" else kind
    of, held, missing = [], [], []
    for wanted in rows_of(spec, common):
        name = wanted.pop("file").replace(EVERY_CARD, file or EVERY_CARD)
        of.append({"file": f"data/results/{name}", "row": wanted, "key": spec.get("key", KEYS.get(kind))})
        found = _found(folder / name, wanted, of[-1]["key"])
        unpaired = how == "pairwise" and found and held and held[0] and len(found) != len(held[0])
        if found is None or unpaired:  # samples that were not taken in turn cannot be compared
            missing.append(of[-1])
        held.append(found)
    if missing:
        raise Missing(missing)
    value = spec.get("times", 1) * HOW[how](*held)
    text = f"{{:{'+' if spec.get('signed', how == 'difference') else ''}.{spec.get('digits', DIGITS.get(kind, 2))}f}}"
    shown = {"text": text.format(value), "value": value, "how": how, "times": spec.get("times", 1), "format": text}
    return {**shown, "of": of}


def rows_of(spec: Mapping[str, Any], common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each row of a figure has to say, and its ``file``."""
    (kind,) = spec.keys() & (HOW.keys() | KEYS.keys())
    rows = spec[kind] if isinstance(spec[kind], list) else [spec[kind]]
    named = ({"system": row} if isinstance(row, str) else row for row in rows)
    return [{**common, **spec.get("row", {}), **row} for row in named]


def _found(path: Path, wanted: Mapping[str, Any], key: str) -> Any:
    """What stands in the one row that fits; `None` without it. Texts that are looked for may hold ``*``."""
    rows = [row for row in _content(path)["rows"] if all(k in row and _same(row[k], v) for k, v in wanted.items())]
    if len(rows) > 1:
        raise ClaimError(f"{path.name} has {len(rows)} rows with {dict(wanted)}; there has to be one.")
    found = rows[0] if rows else None
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, str) and isinstance(wanted, str):
        return fnmatchcase(found, wanted)
    return type(found) is type(wanted) and found == wanted


@cache
def _content(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


# ----------------------------------------------------------------------------------------------- sentences and verdicts

COMPARED = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def fits(conditions: list[Any], values: Values) -> bool:
    """Whether all conditions are true; one about figures that are not there is not."""
    for left, sign, right in conditions:
        mine, other = _operand(left, values), _operand(right, values)
        if mine is None or other is None or not COMPARED[sign](mine, other):
            return False
    return True


def _operand(said: str | float, values: Values) -> float | None:
    """A number; a figure by name; or ``max`` or ``min`` of those that fit one of the patterns."""
    if not isinstance(said, str):
        return said
    *choice, last = said.split()
    patterns = [*choice[1:], last]
    found = [value for name, value in values.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return {"max": max, "min": min}[choice[0] if choice else "max"](found) if found else None


def judged(claim: Mapping[str, Any], folder: Path, file: str | None = None) -> dict[str, Any]:
    """A sentence from the figures that are there; and by the first case that fits them a verdict, and why.

    A sentence that is a list has groups of clauses behind its first part. Those whose figures are missing are left out,
    as long as one is there, and a figure for each pattern in ``required``.

    Raises:
        Missing: figures that the sentence cannot do without.
        ClaimError: no case fits.
    """
    figures, missing = {}, []
    for name, spec in claim["figures"].items():
        try:
            figures[name] = figure(spec, claim["rows"], folder, file)
        except Missing as error:
            missing += error.args[0]
    measured, required = claim["measured"], claim.get("required", [])
    lead, groups = (measured[0], measured[1:]) if isinstance(measured, list) else (measured, [])
    kept = [(words, [one for one in clauses if _gaps(one) <= figures.keys()]) for words, *clauses in groups]
    parts = [words + ", ".join(clauses) for words, clauses in kept if clauses]
    lacks = any(not any(fnmatchcase(name, pattern) for name in figures) for pattern in required)
    if lacks or not _gaps(lead) <= figures.keys() or (groups and not parts):
        raise Missing(missing)
    values = {name: one["value"] for name, one in figures.items()}
    cases = claim.get("cases", [["", [], ""]])  # what stands beside a claim that is not measured has no verdict
    verdict, why = next(((said, why) for said, conditions, why in cases if fits(conditions, values)), (None, None))
    if verdict is None:
        raise ClaimError(f"{claim['id']}: no case fits the figures {values}; its last case must have no conditions.")
    texts = {name: one["text"] for name, one in figures.items()}
    sentence = (lead + "; ".join(parts) + "." * bool(parts)).format(**texts)
    return {"verdict": verdict, "measured": sentence, "why": why.format(**texts), "figures": [*figures.values()]}


def _gaps(sentence: str) -> set[str]:
    return set(re.findall(r"{(\w+)}", sentence))


def on_cards(claim: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The same for a claim about GPUs: a sentence for each card that is recorded, and a verdict on all of them."""
    found, lacking = {}, []
    for card, content in recorded_cards(folder).items():
        name = content["machine"]["gpu"]["name"]
        try:
            found[name] = judged(claim, folder, f"gpu-{card}.json")
        except Missing as error:
            places = dict.fromkeys(f"{place['row']['system']} ({place['row']['cell']})" for place in error.args[0])
            lacking.append(f"The recorded run on {name} lacks {'; '.join(places)}.")
    verdicts = {name: one["verdict"] for name, one in found.items()}
    reasons = {one["why"] for one in found.values()}
    if not found:
        return _unmeasured(claim, folder, " ".join([*(lacking or [claim["needs"]]), claim.get("note", "")]).strip())
    if len({*verdicts.values()}) == 1:
        verdict, why = next(iter(verdicts.values())), []
    else:
        verdict = CONDITIONS
        why = ["; ".join(f"{name}: {said}" for name, said in verdicts.items()) + "."]
    why += [*reasons] if len(reasons) == 1 else [f"{name}: {one['why']}" for name, one in found.items()]
    return {
        "verdict": verdict, "measured": " ".join(f"{name}: {one['measured']}" for name, one in found.items()),
        "why": " ".join(why + lacking), "figures": [one for each in found.values() for one in each["figures"]],
    }  # fmt: skip


def _unmeasured(claim: Mapping[str, Any], folder: Path, why: str) -> dict[str, Any]:
    row = {"verdict": NOT_MEASURED, "measured": "", "why": why, "figures": [], "beside": ""}
    if "beside" in claim and _are_there(claim["beside"], folder):
        other = judged(claim["beside"], folder)
        row |= {"beside": other["measured"], "figures": other["figures"]}
    return row


def _are_there(claim: Mapping[str, Any], folder: Path) -> bool:
    rows = (row for spec in claim["figures"].values() for row in rows_of(spec, claim["rows"]))
    return all((folder / row["file"]).is_file() for row in rows)


def to_row(claim: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The row of ``claims.json``. Raises `ClaimError` where figures are missing, save in the files of GPUs."""
    if "figures" not in claim:
        row = _unmeasured(claim, folder, claim["needs"])
    elif claim["rows"]["file"] == EVERY_CARD:
        row = on_cards(claim, folder)
    elif _are_there(claim, folder):
        row = judged(claim, folder)
    else:
        row = _unmeasured(claim, folder, claim["needs"])
    files = list(dict.fromkeys(place["file"] for one in row["figures"] for place in one["of"]))
    return {
        "id": claim["id"], "claim": claim["claim"], "source": claim["source"], "url": claim["url"],
        "verdict": row["verdict"], "measured": row["measured"], "why": row["why"], "beside": row.get("beside", ""),
        "result_file": files[0] if row["measured"] else None, "figures": row["figures"],
        "recorded": [{"file": file, **_origin(folder / Path(file).name)} for file in files],
    }  # fmt: skip


def _origin(path: Path) -> dict[str, Any]:
    """Where and when a file was recorded: on which GPU, if on one, else on which CPU."""
    content = _content(path)
    facts = content["machine"]
    gpu = facts.get("gpu") if fnmatchcase(path.name, EVERY_CARD) else None
    machine = f"{facts['cpu']}, {facts['usable_threads']} threads"
    if gpu:
        machine = gpu["name"] + (f", driver {gpu['driver']}" if gpu.get("driver") else "")
    libraries = {name: content["versions"].get(name) for name in ("torch", "transformers", "onnxruntime")}
    return {"machine": machine, "date": content["date"], "versions": libraries}


def read(path: Path = DATA / "claims.toml") -> list[dict[str, Any]]:
    """The claims: each with its source in full, and with the reading and the note that it names."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    claims = []
    for claim in content["claim"]:
        source = content["source"][claim["source"]]
        about = {name: source.get(name) for name in ("title", "author", "year")}
        named = {key: content[key][claim[key]] for key in ("beside", "note") if key in claim}
        claims.append({**claim, "source": about, "url": claim.get("url", source.get("url")), **named})
    return claims


def record(claims: list[dict[str, Any]], folder: Path = DATA / "results") -> dict[str, Any]:
    """The whole of ``claims.json``: machine, versions, date and commit are those of the newest file that is read.

    Files of GPUs, which were recorded elsewhere, are left out of that: each row names its own machine.
    """
    _content.cache_clear()
    rows = [to_row(claim, folder) for claim in claims]
    names = sorted({Path(one["file"]).name for row in rows for one in row["recorded"]})
    of_cpus = [name for name in names if not fnmatchcase(name, EVERY_CARD)] or names
    newest = max((_content(folder / name) for name in of_cpus), key=lambda content: content["date"])
    return {**{key: newest[key] for key in ("machine", "versions", "date", "commit")}, "command": COMMAND, "rows": rows}


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description="Write what was measured of every claim.")
    parser.add_argument("--json", type=Path, default=DATA / "results" / "claims.json", help="where it goes")
    args = parser.parse_args()
    content = record(read())
    write_json(args.json, content)
    for row in content["rows"]:
        print(f"{row['id']:4}  {row['verdict']:21}  {row['measured'] or row['why']}")


if __name__ == "__main__":
    main()
