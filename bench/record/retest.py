"""Measure again what the posts claim and no other program records, in about eight minutes.

`data/results/retest.json` is a run; `bench/record/claims.py` takes its figures from there.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import torch
from tokenizers import Tokenizer
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from bench import evaluation
from bench.baselines.layout_backends import HybridOnnxT5, ThreeGraphs, WholeGraph
from bench.baselines.layouts import export_layout
from bench.baselines.optimized_export import optimize_export, optimized_graph
from bench.baselines.unigram import UnigramTokenizer
from bench.harness import Contender, run_comparison
from bench.precision import backend_scores
from bench.profiling import step_feeds
from bench.results import Row, record_parser, write_rows
from bench.systems import by_generate, by_our_loop
from t5accel import machine
from t5accel.backends.hf_generate import AcceleratedT5
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.backends.torch_eager import TorchEager, TorchState
from t5accel.decoding.backend import Backend
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.export import export_model
from t5accel.graphs.export_cache import cached_export
from t5accel.graphs.rewriting import contrib_operators, count_nodes
from t5accel.models.load import data_folder, load_model
from t5accel.timing import Work

SIZE, BUNDLED = "random:t5-small", "mini"
WITH_CACHE, NO_CACHE = "transformers with cache", "transformers without cache"
LEVELS = ("disable", "basic", "extended", "all")
NO_TOKENS = dict.fromkeys(("batch", "beams", "source_tokens", "new_tokens"))  # where nothing is generated
Tokens = Callable[[], np.ndarray]  # a run; returns the new tokens (B, L)


def ids_for(model: PreTrainedModel, batch: int, source: int) -> np.ndarray:
    """Seeded tokens (B, S); from 3 up they are ordinary ones."""
    return np.random.default_rng(0).integers(3, model.config.vocab_size, (batch, source))


def settings(**changes: Any) -> SessionSettings:
    """On all threads that we may use."""
    return SessionSettings(threads=machine.cpu_threads(), **changes)


def race(cell: str, runs: Mapping[str, Tokens], work: Work, rounds: int, **more: Any) -> Iterator[Row]:
    """`run_comparison` of functions by name; the first one is the reference."""
    entries = [Contender(name, lambda run=run: run) for name, run in runs.items()]
    yield from run_comparison(entries, work, rounds=rounds, cell=cell, **more)


def their_loop(model: Any, ids: np.ndarray, tokens: int, beams: int = 1, use_cache: bool = True) -> Tokens:
    """transformers' ``generate`` at a forced length, in its own loop: ours runs where only tokens are asked for."""
    options = {"use_cache": use_cache, "return_dict_in_generate": True}
    return partial(by_generate(model, **options), ids, np.ones_like(ids), tokens, tokens, beams)


def our_loop(backend: Backend, ids: np.ndarray, tokens: int, beams: int = 1) -> Tokens:
    """Our greedy or beam search at a forced length."""
    return partial(by_our_loop(backend), ids, np.ones_like(ids), tokens, tokens, beams)


def layout_rows(model: PreTrainedModel, name: str, rounds: int, source: int = 64, tokens: int = 64) -> Iterator[Row]:
    """C01, C02, C05: OnnxT5's layout, the complete model as one graph, fastT5's three; greedily and with 4 beams."""
    ids = ids_for(model, 1, source)
    with TemporaryDirectory(ignore_cleanup_errors=True) as root:
        for layout in ("onnxt5", "whole", "fastt5"):
            export_layout(model, f"{root}/{layout}", layout, external_threshold_bytes=0)
        export_model(model, f"{root}/ours")
        backends: dict[str, Backend] = {
            "PyTorch": TorchEager(model), "onnxt5": HybridOnnxT5(f"{root}/onnxt5", model, settings=settings()),
            "whole": WholeGraph(f"{root}/whole", settings=settings()),
            "fastt5": ThreeGraphs(f"{root}/fastt5", settings=settings()),
            "two graphs": OrtNumpy(f"{root}/ours", settings=settings()),
        }  # fmt: skip
        for beams in (1, 4):
            work = Work(1, source, tokens, beams, machine.cpu_threads())
            runs = {
                WITH_CACHE: their_loop(model, ids, tokens, beams),
                NO_CACHE: their_loop(model, ids, tokens, beams, use_cache=False),
            }
            for layout, backend in backends.items():
                runs[f"{layout}, our loop"] = our_loop(backend, ids, tokens, beams)
                if layout in ("onnxt5", "fastt5"):  # which were made to be called so
                    wrapped = AcceleratedT5(backend, model.config, model.generation_config)
                    runs[f"{layout}, generate()"] = their_loop(wrapped, ids, tokens, beams)
            yield from race("layout", runs, work, rounds, model=name)


