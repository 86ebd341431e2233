"""Open the web page in a headless Chromium and time it: the first visit, a click on the warm page, and each token.

Needs `make web` and what `make test-web` installs:

    PYTHONPATH=build/browser-site CHROMIUM=$(scripts/chromium) .venv/bin/python -m bench.record.web --json FILE
"""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.precision import backend_scores
from bench.results import Row, record_parser, write_rows
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.graphs.manifest import read_manifest
from t5accel.tokenization import TokenizerFile

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "web"
# A model that is missing, or a page that hangs, ends the wait; a slow machine does not.
WAIT_MS = 900_000
# What the page is to reach with the model that a visitor gets who chooses nothing.
MOST_FIRST_S, FEWEST_TOKENS_PER_S, MOST_TRANSFER_BYTES = 3.0, 25.0, 25e6


class Site:
    """A folder of files on a free port of this machine, as any static host has it; ``asked`` are the paths."""

    def __init__(self, folder: Path):
        self.asked: list[str] = []
        asked = self.asked

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                asked.append(self.path)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser that ``CHROMIUM`` names."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # No sandbox in containers and as root; it opens our own server only.
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"], args=options)
        yield browser
        browser.close()


def choose(page: Page, model: str) -> None:
    """Take a model, and wait until it is there."""
    page.locator(f'input[name="model"][value="{model}"]').check()
    page.wait_for_selector(f'body[data-ready="{model}"]', timeout=WAIT_MS)


def type_in(page: Page, task: str, texts: dict[str, str]) -> None:
    """Choose a task and fill in its fields."""
    page.locator(f'input[name="task"][value="{task}"]').check()
    for name, text in texts.items():
        page.locator(f'textarea[name="{name}"]').fill(text)


def ask(page: Page, task: str, texts: dict[str, str]) -> dict[str, Any]:
    """Type, click, wait for the answer: its tokens, and what the page says of the time."""
    type_in(page, task, texts)
    page.locator('button[type="submit"]').click()
    return answered(page)


def answered(page: Page) -> dict[str, Any]:
    """The answer, when it is whole."""
    answer = page.locator("#answer[data-tokens]")
    answer.wait_for(timeout=WAIT_MS)
    tokens = [int(token) for token in answer.get_attribute("data-tokens").split()]
    return {"text": answer.inner_text(), "tokens": tokens, **json.loads(answer.get_attribute("data-times"))}


def transfer_bytes(paths: Iterator[str] | list[str], folder: Path = BUILT) -> int:
    """Of the files that were asked for, as a host sends them that compresses by gzip."""
    names = {path.split("?")[0].lstrip("/") or "index.html" for path in paths}
    return sum(len(gzip.compress((folder / name).read_bytes(), 6)) for name in names)


def rows_of(browser: Browser, model: dict[str, Any], tasks: list[dict[str, Any]], version: str) -> Iterator[Row]:
    """A first visit, which loads that model and is clicked at once; every example, warm; and the quality, by Python."""
    site = Site(BUILT)
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{site.url}#{model['id']}")
    cold = ask(page, tasks[0]["id"], tasks[0]["examples"][0])
    choose(page, model["id"])
    warm = [ask(page, task["id"], texts) for task in tasks for texts in task["examples"]]
    of_tokens = [one for one in warm if one["perToken"]]
    per_token_s = median(one["perToken"] for one in of_tokens) / 1e3
    common = dict(
        system=model["label"], backend="onnxruntime-web", threads=1, texts=len(warm), size_bytes=model["bytes"]
    )
    settings = dict(browser=f"Chromium {browser.version}", transfer_bytes=transfer_bytes(site.asked), version=version)
    yield Row(measured="first visit", first_s=cold["firstS"], settings=settings, **common)
    yield Row(
        measured="speed", first_p50_s=median(one["firstS"] for one in warm), us_per_token=per_token_s * 1e6,
        tokens_per_s=1 / per_token_s, new_tokens=sum(len(one["tokens"]) for one in warm), forced=False, **common,
    )  # fmt: skip
    context.close()
    site.close()
    folder = BUILT / model["folder"]
    backend, checkpoint = OrtNumpy(folder), read_manifest(folder).source["sha256"]
    found = backend_scores(backend, TokenizerFile(folder), batch_size=1)  # one text at a time, as the page
    yield Row(measured="quality", system=model["label"], settings={"checkpoint": checkpoint}, **found)


def missed(rows: list[Row]) -> list[str]:
    """The aims that the rows of one model miss, in words: ``["the first word came after 4.00 s, not 3"]``."""
    found = []
    for row in rows:
        first = row.get("first_s", row.get("first_p50_s", 0.0))
        if first > MOST_FIRST_S:
            found.append(f"the first word came after {first:.2f} s, not {MOST_FIRST_S:.0f}")
        if row.get("tokens_per_s", FEWEST_TOKENS_PER_S) < FEWEST_TOKENS_PER_S:
            found.append(f"{row['tokens_per_s']:.0f} tokens/s, not {FEWEST_TOKENS_PER_S:.0f}")
        if (sent := row.get("settings", {}).get("transfer_bytes", 0)) > MOST_TRANSFER_BYTES:
            found.append(f"{sent / 1e6:.1f} MB are sent, not {MOST_TRANSFER_BYTES / 1e6:.0f}")
    return found


def main() -> None:
    """Measure, and write the rows to a file."""
    parser = record_parser("Time the web page in a headless Chromium.")
    args = parser.parse_args()
    content = json.loads((BUILT / "page.json").read_text(encoding="utf-8"))
    lock = json.loads((ROOT / "web" / "package-lock.json").read_text(encoding="utf-8"))
    version = lock["packages"]["node_modules/onnxruntime-web"]["version"]
    with chromium() as browser:
        rows = [row for model in content["models"] for row in rows_of(browser, model, content["tasks"], version)]
    write_rows(args.json, rows, command="python -m bench.record.web --json FILE")
    for row in rows:
        if row["measured"] == "quality":
            print(f"{row['system']:16} quality      BLEU {row['bleu']:.1f}, ROUGE-L {row['rougeL']:.1f}, "
                  f"EM {row['exact_match']:.1f}")  # fmt: skip
            continue
        first, rate = row.get("first_s", row.get("first_p50_s")), row.get("tokens_per_s")
        speed = f", {rate:.0f} tokens/s" if rate else f", {row['settings']['transfer_bytes'] / 1e6:.1f} MB sent"
        print(f"{row['system']:16} {row['measured']:12} first word after {first:.2f} s{speed}")
    default = content["models"][0]["label"]
    lost = missed([row for row in rows if row["system"] == default])
    print(f"{default}: {'; '.join(lost) or 'all aims are reached'}.")


if __name__ == "__main__":
    main()
