"""The BERT ladder: one idea a rung, each with its speed, its bytes and, where the reader is a trained one, its scores.

The rungs are those of the post (prune, export, fuse, narrow numbers, bind), as a CPU has them: fp16, the post's largest
factor, is a GPU's arithmetic, and has rungs of its own there (`ON_GPU`); here bf16 and 8 bits stand in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import evaluation
from bench.bert.graphs import (
    INPUTS,
    bound_to,
    dynamic_int8,
    export_bert,
    fed_run,
    fp16_bert,
    fuse_bert,
    quietly,
    static_int8,
)
from bench.bert.model import widths
from bench.bert.spans import Run, answerer, torch_run
from bench.harness import Contender, ratio, run_comparison
from bench.results import Row, scores
from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.errors import InputError
from t5accel.graphs.rewriting import count_nodes
from t5accel.models.load import cast_model
from t5accel.parity import ParityError, assert_close
from t5accel.timing import Work

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Inputs = Mapping[str, np.ndarray]
GATE = 1.0  # points of F1 that a rung may lose
IN_TORCH = {"torch": "float32", "bf16": "bfloat16", "fp16": "float16"}  # kinds of rungs without a graph
MOST_ERROR = 0.5  # of logits that are only near: logits of another model are further off than 1


@dataclass(frozen=True)
class Readers:
    """A whole reader and a pruned one, and where their graphs are written."""

    models: Mapping[str, PreTrainedModel]  # ``"whole"`` and ``"pruned"``, in fp32
    folder: Path  # of the graphs; what is there is used again
    calibration: Sequence[Inputs]  # inputs that scales for static int8 are taken from
    threads: int  # of every runtime
    device: str = "cpu"  # where all runs, ``"cpu"`` or ``"cuda"``; the models stay on the CPU

    def graph(self, which: str, kind: str = "") -> Path:
        """The plain graph of a model, or its "fused", "fp16", "int8" or "static" copy; made when it is missing."""
        path = self.folder / f"{which}{'-' if kind else ''}{kind}" / "model.onnx"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            make: dict[str, Callable[[Path], Any]] = {
                "": lambda out: export_bert(self.models[which], out),
                "fused": lambda out: fuse_bert(self.graph(which), out),
                "fp16": lambda out: fp16_bert(self.graph(which, "fused"), out),
                "int8": lambda out: dynamic_int8(self.graph(which, "fused"), out),
                "static": lambda out: static_int8(self.graph(which), out, self.calibration),
            }
            make[kind](path)
        return path

    def settings(self) -> SessionSettings:
        """Of every session."""
        return SessionSettings(threads=self.threads, device=self.device)


@dataclass(frozen=True)
class Rung:
    """One way of running a reader."""

    name: str  # as in `bench.ladder.Rung`
    adds: str
    on: str | None
    which: str = "whole"  # ``"whole"`` or ``"pruned"``
    kind: str = "fed"  # ``"torch"``, ``"bf16"``, ``"fp16"``, ``"optimum"``, or of a graph: ``"fed"`` or ``"bound"``
    graph: str = ""  # of `Readers.graph`
    exact: bool = True  # whether it has to give the logits of its own model in fp32, within rounding; else near ones


RUNGS = (
    Rung("PyTorch", "PyTorch, fp32", None, kind="torch"),
    Rung("pruned", "pruned by movement, removed", "PyTorch", "pruned", "torch"),
    Rung("ONNX", "a graph, ONNX Runtime", "pruned", "pruned"),
    Rung("fused", "fused operators", "ONNX", "pruned", graph="fused"),
    Rung("int8", "8 bits, dynamic", "fused", "pruned", graph="int8", exact=False),
    Rung("bound", "memory that stays", "int8", "pruned", "bound", "int8", exact=False),
    # Beside the way: each idea on the whole model.
    Rung("bf16, whole", "bf16 in PyTorch", "PyTorch", kind="bf16", exact=False),
    Rung("ONNX, whole", "a graph, ONNX Runtime", "PyTorch"),
    Rung("optimum, whole", "the same by optimum", "PyTorch", kind="optimum"),
    Rung("fused, whole", "fused operators", "ONNX, whole", graph="fused"),
    Rung("bound, whole", "memory that stays", "fused, whole", kind="bound", graph="fused"),
    Rung("int8, whole", "8 bits, dynamic", "fused, whole", graph="int8", exact=False),
    Rung("static int8, whole", "8 bits, scales from examples", "fused, whole", graph="static", exact=False),
)


# Of the same, on a GPU: what fp16 is worth there.
ON_GPU = (
    Rung("PyTorch", "PyTorch, fp32", None, "pruned", "torch"),
    Rung("PyTorch, fp16", "16 bits in PyTorch", "PyTorch", "pruned", "fp16", exact=False),
    Rung("ONNX", "a graph, ONNX Runtime", "PyTorch", "pruned"),
    Rung("fused", "fused operators", "ONNX", "pruned", graph="fused"),
    Rung("fp16", "16 bits", "fused", "pruned", graph="fp16", exact=False),
)


def build(rung: Rung, readers: Readers, batch: int, tokens: int) -> Run:
    """The rung as a function from inputs to logits, for (``batch``, ``tokens``) where memory is bound.

    Raises ``InputError`` for rungs that run on the CPU alone, where the readers are for a GPU.
    """
    if readers.device != "cpu" and rung.kind in ("bound", "optimum"):
        raise InputError(f"rung must be of ON_GPU on {readers.device}, got {rung.name!r}, which runs on the CPU alone.")
    model = readers.models[rung.which]
    if rung.kind in IN_TORCH:
        dtype = IN_TORCH[rung.kind]
        same = dtype == "float32" and readers.device == "cpu"
        return torch_run(model if same else cast_model(model, dtype, readers.device))
    if rung.kind == "optimum":
        return torch_run(optimum_reader(model, readers.folder / f"{rung.which}-optimum", readers.threads))
    path = readers.graph(rung.which, rung.graph)
    if rung.kind == "bound":
        return bound_to(open_session(path, readers.settings()), batch, tokens)
    return fed_run(path, readers.settings())


def optimum_reader(model: PreTrainedModel, folder: Path, threads: int) -> Any:
    """The model as optimum's ``ORTModelForQuestionAnswering``; raises ``ImportError`` where optimum is missing."""
    import onnxruntime
    from optimum.onnxruntime import ORTModelForQuestionAnswering

    if not (folder / "model.onnx").is_file():
        with TemporaryDirectory() as plain, quietly():
            model.save_pretrained(plain)
            ORTModelForQuestionAnswering.from_pretrained(plain, export=True).save_pretrained(folder)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return ORTModelForQuestionAnswering.from_pretrained(folder, session_options=options)


