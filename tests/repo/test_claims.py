"""The record of the claims: every number of a sentence is found again in the file that it names, by sums made here."""

import fnmatch
import importlib
import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.bert.ladder import ON_GPU
from bench.gpt2 import GRAPHS, NO_CACHE, PYTORCH
from bench.gpu import other_models as on_gpu
from bench.gpu.cells import LENGTHS, cells_for
from bench.peers import GRIDS
from bench.systems import BOUND, CAPTURED, FED, GRAPH, NAIVE, RECOMPUTE, TENSORRT

# What is timed on a GPU, by the suite and bench.gpu.other_models: a cell's name, systems, texts, source and new tokens.
TIMED = [(cell.name, cell.systems, cell.batch, cell.source_tokens, cell.new_tokens)
         for cell in cells_for((9, 0)) if cell.measured == "speed"]  # fmt: skip
TIMED += [(f"random:gpt2, {new} tokens", (PYTORCH, NO_CACHE, *GRAPHS), 1, 8, new) for new in (64, 256)]
TIMED += [(f"random:bert-large, pruned, {batch} × 512", tuple(rung.name for rung in ON_GPU), batch, 512, 1)
          for batch in (1, 8)]  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "data" / "results"
ROWS = json.loads((RESULTS / "claims.json").read_text(encoding="utf-8"))["rows"]
VERDICTS = ("holds", "holds with conditions", "refuted", "not measured here")
NUMBER = re.compile(r"[+]?(?<![\w.-])-?\d+(?:\.\d+)?(?![\w])")  # not the digits of a name such as t5-small or int8
EVERY_CARD = "gpu-*.json"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("bench.record.claims")


@pytest.fixture(scope="module")
def claims(script: ModuleType) -> dict[str, dict[str, Any]]:
    return {claim["id"]: claim for claim in script.read()}


