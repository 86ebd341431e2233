"""Your own examples: rows ``{"source", "target"}``, read from JSON Lines or memory, checked, and mixed by weight."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    """Sources and targets of your rows, each checked. Other fields of a row are ignored.

    Args:
        rows: dicts with the texts ``"source"``, T5's prefix included, and ``"target"``; or a UTF-8 file with one such
            JSON object a line.
        tokenizer: counts tokens; without one any length is accepted.
        longest: the most tokens that a source or a target may have.

    Raises:
        InputError: the file is missing, there are no rows, or one is wrong: not JSON, without a text, too long. The
            message names file and line.

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
    examples: Sequence[Sequence[Example]], weights: Sequence[float] | None = None, *, tokens: int = 5000,
    forbidden: Iterable[str] = (), by_teacher: bool = False,
) -> Mixture:  # fmt: skip
    """A `Mixture` that draws from several lists of examples, with replacement, one batch a step.

    Args:
        examples: the lists.
        weights: how often each list is drawn from, above 0; by default as often as it has rows.
        tokens: the most that a batch may hold, padded encoder plus padded decoder tokens.
        forbidden: sources that are never trained on.
        by_teacher: the targets were written by the teacher, as the loss "sequence" needs them.

    Raises:
        InputError: a list is empty, the number of weights differs, a weight is not above 0, or nothing is left.

    >>> mixture = mix_examples([[("a", "A")], [("b", "B")]], weights=[3, 1])
    >>> rng = random.Random(0)
    >>> sum(mixture.examples["examples"](rng) == ("a", "A") for _ in range(1000))
    760
    """
    if not examples or not all(examples):
        raise InputError("A list of examples is empty: leave it out.")
    weights = [len(rows) for rows in examples] if weights is None else list(weights)
    if len(weights) != len(examples) or not all(0 < weight < float("inf") for weight in weights):
        raise InputError(f"weights are {weights}; give a number above 0 for each of {len(examples)} lists of examples.")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise InputError(f"tokens is {tokens!r}; give an integer of 1 or more.")
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
    """A mixture as it is; rows, or a file of them, as one. Raises ``InputError`` as `read_examples`."""
    return examples if isinstance(examples, Mixture) else mix_examples([read_examples(examples, tokenizer)])


def _rows(rows: Rows) -> Iterator[tuple[str, Any]]:
    """Each row with where it is, for errors."""
    if not isinstance(rows, str | os.PathLike):
        if not isinstance(rows, Iterable):
            raise InputError(f"examples is {rows!r:.80}; give a file, or a list of rows.")
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
    """What is wrong with a row, in words; ``None`` for a good one."""
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
