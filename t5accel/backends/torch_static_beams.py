"""Beam search on `TorchStatic`, many steps without the host: ranking, reordering and candidates stay on the device.

The host reads the candidates of a run at once and decides by them what ended (`beam.BeamState`). The device needs
to know
only how the beams go on: with the best K candidates that do not end.

Shapes: B sources, K beams each, R = B * K, V entries, m = K * (1 + the number of end tokens) candidates of a source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from t5accel.backends.cuda_graphs import captured
from t5accel.backends.torch_static_model import Slot, StaticT5
from t5accel.decoding.backend import SuppressedTokens
from t5accel.decoding.beam import LONGEST_RUN

if TYPE_CHECKING:
    from t5accel.backends.torch_static import StaticState, TorchStatic

MOST_LOOPS = 4  # that a slot keeps, each with a graph


class Loop:
    """A step that chooses the next tokens of a slot by itself, and notes down what the host needs to know.

    Args:
        decoder, slot: whose next tokens.

    Attributes:
        penalty: (V,) float32, -inf where a token is forbidden.
        at: (1,) int64, how many steps of a run are done.
        graph: a captured ``torch.cuda.CUDAGraph`` of `step`, if there is one.

    >>> from t5accel.models.random_init import random_t5
    >>> t5 = StaticT5(random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32)))
    >>> loop = Loop(t5, t5.slot(batch=1, rows=1, source=4, width=8))
    >>> loop.prepare((3, 4))
    >>> loop.penalty.isinf().nonzero().flatten().tolist()
    [3, 4]
    """

    def __init__(self, decoder: StaticT5, slot: Slot):
        self.decoder, self.slot, self.graph = decoder, slot, None
        self.penalty = torch.zeros(decoder.dims.vocab_size, device=decoder.device)
        self.at = torch.zeros(1, dtype=torch.int64, device=decoder.device)

    def step(self) -> None:
        """Read the slot's token, choose the next one. Touches nothing but the slot and the loop's own memory."""
        raise NotImplementedError

    def prepare(self, suppressed: SuppressedTokens) -> None:
        """Begin a run, in which these tokens are not chosen."""
        self.at.zero_()
        self.penalty.zero_()
        if suppressed is not None:
            self.penalty[torch.as_tensor(suppressed, device=self.penalty.device)] = -torch.inf

    def logits(self) -> torch.Tensor:
        """(R, V) float32 after the slot's token, which is read."""
        return self.decoder.logits(self.decoder.read(self.slot, self.slot.token)[:, -1])

    def capture(self) -> None:
        """Make the graph. What the steps of warming up wrote over is put back."""
        slot, kept = self.slot, (self.slot.lengths.clone(), self.slot.own.memory.clone())

        def undo() -> None:
            slot.lengths.copy_(kept[0])
            slot.own.memory.copy_(kept[1])
            self.at.zero_()

        self.graph = captured(self.step, undo, self.decoder.device)

    def run(self, count: int) -> None:
        """So many steps."""
        for _ in range(count):
            if self.graph is None:
                self.step()
            else:
                self.graph.replay()


