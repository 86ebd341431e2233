"""Where the time of a fused step goes, by leaving parts of it out: at batch 1, in three precisions.

Four ways take turns: our greedy loop, its session alone, the session without attention, and nothing but the products
with weights. What each takes less than the one before is a part; what is left of the products over the time in which
their bytes can be read is what they compute. So the parts add up to the whole. Without attention a step's answers are
wrong, of course; that the whole step's are right is what `bench/record/fused_step.py` proves.
`data/results/step-parts.json` is a recorded run:

    python -m bench.record.step_parts --json data/results/step-parts.json
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnxruntime import OrtValue

from bench.record.fused_step import SOURCE, Encoded
from bench.results import Row, write_rows
from t5accel import machine
from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.backends.ort_static import OrtStatic
from t5accel.decoding.greedy_search import greedy
from t5accel.graphs.contract import STEP, WEIGHTS
from t5accel.graphs.export import export_model
from t5accel.graphs.export_cache import cached_export
from t5accel.roofline import step_roofline

MODEL, TOKENS = "random:t5-small", 64
PRODUCTS, ATTENTION = {"MatMul", "MatMulNBits"}, {"DecoderMaskedMultiHeadAttention", "MultiHeadAttention"}
PARTS = ("bytes", "products", "attention", "other nodes", "host")  # of a token, from the floor up


def without_attention(model: onnx.ModelProto) -> onnx.ModelProto:
    """The step whose attention finds what it asks with: its queries."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    for node in found.graph.node:
        if node.op_type in ATTENTION:
            node.CopyFrom(onnx.helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name))
    del found.graph.output[1:]
    return found


