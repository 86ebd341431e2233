"""One cell of the GPU suite, measured: are the outputs equal, how long does it take, and how long would it have to?"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

from bench.gpu.cells import Cell
from bench.harness import Contender, error_line, run_comparison
from bench.profiling import Prices, kernels, operators, prices
from bench.results import Row
from bench.roofline import step_roofline
from bench.systems import (
    COMPILED,
    DRAWN,
    FLIGHT,
    GRAPH,
    REFERENCE,
    SMALL,
    SYSTEMS,
    THEIRS,
    ModelOnDevice,
    jobs,
    scheduler,
)
from t5accel.backends.torch_static import TorchStatic
from t5accel.backends.torch_static_buffers import MAX_QUEUED_STEPS
from t5accel.decoding.sampling import SamplingParams, probabilities, sample
from t5accel.errors import InputError
from t5accel.machine import nvidia_smi
from t5accel.models.sizes import T5Dims
from t5accel.parity import ParityError, assert_close, assert_varied
from t5accel.serve.scheduler import Scheduler
from t5accel.timing import Work

ATOL = 1e-4  # of logits in fp32, by the largest of them: rounding grows with it
LARGEST_ERROR = 1e-4  # in fp32: norm of the difference from transformers' logits, over the norm of those
# With fewer bits every order of sums rounds otherwise, transformers' own among them: at t5-small's size its bf16 is 5%
# away from its fp32. So ours may be away from fp32 as far as transformers is in the same dtype, and a quarter more.
TIMES_THEIRS = 1.25
MEANINGLESS = 0.5  # of such an error: logits that are all 0 have 1
SEEDS = 4  # of texts
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def measure(
    cell: Cell, subject: ModelOnDevice, *, refused: Mapping[str, str], seconds: float, rounds: int = 5
) -> list[Row]:
    """A row for each system of a cell, and more by what is measured; a system that fails has a row that says why.

    ``refused`` systems, which are not equal in this dtype, are not timed. Within ``seconds`` fewer ``rounds`` may be
    made; where not even `harness.FEWEST_ROUNDS` are possible, there are no rows at all.
    """
    if cell.measured == "equality":
        return equality(cell, subject)
    if cell.measured == "floor":
        return [floor(cell, subject)]
    if cell.measured == "draws":
        return draws(cell, subject)
    rounds = min(rounds, cell.rounds)
    if cell.measured == "requests":
        return requests(cell, subject, refused=refused, rounds=rounds)
    if cell.measured == "throughput":
        return throughput(cell, subject, refused=refused, rounds=rounds)
    rows = speed(cell, subject, refused=refused, seconds=seconds, rounds=rounds)
    return rows + price_of_compiling(rows) if cell.measured == "compile" else rows


def failed(cell: Cell, why: str) -> list[Row]:
    """The rows of a cell of which nothing was measured."""
    names = (GRAPH,) if cell.measured == "floor" else cell.systems
    return [_row(name, cell) | {"failed": why} for name in names]


def batch_of(cell: Cell, vocab_size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Seeded ids and a mask, both (B, S) int64. For equality rows end at different places, and the rest is padding."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, vocab_size, (cell.batch, cell.source_tokens))
    lengths = np.full(cell.batch, cell.source_tokens)
    if cell.shortest_source is not None:
        lengths[1:] = rng.integers(cell.shortest_source, cell.source_tokens + 1, cell.batch - 1)
    if cell.measured == "equality":
        lengths = np.maximum(cell.source_tokens - 3 * (1 + np.arange(cell.batch) % 8), 1)
    mask = (np.arange(cell.source_tokens) < lengths[:, None]).astype(np.int64)
    return ids * mask, mask


def telling_batch(cell: Cell, subject: ModelOnDevice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A batch and what transformers makes of it: the first of some seeds whose output is more than one token.

    A large model whose weights are drawn on the device may repeat a token to one text and not to the next.
    """
    for seed in range(SEEDS):
        ids, mask = batch_of(cell, subject.model.config.vocab_size, seed)
        expected = subject.generate(REFERENCE, ids, mask, cell.new_tokens, cell.beams)
        try:
            assert_varied(expected)
        except InputError:
            if seed == SEEDS - 1:
                raise
        else:
            break
    return ids, mask, expected


# Equality


