"""A static batch: requests that begin together and end together, as most servers that batch do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from t5accel.decoding.backend import Backend
from t5accel.serve.limits import Limits
from t5accel.serve.request import Job
from t5accel.serve.scheduler import Scheduler


@dataclass(frozen=True)
class Asked:
    """A text and the bounds of its answer."""

    text: str
    max_new_tokens: int = 64
    min_new_tokens: int = 0


Answered = tuple[str, int]  # a text, and how many tokens it has


def together(backend: Backend, tokenizer: Any, asked: Sequence[Asked]) -> list[Answered]:
    """All of them as one batch, from the first step to the end of the longest answer. Those that have ended leave it.

    >>> from t5accel.api import open_backend
    >>> backend, tokenizer, _ = open_backend("mini", progress=False)
    >>> together(backend, tokenizer, [Asked("translate English to French: I am tired.")])
    [('Je suis fatigué.', 5)]
    """
    batch = tokenizer([one.text for one in asked], return_tensors="np", padding=True)
    rows = [ids[mask == 1] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    limits = Limits(rows=len(asked), source_tokens=10**6, new_tokens=10**6, encoder_cache_bytes=0)
    scheduler = Scheduler(backend, limits, thread=False)
    tickets = scheduler.submit_all([
        Job(row, max_new_tokens=one.max_new_tokens, min_new_tokens=one.min_new_tokens)
        for row, one in zip(rows, asked, strict=True)
    ])  # fmt: skip
    while scheduler.round():
        pass
    tokens = [ticket.result(0)[0].tokens for ticket in tickets]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return [(text, len(row)) for text, row in zip(texts, tokens, strict=True)]
