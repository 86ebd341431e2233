"""The posts' own two models on a GPU: GPT-2 with a cache or anew, fed or bound; a pruned BERT large in fp32 and fp16.

    python -m bench.gpu.other_models --json data/results    # into gpu-<card>.json, beside the cells of the GPU suite

It needs torch, transformers, onnx and onnxruntime-gpu. Weights are random: this is about speed. Every cell is kept when
it is measured, and what is there is not measured again, unless something in it failed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.bert.ladder import ON_GPU, Readers, speed_rows
from bench.bert.model import RANDOM_SIZES, random_bert
from bench.gpt2 import OPTIMUM, WAYS, Gpt2, gpt2_rows, random_gpt2
from bench.gpu.cells import Cell
from bench.gpu.measurement import let_go
from bench.gpu.suite import SUITE, Book, slug, table
from bench.results import Row, environment
from t5accel import machine
from t5accel.errors import MissingPackageError

GPT2, LARGE = "random:gpt2", "random:bert-large"
KEPT = {"num_attention_heads": 0.69, "intermediate_size": 0.4}  # of each layer: what the pruned reader has left in all
Measure = Callable[[], list[Row]]


def cells(
    folder: Path, *, device: str = "cuda", sizes: Mapping[str, Mapping[str, int]] | None = None
) -> dict[str, Measure]:
    """By the name of a cell, what measures it.

    Args:
        folder: for graphs.
        device: ``"cuda"``, or ``"cpu"`` to try it out.
        sizes: of "gpt2" and "bert" in place of those of GPT-2 and BERT large.

    >>> [*cells(Path("graphs"), device="cpu")][:2]
    ['random:gpt2, 64 tokens', 'random:bert-large, pruned, 1 × 512']
    """
    sizes = sizes or {"gpt2": {}, "bert": RANDOM_SIZES["bert-large"]}
    threads, ways = machine.cpu_threads(), [way for way in WAYS if way != OPTIMUM]

    @cache
    def subject() -> Gpt2:
        return Gpt2(random_gpt2(sizes["gpt2"]), folder / "gpt2", threads, device)

    @cache
    def readers() -> Readers:
        heads, neurons = (round(share * sizes["bert"][name]) for name, share in KEPT.items())
        layers = sizes["bert"]["num_hidden_layers"]
        left = {"heads": [heads] * layers, "neurons": [neurons] * layers}
        with torch.device("meta"):  # only its sizes are asked for
            whole = random_bert(sizes["bert"])
        models = {"whole": whole, "pruned": random_bert({**sizes["bert"], "layer_widths": left}, seed=1)}
        return Readers(models, folder / "bert-large", (), threads, device)

    def gpt2(new_tokens: int, rounds: int) -> list[Row]:
        return gpt2_rows(subject(), model=GPT2, new_tokens=new_tokens, ways=ways, rounds=rounds, keep_going=True)

    def bert(batch: int, tokens: int) -> list[Row]:
        return speed_rows(ON_GPU, readers(), model=LARGE, batch=batch, tokens=tokens, rounds=11, keep_going=True)

    return {
        f"{GPT2}, 64 tokens": lambda: gpt2(64, 5),
        f"{LARGE}, pruned, 1 × 512": lambda: bert(1, 512),
        f"{LARGE}, pruned, 8 × 512": lambda: bert(8, 512),
        f"{GPT2}, 256 tokens": lambda: gpt2(256, 3),
    }


def main() -> None:
    """Measure what is not measured yet."""
    parser = argparse.ArgumentParser(description="Measure GPT-2 and a pruned BERT large on a GPU.")
    parser.add_argument("--json", type=Path, required=True, help="the folder of gpu-<card>.json")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise MissingPackageError("This needs a GPU and a torch that sees it, and there is none here.")
    torch.set_float32_matmul_precision("highest")  # as in the suite
    path = given.json / f"gpu-{slug(torch.cuda.get_device_name())}.json"
    book = Book(path, environment() | {"suite": SUITE, "device": "cuda"})
    with TemporaryDirectory() as folder:
        for name, measure in cells(Path(folder)).items():
            cell = Cell(name, "speed")
            if not book.of(cell) or any("failed" in row for row in book.of(cell)):
                book.keep(cell, [{**row, "cell": name} for row in measure()])
                print(table(book.of(cell)), flush=True)
                let_go("cuda")


if __name__ == "__main__":
    main()
