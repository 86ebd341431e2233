"""Read examples, mix tasks by a curriculum, and pack seeded batches of equal cost.

The steps of a block follow from (seed, block number) alone: a resumed run sees the batches of an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5accel.checks import as_count
from t5accel.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Example = tuple[str, str]  # source, prefix included, and target
Draw = Callable[[random.Random], Example]
Encode = Callable[[list[str]], list[list[int]]]
Batch = tuple[list[list[int]], list[list[int]]]  # token ids of sources and of targets
TaskBatch = tuple[str, Batch]  # with the name of its task
Rows = str | os.PathLike[str] | Iterable[Mapping[str, Any]]  # {"source": …, "target": …}, or a file of such lines

LONGEST = 512  # tokens, what T5 was trained on
_FORMAT = 'Give {"source": …, "target": …}, the source with its prefix'


@dataclass(frozen=True)
class TaskShare:
    """One task's share of a step."""

    task: str
    tokens: int  # most per batch, padded encoder plus padded decoder tokens
    per_step: float = 1  # batches per step; 0.5 is one in every second step on average
    weight: float | None = None  # of a batch's mean loss against the other batches; None counts every label alike


@dataclass(frozen=True)
class Phase:
    """Parts of every step from ``from_step`` on: the first part once, the others ``per_step`` times."""

    from_step: int
    parts: tuple[TaskShare, ...]
    dropout: float | None = None  # replaces the run's own

    def weights(self, batches: list[TaskBatch]) -> tuple[float, ...]:
        """One weight for each batch of a step; they sum to 1."""
        weight = {part.task: part.weight for part in self.parts}
        raw = [sum(map(len, targets)) if weight[task] is None else weight[task] for task, (_, targets) in batches]
        return tuple(value / sum(raw) for value in raw)


@dataclass(frozen=True)
class WeightedDraw:
    """Draws an example by the running sums of all examples' weights."""

    examples: Sequence[Example]
    sums: Sequence[float]

    def __call__(self, rng: random.Random) -> Example:
        return rng.choices(self.examples, cum_weights=self.sums)[0]


