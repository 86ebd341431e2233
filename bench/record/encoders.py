"""Measure our encoder alone beside its peers: time, peak memory and cosine to torch's fp32.

OpenVINO's environment is that of `make peers`; `make build/peers/llama-cpp/package` makes llama.cpp's.
``data/results/encoders-*.json`` are runs. Each encoder has its own process, whose peak is that of loading and of its
largest batch so far; other processes have converted the model.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.harness import Contender, run_comparison
from bench.peers import Worker
from bench.results import Row, record_parser, write_rows
from t5accel import machine
from t5accel.errors import PeerError
from t5accel.models.load import load_model
from t5accel.timing import Work

ROOT = Path(__file__).resolve().parents[2]
MODEL = "random:t5-base"
CELLS = ((1, 32), (1, 512), (32, 32), (4, 512))  # texts and their tokens
# By the name in rows: the encoder in `bench.encoder_worker`, its environment, its precision.
ENCODERS = {
    "torch": ("torch", "ours", "fp32"),
    "torch bf16": ("torch-bf16", "ours", "bf16"),
    "torch dynamic int8": ("torch-int8", "ours", "int8"),
    "optimum-onnx": ("optimum", "ours", "fp32"),
    "OpenVINO": ("openvino", "openvino", "fp32"),
    "OpenVINO int8": ("openvino-int8", "openvino", "int8"),
    "llama.cpp q8_0": ("llama-cpp", "llama-cpp", "int8"),
    "t5accel": ("ours", "ours", "fp32"),
    "t5accel bf16": ("ours-bf16", "ours", "bf16"),
    "t5accel int8": ("ours-int8", "ours", "int8"),
    "t5accel int4": ("ours-int4", "ours", "int4"),
}


class EncoderWorker(Worker):
    """One encoder in a separate process, loaded and waiting; ``peak`` is its memory so far, in bytes."""

    def _read(self) -> dict[str, Any]:
        answer = super()._read()
        self.peak = answer["peak"]
        return answer

    def encode(self, ids: Path, out: Path | None = None) -> Path | None:
        """Encode a file of ids, into another one if it is named."""
        asked = {"ids": str(ids), "out": str(out) if out else None}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        self._read()
        return out


def save_encoder(name: str, folder: Path) -> None:
    """The encoder of a model of random weights, as ``T5EncoderModel`` saves it."""
    from transformers import T5EncoderModel

    if not (folder / "config.json").exists():
        model = load_model(name)[0]
        alone = T5EncoderModel(model.config)
        alone.encoder.load_state_dict(model.encoder.state_dict())
        alone.shared.weight = alone.encoder.embed_tokens.weight
        alone.save_pretrained(folder)


def start(name: str, model: Path, build: Path, threads: int) -> EncoderWorker:
    """A system's worker, with the model loaded; its own form of the model is written before, if it is missing."""
    encoder, environment, _ = ENCODERS[name]
    python = Path(sys.executable) if environment == "ours" else build / environment / "bin/python"
    if not python.exists():
        raise PeerError(f"{python} is missing: `make peers` makes the environment.")
    scratch = model / f"{encoder}-{environment}"
    command = [python, ROOT / "bench/encoder_worker.py", encoder, model, "--scratch", scratch, "--threads", threads]
    command = [*map(str, command)]
    subprocess.run([*command, "--convert"], check=True, stdout=sys.stderr, cwd=ROOT)
    return EncoderWorker(command, log=build / f"{encoder}-encoder.log", environment={"OMP_NUM_THREADS": str(threads)})


def least_cosine(states: np.ndarray, reference: np.ndarray) -> float:
    """The least cosine, over tokens, between hidden states (…, d_model)."""
    lengths = np.linalg.norm(states, axis=-1) * np.linalg.norm(reference, axis=-1)
    return float(((states * reference).sum(axis=-1) / lengths).min())


def measure(
    workers: dict[str, EncoderWorker], cells: Sequence[tuple[int, int]], scratch: Path, *, rounds: int, model: str,
    threads: int,
) -> list[Row]:  # fmt: skip
    """A row for each system and cell; the first system is the reference."""
    rows: list[Row] = []
    for batch, length in tqdm(cells, unit="cell"):
        ids = np.random.default_rng(0).integers(3, 32_000, (batch, length))
        np.save(given := scratch / "ids.npy", ids)
        entries = [
            Contender(name, lambda worker=worker: partial(worker.encode, given), exact=False,
                      facts={"precision": ENCODERS[name][2], "model": model})
            for name, worker in workers.items()
        ]  # fmt: skip
        work = Work(batch, length, 1, threads=threads)
        found = run_comparison(entries, work, rounds=rounds, atol=None, new_tokens=None, beams=None)
        states = [np.load(worker.encode(given, scratch / "out.npy")) for worker in workers.values()]
        for row, own, worker in zip(found, states, workers.values(), strict=True):
            row |= {"cosine": least_cosine(own, states[0]), "peak_memory_bytes": worker.peak}
        rows += found
    return rows


def main() -> None:
    """Start every encoder, measure cell by cell, and write the rows."""
    parser = record_parser(__doc__.splitlines()[0], rounds=7)
    parser.add_argument("--build", type=Path, default=ROOT / "build/peers", help="where the environments are")
    parser.add_argument("--systems", nargs="+", choices=ENCODERS, default=[*ENCODERS], help="first: the reference")
    parser.add_argument("--cells", nargs="+", type=lambda text: tuple(map(int, text.split(","))), default=CELLS)
    args = parser.parse_args()
    threads, model = machine.cpu_threads(), args.build / "models" / "t5-base-encoder"
    save_encoder(MODEL, model)
    workers = {name: start(name, model, args.build, threads) for name in tqdm(args.systems, desc="loading")}
    loaded: list[Row] = [
        {"measured": "memory", "system": name, "model": MODEL, "precision": ENCODERS[name][2],
         "peak_memory_bytes": worker.peak}
        for name, worker in workers.items()
    ]  # fmt: skip
    versions = {f"{name}: {key}": value for name, worker in workers.items() for key, value in worker.versions.items()}
    with TemporaryDirectory() as scratch:
        rows = measure(workers, args.cells, Path(scratch), rounds=args.rounds, model=MODEL, threads=threads)
    for worker in workers.values():
        worker.close()
    command = shlex.join(["python", "-m", "bench.record.encoders", *sys.argv[1:]])
    write_rows(args.json, [*loaded, *rows], command=command, versions={**machine.versions(), **versions})


if __name__ == "__main__":
    main()
