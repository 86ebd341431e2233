"""Validated inputs of a decoding algorithm, and its output as a stream of steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, ParamSpec

import numpy as np

from t5accel.checks import as_batch, as_count, as_integers, check_vocabulary
from t5accel.decoding.backend import Backend, Generated, SuppressedTokens, check_backend
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, TokenConstraints
from t5accel.errors import InputError

Options = ParamSpec("Options")


@dataclass(frozen=True)
class GenerationInputs:
    """A batch of sources, the prefix of each output, length bounds and token constraints.

    >>> class Toy:
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 6, 0, 5, 0
    ...     encode = new_state = step = None
    >>> GenerationInputs.checked(Toy(), [[3, 4], [2, 0]], max_new_tokens=8).prefix.tolist()
    [[0], [0]]
    """

    ids: np.ndarray  # (B, S) int64, own memory
    mask: np.ndarray  # (B, S) int64
    prefix: np.ndarray  # (B, T) int64, T >= 1, begins with the start token
    max_new_tokens: int  # tokens after the prefix
    min_new_tokens: int
    eos_token_ids: tuple[int, ...]
    rules: TokenConstraints = NO_CONSTRAINTS  # the model's and this call's

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
        drafts_only: bool = False,
    ) -> GenerationInputs:
        """Validate the arguments of `greedy`, and that the backend has ``methods``; raises ``InputError``.

        With ``drafts_only`` this model's unsupported constraints do not matter: another model verifies its tokens.
        """
        check_backend(backend, methods, "draft" if drafts_only else "backend")
        rules = getattr(backend, "rules", NO_CONSTRAINTS)
        if not drafts_only:
            rules.require_supported()
        eos_token_ids = rules.eos_tokens(backend.eos_token_id)
        # As in transformers, a pad id that ends sequences, too, hides no token.
        pad = -1 if backend.pad_token_id in eos_token_ids else backend.pad_token_id
        source_vocabulary = getattr(backend, "source_vocab_size", backend.vocab_size)
        ids, mask = as_batch(input_ids, attention_mask, pad_token_id=pad, vocab_size=source_vocabulary)
        bounds = (max_new_tokens, min_new_tokens, forced_bos_token_id, decoder_start_token_id)
        longest, start = checked_bounds(backend, *bounds)
        prefix = _prefix(backend, decoder_input_ids, len(ids), start)
        shortest = rules.min_new(min_new_tokens, longest=longest, prefix=prefix.shape[1])
        check_positions(backend, prefix.shape[1] + longest - 1)
        rules = rules.with_bos(forced_bos_token_id)
        return cls(ids, mask, prefix, longest, shortest, eos_token_ids, rules)

    def suppressed(self, length: int) -> SuppressedTokens:
        """The tokens that must not follow ``length`` new tokens."""
        return self.rules.suppressed(self.eos_token_ids if length < self.min_new_tokens else ())

    def forced_token(self, length: int) -> int | None:
        """The token that must follow ``length`` new tokens, if the model has no choice."""
        return self.rules.forced_token(length, longest=self.max_new_tokens, has_prefix=self.prefix.shape[1] > 1)


def checked_bounds(
    backend: Backend,
    max_new_tokens: int,
    min_new_tokens: int | None = None,
    forced_bos_token_id: int | None = None,
    decoder_start_token_id: int | None = None,
) -> tuple[int, int]:
    """The most new tokens and the start token of an output; raises ``InputError``."""
    longest = as_count(max_new_tokens, "max_new_tokens", at_least=1)
    if min_new_tokens is not None and as_count(min_new_tokens, "min_new_tokens", at_least=0) > longest:
        raise InputError(f"min_new_tokens must be at most max_new_tokens, {longest}, got {min_new_tokens}.")
    start = backend.decoder_start_token_id
    if decoder_start_token_id is not None:
        start = as_count(decoder_start_token_id, "decoder_start_token_id", at_least=0)
        if start >= backend.vocab_size:
            raise InputError(f"decoder_start_token_id must be below {backend.vocab_size}, got {start}.")
    if forced_bos_token_id is not None:
        first = as_count(forced_bos_token_id, "forced_bos_token_id", at_least=0)
        ends = getattr(backend, "rules", NO_CONSTRAINTS).eos_tokens(backend.eos_token_id)
        if first >= backend.vocab_size or first in ends:
            raise InputError(
                f"forced_bos_token_id must be a token below {backend.vocab_size} and no end token "
                f"({', '.join(map(str, ends))}), got {first}. Give another token."
            )
    return longest, start


def check_positions(backend: Backend, decoder_tokens: int) -> None:
    """Raise ``InputError`` if the decoder has too few positions."""
    positions = getattr(backend, "positions", None)
    if positions is not None and decoder_tokens > positions:
        raise InputError(
            f"The decoder may have to read {decoder_tokens} tokens, and this model has positions for {positions}. Give "
            "fewer max_new_tokens, or a shorter prefix."
        )


def _prefix(backend: Backend, decoder_input_ids: Any, batch: int, start_token: int) -> np.ndarray:
    start = np.full((batch, 1), start_token, dtype=np.int64)
    if decoder_input_ids is None:
        return start
    given = as_integers(decoder_input_ids, "decoder_input_ids", rank=2)
    if len(given) != batch or not given.shape[1]:
        raise InputError(
            f"decoder_input_ids must have one non-empty row for each of {batch} sources, got shape {given.shape}."
        )
    check_vocabulary(given, backend.vocab_size, "decoder_input_ids")
    has_start = given[:, 0] == start_token
    if has_start.any() and not has_start.all():
        raise InputError(f"decoder_input_ids must begin with the start token, {start_token}, in all rows or in none.")
    return np.array(given, order="C") if has_start.all() else np.concatenate([start, given], axis=1)


class Step(NamedTuple):
    """The new tokens of one decoder call."""

    rows: np.ndarray  # (n,) int64, the row of the result of each token; repeated for several tokens, in their order
    tokens: np.ndarray  # (n,) int64
    drafted: int = 0  # tokens proposed before this call
    accepted: int = 0  # proposed tokens among the new ones


@dataclass(frozen=True)
class StepStream:
    """A running algorithm; it continues when the next step is requested."""

    given: np.ndarray  # (N, T) int64, the first tokens of each row of the result; not among the steps
    pad_token_id: int
    steps: Iterator[Step]  # one for each decoder call, at least one

    def generated(self) -> Generated:
        """Run to the end and assemble the sequences."""
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
        """Yield each step's new tokens of all N rows, possibly empty."""
        for step in self.steps:
            yield [step.tokens[step.rows == row] for row in range(len(self.given))]


def collects_steps(steps: Callable[Options, StepStream]) -> Callable[Options, Generated]:
    """Decorate an algorithm that returns a `StepStream` to return `Generated`; ``.steps`` is the original."""

    @wraps(steps)
    def generate(*arguments: Options.args, **options: Options.kwargs) -> Generated:
        return steps(*arguments, **options).generated()

    generate.steps = steps  # type: ignore[attr-defined]
    return generate
