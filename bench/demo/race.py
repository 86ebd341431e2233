"""Several ways of answering one text, side by side, one step at a time: who has computed least goes next.

So every step has the machine to itself, each way's time is the one that it takes alone, and what is seen is a race.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.evaluation import rows
from t5accel import machine
from t5accel.errors import InputError
from t5accel.models.prefixes import CONTEXT, QUESTION, SUMMARIZE, TRANSLATE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# What the demo and the web page offer: tasks, the fields of each, and examples that their models answer rightly.


# Ids of rows of the evaluation sets, each task's first one prefilled. The bundled models, and the readers, answer them
# as a reference does in every precision that is offered; in `WRONG` none does. A test holds both.
EXAMPLES = (
    "translation-162", "translation-118", "translation-196", "translation-167", "translation-001",
    "summaries-seen-043", "summaries-seen-005",
    "questions-seen-083", "questions-seen-048", "questions-seen-018", "questions-seen-081", "questions-seen-063",
    "questions-unseen-091",
)  # fmt: skip
WRONG = ("translation-001",)


@dataclass(frozen=True)
class Task:
    """One thing that can be asked."""

    id: str  # for programs and for people
    label: str
    language: str  # of the answer
    template: str  # the source, with the names of the fields in braces
    fields: dict[str, str]  # what a person writes, by name its label
    examples: list[dict[str, str]] = field(repr=False)  # texts for these fields
    titles: list[str] = field(repr=False)  # what a list calls the examples

    def source(self, texts: dict[str, str]) -> str:
        """What the model reads."""
        return self.template.format(**texts)


def example_tasks() -> list[Task]:
    """All tasks, with their examples."""

    def task(id_: str, label: str, language: str, template: str, name: str, **fields: str) -> Task:
        known = {row["id"]: row for row in rows(name)}
        ids = [one for one in EXAMPLES if one in known]
        # A text to translate or to summarise is the row's source.
        examples = [{field: known[one].get(field) or known[one]["source"] for field in fields} for one in ids]
        failure = " (known failure: answered wrongly)"
        firsts = [next(iter(texts.values())) for texts in examples]
        titles = [text + failure * (one in WRONG) for one, text in zip(ids, firsts, strict=True)]
        return Task(id_, label, language, template, fields, examples, titles)

    asking = QUESTION + "{question}" + CONTEXT + "{context}"
    return [
        task("translate", "Translate into French", "fr", TRANSLATE + "{text}", "translation", text="English sentence"),
        task("summarise", "Summarise", "en", SUMMARIZE + "{text}", "summaries", text="Your text"),
        task("ask", "Ask about a text", "en", asking, "questions", question="Question", context="Text"),
    ]


TRANSFORMERS = "transformers"
STUDENT_OF = {"mini": "mini-d1"}  # what comes with the package
KEPT = 8  # ways that stay in memory


@dataclass
class Progress:
    """How far a way has come: its tokens, and the seconds that it has computed, until the first one and in all."""

    tokens: list[int] = field(default_factory=list)
    first_s: float | None = None
    seconds: float = 0.0
    has_ended: bool = False

    @property
    def tokens_per_s(self) -> float:
        """Of the whole answer, its source included."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0


def interleave(
    streams: Mapping[str, Iterable[Sequence[int]]], *, clock: Callable[[], float] = time.perf_counter
) -> Iterator[dict[str, Progress]]:
    """Take new tokens from several streams, always from the one that has computed least, and say after each how far.

    Args:
        streams: by name; each gives the new tokens of a step. They are closed when the race is over, or given up.

    Returns:
        The same dictionary each time, which changes.
    """
    lanes = {name: Progress() for name in streams}
    running = {name: iter(stream) for name, stream in streams.items()}
    try:
        while running:
            name = min(running, key=lambda one: lanes[one].seconds)
            lane, started = lanes[name], clock()
            new = next(running[name], None)
            took = clock() - started
            if new is None:
                lane.has_ended = True
                del running[name]
            else:
                lane.seconds += took
                lane.tokens += new
                lane.first_s = lane.first_s or lane.seconds
            yield lanes
    finally:
        for stream in running.values():
            if hasattr(stream, "close"):
                stream.close()


