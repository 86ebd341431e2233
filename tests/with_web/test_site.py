"""The built site in a real browser: its tables are sifted, its pages found, nothing is asked of other hosts.

Run by `make test-web`, which builds it; screenshots lie in build/web-test/.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import pytest
from conftest import OUT, ROOT
from playwright.sync_api import BrowserContext, Page, expect

SITE = ROOT / "build" / "site"


@pytest.fixture
def site(web: Any) -> Iterator[Any]:
    """In the place of the page's: all fixtures that take a site have this one."""
    assert (SITE / "which.html").is_file(), "build it: make site"
    site = web.Site(SITE)
    yield site
    site.close()


def visible(page: Page, table: int = 0) -> list[str]:
    return page.locator("table.sift").nth(table).locator("tbody tr:visible").all_inner_texts()


def test_a_reader_finds_a_notebook(page: Page, site: Any, foreign: list[str]) -> None:
    page.goto(site.url + "which.html")
    everything = visible(page)
    assert len(everything) == len([*(ROOT / "notebooks").glob("*.ipynb")])
    page.get_by_role("combobox", name="hardware").select_option("GPU")
    found = visible(page)
    books = {path.stem: json.loads(path.read_text("utf-8")) for path in (ROOT / "notebooks").glob("*.ipynb")}
    on_gpus = [name for name, book in books.items() if "GPU" in book["metadata"]["t5accel"]["hardware"]]
    assert len(found) == len(on_gpus) < len(everything)
    page.get_by_role("combobox", name="task").select_option("questions")
    assert visible(page) == found, "what depends on no task fits each"
    page.screenshot(path=OUT / "site-which.png")
    page.get_by_role("link", name=on_gpus[0]).first.click()
    expect(page.locator("h1")).to_be_visible()
    assert not foreign


def test_a_reader_sorts_filters_and_plots_a_board(page: Page, site: Any, foreign: list[str]) -> None:
    page.goto(site.url + "boards.html")
    table = page.locator("table.sift").first
    column = table.locator("th").all_inner_texts().index("tokens/s")

    def rates() -> list[float]:
        return [float(text.split("\t")[column]) for text in visible(page)]

    table.get_by_role("button", name="tokens/s").click()
    assert rates() == sorted(rates()) and len({*rates()}) > 5
    table.get_by_role("button", name="tokens/s").click()
    assert rates() == sorted(rates(), reverse=True)
    page.get_by_role("combobox", name="precision").first.select_option("int8")
    assert 0 < len(rates()) < table.locator("tbody tr").count()
    bars = page.locator(".sift-plot").first.locator(".sift-bar")
    page.get_by_role("combobox", name="Plot").first.select_option(label="tokens/s")
    assert [float(text) for text in bars.all_inner_texts()] == rates()
    page.screenshot(path=OUT / "site-boards.png")
    assert not foreign


def test_a_plain_table_sorts_too(page: Page, site: Any, foreign: list[str]) -> None:
    page.goto(site.url + "docs/results.html")
    table = page.locator("table", has_text="t5-small, one text").first
    rates = table.locator("tbody tr td:nth-child(5)")
    recorded = [float(text.replace(",", "")) for text in rates.all_inner_texts()]
    assert max(recorded) > 10_000 and sorted(recorded) != recorded
    table.get_by_role("button", name="tokens/s").first.click()
    assert [float(text.replace(",", "")) for text in rates.all_inner_texts()] == sorted(recorded)
    page.screenshot(path=OUT / "site-results.png")
    assert not foreign


def test_no_link_of_ours_leads_nowhere() -> None:
    pages = {path.relative_to(SITE).as_posix(): path.read_text(encoding="utf-8") for path in SITE.rglob("*.html")}
    assert len(pages) > 100
    anchors = {name: {*re.findall(r' (?:id|name)="([^"]+)"', text)} for name, text in pages.items()}
    lost = set()
    for name, text in pages.items():
        for link in re.findall(r'<a [^>]*href="([^"]+)"', text):
            place, anchor = urldefrag(urljoin(f"http://site/{name}", link.replace("&amp;", "&")))
            if place.startswith("http://site/"):
                file = SITE / unquote(place.removeprefix("http://site/").split("?")[0])
                if not (file.is_file() or (file / "index.html").is_file()):
                    lost.add((name, link))
                if anchor and unquote(anchor) not in anchors[file.relative_to(SITE).as_posix()]:
                    lost.add((name, link))
    assert not lost


def test_the_web_page_runs_below_the_site(page: Page, context: BrowserContext, site: Any, web: Any) -> None:
    page.goto(site.url + "see.html")
    page.get_by_role("link", name="Open it").click()
    assert Path(SITE / "web" / "page.json").is_file()
    assert web.ask(page, "translate", {"text": "I am tired."})["text"]
    assert all(path.startswith("/web/") for path in site.asked if "models" in path)
