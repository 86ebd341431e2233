"""What a visitor does with the page, in a real browser, and whether it writes what Python writes.

Run by `make test-web`; plain `make test` does not come here. Screenshots lie in build/web-test/.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import OUT, ROOT
from playwright.sync_api import BrowserContext, Page, expect

from bench.evaluation import rows
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.decoding.greedy_search import greedy
from t5accel.graphs.manifest import read_manifest
from t5accel.tokenization import TokenizerFile

TEXTS = 10  # of each task
MODELS = ("student", "int8", "fp32")
# In 8 bits a token may be another than Python's where its logit is nearly the largest. The largest gap met was 0.09,
# and at half of all steps the second token is more than 4 behind.
NEAR = 0.25
MOST_OTHERS = 10  # answers with such a token
LONG = {"text": "The storm closed the road and the school. " * 80}


def asked_of(content: dict[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """Texts of all tasks in turn, each with its task."""
    names = dict(translate="translation", summarise="summaries", ask="questions")
    found = [
        [(task["id"], {name: row.get(name, row.get("source")) for name in task["fields"]})
         for row in rows(names[task["id"]])[:: len(rows(names[task["id"]])) // TEXTS][:TEXTS]]
        for task in content["tasks"]
    ]  # fmt: skip
    return [one for group in zip_longest(*found) for one in group]


def folder_of(web: ModuleType, content: dict[str, Any], model: str) -> Path:
    return next(web.BUILT / one["folder"] for one in content["models"] if one["id"] == model)


def source(content: dict[str, Any], task: str, texts: dict[str, str]) -> str:
    return next(one["template"] for one in content["tasks"] if one["id"] == task).format(**texts)


def by_python(content: dict[str, Any], folder: Path, asked: list[tuple[str, dict[str, str]]]) -> list[list[int]]:
    """The tokens that the same export gives in Python."""
    backend, tokenizer, found = OrtNumpy(folder), TokenizerFile(folder), []
    for task, texts in asked:
        batch, most = tokenizer([source(content, task, texts)]), content["max_new_tokens"]
        found.append(greedy(backend, *batch.values(), max_new_tokens=most).sequences[0].tolist())
    return found


def gaps(
    content: dict[str, Any], folder: Path, asked: tuple[str, dict[str, str]], tokens: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """How far each token of an answer is behind the likeliest one in Python, which follows the same answer so far.

    And how far the second one is; both (L,), in logits.
    """
    backend, batch = OrtNumpy(folder), TokenizerFile(folder)([source(content, *asked)])
    state, found = backend.new_state(backend.encode(*batch.values())), []
    for before, token in zip([backend.decoder_start_token_id, *tokens], tokens, strict=False):
        logits = backend.step(state, np.array([[[before]]]))[0, 0, -1]
        second, first = np.partition(logits, -2)[-2:]
        found.append((first - logits[token], first - second))
    behind, seconds = np.array(found).T
    return behind, seconds


def wait_until_kept(page: Page) -> None:
    """The service worker has the page, and nothing of an earlier version's."""
    page.evaluate("""async () => {
        const { active } = await navigator.serviceWorker.ready;
        while (active.state !== "activated")
            await new Promise((resolve) => active.addEventListener("statechange", resolve, { once: true }));
    }""")


@pytest.mark.parametrize("model", MODELS)
def test_the_page_writes_the_tokens_that_python_writes(page, site: Any, web, content, model: str, foreign) -> None:
    asked = asked_of(content)
    expected = by_python(content, folder_of(web, content, model), asked)
    assert len(asked) == 3 * TEXTS and len({*map(tuple, expected)}) > 2 * TEXTS
    assert sum(len({*tokens}) > 5 for tokens in expected) > TEXTS, "answers that vary are what equality rests on"
    page.goto(f"{site.url}#{model}")
    web.choose(page, model)
    found = [web.ask(page, task, texts)["tokens"] for task, texts in asked]
    if model == "fp32":
        assert found == expected
    else:  # quantised anew at each step: the last bit of a sum decides how it is rounded
        folder = folder_of(web, content, model)
        end = read_manifest(folder).tokens["eos_token_id"]
        assert sum(one != other for one, other in zip(found, expected, strict=True)) <= MOST_OTHERS
        seconds = []
        for number, tokens in enumerate(found):
            assert end not in tokens[:-1] and (tokens[-1] == end or len(tokens) == content["max_new_tokens"])
            behind, second = gaps(content, folder, asked[number], tokens)
            assert behind.max() < NEAR, f"text {number}, token {behind.argmax()}: {behind.max()} behind"
            seconds += second.tolist()
        assert np.mean(np.array(seconds) > NEAR) > 0.8, "where the second one is as good, nothing is tested"
    assert not foreign
    page.screenshot(path=OUT / f"{model}.png", full_page=True)


