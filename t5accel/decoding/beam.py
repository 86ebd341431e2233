"""Beam search: the K best beginnings of an answer side by side, as transformers' ``generate(num_beams=K)``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from t5accel.checks import as_count, is_number
from t5accel.decoding.backend import Backend, Generated
from t5accel.decoding.continuations import Continuations, pick
from t5accel.decoding.hypotheses import START, Answers, Tree
from t5accel.decoding.request import Request
from t5accel.errors import InputError

_LARGEST_EXPONENT = 70.0  # scores times or over exp(70) are still far from the ends of float32


def beam_search(
    backend: Backend,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    num_beams: int = 4,
    max_new_tokens: int = 64,
    min_new_tokens: int = 0,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    num_return_sequences: int = 1,
    decoder_input_ids: Any = None,
    forced_bos_token_id: int | None = None,
) -> Generated:
    """Search for the likeliest answers with K beams for each source, and return the best.

    Every step ranks all continuations of a source's beams by one token. Those among the best K that end are answers,
    the best K that do not end are the next beams. `hypotheses.Answers` says which answers stay, and when a source
    stops. Rules and numbers are those of transformers 4.57 and 5.x (``_beam_search`` in ``generation/utils.py``), the
    code is not. One thing differs: after its end an answer is padded with the pad id, where transformers repeats the
    end token if the pad id is 0.

    The K rows of a source share its cross-attention. Only the cache of self-attention is reordered, and only when the
    order changes.

    Args:
        backend, input_ids, attention_mask, max_new_tokens, min_new_tokens: as of `greedy.greedy`.
        num_beams: K, less than the vocabulary. 1 is greedy search, as in transformers.
        length_penalty: an answer of n new tokens scores the sum of their log-probabilities over
            ``n ** length_penalty``: above 0 this favours long answers, below 0 short ones.
        early_stopping: when a source that has K answers stops. ``True``: at once. ``False``: when its best beam would
            not be one of them if it ended now. ``"never"``: the same, but with a ``length_penalty`` above 0 when it
            would not be one of them even if it reached ``max_new_tokens`` without losing any likelihood.
        num_return_sequences: N, at most K.
        decoder_input_ids, forced_bos_token_id: as of `greedy.greedy`; they are not scored.

    Returns:
        ``sequences`` (B * N, L) int64, the N best of the first source, best first, then those of the next, and their
        ``scores`` (B * N,) float32, transformers' ``sequences_scores``. Sources that stop leave the batch as soon as a
        quarter of it has. Between continuations of exactly equal scores the choice is free.

    Raises:
        InputError: a shape, type or bound is wrong.

    >>> import numpy as np
    >>> class Chain:  # a toy backend: what comes next depends on the last token alone, and 3 ends
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 4, 0, 3, 0
    ...     odds = np.array([[0, 0.6, 0.4, 0], [0.4, 0, 0.3, 0.3], [0.1, 0, 0, 0.9], [1, 0, 0, 0]]) + 1e-9
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def start(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.log(self.odds)[input_ids]
    ...     def reorder(self, state, rows): pass
    ...     def keep(self, state, sources): pass
    >>> beam_search(Chain(), [[1]], num_beams=1, max_new_tokens=5).sequences.tolist()  # 1 is likelier than 2
    [[1, 0, 1, 0, 1]]
    >>> best = beam_search(Chain(), [[1]], num_beams=2, max_new_tokens=5)
    >>> best.sequences.tolist(), f"{np.exp(2 * best.scores[0]):.2f}"
    ([[2, 3]], '0.36')
    """
    request = Request.checked(
        backend, input_ids, attention_mask, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens,
        decoder_input_ids=decoder_input_ids, forced_bos_token_id=forced_bos_token_id, methods=("reorder", "keep"),
    )  # fmt: skip
    batch, longest, end = len(request.ids), request.max_new_tokens, backend.eos_token_id
    beams, returned = _counts(num_beams, num_return_sequences, backend.vocab_size)
    answers = Answers(
        (batch, beams),
        length_penalty=_penalty(length_penalty, longest),
        early_stopping=_rule(early_stopping) or beams == 1,  # greedy search ends with its first answer
        max_new_tokens=longest,
    )
    tree, continuations = Tree(), Continuations(backend.vocab_size)

    state = backend.start(backend.encode(request.ids, request.mask), rows_per_source=beams)
    order = np.arange(beams)
    active = np.arange(batch)  # (n,) which source each one in the state is
    scores = np.zeros((batch, 1), dtype=np.float32)  # one column: before the first step all rows of a source are equal
    read_alike = True  # what the K rows of a source have read
    nodes = np.full((batch, 1), START)  # in the tree, of the first row of each source; those of the others follow it
    step_input, length = np.repeat(request.prefix[:, None], beams, axis=1), 0  # (B, K, T)
    while True:
        logits = backend.step(state, step_input)[:, : scores.shape[1], -1]  # (n, K, V), (B, 1, V) at first
        if (forced := request.forced(length)) is None:
            # Twice K, because each beam may end and K have to go on.
            best = continuations.best(logits, scores, 2 * beams, forbidden=request.forbidden(length))
            scores, rows, tokens = best  # (n, 2K) each
        else:  # each beam goes on as it has to, at no cost
            rows = np.broadcast_to(order[: scores.shape[1]], scores.shape)
            tokens = np.full(scores.shape, forced, dtype=np.int64)
        del logits  # so that the runtime can use their memory for the next ones
        parents = nodes + rows  # (n, 2K)
        length += 1
        ends = tokens == end
        if length == longest:
            ends[:] = True
        if ends.any():
            ended = ends[:, :beams] & answers.is_open[active, None]  # (n, K)
            if ended.any():
                leaves = tree.grow(parents[:, :beams], tokens[:, :beams])
                found = np.where(ended, scores[:, :beams], -np.inf)
                answers.add(active, found, leaves + np.arange(found.size).reshape(found.shape), length)
            going_on = np.argsort(ends, axis=1, kind="stable")
            scores, rows, tokens, parents = (pick(array, going_on) for array in (scores, rows, tokens, parents))
        if length == longest:
            break
        scores, rows, tokens = scores[:, :beams], rows[:, :beams], tokens[:, :beams]  # (n, K)
        nodes = tree.grow(parents[:, :beams], tokens) + np.arange(0, tokens.size, tokens.shape[1])[:, None]  # (n, 1)
        if answers.close(active, scores[:, 0], length):
            kept = np.flatnonzero(answers.is_open[active])  # (n',)
            if not kept.size:
                break
            if 4 * kept.size <= 3 * len(active):
                backend.keep(state, kept)
                active, nodes, scores, rows, tokens = (array[kept] for array in (active, nodes, scores, rows, tokens))
        if tokens.shape[1] == 1:  # there is one beam, or the first token was forced: all rows go on alike
            step_input = np.repeat(tokens[:, :, None], beams, axis=1)  # (n, K, 1)
            continue
        if not read_alike and (rows != order).any():
            backend.reorder(state, rows)
        read_alike, step_input = False, tokens[:, :, None]

    # (B * N, L)
    new = tree.sequences(answers.nodes[:, :returned].ravel(), pad_token_id=backend.pad_token_id)
    given = np.repeat(request.prefix[:, 1:], returned, axis=0)
    sequences = np.concatenate([given, new], axis=1)
    return Generated(sequences, decoder_calls=length, scores=answers.scores[:, :returned].ravel())


def _counts(num_beams: Any, num_return_sequences: Any, vocab_size: int) -> tuple[int, int]:
    beams = as_count(num_beams, "num_beams", at_least=1)
    if beams >= vocab_size:
        raise InputError(f"num_beams is {beams}; give less than the vocabulary has entries, {vocab_size}.")
    returned = as_count(num_return_sequences, "num_return_sequences", at_least=1)
    if returned > beams:
        raise InputError(f"num_return_sequences is {returned}: give at most num_beams, {beams}, or raise that.")
    return beams, returned


def _penalty(value: Any, longest: int) -> float:
    most = _LARGEST_EXPONENT / math.log(max(longest, 2))
    if not is_number(value) or not abs(value) <= most:
        raise InputError(f"length_penalty is {value!r}; give a number from {-most:.1f} to {most:.1f}, 0 for none.")
    return float(value)


def _rule(value: Any) -> bool | str:
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "never"):
        raise InputError(f"early_stopping is {value!r}; give False, True or 'never'.")
    return value
