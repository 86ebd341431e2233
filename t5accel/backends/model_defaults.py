"""Generation by the defaults of a model's ``generation_config``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from t5accel.checks import as_count
from t5accel.decoding.backend import Backend
from t5accel.decoding.beam import beam_search
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, TokenConstraints, is_eos


def by_defaults(
    backend: Backend,
    *,
    max_new_tokens: int,
    num_beams: int | None = None,
    forced_bos_token_id: int | None = None,
    decoder_start_token_id: int | None = None,
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A function from sources to tokens, searching as the model's ``generation_config`` asks.

    It maps ``input_ids`` and ``attention_mask``, (B, S) int64, to the new tokens (B, L) int64, padded behind their end.
    Our own greedy or beam search runs; where the model asks for more (`TokenConstraints.unsupported`), transformers'
    ``generate()`` does, which imports torch. A model with ``do_sample`` then draws, by torch's random state, unless
    ``num_beams`` names a search (1 is greedy).

    >>> from t5accel.api import open_backend
    >>> backend, tokenizer, _ = open_backend("mini", progress=False)
    >>> answer = by_defaults(backend, max_new_tokens=20)
    >>> batch = tokenizer(["translate English to French: I am tired."])
    >>> tokenizer.batch_decode(answer(batch["input_ids"], batch["attention_mask"]), skip_special_tokens=True)
    ['Je suis fatigué.']
    """
    rules: TokenConstraints = getattr(backend, "rules", NO_CONSTRAINTS)
    beams = rules.num_beams if num_beams is None else as_count(num_beams, "num_beams", at_least=1)
    longest = as_count(max_new_tokens, "max_new_tokens", at_least=1)
    first = dict(forced_bos_token_id=forced_bos_token_id, decoder_start_token_id=decoder_start_token_id)
    if not rules.unsupported:
        search = greedy if beams == 1 else partial(beam_search, num_beams=beams)
        return lambda ids, mask: search(backend, ids, mask, max_new_tokens=longest, **first).sequences
    from t5accel.backends.hf_generate import AcceleratedT5

    model, ends = AcceleratedT5.around(backend), rules.eos_tokens(backend.eos_token_id)
    options: dict[str, Any] = dict(
        num_beams=beams, max_new_tokens=longest, num_return_sequences=1, return_dict_in_generate=False
    )
    if any(field.startswith("stop_strings=") for field in rules.unsupported):
        options["tokenizer"] = model.tokenizer
    options |= {name: token for name, token in first.items() if token is not None}
    if num_beams is not None:
        options["do_sample"] = False

    def generated(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        import torch

        source = [torch.from_numpy(np.array(array)) for array in (ids, mask)]
        tokens = model.generate(source[0], attention_mask=source[1], **options)[:, 1:].numpy()
        is_end = is_eos(tokens, ends)
        # transformers' beams repeat the first end there, which may be a word.
        return np.where(is_end.cumsum(axis=1) - is_end > 0, backend.pad_token_id, tokens)

    return generated
