"""What a layout costs, read from its files: how many bytes, which weights stand there twice, what a step runs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx

from t5accel.errors import ExportError
from t5accel.graphs.contract import as_folder


@dataclass(frozen=True)
class LayoutSizes:
    """The row of a table of layouts.

    Attributes:
        files: bytes of each graph, and of each file of weights beside them.
        graphs: how many there are.
        weight_bytes: of all weights, as often as they are stored.
        repeated_bytes: of these, copies of a weight that another graph holds too.
        decoder_bytes: of the decoder's layers and of a head that is not the embedding, as often as they are stored.
        repeated_decoder_bytes: of these, copies.
        encoder_runs_per_step: 1 if the graph that gives the logits holds the encoder, else 0.
    """

    files: Mapping[str, int]
    graphs: int
    weight_bytes: int
    repeated_bytes: int
    decoder_bytes: int
    repeated_decoder_bytes: int
    encoder_runs_per_step: int

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(self.files.values())


def layout_sizes(folder: str | os.PathLike[str]) -> LayoutSizes:
    """Weigh the graphs in a folder, of any layout: those of `layouts.export_layout` and of `export.export_t5`.

    Weights are told by their names, which are transformers' (``decoder.block.0.…``). One that several graphs read from
    the same place of a file beside them is stored once.

    Raises:
        ExportError: there are no graphs, or one cannot be read.
        InputError: ``folder`` is no path.

    >>> from tempfile import TemporaryDirectory
    >>> from bench.baselines.layouts import export_layout
    >>> from t5accel.models.random_init import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> with TemporaryDirectory() as folder:
    ...     for layout in ("fastt5", "merged"):
    ...         _ = export_layout(model, f"{folder}/{layout}", layout)
    ...         sizes = layout_sizes(f"{folder}/{layout}")
    ...         print(layout, sizes.graphs, sizes.repeated_decoder_bytes > 0)
    fastt5 3 True
    merged 2 False
    """
    folder = as_folder(folder)
    try:
        files = {
            path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.suffix in (".onnx", ".data")
        }
        graphs = {name: onnx.load(folder / name, load_external_data=False).graph for name in files if _is_graph(name)}
    except Exception as error:  # what is no graph is an error of protobuf, which is not for us to import
        raise ExportError(f"The graphs in {folder} cannot be read: {error}") from error
    if not graphs:
        raise ExportError(f"{folder} holds no graphs: write some with export_layout or export_t5.")
    stored: dict[tuple[str, str], tuple[str, int]] = {}  # by file and place in it: a weight's name and bytes
    for file, graph in graphs.items():
        for tensor in graph.initializer:
            if "." in tensor.name:  # others are constants, which every graph counts anew
                place = {entry.key: entry.value for entry in tensor.external_data}
                where = (place["location"], place["offset"]) if place else (file, tensor.name)
                stored[where] = tensor.name, _size_bytes(tensor)
    every = list(stored.values())
    once = list(dict(every).items())
    decoder = "decoder.", "lm_head."
    return LayoutSizes(
        files=files,
        graphs=len(graphs),
        weight_bytes=_total(every),
        repeated_bytes=_total(every) - _total(once),
        decoder_bytes=_total(every, decoder),
        repeated_decoder_bytes=_total(every, decoder) - _total(once, decoder),
        encoder_runs_per_step=sum(_gives_logits(graph) and _holds(graph, "encoder.") for graph in graphs.values()),
    )


def _is_graph(file: str) -> bool:
    return file.endswith(".onnx")


def _gives_logits(graph: onnx.GraphProto) -> bool:
    return any(output.name == "logits" for output in graph.output)


def _holds(graph: onnx.GraphProto, prefix: str) -> bool:
    return any(tensor.name.startswith(prefix) for tensor in graph.initializer)


def _size_bytes(tensor: onnx.TensorProto) -> int:
    return math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def _total(weights: Iterable[tuple[str, int]], prefixes: str | tuple[str, ...] = "") -> int:
    """``str.startswith`` takes several prefixes; every name starts with the empty one."""
    return sum(size_bytes for name, size_bytes in weights if name.startswith(prefixes))