def naive_beam_search(backend: Backend, ids: np.ndarray, tokens: int, beams: int) -> np.ndarray:
    """Beam search as a first draft, of forced length: lists of hypotheses, each row of scores sorted whole.

    Returns the best answer of each source (B, L), equal to that of `beam_search`.
    """
    state = backend.new_state(backend.encode(ids, np.ones_like(ids)), rows_per_source=beams)
    written = [[[] for _ in range(beams)] for _ in ids]
    sums = [[0.0] + [-np.inf] * (beams - 1) for _ in ids]  # at first all rows are one hypothesis
    given = np.full((len(ids), beams, 1), backend.decoder_start_token_id)
    rows = np.zeros((len(ids), beams), dtype=np.int64)
    for _ in range(tokens):
        logits = backend.step(state, given)[:, :, -1]
        for source, scores in enumerate(logits):
            found = []
            for row, values in enumerate(scores):
                shifted = values - values.max()
                log_probabilities = shifted - np.log(np.exp(shifted).sum())
                for token in np.argsort(-log_probabilities)[: beams + 1]:  # one of these may be the end
                    if token != backend.eos_token_id:
                        found.append((sums[source][row] + float(log_probabilities[token]), row, int(token)))
            best = sorted(found, reverse=True)[:beams]
            written[source] = [[*written[source][row], token] for _, row, token in best]
            sums[source] = [score for score, _, _ in best]
            rows[source], given[source, :, 0] = [row for _, row, _ in best], [token for _, _, token in best]
        backend.reorder(state, rows)
    return np.array([hypotheses[0] for hypotheses in written])


def beam_rows(
    model: PreTrainedModel, name: str, rounds: int, source: int = 64, tokens: int = 32, batches: Sequence[int] = (1, 8)
) -> Iterator[Row]:  # fmt: skip
    """C09: one runtime; naive and vectorised bookkeeping, and the decoder's steps without any."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as root:
        export_model(model, f"{root}/ours")
        backend, beams = OrtNumpy(f"{root}/ours", settings=settings()), 4
        for batch in batches:
            ids = ids_for(model, batch, source)
            vectorised = our_loop(backend, ids, tokens, beams)
            answer = vectorised()

            def steps_alone(ids: np.ndarray = ids, answer: np.ndarray = answer) -> np.ndarray:
                state = backend.new_state(backend.encode(ids, np.ones_like(ids)), rows_per_source=beams)
                read = np.insert(answer[:, :-1], 0, backend.decoder_start_token_id, axis=1)
                for token in read.T:
                    backend.step(state, np.repeat(token[:, None, None], beams, axis=1))
                return answer

            runs = {
                "naive bookkeeping": partial(naive_beam_search, backend, ids, tokens, beams),
                "vectorised": vectorised, "steps alone": steps_alone,
            }  # fmt: skip
            work = Work(batch, source, tokens, beams, machine.cpu_threads())
            yield from race("beam bookkeeping", runs, work, rounds, model=name)


class ForgetsCross(TorchEager):
    """PyTorch with a cache of self-attention alone: the source's keys and values are computed at every step."""

    def _run_decoder(
        self, state: TorchState, tokens: torch.Tensor, past_mask: torch.Tensor | None, count: int
    ) -> np.ndarray:
        state.cache = EncoderDecoderCache(state.cache.self_attention_cache, DynamicCache())
        return super()._run_decoder(state, tokens, past_mask, count)