def products_only(model: onnx.ModelProto) -> onnx.ModelProto:
    """Nothing but the products with weights, each of an input of its own."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    graph, weights = found.graph, {tensor.name: tensor for tensor in found.graph.initializer}
    makes, kept, fixed = {name: node for node in graph.node for name in node.output}, [], set(weights)
    for node in graph.node:  # what is computed from weights alone, before the first run
        if node.input and fixed.issuperset(node.input):
            fixed.update(node.output)
            kept.append(node)
    del graph.input[:], graph.output[:]
    for number, node in enumerate(node for node in makes.values() if node.op_type in PRODUCTS):
        if not fixed.issuperset(node.input[1:]):
            continue
        width = _width(node, makes, weights)
        node.input[0] = f"hidden_{number}"
        graph.input.append(onnx.helper.make_tensor_value_info(node.input[0], onnx.TensorProto.FLOAT, [1, 1, width]))
        graph.output.append(onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None))
        kept.append(node)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
    del graph.node[:]
    graph.node.extend(nodes)
    return found


def _width(node: onnx.NodeProto, makes: Mapping[str, onnx.NodeProto], weights: Mapping[str, Any]) -> int:
    """How many numbers a product multiplies for each result."""
    for attribute in node.attribute:
        if attribute.name == "K":
            return attribute.i
    name, axis = node.input[1], 0
    while name not in weights:
        maker = makes[name]
        axis = 1 - axis if maker.op_type == "Transpose" else axis
        name = maker.input[0]
    return weights[name].dims[axis]


def runner(path: Path, arrays: Mapping[str, np.ndarray], settings: SessionSettings) -> Callable[[], None]:
    """One run of a graph, with everything bound: ``arrays`` by name, which are used again where two names share one."""
    session = open_session(path, settings)
    binding = session.io_binding()
    kept = [(value.name, OrtValue.ortvalue_from_numpy(arrays[value.name])) for value in session.get_inputs()]
    for name, value in kept:
        binding.bind_ortvalue_input(name, value)
    for value in session.get_outputs():
        if value.name in arrays:
            kept.append((value.name, OrtValue.ortvalue_from_numpy(arrays[value.name])))
            binding.bind_ortvalue_output(*kept[-1])
        else:
            binding.bind_output(value.name, "cpu")

    def run(kept: Any = kept) -> None:
        session.run_with_iobinding(binding)

    return run


def _in_the_middle(backend: OrtStatic, encoded: Encoded) -> tuple[Any, dict[str, np.ndarray]]:
    """A state in the middle of an answer, and by name what its step reads and writes."""
    state, tokens = backend.new_state(encoded.source), np.full((1, 1, 1), backend.decoder_start_token_id)
    for _ in range(TOKENS // 2):
        tokens = backend.next_tokens(state, tokens)[:, :, None]
    buffers = state.buffers
    buffers.length[0] = TOKENS // 2
    own = dict(zip(backend.past_names, backend._arrays(buffers), strict=True))
    return state, {
        "input_ids": buffers.tokens, "attention_mask": state.source.mask.astype(np.int32), "past_mask": buffers.mask,
        "past_length": buffers.length, "logits": buffers.results["logits"],
        **{name: state.source.inputs[name] for name in backend.cross_names},
        **own, **dict(zip(backend.outputs[1:], own.values(), strict=True)),
    }  # fmt: skip


def parts(precision: str, rounds: int, scratch: Path) -> Row:
    """One row: microseconds of a token by part, of each way's best round, as the rate of reading is the best one."""
    settings = SessionSettings(shortlist=False)
    if precision == "fp32":
        folder = scratch / "export"
        export_model(MODEL, folder, shortlist=False, step=True)
    else:
        folder = cached_export(MODEL, precision=precision)
    backend = OrtStatic(folder, settings=settings)
    ids = np.random.default_rng(1).integers(3, backend.vocab_size, (1, SOURCE))
    encoded = Encoded(backend, ids)
    state, arrays = _in_the_middle(backend, encoded)

    whole = onnx.load(folder / STEP, load_external_data=False)
    runs = {"session": lambda: backend._run_fused(state, "exact")}
    place = scratch / precision
    place.mkdir()
    shutil.copy(folder / WEIGHTS, place)
    graphs = {"no attention": without_attention(whole), "only products": products_only(whole)}
    for name, graph in graphs.items():
        onnx.save(graph, place / f"{name}.onnx")
        inputs = {
            i.name: np.ones([d.dim_value for d in i.type.tensor_type.shape.dim], np.float32)
            for i in graph.graph.input
            if i.name not in arrays
        }
        runs[name] = runner(place / f"{name}.onnx", arrays | inputs, settings)
    runs["token"] = lambda: greedy(encoded, ids, min_new_tokens=TOKENS, max_new_tokens=TOKENS)
    counts = dict.fromkeys(runs, TOKENS) | {"token": 1}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    size = step_roofline(backend.dims, precision, bandwidth=1, gemm=1).weight_bytes
    rates = []
    for _ in range(rounds + 1):  # the first one warms up
        for name, run in runs.items():
            started = time.perf_counter()
            for _ in range(counts[name]):
                run()
            samples[name].append((time.perf_counter() - started) / TOKENS)
        rates += machine.read_rates(size, 5)
        time.sleep(0.2)  # until numpy's threads have gone to sleep
    taken = {name: min(values[1:]) for name, values in samples.items()}
    read_s = size / max(rates)
    steps = [read_s, taken["only products"], taken["no attention"], taken["session"], taken["token"]]
    by_part = dict(zip(PARTS, np.diff([0.0, *(steps[i] for i in (0, 1, 3, 3, 4))]), strict=True))
    by_part |= {"other nodes": steps[2] - steps[1], "attention": steps[3] - steps[2]}
    return {
        "measured": "step parts", "model": MODEL, "precision": precision, "batch": 1, "source_tokens": SOURCE,
        "new_tokens": TOKENS, "threads": machine.cpu_threads(), "weight_bytes": size, "bytes_per_s": max(rates),
        "floor_s": read_s, "nodes": len(whole.graph.node), "us_per_token": taken["token"] * 1e6,
        "settings": {name: round(seconds * 1e6, 1) for name, seconds in by_part.items()},
    }  # fmt: skip


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with TemporaryDirectory() as scratch:
        rows = [parts(precision, arguments.rounds, Path(scratch)) for precision in ("fp32", "int8", "int4")]
    for row in rows:
        told = ", ".join(f"{name} {micros:.0f}" for name, micros in row["settings"].items())
        over = row["us_per_token"] / 1e6 / row["floor_s"]
        print(f"{row['precision']:5} {row['us_per_token']:6.0f} us a token, {over:.2f} times its floor: {told}")
    if arguments.json:
        write_rows(arguments.json, rows, command=f"python -m bench.record.step_parts --rounds {arguments.rounds}")


if __name__ == "__main__":
    main()