def test_a_first_visit_is_small_stays_at_home_and_works_without_a_network_afterwards(
    page: Page, context: BrowserContext, site: Any, web: ModuleType, content: dict[str, Any], foreign: list[str]
) -> None:
    page.goto(site.url)
    first = content["tasks"][0]
    web.type_in(page, first["id"], first["examples"][0])
    page.locator('button[type="submit"]').click()  # while it loads: the text waits for the model
    page.screenshot(path=OUT / "loading.png", full_page=True)
    before = web.answered(page)
    expect(page.locator("#status")).to_have_text("Done.")
    assert page.locator("#announcement").text_content() == before["text"] != ""
    assert page.locator("#answer").get_attribute("lang") == first["language"]
    wait_until_kept(page)
    assert [path for path in site.asked if re.search("models/student.*/weights.data", path)]
    assert not [path for path in site.asked if re.search("models/(int8|fp32)", path)], "nobody chose these"
    sent = web.transfer_bytes({*site.asked} - {"/service-worker.js"})
    assert sent < web.MOST_TRANSFER_BYTES, f"{sent / 1e6:.1f} MB"

    site.close()  # no network any more
    page.goto(site.url)
    web.choose(page, "student")
    assert web.ask(page, first["id"], first["examples"][0])["tokens"] == before["tokens"]
    page.locator('input[value="fp32"]').check()
    expect(page.locator("#status")).to_contain_text("Something went wrong")
    page.locator('button[type="submit"]').click()  # tries again, and ends again
    expect(page.locator("#stop")).to_be_disabled()
    expect(page.locator("#status")).to_contain_text("Something went wrong")
    web.choose(page, "student")  # and it goes on
    assert not foreign
    page.close()


def test_a_new_version_keeps_the_models_that_stay_the_same(page: Page, site: Any, content: dict[str, Any]) -> None:
    kept = next(one["folder"] for one in content["models"] if one["id"] == "fp32") + "weights.data"
    gone = "models/fp32-00000000/weights.data"
    page.goto(site.url + "page.json")  # which starts no service worker
    page.evaluate("""async (names) => {
        const store = await caches.open("t5accel-earlier");
        for (const name of names) await store.put(name, new Response("weights"));
    }""", [kept, gone])  # fmt: skip
    page.goto(site.url)
    wait_until_kept(page)
    assert page.evaluate("caches.keys()") == [content["version"]]
    found = "(name) => caches.match(name).then((response) => response?.text())"
    assert page.evaluate(found, kept) == "weights" and page.evaluate(found, gone) is None
    page.close()  # and with it the model that it still loads


