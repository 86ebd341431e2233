"""Programs of operations on a decoder state, run on a backend and on plain lists of tokens; `Strict`; and junk."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers import DynamicCache, EncoderDecoderCache

from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.torch_eager import TorchEager
from t5accel.models.t5_math import cache_name
from t5accel.parity import assert_close

ATOL = 1e-4


@torch.inference_mode()
def teacher_forced(model: Any, ids: np.ndarray, mask: np.ndarray, histories: Sequence[Sequence[int]]) -> np.ndarray:
    """transformers' logits (R, P, V) for one decoder history per row; shorter ones are padded on the right."""
    longest = max(map(len, histories))
    padded = np.array([[*history, *[0] * (longest - len(history))] for history in histories])
    return model(
        input_ids=torch.as_tensor(ids), attention_mask=torch.as_tensor(mask), decoder_input_ids=torch.as_tensor(padded)
    ).logits.numpy()


def own_generate(model: Any, ids: np.ndarray, mask: np.ndarray, **options: Any) -> Any:
    """What transformers' own ``generate()`` gives, by default greedily; what the decoder is given may be numpy's."""
    if "decoder_input_ids" in options:
        options["decoder_input_ids"] = torch.as_tensor(options["decoder_input_ids"])
    if options.get("use_cache", True):  # its own is sized by the encoder's depth, and fails where the decoder is deeper
        options.setdefault(cache_name(), EncoderDecoderCache(DynamicCache(), DynamicCache()))
    source = dict(input_ids=torch.as_tensor(ids), attention_mask=torch.as_tensor(mask))
    return model.generate(**source, **{"do_sample": False, "num_beams": 1, **options})


def broken(**methods: Callable[..., Any]) -> type[TorchEager]:
    """PyTorch's backend with these methods in place of its own."""
    return type("Broken", (TorchEager,), methods)


Program = list[tuple[str, int]]


def check_program(backend: Any, model: Any, ids: np.ndarray, mask: np.ndarray, rows: int, program: Program) -> None:
    """Run operations on a state and on plain lists of tokens; after each step the logits must be transformers'.

    Logits that were handed out stay as they are, whatever comes after. An operation is a name and the seed of its
    arguments; of a step, its number of tokens comes from the seed, too.
    """
    state, last = backend.new_state(backend.encode(ids, mask), rows), 0
    handed_out: list[tuple[np.ndarray, np.ndarray]] = []
    histories: list[list[list[int]]] = [[[] for _ in range(rows)] for _ in ids]
    for name, seed in program:
        rng = np.random.default_rng(seed)
        if name == "step":
            last = int(rng.integers(1, 5))
            new = rng.integers(3, 300, (len(ids), rows, last))
            logits = backend.step(state, new)
            assert isinstance(logits, np.ndarray) and logits.dtype == np.float32
            handed_out.append((logits, logits.copy()))
            for source, source_rows in enumerate(histories):
                for row, history in enumerate(source_rows):
                    history.extend(new[source, row].tolist())
            flat = [history for source_rows in histories for history in source_rows]
            whole = teacher_forced(model, ids.repeat(rows, 0), mask.repeat(rows, 0), flat)
            expected = np.stack([whole[i, len(h) - last : len(h)] for i, h in enumerate(flat)])
            assert_close(logits, expected.reshape(logits.shape), atol=ATOL)
        elif name == "rollback":
            accepted = rng.integers(0, last + 1, (len(ids), rows))
            backend.rollback(state, accepted)
            for source, source_rows in enumerate(histories):
                for row, history in enumerate(source_rows):
                    del history[len(history) - last + accepted[source, row] :]
            last = 0
        elif name == "reorder":
            chosen = rng.integers(0, rows, (len(ids), rows))
            backend.reorder(state, chosen)
            histories = [[list(old[row]) for row in chosen[source]] for source, old in enumerate(histories)]
        else:
            kept = rng.integers(0, len(ids), max(1, len(ids) - 1))  # one of them twice, perhaps
            backend.select_sources(state, kept)
            ids, mask = ids[kept], mask[kept]
            histories = [[[*row] for row in histories[source]] for source in kept]
    for logits, copied in handed_out:
        np.testing.assert_array_equal(logits, copied)


def forced(folder: Path, batch: Any, new: np.ndarray, cuts: Any = ()) -> np.ndarray:
    """Logits (B, K, T, V) of given tokens by the export in a folder, in chunks."""
    backend = OrtNumpy(folder, settings=SessionSettings(threads=1))
    state = backend.new_state(backend.encode(*batch), new.shape[1])
    return np.concatenate([backend.step(state, chunk) for chunk in np.split(new, cuts, axis=2)], axis=2)