def reuse_rows(model: PreTrainedModel, name: str, rounds: int, short: int = 64, long: int = 512) -> Iterator[Row]:
    """C07: keys and values of the source kept between steps, and the encoder's output kept between calls."""
    threads = machine.cpu_threads()
    for source in (short, long):
        ids, work = ids_for(model, 1, source), Work(1, source, 32, threads=threads)
        backends = {"computed at every step": ForgetsCross(model), "kept": TorchEager(model)}
        runs = {kept: our_loop(backend, ids, 32) for kept, backend in backends.items()}
        yield from race("keys and values of the source", runs, work, rounds, model=name, backend="PyTorch")
    with TemporaryDirectory(ignore_cleanup_errors=True) as root:
        export_model(model, f"{root}/ours")
        engines = {"PyTorch": TorchEager(model), "ONNX Runtime": OrtNumpy(f"{root}/ours", settings=settings())}
        for engine, backend in engines.items():
            for source, tokens in ((long, 8), (short, 64)):
                ids, work = ids_for(model, 1, source), Work(1, source, tokens, threads=threads)
                runs = {
                    "encoded at every call": our_loop(backend, ids, tokens),
                    "kept": our_loop(EncoderCache(backend), ids, tokens),
                }
                yield from race("encoder output", runs, work, rounds, model=name, backend=engine)


class Int8Torch(TorchEager):
    """A quantised head has no ``weight`` that could say where it is."""

    device = torch.device("cpu")


def torch_int8_rows(models: Mapping[str, PreTrainedModel], tokenizer: Any, limit: int | None = None) -> Iterator[Row]:
    """C08: bytes of PyTorch's one-line int8, and its quality on the bundled model; its speed is in precision.json."""
    for name, model in models.items():
        with warnings.catch_warnings(action="ignore"):  # that it will move to another package
            int8 = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
        for system, backend in (("fp32", TorchEager(model)), ("torch dynamic int8", Int8Torch(int8))):
            torch.save(backend.model.state_dict(), buffer := io.BytesIO())
            row = {"measured": "size", "cell": "torch int8", "model": name, "system": system}
            row["size_bytes"] = buffer.tell()
            if name == BUNDLED:
                row |= {"measured": "quality", **backend_scores(backend, tokenizer, limit=limit)}
            yield row


