"""The demo's page without a browser: what it writes, refuses and takes out of what Gradio sends. See tests/with_web."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from t5accel.demo import page as demo
from t5accel.demo.menu import menu
from t5accel.demo.race import Way
from t5accel.errors import InputError


class Letters:
    """A tokenizer of letters."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, np.ndarray]:
        ids = np.array([[ord(letter) for letter in text] for text in texts])
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}

    def batch_decode(self, ids: list[list[int]], **_: Any) -> list[str]:
        return ["".join(map(chr, row)) for row in ids]


def made_up(model: str, precision: str) -> Way:
    """Repeats its source; in 8 bits with another last letter."""

    def stream(ids: np.ndarray, mask: np.ndarray, most: int) -> Iterator[list[int]]:
        tokens = ids[0].tolist()
        return ([token] for token in (tokens if precision != "int8" else [*tokens[:-1], ord("?")]))

    return Way(stream, Letters(), 5_000_000)


def test_answers_stand_beside_each_other_with_their_figures() -> None:
    chosen = ["ours, int8", "transformers, fp32", "ours, fp32"]
    *before, (sentence, found) = demo.answers("mini", chosen, "abc", load=made_up)
    assert [said for said, _ in before[:3]] == [f"Loading {label}." for label in found] and sentence == "Done."
    assert {label: text for label, (text, _) in found.items()} == {
        "transformers, fp32": "abc", "ours, fp32": "abc", "ours, int8": "ab?",
    }  # fmt: skip
    figures = [figures.split(" · ") for _, figures in found.values()]
    assert all(one[1].startswith("3 tokens in ") and one[3] == "5 MB" for one in figures)
    assert [one[4:] for one in figures] == [[], ["the same tokens"], ["other tokens from number 3 on"]]


@pytest.mark.parametrize(
    ("chosen", "source", "said"),
    [(["ours, fp32"], "abc", "Choose 2 to 4 ways"), ([], "abc", "Choose 2 to 4 ways"),
     (["ours, fp32", "ours, int8"], "a" * 513, "513 tokens, and the page takes 512")],
)  # fmt: skip
def test_what_cannot_be_answered_gets_a_sentence(chosen: list[str], source: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        list(demo.answers("mini", chosen, source, load=made_up))


def test_an_empty_field_is_named() -> None:
    ask = menu(1)[2]
    assert demo._source(ask, [" Who? ", "Ann."]) == "question: Who? context: Ann."
    with pytest.raises(InputError, match="Nothing is written under “Text”"):
        demo._source(ask, ["Who?", " \n"])


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

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(demo._AtHome(app)({"type": "http"}, None, send))
    body = b"".join(message.get("body", b"") for message in sent)
    headers = dict(sent[0]["headers"])
    assert (b"example.com" in body) == kept and b"/own.css" in body and b"/own.js" in body
    assert int(headers[b"content-length"]) == len(body) and (b"content-security-policy" not in headers) == kept


def test_without_gradio_one_sentence_says_what_to_install(monkeypatch) -> None:
    from t5accel.cli import app

    monkeypatch.setitem(__import__("sys").modules, "gradio", None)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2 and "pip install 't5accel[demo]'" in result.output
