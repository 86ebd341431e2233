"""Streaming of tokens and text from every algorithm that never takes a token back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from t5accel.checks import as_integers
from t5accel.decoding.backend import Backend
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.decoding.sampling import sample
from t5accel.decoding.speculation import speculative
from t5accel.errors import InputError

_ALGORITHMS: dict[str, Callable[..., Any]] = {
    "greedy": greedy,
    "sample": sample,
    "prompt_lookup": prompt_lookup,
    "speculative": speculative,
}


def stream(
    backend: Backend, input_ids: Any, attention_mask: Any = None, *, algorithm: str = "greedy", **options: Any
) -> Iterator[list[np.ndarray]]:
    """Generate, and yield the new tokens of each decoder call.

    Arguments are checked at once; each chunk is computed when it is requested. Raises ``InputError`` as the algorithm,
    and for an unknown algorithm or option.

    Args:
        algorithm: "greedy", "sample", "prompt_lookup" or "speculative".
        options: of that algorithm: ``stream(…, algorithm="speculative", draft=small, max_new_tokens=40)``.

    Returns:
        For each decoder call a list with the new tokens of every row: (n,) int64, empty after the row's end, several
        where a draft was right. Joined row by row they are the algorithm's ``sequences`` without padding and prefix.

    >>> class Counter:  # a toy backend whose next token is the last one plus one, and 5 is the end
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 6, 0, 5, 0
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def new_state(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.eye(6, dtype=np.float32)[input_ids + 1]
    >>> [chunk[0].tolist() for chunk in stream(Counter(), [[3]], max_new_tokens=3)]
    [[1], [2], [3]]
    """
    if algorithm in ("beam", "beam_search"):
        raise InputError(
            "Beam search cannot stream: which of its beams wins, and so its very first token, is not certain before "
            f"the last step. Choose one of {', '.join(_ALGORITHMS)}."
        )
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise InputError(f"algorithm must be one of {', '.join(_ALGORITHMS)}, got {algorithm!r}.")
    start = _ALGORITHMS[algorithm].steps
    signature = inspect.signature(start)
    try:
        bound = signature.bind(backend=backend, input_ids=input_ids, attention_mask=attention_mask, **options)
    except TypeError as error:
        known = [*signature.parameters][1:]
        got = ", ".join(sorted(options.keys() - known)) or "no draft"
        raise InputError(f"Options of {algorithm} must be of {', '.join(known)}, got {got}.") from error
    return start(*bound.args, **bound.kwargs).chunks()


def stream_text(
    tokenizer: Any, chunks: Iterable[list[np.ndarray]], *, skip_special_tokens: bool = True, ends: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the text of a one-row `stream` in final, non-empty pieces, which end before a space.

    A text without spaces, as in Chinese, Japanese or Thai, is one piece.

    Args:
        tokenizer: with transformers' ``batch_decode``, such as `TokenizerFile`.
        ends: end tokens, which are left out of the text even if ``skip_special_tokens`` is false.

    >>> class Letters:  # a toy tokenizer
    ...     def batch_decode(self, ids, skip_special_tokens): return ["".join(map(chr, row)) for row in ids]
    >>> chunks = [[np.array([ord(letter)])] for letter in "to be or"]
    >>> list(stream_text(Letters(), chunks))
    ['to', ' be', ' or']
    """
    pieces = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens, ends=ends)
    for chunk in chunks:
        if len(chunk) != 1:
            raise InputError(f"chunks must have one row, got {len(chunk)}. Stream one source and answer.")
        if piece := pieces.add(as_integers(chunk[0], "a chunk", rank=1).tolist()):
            yield piece
    if piece := pieces.flush():
        yield piece


class IncrementalDetokenizer:
    """Decodes tokens as they arrive into text that later tokens do not change."""

    # A token's text may change with the next token: a space before a full stop goes away, half a character becomes a
    # whole one, and a word's first token does not tell where the word ends. The text before the last space does not
    # change. So a piece ends with a word, and starts with the space before the next one.

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True, ends: Sequence[int] = ()):
        if not callable(getattr(tokenizer, "batch_decode", None)):
            raise InputError(f"tokenizer must have batch_decode, as TokenizerFile has, got {tokenizer!r:.80}.")
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._ends = () if skip_special_tokens else ends
        self._tokens: list[int] = []
        self._done = self._text = ""

    def add(self, tokens: list[int]) -> str:
        """Return the text that became final, often empty."""
        if not tokens:
            return ""
        self._tokens += [token for token in tokens if token not in self._ends]
        (self._text,) = self._tokenizer.batch_decode([self._tokens], skip_special_tokens=self._skips)
        certain = self._text[: max(self._text.rfind(" "), 0)]
        if len(certain) <= len(self._done) or not certain.startswith(self._done):
            return ""
        piece, self._done = certain[len(self._done) :], certain
        return piece

    def flush(self) -> str:
        """Return the remaining text after the last token."""
        piece, self._done = self._text[len(self._done) :], self._text
        return piece