def rows_in(folder: Path, place: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that fit a place, looked up without the script."""
    rows = json.loads((folder / Path(place["file"]).name).read_text(encoding="utf-8"))["rows"]
    for key, wanted in place["row"].items():
        rows = [row for row in rows if key in row and (
            fnmatch.fnmatchcase(row[key], wanted) if isinstance(wanted, str) and isinstance(row[key], str)
            else row[key] == wanted
        )]  # fmt: skip
    return rows


def computed(figure: dict[str, Any], folder: Path = RESULTS) -> float:
    """The figure's number, from the files alone."""
    held = []
    for place in figure["of"]:
        (found,) = rows_in(folder, place)
        for key in place["key"].split("."):
            found = found[key]
        held.append(found)
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


def check_numbers(row: dict[str, Any], folder: Path = RESULTS) -> None:
    """Every figure is found again, and no sentence has a number that is no figure."""
    texts = set()
    for figure in row["figures"]:
        value = computed(figure, folder)
        assert value == pytest.approx(figure["value"], rel=1e-12), figure["of"]
        assert figure["format"].format(value) == figure["text"]
        texts.add(figure["text"])
    said = " ".join((row["measured"], row["beside"], row["why"] if row["result_file"] else "")).replace("%", " ")
    for file in folder.glob(EVERY_CARD):  # a name such as RTX 4090 has a number
        said = said.replace(json.loads(file.read_text(encoding="utf-8"))["machine"]["gpu"]["name"], " ")
    written = set(NUMBER.findall(re.sub(r"\(notebook \d\d\)|cache, \d+ tokens|\(random:.*?\)", " ", said)))
    assert written <= texts, f"{row['id']} has numbers of its own: {written - texts}"


# ------------------------------------------------------------------------------------------------------- the record


def test_every_claim_has_its_row(claims: dict[str, Any]) -> None:
    assert [row["id"] for row in ROWS] == [*claims]
    assert {row["id"][:3] for row in ROWS} == {f"C{number:02}" for number in range(1, 24)}
    for row in ROWS:
        assert row["verdict"] in VERDICTS and len(row["claim"]) > 30 and len(row["why"]) > 10
        assert row["source"]["title"] and (row["source"]["year"] is None or 2018 < row["source"]["year"] < 2027)
        assert not row["url"] or row["url"].startswith("https://")


def test_the_record_is_what_the_script_makes_of_the_files(script: ModuleType) -> None:
    recorded = json.loads((RESULTS / "claims.json").read_text(encoding="utf-8"))
    made = json.loads(json.dumps(script.record(script.read())))
    assert made == recorded, "a file of results has changed: python -m bench.record.claims"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_every_number_stands_in_a_file(row: dict[str, Any]) -> None:
    check_numbers(row)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_a_measured_row_names_its_file_and_an_unmeasured_one_says_what_is_needed(row: dict[str, Any]) -> None:
    files = list(dict.fromkeys(place["file"] for figure in row["figures"] for place in figure["of"]))
    assert [one["file"] for one in row["recorded"]] == files and all((ROOT / file).is_file() for file in files)
    assert all(one["machine"] and one["date"] and one["versions"]["torch"] for one in row["recorded"])
    if row["verdict"] == "not measured here":
        assert row["measured"] == "" and row["result_file"] is None and bool(row["figures"]) == bool(row["beside"])
        assert re.search(r"GPU|recorded run|Later work|Not built yet|scripts/\w+\.py|python -m bench board", row["why"])
        assert not row["beside"] or row["beside"].startswith("On a CPU")
    else:
        assert row["figures"] and row["result_file"] == files[0] and row["beside"] == ""
        assert {figure["text"] for figure in row["figures"]} & set(NUMBER.findall(row["measured"]))


# ----------------------------------------------------------------------------------------------- the file of claims


def test_claims_look_only_where_something_can_be(claims: dict[str, Any], script: ModuleType) -> None:
    assert {name for name, *_ in TIMED if name.startswith("random:")} <= {*on_gpu.cells(Path(), device="cpu")}
    named = {(name, system) for name, systems, *_ in TIMED for system in systems}
    to_come = {f"peers-{grid}.json" for grid in GRIDS}  # that bench/record/peers.py writes
    for claim in [*claims.values(), *(claim["beside"] for claim in claims.values() if "beside" in claim)]:
        for spec in claim.get("figures", {}).values():
            for row in script.rows_of(spec, claim["rows"]):
                if row["file"] == EVERY_CARD:
                    assert (row["cell"], row["system"]) in named, "the GPU suite has no such cell and system"
                else:  # a file that is still to be recorded is one of a script that the claim names
                    script_named = re.match(r"Nothing is recorded yet: (scripts/\w+\.py)", claim.get("needs", ""))
                    writes = row["file"] in to_come or (
                        script_named and row["file"] in (ROOT / script_named[1]).read_text(encoding="utf-8")
                    )
                    assert (RESULTS / row["file"]).is_file() or writes, row["file"]


def test_sentences_and_conditions_name_their_figures(claims: dict[str, Any]) -> None:
    for claim in [*claims.values(), *(claim["beside"] for claim in claims.values() if "beside" in claim)]:
        figures = claim.get("figures", {})
        said = claim.get("measured", "")
        if isinstance(said, list):
            said = " ".join([said[0], *(words for group in said[1:] for words in group)])
        cases = claim.get("cases", [])
        assert not NUMBER.findall(re.sub(r"{\w+}", " ", said)), f"{said} has a number that is no figure"
        assert set(re.findall(r"{(\w+)}", said)) == figures.keys(), said
        assert {name for *_, why in cases for name in re.findall(r"{(\w+)}", why)} <= figures.keys()
        assert all(verdict in VERDICTS[:3] for verdict, *_ in cases)
        assert not cases or cases[-1][1] == [], f"the last case of {claim['id']} has conditions"
        operands = [one for _, conditions, _ in cases for left, _, right in conditions for one in (left, right)]
        patterns = [word for one in operands if isinstance(one, str) for word in one.split()]
        for pattern in [*(word for word in patterns if word not in ("max", "min")), *claim.get("required", [])]:
            assert fnmatch.filter(figures, pattern), f"{pattern} is no figure of {claim['id']}"


def rows_with(script: ModuleType, claim: dict[str, Any], number: Callable[[], float]) -> dict[str, list[Any]]:
    """Rows by file that have every figure a claim looks for, each of whose numbers is drawn."""
    files: dict[str, list[dict[str, Any]]] = {}
    for spec in claim["figures"].values():
        key = spec.get("key") or next(script.KEYS[kind] for kind in script.KEYS if kind in spec)
        first, *rest = key.split(".")
        for wanted in script.rows_of(spec, claim["rows"]):
            rows = files.setdefault(wanted.pop("file").replace("*", "t4"), [])
            row = next((row for row in rows if wanted.items() <= row.items()), None)
            if row is None:
                rows.append(row := dict(wanted))
            found: Any = [number() for _ in range(3)] if key == "latency_s" or "count" in spec else number()
            for part in rest[::-1]:
                found = {part: found}
            if not rest:
                row.setdefault(first, found)
            else:
                row[first] = {**row.get(first, {}), **found}
    return files


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(numbers=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50))
def test_any_positive_numbers_get_a_verdict(script: ModuleType, claims, tmp_path: Path, numbers: list[float]) -> None:
    endless = itertools.cycle(numbers)
    for claim in (claim for claim in claims.values() if "cases" in claim):
        for name, rows in rows_with(script, claim, lambda: next(endless)).items():
            write(tmp_path, name, rows, gpu={"name": "Tesla T4"})
        script._content.cache_clear()
        row = script.to_row(claim, tmp_path)
        assert row["verdict"] in VERDICTS[:3], claim["id"]
        assert row["why"] and row["measured"] and "{" not in row["why"] + row["measured"]


