"""Does memory grow? Many generations of changing batch and length on one backend, and what the process occupies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from t5accel import machine
from t5accel.checks import as_count
from t5accel.decoding.backend import Backend
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import InputError


@dataclass(frozen=True)
class Soak:
    """What a process occupied after each generation, in bytes, and how many of the first ones count as warming up."""

    resident_bytes: tuple[int, ...]
    settled_after: int

    @property
    def growth(self) -> float:
        """The most after warming up over that at its end, less one: 0.05 is five per cent.

        >>> Soak((80, 100, 101, 104, 102), settled_after=2).growth
        0.04
        """
        start = self.resident_bytes[self.settled_after - 1]
        return round(max(self.resident_bytes[self.settled_after - 1 :]) / start - 1, 6)


def soak(
    backend: Backend,
    *,
    generations: int = 2000,
    settled_after: int = 200,
    largest_batch: int = 8,
    longest_source: int = 128,
    longest_answer: int = 32,
    seed: int = 0,
    on_generation: Callable[[], None] = lambda: None,
) -> Soak:
    """Greedy generations of random tokens; batch, source and forced length are drawn anew for each.

    The largest of each is drawn before ``settled_after`` ends, so that what comes later needs no more than was needed.
    Raises ``InputError`` for counts that make no sense, and on a system that does not report its memory.

    >>> from t5accel.backends.torch_eager import TorchEager
    >>> from t5accel.models.random_init import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> len(soak(TorchEager(model), generations=4, settled_after=2, longest_answer=2).resident_bytes)
    4
    """
    counts = dict(
        generations=generations, settled_after=settled_after, largest_batch=largest_batch,
        longest_source=longest_source, longest_answer=longest_answer,
    )  # fmt: skip
    for name, value in counts.items():
        as_count(value, name, at_least=1)
    if generations <= settled_after:
        raise InputError(f"generations is {generations}; give more than settled_after, {settled_after}.")
    if machine.resident_memory_bytes() is None:
        raise InputError("This system does not say how much memory a process occupies: install psutil.")
    rng = np.random.default_rng(seed)
    resident = []
    for number in range(generations):
        batch, source, answer = (
            int(rng.integers(1, most + 1)) for most in (largest_batch, longest_source, longest_answer)
        )
        if number == settled_after // 2:
            batch, source, answer = largest_batch, longest_source, longest_answer
        ids = rng.integers(3, backend.vocab_size, (batch, source))
        greedy(backend, ids, np.ones_like(ids), min_new_tokens=answer, max_new_tokens=answer)
        resident.append(machine.resident_memory_bytes() or 0)
        on_generation()
    return Soak(tuple(resident), settled_after)
