"""The soak: it does what it says, and notices a leak."""

import numpy as np

from bench.record.engine import Soak, soak
from t5accel.backends.torch_eager import TorchEager

SMALL = dict(generations=6, settled_after=3, largest_batch=3, longest_source=5, longest_answer=2)


class Watched(TorchEager):
    """Remembers the batches, and may leak."""

    def __init__(self, model, leak: int = 0):
        super().__init__(model)
        self.shapes, self.kept, self.leak = [], [], leak

    def encode(self, input_ids, attention_mask):
        self.shapes.append(input_ids.shape)
        self.kept.append(np.ones(self.leak))
        return super().encode(input_ids, attention_mask)


def test_batches_vary_and_the_largest_comes_before_it_counts(tiny_t5) -> None:
    backend, ticks = Watched(tiny_t5()), []
    result = soak(backend, **SMALL, on_generation=lambda: ticks.append(1))
    assert len(result.resident_bytes) == len(ticks) == len(backend.shapes) == 6
    assert (3, 5) in backend.shapes[:3] and len(set(backend.shapes)) > 2
    assert min(result.resident_bytes) > 1_000_000


def test_the_same_seed_draws_the_same(tiny_t5) -> None:
    first, second, other = (Watched(tiny_t5()) for _ in range(3))
    for backend, seed in ((first, 0), (second, 0), (other, 1)):
        soak(backend, **SMALL, seed=seed)
    assert first.shapes == second.shapes != other.shapes


def test_a_leak_is_seen(tiny_t5) -> None:
    assert soak(Watched(tiny_t5(), leak=4_000_000), **SMALL).growth > 0.05


def test_growth_counts_from_the_end_of_the_warm_up() -> None:
    assert Soak((10, 100, 100, 90), settled_after=2).growth == 0
    assert Soak((10, 100, 110, 90), settled_after=2).growth == 0.1
