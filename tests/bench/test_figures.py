"""What is drawn from rows: tables and pictures show the rows and nothing else, and only what may be compared."""

import base64
import inspect
import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from refused import refused
from test_ladder import TOY, shown

from bench import drawings
from bench import figures as draw
from bench.drawings import attention_work
from bench.figures import board, caption, page, plot_board, plot_ladders, plot_standings, table
from bench.peers import GRID, PeerResult
from bench.results import load_results
from t5accel.errors import InputError, MissingPackageError, install
from t5accel.timing import Comparison, Latency, Ratio, Work


def is_drawing(made: object) -> bool:
    """A drawing, or a plot of rows: all of them end up in notebooks, pages or guides."""
    if not inspect.isfunction(made) or made.__name__.startswith("_"):
        return False
    return made.__module__ == drawings.__name__ or made.__name__.startswith("plot_")


def smallest_type(figure: Any) -> float:
    texts = figure.findobj(lambda part: hasattr(part, "get_fontsize") and part.get_text() and part.get_visible())
    return min(text.get_fontsize() for text in texts)


REFERENCE = dict(
    measured="speed", system="the reference", reference="the reference", backend="theirs", model="mini",
    precision="fp32", batch=1, beams=1, source_tokens=64, new_tokens=10, threads=2, latency_s=[0.5, 0.1, 0.2, 0.3],
    ratio=1.0, ratio_samples=[1.0] * 4, tokens_per_s=40.0, size_bytes=35_400_000, peak_memory_bytes=612_000_000,
    bleu=31.26, rougeL=81.04, exact_match=77.0,
)  # fmt: skip
OURS = dict(
    measured="speed", system="our loop", reference="the reference", model="mini", precision="int8", batch=1, beams=1,
    source_tokens=64, new_tokens=10, threads=2, latency_s=[0.123], ratio=2.0, ratio_samples=[1.5, 2.0, 2.5],
    tokens_per_s=81.3, size_bytes=9_000_000,
)  # fmt: skip
ROWS = [REFERENCE, OURS]
FACTS = {"cpu": "a CPU", "usable_threads": 2}
RECORD = {"machine": FACTS, "versions": {"torch": "2.9.1"}, "date": "2025-11-21", "commit": "abc1234",
          "command": "python -m bench board", "rows": ROWS}  # fmt: skip
THEIR_CELLS = ("the reference", "fp32", "25.00", "40", "1.00x", "1.00–1.00", "35", "612", "31.3", "81.0", "77.0")
OUR_CELLS = ("our loop", "int8", "12.30", "81", "2.00x", "1.50–2.50", "9", "–", "–", "–", "–")


def test_the_board_is_aligned_and_opens_with_its_conditions():
    first, blank, header, rule, *lines = board(ROWS, FACTS).splitlines()
    assert first == caption(ROWS, FACTS) and blank == "" and first.endswith("a CPU, 2 threads")
    assert "mini, batch 1, beams 1, 64 source and 10 forced new tokens, 2 threads; ratio to the reference" in first
    assert {len(line) for line in (header, rule, *lines)} == {len(rule)} and set(rule) == {"-", " "}
    cells = [tuple(re.split(r"  +", line.strip())) for line in lines]
    assert cells == [THEIR_CELLS, OUR_CELLS], "an en dash stands for what was not measured"


def test_the_table_of_a_ladder_has_a_line_for_each_rung():
    head, rule, *lines = table(TOY).splitlines()
    assert len(lines) == len(TOY) and {*rule} == {"-", " "}
    assert head.split()[-1] == "gate" and [line.split()[-1] for line in lines].count("outside") == 1
    assert lines[1].split() == "cache naive 1 160.0 250 2.50 2.5 36 440 28.0 58.0 35.0 inside".split()
    names = ("peak_memory_bytes", "bleu", "rougeL", "exact_match", "inside")
    bare = {key: value for key, value in shown("naive", None, 1.0).items() if key not in names}
    assert table([bare]).splitlines()[-1].split()[-5:] == ["–"] * 5