def histories_of(batch: int, rows: int, length: int) -> np.ndarray:
    """Some tokens of the tiny vocabulary: (batch, rows, length)."""
    return np.random.default_rng(1).integers(3, 300, (batch, rows, length))


def check_as_it_was(backend: Any, state: Any, model: Any, padded_batch: tuple[np.ndarray, np.ndarray]) -> None:
    """The next step's logits, of 2 rows per source, are transformers' for three tokens 5 and what comes now."""
    new = np.random.default_rng(6).integers(3, 300, (6, 2, 2))
    whole = np.concatenate([np.full((6, 2, 3), 5), new], axis=2).reshape(12, 5)
    expected = teacher_forced(model, *(array.repeat(2, 0) for array in padded_batch), whole)[:, 3:]
    assert_close(backend.step(state, new).reshape(expected.shape), expected, atol=ATOL)


def prune_heads(attention: torch.nn.Module, heads: set[int], d_kv: int = 12) -> None:
    """As transformers 4 does it: smaller projections, and a note of which heads are gone."""
    kept = [i for i in range(attention.q.out_features) if i // d_kv not in heads]
    for part in "qkvo":
        weight = getattr(attention, part).weight.detach()
        weight = weight[:, kept] if part == "o" else weight[kept]
        linear = torch.nn.Linear(*weight.shape[::-1], bias=False)
        linear.weight = torch.nn.Parameter(weight.clone())
        setattr(attention, part, linear)
    attention.pruned_heads = heads


def pruned_and_silenced(model: Any, places: dict[str, set[int]]) -> tuple[Any, Any]:
    """A model without these heads, for export, and a whole one in which they say nothing, to compare with."""
    pruned, silenced = copy.deepcopy(model), copy.deepcopy(model)
    for place, heads in places.items():
        prune_heads(pruned.get_submodule(place), heads)
        for head in heads:  # whose output nobody reads
            silenced.get_submodule(place).o.weight.data[:, head * 12 : (head + 1) * 12] = 0
    return pruned, silenced


class Watched:
    """A session whose runs go through ``around(run, *arguments)``."""

    def __init__(self, session: Any, around: Callable[..., Any]):
        self.session, self.around = session, around

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.session, name)
        return partial(self.around, method) if name.startswith("run") else method


operations = st.tuples(
    st.sampled_from(["step", "step", "rollback", "reorder", "select_sources"]), st.integers(0, 2**16)
)


# Ragged acceptances in front of everything else; a reordering and a leaving source after them.
PROGRAM: Program = [("step", 8), ("rollback", 1), ("step", 2), ("reorder", 3), ("step", 4), ("rollback", 5),
                    ("select_sources", 7),
                    ("step", 6), ("rollback", 9), ("rollback", 0), ("reorder", 1), ("step", 3)]  # fmt: skip


class ToyBackend:
    """A toy backend that mostly copies its source; every next token depends on the source and all tokens so far.

    Tokens are 2 … 11, 0 is padding, 1 the end. ``copies`` and ``ends`` are probabilities of a copied token and the end.
    ``calls`` has the shape (n, T) of each step's input, the new order of rows, and the names of the other calls.
    """

    vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 12, 0, 1, 0

    def __init__(self, copies: float = 0.8, ends: float = 0.05, seed: int = 0):
        self.copies, self.ends, self.seed = copies, ends, seed
        self.calls: list[Any] = []

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> list[list[int]]:
        self.calls.append("encode")
        return [ids[mask == 1].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]

    def new_state(self, source: list[list[int]], rows_per_source: int = 1) -> dict[str, Any]:
        return {"sources": source, "pasts": [[[] for _ in range(rows_per_source)] for _ in source], "last": 0}

    def step(self, state: dict[str, Any], input_ids: np.ndarray) -> np.ndarray:
        self.calls.append((len(input_ids), input_ids.shape[2]))
        assert len(input_ids) == len(state["sources"])
        logits = np.empty((*input_ids.shape, self.vocab_size), dtype=np.float32)
        for b, source in enumerate(state["sources"]):
            for k, past in enumerate(state["pasts"][b]):
                for t, token in enumerate(input_ids[b, k].tolist()):
                    past.append(token)
                    logits[b, k, t] = self.next(source, past)
        state["last"] = input_ids.shape[2]
        return logits

    def next(self, source: list[int], past: list[int]) -> np.ndarray:
        random = np.random.default_rng(zlib.crc32(np.array([self.seed, *source, -1, *past]).tobytes()))
        logits = random.normal(size=self.vocab_size)
        logits[:2] = -5
        follows = [after for token, after in zip(source, source[1:], strict=False) if token == past[-1]]
        if follows and random.random() < self.copies:
            logits[follows[0]] += 20
        if random.random() < self.ends:
            logits[self.eos_token_id] = 50
        return logits

    def rollback(self, state: dict[str, Any], accepted: np.ndarray) -> None:
        self.calls.append("rollback")
        for pasts, counts in zip(state["pasts"], np.asarray(accepted).tolist(), strict=True):
            for past, count in zip(pasts, counts, strict=True):
                assert 0 <= count <= state["last"]
                del past[len(past) - state["last"] + count :]
        state["last"] = 0

    def reorder(self, state: dict[str, Any], rows: np.ndarray) -> None:
        self.calls.append(rows.tolist())
        state["pasts"] = [[[*pasts[row]] for row in order] for pasts, order in zip(state["pasts"], rows, strict=True)]

    def select_sources(self, state: dict[str, Any], sources: np.ndarray) -> None:
        self.calls.append("select_sources")
        for name in ("sources", "pasts"):
            state[name] = [state[name][source] for source in sources]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return [call for call in self.calls if isinstance(call, tuple)]


