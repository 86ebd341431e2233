"""Recorded results keep their format, and what the model card says stands in them."""

import json
import re
from pathlib import Path
from statistics import median

import pytest

from bench.evaluation import MAIN_SCORES
from bench.ladder import by_ladder, fastest
from bench.peers import (
    BEAM_SEARCH,
    GRID,
    OURS,
    OURS_EXACT,
    OURS_INT4,
    OURS_INT8,
    REFERENCE,
    PeerResult,
    cell_label,
    cell_of,
    int8_for,
    peer_results,
)
from bench.results import filter_rows
from bench.serving.rates import BASELINE, STATIC, knee_text
from bench.serving.rates import OURS as OURS_SERVED

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "data/results").glob("*.json"))
CARDS = [path for path in FILES if path.stem.startswith("gpu-")]
each_card = pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
README = "\n".join(
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/results.md", "docs/serving.md")
)

# What is said about our peers, without the tables, which are drawn.
_SECTION = README.split("## Beside its peers\n")[1].split("\n## ")[0]
BESIDE_PEERS = " ".join(" ".join(line for line in _SECTION.splitlines() if not line.startswith("|")).split())
PEERS_BY_CPU = ("peers-amd.json", "peers-amd-avx2.json", "peers-intel.json")


def _input(result: PeerResult) -> tuple[int, int]:
    return result.cell.batch, result.cell.source_tokens


def read(name: str) -> dict:
    return json.loads((ROOT / "data/results" / name).read_text(encoding="utf-8"))