def test_a_comparison_is_a_table_of_median_ratio_range_and_number_of_pairs() -> None:
    slow, fast = Latency((0.010, 0.012, 0.014)), Latency((0.004, 0.005, 0.004))
    found = Comparison("slow", Work(1, 8, 8), {"slow": slow, "fast": fast}, {"fast": Ratio.of([2.5, 2.4, 3.5])})
    lines = [line.split() for line in table(found).splitlines()]
    assert lines[0] == ["ms", "ratio", "(min–max)", "n"]
    assert lines[2:] == [["slow", "12.0", "1.00x", "3"], ["fast", "4.00", "2.50x", "(2.40–3.50)", "3"]]
    assert draw.speed(REFERENCE) == {"ms": 250.0, "ratio": "1.00x", "(min–max)": "", "n": 4}


def test_a_plot_draws_lines_of_pairs_and_bars_of_numbers_large_enough_to_read() -> None:
    lines = draw.plot(
        {"a": ([1, 10], [2, 3]), "b": ([1, 10], [4, 5])}, xlabel="x", ylabel="y", log="x", predicted=["b"]
    )
    (axes,) = lines.axes
    assert [line.get_linestyle() for line in axes.lines] == ["-", ":"] and axes.get_xscale() == "log"
    bars = draw.plot({"twice": Ratio.of([1.8, 2.0, 2.4]), "guess": 3.0}, xlabel="times as fast", predicted=["guess"])
    (axes,) = bars.axes
    assert [patch.get_width() for patch in axes.patches] == [2.0, 3.0]
    assert [text.get_text() for text in axes.texts] == ["2.00x (1.80–2.40)", "3.00"]
    for figure in (lines, bars):
        assert smallest_type(figure) >= 10
        assert Image.open(io.BytesIO(figure._repr_png_())).info["dpi"][0] == pytest.approx(draw.DPI, abs=1)


DRAWINGS = {  # arguments that show every kind of mark
    "attention_work": (),
    "rewritings": ({"a norm": (["Pow", "Mul"], ["SimplifiedLayerNormalization"])},),
    "t5_step": (),
    "course_map": ({"encoder": (5.0, 3.0, "02"), "decoder": (50.0, 20.0, "01 to 06")},),
    "beam_tree": (),
    "stacked": ({"ours": {"model": 3.0, "loop": 1.0}, "theirs": {"model": 4.0, "loop": 2.0}}, "ms"),
    "split_layouts": (
        {
            "whole": [["embedding", "encoder", "cross", "decoder"]],
            "two graphs": [["embedding", "encoder", "cross"], ["embedding", "decoder"]],
        },
        {"embedding": 66.0, "encoder": 76.0, "cross": 13.0, "decoder": 88.0},
    ),
    "handed_over": ({"token": 8, "past": 3_000_000, "source": 2_000_000, "logits": 128_000, "longer past": 3_100_000},),
    "rounding_levels": ({f"blocks of {n}": (np.array([0.1, -0.2, 0.3, 5.0]), n) for n in (2, 4)},),
    "next_token_probabilities": (["▁a", "▁"], np.array([1.0, 3.0, 2.0]), np.array([2.0, 1.0, 0.0]), 1),
    "quality_beside_speed": ({"the teacher": (1.0, 100.0), "a": (2.2, 50.0), "b": (2.2, 48.0), "c": (2.1, 80.0)},),
    "launch_timeline": (),
    "gantt": ({"static": [(0, 1, 4, 8), (1, 1, 8, 8)]},),
    "profile_box": ({"batch": (1, 1, 8), "source": (1, 16, 64)}, {"batch": 4}),
    "plot_board": (ROWS,),
    "plot_ladders": ({"one": TOY},),
    "plot_standings": ({"one": [PeerResult(GRID[0], "OpenVINO", 0.8)]},),
    "plot_peers": ({"families": load_results("peers-families.json")["rows"]},),
    "plot_shades": ([[0.1, np.nan]], [["0.10\n7% right", "–"]], ["BART"], ["norm", "biases"], "a title"),
    "plot_losses": ([{"step": step, "stage": step, **dict.fromkeys(draw.TASKS, 1.0)} for step in (1, 2)],),
}


