"""A BERT on ONNX Runtime: exported in ten lines, fused, in integers, and run from numpy or on bound memory.

The graph reads ``input_ids``, ``token_type_ids`` and ``attention_mask``, each (B, S) int64, and gives ``start_logits``
and ``end_logits``, each (B, S) float32.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.bert.spans import Run
from t5accel.backends.ort_session import SessionSettings, open_session

if TYPE_CHECKING:
    import onnxruntime
    from transformers import PreTrainedModel


# `torch.onnx.export` by tracing, without the noise that it makes in both lines of transformers.


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings, of Python or of loggers; errors are raised as ever."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def export_quietly(
    module: Any, example: tuple[Any, ...], path: str | os.PathLike[str], inputs: Sequence[str], outputs: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
) -> Path:  # fmt: skip
    """One graph of what ``module`` computes, whose sizes along ``axes`` may be any.

    It is traced (``dynamo=False``): the fusions of ONNX Runtime's tools know the patterns that tracing leaves.

    >>> import torch
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = f"{folder}/line.onnx"
    ...     export_quietly(torch.nn.Linear(2, 3), (torch.ones(1, 2),), path, ["x"], ["y"], {"x": {0: "rows"}}).name
    'line.onnx'
    """
    import torch

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with quietly(), torch.no_grad():
        torch.onnx.export(
            module.eval(), example, os.fspath(path), input_names=list(inputs), output_names=list(outputs),
            dynamic_axes={name: dict(by) for name, by in axes.items()}, opset_version=17, dynamo=False,
        )  # fmt: skip
    return Path(path)


INPUTS = ("input_ids", "token_type_ids", "attention_mask")
OUTPUTS = ("start_logits", "end_logits")
# Operators that ONNX Runtime's BERT optimiser puts in the place of many.
FUSED = ("EmbedLayerNormalization", "Attention", "MultiHeadAttention", "Gelu", "FastGelu", "BiasGelu",
         "LayerNormalization", "SkipLayerNormalization")  # fmt: skip


def export_bert(model: PreTrainedModel, path: str | os.PathLike[str]) -> Path:
    """The model as one graph, written out here in plain PyTorch: all lines of transformers export alike.

    Its nodes stand as BERT's own code first had them, which is the pattern that ONNX Runtime's fusions look for.
    """
    import torch

    config, bert = model.config, model.bert
    size = config.hidden_size // config.num_attention_heads

    def attention(layer: Any, x: Any, hidden: Any) -> Any:
        own = layer.attention.self
        heads = own.query.out_features // size
        q, k, v = (
            project(x).view(x.shape[0], x.shape[1], heads, size).permute(0, 2, 1, 3)
            for project in (own.query, own.key, own.value)
        )
        weights = (q @ k.transpose(2, 3) / size**0.5 + hidden).softmax(3)
        mixed = (weights @ v).permute(0, 2, 1, 3).reshape(x.shape[0], x.shape[1], heads * size)
        return layer.attention.output.LayerNorm(layer.attention.output.dense(mixed) + x)

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model  # whose weights become the graph's

        def forward(self, input_ids: Any, token_type_ids: Any, attention_mask: Any) -> tuple[Any, Any]:
            parts = bert.embeddings
            positions = torch.arange(config.max_position_embeddings)[None, : input_ids.shape[1]]
            x = parts.word_embeddings(input_ids) + parts.token_type_embeddings(token_type_ids)
            x = parts.LayerNorm(x + parts.position_embeddings(positions))
            hidden = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(torch.float32).min
            for layer in bert.encoder.layer:
                x = attention(layer, x, hidden)
                inner = torch.nn.functional.gelu(layer.intermediate.dense(x))
                x = layer.output.LayerNorm(layer.output.dense(inner) + x)
            start, end = model.qa_outputs(x).split(1, dim=2)
            return start.squeeze(2), end.squeeze(2)

    example = torch.ones(2, 8, dtype=torch.int64)
    axes = {name: {0: "batch", 1: "tokens"} for name in (*INPUTS, *OUTPUTS)}
    return export_quietly(Flat(), (example, example * 0, example), path, INPUTS, OUTPUTS, axes)


def fuse_bert(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> dict[str, int]:
    """ONNX Runtime's own fusions for BERTs, saved to ``out``: how many nodes of each fused operator there are then.

    How many heads a layer has is read off the graph, so layers of unequal width are fused as well.
    """
    from onnxruntime.transformers import optimizer

    with quietly(), redirect_stdout(io.StringIO()):  # it prints what it makes of each layer
        fused = optimizer.optimize_model(os.fspath(path), "bert", opt_level=0)
    fused.save_model_to_file(os.fspath(out))
    found = Counter(node.op_type for node in fused.model.graph.node)
    return {name: found[name] for name in FUSED if found[name]}


def fp16_bert(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """A fused graph in fp16 but for its inputs and outputs, by ONNX Runtime's own tool: for a GPU."""
    import onnx
    from onnxruntime.transformers.onnx_model import OnnxModel

    with quietly(), redirect_stdout(io.StringIO()):
        model = OnnxModel(onnx.load(path))
        model.convert_float_to_float16(keep_io_types=True)
        model.save_model_to_file(os.fspath(out))
    return Path(out)


def dynamic_int8(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Weights in int8, one scale for each output; activations are rounded as they come (ONNX Runtime's own tool)."""
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic

    floats = {"DefaultTensorType": TensorProto.FLOAT}  # what comes out of fused operators, which no standard knows
    with quietly():
        quantize_dynamic(path, out, per_channel=True, weight_type=QuantType.QInt8, extra_options=floats,
                         op_types_to_quantize=["MatMul", "Gemm", "Attention"])  # fmt: skip
    return Path(out)


def static_int8(
    path: str | os.PathLike[str], out: str | os.PathLike[str], batches: Iterable[Mapping[str, np.ndarray]]
) -> Path:
    """Weights and activations in int8, by the least and largest values that ``batches`` gave."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Examples(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(batches)

        def get_next(self) -> Mapping[str, np.ndarray] | None:
            return next(self.left, None)

    with quietly():
        quantize_static(
            path, out, Examples(), quant_format=QuantFormat.QDQ, per_channel=True, weight_type=QuantType.QInt8,
            activation_type=QuantType.QUInt8, op_types_to_quantize=["MatMul", "Gemm"],
        )  # fmt: skip
    return Path(out)


def fed_run(path: str | os.PathLike[str], settings: SessionSettings | None = None) -> Run:
    """ONNX Runtime fed from numpy arrays: each call makes new outputs."""
    session = open_session(path, settings or SessionSettings())
    names = [one.name for one in session.get_inputs()]

    def run(inputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        return tuple(session.run(list(OUTPUTS), {name: inputs[name] for name in names}))

    return run


def bound_to(session: onnxruntime.InferenceSession, batch: int, tokens: int) -> Run:
    """ONNX Runtime on memory that stays: inputs are written into bound arrays, outputs read from others.

    What it returns is overwritten by its next call. All calls are of (``batch``, ``tokens``); one session may be bound
    for several shapes, which share its weights.
    """
    import onnxruntime

    binding = session.io_binding()
    given = {one.name: np.zeros((batch, tokens), np.int64) for one in session.get_inputs()}
    found = {name: np.zeros((batch, tokens), np.float32) for name in OUTPUTS}
    for name, array in given.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))  # the same memory
    for name, array in found.items():
        binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))

    def run(inputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        for name, array in given.items():
            array[...] = inputs[name]
        session.run_with_iobinding(binding)
        return tuple(found.values())

    return run
