"""Measure the configurations that advice is about on this machine, now: a short run of `bench`, read as evidence."""

from __future__ import annotations

from dataclasses import asdict

from t5accel.advice.evidence import Record
from t5accel.advice.need import Need
from t5accel.advice.recorded import TECHNIQUES as KNOWN
from t5accel.advice.recorded import read_rows
from t5accel.bench import BenchConfig, bench
from t5accel.errors import InputError
from t5accel.techniques import TECHNIQUES, THROUGHPUT, choose


def measure_now(need: Need, *, rounds: int = 5) -> Record:
    """Equal tokens first, then times, interleaved; no scores. Where memory matters, its peak as well.

    The model is loaded (from the hub, if it is there and not here), and its exports go to the user's cache.

    Raises:
        InputError: with beams or another device, which `bench` does not measure; or what `bench` refuses.
        ParityError: a technique in fp32 gives other tokens.

    >>> measure_now(Need("random:t5-small", beams=4))
    Traceback (most recent call last):
    ...
    t5accel.errors.InputError: Only greedy search on a CPU is measured here; beams is 4, device 'cpu'.
    """
    if need.beams > 1 or need.device != "cpu":
        raise InputError(
            f"Only greedy search on a CPU is measured here; beams is {need.beams}, device {need.device!r}."
        )
    config = BenchConfig(
        model=need.model, batch=need.batch, source_tokens=need.source_tokens, new_tokens=need.new_tokens,
        rounds=rounds, threads=need.threads, quality_limit=0, peak_memory=need.matters == "memory",
    )  # fmt: skip
    chosen = choose([technique.name for technique in TECHNIQUES if technique.name in KNOWN])
    if not config.peak_memory:  # which is measured of bench's own techniques alone
        chosen = (*chosen, THROUGHPUT)
    return read_rows(asdict(bench(config, techniques=chosen)), "measured now", fresh=True)