HTML = b"<!doctype html><title>Log in</title>"
FAULTS: dict[str, Callable[[bytes], bytes]] = {
    "html": lambda _: HTML,
    "short": lambda right: right[: len(right) // 2],
    "flipped": lambda right: bytes([*(byte ^ 1 for byte in right[:4000]), *right[4000:]]),
}
ALL = [("weights.data", fault) for fault in FAULTS] + [
    (name, "html") for name in ("manifest.json", "encoder.onnx", "decoder.onnx", "tokenizer.json",
                                "tokenizer_config.json", "ort-wasm-simd-threaded.wasm")
]  # fmt: skip


@pytest.fixture
def host(web: ModuleType, tmp_path: Path) -> Iterator[Any]:
    """A host whose files may be exchanged."""
    folder = tmp_path / "host"
    shutil.copytree(web.BUILT, folder, copy_function=os.link)
    host = web.Site(folder)
    host.folder = folder
    yield host
    host.close()


def exchange(path: Path, content: bytes) -> bytes:
    """Write a file anew, which may be linked elsewhere; returns what it was."""
    before = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    return before


STORED = """async () => {
    const found = {};
    for (const name of await caches.keys()) {
        const store = await caches.open(name);
        for (const { url } of await store.keys()) {
            const bytes = await (await store.match(url)).arrayBuffer();
            const hash = Array.from(new Uint8Array(await crypto.subtle.digest("SHA-256", bytes)));
            found[new URL(url).pathname.slice(1)] = hash.map((byte) => byte.toString(16).padStart(2, "0")).join("");
        }
    }
    return found;
}"""


def stored_are_right(page: Page, web: ModuleType) -> int:
    """Everything in the browser's stores is as it was built; how many files there are."""
    stored = page.evaluate(STORED)
    for name, found in stored.items():
        assert found == sha256((web.BUILT / (name or "index.html")).read_bytes()).hexdigest(), name
    return len(stored)


@pytest.mark.parametrize(("name", "fault"), ALL)
def test_what_a_host_sends_wrongly_is_neither_used_nor_kept(page, host, web, content, name: str, fault: str) -> None:
    model = content["models"][0]
    (path,) = [path for path in host.folder.rglob(name) if path.parent in (host.folder, host.folder / model["folder"])]
    right = exchange(path, FAULTS[fault](path.read_bytes()))
    page.goto(host.url)
    expect(page.locator("#status")).to_contain_text(f"{name} is not the file that this page was built with")
    assert not page.locator("body[data-ready]").count()
    stored_are_right(page, web)
    exchange(path, right)
    page.goto("about:blank")
    page.goto(host.url)
    web.choose(page, model["id"])
    assert web.ask(page, "translate", {"text": "I am tired."})["text"]
    wait_until_kept(page)
    assert stored_are_right(page, web) >= 12, "the page, the runtime and the model"


def test_what_an_earlier_version_kept_wrongly_is_loaded_again(page: Page, host: Any, web: ModuleType, content) -> None:
    page.goto(host.url)
    web.choose(page, content["models"][0]["id"])
    wait_until_kept(page)
    page.evaluate("""async () => {
        for (const name of await caches.keys()) {
            const store = await caches.open(name);
            for (const request of await store.keys()) {
                const type = (await store.match(request)).headers.get("content-type");
                await store.put(request, new Response("<!doctype html>", { headers: { "content-type": type } }));
            }
        }
    }""")
    page.goto("about:blank")
    for address in (host.url, f"{host.url}index.html"):
        page.goto(address)
        web.choose(page, content["models"][0]["id"])
        assert web.ask(page, "translate", {"text": "I am tired."})["text"]
    assert stored_are_right(page, web) >= 12


@pytest.mark.parametrize("name", ["page.json", "app.js", "style.css"])
def test_a_page_that_came_wrongly_is_not_kept(context, host: Any, web: ModuleType, content, name: str) -> None:
    right = exchange(host.folder / name, HTML)
    page = context.new_page()
    page.goto(host.url)
    if name == "page.json":
        expect(page.get_by_role("alert")).to_contain_text("page.json")
    page.wait_for_timeout(3000)  # the service worker would be there
    stored_are_right(page, web)
    exchange(host.folder / name, right)
    page.reload()
    web.choose(page, content["models"][0]["id"])
    wait_until_kept(page)
    host.close()
    page.goto(host.url)
    web.choose(page, content["models"][0]["id"])
    assert web.ask(page, "translate", {"text": "I am tired."})["text"], "without a network"
    assert stored_are_right(page, web) >= 12


def test_the_licences_of_all_that_is_bundled_are_there_in_full(page: Page, site: Any, web: ModuleType) -> None:
    page.goto(site.url)
    page.get_by_role("link", name="Licences").click()
    found = page.locator("body").inner_text()
    packages = json.loads((ROOT / "web/package.json").read_text(encoding="utf-8"))["dependencies"]
    heads = re.findall(r"^={80}\n(.*)\n={80}$", found, re.MULTILINE)
    assert all(any(head.startswith(name) for head in heads) for name in (*packages, "t5accel")), heads
    for part in ("Microsoft Corporation", "Permission is hereby granted, free of charge", "Eigen", "protobuf",
                 "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION"):  # fmt: skip
        assert part in found, part
    for name in ("app.js", "worker.js", "service-worker.js", "style.css"):
        assert "LICENSES.txt" in (web.BUILT / name).read_text(encoding="utf-8"), name


def test_a_request_elsewhere_is_noticed_and_the_page_may_not_make_one(page: Page, context, site: Any, foreign) -> None:
    elsewhere = site.url.replace("127.0.0.1", "localhost")
    fetched = f"fetch('{elsewhere}', {{mode: 'no-cors'}}).then(() => 'fetched', () => 'refused')"
    other = context.new_page()
    other.goto(site.url + "page.json")  # which has no policy of its own
    assert other.evaluate(fetched) == "fetched" and foreign == [elsewhere]
    html = (ROOT / "web/src/index.html").read_text(encoding="utf-8")
    assert "connect-src 'self'" in html
    other.goto(site.url)
    assert other.evaluate(fetched) == "refused"


def test_it_is_used_by_keyboard_alone(page: Page, site: Any, web: ModuleType) -> None:
    page.goto(site.url)
    page.wait_for_selector("body[data-ready]", timeout=web.WAIT_MS)
    reached = []
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.name || document.activeElement.id || "
                                     "document.activeElement.textContent"))  # fmt: skip
        if reached[-1] == "text":
            break
    assert reached == ["task", "examples", "text"]
    page.keyboard.press("Control+a")
    page.keyboard.type("I am tired.")
    page.keyboard.press("Control+Enter")
    assert web.answered(page)["text"]
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.type") == "submit"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "where the keyboard is has to be seen"
    page.locator('input[name="task"]').first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator('input[name="task"]').nth(1).is_checked()