class BeamLoop(Loop):
    """Steps of beam search.

    Args:
        decoder, slot: as of `Loop`.
        ends: the tokens that end an answer.
        renormalized: what is suppressed keeps no share of the probability.

    Attributes:
        scores: (B, K) float32, the sum of the log-probabilities of each beam's tokens so far.
        found: for each step the m best continuations of a source, best first: scores float32, which of the K beams they
            continue and tokens, both int64; (LONGEST_RUN, B, m) each.

    >>> from t5accel.models.random_init import random_t5
    >>> t5 = StaticT5(random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32)))
    >>> loop = BeamLoop(t5, t5.slot(batch=1, rows=3, source=4, width=8), ends=(1,), renormalized=False)
    >>> loop.step()
    >>> loop.found[2][0].shape, loop.slot.lengths.tolist(), loop.at.tolist()
    (torch.Size([1, 6]), [1, 1, 1], [1])
    """

    def __init__(self, decoder: StaticT5, slot: Slot, *, ends: tuple[int, ...], renormalized: bool):
        super().__init__(decoder, slot)
        batch, beams, *_ = slot.shape
        device, self.renormalized, self.count = decoder.device, renormalized, (1 + len(ends)) * beams
        self.ends = torch.tensor(ends, device=device)
        self.scores = torch.zeros(batch, beams, device=device)
        self.first_rows = torch.arange(0, batch * beams, beams, device=device)[:, None]
        types = (torch.float32, torch.int64, torch.int64)
        self.found = [torch.zeros(LONGEST_RUN, batch, self.count, dtype=dtype, device=device) for dtype in types]

    def step(self) -> None:
        slot, (batch, beams) = self.slot, self.scores.shape
        logits = self.logits()
        logits -= logits.amax(dim=-1, keepdim=True)
        allowed = logits + self.penalty
        total = (allowed if self.renormalized else logits).exp().sum(dim=-1, keepdim=True).log()
        values, tokens = allowed.topk(self.count, dim=-1)  # (R, m)
        values = (values - total).view(batch, beams, -1) + self.scores[:, :, None]
        scores, index = values.flatten(1).topk(self.count, dim=-1)  # (B, m), sorted
        rows, tokens = index // self.count, tokens.view(batch, -1).gather(1, index)
        for held, new in zip(self.found, (scores, rows, tokens), strict=True):
            held.index_copy_(0, self.at, new[None])
        self.at.add_(1)
        # The first K that do not end, in their order, as the host finds them: equal scores keep their places.
        ended = (tokens[:, :, None] == self.ends).any(dim=-1)
        going = ended.byte().sort(dim=1, stable=True).indices[:, :beams]
        self.scores.copy_(scores.gather(1, going))
        slot.token.copy_(tokens.gather(1, going).view(-1, 1))
        slot.own.gather_(slot.own, (rows.gather(1, going) + self.first_rows).flatten())


AnyLoop = TypeVar("AnyLoop", bound=Loop)


def begin(
    backend: TorchStatic, state: StaticState, input_ids: np.ndarray, count: int, suppressed: SuppressedTokens, key: Any,
    make: Callable[[StaticT5, Slot], AnyLoop],
) -> AnyLoop:  # fmt: skip
    """The loop that is to take ``count`` steps behind these tokens (B, K, T), of which all but the last are read.

    Args:
        backend, state: whose.
        input_ids, count, suppressed: as of `run_beams`.
        key, make: what the loop is like, and how one is made where the state's memory has none yet.
    """
    backend._make_room(state, input_ids.shape[2] - 1 + count)
    slot, tokens = state.slot, backend._on_device(input_ids)
    loop = slot.loops.pop(key, None) or make(backend.decoder, slot)
    slot.loops[key] = loop  # the last one used stands last
    while len(slot.loops) > MOST_LOOPS:
        del slot.loops[next(iter(slot.loops))]
    if backend.graphs and loop.graph is None:
        loop.capture()
        backend.captured += 1
    loop.prepare(suppressed)
    if tokens.shape[1] > 1:
        backend.decoder.read(slot, tokens[:, :-1])
    slot.token.copy_(tokens[:, -1:])
    return loop


@torch.inference_mode()
def run_beams(
    backend: TorchStatic, state: StaticState, input_ids: np.ndarray, scores: np.ndarray, k: int, *,
    ends: tuple[int, ...], suppressed: SuppressedTokens = None, renormalized: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """``run_beams`` of `decoding.backend.Backend`, on a `TorchStatic`.

    >>> from t5accel.backends.torch_static import TorchStatic
    >>> from t5accel.models.random_init import random_t5
    >>> backend = TorchStatic(random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32)))
    >>> state = backend.new_state(backend.encode(np.array([[5, 6, 7, 1]]), np.ones((1, 4), dtype=np.int64)), 2)
    >>> start, scores = np.zeros((1, 2, 1), dtype=np.int64), np.array([[0, -np.inf]], dtype=np.float32)
    >>> [array.shape for array in run_beams(backend, state, start, scores, 5, ends=(1,))]
    [(5, 1, 4), (5, 1, 4), (5, 1, 4)]
    """
    count = min(k, LONGEST_RUN)

    def make(decoder: StaticT5, slot: Slot) -> BeamLoop:
        return BeamLoop(decoder, slot, ends=ends, renormalized=renormalized)

    loop = begin(backend, state, input_ids, count, suppressed, ("beams", ends, renormalized), make)
    loop.scores.copy_(torch.from_numpy(scores))
    loop.run(count)
    state.rows = state.rows.appended(input_ids.shape[2] - 1 + count)
    found = [held[:count].to("cpu", copy=True).numpy() for held in loop.found]
    return found[0], found[1], found[2]