def equality(cell: Cell, subject: ModelOnDevice) -> list[Row]:
    """Tokens and logits beside those of transformers in fp32 on the same device.

    In fp32 every token has to be equal. With fewer bits outputs part ways sooner or later, so logits of given tokens
    are compared (`TIMES_THEIRS`), and the tokens are counted. A run that drops the mask has to be caught.
    """
    exact = subject
    if subject.dtype != "float32":
        exact = ModelOnDevice(subject.name, "float32", subject.device, subject.scratch)
    ids, mask, expected = telling_batch(cell, exact)
    start = np.full_like(expected[:, :1], exact.model.config.decoder_start_token_id)
    given = np.concatenate([start, expected[:, :7]], axis=1)
    logits = _teacher_forced(exact.model, ids, mask, given)
    theirs = _error(_teacher_forced(subject.model, ids, mask, given), logits)
    allowed = LARGEST_ERROR if exact is subject else TIMES_THEIRS * theirs
    if allowed >= MEANINGLESS:
        raise InputError(f"transformers' {subject.dtype} is {theirs:.2g} from fp32: this comparison proves nothing.")
    compared = ((ids, mask, expected), (given, logits), allowed)
    rows = [_equality_of(name, cell, subject, *compared) for name in cell.systems]
    broken = subject.generate(REFERENCE, ids, np.ones_like(mask), cell.new_tokens, cell.beams)
    if (broken == expected).all():
        raise InputError("A run without the mask gives the same tokens: this comparison proves nothing.")
    return rows


def _equality_of(
    name: str, cell: Cell, subject: ModelOnDevice, texts: tuple[Any, ...], forced: tuple[Any, ...], allowed: float
) -> Row:
    (ids, mask, expected), (given, logits), system = texts, forced, SYSTEMS[name]
    row = _row(name, cell)
    if subject.dtype not in system.dtypes:
        return row | {"failed": f"it does not run in {subject.dtype}"}
    try:
        found = subject.generate(name, ids, mask, cell.new_tokens, cell.beams)
        row |= {"equal": int((found == expected).sum()), "of": expected.size, "distinct": len(np.unique(expected))}
        if system.open_backend is None:  # transformers itself
            seen = _teacher_forced(subject.model, ids, mask, given)
        else:
            seen = _by_steps(subject.backend(name), ids, mask, given)
        row["largest_difference"] = float(np.abs(seen - logits).max())
        row |= {"error": _error(seen, logits), "allowed_error": allowed}
        if subject.dtype == "float32":
            assert_close(seen, logits, atol=ATOL * float(np.abs(logits).max()))
            assert_close(found, expected, atol=0)
        if system.open_backend is not None and not row["error"] <= allowed:
            raise ParityError(f"the error of its logits is {row['error']:.3g}, and {allowed:.3g} is allowed")
    except Exception as error:  # of any runtime, one that is not installed included
        row["failed"] = error_line(error)
    return row


def _error(seen: np.ndarray, logits: np.ndarray) -> float:
    return float(np.linalg.norm(seen - logits) / np.linalg.norm(logits))


@torch.inference_mode()
def _teacher_forced(model: Any, ids: np.ndarray, mask: np.ndarray, given: np.ndarray) -> np.ndarray:
    tensors = (torch.as_tensor(array, device=model.device) for array in (ids, mask, given))
    arguments = dict(zip(("input_ids", "attention_mask", "decoder_input_ids"), tensors, strict=True))
    return model(**arguments).logits.float().cpu().numpy()


def _by_steps(backend: Any, ids: np.ndarray, mask: np.ndarray, given: np.ndarray) -> np.ndarray:
    """The same by a chunk and single steps, so that both ways of a backend are looked at: (B, T, V)."""
    state = backend.new_state(backend.encode(ids, mask))
    chunks = [given[:, None, :4], *(given[:, None, i : i + 1] for i in range(4, given.shape[1]))]
    return np.concatenate([backend.step(state, chunk)[:, 0] for chunk in chunks], axis=1)