@pytest.mark.parametrize(
    "name", [name for part in (drawings, draw) for name in vars(part) if is_drawing(vars(part)[name])]
)
def test_a_drawing_is_a_figure_whose_words_can_be_read(name: str) -> None:
    figure = getattr(drawings if hasattr(drawings, name) else draw, name)(*DRAWINGS[name])
    assert figure.axes and smallest_type(figure) >= 10
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_drawings_count_what_a_cache_saves_and_names_do_not_overlap() -> None:
    titles = [axes.get_title() for axes in attention_work(steps=4, source=5).axes]
    assert [int(title.split()[-2]) for title in titles] == [10, 4, 20, 5]
    (axes,) = drawings.quality_beside_speed({"teacher": (1, 100), "a": (2.2, 50), "b": (2.3, 48)}).axes
    heights = {text.get_text(): text.xy[1] for text in axes.texts}
    assert heights["teacher"] == 100 and abs(heights["a"] - heights["b"]) >= 6


def test_the_drawing_of_next_tokens_shows_the_likeliest_with_their_words_and_two_temperatures() -> None:
    teacher, student = np.log([0.1, 0.6, 0.3]), np.log([0.2, 0.5, 0.3])
    label, plain, soft = drawings.next_token_probabilities(["one", "two"], teacher, student, 1).axes
    widths = [[bar.get_width() for bar in axes.patches] for axes in (label, plain, soft)]
    roots = np.sqrt([0.6, 0.3]) / np.sqrt([0.1, 0.6, 0.3]).sum()
    np.testing.assert_allclose(widths, [[1.0, 0.0], [0.6, 0.3], roots])
    np.testing.assert_allclose(plain.lines[0].get_xdata(), [0.5, 0.3])
    assert not label.lines and "other tokens: 10%" in plain.get_xlabel()


def test_the_plot_has_a_bar_for_each_row_and_is_a_readable_picture(tmp_path, monkeypatch):
    from matplotlib.image import imread

    path = tmp_path / "new folder" / "board.png"
    figure = plot_board(ROWS, path)
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [1.0, 2.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["the reference (fp32)", "our loop (int8)"]
    assert [note.get_text() for note in axes.texts] == ["1.00x", "2.00x"]
    assert "the reference" in axes.get_xlabel() and "mini, batch 1" in axes.get_title()
    (errors,) = axes.collections
    assert [(left[0], right[0]) for left, right in errors.get_segments()] == [(1.0, 1.0), (1.5, 2.5)]
    picture = imread(path)
    assert picture.shape[:2] == tuple(round(150 * inches) for inches in reversed(figure.get_size_inches()))
    assert picture[..., :3].min() < 0.3 and picture[..., :3].max() == 1.0  # something is drawn on white
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=re.escape(install("course"))):
        plot_board(ROWS)


