"""The encoder cache gives the outputs of the backend that it wraps, with fewer encodings."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused
from test_families import lively

from t5accel.backends.torch_eager import TorchEager, TorchSource
from t5accel.decoding.backend import Backend
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import InputError
from t5accel.parity import assert_close, assert_varied

ATOL_HIDDEN = 2e-5  # float32, values up to about 3: sums of other shapes are rounded in another order
ATOL_LOGITS = 1e-4

Batch = tuple[np.ndarray, np.ndarray]
HOLE = -1


def batch_of(*rows: Sequence[int], left: int = 0, right: int = 0) -> Batch:
    """Pad rows to one length, and further on either side; ``HOLE`` is a masked position, filled with some token."""
    width = max(map(len, rows))
    marked = np.array([[HOLE] * left + [*row] + [HOLE] * (width - len(row) + right) for row in rows])
    return np.where(marked == HOLE, 7, marked), (marked != HOLE).astype(np.int64)


def tokens_of(backend: Any, batch: Batch) -> np.ndarray:
    return greedy(backend, *batch, max_new_tokens=10).sequences


def logits_of(backend: Any, batch: Batch) -> np.ndarray:
    """(B, 1, 3, V) after three tokens, the same for every batch: finer than what greedy search makes of them."""
    new = np.random.default_rng(0).integers(3, 300, (1, 1, 3))
    return backend.step(backend.new_state(backend.encode(*batch)), new.repeat(len(batch[0]), 0))


class Counting(TorchEager):
    """Records how many texts it encodes in each batch."""

    def __init__(self, model: Any):
        super().__init__(model)
        self.encoded: list[int] = []

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> TorchSource:
        self.encoded.append(len(input_ids))
        return super().encode(input_ids, attention_mask)


class Toy:
    """A numpy backend whose source is a list of rows; each position takes 24 bytes, with its key 32."""

    vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 100, 0, 1, 0
    new_state = step = None

    def __init__(self) -> None:
        self.encoded: list[tuple[int, ...]] = []
        self.weights = 1

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> list[np.ndarray]:
        rows = [ids[mask == 1] for ids, mask in zip(input_ids, attention_mask, strict=True)]
        self.encoded += [tuple(row.tolist()) for row in rows]
        return [np.repeat(row[:, None] * self.weights, 3, axis=1) for row in rows]

    def split(self, source: list[np.ndarray]) -> list[list[np.ndarray]]:
        return [[row.copy()] for row in source]

    def join(self, sources: list[list[np.ndarray]]) -> list[np.ndarray]:
        return [row.copy() for source in sources for row in source]

    def source_bytes(self, source: list[np.ndarray]) -> int:
        return sum(row.nbytes for row in source)

    def fingerprint(self) -> int:
        return self.weights


TEXTS = [[int(t) for t in np.random.default_rng(seed).integers(3, 300, 3 + seed)] for seed in range(6)]


# The same output as without, whatever is cached


def masked_variants(text: Sequence[int]) -> list[Batch]:
    """The same ids under six masks, and the visible tokens of the fifth without the distance between them."""
    ids = np.array([text])
    batches = []
    for hidden in ([], [0], [1], [2], [1, 2], [0, len(text) - 1]):
        mask = np.ones_like(ids)
        mask[:, hidden] = 0
        batches.append((ids, mask))
    return [*batches, batch_of([text[0], *text[3:]])]


def check(cache: Any, plain: Any, batches: Sequence[Batch]) -> None:
    """Through the cache as without it, and without it the rows' outputs all differ."""
    expected = [logits_of(plain, batch) for batch in batches]
    rows = [row for logits in expected for row in logits]
    assert min(np.abs(a - b).max() for a, b in combinations(rows, 2)) > 0.01, "the reference should tell them apart"
    sequences = [tokens_of(plain, batch) for batch in batches]
    assert_varied(max(sequences, key=lambda tokens: len(np.unique(tokens))))
    for batch, logits, tokens in zip(batches, expected, sequences, strict=True):
        assert_close(logits_of(cache, batch), logits, atol=ATOL_LOGITS)
        np.testing.assert_array_equal(tokens_of(cache, batch), tokens)


