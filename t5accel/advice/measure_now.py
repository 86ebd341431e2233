"""Measure the configurations that advice is about on this machine, now: a short run of `bench`, read as evidence."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from t5accel.advice.evidence import Record
from t5accel.advice.need import Need
from t5accel.advice.recorded import TECHNIQUES as KNOWN
from t5accel.advice.recorded import read_rows
from t5accel.bench import BenchConfig, bench
from t5accel.errors import InputError
from t5accel.graphs.recipes import RECIPES
from t5accel.techniques import TECHNIQUES, Generate, Subject, Technique, choose, graph_bytes


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
        chosen = (*chosen, for_throughput())
    return read_rows(asdict(bench(config, techniques=chosen)), "measured now", fresh=True)


def for_throughput() -> Technique:
    """8 bits, as ``accelerate(…, tuned_for="throughput")`` runs them.

    >>> for_throughput().name in KNOWN
    True
    """
    recipe = RECIPES["int8-dynamic"]

    def build(subject: Subject) -> Generate:
        from t5accel.backends.ort import OrtNumpy
        from t5accel.backends.ort_session import SessionSettings
        from t5accel.decoding.greedy import greedy

        backend = OrtNumpy(subject.export(recipe.name), settings=SessionSettings(threads=subject.threads))

        def generate(ids: np.ndarray, mask: np.ndarray, shortest: int, longest: int) -> np.ndarray:
            return greedy(backend, ids, mask, min_new_tokens=shortest, max_new_tokens=longest).sequences

        return generate

    return Technique(
        f"ONNX Runtime, our loop, {recipe.name}", "backends.ort", build,
        lambda subject: graph_bytes(subject, recipe.name), ("onnxruntime",), recipe,
    )  # fmt: skip
