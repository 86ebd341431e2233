"""Where the time of a graph goes, node by node, as ONNX Runtime's own profiler sees it."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.checks import as_count
from t5accel.errors import ExportError, InputError
from t5accel.graphs.contract import decoder_spec, names
from t5accel.graphs.layers import decoder_graph, encoder_graph
from t5accel.graphs.ort_levels import import_onnxruntime
from t5accel.graphs.weights import T5Weights
from t5accel.models.sizes import T5Dims
from t5accel.timing import measure

KERNEL = "_kernel_time"  # the end of the names of a node's own events; older releases (1.20) have others as well
# Their time is that of the nodes inside them, which are listed, too.
CONTAINERS = {"If", "Loop", "Scan"}


@dataclass(frozen=True)
class GraphProfile:
    """Medians over several runs.

    Attributes:
        run_s: a whole run, when nobody measures its nodes.
        nodes: by the node's name its operator (without the name of its set) and its seconds, in the order of running.
    """

    run_s: float
    nodes: Mapping[str, tuple[str, float]]

    @property
    def by_type(self) -> dict[str, float]:
        """Seconds for each operator, the longest first."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for operator, node_s in self.nodes.values():
            seconds[operator] += node_s
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    @property
    def between_s(self) -> float:
        """What is left of a run: going from one node to the next. Each is measured in whole microseconds, rounded."""
        return self.run_s - sum(node_s for _, node_s in self.nodes.values())


def profile_graph(
    path: str | os.PathLike[str],
    feeds: Mapping[str, np.ndarray],
    *,
    settings: SessionSettings | None = None,
    runs: int = 50,
) -> GraphProfile:
    """Run a graph with ONNX Runtime's profiler, and without.

    The profiler writes down so much about each node that a run of hundreds of small ones takes twice as long or more.
    That is no node's time; what a run really takes is measured apart.

    Args:
        path: the graph.
        feeds: its inputs by name; for a decoder, `step_feeds` makes some.
        settings: of the session, with its level of graph optimisation.
        runs: with the profiler, and as many without it; before each, a tenth as many that do not count.

    Raises:
        ExportError: the file is no graph that can be run, or there is no space for the profile.
        InputError: the feeds are not the graph's inputs, or another argument is wrong.
        MissingPackageError: onnxruntime is not installed, or not the one for this device.

    >>> from t5accel.graphs.export import export_t5
    >>> with TemporaryDirectory() as folder:
    ...     feeds = step_feeds(export_t5("mini", f"{folder}/mini").dims)
    ...     profile = profile_graph(f"{folder}/mini/decoder.onnx", feeds, settings=SessionSettings(threads=1), runs=5)
    >>> list(profile.by_type)[0], sum(operator == "Softmax" for operator, _ in profile.nodes.values())
    ('MatMul', 8)
    """
    as_count(runs, "runs", at_least=1)
    warmup = 1 + runs // 10
    try:
        with TemporaryDirectory() as folder:
            session = open_session(path, settings or SessionSettings(), profile=Path(folder) / "run")
            try:
                for _ in range(warmup + runs):
                    session.run(None, dict(feeds))
            except Exception as error:  # of several kinds, none of them documented
                raise InputError(f"{path} cannot be run on these feeds: {error}") from error
            finally:
                file = session.end_profiling()  # for good: from here on it runs undisturbed
            events = json.loads(Path(file).read_text(encoding="utf-8"))
    except ExportError:
        raise
    except OSError as error:
        raise ExportError(f"The profile of {path} could not be written: {error}") from error
    latency = measure(lambda: session.run(None, dict(feeds)), warmup=warmup, repeats=runs)
    starts = [event["ts"] for event in events if event["name"] == "model_run"]
    by_run: list[Counter[tuple[str, str]]] = [Counter() for _ in starts]
    for event in events:
        name, operator = event["name"], event["args"].get("op_name")
        if name.endswith(KERNEL) and operator not in CONTAINERS:
            by_run[bisect_right(starts, event["ts"]) - 1][name.removesuffix(KERNEL), operator] += event["dur"]
    samples: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for run in by_run[warmup:]:
        for node, micros in run.items():
            samples[node].append(micros / 1e6)
    return GraphProfile(
        run_s=latency.median_s,
        nodes={name: (operator, median(seconds)) for (name, operator), seconds in samples.items()},
    )


def step_feeds(
    dims: T5Dims, *, batch: int = 1, rows: int = 1, past: int = 32, new: int = 1, source: int = 64
) -> dict[str, np.ndarray]:
    """Inputs of a decoder, drawn at random: ``new`` tokens for each of B = ``batch`` sources and K = ``rows``.

    Args:
        dims: of the model, as in a manifest.
        batch, rows, past, new, source: B, K, P, T and S of `contract.decoder_spec`.

    Raises:
        InputError: a count is none.

    >>> dims = T5Dims(300, 8, 6, (2,), (2,), (2,), (16,), (16,), gated=False, tied=True)
    >>> {name: array.shape for name, array in step_feeds(dims, past=5).items()}["past_key_0"]
    (1, 1, 2, 5, 6)
    """
    counts = {"batch": batch, "rows": rows, "past": past, "new": new, "source": source}
    checked = [as_count(count, name, at_least=int(name != "past")) for name, count in counts.items()]
    sizes, rng = dict(zip("BKPTS", checked, strict=True)), np.random.default_rng(0)
    feeds = {}
    for tensor in decoder_spec(dims).inputs:
        shape = tuple(sizes.get(size, size) for size in tensor.shape)
        if tensor.name == "input_ids":
            feeds[tensor.name] = rng.integers(0, dims.vocab_size, shape)
        elif tensor.name.endswith("mask"):
            feeds[tensor.name] = np.ones(shape, dtype=np.int64)
        else:
            feeds[tensor.name] = rng.standard_normal(shape, dtype=np.float32)
    return feeds


def logits_of(weights: T5Weights, input_ids: np.ndarray, attention_mask: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The logits (B, T, V) of ``tokens`` (B, T), by both graphs built in memory and run as they are.

    Args:
        weights: of the model, with a description that may be wrong: then so are the logits, or the graphs do not run.
        input_ids, attention_mask: of the sources, (B, S).
        tokens: what the decoder reads, from its start token on.

    >>> from t5accel.graphs.export import model_weights
    >>> from t5accel.models.random_init import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> ids = np.array([[5, 6, 7]])
    >>> logits_of(model_weights(model), ids, np.ones_like(ids), np.array([[0, 9]])).shape
    (1, 2, 32)
    """
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    encoder, decoder = (
        onnxruntime.InferenceSession(
            graph(weights).proto().SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        for graph in (encoder_graph, decoder_graph)
    )
    cross, source = (
        names("cross", weights.dims.decoder_layers),
        dict(input_ids=input_ids, attention_mask=attention_mask),
    )
    found = dict(zip(cross, encoder.run(cross, source), strict=True))
    empty = step_feeds(weights.dims, batch=len(input_ids), past=0, source=input_ids.shape[1])
    return decoder.run(["logits"], {**empty, **source, **found, "input_ids": tokens[:, None]})[0][:, 0]
