"""The scoreboard: its file survives what happens to files, and its pictures show the rows and nothing else."""

import base64
import json
import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from t5accel import scoreboard
from t5accel.errors import InputError, MissingPackageError
from t5accel.scoreboard import Results, Row, caption, cells, page, plot, table

REFERENCE = Row(
    technique="the reference", backend="theirs", model="mini", precision="fp32", recipe="fp32", batch=1, beams=1,
    source_tokens=64, new_tokens=10, threads=2, latency_s=(0.5, 0.1, 0.2, 0.3), tokens_per_s=40.0,
    bytes_on_disk=35_400_000, peak_memory_bytes=612_000_000,
    quality={
        "translation": {"bleu": 31.26}, "summaries": {"all": {"rougeL": 81.04}},
        "questions": {"all": {"exact_match": 77.0}},
    },
    reference="the reference", ratio=None, equality="10 tokens equal", machine="a CPU, 2 threads",
    versions={"torch": "2.9.1"},
)  # fmt: skip
OURS = replace(
    REFERENCE, technique="our loop", precision="int8", latency_s=(0.123,), tokens_per_s=81.3, bytes_on_disk=9_000_000,
    peak_memory_bytes=None, quality=None, ratio={"samples": [1.5, 2.0, 2.5], "median": 2.0, "min": 1.5, "max": 2.5},
)  # fmt: skip
RESULTS = Results(
    machine={"cpu": "a CPU", "cpu_flags": ["avx2"], "gpu": None}, versions={"torch": "2.9.1"}, date="2025-11-21",
    commit="abc1234", command="t5accel bench", rows=(REFERENCE, OURS),
)  # fmt: skip

# --- the file ---------------------------------------------------------------------------------------------------------

text = st.text(max_size=12)
number = st.floats(allow_nan=False, allow_infinity=False)
count = st.integers(0, 2**60)
rows = st.builds(
    Row, technique=text, backend=text, model=text, precision=text, recipe=text, batch=count, beams=count,
    source_tokens=count, new_tokens=count, threads=count, latency_s=st.lists(number, max_size=4).map(tuple),
    tokens_per_s=number, bytes_on_disk=count, peak_memory_bytes=st.none() | count,
    quality=st.none() | st.dictionaries(text, number, max_size=2), reference=text,
    ratio=st.none() | st.fixed_dictionaries(
        {"samples": st.lists(number, max_size=3), "median": number, "min": number, "max": number}
    ),
    equality=text, machine=text, versions=st.dictionaries(text, text, max_size=2),
)  # fmt: skip
results = st.builds(
    Results, machine=st.dictionaries(text, st.none() | count | text, max_size=3),
    versions=st.dictionaries(text, text, max_size=2), date=text, commit=st.none() | text, command=text,
    rows=st.lists(rows, max_size=2).map(tuple),
)  # fmt: skip


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(results)
def test_what_was_written_is_read(tmp_path, written):
    written.write(tmp_path / "new folder" / "rows.json")
    assert Results.read(tmp_path / "new folder" / "rows.json") == written


def test_the_file_is_plain_json_in_utf_8_and_nothing_lies_beside_it(tmp_path):
    replace(RESULTS, command="né à la main – ✓").write(tmp_path / "rows.json")
    assert "né à la main – ✓" in (tmp_path / "rows.json").read_text(encoding="utf-8")
    assert os.listdir(tmp_path) == ["rows.json"]


