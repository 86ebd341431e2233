"""The record of the claims: every number of a sentence is found again in the file that it names, by sums made here."""

import fnmatch
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "data" / "results"
ROWS = json.loads((RESULTS / "claims.json").read_text(encoding="utf-8"))["rows"]
VERDICTS = ("holds", "holds with conditions", "no longer holds", "not measured here")
NUMBER = re.compile(r"[+]?(?<![\w.-])-?\d+(?:\.\d+)?(?![\w])")  # not the digits of a name such as t5-small or int8


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module


def found_at(place: dict[str, Any]) -> Any:
    """What stands at a place, looked up without the script."""
    rows = json.loads((ROOT / place["file"]).read_text(encoding="utf-8"))["rows"]
    for key, wanted in place["row"].items():
        rows = [row for row in rows if key in row and (
            fnmatch.fnmatchcase(row[key], wanted) if isinstance(wanted, str) and isinstance(row[key], str)
            else row[key] == wanted
        )]  # fmt: skip
    (found,) = rows
    for key in place["key"].split("."):
        found = found[key]
    return found


def computed(figure: dict[str, Any]) -> float:
    """The figure's number, from the files alone."""
    held = [found_at(place) for place in figure["of"]]
    if figure["how"] == "pairwise":
        return figure["times"] * median(a / b for a, b in zip(*held, strict=True))
    if figure["how"] == "count":
        return figure["times"] * len(held[0])
    numbers = [
        sum(one.values()) if isinstance(one, dict) else median(one) if isinstance(one, list) else one for one in held
    ]
    by_kind = {
        "value": lambda a: a, "inverse": lambda a: 1 / a, "quotient": lambda a, b: a / b,
        "less": lambda a, b: 1 - a / b, "difference": lambda a, b: a - b,
    }  # fmt: skip
    return figure["times"] * by_kind[figure["how"]](*numbers)


def sentences(row: dict[str, Any]) -> str:
    return " ".join((row["measured"], row["beside"], row["why"] if row["result_file"] else ""))


def test_every_claim_has_its_row() -> None:
    assert [row["id"] for row in ROWS] == [f"C{number:02}" for number in range(1, 22)]
    assert all(row["verdict"] in VERDICTS and len(row["claim"]) > 30 and len(row["why"]) > 10 for row in ROWS)


def test_the_record_is_what_the_script_makes_of_the_files(scripts: Callable[[str], ModuleType]) -> None:
    claims, claim_record = scripts("claims"), scripts("claim_record")
    made = claim_record.record(claims.CLAIMS, RESULTS, command=claims.COMMAND)
    recorded = json.loads((RESULTS / "claims.json").read_text(encoding="utf-8"))
    assert json.loads(json.dumps(made)) == recorded, "a file of results has changed: python scripts/claims.py"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_every_number_stands_in_a_file(row: dict[str, Any]) -> None:
    texts = set()
    for figure in row["figures"]:
        value = computed(figure)
        assert value == pytest.approx(figure["value"], rel=1e-12), figure["of"]
        assert figure["format"].format(value) == figure["text"]
        texts.add(figure["text"])
    written = set(NUMBER.findall(sentences(row).replace("%", " ")))
    written -= set(re.findall(r"notebook (\d\d)", sentences(row)))
    assert written <= texts, f"{row['id']} has numbers of its own: {written - texts}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_a_measured_row_names_its_file_and_an_unmeasured_one_says_what_is_needed(row: dict[str, Any]) -> None:
    if row["verdict"] == "not measured here":
        assert row["measured"] == "" and row["result_file"] is None
        assert bool(row["figures"]) == bool(row["beside"]) == (row["recorded"] is not None)
        assert re.search(r"graphics card|Later work|scripts/\w+\.py|t5accel bench", row["why"])
        return
    files = {place["file"] for figure in row["figures"] for place in figure["of"]}
    assert row["figures"] and row["result_file"] in files and row["beside"] == ""
    assert all((ROOT / file).is_file() for file in files)
    assert {figure["text"] for figure in row["figures"]} & set(NUMBER.findall(row["measured"]))
    assert row["recorded"]["machine"] and row["recorded"]["versions"]["onnxruntime"]


@pytest.mark.parametrize("claim", ["C10", "C11", "C12", "C13", "C14", "C16", "C17"])
def test_what_needs_a_graphics_card_is_not_estimated(claim: str) -> None:
    (row,) = (row for row in ROWS if row["id"] == claim)
    assert row["verdict"] == "not measured here" and "graphics card" in row["why"]
    assert not row["beside"] or row["beside"].startswith("On a CPU")


# ----------------------------------------------------------------------------------------- the rules, on made-up files


