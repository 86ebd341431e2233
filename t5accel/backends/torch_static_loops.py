"""Beam search and sampling on `TorchStatic`: many steps before the host reads their results.

Beams are ranked and reordered on the device; the host reads the candidates of a run at once and decides which beams
have ended. Samples are drawn on the device, by uniform numbers that the host gives for a whole run and that become
tokens as in `decoding.sampling`: a seed gives the same answers on every runtime, but for the rounding of logits.

Shapes: B sources, K rows each, R = B * K, V entries, m = K * (1 + the number of end tokens) candidates of a source.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from t5accel.backends.torch_static_buffers import Method, StaticBuffers, capture_graph, in_plain_mode
from t5accel.backends.torch_static_model import StaticT5
from t5accel.decoding.backend import NOT_FINITE, SuppressedTokens
from t5accel.decoding.beam import MAX_RUN_STEPS
from t5accel.decoding.sampling import SamplingParams
from t5accel.errors import EngineError

if TYPE_CHECKING:
    from t5accel.backends.torch_static import StaticState, TorchStatic

TIES = 64  # tokens beyond top_k that may be as likely as its last: with few bits some are
MAX_LOOPS = 4  # that buffers keep, each with a graph
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")  # in the device's memory: one graph serves any value


class Loop:
    """A step that chooses the next tokens of some buffers on the device, and its captured graph."""

    def __init__(self, decoder: StaticT5):  # no buffers: they keep it, and reference cycles would hold their memory
        self.decoder, self.graph = decoder, None

    def step(self, buffers: StaticBuffers) -> None:
        """Read the buffers' token, choose the next one. Touches nothing but the buffers and the loop's own memory."""
        raise NotImplementedError

    def logits(self, buffers: StaticBuffers) -> torch.Tensor:
        """(R, V) float32 after the buffers' token, which is read."""
        return self.decoder.logits(self.decoder.read(buffers, buffers.token)[:, -1])

    def capture(self, buffers: StaticBuffers) -> None:
        lengths, memory = buffers.lengths.clone(), buffers.self_kv.memory
        if isinstance(self, BeamLoop):  # which moves rows; the others write to places that are not real
            memory = memory.clone()

        def undo() -> None:
            buffers.lengths.copy_(lengths)
            buffers.self_kv.memory.copy_(memory)
            buffers.count.zero_()

        self.graph = capture_graph(partial(self.step, buffers), undo, self.decoder.device)

    def run(self, buffers: StaticBuffers, count: int) -> None:
        for _ in range(count):
            if self.graph is None:
                self.step(buffers)
            else:
                self.graph.replay()


class BeamLoop(Loop):
    """Steps of beam search. With ``renormalized`` suppressed tokens keep no share of the probability.

    >>> from t5accel.models.random_init import random_t5
    >>> t5 = StaticT5(random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32)))
    >>> buffers = t5.new_buffers(batch=1, rows=3, source=4, width=8)
    >>> loop = BeamLoop(t5, buffers, ends=(1,), renormalized=False)
    >>> loop.step(buffers)
    >>> loop.candidates[2][0].shape, buffers.lengths.tolist(), buffers.count.tolist()
    (torch.Size([1, 6]), [1, 1, 1], [1])
    """

    def __init__(self, decoder: StaticT5, buffers: StaticBuffers, *, ends: tuple[int, ...], renormalized: bool):
        super().__init__(decoder)
        batch, beams, *_ = buffers.shape
        device = decoder.device
        self.renormalized = renormalized
        self.m = (1 + len(ends)) * beams
        self.ends = torch.tensor(ends, device=device)
        self.scores = torch.zeros(batch, beams, device=device)  # the sum of the log-probabilities of each beam so far
        self.first_rows = torch.arange(0, batch * beams, beams, device=device)[:, None]
        # For each step the best continuations of a source, best first, (MAX_RUN_STEPS, B, m) each: their scores, which
        # of the K beams they continue, and their tokens.
        types = (torch.float32, torch.int64, torch.int64)
        self.candidates = [torch.zeros(MAX_RUN_STEPS, batch, self.m, dtype=dtype, device=device) for dtype in types]

    def step(self, buffers: StaticBuffers) -> None:
        batch, beams = self.scores.shape
        logits = self.logits(buffers)
        logits -= logits.amax(dim=-1, keepdim=True)
        allowed = logits + buffers.logit_bias
        total = (allowed if self.renormalized else logits).exp().sum(dim=-1, keepdim=True).log()
        values, tokens = allowed.topk(self.m, dim=-1)  # (R, m)
        values = (values - total).view(batch, beams, -1) + self.scores[:, :, None]
        scores, index = values.flatten(1).topk(self.m, dim=-1)  # (B, m), sorted
        rows, tokens = index // self.m, tokens.view(batch, -1).gather(1, index)
        for held, new in zip(self.candidates, (scores, rows, tokens), strict=True):
            held.index_copy_(0, buffers.count, new[None])
        buffers.count.add_(1)
        # The first K that do not end, in their order, as the host finds them: equal scores keep their places.
        ended = (tokens[:, :, None] == self.ends).any(dim=-1)
        going = ended.byte().sort(dim=1, stable=True).indices[:, :beams]
        self.scores.copy_(scores.gather(1, going))
        buffers.token.copy_(tokens.gather(1, going).view(-1, 1))
        buffers.self_kv.gather_(buffers.self_kv, (rows.gather(1, going) + self.first_rows).flatten())


