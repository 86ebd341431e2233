"""One cell of the GPU suite, measured: are the outputs equal, how long does it take, and how long would it have to?"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.gpu.cells import Cell
from bench.harness import Way, measured, said
from bench.profiling import Prices, kernels, operators, prices
from bench.results import Row
from bench.systems import COMPILED, GRAPH, REFERENCE, STATIC, SYSTEMS, ModelOnDevice
from t5accel import machine
from t5accel.backends.torch_static import TorchStatic
from t5accel.backends.torch_static_model import LONGEST_RUN
from t5accel.errors import InputError
from t5accel.models.sizes import T5Dims
from t5accel.parity import ParityError, assert_varied, parity
from t5accel.roofline import roofline
from t5accel.timing import Work

ATOL = 1e-3  # of logits in fp32, whose scale is about 10
LARGEST_ERROR = 1e-4  # in fp32: norm of the difference from transformers' logits, over the norm of those
# With fewer bits every order of sums rounds otherwise, transformers' own among them: at t5-small's size its bf16 is 5%
# away from its fp32. So ours may be away from fp32 as far as transformers is in the same dtype, and a quarter more.
TIMES_THEIRS = 1.25
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
    rows = speed(cell, subject, refused=refused, seconds=seconds, rounds=rounds)
    return rows + price_of_compiling(rows) if cell.measured == "compile" else rows


def failed(cell: Cell, why: str) -> list[Row]:
    """The rows of a cell of which nothing was measured."""
    names = (GRAPH,) if cell.measured == "floor" else cell.systems
    return [_row(name, cell) | {"failed": why} for name in names]


def batch_of(cell: Cell, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Seeded ids and a mask, both (B, S) int64. For equality rows end at different places, and the rest is padding."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, vocab_size, (cell.batch, cell.source_tokens))
    lengths = np.full(cell.batch, cell.source_tokens)
    if cell.measured == "equality":
        lengths = np.maximum(cell.source_tokens - 3 * np.arange(1, cell.batch + 1), 1)
    mask = (np.arange(cell.source_tokens) < lengths[:, None]).astype(np.int64)
    return ids * mask, mask


# Equality


def equality(cell: Cell, subject: ModelOnDevice) -> list[Row]:
    """Tokens and logits beside those of transformers in fp32 on the same device.

    In fp32 every token has to be equal. With fewer bits outputs part ways sooner or later, so logits of given tokens
    are compared (`TIMES_THEIRS`), and the tokens are counted. A run that drops the mask has to be caught.
    """
    exact = subject
    if subject.dtype != "float32":
        exact = ModelOnDevice(subject.name, "float32", subject.device, subject.scratch)
    ids, mask = batch_of(cell, exact.model.config.vocab_size)
    expected = exact.generate(REFERENCE, ids, mask, cell.new_tokens, 1)
    assert_varied(expected)
    given = np.concatenate([np.zeros_like(expected[:, :1]), expected[:, :7]], axis=1)  # behind the start token
    logits = _teacher_forced(exact.model, ids, mask, given)
    theirs = _error(_teacher_forced(subject.model, ids, mask, given), logits)
    allowed = LARGEST_ERROR if exact is subject else TIMES_THEIRS * theirs
    compared = ((ids, mask, expected), (given, logits), allowed)
    rows = [_equality_of(name, cell, subject, *compared) for name in cell.systems]
    broken = subject.generate(STATIC, ids, np.ones_like(mask), cell.new_tokens, 1)
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
        found = subject.generate(name, ids, mask, cell.new_tokens, 1)
        row |= {"equal": int((found == expected).sum()), "of": expected.size, "distinct": len(np.unique(expected))}
        if system.backend is None:  # transformers itself
            seen = _teacher_forced(subject.model, ids, mask, given)
        else:
            seen = _by_steps(subject.backend(name), ids, mask, given)
        row["largest_difference"] = float(np.abs(seen - logits).max())
        row |= {"error": _error(seen, logits), "allowed_error": allowed}
        if subject.dtype == "float32":
            parity(seen, logits, atol=ATOL)
            parity(found, expected, atol=0)
        if system.backend is not None and not row["error"] <= allowed:
            raise ParityError(f"the error of its logits is {row['error']:.3g}, and {allowed:.3g} is allowed")
    except Exception as error:  # of any runtime, one that is not installed included
        row["failed"] = said(error)
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
    state = backend.start(backend.encode(ids, mask))
    chunks = [given[:, None, :4], *(given[:, None, i : i + 1] for i in range(4, given.shape[1]))]
    return np.concatenate([backend.step(state, chunk)[:, 0] for chunk in chunks], axis=1)


# Speed


def speed(cell: Cell, subject: ModelOnDevice, *, refused: Mapping[str, str], seconds: float, rounds: int) -> list[Row]:
    """All systems by the harness: built and compared, which warms them up, then interleaved."""
    arguments = (*batch_of(cell, subject.model.config.vocab_size), cell.new_tokens, cell.beams)
    unable = {name: f"it does not run in {subject.dtype}"
              for name in cell.systems if subject.dtype not in SYSTEMS[name].dtypes} | dict(refused)  # fmt: skip

    def way(name: str) -> Way:
        # Few bits round each way's sums otherwise, so `equality` has judged before, and here tokens are counted.
        return Way(name, lambda: partial(SYSTEMS[name].build(subject), *arguments), exact=False)

    able = [name for name in cell.systems if name not in unable]
    found: list[Row] = []
    if len(able) > 1:
        work = Work(cell.batch, cell.source_tokens, cell.new_tokens, beams=cell.beams)
        synchronize = torch.cuda.synchronize if subject.device == "cuda" else None
        found = measured([way(name) for name in able], work, rounds=rounds, keep_going=True, seconds=seconds,
                         synchronize=synchronize, **_about(cell))  # fmt: skip
        if not found:
            return []
    rows = {row["system"]: row for row in found}
    for name, row in rows.items():  # what was compiled for a cell before was not compiled again
        row["first_s"] = subject.first_s.setdefault(name, row.get("first_s", 0.0))
    return [rows.get(name) or _row(name, cell) | {"failed": unable[name]}
            for name in cell.systems if name in rows or name in unable]  # fmt: skip


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
            lacks.append(f"{part.__name__}: {said(error)}")
    if "replayed_s" in row:
        nodes = row.get("kernels", row["operators"])
        found = Prices(row["launch_s"], row["replayed_s"], row["bytes_per_s"])
        row["floor_s"] = found.floor_s(nodes, row["bytes_per_step"])
    return row | ({"lacks": lacks} if lacks else {})


def _floor_parts(cell: Cell, subject: ModelOnDevice) -> Iterator[Callable[[], Row]]:
    model, dims, device = subject.model, T5Dims.of(subject.model), torch.device(subject.device)
    ids, mask = batch_of(cell, dims.vocab_size)
    backend = TorchStatic(model)
    state = backend.start(backend.encode(ids, mask))
    while (left := max(cell.new_tokens - 8, 1) - state.rows.width) > 0:  # nearly to the end, when memory is widest
        backend.run_greedy(state, min(left, LONGEST_RUN))
    longer, shorter = (partial(subject.generate, REFERENCE, ids, mask, tokens, 1) for tokens in (9, 1))

    def step() -> None:
        backend.decoder.advance(state.slot)

    def counted() -> Row:
        read = roofline(  # the bytes alone: the rates are measured below, where there is a GPU
            dims, PRECISIONS[subject.dtype], cell.batch, bandwidth=1.0, gemm=1.0, source_tokens=cell.source_tokens,
            position=state.slot.width,
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
        found = kernels(lambda: backend.run_greedy(backend.start(state.source), 16))
        return {
            f"copies_to_{place}": sum(count for name, count in found.items() if direction in name)
            for place, direction in (("host", "DtoH"), ("device", "HtoD"))
        }

    def clocks() -> Row:
        """While the GPU is busy; at rest it shows others."""
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(machine.gpu_clocks_mhz)
            while not asked.done():
                backend.run_greedy(backend.start(state.source), LONGEST_RUN)
        return {f"clock_{name}_mhz": value for name, value in asked.result().items()}

    yield counted
    if subject.device == "cuda":
        yield from (priced, profiled, profiled_eager, copies, clocks)


def _row(name: str, cell: Cell) -> Row:
    kind = "speed" if cell.measured == "compile" else cell.measured
    return {
        "measured": kind, "system": name, "reference": REFERENCE, **_about(cell), "batch": cell.batch,
        "source_tokens": cell.source_tokens, "new_tokens": cell.new_tokens, "beams": cell.beams,
    }  # fmt: skip


def _about(cell: Cell) -> Row:
    return {"cell": cell.name, "model": cell.model, "precision": PRECISIONS[cell.dtype]}


def let_go(device: str) -> None:
    """Memory of models that are gone, back to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
