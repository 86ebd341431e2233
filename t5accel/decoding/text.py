"""From texts to texts: tokenise a batch, let any algorithm generate ids, and turn them back into text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GenerateIds = Callable[[np.ndarray, np.ndarray], Any]


def text_to_text(tokenizer: PreTrainedTokenizerBase, generate_ids: GenerateIds) -> Callable[[list[str]], list[str]]:
    """Wrap a function from ids to ids into one from texts to texts, as `quality.evaluate` wants it.

    Args:
        tokenizer: a transformers tokenizer with a padding token.
        generate_ids: called with ``input_ids`` and ``attention_mask``, both (B, S) int64; returns (B, L) token ids.

    The returned function raises ``InputError`` for anything but a non-empty list of texts.

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

    def generate(texts: list[str]) -> list[str]:
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
            raise InputError(f"Give a non-empty list of texts; {texts!r} was given.")
        batch = tokenizer(list(texts), return_tensors="np", padding=True)
        ids, mask = (np.asarray(batch[name], dtype=np.int64) for name in ("input_ids", "attention_mask"))
        return tokenizer.batch_decode(generate_ids(ids, mask), skip_special_tokens=True)

    return generate