def draws(cell: Cell, subject: ModelOnDevice) -> list[Row]:
    """How often each short text is drawn, beside its probability by transformers' logits.

    Of two tokens at each step, so that the texts can be counted: the error is half of all differences of frequency and
    probability, and twice what chance brings on average is allowed.
    """
    sampling, count = SamplingParams(temperature=0.7, top_k=2), 1024
    ids, mask = batch_of(cell, subject.model.config.vocab_size)
    start, end = subject.model.config.decoder_start_token_id, subject.model.config.eos_token_id
    texts, chances = np.array([[start]]), np.ones(1)
    for _ in range(cell.new_tokens):
        logits = _teacher_forced(subject.model, *(array.repeat(len(texts), axis=0) for array in (ids, mask)), texts)
        logits[:, -1, end] = -np.inf
        odds = probabilities(logits[:, -1], None, sampling)
        row, token = odds.nonzero()
        texts, chances = np.column_stack([texts[row], token]), chances[row] * odds[row, token]
    row = _row(DRAWN, cell) | {"measured": "equality", "of": count, "distinct": len(texts)}
    try:
        drawn = sample(
            subject.backend(GRAPH), ids, mask, sampling=sampling, num_return_sequences=count,
            min_new_tokens=cell.new_tokens, max_new_tokens=cell.new_tokens,
        ).sequences  # fmt: skip
        seen = (drawn[:, None] == texts[None, :, 1:]).all(axis=-1).mean(axis=0)
        # The mean of |frequency - chance| is that of a normal distribution.
        by_chance = np.sqrt(2 / np.pi * chances * (1 - chances) / count).sum() / 2
        row |= {"equal": round(seen.sum() * count), "error": float(np.abs(seen - chances).sum() / 2),
                "allowed_error": float(2 * by_chance)}  # fmt: skip
        if row["equal"] < count or not row["error"] <= row["allowed_error"]:
            raise ParityError(f"{row['equal']} of {count} texts are possible, at an error of {row['error']:.3g}")
    except Exception as error:
        row["failed"] = error_line(error)
    return [row]


# Speed


def speed(cell: Cell, subject: ModelOnDevice, *, refused: Mapping[str, str], seconds: float, rounds: int) -> list[Row]:
    """All systems by the harness: built and compared, which warms them up, then interleaved."""
    texts = (
        batch_of(cell, subject.model.config.vocab_size) if subject.name == SMALL else telling_batch(cell, subject)[:2]
    )
    arguments = (*texts, cell.new_tokens, cell.new_tokens, cell.beams)
    unable = {name: f"it does not run in {subject.dtype}"
              for name in cell.systems if subject.dtype not in SYSTEMS[name].dtypes} | dict(refused)  # fmt: skip

    def way(name: str) -> Contender:
        # Few bits round each way's sums otherwise, so `equality` has judged before, and here tokens are counted.
        return Contender(name, lambda: partial(SYSTEMS[name].build(subject), *arguments), exact=False)

    able = [name for name in cell.systems if name not in unable]
    found: list[Row] = []
    if len(able) > 1:
        work = Work(cell.batch, cell.source_tokens, cell.new_tokens, beams=cell.beams)
        synchronize = torch.cuda.synchronize if subject.device == "cuda" else None
        found = run_comparison([way(name) for name in able], work, rounds=rounds, keep_going=True, seconds=seconds,
                         synchronize=synchronize, **_about(cell))  # fmt: skip
        if not found:
            return []
    rows = {row["system"]: row for row in found}
    for name, row in rows.items():  # what was compiled for a cell before was not compiled again
        row["first_s"] = subject.first_s.setdefault(name, row.get("first_s", 0.0))
    return [rows.get(name) or _row(name, cell) | {"failed": unable[name]}
            for name in cell.systems if name in rows or name in unable]  # fmt: skip


def throughput(cell: Cell, subject: ModelOnDevice, *, refused: Mapping[str, str], rounds: int) -> list[Row]:
    """Each system by itself, transformers once, ours ``rounds`` times: for what takes long, and much memory."""
    ids, mask = batch_of(cell, subject.model.config.vocab_size)
    for name in cell.systems:
        subject.forget(name)  # memory for other shapes
    rows = []
    for name in cell.systems:
        row = _row(name, cell)
        run = partial(subject.generate, name, ids, mask, cell.new_tokens, cell.beams)
        rows.append(_timed_alone(row, run, refused, 1 if name in THEIRS else rounds, subject.device))
        if "latency_s" in row:
            row["tokens_per_s"] = cell.batch * cell.new_tokens / float(np.median(row["latency_s"]))
        let_go(subject.device)
    return _with_ratios(rows)