@pytest.mark.parametrize("kind", ["bart", "m2m_100"])
def test_what_moves_absolute_positions_is_part_of_the_text(kind: str) -> None:
    """Columns in front; of M2M100, which counts ids, those that are masked and no padding."""
    backend = TorchEager(lively(kind))
    pad = backend.pad_token_id
    ids = np.array([[5, 6, 7, 8], [pad, 6, 7, 8], [9, 6, 7, 8], [5, 9, 7, 8], [6, 7, 8, pad]])
    mask = np.array([[1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 0]])
    expected, found = (backend.split(one.encode(ids, mask)) for one in (backend, EncoderCache(backend)))
    for row, cached in zip(expected, found, strict=True):
        assert_close(cached.hidden, row.hidden, atol=ATOL_HIDDEN)


def test_masks_and_holes_are_part_of_the_text(tiny_t5) -> None:
    plain, backend = TorchEager(tiny_t5()), Counting(tiny_t5())
    cache = EncoderCache(backend)
    batches = masked_variants(TEXTS[4])
    check(cache, plain, batches)
    assert (cache.hits, cache.misses) == (7, 7)
    ids, mask = (np.concatenate(parts) for parts in zip(*batches[:6], strict=True))
    other = np.where(mask, ids, 9)  # a masked token is no part of it
    np.testing.assert_array_equal(tokens_of(cache, (other, mask)), tokens_of(plain, (ids, mask)))
    assert (cache.hits, cache.misses) == (13, 7) and len(backend.encoded) == 7


def test_writing_to_a_source_does_not_change_the_cached_one(tiny_t5, padded_batch) -> None:
    backend = Counting(tiny_t5())
    cache = EncoderCache(backend)
    expected = tokens_of(TorchEager(tiny_t5()), padded_batch)
    lent = [array.copy() for array in padded_batch]
    for rows in (slice(None), slice(None), slice(0, 1)):  # the last is a batch of a single kept row
        source = cache.encode(*(array[rows] for array in lent))
        state = cache.new_state(source, 2)
        with torch.inference_mode():
            for tensor in (source.hidden, source.mask, state.hidden, state.mask):
                tensor.fill_(1)
    for array in lent:
        array.fill(1)
    np.testing.assert_array_equal(tokens_of(cache, padded_batch), expected)
    assert len(backend.encoded) == 1


# Any sequence of batches

rows_of_batches = st.lists(
    st.tuples(st.integers(0, len(TEXTS) - 1), st.sampled_from([None, 1, 2])), min_size=1, max_size=4
)
events = st.lists(
    st.tuples(rows_of_batches, st.integers(0, 2), st.integers(0, 2)) | st.sampled_from(["train", "clear"]), max_size=8
)


@settings(deadline=None, max_examples=40)
@given(events=events, max_bytes=st.sampled_from([0, 1000, 3000, 10**6]))
def test_any_sequence_of_batches_and_changes(tiny_t5, events: list[Any], max_bytes: int) -> None:
    plain = TorchEager(copy.deepcopy(tiny_t5()))
    cache = EncoderCache(plain, max_bytes=max_bytes)
    new = np.random.default_rng(0).integers(3, 300, (4, 1, 3))
    rows_so_far = 0
    for event in events:
        if event == "clear":
            cache.clear()
        elif event == "train":
            with torch.no_grad():
                value(plain.model).weight.mul_(1.5)
        else:
            chosen, left, right = event
            batch = batch_of(*([HOLE if p == hole else t for p, t in enumerate(TEXTS[text])] for text, hole in chosen),
                             left=left, right=right)  # fmt: skip
            expected, source = plain.encode(*batch), cache.encode(*batch)
            for one, other in zip(plain.split(expected), plain.split(source), strict=True):
                assert_close(other.hidden, one.hidden, atol=ATOL_HIDDEN)
            tokens = new[: len(chosen)]
            logits = cache.step(cache.new_state(source), tokens)
            assert_close(logits, plain.step(plain.new_state(expected), tokens), atol=ATOL_LOGITS)
            rows_so_far += len(chosen)
        assert 0 <= cache.size_bytes <= max_bytes and cache.hits + cache.misses == rows_so_far


# Changed weights


def train_step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=torch.tensor([TEXTS[3]]), labels=torch.tensor([[50, 60, 70, 1]])).loss.backward()
    optimizer.step()


def scaled(model: Any) -> dict[str, torch.Tensor]:
    """Other weights for the encoder."""
    return {n: w * 3 if ".v." in n else w.clone() for n, w in model.encoder.state_dict().items()}


def by_address(model: Any) -> tuple[Any, ...]:
    """The obvious fingerprint: addresses and versions."""
    return tuple((weight.data_ptr(), weight._version) for weight in model.encoder.parameters())


