"""Measure how fast this machine reads each model's weights, and write the least time of a decoder step that follows.

No recorded step of the same model on the same make of CPU may be faster than that; ``tests/repo/test_results.py`` asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from statistics import median

from bench.results import Row, record_parser, write_rows
from bench.roofline import step_roofline
from t5accel import machine
from t5accel.graphs.shortlist_head import SMALLEST_BYTES
from t5accel.models.load import load_model
from t5accel.models.sizes import T5Dims

MODELS = ("random:t5-small", "mini", "mini-d1", "mini-d1p")


def floor_rows(model: str, precision: str, passes: int) -> Iterator[Row]:
    """A step at batch 1 with all logits, and with a shortlist where an export of the model has one.

    Its floor is the reading alone: at batch 1 nothing else comes near it.
    """
    dims, has_one = T5Dims.of(load_model(model)[0]), False
    if precision == "fp32":
        has_one = 4 * dims.vocab_size * dims.d_model >= SMALLEST_BYTES
    for shortlist in (False, True) if has_one else (False,):
        size = step_roofline(dims, precision, bandwidth=1, gemm=1, shortlist=shortlist).weight_bytes
        rates = machine.read_rates(size, passes)
        least = asdict(step_roofline(dims, precision, bandwidth=max(rates), gemm=1, shortlist=shortlist))
        yield {
            "measured": "floor", "system": "shortlist" if shortlist else "all logits", "model": model,
            "threads": machine.cpu_threads(), "bytes_per_s": max(rates), "floor_s": least["read_s"],
            **{key: least[key] for key in ("precision", "batch", "weight_bytes", "bytes_per_step", "read_s")},
            "settings": {"passes": passes, "median_bytes_per_s": median(rates), "slowest_bytes_per_s": min(rates)},
        }  # fmt: skip


def main() -> None:
    """Measure, and write the rows to a file."""
    parser = record_parser("Measure how fast weights are read, at each model's size.")
    parser.add_argument("--passes", type=int, default=50, help="over the weights, of which the best counts (50)")
    args = parser.parse_args()
    rows = [row for model in MODELS for precision in ("fp32", "int8", "int4")
            for row in floor_rows(model, precision, args.passes)]  # fmt: skip
    write_rows(args.json, rows, command=f"python -m bench.record.floors --json FILE --passes {args.passes}")
    for row in rows:
        print(
            f"{row['model']:16} {row['precision']:5} {row['system']:10} {row['bytes_per_step'] / 1e6:6.1f} MB at "
            f"{row['bytes_per_s'] / 1e9:5.1f} GB/s: {row['floor_s'] * 1e3:.2f} ms"
        )


if __name__ == "__main__":
    main()
