"""The built page behind a plain static server, and a headless Chromium in front of it."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect
from script import SCRIPTS

# Also report what the service worker asks for.
os.environ["PW_EXPERIMENTAL_SERVICE_WORKER_NETWORK_EVENTS"] = "1"

expect.set_options(timeout=60_000)  # on a busy machine

ROOT = SCRIPTS.parent
OUT = ROOT / "build" / "web-test"  # screenshots; made afresh by every run
TEST_S = 1800  # beyond this something hangs that has no limit of its own


@pytest.fixture(scope="session")
def web() -> ModuleType:
    """bench/record/web.py, which drives the page."""
    assert os.environ.get("CHROMIUM"), "CHROMIUM is not set: run `make test-web`, which finds a browser"
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    return import_module("bench.record.web")


@pytest.fixture(scope="session")
def content(web: ModuleType) -> dict[str, Any]:
    """What the page is about."""
    return json.loads((web.BUILT / "page.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def browser(web: ModuleType) -> Iterator[Browser]:
    with web.chromium() as browser:
        yield browser


@pytest.fixture
def site(web: ModuleType) -> Iterator[Any]:
    site = web.Site(web.BUILT)
    yield site
    site.close()


@pytest.fixture
def foreign(site: Any) -> list[str]:
    """What was asked of any other origin than the page's; `context` fills it."""
    return []


@pytest.fixture
def context(browser: Browser, site: Any, foreign: list[str]) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1000, "height": 1000})
    context.on("request", lambda one: one.url.startswith((site.url, "data:", "blob:")) or foreign.append(one.url))
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))

    def noticed(message: Any) -> None:
        if message.type == "error" and not message.location["url"].endswith("/favicon.ico"):  # beside a file alone
            errors.append(message.text)

    page.on("console", noticed)
    yield page
    assert not errors, f"errors of the page: {errors}"


@pytest.fixture(autouse=True)
def overall_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"the test took more than {TEST_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(TEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
