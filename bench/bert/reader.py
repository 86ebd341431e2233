"""Run a BERT reader from its checkpoint or graph: from inputs to scores, and from texts to answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from bench.bert.graphs import bound_to, fed_run
from bench.bert.model import load_bert
from bench.bert.spans import Run, answerer, torch_run
from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.models.load import load_pretrained


def open_reader(model: str, *, threads: int, bound: bool = False) -> Run:
    """A graph on ONNX Runtime, or a BERT in PyTorch, for texts of any length.

    Args:
        bound: on memory that stays, once for each length, all on one session; for one text.
    """
    if not model.endswith(".onnx"):
        import torch

        torch.set_num_threads(threads)
        return torch_run(load_bert(model)[0])
    settings = SessionSettings(threads=threads)
    if not bound:
        return fed_run(model, settings)
    session, by_length = open_session(model, settings), {}

    def run(inputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        tokens = inputs["input_ids"].shape[1]
        if tokens not in by_length:
            by_length[tokens] = bound_to(session, 1, tokens)
        return by_length[tokens](inputs)

    return run


def reader_of(
    model: str, tokenizer: str, threshold: float, *, threads: int, bound: bool = False
) -> Callable[[list[str]], list[str]]:
    """From texts of T5's task to answers; ``model`` and ``bound`` as in `open_reader`, the tokenizer by its folder."""
    from transformers import AutoTokenizer

    run = open_reader(model, threads=threads, bound=bound)
    return answerer(load_pretrained(AutoTokenizer.from_pretrained, tokenizer), run, threshold=threshold)
