"""What goes into a decoding algorithm, checked once before a backend does any work, and what comes out, step by step.

An algorithm that never takes a token back is written as a generator of steps. Put together they are its `Generated`;
handed out as they come they are a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import numpy as np

from t5accel.checks import as_batch, as_count, as_integers, check_vocabulary
from t5accel.decoding.backend import Backend, Forbidden, Generated, check_backend
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, TokenConstraints
from t5accel.errors import InputError


@dataclass(frozen=True)
class GenerationInputs:
    """A batch of sources, what every answer starts with, and how long the answers may be.

    Attributes:
        ids, mask: (B, S) int64, in memory of their own.
        prefix: (B, T) int64, T >= 1, with the start token in front.
        max_new_tokens, min_new_tokens: bounds on the number of tokens after the prefix.
        ends: the tokens that end an answer.
        rules: the model's, and what this call adds to them.
    """

    ids: np.ndarray
    mask: np.ndarray
    prefix: np.ndarray
    max_new_tokens: int
    min_new_tokens: int
    eos_token_ids: tuple[int, ...]
    rules: TokenConstraints = NO_CONSTRAINTS

    @classmethod
    def checked(
        cls,
        backend: Backend,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        max_new_tokens: int,
        min_new_tokens: int | None = None,
        decoder_input_ids: Any = None,
        forced_bos_token_id: int | None = None,
        decoder_start_token_id: int | None = None,
        methods: Collection[str] = (),
        guesses: bool = False,
    ) -> GenerationInputs:
        """The request, as `greedy.greedy` documents its arguments.

        Args:
            methods: which of the backend's methods the algorithm uses beside ``encode``, ``start`` and ``step``.
            guesses: the backend only guesses, and another model, which has rules of its own, decides.

        Raises:
            InputError: ``backend`` is no backend, a shape, type or bound is wrong, or the model's ``generation_config``
                asks for what our own loops do not apply.

        >>> class Toy:
        ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 6, 0, 5, 0
        ...     encode = start = step = None
        >>> GenerationInputs.checked(Toy(), [[3, 4], [2, 0]], max_new_tokens=8).prefix.tolist()
        [[0], [0]]
        """
        check_backend(backend, methods)
        rules = getattr(backend, "rules", NO_CONSTRAINTS)
        if not guesses:
            rules.require_supported()
        entries = getattr(backend, "source_vocab_size", backend.vocab_size)
        ids, mask = as_batch(input_ids, attention_mask, pad_token_id=backend.pad_token_id, vocab_size=entries)
        longest = as_count(max_new_tokens, "max_new_tokens", at_least=1)
        if min_new_tokens is not None and as_count(min_new_tokens, "min_new_tokens", at_least=0) > longest:
            raise InputError(f"min_new_tokens is {min_new_tokens}, more than max_new_tokens, {longest}.")
        start = _start(backend, decoder_start_token_id)
        prefix, ends = _prefix(backend, decoder_input_ids, len(ids), start), rules.eos_tokens(backend.eos_token_id)
        shortest = rules.min_new(min_new_tokens, longest=longest, prefix=prefix.shape[1])
        check_positions(backend, prefix.shape[1] + longest - 1)
        if forced_bos_token_id is not None:
            first = as_count(forced_bos_token_id, "forced_bos_token_id", at_least=0)
            if first >= backend.vocab_size or first in ends:
                raise InputError(
                    f"forced_bos_token_id is {first}; give a token below {backend.vocab_size}, and none that ends "
                    f"answers, {', '.join(map(str, ends))}."
                )
            rules = rules.with_bos(first)
        return cls(ids, mask, prefix, longest, shortest, ends, rules)

    def suppressed(self, length: int) -> Forbidden:
        """What may not be chosen behind ``length`` new tokens."""
        return self.rules.suppressed(self.eos_token_ids if length < self.min_new_tokens else ())

    def forced_token(self, length: int) -> int | None:
        """The token behind ``length`` new ones, where the model has no choice."""
        return self.rules.forced_token(length, longest=self.max_new_tokens, has_prefix=self.prefix.shape[1] > 1)


def check_positions(backend: Backend, decoder_tokens: int) -> None:
    """Raise ``InputError`` if the decoder shall read more tokens than the model has positions for.

    >>> from types import SimpleNamespace
    >>> check_positions(SimpleNamespace(positions=8), 9)
    Traceback (most recent call last):
    t5accel.errors.InputError: The decoder may have to read 9 tokens, and this model has positions for 8: ...
    """
    there = getattr(backend, "positions", None)
    if there is not None and decoder_tokens > there:
        raise InputError(
            f"The decoder may have to read {decoder_tokens} tokens, and this model has positions for {there}: give "
            "fewer max_new_tokens, or a shorter prefix."
        )


def _start(backend: Backend, given: int | None) -> int:
    if given is None:
        return backend.decoder_start_token_id
    if as_count(given, "decoder_start_token_id", at_least=0) >= backend.vocab_size:
        raise InputError(f"decoder_start_token_id must be below {backend.vocab_size}, got {given}. Give another token.")
    return given


def _prefix(backend: Backend, decoder_input_ids: Any, batch: int, start_token: int) -> np.ndarray:
    """(B, T) with the start token in front."""
    start = np.full((batch, 1), start_token, dtype=np.int64)
    if decoder_input_ids is None:
        return start
    given = as_integers(decoder_input_ids, "decoder_input_ids", rank=2)
    if len(given) != batch or not given.shape[1]:
        raise InputError(
            f"decoder_input_ids has shape {given.shape}; give one non-empty row for each of {batch} sources."
        )
    check_vocabulary(given, backend.vocab_size, "decoder_input_ids")
    has_start = (given[:, 0] == start_token).all()
    return np.array(given, order="C") if has_start else np.concatenate([start, given], axis=1)


class Step(NamedTuple):
    """What one call of the decoder added: ``tokens[i]`` goes to the end of row ``rows[i]`` of the result.

    Attributes:
        rows: (n,) int64; a row that got several tokens stands there several times, in their order.
        tokens: (n,) int64.
        drafted: how many tokens were guessed beforehand.
        accepted: how many of these turned out right, and are among the new ones.
    """

    rows: np.ndarray
    tokens: np.ndarray
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class StepStream:
    """An algorithm under way; it goes on when the next step is asked for.

    Attributes:
        given: (N, T) int64, what every row of the result starts with; not among the steps.
        pad_token_id: fills up shorter rows.
        steps: one for each call of the decoder, at least one.
    """

    given: np.ndarray
    pad_token_id: int
    steps: Iterator[Step]

    def generated(self) -> Generated:
        """All steps put together.

        >>> first = Step(np.array([0, 1]), np.array([7, 9]))
        >>> second = Step(np.array([1, 1]), np.array([5, 6]), drafted=3, accepted=1)
        >>> StepStream(np.zeros((2, 0), dtype=np.int64), 0, iter([first, second])).generated().sequences.tolist()
        [[7, 0, 0], [9, 5, 6]]
        """
        rows, tokens, drafted, accepted = zip(*self.steps, strict=True)
        flat_rows, flat_tokens = np.concatenate(rows), np.concatenate(tokens)
        counts = np.bincount(flat_rows, minlength=len(self.given))
        begin, longest = self.given.shape[1], counts.max()
        sequences = np.full((len(self.given), begin + longest), self.pad_token_id, dtype=np.int64)
        sequences[:, :begin] = self.given
        # Row by row, and within each in the order of the steps.
        sequences[:, begin:][np.arange(longest) < counts[:, None]] = flat_tokens[flat_rows.argsort(kind="stable")]
        return Generated(sequences, decoder_calls=len(rows), drafted=sum(drafted), accepted=sum(accepted))

    def chunks(self) -> Iterator[list[np.ndarray]]:
        """For each step the new tokens of every row: N arrays (n,) int64, empty where a row got none."""
        for step in self.steps:
            yield [step.tokens[step.rows == row] for row in range(len(self.given))]


def collects_steps(steps: Callable[..., StepStream]) -> Callable[..., Generated]:
    """Decorate an algorithm that returns `StepStream`: it returns their `Generated`, and ``.steps`` is what it was.

    >>> @collects_steps
    ... def forty_two(backend):
    ...     return StepStream(np.zeros((1, 0), dtype=np.int64), 0, iter([Step(np.array([0]), np.array([42]))]))
    >>> forty_two(None).sequences.tolist(), forty_two.steps(None).pad_token_id
    ([[42]], 0)
    """

    @wraps(steps)
    def generate(*arguments: Any, **options: Any) -> Generated:
        return steps(*arguments, **options).generated()

    generate.steps = steps
    return generate
