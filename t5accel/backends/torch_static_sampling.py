"""Sampling on `TorchStatic`, many steps without the host: the distribution and the draw stay on the device.

The uniform numbers come from the host, a run of them at once, and are turned into tokens as `decoding.sampling`
does. So a seed gives the same answers on every runtime, but for the rounding of logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from t5accel.backends.torch_static_beams import Loop, begin
from t5accel.backends.torch_static_model import Slot, StaticT5
from t5accel.decoding.backend import SuppressedTokens
from t5accel.decoding.beam import LONGEST_RUN
from t5accel.decoding.sampling import SamplingParams

if TYPE_CHECKING:
    from t5accel.backends.torch_static import StaticState, TorchStatic

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")  # in the device's memory: one graph serves any value


class SampleLoop(Loop):
    """Steps that draw.

    Args:
        decoder, slot: as of `Loop`.
        sampling: which of its steps are taken, and ``top_k``; the other numbers are those of the run.

    Attributes:
        numbers: by their names in `SamplingParams`, () float64 each.
        uniform: (LONGEST_RUN, R) float64, one for each draw of a run.
        chosen: (LONGEST_RUN, R) int64, the tokens drawn.
        seen: (R, V) bool, which tokens stand in each row's history; ``None`` where nothing is penalised for that.

    >>> from t5accel.models.random_init import random_t5
    >>> t5 = StaticT5(random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32)))
    >>> loop = SampleLoop(t5, t5.slot(batch=1, rows=3, source=4, width=8), SamplingParams(top_k=1))
    >>> loop.step()
    >>> bool((loop.slot.token == loop.slot.token[0]).all())
    True
    """

    def __init__(self, decoder: StaticT5, slot: Slot, sampling: SamplingParams):
        super().__init__(decoder, slot)
        device, rows = decoder.device, len(slot.token)
        self.sampling = sampling
        self.numbers = {
            name: torch.tensor(getattr(sampling, name), dtype=torch.float64, device=device) for name in _NUMBERS
        }
        self.uniform = torch.zeros(LONGEST_RUN, rows, dtype=torch.float64, device=device)
        self.chosen = torch.zeros(LONGEST_RUN, rows, dtype=torch.int64, device=device)
        self.seen = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(rows, decoder.dims.vocab_size, dtype=torch.bool, device=device)

    def step(self) -> None:
        odds = probabilities(self.logits() + self.penalty, self.seen, self.sampling, self.numbers)
        token = draw(odds, self.uniform.index_select(0, self.at).T)  # (R, 1)
        if self.seen is not None:
            self.seen.scatter_(1, token, True)
        self.slot.token.copy_(token)
        self.chosen.index_copy_(0, self.at, token.T)
        self.at.add_(1)


def probabilities(
    logits: torch.Tensor, seen: torch.Tensor | None, sampling: SamplingParams, numbers: dict[str, torch.Tensor]
) -> torch.Tensor:
    """What `decoding.sampling.probabilities` finds, by operators that a graph can hold.

    Args:
        logits: (R, V) float32; -inf for what is forbidden.
        seen: (R, V) bool, which tokens stand in the history; ``None`` where nothing is penalised.
        sampling: which changes are made, and ``top_k``.
        numbers: the values of all others, by name, () float64.

    Returns:
        (R, V) float64, in proportion to the probabilities: they need not sum to 1.

    >>> logits, sampling = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log(), SamplingParams(top_p=0.7)
    >>> numbers = {name: torch.tensor(getattr(sampling, name), dtype=torch.float64) for name in _NUMBERS}
    >>> odds = probabilities(logits, None, sampling, numbers)
    >>> (odds / odds.sum()).round(decimals=3).tolist()
    [[0.625, 0.375, 0.0, 0.0]]
    """
    scores, ranking = logits.double(), logits  # the order of what is not penalised is that of its float32: found sooner
    if sampling.repetition_penalty != 1:
        penalty = numbers["repetition_penalty"]
        ranking = scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    scores = scores - scores.amax(dim=-1, keepdim=True)  # before the division, which might overflow
    if sampling.temperature != 1:
        scores = scores / numbers["temperature"]
    if 0 < sampling.top_k < logits.shape[-1]:
        last = ranking.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(ranking < last, -torch.inf)
    odds = scores.exp()
    if sampling.top_p < 1:
        order = ranking.sort(dim=-1, stable=True).indices  # rising
        sums = odds.gather(1, order).cumsum(dim=-1)
        stays = sums > (1 - numbers["top_p"]) * odds.sum(dim=-1, keepdim=True)
        stays[:, -1] = True
        odds = odds * torch.zeros_like(stays).scatter_(1, order, stays)
    if sampling.min_p > 0:
        odds = odds.masked_fill(odds < numbers["min_p"] * odds.amax(dim=-1, keepdim=True), 0)
    return odds


def draw(odds: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """What `decoding.sampling.draw` finds: (R, V) odds and (R, 1) numbers from 0 to below 1 -> (R, 1) int64.

    >>> draw(torch.tensor([[0, 0.5, 0, 0.5], [3, 0, 0, 1]]), torch.tensor([[0.0], [0.8]])).tolist()
    [[1], [3]]
    """
    # Sums that a GPU adds up in parallel may fall by the last bit: where there are no odds they do not count.
    sums = odds.cumsum(dim=-1).masked_fill(odds <= 0, 0)
    total = sums.amax(dim=-1, keepdim=True)
    wanted = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return (sums > wanted).byte().argmax(dim=-1, keepdim=True)  # the first of them


@torch.inference_mode()
def run_samples(
    backend: TorchStatic, state: StaticState, input_ids: np.ndarray, uniform: np.ndarray, *, sampling: SamplingParams,
    suppressed: SuppressedTokens = None, history: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """``run_samples`` of `decoding.backend.Backend`, on a `TorchStatic`.

    >>> from t5accel.backends.torch_static import TorchStatic
    >>> from t5accel.models.random_init import random_t5
    >>> backend = TorchStatic(random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32)))
    >>> state = backend.new_state(backend.encode(np.array([[5, 6, 7, 1]]), np.ones((1, 4), dtype=np.int64)), 2)
    >>> start, uniform = np.zeros((1, 2, 1), dtype=np.int64), np.random.default_rng(0).random((1, 2, 5))
    >>> run_samples(backend, state, start, uniform, sampling=SamplingParams()).shape
    (1, 2, 5)
    """
    count = uniform.shape[2]
    # One loop, and one graph, for all values of the numbers.
    key = (
        "samples",
        sampling.top_k,
        *(getattr(sampling, name) != getattr(SamplingParams(), name) for name in _NUMBERS),
    )

    def make(decoder: StaticT5, slot: Slot) -> SampleLoop:
        return SampleLoop(decoder, slot, sampling)

    loop = begin(backend, state, input_ids, count, suppressed, key, make)
    for name, number in loop.numbers.items():
        number.fill_(getattr(sampling, name))
    rows = len(state.slot.token)
    loop.uniform[:count] = torch.from_numpy(uniform.reshape(rows, count).T.copy())
    if loop.seen is not None:
        loop.seen.zero_().scatter_(1, backend._on_device(history), True)
    loop.run(count)
    state.rows = state.rows.appended(input_ids.shape[2] - 1 + count)
    return loop.chosen[:count].T.to("cpu", copy=True).numpy().reshape(*state.rows.shape, count)
