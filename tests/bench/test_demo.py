"""The demo's page without a browser: what it writes, refuses and takes out of what Gradio sends. See tests/with_web."""

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.demo import page as demo
from bench.demo.at_home import BlockExternalResources
from bench.demo.race import EXAMPLES, TRANSFORMERS, WRONG, LoadedSystem, example_tasks, ways_of
from bench.evaluation import NAMES, references, rows, source_text
from t5accel.api import open_backend
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import InputError
from t5accel.tokenization import text_to_text

ROOT = Path(__file__).resolve().parents[2]


class Letters:
    """A tokenizer of letters."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, np.ndarray]:
        ids = np.array([[ord(letter) for letter in text] for text in texts])
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}

    def batch_decode(self, ids: list[list[int]], **_: Any) -> list[str]:
        return ["".join(map(chr, row)) for row in ids]


def made_up(model: str, precision: str) -> LoadedSystem:
    """Repeats its source; in 8 bits with another last letter."""

    def stream(ids: np.ndarray, mask: np.ndarray, most: int) -> Iterator[list[int]]:
        tokens = ids[0].tolist()
        return ([token] for token in (tokens if precision != "int8" else [*tokens[:-1], ord("?")]))

    return LoadedSystem(stream, Letters(), 5_000_000)


def test_answers_stand_beside_each_other_with_medians_and_a_slow_model_runs_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = ["ours, int8", "transformers, fp32", "ours, fp32"]
    *before, (sentence, found) = demo.answers("mini", chosen, "abc", load=made_up)
    assert [said for said, _ in before[:3]] == [f"Loading {label}." for label in found] and sentence == "Done."
    assert {label: text for label, (text, _) in found.items()} == {
        "transformers, fp32": "abc", "ours, fp32": "abc", "ours, int8": "ab?",
    }  # fmt: skip
    figures = [figures.split(" · ") for _, figures in found.values()]
    assert all(one[1].startswith("3 tokens in ") and one[3] == "5 MB" for one in figures)
    medians = "median of 3 runs"
    assert [one[4:] for one in figures] == [
        [medians], [medians, "the same tokens"], [medians, "other tokens from number 3 on"],
    ]  # fmt: skip
    lanes = [demo.Progress([1, 2], first, seconds, True) for first, seconds in ((1.0, 9.0), (3.0, 4.0), (2.0, 5.0))]
    assert demo._median(lanes) == demo.Progress([1, 2], 2.0, 5.0, True)
    monkeypatch.setattr(demo, "LONG_S", 0.0)
    *_, (_, found) = demo.answers("mini", ["transformers, fp32", "ours, fp32"], "abc", load=made_up)
    assert all("one run" in figures for _, figures in found.values())


@pytest.fixture(scope="module")
def answered() -> dict[str, Any]:
    """The rows of the evaluation sets that are examples, by id."""
    return {row["id"]: (name, row) for name in NAMES for row in rows(name) if row["id"] in EXAMPLES}


def test_the_examples_are_rows_of_the_evaluation_sets(answered: dict[str, Any]) -> None:
    assert [*answered] and {*answered} == {*EXAMPLES} > {*WRONG}
    given = [task.source(texts) for task in example_tasks() for texts in task.examples]
    assert given == [source_text(*answered[id_]) for id_ in EXAMPLES]


def offered() -> list[tuple[str, str]]:
    """The models and precisions that answer on the demo, where nobody chooses others, and on the web page."""
    spec = importlib.util.spec_from_file_location("web_models", ROOT / "scripts/web_models.py")
    web_models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(web_models)
    on_demo = list(ways_of("mini").values())[: demo.MOST]
    # Ours in fp32 has transformers' tokens.
    return sorted({(model, precision.replace(TRANSFORMERS, "fp32")) for model, precision in on_demo}
                  | {(model, precision) for _, _, model, precision in web_models.MODELS})  # fmt: skip


@pytest.mark.parametrize(("model", "precision"), offered())
def test_every_example_is_answered_rightly_but_the_known_failure(
    model: str, precision: str, answered: dict[str, Any]
) -> None:
    backend, tokenizer, _ = open_backend(model, precision=precision, progress=False)
    translate = text_to_text(
        tokenizer, lambda ids, mask: greedy(backend, ids, mask, max_new_tokens=demo.MAX_NEW_TOKENS).sequences
    )
    for id_ in EXAMPLES:
        name, row = answered[id_]
        (answer,) = translate([source_text(name, row)])
        assert (answer in references(name, row)) == (id_ not in WRONG), f"{id_}: {answer}"


def test_the_page_begins_with_fields_that_are_filled_and_an_empty_one_is_named() -> None:
    for task in example_tasks():
        filled = [demo._box(task, place)["value"] for place in range(len(task.examples[0]))]
        assert filled == [*task.examples[0].values()]
        assert not task.titles[0].endswith("wrongly)") and all(task.titles)
    ask = example_tasks()[2]
    assert demo._named(ask, [" Who? ", "Ann."]) == {"question": "Who?", "context": "Ann."}
    with pytest.raises(InputError, match="Nothing is written under “Text”"):
        demo._named(ask, ["Who?", " \n"])


@pytest.mark.parametrize(
    ("model", "chosen", "source", "said"),
    [("mini", ["ours, fp32"], "abc", "Choose 2 to 4 ways"), ("mini", [], "abc", "Choose 2 to 4 ways"),
     ("mini", ["ours, fp32", "ours, int8"], "a" * 513, "513 tokens, and the page takes 512"),
     ("my-t5", ["ours, fp32", "student, int8"], "abc", "my-t5 has no way “student, int8”")],
)  # fmt: skip
def test_what_cannot_be_answered_gets_a_sentence(model: str, chosen: list[str], source: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        list(demo.answers(model, chosen, source, load=made_up))


PAGE = (
    b'<head><link rel="preconnect" href="https://fonts.example.com" /><link rel="stylesheet" href="/own.css">'
    b'<script src="https://cdn.example.com/a.js" async></script><script src="/own.js"></script></head>'
)


@pytest.mark.parametrize(("kind", "kept"), [(b"text/html; charset=utf-8", False), (b"application/json", True)])
def test_pages_lose_what_they_would_fetch_from_elsewhere(kind: bytes, kept: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", kind), (b"content-length", str(len(PAGE)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": PAGE[:60], "more_body": True})
        await send({"type": "http.response.body", "body": PAGE[60:]})

    sent, _ = asked(app, "GET", "/", {})
    body = b"".join(message.get("body", b"") for message in sent)
    headers = dict(sent[0]["headers"])
    assert (b"example.com" in body) == kept and b"/own.css" in body and b"/own.js" in body
    assert int(headers[b"content-length"]) == len(body) and (b"content-security-policy" not in headers) == kept


OWN = {"content-type": "application/json", "content-length": "9", "host": "127.0.0.1:7860"}
FORM = {**OWN, "content-type": "multipart/form-data; boundary=x"}
JOIN = "/gradio_api/queue/join"


def asked(app: Any, method: str, path: str, headers: dict[str, str]) -> tuple[list[dict[str, Any]], bool]:
    """What `BlockExternalResources` sends in place of the application behind it, and whether the body was read."""
    read, sent = [], []

    async def receive() -> dict[str, Any]:
        read.append(True)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(BlockExternalResources(app)(dict(type="http", method=method, path=path, headers=raw), receive, send))
    return sent, bool(read)


def status_of(method: str, path: str, headers: dict[str, str]) -> int:
    """200 comes from the application, which has read the body; what is refused is not read."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    sent, read = asked(app, method, path, headers)
    assert read == (sent[0]["status"] == 200)
    return sent[0]["status"]


