"""Streams join to the whole answer of every algorithm, and pieces of text to the whole text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import ToyBackend
from refused import refused
from test_drafting import sources

from t5accel.backends.ort_session import SessionSettings
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.decoding.sampling import sample
from t5accel.decoding.speculation import speculative
from t5accel.decoding.streaming import stream, stream_text

ONE_THREAD = SessionSettings(threads=1)
ALGORITHMS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "greedy": (greedy, {}),
    "sample": (sample, dict(seed=3, temperature=1.5, num_return_sequences=2)),
    "prompt_lookup": (prompt_lookup, dict(max_ngram=2)),
    "speculative": (speculative, dict(draft=ToyBackend(seed=1, ends=0.1), max_draft=5)),
}


def together(chunks: Iterator[list[np.ndarray]]) -> tuple[list[list[int]], int]:
    rows: list[list[int]] | None = None
    count = 0
    for chunk in chunks:
        count += 1
        rows = rows or [[] for _ in chunk]
        for row, tokens in zip(rows, chunk, strict=True):
            assert tokens.dtype == np.int64 and tokens.ndim == 1
            assert not (row and row[-1] == ToyBackend.eos_token_id and tokens.size), "nothing should come after the end"
            row += tokens.tolist()
    return rows, count


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(deadline=None, max_examples=25, derandomize=True)
@given(seed=st.integers(0, 2**16), batch=st.integers(1, 5), longest=st.integers(1, 20), data=st.data())
def test_chunks_join_to_the_whole_answer(name: str, seed: int, batch: int, longest: int, data: st.DataObject) -> None:
    algorithm, options = ALGORITHMS[name]
    ids, mask = sources(seed, batch)
    options = dict(options, max_new_tokens=longest, min_new_tokens=data.draw(st.integers(0, longest)))
    given_tokens = 0
    if data.draw(st.booleans(), "prefix"):
        options["decoder_input_ids"] = np.random.default_rng(seed).integers(2, 12, (batch, 3))
        given_tokens = 3
    backend = ToyBackend(ends=0.1, seed=seed)
    whole = algorithm(backend=backend, input_ids=ids, attention_mask=mask, **options)
    rows, count = together(stream(backend, ids, mask, algorithm=name, **options))
    assert count == whole.decoder_calls
    padded = [[*row, *[0] * (whole.sequences.shape[1] - given_tokens - len(row))] for row in rows]
    assert whole.sequences[:, given_tokens:].tolist() == padded


def test_tokens_are_computed_when_requested() -> None:
    toy = ToyBackend()
    chunks = stream(toy, [[3, 4, 5]], max_new_tokens=30)
    assert toy.calls == [], "nothing should be computed before it is asked for"
    next(chunks)
    assert toy.calls == ["encode", (1, 1)]
    next(chunks), next(chunks)
    chunks.close()
    assert len(toy.shapes) == 3, "nobody asked for more"
    draft = ToyBackend()
    chunks = stream(toy, [[3, 4, 5]], algorithm="speculative", draft=draft)
    assert draft.calls == []
    assert len(next(chunks)[0]) > 1, "right guesses come together"


def test_invalid_options_are_refused_at_once() -> None:
    call = partial(stream, ToyBackend(), [[3]])
    refused(call, "algorithm", "beam", "beam_search", match="Beam search")
    refused(call, "algorithm", "nucleus", None, ["greedy"])
    refused(call, "algorithm", "speculative", match="got no draft")
    refused(call, "num_beams", 4, match="num_beams")
    for algorithm, option, value in (("sample", "heat", 3), ("prompt_lookup", "max_ngram", 0), ("sample", "seed", -1)):
        refused(partial(call, algorithm=algorithm), option, value)


# Text


class Characters:
    """A toy tokenizer whose tokens are bytes: half a character decodes to a replacement, which changes later."""

    def batch_decode(self, ids: Any, skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return [bytes(token for token in row if token > 1).decode("utf-8", errors="replace") for row in ids]


class Tidy(Characters):
    """The same, with the spaces before punctuation taken away as transformers' tokenizers do."""

    def batch_decode(self, ids: Any, skip_special_tokens: bool) -> list[str]:
        texts = super().batch_decode(ids, skip_special_tokens)
        for loose, tight in ((" .", "."), (" ?", "?"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 's", "'s")):
            texts = [text.replace(loose, tight) for text in texts]
        return texts


def chunked(tokens: list[int], seed: int = 0) -> list[list[np.ndarray]]:
    random = np.random.default_rng(seed)
    chunks = []
    while tokens:
        count = int(random.integers(0, 4))
        chunks.append([np.array(tokens[:count], dtype=np.int64)])
        tokens = tokens[count:]
    return chunks


@settings(deadline=None, max_examples=60)
@given(
    st.text(st.sampled_from("ab éß漢\U0001f600 .?,'ns\n"), max_size=40), st.integers(0, 100),
    st.sampled_from([Characters(), Tidy()]),
)  # fmt: skip
def test_pieces_join_to_the_whole_text(text: str, seed: int, tokenizer: Any) -> None:
    tokens = [*text.encode(), 1]
    (whole,) = tokenizer.batch_decode([tokens], skip_special_tokens=True)
    pieces = list(stream_text(tokenizer, chunked(tokens, seed)))
    assert "".join(pieces) == whole and all(pieces)


def test_words_come_one_by_one() -> None:
    tokens = [*"Où est la gare ?".encode(), 1]
    pieces = list(stream_text(Characters(), ([np.array([token])] for token in tokens)))
    assert pieces == ["Où", " est", " la", " gare", " ?"]
    assert list(stream_text(Tidy(), ([np.array([token])] for token in tokens))) == ["Où", " est", " la", " gare", "?"]


def test_invalid_chunks() -> None:
    def read(chunks: Any) -> list[str]:
        return list(stream_text(Characters(), chunks))

    refused(read, "chunks", [[np.array([3]), np.array([4])]], [[]], match="chunks")
    refused(read, "chunks", [[np.array([0.5])]], [[np.array([[3]])]], match="integers|1 dimensions")
    refused(lambda tokenizer: list(stream_text(tokenizer, [[np.array([3])]])), "tokenizer", None)
