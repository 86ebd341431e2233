"""Verified drafts give the tokens of greedy search; broken verification is caught."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from programs import ToyBackend

from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding import speculation
from t5accel.decoding.backend import Backend, Generated, PastLengths
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.request import GenerationInputs, StepStream
from t5accel.decoding.speculation import MAX_PAUSE, AdaptiveDraftLength, Drafts, GreedyVerifier, verify_drafts
from t5accel.parity import assert_varied


def sources(seed: int, batch: int, longest: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Padded sources of the toy and their mask, (B, S)."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest, batch)
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    return rng.integers(2, 12, mask.shape) * mask, mask


class Oracle:
    """A drafter that knows greedy search's answers (N, L) and proposes right tokens with probability ``truth``."""

    def __init__(self, answers: np.ndarray, truth: float = 0.75, seed: int = 0, most: int = 6):
        self.answers, self.truth, self.most = answers, truth, most
        self.random, self.at = np.random.default_rng(seed), [0] * len(answers)
        self.highest = int(answers.max())

    def propose(self, rows: Sequence[int], rooms: Sequence[int], blocked: Sequence[int]) -> Drafts:
        drafts = []
        for row, room in zip(rows, rooms, strict=True):
            count = min(int(self.random.integers(0, self.most + 1)), room)
            draft = self.answers[row, self.at[row] : self.at[row] + count].copy()
            wrong = self.random.random(draft.size) >= self.truth
            draft[wrong] = self.random.integers(0, self.highest + 1, wrong.sum())
            drafts.append(draft.tolist())
        return drafts

    def update(self, rows: Sequence[int], drafts: Drafts, found: Drafts) -> None:
        for row, answer in zip(rows, found, strict=True):
            self.at[row] += len(answer)

    def keep(self, places: np.ndarray) -> None:
        pass


def by_drafts(backend: Backend, ids: np.ndarray, mask: np.ndarray, drafter: Any, **options: Any) -> Generated:
    request = GenerationInputs.checked(backend, ids, mask, **options)
    steps = verify_drafts(backend, request, drafter, GreedyVerifier(backend))
    return StepStream(request.prefix[:, 1:], backend.pad_token_id, steps).generated()


def check_equals_greedy(
    backend: Backend, ids: np.ndarray, mask: np.ndarray, *, truth: float = 0.75, seed: int = 0, **options: Any
) -> Generated:
    """Drafts of this quality change nothing; returns what was found with them."""
    expected = greedy(backend, ids, mask, **options).sequences
    begin = np.shape(options.get("decoder_input_ids", [[]]))[1]
    found = by_drafts(backend, ids, mask, Oracle(expected[:, begin:], truth, seed), **options)
    np.testing.assert_array_equal(found.sequences, expected)
    assert 0 <= found.accepted <= found.drafted
    return found


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 2**16), batch=st.integers(1, 6), truth=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    ends=st.sampled_from([0.0, 0.05, 0.3]), longest=st.integers(1, 25), data=st.data(),
)  # fmt: skip
def test_any_draft_gives_the_tokens_of_greedy_search(seed: int, batch: int, truth, ends, longest, data) -> None:
    options: dict[str, Any] = dict(max_new_tokens=longest, min_new_tokens=data.draw(st.integers(0, longest)))
    if data.draw(st.booleans(), "prefix"):
        options["decoder_input_ids"] = np.random.default_rng(seed).integers(2, 12, (batch, 3))
    found = check_equals_greedy(
        ToyBackend(ends=ends, seed=seed), *sources(seed, batch), truth=truth, seed=seed, **options
    )
    event("accepted" if found.accepted else "nothing accepted")
    event("rejected" if found.drafted > found.accepted else "nothing rejected")


def test_right_drafts_save_calls_and_wrong_ones_cost_none() -> None:
    batch = sources(1, 5)
    options: dict[str, Any] = dict(max_new_tokens=40, min_new_tokens=40)
    alone = greedy(ToyBackend(), *batch, **options)
    assert_varied(alone.sequences)
    wrong, half, right = (check_equals_greedy(ToyBackend(), *batch, truth=t, **options) for t in (0.0, 0.75, 1.0))
    assert wrong.decoder_calls > 30 and wrong.accepted < wrong.drafted / 5
    assert 0 < half.accepted < half.drafted and half.decoder_calls < wrong.decoder_calls
    assert right.accepted == right.drafted and right.decoder_calls < 20
    assert alone.drafted == alone.accepted == 0