class SampleLoop(Loop):
    """Steps that draw, by the kinds of change in ``sampling`` and ``top_k``; `run_samples` sets the other numbers.

    With ``few`` they draw among the `likeliest` tokens, and ``overflow`` says whether these were too few.
    """

    def __init__(self, decoder: StaticT5, buffers: StaticBuffers, sampling: SamplingParams, *, few: bool):
        super().__init__(decoder)
        device, rows = decoder.device, len(buffers.token)
        self.sampling, self.few = sampling, few
        self.overflow = torch.zeros(1, dtype=torch.bool, device=device)
        self.numbers = {
            name: torch.tensor(getattr(sampling, name), dtype=torch.float64, device=device) for name in _NUMBERS
        }
        self.uniform = torch.zeros(MAX_RUN_STEPS, rows, dtype=torch.float64, device=device)
        self.totals = torch.zeros_like(self.uniform)  # of `sample_token`, for the host: a graph raises no error
        self.generated = torch.zeros(MAX_RUN_STEPS, rows, dtype=torch.int64, device=device)
        self.seen = None  # (R, V) bool, the tokens in each row's history
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(rows, decoder.dims.vocab_size, dtype=torch.bool, device=device)

    def step(self, buffers: StaticBuffers) -> None:
        scores = penalised(self.logits(buffers) + buffers.logit_bias, self.seen, self.numbers)
        if self.few:
            scores, last, tokens, ties = likeliest(scores, self.sampling.top_k)
            self.overflow |= ties
        else:
            last = last_of(scores, self.sampling.top_k)
        odds = probabilities(scores, last, self.sampling, self.numbers)
        token, total = sample_token(odds, self.uniform.index_select(0, buffers.count).T)  # (R, 1) both
        if self.few:
            token = tokens.gather(1, token)
        if self.seen is not None:
            self.seen.scatter_(1, token, True)
        buffers.token.copy_(token)
        self.generated.index_copy_(0, buffers.count, token.T)
        self.totals.index_copy_(0, buffers.count, total.T)
        buffers.count.add_(1)


class ReadLoop(Loop):
    """A step that reads ``count`` tokens, such as a draft, and finds the likeliest one after each."""

    def __init__(self, decoder: StaticT5, buffers: StaticBuffers, *, count: int):
        super().__init__(decoder)
        self.tokens, self.best = torch.zeros((2, len(buffers.token), count), dtype=torch.int64, device=decoder.device)

    def step(self, buffers: StaticBuffers) -> None:
        logits = self.decoder.logits(self.decoder.read(buffers, self.tokens))  # (R, T, V)
        self.best.copy_((logits + buffers.logit_bias).argmax(dim=-1))


Numbers = dict[str, torch.Tensor]  # by the name of an option its value, () float64