def test_the_page_holds_picture_table_and_origin_of_every_board_and_escapes_them():
    html = page([("Now", RECORD), ("Then", RECORD | dict(commit=None, date="2024-01-01"))], notes="<p>a note</p>")
    assert html.startswith("<!doctype html>") and "<p>a note</p>" in html
    assert html.count("<h2>") == html.count("<table>") == 2
    assert html.index("<h2>Now") < html.index("<h2>Then")
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    assert len(pictures) == 2 and all(base64.b64decode(data).startswith(b"\x89PNG") for data in pictures)
    for cell in (*THEIR_CELLS, *OUR_CELLS):
        assert f"<td>{cell}</td>" in html
    for origin in ("commit abc1234", "commit unknown", "2024-01-01", "python -m bench board</code>", "torch 2.9.1"):
        assert origin in html
    assert not re.search(r'(src|href)="(?!data:)', html)  # self-contained
    evil = '<script>"&'
    row = REFERENCE | dict(system=evil, model=evil)
    odd = RECORD | dict(rows=[row], date=evil, commit=evil, command=evil, versions={evil: evil}, machine={"cpu": evil})
    html = page([(evil, odd)])
    assert "<script>" not in html
    assert "<td>&lt;script&gt;&quot;&amp;</td>" in html and "<h2>&lt;script&gt;&quot;&amp;</h2>" in html


def draw_page(rows):
    return page([("a title", RECORD | dict(rows=rows))])


def test_no_rows_and_rows_of_other_conditions_are_refused():
    for show in (board, plot_board, draw_page):
        for name in ("model", "threads"):
            refused(lambda rows, show=show: show(rows), "rows", [REFERENCE, OURS | {name: "another"}],
                    match=name)  # fmt: skip
    for show in (caption, table, board, plot_board, draw_page):
        refused(lambda rows, show=show: show(rows), "rows", [], match="rows")
    for show in (table, lambda rows: plot_ladders({"both": rows})):
        two = [*TOY, shown("naive", None, 1.0, cell="another")]
        refused(lambda rows, show=show: show(rows), "rows", two, match="cell")
    refused(plot_ladders, "ladders", {}, match="ladders")


def test_the_picture_of_a_ladder_has_a_bar_for_each_rung_in_the_colour_of_its_kind(tmp_path: Path):
    from matplotlib.colors import to_hex

    figure = plot_ladders({"one": TOY, "two": TOY[:2]}, tmp_path / "new" / "ladder.png")
    assert (tmp_path / "new" / "ladder.png").stat().st_size > 10_000
    first, second = figure.axes
    colours = [to_hex(bar.get_facecolor()) for bar in first.patches]
    kinds = ["LATENCY", "LATENCY", "LATENCY", "ASIDE", "OUTSIDE", "THROUGHPUT"]
    assert colours == [getattr(draw, kind) for kind in kinds]
    assert [label.get_text() for label in first.get_yticklabels()] == [row["adds"] for row in TOY]
    assert [text.get_text() for text in first.texts][:3] == ["1", "x2.50, in all 2.5", "x8.10, in all 20"]
    ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in first.patches]
    assert ends[2] == pytest.approx((2.5, 20.0)) and ends[5] == pytest.approx((20.0, 160.0))
    assert len(second.patches) == 2 and first.get_xscale() == "log"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["on the way to the fastest", "tried beside it", "many texts at once", "outside the gate"]


def test_a_heat_map_shows_every_cell_of_every_board(tmp_path: Path):
    standings = [PeerResult(cell, "OpenVINO", 0.8 + number / 10) for number, cell in enumerate(GRID)]
    some = [standing for standing in standings if standing.cell != GRID[2]]
    figure = plot_standings({"one": standings, "two": some, "none": []}, tmp_path / "there/map.png")
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert len(texts) == 36 and "0.80x\nOpenVINO" in texts and texts.count("not measured") == 1
    assert (tmp_path / "there/map.png").stat().st_size > 10_000
    greedy = [standing for standing in standings if standing.cell.beams == 1]
    several = [PeerResult(cell, "OpenVINO", 1.5, model) for model in ("b", "a") for cell in GRID[:13:6]]
    (axes,) = plot_standings({"models": several}).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "a"] and axes.get_xlabel() == "batch"
    empty = plot_standings({"all": standings, "greedy alone": greedy}).axes[3]
    assert not empty.texts and not empty.axison
    with pytest.raises(InputError, match="make peers"):
        plot_standings({"none": []})