def test_every_case_can_be_reached(script: ModuleType, claims: dict[str, Any]) -> None:
    rng = random.Random(0)
    for claim in (claim for claim in claims.values() if "cases" in claim):
        conditions = [one for _, some, _ in claim["cases"] for one in some]
        numbers = [right * factor for *_, right in conditions if not isinstance(right, str) for factor in (0.9, 1.1)]
        reached = set()
        for _ in range(3000):
            seldom, there = rng.random(), rng.choice([0.3, 1])  # how many figures are unlike the others, or missing
            usual = rng.choice([0, 1000, *numbers])
            values = {
                name: rng.choice([0, 1000, *numbers]) if rng.random() < seldom else usual
                for name in claim["figures"] if rng.random() < there
            }  # fmt: skip
            reached.add(next(i for i, (_, some, _) in enumerate(claim["cases"]) if script.fits(some, values)))
        assert reached == {*range(len(claim["cases"]))}, claim["id"]


# -------------------------------------------------------------------------------------------- rules, on made-up files


def write(folder: Path, name: str, rows: list[dict[str, Any]], date: str = "2026-01-01", **machine: Any) -> None:
    facts = {"cpu": "a CPU", "usable_threads": 2, **machine}
    content = {"machine": facts, "versions": {"torch": "2"}, "date": date, "commit": date, "rows": rows}
    (folder / name).write_text(json.dumps(content))


def made_up(**changes: Any) -> dict[str, Any]:
    """A claim of one figure, ``a row's x``."""
    cases = [["holds", [["x", ">=", 2]], "Fast, {x}."], ["refuted", [["x", "<", 1]], "Slow."]]
    return {
        "id": "C01", "claim": "Something.", "source": {}, "url": None, "needs": "scripts/x.py measures it.",
        "rows": {"file": "one.json"}, "figures": {"x": {"value": {"is": "a"}, "key": "x", "digits": 2}},
        "measured": "It is {x} times.", "cases": cases, **changes,
    }  # fmt: skip