def penalised(logits: torch.Tensor, seen: torch.Tensor | None, numbers: Numbers) -> torch.Tensor:
    """Penalise the tokens of the history, ``seen`` (R, V), if they are given: (R, V) float32, then float64."""
    if seen is None:
        return logits  # of float32 the likeliest are found sooner
    scores, penalty = logits.double(), numbers["repetition_penalty"]
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def last_of(scores: torch.Tensor, top_k: int) -> torch.Tensor | None:
    """The score (R, 1) of the last token that ``top_k`` keeps, if it leaves any out."""
    return scores.topk(top_k, dim=-1).values[:, -1:] if 0 < top_k < scores.shape[-1] else None


def likeliest(scores: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Leave C = ``top_k`` + `TIES` of the tokens, in their order in the vocabulary.

    Returns:
        Their scores (R, C), the `last_of` all (R, 1), the tokens (R, C) int64, and whether in some row (1,) tokens are
        missing that are as likely as the last.
    """
    values, tokens = scores.topk(top_k + TIES, dim=-1)
    last = values[:, top_k - 1 : top_k]
    ties = ((values[:, -1:] >= last) & (last > -torch.inf)).any().view(1)
    tokens, order = tokens.sort(dim=-1)
    return values.gather(1, order), last, tokens, ties


def probabilities(
    scores: torch.Tensor, last: torch.Tensor | None, sampling: SamplingParams, numbers: Numbers
) -> torch.Tensor:
    """Compute `decoding.sampling.probabilities` by operators that a graph can hold.

    From `penalised` scores (R, C), -inf for suppressed tokens, to (R, C) float64 that need not sum to 1. Tokens below
    ``last`` (R, 1) are left out. ``sampling`` says which of the further changes are made, by their ``numbers``.
    """
    ranking, scores = scores, scores.double()
    scores = scores - scores.amax(dim=-1, keepdim=True)  # before the division, which might overflow
    if sampling.temperature != 1:
        scores = scores / numbers["temperature"]
    if last is not None:
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


def sample_token(odds: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw as `decoding.sampling.sample_token`: (R, V) odds and (R, 1) numbers from 0 to below 1 -> (R, 1) int64.

    Beside them each row's sum of odds, (R, 1): where it is not finite, or 0, nothing was drawn.

    >>> sample_token(torch.tensor([[0, 0.5, 0, 0.5], [3, 0, 0, 1]]), torch.tensor([[0.0], [0.8]]))[0].tolist()
    [[1], [3]]
    """
    # Sums that a GPU adds up in parallel may fall by the last bit: where there are no odds they do not count.
    sums = odds.cumsum(dim=-1).masked_fill(odds <= 0, 0)
    total = sums.amax(dim=-1, keepdim=True)
    wanted = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return (sums > wanted).byte().argmax(dim=-1, keepdim=True), total  # the first of them


AnyLoop = TypeVar("AnyLoop", bound=Loop)


def _loop(
    backend: TorchStatic, state: StaticState, count: int, suppressed: SuppressedTokens, key: Any,
    make: Callable[[StaticT5, StaticBuffers], AnyLoop],
) -> AnyLoop:  # fmt: skip
    """Find or make the loop of this key for ``count`` more positions."""
    backend._make_room(state, count)
    buffers = state.buffers
    loop = buffers.loops.pop(key, None) or make(backend.decoder, buffers)
    buffers.loops[key] = loop  # the last one used stands last
    while len(buffers.loops) > MAX_LOOPS:
        del buffers.loops[next(iter(buffers.loops))]
    buffers.begin_run(suppressed)
    if backend.graphs and loop.graph is None:
        backend._made(partial(loop.capture, buffers))
        backend.captured += 1
    return loop


def _start(
    backend: TorchStatic, state: StaticState, input_ids: np.ndarray, count: int, suppressed: SuppressedTokens, key: Any,
    make: Callable[[StaticT5, StaticBuffers], AnyLoop],
) -> AnyLoop:  # fmt: skip
    """Read all but the last of the tokens (B, K, T), and find or make the loop for ``count`` steps behind them."""
    tokens = backend._on_device(input_ids)
    loop = _loop(backend, state, tokens.shape[1] - 1 + count, suppressed, key, make)
    if tokens.shape[1] > 1:
        backend.decoder.read(state.buffers, tokens[:, :-1])
    state.buffers.token.copy_(tokens[:, -1:])
    return loop


def keeps_state(method: Method) -> Method:
    """Run a method in `plain_mode`; where it fails midway, the rows and the token to read are as before."""

    @wraps(method)
    @in_plain_mode
    def run(backend: TorchStatic, state: StaticState, *arguments: Any, **options: Any) -> Any:
        rows, token = state.rows, state.buffers.token.clone()
        try:
            return method(backend, state, *arguments, **options)
        except BaseException:
            state.rows = rows
            state.buffers.lengths.copy_(torch.as_tensor(rows.lengths.ravel()))
            state.buffers.token.copy_(token)
            raise

    return run


@keeps_state
def step_tokens(
    backend: TorchStatic, state: StaticState, input_ids: np.ndarray, *, suppressed: SuppressedTokens = None
) -> np.ndarray:
    """Read T tokens, as `decoding.backend.Backend` documents it."""
    count = size = input_ids.shape[2]
    if backend.graphs:
        size = 1 << (count - 1).bit_length()  # few shapes are captured: powers of two
    loop = _loop(backend, state, size, suppressed, ("read", size), partial(ReadLoop, count=size))
    loop.tokens[:, :count] = backend._on_device(input_ids)
    loop.run(state.buffers, 1)
    state.buffers.lengths.sub_(size - count)  # whatever was read behind them is masked, and written over later
    state.rows = state.rows.appended(count)
    return loop.best[:, :count].to("cpu", copy=True).numpy().reshape(input_ids.shape)


@keeps_state
def run_beams(
    backend: TorchStatic, state: StaticState, input_ids: np.ndarray, scores: np.ndarray, k: int, *,
    ends: tuple[int, ...], suppressed: SuppressedTokens = None, renormalized: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Take up to ``k`` steps of beam search, as `Backend` documents them. After a failure begin with a new state."""
    count = min(k, MAX_RUN_STEPS)
    make = partial(BeamLoop, ends=ends, renormalized=renormalized)
    loop = _start(backend, state, input_ids, count, suppressed, ("beams", ends, renormalized), make)
    loop.scores.copy_(torch.from_numpy(scores))
    loop.run(state.buffers, count)
    state.rows = state.rows.appended(input_ids.shape[2] - 1 + count)
    best, beams, tokens = (held[:count].to("cpu", copy=True).numpy() for held in loop.candidates)
    return best, beams, tokens


@keeps_state
def run_samples(
    backend: TorchStatic, state: StaticState, input_ids: np.ndarray, uniform: np.ndarray, *, sampling: SamplingParams,
    suppressed: SuppressedTokens = None, history: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Take n steps that draw, as `decoding.backend.Backend` documents them."""
    # One loop, and one graph, for all values of the numbers.
    changed = [getattr(sampling, name) != getattr(SamplingParams(), name) for name in _NUMBERS]
    rows, count = state.rows.lengths.size, uniform.shape[2]
    for few in (True, False) if 0 < sampling.top_k < backend.vocab_size - TIES else (False,):
        make = partial(SampleLoop, sampling=sampling, few=few)
        key = ("samples", sampling.top_k, few, *changed)
        loop = _start(backend, state, input_ids, count, suppressed, key, make)
        for name, number in loop.numbers.items():
            number.fill_(getattr(sampling, name))
        loop.overflow.zero_()
        loop.uniform[:count] = torch.from_numpy(uniform.reshape(rows, count).T.copy())
        if loop.seen is not None:
            loop.seen.zero_().scatter_(1, backend._on_device(history), True)
        loop.run(state.buffers, count)
        if not loop.overflow.item():
            break
        state.buffers.lengths.copy_(torch.as_tensor(state.rows.lengths.ravel()))  # take these steps again
    totals = loop.totals[:count].cpu()
    if not ((totals > 0) & (totals < torch.inf)).all():
        raise EngineError(NOT_FINITE)
    state.rows = state.rows.appended(input_ids.shape[2] - 1 + count)
    return loop.generated[:count].T.to("cpu", copy=True).numpy().reshape(*state.rows.shape, count)
