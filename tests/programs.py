"""Programs of operations on a decoder state, run on a backend and on plain lists of tokens; and what is no argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from t5accel.parity import parity

ATOL = 1e-4


@torch.inference_mode()
def teacher_forced(model: Any, ids: np.ndarray, mask: np.ndarray, histories: Sequence[Sequence[int]]) -> np.ndarray:
    """transformers' logits (R, P, V) for one decoder history per row; shorter ones are padded on the right."""
    longest = max(map(len, histories))
    padded = np.array([[*history, *[0] * (longest - len(history))] for history in histories])
    return model(
        input_ids=torch.as_tensor(ids), attention_mask=torch.as_tensor(mask), decoder_input_ids=torch.as_tensor(padded)
    ).logits.numpy()


Program = list[tuple[str, int]]


def check_program(backend: Any, model: Any, ids: np.ndarray, mask: np.ndarray, rows: int, program: Program) -> None:
    """Run operations on a state and on plain lists of tokens; after each step the logits must be transformers'.

    Logits that were handed out stay as they are, whatever comes after. An operation is a name and the seed of its
    arguments; of a step, its number of tokens comes from the seed, too.
    """
    state, last = backend.start(backend.encode(ids, mask), rows), 0
    handed_out: list[tuple[np.ndarray, np.ndarray]] = []
    histories: list[list[list[int]]] = [[[] for _ in range(rows)] for _ in ids]
    for name, seed in program:
        rng = np.random.default_rng(seed)
        if name == "step":
            last = int(rng.integers(1, 5))
            new = rng.integers(3, 300, (len(ids), rows, last))
            logits = backend.step(state, new)
            handed_out.append((logits, logits.copy()))
            for source, source_rows in enumerate(histories):
                for row, history in enumerate(source_rows):
                    history.extend(new[source, row].tolist())
            flat = [history for source_rows in histories for history in source_rows]
            whole = teacher_forced(model, ids.repeat(rows, 0), mask.repeat(rows, 0), flat)
            expected = np.stack([whole[i, len(h) - last : len(h)] for i, h in enumerate(flat)])
            parity(logits, expected.reshape(logits.shape), atol=ATOL)
        elif name == "trim":
            accepted = rng.integers(0, last + 1, (len(ids), rows))
            backend.trim(state, accepted)
            for source, source_rows in enumerate(histories):
                for row, history in enumerate(source_rows):
                    del history[len(history) - last + accepted[source, row] :]
            last = 0
        elif name == "reorder":
            chosen = rng.integers(0, rows, (len(ids), rows))
            backend.reorder(state, chosen)
            histories = [[list(old[row]) for row in chosen[source]] for source, old in enumerate(histories)]
        else:
            kept = rng.permutation(len(ids))[: max(1, len(ids) - 1)]
            backend.keep(state, kept)
            ids, mask, histories = ids[kept], mask[kept], [histories[source] for source in kept]
    for logits, copied in handed_out:
        np.testing.assert_array_equal(logits, copied)


def logits_after_all(backend: Any, ids: np.ndarray, mask: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Each operation once: a step of ``new`` (6, 2, T), T >= 3; a ragged trim; … -> the logits of one more step."""
    state = backend.start(backend.encode(ids, mask), 2)
    backend.step(state, new)
    backend.trim(state, np.arange(12).reshape(6, 2) % 4)
    backend.reorder(state, np.array([[1, 0]] * 6))
    backend.keep(state, np.array([4, 0]))
    return backend.step(state, new[:2])


operations = st.tuples(st.sampled_from(["step", "step", "trim", "reorder", "keep"]), st.integers(0, 2**16))


# Ragged acceptances in front of everything else; a reordering and a leaving source after them.
PROGRAM: Program = [("step", 8), ("trim", 1), ("step", 2), ("reorder", 3), ("step", 4), ("trim", 5), ("keep", 7),
                    ("step", 6), ("trim", 9), ("trim", 0), ("reorder", 1), ("step", 3)]  # fmt: skip


# Bad input: the method, its argument and what the message says, for a state of 6 sources and 2 rows after 3 tokens.

BAD_CALLS: dict[str, tuple[str, Any, str]] = {
    "step: rank": ("step", np.full((6, 2), 5), "3 dimensions"),
    "step: batch": ("step", np.full((5, 2, 1), 5), r"\(6, 2, 'T >= 1'\)"),
    "step: rows": ("step", np.full((6, 3, 1), 5), r"\(6, 2, 'T >= 1'\)"),
    "step: same product": ("step", np.full((4, 3, 1), 5), r"\(6, 2, 'T >= 1'\)"),
    "step: no tokens": ("step", np.zeros((6, 2, 0), dtype=np.int64), "T >= 1"),
    "step: floats": ("step", np.full((6, 2, 1), 5.0), "integers"),
    "step: none": ("step", None, "dimensions"),
    "step: text": ("step", "hello", "dimensions"),
    "step: ragged": ("step", [[[1], [2, 3]]], "ragged"),
    "step: beyond the vocabulary": ("step", np.full((6, 2, 1), 300), "0 … 299"),
    "step: negative": ("step", np.full((6, 2, 1), -1), "0 … 299"),
    "reorder: no such row": ("reorder", np.full((6, 2), 2), "0 … 1"),
    "reorder: negative": ("reorder", np.full((6, 2), -1), "0 … 1"),
    "reorder: shape": ("reorder", np.zeros((2, 6), dtype=np.int64), r"\(6, 2\)"),
    "reorder: none": ("reorder", None, "dimensions"),
    "reorder: floats": ("reorder", np.zeros((6, 2)), "integers"),
    "trim: more than there are": ("trim", np.full((6, 2), 4), "0 … 3"),
    "trim: negative": ("trim", np.full((6, 2), -1), "0 … 3"),
    "trim: rank": ("trim", np.full(6, 1), "2 dimensions"),
    "trim: shape": ("trim", np.full((6, 1), 1), r"\(6, 2\)"),
    "trim: empty": ("trim", [[]], r"\(6, 2\)"),
    "keep: none of them": ("keep", [], "at least one"),
    "keep: no such source": ("keep", [6], "0 … 5"),
    "keep: negative": ("keep", [-1], "0 … 5"),
    "keep: a mask": ("keep", [[True] * 6], "1 dimensions"),
    "keep: one number": ("keep", 3, "1 dimensions"),
    "keep: floats": ("keep", [0.0], "integers"),
}


junk = (
    st.recursive(
        st.none() | st.booleans() | st.integers(-2, 400) | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=8,
    )
    | hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=2))
    | hnp.arrays(np.int64, hnp.array_shapes(min_dims=1, max_dims=3, max_side=2), elements=st.integers(-1, 3))
)