def test_nobody_can_send_the_demo_a_file_and_it_reads_none_for_anybody() -> None:
    for path in (
        "/upload", "/gradio_api/upload", "/gradio_api/upload/", "//gradio_api/upload", "/gradio_api/stream/1",
        "/gradio_api/process_recording", "/gradio_api/component_server", "/gradio_api/vibe-edit", "/login",
    ):  # fmt: skip
        assert status_of("POST", path, FORM) == 403 and status_of("POST", path, OWN) == 403, path
        assert status_of("PUT", path, OWN) in (403, 405), path
    assert status_of("POST", JOIN, FORM) == 415, "nor one in place of a question"
    for path in (
        "/gradio_api/file=/etc/passwd", "/gradio_api/file=a\nb", "/gradio_api/file/etc/passwd",
        "/gradio_api/deep_link", "/gradio_api/proxy=https://example.com", "/gradio_api/upload_progress",
        "/gradio_api/stream/a/b/1/x.ts",
    ):  # fmt: skip
        assert status_of("GET", path, {}) == status_of("HEAD", path, {}) == 403, path
    for path in (  # what the page reads is still there
        "/", "/config", "/assets/index.js", "/theme.css", "/gradio_api/info", "/gradio_api/queue/data",
        "/gradio_api/heartbeat/abc", "/gradio_api/startup-events",
    ):  # fmt: skip
        assert status_of("GET", path, {"sec-fetch-site": "cross-site"}) == 200, path


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 200),  # Gradio's client in Python
     ({"sec-fetch-site": "same-origin", "origin": "https://proxy.example"}, 200),
     ({"origin": "http://127.0.0.1:7860"}, 200),
     ({"origin": "https://a.example", "host": "a.example"}, 200),
     ({"sec-fetch-site": "cross-site"}, 403),
     ({"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:8888"}, 403),
     ({"origin": "http://127.0.0.1:8888"}, 403),
     ({"origin": "null"}, 403),
     ({"origin": "http://[broken"}, 403),
     ({"origin": "http://a.example:7860", "host": "a.example:7860"}, 403),  # a foreign name that points here
     ({"content-type": "text/plain"}, 415),  # what a page may send anywhere without asking
     ({"content-length": "1000001"}, 413),
     ({"content-length": "9" * 5000}, 413),
     ({"content-length": ""}, 411),
     ({"transfer-encoding": "chunked"}, 411)],
)  # fmt: skip
def test_only_the_demos_own_page_may_ask(headers: dict[str, str], status: int) -> None:
    for path in (JOIN, "/gradio_api/cancel", "/gradio_api/reset", "/gradio_api/call/answer_all"):
        assert status_of("POST", path, {**OWN, **headers}) == status