def requests(cell: Cell, subject: ModelOnDevice, *, refused: Mapping[str, str], rounds: int) -> list[Row]:
    """Requests that all wait at once: nine in ten want 4 to 8 tokens, and one ``new_tokens``.

    In batches of ``batch``, each as long as its longest answer (of which transformers is given a seventh, for it takes
    long); and by our scheduler, with ``rows`` of them in flight.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(3, subject.model.config.vocab_size, (cell.requests, cell.source_tokens))
    lengths = np.where(rng.random(cell.requests) < 0.9, rng.integers(4, 9, cell.requests), cell.new_tokens)
    mask, rows = np.ones_like(ids), []
    for name in cell.systems:
        count = max(cell.batch, cell.requests // 7 // cell.batch * cell.batch) if name in THEIRS else cell.requests
        asked = ids[:count], mask[:count], lengths[:count]
        row = _row(name, cell) | {
            "texts": count, "new_tokens": int(lengths[:count].sum()), "forced": False,
        }  # fmt: skip
        with ExitStack() as stack:
            if name == FLIGHT:  # one scheduler for all rounds, as a server has one
                run = partial(_served, stack.enter_context(scheduler(subject, cell.rows)), *asked)
            else:
                run = partial(_in_batches, name, cell, subject, *asked)
            row = _timed_alone(row, run, refused, 1 if name in THEIRS else rounds, subject.device)
        rows.append(row)
        if "latency_s" in row:
            took = float(np.median(row["latency_s"]))
            row |= {"answers_per_s": count / took, "tokens_per_s": row["new_tokens"] / took}
    return _with_ratios(rows, "answers_per_s")


def _in_batches(
    name: str, cell: Cell, subject: ModelOnDevice, ids: np.ndarray, mask: np.ndarray, lengths: np.ndarray
) -> None:
    for first in range(0, len(ids), cell.batch):
        some = slice(first, first + cell.batch)
        subject.generate(name, ids[some], mask[some], int(lengths[some].max()), 1)


def _served(serving: Scheduler, ids: np.ndarray, mask: np.ndarray, lengths: np.ndarray) -> None:
    for ticket in serving.submit_all(jobs(ids, mask, lengths)):
        ticket.result(timeout_s=120)


def _timed_alone(row: Row, run: Callable[[], Any], refused: Mapping[str, str], rounds: int, device: str) -> Row:
    """A row with its times: the first run, and ``rounds`` of them."""
    if row["system"] in refused:
        return row | {"failed": refused[row["system"]]}
    try:
        for _ in range(rounds + 1):
            begun = perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            took = perf_counter() - begun
            row.setdefault("first_s", took)
            row.setdefault("latency_s", []).append(took)
        row["latency_s"] = row["latency_s"][1:]
    except Exception as error:
        row.pop("latency_s", None)
        row["failed"] = error_line(error)
    return row


def _with_ratios(rows: list[Row], rate: str = "tokens_per_s") -> list[Row]:
    """To the first system's rate, for the systems did not take turns; one alone has none."""
    first = rows[0].get(rate) if len(rows) > 1 else None
    return [row | ({"ratio": row[rate] / first} if first and rate in row else {}) for row in rows]


def price_of_compiling(rows: list[Row]) -> list[Row]:
    """How long the first generation took beyond a later one, and after how many steps that is won back.

    >>> usual = {"system": GRAPH, "cell": "c", "new_tokens": 100, "latency_s": [0.2], "first_s": 1.0}
    >>> compiled = usual | {"system": COMPILED, "latency_s": [0.1], "first_s": 30.1}
    >>> [round(row["break_even_steps"]) for row in price_of_compiling([usual, compiled])]
    [30000]
    """
    by_name = {row["system"]: row for row in rows if "latency_s" in row}
    if not {GRAPH, COMPILED} <= by_name.keys():
        return []
    usual, compiled = (float(np.median(by_name[name]["latency_s"])) for name in (GRAPH, COMPILED))
    row = by_name[COMPILED]
    longer, saved = row["first_s"] - compiled, (usual - compiled) / row["new_tokens"]
    price: Row = {"cell": row["cell"], "measured": "compile", "system": COMPILED, "compile_s": longer,
                  "saves_s_per_step": saved}  # fmt: skip
    return [price | ({"break_even_steps": longer / saved} if saved > 0 else {})]