def torch_encoder(model: PreTrainedModel, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """What our encoder's graph computes, in PyTorch: returns the last layer's values of the source (B, H, S, d_kv)."""
    ids, mask = (torch.from_numpy(feeds[name]) for name in ("input_ids", "attention_mask"))
    with torch.inference_mode():
        hidden = model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        for block in model.decoder.block:
            attention = block.layer[1].EncDecAttention
            _, values = attention.k(hidden), attention.v(hidden)
        return values.unflatten(2, (-1, model.config.d_kv)).transpose(1, 2).numpy()


def graph_rows(model: PreTrainedModel, name: str, rounds: int, sources: Sequence[int] = (128, 512)) -> Iterator[Row]:
    """C16, C21: PyTorch's encoder and ONNX Runtime's, each level of rewriting a decoder step, graphs kept rewritten."""
    work = Work(1, 1, 1, threads=machine.cpu_threads())  # it wants numbers
    with TemporaryDirectory(ignore_cleanup_errors=True) as root:
        plain, ahead, package = (Path(root) / kind for kind in ("plain", "ahead", "package"))
        dims = export_model(model, plain, external_threshold_bytes=0, shortlist=False).dims
        optimize_export(plain, package, tool="transformers", level="extended")
        optimize_export(plain, ahead, level="all")

        def encoder(folder: Path, feeds: dict[str, np.ndarray]) -> Tokens:
            session = open_session(folder / "encoder.onnx", settings())
            names = [output.name for output in session.get_outputs()]
            values = names.index(f"cross_value_{dims.decoder_layers - 1}")
            return lambda: session.run(names, feeds)[values]

        for source in sources:
            ids = ids_for(model, 1, source)
            feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
            runs = {
                "PyTorch": partial(torch_encoder, model, feeds), "ONNX Runtime": encoder(plain, feeds),
                "ONNX Runtime, after its package for transformers": encoder(package, feeds),
            }  # fmt: skip
            far = 1e-3 * float(np.abs(runs["PyTorch"]()).max())
            yield from race(
                "encoder", runs, work, rounds, atol=far, model=name, **NO_TOKENS | {"source_tokens": source}
            )

        feeds = step_feeds(dims)
        sessions = {level: open_session(plain / "decoder.onnx", settings(graph_optimization=level)) for level in LEVELS}
        steps = {level: (lambda own=own: own.run(["logits"], feeds)[0]) for level, own in sessions.items()}
        far = 1e-3 * float(np.abs(steps["disable"]()).max())
        for row in race("graph level", steps, work, rounds, atol=far, model=name, **NO_TOKENS):
            with optimized_graph(plain / "decoder.onnx", row["system"]) as path:
                contrib = sorted(contrib_operators(path))
                yield {**row, "nodes": count_nodes(path).total(), "contrib_operators": contrib}
        del sessions, steps

        def opening(folder: Path, level: str) -> Callable[[], Any]:
            return lambda: OrtNumpy(folder, settings=settings(graph_optimization=level), verify=False)

        opened = {"rewritten on opening": opening(plain, "all"), "rewritten ahead": opening(ahead, "disable")}
        yield from race("opening", opened, work, rounds, atol=None, model=name, **NO_TOKENS)


def moved_rows() -> Iterator[Row]:
    """C21: a convolution that was laid out for this processor, and the same file as another one would have written it.

    There is no second machine: what is made up is the order of the weights, in blocks of another width.
    """
    rng = np.random.default_rng(0)
    filters, image = (rng.normal(size=size).astype(np.float32) for size in ((32, 32, 3, 3), (1, 32, 8, 8)))
    graph = GraphBuilder("convolution")
    graph.op("Conv", graph.input("x", "float32", [*image.shape]), graph.weight("w", filters), output="y")
    graph.output("y", "float32", [1, 32, 6, 6])

    def in_blocks(n: int) -> np.ndarray:
        blocks = filters.reshape(32 // n, n, 32 // n, n, 3, 3).transpose(0, 2, 4, 5, 3, 1)
        return np.ascontiguousarray(blocks).reshape(filters.shape)

    with TemporaryDirectory() as root:
        written, moved = Path(root) / "written.onnx", Path(root) / "moved.onnx"
        written.write_bytes(graph.proto().SerializeToString())
        as_it_is = SessionSettings(graph_optimization="disable")
        right = open_session(written, as_it_is).run(None, {"x": image})[0]
        with optimized_graph(written) as path:
            laid_out = onnx.load(path)
        weights = laid_out.graph.initializer[0]
        kept = onnx.numpy_helper.to_array(weights)
        here = next((n for n in (4, 8, 16, 32) if np.array_equal(in_blocks(n), kept)), 0)
        for width in (here, 8 if here == 16 else 16) if here else ():
            weights.CopyFrom(onnx.numpy_helper.from_array(in_blocks(width), weights.name))
            onnx.save(laid_out, moved)
            wrong = float(np.abs(open_session(moved, as_it_is).run(None, {"x": image})[0] - right).max())
            yield {
                "measured": "equality", "cell": "moved convolution", "settings": {"width": width},
                "system": "as here" if width == here else "as elsewhere", "largest": float(np.abs(right).max()),
                "largest_difference": wrong,
            }  # fmt: skip


def tokenizer_rows(rounds: int, every: int = 3) -> Iterator[Row]:
    """C19: T5's tokenizer in Python and in Rust, equal ids first; and the share of either in a whole call."""
    folder = data_folder() / "mini-t5"
    python, rust = UnigramTokenizer.from_file(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    model, wrapped = load_model(BUNDLED)
    texts = [evaluation.source_text(task, row) for task in evaluation.NAMES for row in evaluation.rows(task)][::every]
    ways: dict[str, Callable[[], list[list[int]]]] = {
        "Python, ours": lambda: python.encode_batch(texts),
        "Rust, one at a time": lambda: [rust.encode(text).ids for text in texts],
        "Rust, batch": lambda: [encoding.ids for encoding in rust.encode_batch(texts)],
        "transformers, one at a time": lambda: [wrapped(text)["input_ids"] for text in texts],
        "transformers, batch": lambda: wrapped(texts)["input_ids"],
    }
    expected = ways["Rust, batch"]()
    if any(way() != expected for way in ways.values()):
        raise SystemExit("the tokenizers give different ids: nothing is timed")
    count, threads = sum(map(len, expected)), machine.cpu_threads()
    work = Work(len(texts), count, 1, threads=threads)
    for row in race(
        "tokenizer", ways, work, rounds, atol=None, texts=len(texts), **NO_TOKENS | {"source_tokens": count}
    ):
        yield {**row, "us_per_token": median(row["latency_s"]) / count * 1e6}

    text = min(texts, key=lambda text: abs(len(rust.encode(text).ids) - 60))
    ids = np.array([rust.encode(text).ids])
    engines = {"PyTorch": TorchEager(model), "ONNX Runtime, int8": OrtNumpy(cached_export(BUNDLED, precision="int8"))}
    around = {
        "Rust": lambda: [rust.decode(rust.encode(text).ids[:32]) for _ in range(10)],
        "Python": lambda: [python.decode(python.encode(text)[:32]) for _ in range(10)],
    }
    work = Work(1, ids.shape[1], 32, threads=threads)
    for engine, backend in engines.items():
        runs = {"generating": our_loop(backend, ids, 32), **around}
        found = {row["system"]: median(row["latency_s"]) for row in race("", runs, work, rounds, atol=None)}
        generating_s = found["generating"]
        about = {"measured": "speed", "cell": "tokenizer share", "backend": engine, "model": BUNDLED,
                 "source_tokens": ids.shape[1], "new_tokens": 32}  # fmt: skip
        yield {**about, "system": "generating", "seconds": generating_s}
        for kind in around:
            own_s = found[kind] / 10
            yield {**about, "system": kind, "seconds": own_s, "share": own_s / (own_s + generating_s)}


def all_rows(rounds: int) -> Iterator[Row]:
    """All rows."""
    torch.set_num_threads(machine.cpu_threads())
    model, (mini, tokenizer) = load_model(SIZE)[0], load_model(BUNDLED)
    yield from layout_rows(model, SIZE, rounds)
    yield from beam_rows(model, SIZE, rounds)
    yield from reuse_rows(model, SIZE, rounds)
    yield from torch_int8_rows({SIZE: model, BUNDLED: mini}, tokenizer)
    yield from graph_rows(model, SIZE, rounds)
    yield from moved_rows()
    yield from tokenizer_rows(rounds)


def main() -> None:
    """Measure everything and write the rows to a file, in one piece."""
    parser = record_parser("Measure again what the posts claim.", rounds=5)
    args = parser.parse_args()
    rows = []
    for row in all_rows(args.rounds):
        rows.append(row)
        ratio = f"{row['ratio']:.2f}x" if "ratio" in row else ""
        print(*(str(value) for value in row.values() if isinstance(value, str | int)), ratio, flush=True)
    write_rows(args.json, rows, command=f"python -m bench.record.retest --rounds {args.rounds}")


if __name__ == "__main__":
    main()