def require_told(*texts: str) -> None:
    for text in texts:
        assert text in " ".join(README.split()), f"README and guides lack {text!r}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_says_where_it_comes_from(path: Path) -> None:
    data = read(path.name)
    assert {"machine", "versions", "date", "commit", "command", "rows"} <= data.keys()
    assert data["rows"] and data["machine"]["cpu"] and data["versions"]["torch"] and data["commit"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", data["date"])
    assert re.match(r"t5accel |python (scripts/|-m (bench|training)[ .])", data["command"])
    assert " /" not in data["command"]


@pytest.mark.parametrize("path", [p for p in FILES if p.stem.startswith("scoreboard-")], ids=lambda path: path.stem)
def test_a_scoreboard_holds_what_a_ratio_needs(path: Path) -> None:
    rows = read(path.name)["rows"]
    for key in ("model", "source_tokens", "new_tokens", "batch", "beams", "threads", "reference"):
        assert len({row[key] for row in rows}) == 1
    for row in rows:
        assert len(row["latency_s"]) >= 3 and row["peak_memory_bytes"] > row["size_bytes"]
        assert ("bleu" in row) == (row["model"] == "mini") and (row["ratio"] == 1) == (
            row["system"] == row["reference"]
        )
        assert "limit" not in row, "a recorded board is scored on the full sets"


def test_what_the_engine_costs_and_what_the_readme_says_of_it() -> None:
    rows = read("engine.json")["rows"]
    kinds = {
        kind: [row for row in rows if row["measured"] == kind] for kind in ("export", "soak", "overhead", "footprint")
    }
    assert [row["model"] for row in kinds["export"]] == ["mini", "random:t5-small", "random:t5-base"]
    (soak,) = kinds["soak"]
    assert soak["settings"] == {"generations": 2000, "settled_after": 200} and len(soak["resident_bytes"]) > 15
    loops = {(row["system"], row["cell"]): row["us_per_token"] for row in kinds["overhead"]}
    greedy, generate = loops["greedy()", "in all"], loops["generate()", "in all"]
    theirs = loops["generate(), in transformers' loop", "in all"]
    assert loops["greedy()", "in the decoder session"] < greedy < theirs and abs(generate - greedy) < 800
    alone, whole = kinds["footprint"]
    assert not {"torch", "transformers"} & set(alone["packages"]) and "torch" in whole["packages"]
    require_told(
        f"{alone['seconds']:.2f} s", f"{whole['seconds']:.1f} s", f"{alone['size_bytes'] / 1e6:.0f} MB",
        f"{whole['size_bytes'] / 1e6:.0f} MB", f"{kinds['export'][2]['seconds']:.0f} s", f"{soak['growth']:.1%}",
    )  # fmt: skip


def test_what_the_web_page_reaches_and_what_the_readme_says_of_it() -> None:
    rows = {(row["system"], row["measured"]): row for row in read("web.json")["rows"]}
    student, teacher, whole = dict.fromkeys(system for system, _ in rows)
    visit, warm = rows[student, "first visit"], rows[student, "speed"]
    require_told(
        f"{visit['first_s']:.2f} s after a click", f"{warm['first_p50_s']:.2f} s once it is warm",
        f"{warm['tokens_per_s']:.0f} tokens/s; {visit['settings']['transfer_bytes'] / 1e6:.1f} MB",
        f"{rows[teacher, 'speed']['tokens_per_s']:.0f} tokens/s in 8 bits and "
        f"{rows[whole, 'speed']['tokens_per_s']:.0f} in fp32",
    )  # fmt: skip


def test_the_parts_of_a_step_add_up_to_it() -> None:
    rows = read("step-parts.json")["rows"]
    assert [row["precision"] for row in rows] == ["fp32", "int8", "int4"]
    for row in rows:
        parts = row["settings"].values()
        assert min(parts) > 0 and sum(parts) == pytest.approx(row["us_per_token"], rel=0.05)


def test_the_card_of_the_model_tells_its_recorded_quality() -> None:
    quality, *of_pairs = (row for row in read("training-mini.json")["rows"] if row["measured"] == "quality")
    card = (ROOT / "data/mini-t5/README.md").read_text(encoding="utf-8")
    lines = {line.split("|")[1].strip(): line for line in card.splitlines() if line.startswith("| ")}
    expected = {
        "300 sentences of our own": ["bleu", "bleu_3-5", "bleu_6-8", "bleu_9-14"],
        "200 reports": ["rougeL", "rougeL_seen", "rougeL_unseen"],
    }
    for start, names in expected.items():
        for name in names:
            assert f"{quality[name]:.1f}" in lines[start], f"the card's line {start!r} lacks {name}"
    held_out = [line for name, line in lines.items() if name.startswith("held-out")]
    for line, row in zip(held_out, of_pairs, strict=True):
        assert f"{row['bleu']:.1f}" in line
    assert all(f"{quality[name]:.1f}" in card for name in ("exact_match", "exact_match_seen", "exact_match_unseen"))
    assert "Tatoeba" in card and "CC BY 2.0 FR" in card


@pytest.mark.parametrize("name", ["ladder-amd.json", "ladder-intel.json"])
def test_the_readme_says_how_high_the_ladders_are(name: str) -> None:
    ladders = by_ladder(read(name)["rows"])
    ends = [
        (title, fastest(rows, at_once=at_once)["ratio"])
        for title, rows in ladders.items() for at_once in {row["batch"] > 1 for row in rows} if "64 forced" not in title
    ]  # fmt: skip
    assert len(ends) == 3
    require_told(*(f"{ratio:.0f} times" for _, ratio in ends))


def test_the_results_say_what_the_boards_of_the_intel_show() -> None:
    for name, place in (("t5-small", "as fast as transformers with its cache"), ("mini", "with the bundled model")):
        (row,) = filter_rows(read(f"scoreboard-{name}-intel.json")["rows"], system="ONNX Runtime, our loop, int8")
        least, most = min(row["ratio_samples"]), max(row["ratio_samples"])
        require_told(f"{row['ratio']:.2f} ({least:.2f}–{most:.2f}) times {place}")


def test_the_readme_says_at_which_rates_servers_keep_up() -> None:
    systems = {
        OURS_SERVED: "`t5accel serve`",
        f"{OURS_SERVED}, int8": "the same in int8",
        STATIC: "FastAPI, our engine, static batches",
        "Triton, dynamic batching": "NVIDIA's Triton, our engine, dynamic batching",
        "Ray Serve, static batches": "Ray Serve, our engine, `@serve.batch`",
        "FastAPI, our engine": "FastAPI, our engine, one by one",
        BASELINE: "FastAPI, transformers, one by one",
    }
    rows = read("serving.json")["rows"]
    points = [*filter_rows(rows, measured="open loop", cell="curve")]
    for system, words in systems.items():
        mini, small = (
            knee_text([*filter_rows(points, system=system, model=model)]) for model in ("mini", "random:t5-small")
        )
        assert f"| {words} | {mini} | {small} |" in README
    equal = [row for row in rows if row["cell"] == "neighbours"]
    assert all(row["equal"] == row["of"] for row in equal if row["precision"] in ("fp32", "int8-fp32-products"))
    assert f"{max(row['largest_difference'] for row in equal):.2f} standard deviations" in README
    for forced, start in ((False, "of"), (True, "beside 29 others, but")):
        (row,) = (row for row in equal if row["precision"] == "int8" and row["forced"] == forced)
        assert f"{start} {row['of'] if not forced else row['of'] - row['equal']}" in README


def test_what_ray_costs_on_one_machine_is_said_as_it_was_recorded() -> None:
    times: dict[int, list[float]] = {}
    for row in read("batch-ray.json")["rows"]:
        times.setdefault(row["texts"], []).append(median(row["latency_s"]))
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    for texts, seconds in times.items():
        assert f"| {texts:,} | {' | '.join(f'{one:.1f}' for one in seconds)} |" in page
    (few, short), (many, long) = times.items()
    each = [(b - a) / (many - few) for a, b in zip(short, long, strict=True)]
    local, one, per_core = each
    assert "takes {:.1f}, {:.1f} and {:.1f} ms".format(*(s * 1e3 for s in each)) in page
    assert round(1 - per_core / local, 1) == round(one / local - 1, 1) == 0.1, "10%"
    even = few + (short[2] - short[0]) / (local - per_core)
    assert f"some {round(even, -3):,.0f} " in page and f"some {round(even, -3):,.0f} " in README


def test_short_answers_beside_long_ones_come_as_soon_as_the_readme_says() -> None:
    rows = [*filter_rows(read("serving.json")["rows"], cell="short beside long", model="random:t5-small")]
    ours, static = (
        median(row["short_p99_s"] for row in filter_rows(rows, system=system)) for system in (OURS_SERVED, STATIC)
    )
    assert f"with {rows[0]['rate_per_s']:.0f} requests a second" in README
    assert f"within {ours:.1f} s from ours and {static:.1f} s from static batches" in README


FULL_HEADS = (
    "all logits", "generate()", "transformers", "optimum", "OpenVINO", "CTranslate2", "torch", "fastt5", "onnxt5"
)  # fmt: skip


def floor_of(row: dict, floors: list[dict]) -> float | None:
    """The least time of a step of what this row timed, where its model was calibrated."""
    name = f"{row.get('precision', '')} {row['system']}"
    bits = 4 if re.search("int4|4bit", name) else 8 if re.search("int8|8bit|dynamic|static|fp16|bf16", name) else 32
    whole = bits < 32 or row.get("beams", 1) > 1 or any(word in row["system"] for word in FULL_HEADS)
    student, *_ = row["system"].split(",")  # a board of one model has rows of its students
    model = student if student.startswith("mini-d1") else row["model"]
    found = [
        one["floor_s"] for one in floors
        if one["model"] == model and one["precision"] == {4: "int4", 8: "int8", 32: "fp32"}[bits]
    ]  # fmt: skip
    return max(found) if found and whole else min(found, default=None)


def test_no_recorded_step_is_faster_than_its_floor() -> None:
    """Of a make of CPU that nobody calibrated, at least than on the one that reads faster."""
    floors, nearest, count = read("floors.json")["rows"], float("inf"), 0
    for path in (path for path in FILES if path not in CARDS):
        for row in read(path.name)["rows"]:
            timed = "latency_s" in row and "model" in row and "failed" not in row
            steps = row.get("decoder_calls", row.get("new_tokens") if row.get("forced", True) else 0) if timed else 0
            if steps and (floor_s := floor_of(row, floors)):
                over = min(row["latency_s"]) / steps / floor_s
                assert over >= 1, f"{path.name}: {row['system']} takes {over:.2f} times its floor"
                nearest, count = min(nearest, over), count + 1
    assert count > 500 and nearest < 2, "a floor that nothing comes near would pass whatever was recorded"


@each_card
def test_on_a_gpu_no_step_is_faster_than_the_floor_that_was_measured_beside_it(path: Path) -> None:
    rows = read(path.name)["rows"]
    for floor in (row for row in rows if row["measured"] == "floor" and "floor_s" in row):
        names = ("model", "precision", "batch", "beams")
        alike = (row for row in rows if "latency_s" in row and all(row.get(name) == floor[name] for name in names))
        steps = [min(row["latency_s"]) / row["new_tokens"] for row in alike]
        assert steps and floor["floor_s"] < min(steps) < 3 * floor["floor_s"]


@each_card
def test_what_was_timed_on_a_gpu_was_compared_before(path: Path) -> None:
    rows = read(path.name)["rows"]
    compared = {(row["system"], row["precision"]): row for row in rows if row["measured"] == "equality"}
    suite = [
        row for row in rows if row.get("latency_s") and "precision" in row and not row["cell"].startswith("random:")
    ]
    ours = {(row["system"], row["precision"]) for row in suite if not row["system"].startswith("transformers")}
    # Draws, requests in flight and families are compared in fp32 alone; batches are those of a captured step.
    exact = {one for one in ours if one not in compared}
    for system, _ in exact:
        row = compared[system, "fp32"] if "batches" not in system else compared["static cache, CUDA graph", "bf16"]
        assert "failed" not in row and row["error"] <= row["allowed_error"]
    assert ours - exact
    for row in (compared[one] for one in ours - exact):
        assert "failed" not in row and row["error"] <= row["allowed_error"] and row["distinct"] > 20
        assert row["precision"] != "fp32" or row["equal"] == row["of"]
    for row in (row for row in rows if row["cell"].startswith("random:") and row.get("latency_s")):
        assert row["equal"] == row["of"] if "gpt2" in row["cell"] else row.get("error", 0) < 0.01, row["system"]


@pytest.mark.parametrize("name", ["peers-families.json", "peers-gemma.json"])
def test_our_fp32_tokens_of_other_families_were_those_of_transformers(name: str) -> None:
    rows = [row for row in read(name)["rows"] if row["precision"] == "fp32" and row["system"] in (OURS, OURS_EXACT)]
    assert rows and all(row["equal"] == row["of"] for row in rows)


@pytest.mark.parametrize("name", PEERS_BY_CPU)
def test_the_peers_were_measured_on_the_whole_grid_and_the_results_name_each_cell_that_we_lose(name: str) -> None:
    rows = read(name)["rows"]
    assert {*map(cell_of, rows)} >= {*GRID}
    for row in rows:
        assert "failed" in row or len(row["latency_s"]) >= 3, f"{row['system']} in {cell_of(row)}"
        if row["precision"] == "fp32" and row["system"].startswith("t5accel"):
            assert row["equal"] == row["of"], f"{row['system']} in {cell_of(row)}"
    if name != "peers-amd-avx2.json":  # there the table counts them, and the picture shows each
        for result in (*peer_results(rows), *peer_results(rows, ours=int8_for, precision="int8")):
            assert result.ratio >= 1 or f"{cell_label(result.cell)}, {result.ratio:.2f}x" in BESIDE_PEERS


def test_the_results_say_which_aims_beside_the_peers_were_missed() -> None:
    short, most = [], []
    for name in PEERS_BY_CPU:
        rows = read(name)["rows"]
        cells = [one for one in peer_results(rows) if one.cell.batch == 1 or _input(one) == (8, 32)]
        short.append([one.cell.beams for one in cells if one.ratio < 1.15])
        most.append(max(one.ratio for one in peer_results(rows, ours=int8_for, precision="int8")))
        assert len(cells) == 8
    amd, avx2, intel = short
    assert f"With AVX-512, on either make, {len(amd)} of these 8 cells, all with 4 beams, fall short" in BESIDE_PEERS
    assert amd == intel == [4] * 3 and f"with AVX2 alone {len(avx2)} of them do" in BESIDE_PEERS
    assert f"no cell on any CPU reaches it, {max(most):.2f} being the most" in BESIDE_PEERS and max(most) < 1.5
    ratios = []
    for ours in (OURS, OURS_INT8):  # beside transformers itself
        for name in PEERS_BY_CPU:
            found = peer_results(read(name)["rows"], ours=ours, peers=[REFERENCE])
            ratios.append([one.ratio for one in found if (one.cell.batch, one.cell.beams) == (1, 1)])
    quoted = re.findall(r"(\d+\.\d\d)–(\d+\.\d\d)", BESIDE_PEERS)
    assert quoted == [(f"{min(each):.2f}", f"{max(each):.2f}") for each in ratios]


def test_where_the_operator_wins_with_avx2_alone() -> None:
    rows = read("peers-amd-avx2.json")["rows"]
    fp32 = [one for one in peer_results(rows) if one.ratio < 1]
    assert [one.cell.batch for one in fp32 if one.peer == "CTranslate2"] == [32] * 3
    assert [one.ratio > 0.97 for one in fp32 if one.peer == BEAM_SEARCH] == [True] * 2
    int8 = [*peer_results(rows, ours=int8_for, precision="int8")]
    lost = [one.peer for one in int8 if one.ratio < 1]
    assert 2 * len(lost) == len(int8) and {*lost} == {f"{BEAM_SEARCH} int8"}
    rows = {row["system"]: row for row in read("peers-quality-amd-avx2.json")["rows"]}
    costs = {name: max(rows[REFERENCE][key] - row[key] for key in MAIN_SCORES) for name, row in rows.items()}
    int8 = [cost for name, cost in costs.items() if rows[name]["precision"].startswith("int8")]
    assert len(int8) >= 9 and round(max(int8), 1) == 0.6 and costs[f"{BEAM_SEARCH} int8"] <= 0


def test_eight_bits_cost_nobody_half_a_point() -> None:
    rows = {row["system"]: row for row in read("peers-quality.json")["rows"]}
    lost = {name: [rows[REFERENCE][key] - row[key] for key in MAIN_SCORES] for name, row in rows.items()}
    int8 = [name for name, row in rows.items() if row["precision"].startswith("int8")]
    assert len(int8) >= 9 and all(max(lost[name]) < 0.5 for name in int8)
    assert f"Our four bits cost {lost[OURS_INT4][0]:.1f} BLEU." in " ".join(README.split())
