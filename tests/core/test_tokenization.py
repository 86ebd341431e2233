"""From texts to texts: the bundled model's outputs, in the caller's order, whatever the batches are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused

from bench.evaluation import rows, source_text
from t5accel.backends.hf_generate import AcceleratedT5
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import InputError
from t5accel.models.prefixes import SUMMARIZE, TRANSLATE
from t5accel.tokenization import generate_texts, text_to_text

NEWS = ["The library opens on Monday. It has new books. All people may come.", "Tom sold his old car in May."]


@pytest.fixture(scope="module")
def backend(mini) -> TorchEager:
    return TorchEager(mini[0])


@pytest.fixture(scope="module")
def answer(mini, backend) -> Callable[[Any], list[str]]:
    return text_to_text(mini[1], lambda ids, mask: greedy(backend, ids, mask, max_new_tokens=24).sequences)


@pytest.mark.parametrize("beams", [1, 3])
def test_outputs_are_those_of_transformers_in_any_batches(mini, backend, beams: int) -> None:
    model, tokenizer = mini
    sources = [source_text(name, row) for name in ("summaries", "translation") for row in rows(name, limit=2)]
    batch = tokenizer(sources, return_tensors="pt", padding=True)
    expected = model.generate(**batch, max_new_tokens=12, num_beams=beams)
    texts = tokenizer.batch_decode(expected, skip_special_tokens=True)
    assert len(set(texts)) > len(texts) // 2 and all(texts)
    call = partial(generate_texts, backend, tokenizer, max_new_tokens=12, num_beams=beams)
    assert call(sources) == texts and call(sources[::-1], batch_size=3) == texts[::-1]


def test_similar_lengths_share_a_batch_and_the_order_is_the_callers(mini, backend, monkeypatch) -> None:
    """Long and short texts in turn: sorted, they need much less padding than in the order that they came in."""
    masks, sizes = [], []

    def echo(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        masks.append(mask)
        return ids

    monkeypatch.setattr("t5accel.backends.model_defaults.by_defaults", lambda *_, **__: echo)
    texts = [("a " * length).strip() for length in (40, 1, 39, 2, 38, 3, 37)]
    prefixed = generate_texts(backend, mini[1], iter(texts), batch_size=2, prefix="b ", on_batch=sizes.append)
    assert prefixed == [f"b {text}" for text in texts]
    assert sizes == [2, 2, 2, 1] == [len(mask) for mask in masks]
    assert sum(int((mask == 0).sum()) for mask in masks) < 50


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) >= 5, reason="transformers 5.x dropped these pipelines")
def test_the_pipelines_of_an_accelerated_model_take_the_prefix_of_their_task(mini) -> None:
    tasks = {
        "summarization": dict(prefix=SUMMARIZE, num_beams=2, max_new_tokens=14, min_length=3, early_stopping=True),
        "translation_en_to_fr": dict(prefix=TRANSLATE, num_beams=1, max_new_tokens=20),
    }
    own, config = copy.deepcopy(mini[0]), copy.deepcopy(mini[0].config)
    own.config.task_specific_params = config.task_specific_params = tasks
    model = AcceleratedT5(TorchEager(mini[0]), config, mini[0].generation_config, mini[1])
    for task, key in (("summarization", "summary_text"), ("translation_en_to_fr", "translation_text")):
        expected = [one[key] for one in transformers.pipeline(task, copy.deepcopy(own), tokenizer=mini[1])(NEWS)]
        assert [one[key] for one in transformers.pipeline(task, model, tokenizer=mini[1])(NEWS)] == expected


def test_takes_any_list_like_of_texts(answer) -> None:
    texts = ["translate English to French: I am tired.", ""]
    expected = answer(texts)
    assert expected[0] == "Je suis fatigué." and len(expected) == 2
    for other in (tuple(texts), np.array(texts), iter(texts), (text for text in texts)):
        assert answer(other) == expected


def test_a_batch_arrives_padded_and_masked_as_int64(mini) -> None:
    tokenizer = mini[1]
    seen: list[np.ndarray] = []

    def echo(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        seen.extend([ids, mask])
        return ids

    texts = ["Il a 12 ans !", "Oui."]
    assert text_to_text(tokenizer, echo)(texts) == texts
    ids, mask = seen
    assert ids.dtype == mask.dtype == np.int64 and ids.shape == mask.shape
    assert not mask.all() and ((ids == tokenizer.pad_token_id) == (mask == 0)).all()


@pytest.mark.parametrize("convert", [torch.as_tensor, lambda ids: ids.tolist(), lambda ids: ids.astype("i4")])
def test_ids_may_come_back_as_any_array(mini, convert: Callable[[np.ndarray], Any]) -> None:
    assert text_to_text(mini[1], lambda ids, mask: convert(ids))(["Oui."]) == ["Oui."]


def test_wrong_texts(mini, answer, backend) -> None:
    for call in (answer, partial(generate_texts, backend, mini[1])):
        refused(call, "texts", "I am tired.", b"Yes.", [], None, 5, [None], [b"Yes."], [["Yes."]], {}, iter([]),
                np.array([1, 2]), object(), str)  # fmt: skip
        refused(call, "texts", ["Oui.", b"\xff".decode("utf-8", "surrogateescape")], match="surrogate")
    for name in ("batch_size", "max_new_tokens", "num_beams"):
        refused(partial(generate_texts, backend, mini[1], ["Yes."]), name, 0, -1, 2.0, "8", True)
    refused(partial(generate_texts, backend, texts=["Yes."]), "tokenizer", None)
    refused(partial(generate_texts, backend, mini[1], ["Yes."]), "prefix", 5, b"summarize: ", None)


class Letters:
    """A tokenizer of somebody else, which fails on some texts and on some ids."""

    def __init__(self, error: BaseException):
        self.error = error

    def __call__(self, texts: list[str], **_: Any) -> dict[str, np.ndarray]:
        if "!" in "".join(texts):
            raise self.error
        ids = np.array([[ord(letter) for letter in text] for text in texts])
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}

    def batch_decode(self, ids: Any, **_: Any) -> list[str]:
        if 0 in np.asarray(ids):
            raise self.error
        return ["".join(map(chr, row)) for row in ids]


def test_whatever_a_tokenizer_raises_is_an_input_error() -> None:
    for error in (BaseException("a panic"), ValueError("no padding token"), MemoryError()):
        answer = text_to_text(Letters(error), lambda ids, mask: ids - ord("a"))
        assert answer(["bcd"]) == ["\1\2\3"]
        for text in ("b!", "abc"):
            with pytest.raises(InputError, match=type(error).__name__):
                answer([text])
    with pytest.raises(KeyboardInterrupt):
        text_to_text(Letters(KeyboardInterrupt()), lambda ids, mask: ids)(["b!"])


def test_wrong_results_of_generate_ids(mini, backend) -> None:
    refused(partial(text_to_text, mini[1]), "generate_ids", None, "greedy", 5)
    results = (
        lambda ids, mask: greedy(backend, ids, mask, max_new_tokens=2),  # without .sequences
        lambda ids, mask: None, lambda ids, mask: ids[0], lambda ids, mask: ids[:1], lambda ids, mask: ids / 2,
        lambda ids, mask: ["Oui."],
    )  # fmt: skip
    refused(lambda generate_ids: text_to_text(mini[1], generate_ids)(["Oui.", "Non."]), "generate_ids", *results)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.text(st.characters()) | st.just("\ud800"), max_size=3) | st.text() | st.lists(st.none() | st.integers())
)
def test_any_texts_or_input_error(mini, texts: Any) -> None:
    try:
        answers = text_to_text(mini[1], lambda ids, mask: ids)(texts)
    except InputError:
        assert isinstance(texts, str) or not texts or not all(isinstance(t, str) and t != "\ud800" for t in texts)
    else:
        assert len(answers) == len(texts) and all(isinstance(text, str) for text in answers)