def test_every_control_has_a_name_for_who_does_not_see_it(page: Page, site: Any, content: dict[str, Any]) -> None:
    page.goto(site.url)
    for task in content["tasks"]:
        page.get_by_role("radio", name=task["label"]).check()
        for label in task["fields"].values():
            expect(page.get_by_role("textbox", name=label, exact=True)).to_be_visible()
    for model in content["models"]:
        expect(page.get_by_role("radio", name=re.compile(re.escape(model["label"])))).to_be_visible()
    for role, name in (("button", "Run"), ("button", "Stop"), ("combobox", "Examples"), ("group", "Task")):
        expect(page.get_by_role(role, name=name)).to_be_visible()
    expect(page.get_by_role("status")).to_contain_text("Loading")
    expect(page.get_by_role("progressbar", name="Loading the model")).to_be_visible()


def test_it_fits_a_narrow_phone(browser: Any, site: Any, web: ModuleType, content: dict[str, Any]) -> None:
    context = browser.new_context(viewport={"width": 320, "height": 640}, color_scheme="dark", has_touch=True)
    page = context.new_page()
    page.goto(site.url)
    for task in content["tasks"]:
        web.ask(page, task["id"], task["examples"][0])
        assert page.evaluate("document.documentElement.scrollWidth") <= 320, task["id"]
        page.screenshot(path=OUT / f"phone-{task['id']}.png", full_page=True)
    context.close()


def test_empty_and_overlong_texts_get_a_sentence(page: Page, site: Any, web: ModuleType) -> None:
    page.goto(site.url)
    web.choose(page, "student")
    status = page.locator("#status")
    web.type_in(page, "summarise", {"text": "  "})
    page.locator('button[type="submit"]').click()
    expect(status).to_have_text("Nothing is written under “Your text”.")
    expect(page.locator("textarea")).to_be_focused()
    web.type_in(page, "summarise", LONG)
    page.locator('button[type="submit"]').click()
    expect(status).to_contain_text("tokens, and the page takes 512: shorten it.")
    assert page.locator("textarea").get_attribute("aria-invalid") == "true"
    page.screenshot(path=OUT / "overlong.png", full_page=True)
    assert web.ask(page, "translate", {"text": "I am tired."})["tokens"]