def value(model: Any) -> torch.nn.Linear:
    """The projection of values in the encoder's first layer."""
    return model.encoder.block[0].layer[0].SelfAttention.v


def assign_a_parameter(model: Any) -> None:
    value(model).weight = torch.nn.Parameter(value(model).weight.detach() * 3)


def swap_the_data(model: Any) -> None:
    value(model).weight.data = value(model).weight.data * 3


CHANGES: dict[str, Callable[[Any], Any]] = {
    "load_state_dict": lambda model: model.encoder.load_state_dict(scaled(model)),
    "load_state_dict, assigned": lambda model: model.encoder.load_state_dict(scaled(model), assign=True),
    "in place, in inference mode": torch.inference_mode()(lambda model: value(model).weight.mul_(3)),
    "a new parameter": assign_a_parameter,
    "new data": swap_the_data,
    "layers taken out": lambda model: model.encoder.block.__delitem__(1),
    "an embedding": lambda model: model.shared.weight.detach().mul_(3),
    "a step of training": train_step,
}


def check_change(cache: EncoderCache, plain: TorchEager, batch: Batch, change: Callable[[], Any]) -> None:
    """Fill the cache, change the weights, and compare with a backend that keeps nothing."""
    before = tokens_of(plain, batch)
    assert_varied(before)
    np.testing.assert_array_equal(tokens_of(cache, batch), before)
    kept = plain.encode(*batch)
    change()
    stale, fresh = (plain.step(plain.new_state(s), np.full((6, 1, 1), 0)) for s in (kept, plain.encode(*batch)))
    assert np.abs(stale - fresh).max() > 0.01, "earlier encodings should be wrong now"
    assert_close(cache.step(cache.new_state(cache.encode(*batch)), np.full((6, 1, 1), 0)), fresh, atol=ATOL_LOGITS)
    np.testing.assert_array_equal(tokens_of(cache, batch), tokens_of(plain, batch))


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_empty_it(tiny_t5, padded_batch, change: str) -> None:
    model = copy.deepcopy(tiny_t5())
    cache = EncoderCache(TorchEager(model))
    check_change(cache, TorchEager(model), padded_batch, lambda: CHANGES[change](model))
    assert (cache.hits, cache.misses) == (6, 12) and len(cache._rows) == 6


def test_another_dtype_or_model_empties_it(tiny_t5, padded_batch) -> None:
    model, other = copy.deepcopy(tiny_t5()), tiny_t5(seed=4)
    backend = TorchEager(model)
    cache = EncoderCache(backend)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        model.to(dtype)
        assert cache.encode(*padded_batch).hidden.dtype == dtype
    assert cache.misses == 18
    backend.model = other
    np.testing.assert_array_equal(tokens_of(cache, padded_batch), tokens_of(TorchEager(other), padded_batch))


def test_sources_of_training_mode_are_not_used_in_evaluation_mode(tiny_t5, padded_batch) -> None:
    model = copy.deepcopy(tiny_t5(dropout_rate=0.5))
    cache = EncoderCache(TorchEager(model))
    expected = tokens_of(cache, padded_batch)
    cache.clear()
    model.train()
    cache.encode(*padded_batch)  # with dropout
    np.testing.assert_array_equal(tokens_of(EncoderCache(TorchEager(model)), padded_batch), expected)
    np.testing.assert_array_equal(tokens_of(cache, padded_batch), expected)


def test_unchanged_weights_keep_it(tiny_t5, padded_batch) -> None:
    model = copy.deepcopy(tiny_t5())
    cache = EncoderCache(TorchEager(model))
    tokens_of(cache, padded_batch)
    with torch.no_grad():
        model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
        model.decoder.block[0].layer[0].SelfAttention.q.weight.mul_(1.1)  # the decoder's: encoder outputs stay right
    model.eval()
    tokens_of(cache, padded_batch)
    copy.deepcopy(model)
    tokens_of(cache, padded_batch)
    assert (cache.hits, cache.misses) == (12, 6)


def test_an_address_is_no_identity(tiny_t5) -> None:
    model = copy.deepcopy(tiny_t5())
    backend = TorchEager(model)
    weight = value(model).weight
    memory = weight.detach().numpy().copy()
    weight.data = torch.from_numpy(memory)
    mine, first = backend.fingerprint(), by_address(model)
    weight.data = torch.zeros(1)  # the tensor goes, its memory is used again
    memory *= 3
    weight.data = torch.from_numpy(memory)
    assert by_address(model) == first and backend.fingerprint() != mine