@pytest.mark.parametrize("broken", ["write_text", "replace"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, broken):
    path = tmp_path / "rows.json"
    RESULTS.write(path)

    def half(self, data, **_):
        with open(self, "w") as file:
            file.write(data[: len(data) // 2])
        raise OSError("disk full")

    def refuse(*_):
        raise OSError("disk full")

    if broken == "write_text":
        monkeypatch.setattr(Path, "write_text", half)
    else:
        monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        replace(RESULTS, command="newer").write(path)
    monkeypatch.undo()
    assert Results.read(path) == RESULTS


def without(data: dict, *keys: str) -> dict:
    return {key: value for key, value in data.items() if key not in keys}


GOOD = asdict(RESULTS)
BAD = {
    "empty": "",
    "cut off": json.dumps(GOOD)[:200],
    "a list": "[]",
    "a text": '"rows"',
    "no rows": json.dumps(without(GOOD, "rows")),
    "rows are no list": json.dumps({**GOOD, "rows": 3}),
    "a row is no object": json.dumps({**GOOD, "rows": ["our loop"]}),
    "an older row": json.dumps({**GOOD, "rows": [without(GOOD["rows"][0], "equality", "recipe")]}),
    "an older head": json.dumps(without(GOOD, "versions", "command")),
    "latency is no list": json.dumps({**GOOD, "rows": [{**GOOD["rows"][0], "latency_s": 0.1}]}),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_a_corrupt_or_old_file_is_named(tmp_path, content):
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(InputError, match=re.escape(f"{path} is not a results file of this version")):
        Results.read(path)


def test_bytes_that_are_no_text_and_a_missing_file_are_named(tmp_path):
    (tmp_path / "rows.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="rows.json is not a results file"):
        Results.read(tmp_path / "rows.json")
    with pytest.raises(InputError, match="No results at .*other.json.*t5accel bench --json"):
        Results.read(tmp_path / "other.json")


def test_a_newer_file_with_more_fields_is_read(tmp_path):
    newer = {**GOOD, "more": 1, "rows": [{**row, "energy_j": 3.0} for row in GOOD["rows"]]}
    (tmp_path / "rows.json").write_text(json.dumps(newer))
    assert Results.read(tmp_path / "rows.json") == RESULTS


# --- what is drawn from rows ------------------------------------------------------------------------------------------


def test_cells_are_computed_from_the_row():
    assert cells(REFERENCE) == (
        "the reference", "fp32", "25.00", "40", "1.00x", "35", "612", "31.3", "81.0", "77.0",
    )  # fmt: skip


def test_a_dash_stands_for_what_was_not_measured():
    assert cells(OURS) == ("our loop", "int8", "12.30", "81", "2.00x", "9", "–", "–", "–", "–")
    partly = replace(REFERENCE, quality={"translation": {"bleu": 3.0}, "summaries": None, "questions": {"all": None}})
    assert cells(partly)[-3:] == ("3.0", "–", "–")


def test_the_table_is_aligned_and_opens_with_its_conditions():
    first, blank, header, rule, *lines = table(RESULTS.rows).splitlines()
    assert first == caption(RESULTS.rows) and blank == ""
    assert "mini, batch 1, beams 1, 64 source and 10 forced new tokens, 2 threads; ratio to the reference" in first
    assert {len(line) for line in (header, rule, *lines)} == {len(rule)} and set(rule) == {"-", " "}
    assert [line.split("  ")[0].strip() for line in lines] == ["the reference", "our loop"]
    assert all(cell in lines[0] for cell in cells(REFERENCE)) and all(cell in lines[1] for cell in cells(OURS))


def test_the_plot_has_a_bar_for_each_row_and_is_a_readable_picture(tmp_path):
    from matplotlib.image import imread

    path = tmp_path / "new folder" / "board.png"
    figure = plot(RESULTS.rows, path)
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


def test_more_rows_make_a_taller_plot():
    many = [REFERENCE, *(replace(OURS, technique=f"number {i}") for i in range(9))]
    assert plot(many).get_size_inches()[1] > plot(many[:2]).get_size_inches()[1]
    assert len(plot(many).axes[0].patches) == 10


def test_an_unknown_picture_format_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"board\.xyz"):
        plot(RESULTS.rows, tmp_path / "board.xyz")


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"t5accel\[course\]"):
        plot(RESULTS.rows)


def test_the_page_holds_picture_table_and_origin_of_every_board():
    html = page([("Now", RESULTS), ("Then", replace(RESULTS, commit=None, date="2024-01-01"))], notes="<p>a note</p>")
    assert html.startswith("<!doctype html>") and "<p>a note</p>" in html
    assert html.count("<h2>") == html.count("<table>") == 2
    assert html.index("<h2>Now") < html.index("<h2>Then")
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    assert len(pictures) == 2 and all(base64.b64decode(data).startswith(b"\x89PNG") for data in pictures)
    for cell in (*cells(REFERENCE), *cells(OURS)):
        assert f"<td>{cell}</td>" in html
    for origin in ("commit abc1234", "commit unknown", "2024-01-01", "<code>t5accel bench</code>", "torch 2.9.1"):
        assert origin in html
    assert not re.search(r'(src|href)="(?!data:)', html)  # self-contained


def test_the_page_escapes_what_it_is_given():
    evil = '<script>"&'
    row = replace(REFERENCE, technique=evil, model=evil, machine=evil)
    odd = replace(RESULTS, rows=(row,), date=evil, commit=evil, command=evil, versions={evil: evil})
    html = page([(evil, odd)])
    assert "<script>" not in html
    assert "<td>&lt;script&gt;&quot;&amp;</td>" in html and "<h2>&lt;script&gt;&quot;&amp;</h2>" in html


def draw_page(rows):
    return page([("a title", replace(RESULTS, rows=rows))])


@pytest.mark.parametrize("draw", [table, plot, draw_page])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "random:t5-small"), ("batch", 8), ("beams", 4), ("source_tokens", 32), ("new_tokens", 32),
        ("threads", 1), ("reference", "another"), ("machine", "another CPU"),
    ],
)  # fmt: skip
def test_rows_of_other_conditions_are_refused(draw, name, value):
    assert name in scoreboard._CONDITIONS
    with pytest.raises(InputError, match=f"differ in {name} .*: show them apart"):
        draw((REFERENCE, replace(OURS, **{name: value})))


@pytest.mark.parametrize("draw", [caption, table, plot, draw_page])
def test_no_rows_are_refused(draw):
    with pytest.raises(InputError, match="no rows to show"):
        draw(())