# The floor


def floor(cell: Cell, subject: ModelOnDevice) -> Row:
    """What a step launches and reads, and the least time that this takes on this device.

    What cannot be found out, as where the driver lets nobody profile, is named in ``lacks``; the rest is kept.
    """
    row, lacks = _row(GRAPH, cell), []
    for part in _floor_parts(cell, subject):
        try:
            row |= part()
        except Exception as error:
            lacks.append(f"{part.__name__}: {error_line(error)}")
    if "replayed_s" in row:
        nodes = row.get("kernels", row["operators"])
        found = Prices(row["launch_s"], row["replayed_s"], row["bytes_per_s"])
        row["floor_s"] = found.floor_s(nodes, row["bytes_per_step"])
    return row | ({"lacks": lacks} if lacks else {})


def _floor_parts(cell: Cell, subject: ModelOnDevice) -> Iterator[Callable[[], Row]]:
    model, dims, device = subject.model, T5Dims.of(subject.model), torch.device(subject.device)
    ids, mask = batch_of(cell, dims.vocab_size)
    backend = TorchStatic(model)
    state = backend.new_state(backend.encode(ids, mask))
    while (left := max(cell.new_tokens - 8, 1) - state.rows.width) > 0:  # nearly to the end, when memory is widest
        backend.run_greedy(state, min(left, MAX_QUEUED_STEPS))
    longer, shorter = (partial(subject.generate, REFERENCE, ids, mask, tokens, 1) for tokens in (9, 1))

    def step() -> None:
        backend.decoder.advance(state.buffers)

    def counted() -> Row:
        read = step_roofline(  # the bytes alone: the rates are measured below, where there is a GPU
            dims, PRECISIONS[subject.dtype], cell.batch, bandwidth=1.0, gemm=1.0, source_tokens=cell.source_tokens,
            position=state.buffers.width,
        )  # fmt: skip
        eager = (operators(longer).total() - operators(shorter).total()) / 8
        return {"operators": operators(step).total(), "eager_operators": eager, "bytes_per_step": read.bytes_per_step}

    def priced() -> Row:
        found = prices(device)
        return {"launch_s": found.launch_s, "replayed_s": found.replayed_s, "bytes_per_s": found.bytes_per_s}

    def profiled() -> Row:
        ran = kernels(step)
        names = [f"{count} × {name[:120]}" for name, count in ran.most_common()]  # which attention runs, among others
        return {"kernels": ran.total(), "kernel_names": names}

    def profiled_eager() -> Row:
        return {"eager_kernels": (kernels(longer).total() - kernels(shorter).total()) / 8}

    def copies() -> Row:
        found = kernels(lambda: backend.run_greedy(backend.new_state(state.source), 16))
        return {
            f"copies_to_{place}": sum(count for name, count in found.items() if direction in name)
            for place, direction in (("host", "DtoH"), ("device", "HtoD"))
        }

    def clocks() -> Row:
        """While the GPU is busy; at rest it shows others."""
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(gpu_clocks_mhz)
            while not asked.done():
                backend.run_greedy(backend.new_state(state.source), MAX_QUEUED_STEPS)
        return {f"clock_{name}_mhz": value for name, value in asked.result().items()}

    yield counted
    if subject.device == "cuda":
        yield from (priced, profiled, profiled_eager, copies, clocks)


def gpu_clocks_mhz() -> dict[str, int]:
    """The GPU's current clocks, ``{"sm", "memory"}`` in MHz, so ask under load; empty if unknown."""
    found = nvidia_smi("clocks.sm", "clocks.mem")
    return {name: int(value) for name, value in zip(("sm", "memory"), found, strict=False) if value.isdigit()}


def _row(name: str, cell: Cell) -> Row:
    kind = "speed" if cell.measured in ("compile", "throughput") else cell.measured
    return {
        "measured": kind, "system": name, "reference": cell.systems[0], **_about(cell), "batch": cell.batch,
        "source_tokens": cell.source_tokens, "new_tokens": cell.new_tokens, "beams": cell.beams,
    }  # fmt: skip


def _about(cell: Cell) -> Row:
    return {"cell": cell.name, "model": cell.model, "precision": PRECISIONS[cell.dtype]}


def let_go(device: str) -> None:
    """Memory of models that are gone, back to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
