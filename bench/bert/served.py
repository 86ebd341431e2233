"""A BERT reader behind FastAPI: requests one after the other, by length, and at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.bert.spans import CLS, PAD, SEP, UNK, as_berts
from bench.results import Row
from bench.serving.load import ask
from bench.serving.rates import offered, one_by_one
from bench.serving.servers import Running, Server, kind_command
from t5accel.errors import InputError
from t5accel.models.prefixes import CONTEXT, QUESTION
from t5accel.parity import ParityError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION_WORDS, MARKS = 5, 3  # [CLS] and two [SEP]
COMPARED = 3  # answers of each length


def numbered(vocabulary: int) -> PreTrainedTokenizerBase:
    """A tokenizer for random weights, whose words are the numbers of the tokens.

    >>> numbered(50)("t7", "t9 t11").input_ids
    [2, 7, 3, 9, 11, 3]
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = [PAD, UNK, CLS, SEP]
    words = special + [f"t{number}" for number in range(len(special), vocabulary)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return as_berts(tokenizer)


def asked_of(words: Sequence[str], tokens: int, *, seed: int = 0) -> str:
    """A question and a text of random words, of so many tokens in all if each word is one."""
    drawn = np.random.default_rng([tokens, seed]).choice(words, tokens - MARKS)
    return QUESTION + " ".join(drawn[:QUESTION_WORDS]) + CONTEXT + " ".join(drawn[QUESTION_WORDS:])


def single_words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Those of a tokenizer that are one token each."""
    return sorted(word for word in tokenizer.get_vocab() if word.isalnum())


@dataclass(frozen=True)
class Served:
    """A server, and what its answers have to be."""

    name: str  # as rows have it
    model: str  # as in `open_reader`
    tokenizer: str  # a folder
    threshold: float  # as in `spans.answers`
    # the answers that it has to give, from the same graph or an equal one, on another way
    answer: Callable[[list[str]], list[str]]
    bound: bool = False
    precision: str = "fp32"  # as rows have it

    def server(self, threads: int) -> Server:
        """Its process."""
        command = kind_command("bert", self.model, threads=threads)
        command += [f"--tokenizer={self.tokenizer}", f"--threshold={self.threshold}"]
        return Server(self.name, command + ["--bound"] * self.bound, precision=self.precision)


@dataclass(frozen=True)
class Protocol:
    """How much is asked: the post's random requests, so many for each length, then the open loop over all lengths."""

    lengths: Sequence[int] = (32, 64, 128, 256, 512)  # tokens of question and text
    requests: int = 50  # one after the other, of each length
    seconds: float = 10.0  # of the open loop
    load: float = 0.6  # of the open loop, as a share of what the first server can answer one by one


def served_rows(
    served: Sequence[Served], words: Sequence[str], protocol: Protocol, *, threads: int, logs: Path,
    stories: Sequence[str] = (), **facts: Any,
) -> list[Row]:  # fmt: skip
    """Every server by itself: its answers compared, then timed by length, then under the same load as the others.

    Args:
        served: the first one is the reference, whose speed sets the rate of the open loop.
        stories: texts whose answers are compared as well: a trained reader finds none in random words.
    """
    bodies = {
        length: [{"text": asked_of(words, length, seed=seed)} for seed in range(protocol.requests)]
        for length in protocol.lengths
    }
    texts = [*stories, *(body["text"] for of_length in bodies.values() for body in of_length[:COMPARED])]
    expected = {answer: [answer([text])[0] for text in texts] for answer in {one.answer for one in served}}
    first = expected[served[0].answer]
    if len({*first}) < 2:
        raise InputError(f"All answers of {served[0].name!r} are {first[0]!r}: nothing can be compared.")
    rows: list[Row] = []
    for one in served:
        about = {**facts, "system": one.name, "precision": one.precision, "threads": threads}
        with Running(one.server(threads), logs / f"{one.name.replace(' ', '-')}.log") as running:
            url = running.url + running.server.path
            found = [ask(url, {"text": text})[0] for text in texts]
            wrong = sum(text != right for text, right in zip(found, expected[one.answer], strict=True))
            if wrong:
                raise ParityError(f"{one.name}: {wrong} of {len(found)} answers are not those of its model.")
            equal = sum(text == right for text, right in zip(found, first, strict=True))
            new: list[Row] = [
                {"measured": "equality", "equal": equal, "of": len(found), "distinct": len({*first})},
                *({**one_by_one(running, bodies[length]), "source_tokens": length} for length in protocol.lengths),
            ]
            if not rows:
                means = [row["mean_s"] for row in new if row["measured"] == "sequential"]
                rate = protocol.load * len(means) / sum(means)
            mixed = [body for of_length in bodies.values() for body in of_length]
            row = offered(running, mixed, limit_s=5 / rate, rate_per_s=rate, seconds=protocol.seconds)
            del row["tokens_per_s"]  # of spans nobody counts them
            rows += [{**row, **about} for row in (*new, row)]
    return rows