def size_bytes(rung: Rung, readers: Readers) -> int:
    """Of the weights as this rung reads them, the graph included."""
    model = readers.models[rung.which]
    if rung.kind in IN_TORCH:
        width = 4 if rung.kind == "torch" else 2
        return sum(parameter.numel() for parameter in model.parameters()) * width
    if rung.kind == "optimum":
        return sum(file.stat().st_size for file in (readers.folder / f"{rung.which}-optimum").glob("*.onnx*"))
    return sum(file.stat().st_size for file in readers.graph(rung.which, rung.graph).parent.iterdir())


def random_inputs(vocabulary: int, batch: int, tokens: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Tokens without padding, a question of 16 and a text: what length costs does not depend on what they say.

    >>> random_inputs(50, 1, 8)["token_type_ids"].tolist()
    [[0, 0, 0, 0, 1, 1, 1, 1]]
    """
    ids = np.random.default_rng(seed).integers(4, vocabulary, (batch, tokens))
    kinds = np.repeat((np.arange(tokens) >= min(16, tokens // 2))[None], batch, 0).astype(np.int64)
    return dict(zip(INPUTS, (ids, kinds, np.ones_like(ids)), strict=True))


def speed_rows(
    rungs: Sequence[Rung], readers: Readers, *, model: str, batch: int, tokens: int, rounds: int = 5,
    keep_going: bool = False, atol: float = 2e-3,
) -> list[Row]:  # fmt: skip
    """Every rung proved and timed on the same random tokens, interleaved: rows with ``factor`` over the rung below.

    Args:
        rungs: the first one is the reference of times, the first one of each model that of its logits; each ``on`` must
            be among them, or the row has no factor.
        atol: how far logits of an exact rung may be from its model's, and those on bound memory from the same graph's.
    """
    vocabulary = next(iter(readers.models.values())).config.vocab_size
    given = random_inputs(vocabulary, batch, tokens)
    first: dict[str, np.ndarray] = {}  # logits by model
    found: dict[str, np.ndarray] = {}  # logits by rung
    errors: dict[str, float] = {}

    def check(rung: Rung, logits: np.ndarray) -> None:
        found[rung.name], expected = logits, first.setdefault(rung.which, logits)
        if rung.exact:
            assert_close(logits, expected, atol=atol)
        if rung.kind == "bound" and rung.on in found:
            assert_close(logits, found[rung.on], atol=atol)
        error = errors[rung.name] = float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))
        if not error <= MOST_ERROR:  # NaN is not near either
            raise ParityError(f"The logits of {rung.name!r} are off by {error:.2f} of their norm.")

    def way(rung: Rung) -> Contender:
        def built() -> Callable[[], np.ndarray]:
            run = build(rung, readers, batch, tokens)

            def once() -> np.ndarray:
                logits = np.stack(run(given))
                if rung.name not in found:  # the first call, which is not timed
                    check(rung, logits)
                return logits

            return once

        return Contender(rung.name, built, exact=False, facts=facts(rung, readers))

    import torch

    torch.set_num_threads(readers.threads)
    work = Work(batch, tokens, 1, threads=readers.threads)
    cell = f"{model}, {batch} × {tokens}"
    rows = run_comparison(
        [way(rung) for rung in rungs], work, rounds=rounds, atol=atol, keep_going=keep_going, model=model, cell=cell,
        new_tokens=None, forced=None, beams=None,
    )  # fmt: skip
    times = {row["system"]: row["latency_s"] for row in rows if "latency_s" in row}
    for rung, row in zip(rungs, rows, strict=True):
        row |= {"rung": rung.name, "adds": rung.adds, "exact": rung.exact}
        if rung.on:
            row["on"] = rung.on
        if "latency_s" not in row:  # it failed, or there was nothing left to compare it with
            continue
        if not rung.exact:
            row |= {"error": errors[rung.name], "allowed_error": MOST_ERROR}
        row["size_bytes"] = size_bytes(rung, readers)
        row["tokens_per_s"] = batch * tokens / float(np.median(row["latency_s"]))
        if rung.on in times:
            row |= ratio(times[rung.on], times[rung.name], "factor")
    return rows


def facts(rung: Rung, readers: Readers) -> dict[str, Any]:
    """What a rung's row says of its graph."""
    backend = "torch" if rung.kind in IN_TORCH else "optimum" if rung.kind == "optimum" else "onnxruntime"
    of_graph = {"int8": "int8", "static": "static int8", "fp16": "fp16"}.get(rung.graph, "fp32")
    precision = rung.kind if rung.kind in ("bf16", "fp16") else of_graph
    found: dict[str, Any] = {"precision": precision, "backend": backend, "settings": {"reader": rung.which}}
    if rung.which == "pruned":
        left, all_ = widths(readers.models["pruned"]), widths(readers.models["whole"])
        found["settings"] |= {f"{kind}_left": sum(left[kind]) / sum(all_[kind]) for kind in left}
    if rung.kind in ("fed", "bound"):
        found["nodes"] = sum(count_nodes(readers.graph(rung.which, rung.graph)).values())
    return found


def quality_rows(
    rungs: Sequence[Rung], readers: Readers, tokenizer: PreTrainedTokenizerBase, thresholds: Mapping[str, float], *,
    model: str, limit: int | None = None, keep_going: bool = False,
) -> list[Row]:  # fmt: skip
    """The scores of every rung on the course's questions, and whether it loses no more F1 than the gate allows.

    Args:
        thresholds: of ``"whole"`` and ``"pruned"``, as they were chosen in fp32.
    """
    rows: list[Row] = []
    for rung in rungs:
        row: Row = {"measured": "quality", "model": model, "task": "questions", "system": rung.name, "rung": rung.name}
        row |= facts(rung, readers)
        try:
            fed = replace(rung, kind="fed") if rung.kind == "bound" else rung  # batches differ in size: the same graph
            run = build(fed, readers, 1, 1)
            answer = answerer(tokenizer, run, threshold=thresholds[rung.which])
            report = evaluation.evaluate(answer, names=["questions"], limit=limit)
        except Exception as error:
            if not keep_going:
                raise
            rows.append({**row, "failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"})
            continue
        row |= scores(report.to_json()) | {"size_bytes": size_bytes(rung, readers)}
        rows.append(row)
    first = next((row for row in rows if "f1" in row), None)
    for row in rows:
        if first is not None and "f1" in row:
            row["inside"] = first["f1"] - row["f1"] <= GATE
            row["settings"] = {**row["settings"], "max_loss_f1": GATE}
    return rows