@dataclass(frozen=True)
class Mixture:
    """Examples by task, and the curriculum that mixes them."""

    examples: Mapping[str, Sequence[Example] | Draw]  # by task: a list to draw from, or a function that draws one
    curriculum: tuple[Phase, ...]  # from steps 0 < … , multiples of steps_per_block
    excluded_sources: frozenset[str] = frozenset()  # sources never trained on, such as those of the evaluation sets
    steps_per_block: int = 50
    by_teacher: bool = False  # the targets of lists were written by the teacher, as the loss "sequence" needs

    def __post_init__(self) -> None:
        starts = [phase.from_step for phase in self.curriculum]
        if starts[:1] != [0] or starts != sorted(set(starts)) or any(start % self.steps_per_block for start in starts):
            raise InputError(
                f"curriculum must have phases from 0 and rising multiples of {self.steps_per_block}, got {starts}."
            )
        for phase in self.curriculum:
            if phase.parts[0].per_step != 1:
                raise InputError(f"per_step of a phase's first part must be 1, got {phase.parts[0].per_step}.")

    def phase(self, step: int) -> Phase:
        return [phase for phase in self.curriculum if phase.from_step <= step][-1]

    def digest(self, encode: Encode, seed: int) -> str:
        """A hash of all that decides about batches; of a function that draws, by each phase's first block."""
        found = hashlib.sha256(repr((self.curriculum, self.steps_per_block)).encode())
        for task, given in self.examples.items():
            weighted = isinstance(given, WeightedDraw)
            found.update(repr((task, given.sums if weighted else None)).encode())
            rows = given.examples if weighted else () if callable(given) else given
            for row in rows:
                if row[0] not in self.excluded_sources:
                    found.update(repr(row).encode())
        for phase in self.curriculum:  # encoded: another tokenizer gives others
            block = draw_block(self, encode, seed, phase.from_step // self.steps_per_block)
            found.update(repr(list(block)).encode())
        return found.hexdigest()

    def with_teacher_outputs(self, texts: Mapping[str, Sequence[Example]]) -> Mixture:
        return replace(self, examples={**self.examples, **texts}, by_teacher=True)


def pack(sources: list[list[int]], targets: list[list[int]], tokens: int) -> list[Batch]:
    """Cut examples, sorted by length, into batches of at most ``tokens`` padded tokens (encoder + decoder).

    >>> [len(source) for source, _ in pack([[1]] * 4, [[1, 1]] * 4, tokens=6)]
    [2, 2]
    """
    order = sorted(range(len(sources)), key=lambda i: (len(sources[i]), len(targets[i])))
    groups: list[list[int]] = []
    longest_source = longest_target = 0
    for i in order:
        longest_source = max(longest_source, len(sources[i]))
        longest_target = max(longest_target, len(targets[i]))
        if not groups or (longest_source + longest_target) * (len(groups[-1]) + 1) > tokens:
            groups.append([])
            longest_source, longest_target = len(sources[i]), len(targets[i])
        groups[-1].append(i)
    return [([sources[i] for i in group], [targets[i] for i in group]) for group in groups]


def encode_and_pack(examples: Sequence[Example], encode: Encode, tokens: int) -> list[Batch]:
    """Tokenise examples and `pack` them."""
    return pack(encode([source for source, _ in examples]), encode([target for _, target in examples]), tokens)


def read_examples(
    rows: Rows, tokenizer: PreTrainedTokenizerBase | None = None, *, longest: int = LONGEST
) -> list[Example]:
    """Read the sources and targets of rows, or of a UTF-8 file of JSON lines; other fields are ignored.

    ``longest`` is in tokens of ``tokenizer``; without one any length is accepted. ``InputError`` names file and line.

    >>> read_examples([{"source": "shout: hello", "target": "HELLO"}])
    [('shout: hello', 'HELLO')]
    """
    found, places = [], []
    for place, row in _rows(rows):
        problem = _problem(row)
        if problem:
            raise InputError(f"{place}: {problem}. {_FORMAT}.")
        found.append((row["source"], row["target"]))
        places.append(place)
    if not found:
        raise InputError(f"{rows if isinstance(rows, str | os.PathLike) else 'examples'} holds no rows. {_FORMAT}.")
    for field, texts in zip(("source", "target"), zip(*found, strict=True), strict=True):
        ids = tokenizer(list(texts), verbose=False)["input_ids"] if tokenizer is not None else []
        for place, tokens in zip(places, ids, strict=False):
            if len(tokens) > longest:
                raise InputError(f"{place}: the {field} has {len(tokens)} tokens, more than {longest}. Shorten it.")
    return found


def mix_examples(
    examples: Sequence[Sequence[Example]],
    weights: Sequence[float] | None = None,
    *,
    tokens: int = 5000,
    excluded_sources: Iterable[str] = (),
    by_teacher: bool = False,
) -> Mixture:
    """A `Mixture` that draws from several lists with replacement, one batch of ``tokens`` (see `TaskShare`) a step.

    ``weights`` are the probabilities of the lists up to a factor, by default their lengths.
    """
    if not examples or not all(examples):
        raise InputError("examples must hold no empty list. Leave it out.")
    weights = [len(rows) for rows in examples] if weights is None else list(weights)
    if len(weights) != len(examples) or not all(0 < weight < float("inf") for weight in weights):
        raise InputError(f"weights must be a number above 0 for each of {len(examples)} lists, got {weights}.")
    tokens = as_count(tokens, "tokens", at_least=1)
    together = [example for rows in examples for example in rows]
    each = [weight / len(rows) for weight, rows in zip(weights, examples, strict=True) for _ in rows]
    excluded = frozenset(excluded_sources)
    if all(source in excluded for source, _ in together):
        raise InputError("Every source is among those to evaluate with. Give other examples to train on.")
    draw = WeightedDraw(together, list(accumulate(each)))
    return Mixture({"examples": draw}, (Phase(0, (TaskShare("examples", tokens),)),), excluded, by_teacher=by_teacher)


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
        raise InputError(f"{rows} cannot be read ({error.strerror}). {_FORMAT} on each line of a file.") from error
    # bytes are split at \n only: str.splitlines would also cut at U+2028 and its like, which JSON allows in a string
    for number, line in enumerate(content.rstrip().split(b"\n") if content.strip() else [], 1):
        try:
            yield f"{rows}, line {number}", json.loads(line)
        except ValueError as error:  # bad JSON and bad UTF-8 alike
            raise InputError(f"{rows}, line {number}: not JSON in UTF-8 ({error}). {_FORMAT}.") from error


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


def draw_batches(
    example: Callable[[], Example],
    encode: Encode,
    tokens: int,
    count: int,
    excluded_sources: frozenset[str],
    rng: random.Random,
) -> list[Batch]:
    """Draw ``count`` shuffled batches of one task, without ``excluded_sources``."""
    batches: list[Batch] = []
    while len(batches) < count:
        examples = [e for e in (example() for _ in range(64 * count)) if e[0] not in excluded_sources]
        if not examples:
            raise InputError(f"All {64 * count} examples drawn are in the evaluation sets. Give others.")
        batches += encode_and_pack(examples, encode, tokens)
    rng.shuffle(batches)
    return batches[:count]


def draw_block(mixture: Mixture, encode: Encode, seed: int, number: int) -> Iterator[list[TaskBatch]]:
    """Yield the steps of block ``number``: a batch of the phase's first part, and the others dealt out evenly."""
    rng = random.Random(f"{seed}/{number}")
    steps = mixture.steps_per_block
    first, *rest = mixture.phase(number * steps).parts

    def draw(part: TaskShare) -> list[TaskBatch]:
        given = mixture.examples[part.task]
        example = partial(given, rng) if callable(given) else partial(rng.choice, given)
        found = draw_batches(example, encode, part.tokens, round(steps * part.per_step), mixture.excluded_sources, rng)
        return [(part.task, batch) for batch in found]

    leading = draw(first)
    others = [batch for part in rest for batch in draw(part)]
    rng.shuffle(others)
    for i, batch in enumerate(leading):
        yield [batch, *others[i::steps]]


def steps_from(mixture: Mixture, encode: Encode, seed: int, step: int) -> Iterator[list[TaskBatch]]:
    """Yield the batches of steps ``step``, ``step + 1``, … without end."""
    number, offset = divmod(step, mixture.steps_per_block)
    while True:
        yield from islice(draw_block(mixture, encode, seed, number), offset, None)
        number, offset = number + 1, 0