def difference(expected: Sequence[int], tokens: Sequence[int]) -> str:
    """Whether two answers are the same, in words.

    >>> difference([5, 6, 1], [5, 6, 1]), difference([5, 6, 1], [5, 7, 1])
    ('the same tokens', 'other tokens from number 2 on')
    """
    if list(expected) == list(tokens):
        return "the same tokens"
    same = next((i for i, (a, b) in enumerate(zip(expected, tokens, strict=False)) if a != b), None)
    return f"other tokens from number {1 + (min(len(expected), len(tokens)) if same is None else same)} on"


@dataclass(frozen=True)
class LoadedSystem:
    """A way that is loaded and warm."""

    # ids and mask (1, S) and the most new tokens -> the new tokens of each step
    stream: Callable[[np.ndarray, np.ndarray, int], Iterator[list[int]]]
    tokenizer: Any  # of transformers, or a `TokenizerFile`
    size_bytes: int  # of its weights, graphs included


def ways_of(model: str) -> dict[str, tuple[str, str]]:
    """The ways of answering, the reference first: by label the model and the precision for `way`."""
    found = {"transformers, fp32": (model, TRANSFORMERS)}
    found |= {f"ours, {precision}": (model, precision) for precision in ("fp32", "int8")}
    if student := STUDENT_OF.get(model):
        found["student, int8"] = student, "int8"
    return found | {"ours, int4": (model, "int4")}


@lru_cache(maxsize=KEPT)
def load_system(model: str, precision: str) -> LoadedSystem:
    """Load a model, or take it from the last ones, and warm it up.

    Args:
        precision: ``"fp32"``, ``"int8"`` or ``"int4"``, by our engine; or `TRANSFORMERS`, its ``generate()`` in fp32.
    """
    from t5accel.api import open_backend
    from t5accel.decoding.streaming import stream
    from t5accel.models.load import load_model

    if precision == TRANSFORMERS:
        loaded, tokenizer = load_model(model)
        size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in loaded.parameters())

        def tokens(ids: np.ndarray, mask: np.ndarray, most: int) -> Iterator[list[int]]:
            return generate_stream(loaded, ids, mask, most)
    else:
        backend, tokenizer, _ = open_backend(model, precision=precision)
        size_bytes = backend.manifest.graph_bytes

        def tokens(ids: np.ndarray, mask: np.ndarray, most: int) -> Iterator[list[int]]:
            return (new.tolist() for (new,) in stream(backend, ids, mask, max_new_tokens=most))

    if tokenizer is None:
        raise InputError(f"{model} has no tokenizer: give a model that was saved with one.")
    batch = tokenizer(["Warm up."], return_tensors="np", padding=True)
    for _ in tokens(batch["input_ids"], batch["attention_mask"], 4):
        pass
    return LoadedSystem(tokens, tokenizer, size_bytes)


class _GivenUp(Exception):
    """Nobody asks for more tokens."""


def generate_stream(model: PreTrainedModel, ids: np.ndarray, mask: np.ndarray, most: int) -> Iterator[list[int]]:
    """The new tokens of transformers' own greedy ``generate()``, which computes only while it is asked for the next.

    Args:
        ids, mask: (1, S).
    """
    import torch
    from transformers.generation.streamers import BaseStreamer

    wanted: SimpleQueue[bool] = SimpleQueue()
    given: SimpleQueue[Any] = SimpleQueue()

    class HandOver(BaseStreamer):
        has_begun = False

        def put(self, value: Any) -> None:
            if not self.has_begun:  # the start token, which is no answer
                self.has_begun = True
                return
            given.put(value.flatten().tolist())
            if not wanted.get():
                raise _GivenUp

        def end(self) -> None: ...

    def work() -> None:
        if not wanted.get():
            return
        try:
            torch.set_num_threads(machine.cpu_threads())  # of this thread
            model.generate(
                input_ids=torch.from_numpy(np.asarray(ids)), attention_mask=torch.from_numpy(np.asarray(mask)),
                do_sample=False, num_beams=1, max_new_tokens=most, streamer=HandOver(),
            )  # fmt: skip
            given.put(None)
        except _GivenUp:
            pass
        except BaseException as error:  # the caller's, in whose thread it is raised
            given.put(error)

    Thread(target=work, daemon=True).start()
    try:
        while True:
            wanted.put(True)
            found = given.get()
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        wanted.put(False)