def test_the_end_inside_a_draft_ends_a_row() -> None:
    answers = np.array([[2, 3, 1, 4, 5], [2, 2, 2, 2, 2]])

    class Fixed(ToyBackend):
        def next(self, source: list[int], past: list[int]) -> np.ndarray:
            return np.eye(12)[answers[source[0] - 2, len(past) - 1]]

    class All(Oracle):
        def propose(self, rows: Sequence[int], rooms: Sequence[int], blocked: Sequence[int]) -> Drafts:
            return [answers[row, self.at[row] :][:room].tolist() for row, room in zip(rows, rooms, strict=True)]

    toy = Fixed()
    found = by_drafts(toy, np.array([[2], [3]]), np.ones((2, 1), dtype=int), All(answers), max_new_tokens=5)
    assert found.sequences.tolist() == [[2, 3, 1, 0, 0], [2, 2, 2, 2, 2]]
    assert found.decoder_calls == 1 and toy.calls == ["encode", (2, 5)], "nothing is left to be cut or kept"
    assert (found.drafted, found.accepted) == (8, 7), "what was guessed after the end is of no use"
    later = by_drafts(
        Fixed(), np.array([[2], [3]]), np.ones((2, 1), dtype=int), All(answers), max_new_tokens=5, min_new_tokens=3
    )  # fmt: skip
    assert later.sequences[0, 2] != 1, "the end is forbidden there, whatever is guessed"


def test_ended_rows_leave_the_batch() -> None:
    toy = ToyBackend(ends=0.12)
    found = check_equals_greedy(toy, *sources(3, 12), truth=0.9, max_new_tokens=30)
    lengths = (found.sequences != 0).sum(axis=1)
    assert len(set(lengths)) > 4
    second = max(place for place, call in enumerate(toy.calls) if call == "encode")  # after greedy search's own
    calls = toy.calls[second:]
    widths = [call[0] for call in calls if isinstance(call, tuple)]
    assert len(set(widths)) > 2 and "rollback" in calls and "select_sources" in calls


# Broken verification fails the same check


def keeps_a_wrong_token(draft: list[int], likeliest: list[int]) -> list[int]:
    found = accepted_prefix(draft, likeliest)
    return [*found[:-1], draft[len(found) - 1]] if len(found) <= len(draft) else found


accepted_prefix, rollback = speculation._accepted_prefix, TorchEager.rollback
BROKEN: dict[str, tuple[Any, str, Any]] = {
    "keeps a wrong draft token": (speculation, "_accepted_prefix", keeps_a_wrong_token),
    "all rows keep as many": (
        TorchEager, "rollback", lambda *given: rollback(*given[:2], np.full_like(given[2], given[2].max()))),
    "unequal pasts are not masked": (PastLengths, "mask", lambda self: np.ones((*self.shape, self.width), dtype=int)),
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_verification_is_caught(tiny_t5, padded_batch, monkeypatch, broken: str) -> None:
    backend = TorchEager(tiny_t5())
    expected = greedy(backend, *padded_batch, max_new_tokens=14).sequences

    def check() -> None:
        for seed in range(3):
            found = by_drafts(backend, *padded_batch, Oracle(expected, seed=seed), max_new_tokens=14)
            np.testing.assert_array_equal(found.sequences, expected)

    check()
    monkeypatch.setattr(*BROKEN[broken])
    with pytest.raises(AssertionError, match="Mismatched elements|not equal|shapes"):
        check()


# The length of drafts


def test_unpredictable_text_is_hardly_drafted() -> None:
    length, tries, guesses = AdaptiveDraftLength(16), 0, 0
    for _ in range(64):
        if count := length.next():
            tries, guesses = tries + 1, guesses + count
            length.update(count, 0)
    assert tries <= 7 and guesses <= 10
    drafts = 0
    for _ in range(MAX_PAUSE + 8):  # and then all of it is right
        if count := length.next():
            drafts = count
            length.update(count, count)
    assert drafts == 16