@pytest.fixture
def judge(script: ModuleType, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A function that records a claim from the files of ``tmp_path``, and looks its numbers up again."""

    def row(claim: dict[str, Any]) -> dict[str, Any]:
        script._content.cache_clear()
        made = script.to_row(claim, tmp_path)
        check_numbers(made, tmp_path)
        return made

    return row


def test_the_verdict_follows_from_the_figures(judge: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    missing = judge(made_up())
    assert (missing["verdict"], missing["measured"], missing["figures"]) == ("not measured here", "", [])
    assert missing["why"] == "scripts/x.py measures it." and missing["recorded"] == []
    write(tmp_path, "one.json", [{"is": "a", "x": 2.345}, {"is": "b", "x": 7}])
    row = judge(made_up())
    assert (row["verdict"], row["measured"], row["why"]) == ("holds", "It is 2.35 times.", "Fast, 2.35.")
    assert row["result_file"] == "data/results/one.json" and row["recorded"][0]["machine"] == "a CPU, 2 threads"
    write(tmp_path, "one.json", [{"is": "a", "x": 0.5}])
    assert judge(made_up())["verdict"] == "refuted"


@pytest.mark.parametrize("rows", [
    [{"is": "a", "x": 1.5}],  # no case fits
    [{"is": "b", "x": 3}],  # no such row
    [{"is": "a", "x": 3}, {"is": "a", "x": 3}],  # two of them
    [{"is": "a", "y": 3}],  # no such key
    [{"is": 1, "x": 3}],  # of another kind
])  # fmt: skip
def test_a_figure_that_is_missing_or_fits_no_case_raises(
    judge: Callable[..., dict[str, Any]], script: ModuleType, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    write(tmp_path, "one.json", rows)
    with pytest.raises(script.ClaimError):
        judge(made_up())


@pytest.mark.parametrize(("how", "one", "other", "expected"), [
    ("value", 3.0, None, "3.00"), ("value", [5.0, 3.0, 2.0], None, "3.00"),
    ("inverse", 0.25, None, "4.00"), ("count", [7, 7, 7], None, "3.00"), ("quotient", 9.0, 2.0, "4.50"),
    ("difference", 9.0, 2.5, "+6.50"), ("pairwise", [8.0, 9.0, 100.0], [2.0, 3.0, 50.0], "3.00"),
    ("less", -9.0, 3.0, "4.00"),
])  # fmt: skip
def test_what_a_figure_is_computed_from(
    judge: Callable[..., dict[str, Any]], tmp_path: Path, how: str, one: Any, other: Any, expected: str
) -> None:
    held = {"a": one} if other is None else {"a": one, "b": other}
    write(tmp_path, "one.json", [{"system": name, "x": value} for name, value in held.items()])
    names = [*held] if other is not None else "a"
    row = judge(made_up(figures={"x": {how: names, "key": "x", "digits": 2}}))
    assert row["figures"][0]["text"] == expected


@pytest.mark.parametrize(("conditions", "values", "expected"), [
    ([["a", ">=", 2]], {"a": 2}, True), ([["a", ">", 2]], {"a": 2}, False), ([["a", "<", "b"]], {"a": 1, "b": 2}, True),
    ([["max a*", "<=", 2]], {"a1": 1, "a2": 3, "b": 0}, False), ([["min a* b", "<=", 0]], {"a1": 1, "b": 0}, True),
    ([["a", ">", 0], ["b", ">", 0]], {"a": 1, "b": 0}, False), ([["max c*", ">", 0]], {"a": 1}, False), ([], {}, True),
])  # fmt: skip
def test_conditions(script: ModuleType, conditions: list[Any], values: dict[str, float], expected: bool) -> None:
    assert script.fits(conditions, values) is expected


def test_the_newest_file_gives_the_record_its_date(script: ModuleType, tmp_path: Path) -> None:
    claims = []
    for number, date in enumerate(("2026-01-02", "2026-03-01", "2026-02-01")):
        write(tmp_path, f"{number}.json", [{"is": "a", "x": 2.0}], date, cpu=date)
        claims.append(made_up(id=f"C{number}", rows={"file": f"{number}.json"}))
    made = script.record(claims, tmp_path)
    assert made["date"] == made["commit"] == made["machine"]["cpu"] == "2026-03-01"
    assert [row["recorded"][0]["date"] for row in made["rows"]] == ["2026-01-02", "2026-03-01", "2026-02-01"]


# ----------------------------------------------------------------------------------------------- recorded runs on GPUs

H100, H200, RTX = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GeForce RTX 4090"
FILES = {H100: "gpu-h100.json", H200: "gpu-h200.json", RTX: "gpu-rtx-4090.json"}
Seconds = Callable[[str, str], float | None]


def record_gpu(folder: Path, card: str, seconds: Seconds, **gpu: Any) -> None:
    """A file as the GPU suite writes it; ``seconds`` of a cell and a system: ``None`` if it failed, 0 for no row."""
    rows = []
    for name, systems, batch, source_tokens, new_tokens in TIMED:
        reference = seconds(name, systems[0])
        for system in systems:
            mine = seconds(name, system)
            row = {"cell": name, "measured": "speed", "system": system, "source_tokens": source_tokens,
                   "new_tokens": new_tokens, "batch": batch, "moved_bytes": 7e9}  # fmt: skip
            if mine is None:
                rows.append(row | {"failed": "why"})
            elif mine:
                ratio = {"ratio": reference / mine} if reference else {}
                rows.append(row | {"latency_s": [mine] * 3, **ratio})
    write(folder, FILES[card], rows, "2026-12-01", gpu={"name": card, "memory_bytes": 1, **gpu})


@pytest.fixture
def on_gpus(
    judge: Callable[..., dict[str, Any]], claims: dict[str, Any], tmp_path: Path
) -> Callable[..., dict[str, dict[str, Any]]]:
    """The rows of the claims about GPUs, by their ids, from such files beside the recorded ones of CPUs."""
    for file in RESULTS.glob("*.json"):
        if not file.name.startswith("gpu-"):
            (tmp_path / file.name).write_bytes(file.read_bytes())

    def rows(**cards: Seconds) -> dict[str, dict[str, Any]]:
        for name, seconds in cards.items():
            record_gpu(tmp_path, {"h100": H100, "h200": H200, "rtx": RTX}[name], seconds)
        return {name: judge(claim) for name, claim in claims.items() if claim.get("rows", {}).get("file") == EVERY_CARD}

    return rows


GPT2_FED, GPT2_BOUND = (
    [f"ONNX Runtime, {cache}, {how}" for cache in ("no cache", "cache")] for how in ("numpy", "bound")
)


def by_system(**more: Any) -> Seconds:
    """Seconds by the name of a constant of `bench.systems`, and what it is of GPT-2; 1 for all others."""
    names = dict(FED=(FED, *GPT2_FED), BOUND=(BOUND, *GPT2_BOUND), CAPTURED=(CAPTURED,), TENSORRT=(TENSORRT,),
                 GRAPH=(GRAPH,), RECOMPUTE=(RECOMPUTE,), NAIVE=(NAIVE, NO_CACHE), HALF=("fp16",))  # fmt: skip
    times = {system: seconds for name, seconds in more.items() for system in names[name]}
    return lambda cell, system: times.get(system, 1.0)


def test_without_a_gpu_nothing_about_gpus_is_estimated(on_gpus: Callable[..., Any]) -> None:
    rows = on_gpus()
    assert {"C10", "C11", "C12", "C13", "C14a", "C14b", "C16b", "C22"} == rows.keys()
    for row in rows.values():
        assert row["verdict"] == "not measured here" and row["measured"] == "" and "GPU" in row["why"]


CONFIRMING = by_system(FED=1.7, BOUND=0.3, CAPTURED=0.25, GRAPH=0.4, TENSORRT=0.15, RECOMPUTE=0.4, HALF=0.25)
CONTRADICTING = by_system(FED=0.9, BOUND=1.0, CAPTURED=1.0, GRAPH=0.1, TENSORRT=1.0, RECOMPUTE=2.0, NAIVE=3.0)


# The most that a claim can come to: of C16b one half is F1, which random weights do not have.
AT_BEST = {"C16b": "holds with conditions"}


@pytest.mark.parametrize("card", ["h100", "h200", "rtx"])
@pytest.mark.parametrize(("seconds", "verdict"), [(CONFIRMING, "holds"), (CONTRADICTING, "refuted")])
def test_every_claim_about_gpus_can_hold_and_be_refuted(on_gpus, card: str, seconds: Seconds, verdict: str) -> None:
    name = {"h100": H100, "h200": H200, "rtx": RTX}[card]
    for row in on_gpus(**{card: seconds}).values():
        assert row["verdict"] == (AT_BEST.get(row["id"], verdict) if verdict == "holds" else verdict), row
        assert row["measured"].startswith(f"{name}: ") and row["result_file"] == f"data/results/{FILES[name]}"
        assert row["recorded"][0]["machine"] == name


def test_figures_are_what_was_timed(on_gpus: Callable[..., Any]) -> None:
    rows = on_gpus(h100=by_system(FED=1.25, BOUND=0.8, TENSORRT=0.5))
    assert "in fp32 0.80 times as fast fed with numpy arrays" in rows["C11"]["measured"]
    assert "in fp32 ONNX Runtime with bound tensors 1.25 times as fast" in rows["C12"]["measured"]
    assert "2.00 times as fast in fp16" in rows["C13"]["measured"]
    assert {rows[name]["verdict"] for name in ("C11", "C12", "C13")} == {"refuted"}
    assert "which hands over 7.0 GB, 0.80 times as fast, on bound memory 1.25 times" in rows["C11"]["measured"]
    assert "1.00 times as fast for one text of 512 tokens, 1.00 times for 8" in rows["C16b"]["measured"]


def test_two_cards_that_agree_have_a_sentence_each_and_one_verdict(on_gpus: Callable[..., Any]) -> None:
    for row in on_gpus(h100=CONFIRMING, h200=CONFIRMING).values():
        assert row["verdict"] == AT_BEST.get(row["id"], "holds")
        assert row["measured"].count(f"{H100}: ") == row["measured"].count(f"{H200}: ") == 1
        assert [one["machine"] for one in row["recorded"]] == [H100, H200]
        assert H100 not in row["why"], "the same reason need not be given twice"


def test_two_cards_that_disagree_are_a_condition(on_gpus: Callable[..., Any]) -> None:
    for row in on_gpus(h100=CONFIRMING, h200=CONTRADICTING).values():
        assert row["verdict"] == "holds with conditions"
        assert f"{H100}: {AT_BEST.get(row['id'], 'holds')}; {H200}: refuted." in row["why"]


def test_a_card_without_the_rows_is_named_beside_one_that_has_them(on_gpus: Callable[..., Any]) -> None:
    partial = lambda cell, system: None if system == TENSORRT else 1.0  # noqa: E731
    row = on_gpus(h100=CONFIRMING, rtx=partial)["C13"]
    assert row["verdict"] == "holds" and f"The recorded run on {RTX} lacks {TENSORRT} (" in row["why"]


@pytest.mark.parametrize("absent", [None, 0], ids=["failed", "no row"])
def test_what_a_partial_run_lacks_is_said(on_gpus: Callable[..., Any], absent: float | None) -> None:
    own = lambda cell, system: absent if system.startswith(("ONNX", "TensorRT")) else 1.0  # noqa: E731
    rows = on_gpus(h100=own)
    for name in ("C10", "C11", "C12", "C13", "C22"):
        assert rows[name]["verdict"] == "not measured here"
        assert rows[name]["why"].startswith(f"The recorded run on {H100} lacks ")
    assert all("TensorRT-LLM itself runs T5 in PyTorch" in rows[name]["why"] for name in ("C10", "C13", "C22"))
    assert TENSORRT in rows["C10"]["why"] and FED in rows["C11"]["why"] and "On a CPU" in rows["C11"]["beside"]
    assert rows["C14a"]["verdict"] == "holds", "a cache that makes no difference brings nothing"


def test_a_run_with_nothing_in_it_breaks_nothing(on_gpus: Callable[..., Any]) -> None:
    for row in on_gpus(h100=lambda cell, system: 0, h200=lambda cell, system: None).values():
        assert row["verdict"] == "not measured here" and H100 in row["why"] and H200 in row["why"]


@pytest.mark.parametrize(("short", "long", "verdict", "measured"), [
    (0.5, 0.6, "holds", "0.60 for 512 new tokens"), (1.0, 2.0, "holds with conditions", "2.00 for 512 new tokens"),
    (1.3, 4.0, "refuted", "4.00 for 512 new tokens"),
    (2.0, 0.0, "refuted", "in CUDA graphs 2.00 for 16 new tokens, 2.00 for 64"),  # the longer ones were not reached
])  # fmt: skip
def test_the_verdict_on_the_cache_follows_the_lengths(on_gpus, short: float, long: float, verdict, measured) -> None:
    def seconds(cell: str, system: str) -> float:
        slow = long if cell.startswith("cache") and int(cell.split()[1]) > LENGTHS[1] else short
        anew = (RECOMPUTE, NAIVE, NO_CACHE, GPT2_BOUND[0])
        return slow if system in anew or not slow else 1.0

    row = on_gpus(rtx=seconds)["C14a"]
    assert row["verdict"] == verdict and measured in row["measured"] and ("512" in row["measured"]) == bool(long)


def test_a_gpu_s_file_names_the_gpu_and_its_driver(judge, claims, tmp_path: Path) -> None:
    record_gpu(tmp_path, H100, CONFIRMING, driver="570.86.15")
    assert judge(claims["C13"])["recorded"][0]["machine"] == f"{H100}, driver 570.86.15"
