"""The record of the claims: every number of a sentence is computed from the file that it names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.record import claims as script

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "data" / "results"
RECORD = json.loads((RESULTS / "claims.json").read_text(encoding="utf-8"))
CLAIMS = {claim["id"]: claim for claim in script.read_claims()}
MEASURED = [claim for claim in CLAIMS.values() if claim["verdict"] != "not measured here"]
VERDICTS = ("holds", "holds with conditions", "refuted", "undecided here", "not measured here")
# What a bounded figure without a scatter may be: a count, a size, a quality, or the share that was timed in one run.
UNSCATTERED = {"size_bytes", "bleu", "rougeL", "f1", "exact_match", "equal", "of", "contrib_operators", "share",
               "largest_difference"}  # fmt: skip
NUMBER = re.compile(r"[+]?(?<![\w.-])-?\d+(?:\.\d+)?(?![\w])")  # not the digits of a name such as t5-small or int8
GPUS = [json.loads(file.read_text(encoding="utf-8"))["machine"]["gpu"]["name"] for file in RESULTS.glob("gpu-*.json")]


def without_names(text: str) -> str:
    """The text without the names that hold numbers."""
    for name in GPUS:
        text = text.replace(name, " ")
    return re.sub(r"\(notebook \d\d\)|cache, \d+ tokens|\(random:.*?\)|%", " ", text)


def sentences(claim: dict[str, Any]) -> list[str]:
    return claim["measured"] if isinstance(claim["measured"], list) else [claim["measured"]]


def test_every_claim_has_its_row() -> None:
    assert [row["id"] for row in RECORD["rows"]] == [*CLAIMS]
    assert {row["id"][:3] for row in RECORD["rows"]} == {f"C{number:02}" for number in range(1, 24)}
    for row in RECORD["rows"]:
        assert row["verdict"] in VERDICTS and len(row["claim"]) > 30 and len(row["why"]) > 10
        assert row["source"]["title"] and (row["source"]["year"] is None or 2018 < row["source"]["year"] < 2027)
        assert not row["url"] or row["url"].startswith("https://")
        assert bool(row["figures"]) == bool(row["result_file"]) == (row["verdict"] != "not measured here")


def test_the_record_is_what_the_script_makes_of_the_files() -> None:
    made = json.loads(json.dumps(script.record(script.read_claims())))
    assert made == RECORD, "a file of results has changed: python -m bench.record.claims"


@pytest.mark.parametrize("row", RECORD["rows"], ids=lambda row: row["id"])
def test_a_bounded_figure_has_a_scatter_or_can_have_none(row: dict[str, Any]) -> None:
    bounded = [figure for figure in row["figures"] if {"least", "most"} & figure.keys()]
    assert all("low" in figure or figure["of"][0]["key"] in UNSCATTERED for figure in bounded)


def test_the_page_is_what_the_script_makes_of_the_record() -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert page == script.page(RECORD["rows"]), "python -m bench.record.claims"
    for row in RECORD["rows"]:
        assert f"\n### {row['id']}\n" in page and f"| {row['claim']} | {row['verdict']} |" in page


@pytest.mark.parametrize("claim", MEASURED, ids=lambda claim: claim["id"])
def test_no_number_is_typed_and_every_verdict_has_bounds(claim: dict[str, Any]) -> None:
    said = " ".join([*sentences(claim), claim["why"]])
    assert not NUMBER.findall(without_names(re.sub(r"{\w+}", " ", said)))
    assert script.gaps(" ".join(sentences(claim))) == claim["figures"].keys() >= script.gaps(said)
    assert any({"least", "most"} & spec.keys() for spec in claim["figures"].values())


# --- rules, on made-up files


def write(folder: Path, name: str, rows: list[dict[str, Any]], date: str = "2026-01-01", **machine: Any) -> None:
    facts = {"cpu": "a CPU", "usable_threads": 2, **machine}
    content = {"machine": facts, "versions": {"torch": "2"}, "date": date, "commit": date, "rows": rows}
    (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize(("samples", "verdict", "fits"), [
    ([2.0, 2.1], "holds", True), ([1.7, 2.1], "holds", False), ([1.7, 2.1], "undecided here", True),
    ([2.0, 2.1], "undecided here", False),
])  # fmt: skip
def test_a_verdict_inside_the_scatter_is_refused(tmp_path: Path, samples: Any, verdict: str, fits: bool) -> None:
    write(tmp_path, "one.json", [{"system": "a", "ratio": 2.05, "ratio_samples": samples}])
    claim = {**made_up({"ratio": "a", "key": "ratio", "least": 1.8}), "verdict": verdict}
    if fits:
        assert script.record([claim], tmp_path)["rows"][0]["figures"][0]["low"] == min(samples)
    else:
        with pytest.raises(script.ClaimError, match="across its bounds"):
            script.record([claim], tmp_path)


def made_up(spec: dict[str, Any], file: str = "one.json") -> dict[str, Any]:
    """A claim of one figure."""
    return {
        "id": "C01", "claim": "Something.", "source": {}, "url": None, "verdict": "holds", "rows": {"file": file},
        "figures": {"x": {"key": "x", "digits": 2, **spec}}, "measured": "It is {x} times.", "why": "Fast, {x}.",
    }  # fmt: skip


@pytest.mark.parametrize(("rows", "spec"), [
    ([{"is": "a", "x": 1.5}], {"least": 2}), ([{"is": "a", "x": 1.5}], {"most": 1}),  # out of bounds
    ([{"is": "b", "x": 3}], {}), ([{"is": "a", "y": 3}], {}), ([{"is": 1, "x": 3}], {}),  # no such row or key
    ([{"is": "a", "x": 3}, {"is": "a", "x": 3}], {}),  # two such rows
])  # fmt: skip
def test_a_figure_that_is_missing_or_out_of_bounds_fails(tmp_path: Path, rows: list[Any], spec: dict[str, Any]) -> None:
    write(tmp_path, "one.json", rows)
    with pytest.raises(script.ClaimError):
        script.record([made_up({"value": {"is": "a"}, **spec})], tmp_path)


@pytest.mark.parametrize(("how", "one", "other", "expected"), [
    ("value", 3.0, None, "3.00"), ("value", [5.0, 3.0, 2.0], None, "3.00"), ("inverse", 0.25, None, "4.00"),
    ("count", [7, 7, 7], None, "3.00"), ("quotient", 9.0, 2.0, "4.50"), ("difference", 9.0, 2.5, "+6.50"),
    ("pairwise", [8.0, 9.0, 100.0], [2.0, 3.0, 50.0], "3.00"), ("highest", [8.0, 9.0], [2.0, 3.0], "4.00"),
    ("less", -9.0, 3.0, "4.00"),
])  # fmt: skip
def test_the_kinds_of_figures(tmp_path: Path, how: str, one: Any, other: Any, expected: str) -> None:
    held = {"a": one} if other is None else {"a": one, "b": other}
    write(tmp_path, "one.json", [{"system": name, "x": value} for name, value in held.items()])
    (row,) = script.record([made_up({how: [*held] if other is not None else "a"})], tmp_path)["rows"]
    assert (row["measured"], row["why"]) == (f"It is {expected} times.", f"Fast, {expected}.")
    assert row["recorded"][0]["machine"] == "a CPU, 2 threads"


def test_a_ratio_of_means_has_the_scatter_of_two_standard_errors(tmp_path: Path) -> None:
    times = {"a": [3.0, 5.0], "b": [1.0, 1.0]}
    rows = [{"system": name, "mean_s": sum(each) / 2, "latency_s": each} for name, each in times.items()]
    write(tmp_path, "one.json", rows)
    figure = script.figure({"quotient": ["a", "b"], "key": "mean_s"}, {"file": "one.json"}, tmp_path)
    assert [figure[name] for name in ("low", "value", "high", "n")] == pytest.approx([2, 4, 6, 2])


def test_the_newest_file_of_a_cpu_gives_the_record_its_date(tmp_path: Path) -> None:
    write(tmp_path, "1.json", [{"is": "a", "x": 2.0}], "2026-01-02")
    write(tmp_path, "2.json", [{"is": "a", "x": 2.0}], "2026-03-01", cpu="new")
    write(tmp_path, "gpu-t4.json", [{"is": "a", "x": 2.0}], "2026-05-01", gpu={"name": "T4", "driver": "5"})
    claims = [made_up({"value": {"is": "a"}}, file) for file in ("1.json", "2.json")]
    claims.append({**claims[0], "rows": {"cards": ["t4"]}, "measured": ["{x} times."], "why": "Fast."})
    made = script.record(claims, tmp_path)
    assert made["date"] == made["commit"] == "2026-03-01" and made["machine"]["cpu"] == "new"
    assert made["rows"][2]["measured"] == "T4: 2.00 times."
    assert made["rows"][2]["recorded"][0]["machine"] == "T4, driver 5"
