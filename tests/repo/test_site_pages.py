"""The site's pages that are made from data hold what the data hold."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from script import SCRIPTS, load_script

from bench.results import load_results

ROOT = SCRIPTS.parent
pages = load_script("site_pages")


class Tables(HTMLParser):
    """The texts of a page's tables, a list of rows each, and which of their columns are marked."""

    def __init__(self, page: str):
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.marks: list[list[set[str]]] = []
        self.is_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
            self.marks.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.is_cell = True
            self.tables[-1][-1].append("")
            if tag == "th":
                self.marks[-1].append({name for name, _ in attributes})

    def handle_endtag(self, tag: str) -> None:
        self.is_cell = self.is_cell and tag not in ("th", "td")

    def handle_data(self, text: str) -> None:
        if self.is_cell:
            self.tables[-1][-1][-1] += text


def test_every_notebook_is_found_by_its_problem() -> None:
    page = pages.which()
    (table,), (marks,) = Tables(page).tables, Tables(page).marks
    books = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert [row[1] for row in table[1:]] == [path.stem for path in books]
    assert re.findall(r'href="([^"]*)"', page) == [f"notebooks/{path.stem}.html" for path in books]
    assert [name for name, found in zip(table[0], marks, strict=True) if "data-filter" in found] == [
        "technique", "task", "hardware",
    ]  # fmt: skip
    problems = [json.loads(path.read_text(encoding="utf-8"))["metadata"]["t5accel"]["problem"] for path in books]
    assert [row[0] for row in table[1:]] == problems and len({*problems}) == len(problems)


def test_the_contents_say_what_a_notebook_needs_and_takes() -> None:
    books = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        book = json.loads(path.read_text(encoding="utf-8"))
        books[path.stem[:2]] = book["metadata"]["t5accel"]["minutes"], "".join(book["cells"][0]["source"])
    page = pages.contents()
    (table,) = Tables(page).tables
    assert page.count("data-filter") == 1 and "data-plot" not in page
    rows = {row[0][:2]: row for row in table[1:]}
    assert [*rows] == [*books]
    before = {number: row[2].replace("–", "").replace(", ", " ").split() for number, row in rows.items()}
    for number, (minutes, header) in books.items():
        assert header.replace("`", "").startswith(f"# {rows[number][0]}\n")
        assert all({*before[one]} < {*before[number]} for one in before[number]), "what these need comes before, too"
        everything = minutes + sum(books[one][0] for one in before[number])
        assert rows[number][1::2] == [f"{minutes}", f"{everything}"]
        hours = float(re.match(r"\d+", rows[number][4])[0]) + ("½" in rows[number][4]) / 2
        assert everything / 60 <= hours <= 6.5
    assert before["00"] == [] and before["06"] == ["00", "01", "02"] and rows["06"][4].startswith("3½ hours")
    assert "05" not in before["10"], "it only helps"


def test_every_recorded_speed_is_on_the_boards() -> None:
    page = pages.boards()
    found = Tables(page)
    files = [name for name, _, _ in pages.BOARDS if load_results(name)["rows"]]
    assert len(found.tables) == len(files) == page.count("\n## ") and "scoreboard-mini-amd.json" in files
    for name, table, marks in zip(files, found.tables, found.marks, strict=True):
        timed = [row for row in load_results(name)["rows"] if row["measured"] == "speed" and "latency_s" in row]
        assert len(table) == len(timed) + 1 and {len(row) for row in table} == {len(marks)}
        assert {"data-filter"} in marks and any("data-plot" in one for one in marks)
        rates = [float(row[table[0].index("tokens/s")]) for row in table[1:]]
        known = [(rate, row["tokens_per_s"]) for rate, row in zip(rates, timed, strict=True) if "tokens_per_s" in row]
        assert len(known) > 5
        assert all(shown == pytest.approx(rate, abs=0.51) for shown, rate in known)


def test_the_report_says_how_each_notebook_of_the_recorded_run_did(monkeypatch: pytest.MonkeyPatch) -> None:
    record = load_results("course.json")
    (table,) = Tables(pages.report()).tables
    assert [(row[0] + ".ipynb", row[1], float(row[2])) for row in table[1:]] == [
        (row["notebook"], "passed", row["seconds"]) for row in record["rows"]
    ]
    measured = record | {"rows": [record["rows"][0] | {"status": "passed", "peak_memory_bytes": 812_300_000}]}
    monkeypatch.setattr(pages, "load_results", lambda file: measured)
    page = pages.report()
    assert Tables(page).tables[0][1][3] == "812" and page.count("data-plot") == 2
    versions = [f"{name} {version}" for name, version in record["versions"].items()]
    for told in (record["machine"]["cpu"], record["date"], record["command"], *versions):
        assert told in page


def test_the_figures_of_the_browser_are_those_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    common = dict(system="Student", size_bytes=6e6)
    how = {"browser": "Chromium 150", "transfer_bytes": 9e6, "version": "1.30.0"}
    rows = [
        dict(measured="first visit", first_s=1.25, settings=how, **common),
        dict(measured="speed", first_p50_s=0.031, us_per_token=4100.0, tokens_per_s=243.9, **common),
        dict(measured="quality", system="Student", bleu=27.3, rougeL=58.1, exact_match=54.0),
    ]
    record = dict(machine={"cpu": "a CPU"}, date="2026-11-24", commit="4f0", rows=rows)
    monkeypatch.setattr(pages, "load_results", lambda file: record if file == "web.json" else {"rows": []})
    page = pages.browser()
    ((_, row),) = Tables(page).tables
    assert row == ["Student", "1.25", "0.03", "4.1", "244", "6.0", "9.0", "27.3", "58.1", "54.0"]
    assert "a CPU, one thread; Chromium 150" in page and "2026-11-24, commit 4f0" in page
    record["rows"] = []
    assert pages.browser() == ""


def test_texts_are_escaped_and_the_web_page_is_named_where_it_is_there(tmp_path: Path) -> None:
    assert "<td>a &lt; b</td>" in pages.table(["system"], [["a < b"]])
    for web, there in ((True, 1), (False, 0)):
        pages.write(tmp_path, web=web)
        assert (tmp_path / "see.md").read_text(encoding="utf-8").count('href="web/index.html"') == there
    assert {path.stem for path in tmp_path.iterdir()} == {"contents", "which", "boards", "report", "see"}
