"""Read, check and mix training examples ``{"source": …, "target": …}``."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5accel.checks import as_count
from t5accel.distillation.batches import Example, Mixture, Part, Phase
from t5accel.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rows = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
LONGEST = 512  # tokens, what T5 was trained on
WANTED = 'give {"source": …, "target": …}, the source with its prefix'


def read_examples(
    rows: Rows, tokenizer: PreTrainedTokenizerBase | None = None, *, longest: int = LONGEST
) -> list[Example]:
    """Read the sources and targets of rows, or of a UTF-8 file of JSON lines; other fields are ignored.

    ``longest`` is in tokens of ``tokenizer``; without one any length is accepted. Raises ``InputError`` that names file
    and line if there is no row, or one is wrong.

    >>> read_examples([{"source": "shout: hello", "target": "HELLO"}])
    [('shout: hello', 'HELLO')]
    """
    found, places = [], []
    for place, row in _rows(rows):
        problem = _problem(row)
        if problem:
            raise InputError(f"{place}: {problem}; {WANTED}.")
        found.append((row["source"], row["target"]))
        places.append(place)
    if not found:
        raise InputError(f"{rows if isinstance(rows, str | os.PathLike) else 'examples'} holds no rows; {WANTED}.")
    for field, texts in zip(("source", "target"), zip(*found, strict=True), strict=True):
        ids = tokenizer(list(texts), verbose=False)["input_ids"] if tokenizer is not None else []
        for place, tokens in zip(places, ids, strict=False):
            if len(tokens) > longest:
                raise InputError(f"{place}: the {field} has {len(tokens)} tokens, more than {longest}; shorten it.")
    return found


def mix_examples(
    examples: Sequence[Sequence[Example]],
    weights: Sequence[float] | None = None,
    *,
    tokens: int = 5000,
    forbidden: Iterable[str] = (),
    by_teacher: bool = False,
) -> Mixture:
    """A `Mixture` that draws from several lists with replacement, one batch of ``tokens`` (see `Part`) a step.

    ``weights`` are the probabilities of the lists up to a factor, by default their lengths.
    """
    if not examples or not all(examples):
        raise InputError("A list of examples is empty: leave it out.")
    weights = [len(rows) for rows in examples] if weights is None else list(weights)
    if len(weights) != len(examples) or not all(0 < weight < float("inf") for weight in weights):
        raise InputError(f"weights must be a number above 0 for each of {len(examples)} lists, got {weights}.")
    tokens = as_count(tokens, "tokens", at_least=1)
    together = [example for rows in examples for example in rows]
    each = [weight / len(rows) for weight, rows in zip(weights, examples, strict=True) for _ in rows]
    forbidden = frozenset(forbidden)
    if all(source in forbidden for source, _ in together):
        raise InputError("Every source is among those to evaluate with: give other examples to train on.")
    chances = list(accumulate(each))

    def draw(rng: random.Random) -> Example:
        return rng.choices(together, cum_weights=chances)[0]

    return Mixture({"examples": draw}, (Phase(0, (Part("examples", tokens),)),), forbidden, by_teacher=by_teacher)


def as_mixture(examples: Rows | Mixture, tokenizer: PreTrainedTokenizerBase) -> Mixture:
    """Rows, or a file of them, as a `Mixture`; a `Mixture` is returned unchanged."""
    return examples if isinstance(examples, Mixture) else mix_examples([read_examples(examples, tokenizer)])


def _rows(rows: Rows) -> Iterator[tuple[str, Any]]:
    """Yield each row with its place, for errors."""
    if not isinstance(rows, str | os.PathLike):
        if not isinstance(rows, Iterable):
            raise InputError(f"examples must be a file or a list of rows, got {rows!r:.80}.")
        yield from ((f"examples[{i}]", row) for i, row in enumerate(rows))
        return
    try:
        content = Path(rows).read_bytes()
    except OSError as error:
        raise InputError(f"{rows} cannot be read ({error.strerror}); {WANTED} on each line of a file.") from error
    # bytes are split at \n only: str.splitlines would also cut at U+2028 and its like, which JSON allows in a string
    for number, line in enumerate(content.rstrip().split(b"\n") if content.strip() else [], 1):
        try:
            yield f"{rows}, line {number}", json.loads(line)
        except ValueError as error:  # bad JSON and bad UTF-8 alike
            raise InputError(f"{rows}, line {number}: not JSON in UTF-8 ({error}); {WANTED}.") from error


def _problem(row: Any) -> str | None:
    """Describe what is wrong with a row; ``None`` for a good one."""
    if not isinstance(row, Mapping):
        return f"not an object but {row!r:.80}"
    for field in ("source", "target"):
        if field not in row:
            return f"no {field!r} among its fields {sorted(map(str, row))}"
        text = row[field]
        if not isinstance(text, str) or not text.strip():
            return f"{field!r} is {text!r:.80}, not a text"
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"{field!r} holds half of a surrogate pair"
    return None