@pytest.fixture
def made_up(scripts: Callable[[str], ModuleType], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A function that records one claim of one figure, ``a row's x``, from rows that are given."""
    claim_record = scripts("claim_record")

    def row(rows: list[dict[str, Any]] | None, **changes: Any) -> dict[str, Any]:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        folder.mkdir()
        if rows is not None:
            content = {
                "machine": {"cpu": "a CPU", "usable_threads": 2}, "versions": {"torch": "2"}, "date": "2026-01-01",
                "commit": "abc", "rows": rows,
            }  # fmt: skip
            (folder / "one.json").write_text(json.dumps(content))
        places = [claim_record.Place("one.json", {"is": name}, "x") for name in changes.get("of", ["a"])]
        figure = claim_record.Figure(tuple(places), changes.get("how", "value"))
        case = claim_record.Case
        reading = claim_record.Reading(
            {"x": figure}, "It is {x} times.",
            (
                case("holds", "Fast, {x}.", lambda f: f["x"] >= 2),
                case("no longer holds", "Slow.", lambda f: f["x"] < 1),
            ),
        )  # fmt: skip
        claim = claim_record.Claim("C01", "Something.", "scripts/x.py measures it.", (reading,), changes.get("beside"))
        return claim.to_row(folder)

    return row


def test_the_verdict_follows_from_the_figures(made_up: Callable[..., dict[str, Any]]) -> None:
    row = made_up([{"is": "a", "x": 2.345}, {"is": "b", "x": 7}])
    assert (row["verdict"], row["measured"], row["why"]) == ("holds", "It is 2.35 times.", "Fast, 2.35.")
    assert row["result_file"] == "data/results/one.json" and row["recorded"]["machine"] == "a CPU, 2 threads"
    assert made_up([{"is": "a", "x": 0.5}])["verdict"] == "no longer holds"
    missing = made_up(None)
    assert (missing["verdict"], missing["measured"], missing["figures"]) == ("not measured here", "", [])
    assert missing["why"] == "scripts/x.py measures it."


@pytest.mark.parametrize("rows", [
    [{"is": "a", "x": 1.5}],  # no case fits
    [{"is": "b", "x": 3}],  # no such row
    [{"is": "a", "x": 3}, {"is": "a", "x": 3}],  # two of them
    [{"is": "a", "y": 3}],  # no such key
    [{"is": 1, "x": 3}],  # of another kind
])  # fmt: skip
def test_a_figure_that_is_missing_or_fits_no_case_raises(
    made_up: Callable[..., dict[str, Any]], scripts: Callable[[str], ModuleType], rows: list[dict[str, Any]]
) -> None:
    with pytest.raises(scripts("claim_record").ClaimError, match=r"judge this claim again|rows with|has no x"):
        made_up(rows)


@pytest.mark.parametrize(("how", "one", "other", "expected"), [
    ("value", 3.0, None, "3.00"), ("value", [5.0, 3.0, 2.0], None, "3.00"), ("value", {"a": 1, "b": 2}, None, "3.00"),
    ("inverse", 0.25, None, "4.00"), ("count", [7, 7, 7], None, "3.00"), ("quotient", 9.0, 2.0, "4.50"),
    ("difference", 9.0, 2.5, "6.50"), ("pairwise", [8.0, 9.0, 100.0], [2.0, 3.0, 50.0], "3.00"),
    ("less", -9.0, 3.0, "4.00"),
])  # fmt: skip
def test_what_a_figure_is_computed_from(
    made_up: Callable[..., dict[str, Any]], how: str, one: Any, other: Any, expected: str
) -> None:
    given = {"a": one} if other is None else {"a": one, "b": other}
    row = made_up([{"is": name, "x": value} for name, value in given.items()], how=how, of=list(given))
    assert row["figures"][0]["text"] == expected


def test_the_newest_file_gives_the_record_its_date(scripts: Callable[[str], ModuleType], tmp_path: Path) -> None:
    claim_record = scripts("claim_record")
    claims = []
    for number, date in enumerate(("2026-01-02", "2026-03-01", "2026-02-01")):
        content = {
            "machine": {"cpu": date, "usable_threads": 1}, "versions": {}, "date": date, "commit": date,
            "rows": [{"x": 1.0}],
        }  # fmt: skip
        (tmp_path / f"{number}.json").write_text(json.dumps(content))
        figure = claim_record.Figure((claim_record.Place(f"{number}.json", {}, "x"),))
        reading = claim_record.Reading({"x": figure}, "{x}", (claim_record.Case("holds", "Why."),))
        claims.append(claim_record.Claim(f"C{number}", "What.", "Needs.", (reading,)))
    made = claim_record.record(tuple(claims), tmp_path, command="python scripts/x.py")
    assert made["date"] == made["commit"] == made["machine"]["cpu"] == "2026-03-01"
    assert [row["recorded"]["date"] for row in made["rows"]] == ["2026-01-02", "2026-03-01", "2026-02-01"]


def test_claims_look_only_at_files_that_are_there_or_can_be_made(scripts: Callable[[str], ModuleType]) -> None:
    claims = scripts("claims")
    for claim in claims.CLAIMS:
        readings = [*claim.readings, *([claim.beside] if claim.beside else [])]
        for file in {file for reading in readings for file in reading.files()}:
            made_by = {"gpu-h200.json": "t5accel/gpu/suite.py"}  # not recorded yet
            assert (RESULTS / file).is_file() or (ROOT / made_by[file]).is_file(), f"{claim.id}: {file}"
        for reading in readings:
            bare = re.sub(r"\{\w+\}", " ", reading.measured)
            assert not NUMBER.findall(bare), f"{claim.id} has a number that is no figure"
            used = set(re.findall(r"\{(\w+)\}", " ".join([reading.measured, *(case.why for case in reading.cases)])))
            assert used == reading.figures.keys() or claim in (claims.past, claims.recomputed), claim.id


# --- a recorded run on a GPU ----------------------------------------------------------------------------------------


def gpu_record(seconds: Callable[[str, str], float | None]) -> dict[str, Any]:
    """A file as the GPU suite writes it; ``seconds`` of a cell and a system, ``None`` for one that failed."""
    from t5accel.gpu.cells import CELLS

    rows = []
    for cell in (cell for cell in CELLS if cell.measured == "speed"):
        reference = seconds(cell.name, cell.systems[0])
        for system in cell.systems:
            row = {"cell": cell.name, "measured": "speed", "system": system, "source_tokens": cell.source_tokens,
                   "new_tokens": cell.new_tokens}  # fmt: skip
            mine = seconds(cell.name, system)
            timed = {"latency_s": [mine] * 3, "ratio": {"median": reference / mine}} if mine else {"failed": "why"}
            rows.append(row | timed)
    machine = {"cpu": "a CPU", "usable_threads": 16, "gpu": {"name": "a GPU", "memory_bytes": 1}}
    return {"machine": machine, "versions": {"torch": "2"}, "date": "2026-12-01", "commit": "abc", "rows": rows}


@pytest.fixture
def judged(scripts: Callable[[str], ModuleType], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The rows of the claims that a GPU is needed for, by their ids, from such a file beside the recorded ones."""

    def judge(seconds: Callable[[str, str], float | None]) -> dict[str, Any]:
        for file in RESULTS.glob("*.json"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "gpu-h200.json").write_text(json.dumps(gpu_record(seconds)))
        claims = scripts("claims")
        return {claim.id: claim.to_row(tmp_path) for claim in claims.CLAIMS if claim.id in ("C11", "C12", "C14")}

    return judge


@pytest.mark.parametrize(("fed", "bound", "verdicts"), [
    (2.5, 0.3, ("holds", "holds")), (1.2, 0.8, ("holds with conditions", "holds with conditions")),
    (0.9, 1.0, ("no longer holds", "no longer holds")),
])  # fmt: skip
def test_verdicts_on_runtimes_follow_a_gpu_record(
    judged: Callable[..., dict[str, Any]], fed: float, bound: float, verdicts: tuple[str, str]
) -> None:
    times = {"ONNX Runtime, numpy feeds": fed, "ONNX Runtime, bound": bound}
    rows = judged(lambda cell, system: times.get(system, 1.0))
    assert tuple(rows[name]["verdict"] for name in ("C11", "C12")) == verdicts
    assert f"Fed with numpy arrays {1 / fed:.2f} times" in rows["C11"]["measured"]
    assert rows["C12"]["result_file"] == "data/results/gpu-h200.json"


def test_without_onnxruntime_on_the_gpu_two_claims_stay_open(judged: Callable[..., dict[str, Any]]) -> None:
    rows = judged(lambda cell, system: None if system.startswith("ONNX") else 1.0)
    assert rows["C11"]["verdict"] == rows["C12"]["verdict"] == "not measured here"
    assert rows["C14"]["verdict"] == "holds with conditions"


@pytest.mark.parametrize(("short", "long", "verdict"), [
    (0.5, 0.6, "holds"), (1.0, 2.0, "holds with conditions"), (1.3, 4.0, "no longer holds"),
])  # fmt: skip
def test_the_verdict_on_the_cache_follows_a_gpu_record(
    judged: Callable[..., dict[str, Any]], short: float, long: float, verdict: str
) -> None:
    def seconds(cell: str, system: str) -> float:
        length = int(cell.split()[1]) if cell.startswith("cache") else 0
        again = short if length <= 64 else long
        return again if system.startswith(("no cache", "transformers, no")) else 1.0

    row = judged(seconds)["C14"]
    assert row["verdict"] == verdict and f"{short:.2f}, {short:.2f}, {long:.2f}, {long:.2f} times" in row["measured"]
