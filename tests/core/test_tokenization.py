"""From texts to texts: the bundled model answers in French, and what is no list of texts is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused

from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import InputError
from t5accel.tokenization import text_to_text


@pytest.fixture(scope="module")
def answer(mini) -> Callable[[Any], list[str]]:
    model, tokenizer = mini
    backend = TorchEager(model)
    return text_to_text(tokenizer, lambda ids, mask: greedy(backend, ids, mask, max_new_tokens=24).sequences)


def test_the_bundled_model_answers_in_other_words(answer) -> None:
    source = "translate English to French: I am tired."
    (french,) = answer([source])
    assert french.strip() and french not in (source, "I am tired.")
    assert "<pad>" not in french and "</s>" not in french


def test_an_answer_does_not_depend_on_its_batch(answer) -> None:
    sources = ("I am tired.", "Where is the station, please?", "Yes.")
    texts = [f"translate English to French: {source}" for source in sources]
    together = answer(texts)
    assert len(set(together)) > 1
    assert [answer([text])[0] for text in texts] == together
    assert answer(texts[::-1]) == together[::-1]


def test_agrees_with_transformers(mini, answer) -> None:
    model, tokenizer = mini
    texts = ["translate English to French: I am tired.", "translate English to French: Tom has three big dogs."]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    expected = model.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=24, num_beams=1
    )
    assert answer(texts) == tokenizer.batch_decode(expected, skip_special_tokens=True)


def test_takes_any_list_like_of_texts(answer) -> None:
    texts = ["translate English to French: I am tired.", ""]
    expected = answer(texts)
    assert len(expected) == 2
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


@pytest.mark.parametrize(
    "convert", [np.asarray, torch.as_tensor, lambda ids: ids.tolist(), lambda ids: ids.astype("i4")]
)
def test_ids_may_come_back_as_any_array(mini, convert: Callable[[np.ndarray], Any]) -> None:
    assert text_to_text(mini[1], lambda ids, mask: convert(ids))(["Oui."]) == ["Oui."]


def test_no_list_of_texts(answer) -> None:
    refused(answer, "texts", "I am tired.", "", b"Yes.", [], (), None, 5, 0.5, [None], ["Yes.", 5], [b"Yes."],
            [["Yes."]], {}, iter([]), np.array([]), np.array([1, 2]), object(), str)  # fmt: skip
    refused(answer, "texts", ["Oui.", b"\xff".decode("utf-8", "surrogateescape")], match="surrogate")


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


def test_what_makes_no_answers(mini) -> None:
    refused(partial(text_to_text, generate_ids=lambda ids, mask: ids), "tokenizer", None)
    refused(partial(text_to_text, mini[1]), "generate_ids", None, "greedy", 5)
    backend = TorchEager(mini[0])
    results = (
        lambda ids, mask: greedy(backend, ids, mask, max_new_tokens=2),  # without .sequences
        lambda ids, mask: None,
        lambda ids, mask: ids[0],
        lambda ids, mask: ids / 2,
        lambda ids, mask: ["Oui."],
    )

    def run(generate_ids: Any) -> Any:
        return text_to_text(mini[1], generate_ids)(["Oui.", "Non."])

    refused(run, "generate_ids", *results)
    refused(run, "generate_ids", lambda ids, mask: ids[:1], match="returned 1 rows for 2 texts")


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
