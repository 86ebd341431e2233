"""From texts to texts: tokenise a batch, let any algorithm generate ids, and turn them back into text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel.checks import as_integers
from t5accel.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GenerateIds = Callable[[np.ndarray, np.ndarray], Any]


def text_to_text(tokenizer: PreTrainedTokenizerBase, generate_ids: GenerateIds) -> Callable[[list[str]], list[str]]:
    """Wrap a function from ids to ids into one from texts to texts, as `quality.evaluate` wants it.

    Args:
        tokenizer: a transformers tokenizer with a padding token.
        generate_ids: called with ``input_ids`` and ``attention_mask``, both (B, S) int64; returns (B, L) token ids.

    The returned function raises ``InputError`` for anything but a non-empty list of texts, and if ``generate_ids``
    returns something else than (B, L) ids (such as a `Generated`: give its ``sequences``).

    >>> class Letters:  # a toy tokenizer
    ...     def __call__(self, texts, **_):
    ...         ids = np.array([[ord(c) for c in text] for text in texts])
    ...         return {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    ...     def batch_decode(self, ids, **_): return ["".join(map(chr, row)) for row in ids]
    >>> text_to_text(Letters(), lambda ids, mask: ids[:, ::-1])(["abc"])
    ['cba']
    """
    if tokenizer is None:
        raise InputError("This model has no tokenizer (random weights have none): give token ids instead of texts.")

    if not callable(generate_ids):
        raise InputError(f"generate_ids is {generate_ids!r}; give a function of input_ids and attention_mask.")

    def generate(texts: list[str]) -> list[str]:
        given = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else []
        if not given or not all(isinstance(text, str) for text in given):
            raise InputError(f"Give a non-empty list of texts; {texts!r} was given.")
        if not all(_is_unicode(text) for text in given):
            raise InputError("A text holds half of a surrogate pair, as undecodable bytes become: decode it first.")
        batch = tokenizer(given, return_tensors="np", padding=True)
        ids, mask = (np.asarray(batch[name], dtype=np.int64) for name in ("input_ids", "attention_mask"))
        answers = as_integers(generate_ids(ids, mask), "the result of generate_ids", rank=2)
        if len(answers) != len(given):
            raise InputError(f"generate_ids returned {len(answers)} rows for {len(given)} texts.")
        return tokenizer.batch_decode(answers, skip_special_tokens=True)

    return generate


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
