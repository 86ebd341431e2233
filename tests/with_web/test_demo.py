"""`python -m bench demo` in a browser: every example answers, what cannot be answered gets a sentence, nothing leaves.

Run by `make test-web`; screenshots lie in build/web-test/.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from conftest import OUT, ROOT
from playwright.sync_api import Browser, Page, expect

from bench.demo.race import Task, example_tasks
from bench.evaluation import rows

TEMPORARY = OUT / "demo-tmp"
START_S, ANSWER_MS = 600, 300_000


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The command in a process and an environment of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "GRADIO_ANALYTICS_ENABLED"}
    environment["PYTHONPATH"] = str(ROOT)  # and no longer playwright
    shutil.rmtree(TEMPORARY, ignore_errors=True)
    TEMPORARY.mkdir(parents=True)
    environment["TMPDIR"] = str(TEMPORARY)
    with (OUT / "demo.log").open("w") as log:
        command = [os.environ["DEMO_PYTHON"], "-m", "bench", "demo", "--port", str(port)]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    address, deadline = f"http://127.0.0.1:{port}/", time.monotonic() + START_S
    try:
        while True:
            assert process.poll() is None and time.monotonic() < deadline, (OUT / "demo.log").read_text()
            with suppress(OSError), urllib.request.urlopen(address, timeout=30):
                break
            time.sleep(0.5)
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)
    left = {path.name for path in TEMPORARY.rglob("*") if path.is_file() or "gradio" in path.name}
    assert not left, "whatever was sent"


@pytest.fixture
def demo(browser: Browser, url: str) -> Iterator[Page]:
    """The open page; whatever it asks of another origin fails the test."""
    foreign: list[str] = []
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    own = (url, url.replace("http:", "ws:"), "data:", "blob:")
    context.on("request", lambda one: one.url.startswith(own) or foreign.append(one.url))
    page = context.new_page()
    page.goto(url)
    expect(page.get_by_role("button", name="Run")).to_be_visible(timeout=60_000)
    yield page
    context.close()
    assert not foreign


def run(page: Page) -> list[tuple[str, str]]:
    """Click, wait, and read what stands in the lanes."""
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#status")).to_have_text("Done.", timeout=ANSWER_MS)
    lanes = page.locator(".lane:visible")
    return [
        (lane.locator("textarea").input_value(), lane.get_by_test_id("markdown").inner_text()) for lane in lanes.all()
    ]


def choose(page: Page, task: Task) -> None:
    page.get_by_role("radio", name=task.label).check()
    # Before the new fields have come, an example could cost them their labels: Gradio then mixes up two updates.
    for label in task.fields.values():
        expect(page.get_by_role("textbox", name=label, exact=True)).to_be_visible()


def write(page: Page, texts: dict[str, str], labels: dict[str, str]) -> None:
    for name, text in texts.items():
        box = page.get_by_role("textbox", name=labels[name], exact=True)
        expect(box).to_be_visible()
        box.fill(text)


def test_run_can_be_pressed_at_once(demo: Page) -> None:
    assert run(demo)[0][0]


def test_every_example_is_answered_in_four_ways(demo: Page) -> None:
    for task in example_tasks():
        choose(demo, task)
        for number, texts in enumerate(task.examples):
            examples = demo.get_by_role("combobox", name="Examples")
            examples.click()
            demo.get_by_role("option").nth(number).click()
            last = demo.get_by_role("textbox", name=list(task.fields.values())[-1], exact=True)
            expect(last).to_have_value(list(texts.values())[-1])
            found = run(demo)
            answers = [answer for answer, _ in found]
            assert len(found) == 4 and all(answers) and answers[0] == answers[1]
            assert "the same tokens" in found[1][1]
            assert all(re.search(r"tokens/s.*tokens in .* s.* MB", figures) for _, figures in found)
        demo.screenshot(path=OUT / f"demo-{task.id}.png", full_page=True)


def test_empty_overlong_and_unknown_get_a_sentence(demo: Page) -> None:
    task, status = example_tasks()[1], demo.locator("#status")
    choose(demo, task)
    long = "The storm closed the road. " * 200
    for text, said in (("  ", "Nothing is written under “Your text”"), (long, "shorten it")):
        write(demo, {"text": text}, task.fields)
        demo.get_by_role("button", name="Run").click()
        expect(status).to_contain_text(said, timeout=ANSWER_MS)
    write(demo, {"text": "The storm closed the road."}, task.fields)
    model = demo.get_by_role("textbox", name="Model")
    model.fill("no-such/model")
    model.press("Enter")
    expect(demo.get_by_role("checkbox", name="student, int8")).not_to_be_checked()
    demo.get_by_role("button", name="Run").click()
    expect(status).to_contain_text("no-such/model", timeout=ANSWER_MS)


FORM = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n' + b"a" * 100_000 + b"\r\n--x--"


@pytest.mark.parametrize("path", ["upload", "gradio_api/upload", "gradio_api/upload/", "gradio_api/upload?upload_id=1"])
def test_a_file_is_refused(url: str, path: str) -> None:
    request = urllib.request.Request(url + path, FORM, {"content-type": "multipart/form-data; boundary=x"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, timeout=30)
    assert not list(TEMPORARY.rglob("*gradio*"))


def test_a_page_of_another_site_cannot_ask(browser: Browser, url: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(url.replace("127.0.0.1", "localhost") + "theme.css")  # another site than 127.0.0.1
    for path in ("gradio_api/upload", "gradio_api/queue/join", "gradio_api/run/choose_model"):
        with page.expect_response(lambda one: one.request.method == "POST") as answer:
            page.evaluate("(to) => void fetch(to, { method: 'POST', mode: 'no-cors', body: '{}' })", url + path)
        assert answer.value.status == 403, path
    context.close()


def test_a_running_answer_is_stopped(demo: Page) -> None:
    task = example_tasks()[1]
    choose(demo, task)
    write(demo, task.examples[0], task.fields)
    demo.get_by_role("button", name="Run").click()
    expect(demo.locator("#status")).to_have_text("Writing.", timeout=ANSWER_MS)
    demo.get_by_role("button", name="Stop").click()
    expect(demo.locator("#status")).to_have_text("Stopped.")
    assert run(demo)[0][0], "and it goes on afterwards"


def test_ten_visitors_at_once_are_all_answered(browser: Browser, url: str) -> None:
    contexts = [browser.new_context() for _ in range(10)]
    pages: list[Any] = []
    for context, row in zip(contexts, rows("translation"), strict=False):
        context.set_default_timeout(ANSWER_MS)
        page = context.new_page()
        page.goto(url)
        expect(page.get_by_role("button", name="Run")).to_be_visible(timeout=ANSWER_MS)
        write(page, {"text": row["source"]}, example_tasks()[0].fields)
        pages.append(page)
    for page in pages:
        page.get_by_role("button", name="Run").click()
    for page in pages:
        expect(page.locator("#status")).to_have_text("Done.", timeout=ANSWER_MS)
    texts = [page.locator(".lane textarea").first.input_value() for page in pages]
    assert all(texts) and len({*texts}) > 5, "each has its own answer"
    for context in contexts:
        context.close()
