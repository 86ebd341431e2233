"""The demo's page without a browser: what it writes, refuses and takes out of what Gradio sends. See tests/with_web."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from t5accel.demo import page as demo
from t5accel.demo import reading
from t5accel.demo.at_home import AtHome
from t5accel.demo.menu import menu
from t5accel.demo.race import Way
from t5accel.errors import InputError, ModelUnavailableError
from t5accel.mini.reader import train_wordpiece
from t5accel.study.bert import random_bert
from t5accel.study.spans import answers, read, torch_run
from t5accel.tasks import UNANSWERABLE


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
    ("model", "chosen", "source", "said"),
    [("mini", ["ours, fp32"], "abc", "Choose 2 to 4 ways"), ("mini", [], "abc", "Choose 2 to 4 ways"),
     ("mini", ["ours, fp32", "ours, int8"], "a" * 513, "513 tokens, and the page takes 512"),
     ("my-t5", ["ours, fp32", "student, int8"], "abc", "my-t5 has no way “student, int8”")],
)  # fmt: skip
def test_what_cannot_be_answered_gets_a_sentence(model: str, chosen: list[str], source: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        list(demo.answers(model, chosen, source, load=made_up))


def test_an_empty_field_is_named() -> None:
    ask = menu(1)[2]
    assert demo._named(ask, [" Who? ", "Ann."]) == {"question": "Who?", "context": "Ann."}
    with pytest.raises(InputError, match="Nothing is written under “Text”"):
        demo._named(ask, ["Who?", " \n"])


# ------------------------------------------------------------------------------------------- the BERT study's ladder

TEXT = "Ann came to Tillbury on Monday. Bob stayed in Norbury & slept <well>."
SIZES: dict[str, Any] = dict(vocab_size=120, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                             intermediate_size=64, initializer_range=0.3)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_wordpiece([TEXT, "Who came? Where did Bob sleep?"] * 5, 120)


@pytest.fixture(scope="module")
def readers() -> tuple[Any, Any]:
    """A reader that never abstains, and a narrower one that always does."""
    whole = random_bert(SIZES, seed=3)
    pruned = random_bert({**SIZES, "layer_widths": {"heads": [1, 3], "neurons": [20, 40]}}, seed=4)
    whole.config.null_score_diff_threshold, pruned.config.null_score_diff_threshold = 1e6, -1e6
    return whole, pruned


@pytest.fixture(scope="module")
def rungs(readers: tuple[Any, Any]) -> list[reading.OpenRung]:
    return reading.open_rungs(*readers, threads=1)


@pytest.mark.usefixtures("threads_put_back")
def test_every_rung_answers_with_time_size_and_whether_it_is_the_same(
    tokenizer: Any, readers: tuple[Any, Any], rungs: list[reading.OpenRung]
) -> None:
    assert [(one.rung.which, one.rung.kind, one.rung.graph) for one in rungs] == [
        (which, *way) for which in ("whole", "pruned")
        for way in (("torch", ""), ("fed", ""), ("fed", "fused"), ("fed", "int8"))
    ]  # fmt: skip
    found = reading.ask(tokenizer, rungs, "Who came?", TEXT, rounds=2)
    batch = read(tokenizer, ["Who came?"], [TEXT])
    (expected,) = answers(batch, *torch_run(readers[0])(batch.inputs), threshold=1e6)
    assert expected in TEXT and [one.text for one in found[:3]] == [expected] * 3
    assert [one.text for one in found[4:]] == [UNANSWERABLE] * 4
    assert [one.same for one in found] == [one.text == expected for one in found] and not found[-1].same
    assert all(one.seconds > 0 for one in found) and found[0].ratio == 1.0
    sizes = [one.size_bytes for one in found]
    assert sizes[0] < sizes[1] and sizes[3] < sizes[2] and sizes[4] < sizes[0], "weights alone, a graph; 8 bits; pruned"


@pytest.mark.usefixtures("threads_put_back")
def test_the_table_of_rungs_shows_texts_as_they_are(tokenizer: Any, rungs: list[reading.OpenRung]) -> None:
    (said, before), (done, shown) = demo.readings("Who?", "< & >", load=lambda: (tokenizer, rungs))
    assert said.startswith("Reading.") and before == "" and done == "Done."
    assert shown.count("<tr>") == 1 + len(rungs) and shown.count("<i>no answer in the text</i>") == 4
    assert any(text in shown for text in ("<td>&lt;", "<td>&amp;", "<td>&gt;")) and "<td><</td>" not in shown
    assert shown.count("<b>another</b>") >= 4


@pytest.mark.parametrize(("text", "said"), [("Ann came. " * 300, "and the readers take 512"), ("\x01", "write words")])
def test_a_text_that_no_rung_can_read_gets_a_sentence(
    tokenizer: Any, rungs: list[reading.OpenRung], text: str, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        list(demo.readings("Who?", text, load=lambda: (tokenizer, rungs)))


def test_where_the_readers_are_not_bundled_a_sentence_says_so(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("t5accel.study.bert.data_folder", lambda: tmp_path)
    with pytest.raises(ModelUnavailableError, match="not bundled here"):
        list(demo.readings("Who?", "Ann.", load=reading.bundled.__wrapped__))


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

    asyncio.run(AtHome(app)({"type": "http"}, None, send))
    body = b"".join(message.get("body", b"") for message in sent)
    headers = dict(sent[0]["headers"])
    assert (b"example.com" in body) == kept and b"/own.css" in body and b"/own.js" in body
    assert int(headers[b"content-length"]) == len(body) and (b"content-security-policy" not in headers) == kept


def test_without_gradio_one_sentence_says_what_to_install(monkeypatch) -> None:
    from t5accel.cli import app

    monkeypatch.setitem(__import__("sys").modules, "gradio", None)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2 and "pip install 't5accel[demo]'" in result.output