def test_it_stops_when_it_is_told_to(page: Page, site: Any, web: ModuleType, content: dict[str, Any]) -> None:
    page.goto(site.url)
    web.choose(page, "student")
    task = content["tasks"][1]
    whole = web.ask(page, task["id"], task["examples"][0])
    assert len(whole["tokens"]) > 10
    page.evaluate("""() => {
        const answer = document.getElementById("answer");
        const stop = () => answer.textContent && document.getElementById("stop").click();
        new MutationObserver(stop).observe(answer, { childList: true });
    }""")
    part = web.ask(page, task["id"], task["examples"][0])
    expect(page.locator("#status")).to_have_text("Stopped.")
    assert 0 < len(part["tokens"]) < len(whole["tokens"]) and part["tokens"] == whole["tokens"][: len(part["tokens"])]
    expect(page.locator("#stop")).to_be_disabled()


def test_another_model_may_be_chosen_at_any_moment(page: Page, site: Any, web: ModuleType) -> None:
    page.goto(site.url)
    page.locator('input[value="int8"]').check()  # while the first one loads
    web.choose(page, "int8")
    web.type_in(page, "summarise", {"text": rows("summaries")[0]["source"]})
    page.locator('button[type="submit"]').click()
    page.locator('input[value="student"]').check()  # while the second one writes
    web.choose(page, "student")
    assert web.ask(page, "translate", {"text": "I am tired."})["tokens"]
    assert "Student" in page.locator("#figures").inner_text()


def test_an_answer_keeps_its_language_when_another_task_is_chosen(page: Page, site: Any, web: ModuleType) -> None:
    page.goto(site.url)
    web.type_in(page, "translate", {"text": "I am tired."})
    page.locator('button[type="submit"]').click()  # while the model loads
    page.locator('input[name="task"][value="summarise"]').check()
    assert web.answered(page)["text"]
    assert [page.locator(id_).get_attribute("lang") for id_ in ("#answer", "#announcement")] == ["fr", "fr"]


def test_an_aim_that_is_missed_is_said(web: ModuleType) -> None:
    settings = {"transfer_bytes": 9e6}
    reached = [dict(first_s=1.0, settings=settings), dict(first_p50_s=0.1, tokens_per_s=90.0)]
    assert web.missed(reached) == []
    late, slow = dict(first_s=4.0, settings={"transfer_bytes": 26e6}), dict(first_p50_s=0.1, tokens_per_s=20.0)
    assert web.missed([late, slow]) == ["the first word came after 4.00 s, not 3", "26.0 MB are sent, not 25",
                                        "20 tokens/s, not 25"]  # fmt: skip


def run_in_node(script: str, name: str) -> str:
    """The output of a module that lies in web/, where the packages are."""
    path = ROOT / "web" / "node_modules" / f"{name}.mjs"
    path.write_text(script, encoding="utf-8")
    return subprocess.run(["node", path], cwd=ROOT / "web", capture_output=True, text=True, check=True).stdout.strip()


def readme_lines(folder: Path) -> str:
    """The guide's JavaScript, on an export of ours, from where `run_in_node` puts it."""
    text = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^```js\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(lines.strip().splitlines()) <= 10 and "my-export/" in lines
    return lines.replace("./src/t5.js", "../src/t5.js").replace("my-export/", f"{folder}/")


def test_the_lines_of_the_readme_write_what_python_writes(web: ModuleType, content: dict[str, Any]) -> None:
    folder = folder_of(web, content, "fp32")
    (expected,) = by_python(content, folder, [("translate", {"text": "I am tired."})])
    text = TokenizerFile(folder).batch_decode([expected], skip_special_tokens=True)[0]
    assert run_in_node(readme_lines(folder), "readme") == text