def test_a_fingerprint_keeps_no_weights_alive(tiny_t5) -> None:
    model = copy.deepcopy(tiny_t5())
    storages = TorchEager(model).fingerprint()[2]
    assert not any(storage.expired() for storage in storages)
    model.to(torch.float64)
    assert all(storage.expired() for storage in storages)


def test_hidden_writes_need_clear(tiny_t5, padded_batch) -> None:
    """`TorchEager.fingerprint` does not notice them, as it says."""
    model = copy.deepcopy(tiny_t5())
    cache, weight = EncoderCache(TorchEager(model)), value(model).weight
    before = cache.encode(*padded_batch)
    for write in (
        lambda: weight.data.mul_(3),
        lambda: np.multiply(weight.detach().numpy(), 3, out=weight.data.numpy()),
    ):
        write()
        assert torch.equal(cache.encode(*padded_batch).hidden, before.hidden), "noticed now? Then say so in fingerprint"
        cache.clear()
        assert cache.size_bytes == 0
        fresh = cache.encode(*padded_batch)
        assert (fresh.hidden - before.hidden).abs().max() > 0.1
        before = fresh


def test_weights_of_inference_mode_are_refused(tiny_t5, padded_batch) -> None:
    with torch.inference_mode():
        model = copy.deepcopy(tiny_t5())
    with pytest.raises(InputError, match="inference mode"):
        EncoderCache(TorchEager(model))
    backend = TorchEager(copy.deepcopy(tiny_t5()))
    cache = EncoderCache(backend)
    backend.model = model
    with pytest.raises(InputError, match="inference mode"):
        cache.encode(*padded_batch)


# The bound


class LRU:
    """A plain model of the cache: the rows that are encoded, and those that stay."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.kept = max_bytes, OrderedDict()

    def encode(self, rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        unique = list(dict.fromkeys(rows))
        encoded = [row for row in unique if row not in self.kept]
        for row in unique:
            if row in self.kept:
                self.kept.move_to_end(row)
            elif 32 * len(row) <= self.max_bytes:
                self.kept[row] = True
                while self.size_bytes > self.max_bytes:
                    self.kept.popitem(last=False)
        return encoded

    @property
    def size_bytes(self) -> int:
        return sum(32 * len(row) for row in self.kept)


toy_rows = st.lists(st.lists(st.integers(2, 4), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


@settings(max_examples=60)
@given(batches=st.lists(toy_rows, max_size=12), max_bytes=st.integers(0, 300))
def test_the_least_recently_used_row_leaves(batches: list[list[tuple[int, ...]]], max_bytes: int) -> None:
    """And each is encoded once, on whichever side it is padded."""
    backend, expected = Toy(), LRU(max_bytes)
    cache = EncoderCache(backend, max_bytes=max_bytes)
    for number, rows in enumerate(batches):
        backend.encoded = []
        source = cache.encode(*batch_of(*rows, left=number % 3, right=number % 2))
        assert [row[:, 0].tolist() for row in source] == [list(row) for row in rows]
        assert backend.encoded == expected.encode(rows)
        assert cache.size_bytes == expected.size_bytes <= max_bytes


def test_size_is_that_of_tensors_and_keys(tiny_t5, padded_batch) -> None:
    cache = EncoderCache(TorchEager(tiny_t5()))
    cache.encode(*padded_batch)
    rows = [row for row, _ in cache._rows.values()]
    storages = [tensor.untyped_storage().nbytes() for row in rows for tensor in (row.hidden, row.mask)]
    assert cache.size_bytes == sum(storages) + sum(map(len, cache._rows)) == 34 * (32 * 4 + 8 + 8)


# Errors


def test_an_exception_of_the_encoder_leaves_it_as_it_was() -> None:
    class Failing(Toy):
        def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> Any:
            if (input_ids == 9).any():
                raise MemoryError("no memory")
            return super().encode(input_ids, attention_mask)

    cache = EncoderCache(Failing(), max_bytes=64)
    cache.encode(*batch_of([2], [3]))
    before = cache.hits, cache.misses, cache.size_bytes, list(cache._rows)
    with pytest.raises(MemoryError):
        cache.encode(*batch_of([4], [2], [9]))
    assert (cache.hits, cache.misses, cache.size_bytes, list(cache._rows)) == before
    cache.encode(*batch_of([2]))
    assert cache.hits == 1


def test_what_cannot_be_cached() -> None:
    refused(partial(EncoderCache, Toy()), "max_bytes", -1, 1.5, "256 MB", None, True)
    for methods in (["split"], ["join", "source_bytes"], ["split", "join", "source_bytes", "fingerprint"]):
        members = {name: value for name, value in vars(Toy).items() if name not in methods}
        poor = type("Poor", (), members)()
        refused(EncoderCache, "backend", poor, match=f"lacks {', '.join(methods)}")
    refused(EncoderCache, "backend", None)


# A backend like any other


def test_is_a_backend_and_shows_the_wrapped_one(tiny_t5) -> None:
    backend = TorchEager(tiny_t5(eos_token_id=7))
    cache = EncoderCache(backend)
    assert isinstance(cache, Backend)
    assert {"vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id"} <= vars(cache).keys()
    assert (cache.vocab_size, cache.eos_token_id, cache.model, cache.use_cache) == (300, 7, backend.model, True)
    assert not hasattr(cache, "run_greedy")
    backend.run_greedy = lambda state, k: k
    assert cache.run_greedy(None, 3) == 3


# Threads


def in_threads(*functions: Callable[[], None]) -> None:
    """Run all at once and raise what one of them raised."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


