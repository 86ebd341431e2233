"""One question on one text, put to rungs of the BERT ladder: what each answers, in which time, and of which size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bench.bert.ladder import RUNGS, Readers, Rung, build, size_bytes
from bench.bert.model import PRUNED, READER, load_bert, threshold_of
from bench.bert.spans import MOST_TOKENS, Run, answers, read
from t5accel import machine
from t5accel.errors import InputError
from t5accel.metrics import UNANSWERABLE
from t5accel.timing import Candidate, Work, compare

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROUNDS = 7
# PyTorch, a graph, fused, in 8 bits; first the whole reader, then the pruned one. Left out is what does not fit a page:
# memory that stays is bound for texts of one length, static int8 takes its scales from examples, and optimum wants an
# older transformers.
SHOWN = tuple(
    sorted(
        (rung for rung in RUNGS if rung.kind in ("torch", "fed") and rung.graph != "static"),
        key=lambda rung: rung.which != "whole",
    )
)


@dataclass(frozen=True)
class OpenRung:
    """A rung that is ready to run: its model as a function, when it abstains, and its bytes, the graph included."""

    rung: Rung
    run: Run
    threshold: float
    size_bytes: int


@dataclass(frozen=True)
class Answer:
    """What a rung made of a question.

    Attributes:
        rung: which one.
        text: a span of the text, or ``"unanswerable"``.
        seconds: median of the runs of its model; finding tokens and the span takes all rungs equally long.
        ratio: how many times as fast as the first rung, the median over rounds.
        size_bytes: of its weights, the graph included.
        same: whether it is the answer of the first rung.
    """

    rung: Rung
    text: str
    seconds: float
    ratio: float
    size_bytes: int
    same: bool

    @property
    def has_answer(self) -> bool:
        """Whether it found one in the text."""
        return self.text != UNANSWERABLE


def open_rungs(
    whole: PreTrainedModel, pruned: PreTrainedModel, rungs: Sequence[Rung] = SHOWN, *, threads: int | None = None
) -> list[OpenRung]:
    """Both readers by all rungs; graphs are written, opened, and dropped.

    Args:
        whole, pruned: BERTs for questions, in fp32.
        threads: of every runtime; by default those that this process may use.

    >>> from bench.bert.model import random_bert
    >>> sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    >>> narrow = {**sizes, "layer_widths": {"heads": [1], "neurons": [8]}}
    >>> first, second = open_rungs(random_bert(sizes), random_bert(narrow), SHOWN[:2])
    >>> first.rung.name, second.rung.name, first.size_bytes < second.size_bytes  # a graph has nodes, too
    ('PyTorch', 'ONNX, whole', True)
    """
    models = {"whole": whole, "pruned": pruned}
    with TemporaryDirectory() as folder:
        readers = Readers(models, Path(folder), [], threads or machine.cpu_threads())
        return [
            OpenRung(rung, build(rung, readers, 1, 1), threshold_of(models[rung.which]), size_bytes(rung, readers))
            for rung in rungs
        ]


@cache
def bundled() -> tuple[PreTrainedTokenizerBase, list[OpenRung]]:
    """The bundled readers' tokenizer and their rungs; raises ``ModelUnavailableError`` where they are not bundled."""
    (whole, tokenizer), (pruned, _) = load_bert(READER), load_bert(PRUNED)
    return tokenizer, open_rungs(whole, pruned)


def ask(
    tokenizer: PreTrainedTokenizerBase, rungs: Sequence[OpenRung], question: str, context: str, *, rounds: int = ROUNDS
) -> list[Answer]:
    """Put a question to all rungs, and time them interleaved.

    Args:
        rungs: two or more; the first one is what the others are compared with.
        rounds: of the timing.

    Raises:
        InputError: question and text together have more tokens than a BERT has positions.
    """
    import torch

    tokens = len(tokenizer(question, context)["input_ids"])
    if tokens > MOST_TOKENS:
        raise InputError(f"Question and text have {tokens} tokens, and the readers take {MOST_TOKENS}: shorten them.")
    batch = read(tokenizer, [question], [context])
    if not batch.in_context.any():
        raise InputError("In this text there is no token that could be an answer: write words.")
    threads = machine.cpu_threads()
    torch.set_num_threads(threads)  # of this thread
    found = [answers(batch, *one.run(batch.inputs), threshold=one.threshold)[0] for one in rungs]
    work = Work(1, tokens, 1, threads=threads)
    compared = compare(
        *(Candidate(one.rung.name, lambda one=one: one.run(batch.inputs), work) for one in rungs), rounds=rounds
    )
    return [
        Answer(one.rung, text, compared.latencies[one.rung.name].median_s, compared.ratio(one.rung.name),
               one.size_bytes, text == found[0])
        for one, text in zip(rungs, found, strict=True)
    ]  # fmt: skip