def lacking(kind: type, *methods: str) -> Any:
    """A backend of that kind without these methods."""
    return type("Poor", (), {name: member for name, member in vars(kind).items() if name not in methods})()


@dataclass
class StrictState:
    """How many positions each row has (B, K), and how many of them came with the last step."""

    lengths: np.ndarray
    last: int = 0


class Strict:
    """A backend that computes nothing, and fails when it is handed anything but what the protocol promises.

    Nobody may write to its logits, which a backend may keep. The likeliest next token depends on the last one alone; of
    5 tokens one ends. `worked` counts the calls.
    """

    vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 12, 0, 9, 0

    def __init__(self) -> None:
        self.worked = 0
        self.masks: list[np.ndarray] = []

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> tuple[int, ...]:
        self.worked += 1
        for array in (input_ids, attention_mask):
            _integers(array, 2)
            assert array.flags.c_contiguous and array.flags.owndata, "it may be kept, so nobody else may write to it"
        assert input_ids.size and input_ids.shape == attention_mask.shape and self._are_tokens(input_ids)
        assert set(np.unique(attention_mask)) <= {0, 1} and attention_mask.any(axis=1).all()
        self.masks.append(attention_mask)
        return input_ids.shape

    def new_state(self, source: tuple[int, ...], rows_per_source: int = 1) -> StrictState:
        assert isinstance(source, tuple) and type(rows_per_source) is int and rows_per_source >= 1
        return StrictState(np.zeros((source[0], rows_per_source), dtype=np.int64))

    def step(self, state: StrictState, input_ids: np.ndarray) -> np.ndarray:
        self.worked += 1
        _integers(input_ids, 3)
        assert input_ids.shape[:2] == state.lengths.shape and input_ids.shape[2] and self._are_tokens(input_ids)
        state.lengths, state.last = state.lengths + input_ids.shape[2], input_ids.shape[2]
        logits = np.sin(np.arange(self.vocab_size) * (input_ids[..., None] + 1.5)).astype(np.float32)
        logits.setflags(write=False)
        return logits

    def reorder(self, state: StrictState, rows: np.ndarray) -> None:
        _integers(rows, 2)
        assert rows.shape == state.lengths.shape and rows.min() >= 0 and rows.max() < rows.shape[1]
        state.lengths = np.take_along_axis(state.lengths, rows, axis=1)

    def rollback(self, state: StrictState, accepted: np.ndarray) -> None:
        _integers(accepted, 2)
        assert accepted.shape == state.lengths.shape and accepted.min() >= 0 and accepted.max() <= state.last
        state.lengths, state.last = state.lengths - state.last + accepted, 0

    def select_sources(self, state: StrictState, sources: np.ndarray) -> None:
        _integers(sources, 1)
        assert sources.size and sources.min() >= 0 and sources.max() < len(state.lengths)
        state.lengths = state.lengths[sources]

    def _are_tokens(self, ids: np.ndarray) -> bool:
        return ids.min() >= 0 and ids.max() < self.vocab_size


class StrictChooser(Strict):
    """The same with ``next_tokens``."""

    def next_tokens(self, state: StrictState, input_ids: np.ndarray, *, suppressed: int | None = None) -> np.ndarray:
        assert suppressed is None or 0 <= suppressed < self.vocab_size
        logits = self.step(state, input_ids)[:, :, -1].copy()
        if suppressed is not None:
            logits[..., suppressed] = -np.inf
        return logits.argmax(axis=-1)


def _integers(array: np.ndarray, rank: int) -> None:
    assert isinstance(array, np.ndarray) and array.dtype == np.int64 and array.ndim == rank, array


junk = (
    st.recursive(
        st.none() | st.booleans() | st.integers(-2, 400) | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=8,
    )
    | hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=2))
    | hnp.arrays(np.int64, hnp.array_shapes(min_dims=1, max_dims=3, max_side=2), elements=st.integers(-1, 3))
)