class Meeting(Toy):
    """Two threads encode at the same time, and try to keep their row at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.encoding, self.keeping = threading.Barrier(2), threading.Barrier(2)

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> Any:
        self.encoding.wait(timeout=30)
        return super().encode(input_ids, attention_mask)

    def source_bytes(self, source: list[np.ndarray]) -> int:
        with contextlib.suppress(threading.BrokenBarrierError):
            self.keeping.wait(timeout=0.3)
        return super().source_bytes(source)


def test_two_threads_that_miss_the_same_row_keep_it_once() -> None:
    cache = EncoderCache(Meeting())
    in_threads(*[lambda: cache.encode(*batch_of([5, 6]))] * 2)
    assert (cache.hits, cache.misses, cache.size_bytes) == (0, 2, 64)


class Waiting(Toy):
    """Encodes the token 9 only after ``go_on``."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> Any:
        source = super().encode(input_ids, attention_mask)
        if (input_ids == 9).any():
            self.begun.set()
            assert self.go_on.wait(timeout=30)
        return source


def test_a_hit_does_not_wait_for_the_encoder() -> None:
    backend = Waiting()
    cache = EncoderCache(backend)
    cache.encode(*batch_of([2]))

    def hit() -> None:
        assert backend.begun.wait(timeout=30)
        cache.encode(*batch_of([2]))
        assert cache.hits == 1 and cache.misses == 1
        backend.go_on.set()

    in_threads(lambda: cache.encode(*batch_of([9])), hit)
    assert cache.misses == 2


def test_threads_share_it_while_rows_are_evicted_and_cleared() -> None:
    cache = EncoderCache(Toy(), max_bytes=32 * 40)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for turn in range(100):
            rows = [rng.integers(2, 5, rng.integers(1, 6)).tolist() for _ in range(rng.integers(1, 5))]
            assert [row[:, 0].tolist() for row in cache.encode(*batch_of(*rows))] == rows
            if turn % 50 == 49:
                cache.clear()

    in_threads(*(partial(work, seed) for seed in range(4)))
    assert cache.size_bytes == sum(size for _, size in cache._rows.values()) <= cache.max_bytes
    assert cache.hits > 0 and cache.misses > 0


@pytest.mark.parametrize("how", ["a hidden change and clear", "a change that another call sees", "a change alone"])
def test_an_encoding_during_which_the_weights_changed_is_not_kept(how: str) -> None:
    backend = Waiting()
    if how == "a hidden change and clear":
        backend.fingerprint = lambda: 0
    cache = EncoderCache(backend)
    stale: list[Any] = []

    def change() -> None:
        assert backend.begun.wait(timeout=30)
        backend.weights = 2
        if how == "a hidden change and clear":
            cache.clear()
        elif how == "a change that another call sees":
            cache.encode(*batch_of([2]))
        backend.go_on.set()

    in_threads(lambda: stale.append(cache.encode(*batch_of([9]))), change)
    assert stale[0][0].tolist() == [[9, 9, 9]]
    assert cache.encode(*batch_of([9]))[0].tolist() == [[18, 18, 18]]
