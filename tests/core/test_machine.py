"""Limits are read from a fake file tree, the roofline is checked by hand; no test depends on how fast anything is."""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused import refused

from t5accel import machine
from t5accel.machine import cpu_threads, memory_bytes
from t5accel.roofline import decoder_weights_per_step, step_roofline

LINUX = sys.platform.startswith("linux")


def dims(layers=6, **changes) -> SimpleNamespace:
    """t5-small, unless told otherwise."""
    sizes = {"d_model": 512, "d_kv": 64, "vocab_size": 32128, "gated": False, "tied": True}
    per_layer = {"decoder_heads": (8,) * layers, "cross_heads": (8,) * layers, "decoder_ff": (2048,) * layers}
    return SimpleNamespace(**(sizes | per_layer | changes))


def write(root: Path, files: dict[str, str]) -> Path:
    """A fake file system below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sixteen_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


V1 = "4:cpu,cpuacct:/docker/abc\n3:cpuset:/docker/abc\n2:memory:/docker/abc\n"


def v1(folder: str, quota_us: int, period_us: int = 100_000, own: str = V1) -> dict[str, str]:
    numbers = {"quota": quota_us, "period": period_us}
    limits = {f"sys/fs/cgroup/{folder}/cpu.cfs_{name}_us": f"{number}\n" for name, number in numbers.items()}
    return {"proc/self/cgroup": own, **limits}


def v2(own: str, **limits: str) -> dict[str, str]:
    """A limit by the folder that it lies in, with __ for /; at the mount point where the name is ``here``."""
    folders = {f"{name.replace('__', '/')}/" if name != "here" else "": limit for name, limit in limits.items()}
    return {"proc/self/cgroup": f"0::{own}\n", **{f"sys/fs/cgroup/{k}cpu.max": limit for k, limit in folders.items()}}


TREES = {
    "nothing": ({}, 16),
    "v2 without a limit": (v2("/", here="max 100000\n"), 16),
    "v2 at the mount point": (v2("/", here="400000 100000\n"), 4),
    "a part of a core counts as one": (v2("/", here="150000 100000"), 2),
    "never below one": (v2("/", here="1000 100000"), 1),
    "a quota above the cores": (v2("/", here="9900000 100000"), 16),
    "v2, the parent is the tighter one": (
        v2("/kube/pod/box", kube__pod__box="max 100000", kube__pod="300000 100000", kube="800000 100000"), 3),
    "v2, a neighbour's limit is not ours": (v2("/kube/pod", kube__other="100000 100000"), 16),
    "v2, the host's path inside a container": (v2("/../../docker/abc", here="200000 100000"), 2),
    "v1": (v1("cpu,cpuacct/docker/abc", 250_000), 3),
    "v1 in a container, mounted as cpu": (v1("cpu", 50_000, 25_000), 2),
    "v1 without a limit": (v1("cpu", -1), 16),
    "both versions mixed": (
        {**v1("cpu", -1, own="1:cpu:/\n0::/box\n"), "sys/fs/cgroup/unified/box/cpu.max": "500000 100000\n"}, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_usable_threads(name, tmp_path, sixteen_cores):
    files, expected = TREES[name]
    assert cpu_threads(write(tmp_path, files)) == expected


def test_affinity_binds_before_a_wider_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5}, raising=False)
    root = write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000"})
    assert cpu_threads(root) == 2


def test_systems_without_affinity_count_their_cores(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cpu_threads(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cpu_threads(tmp_path) == 1


def test_memory_respects_both_kinds_of_container_limit(tmp_path):
    whole = memory_bytes(tmp_path)
    assert whole > 64 << 20
    version_2 = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}
    assert memory_bytes(write(tmp_path / "open", version_2)) == whole
    version_2["sys/fs/cgroup/a/memory.max"] = "67108864\n"
    assert memory_bytes(write(tmp_path / "v2", version_2)) == 64 << 20
    version_1 = {"proc/self/cgroup": V1, "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "33554432\n"}
    version_1["sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712\n"  # v1's way to say "no limit"
    assert memory_bytes(write(tmp_path / "v1", version_1)) == 32 << 20


# --- facts ------------------------------------------------------------------------------------------------------------


def test_facts_are_complete_and_can_be_recorded(monkeypatch):
    monkeypatch.setattr(machine, "_gpu", lambda: None)  # looking for a GPU imports torch: slow, and not the point here
    facts = json.loads(json.dumps(machine.facts()))
    assert set(facts) == {
        "cpu", "logical_cores", "usable_threads", "memory_bytes", "cpu_flags", "os", "python", "gpu",
    }  # fmt: skip
    assert 1 <= facts["usable_threads"] <= facts["logical_cores"]


def test_flags_and_model_of_two_kinds_of_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_gpu", lambda: None)
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr(machine, "_macos_cpu", lambda: None)
    cores = "processor\t: 0\nmodel name\t: Fast 9000\nflags\t\t: fpu avx2 avx512f avx512_vnni amx_int8 avx512_bf16x\n"
    x86 = machine.facts(write(tmp_path / "x86", {"proc/cpuinfo": cores + "\n" + cores.replace("0", "1", 1)}))
    assert x86["cpu"] == "Fast 9000"
    assert x86["cpu_flags"] == ["avx2", "avx512f", "avx512_vnni", "amx_int8"]
    cores = "processor : 0\nFeatures : fp asimd asimddp i8mm bf16\n"
    arm = machine.facts(write(tmp_path / "arm", {"proc/cpuinfo": cores}))
    assert arm["cpu"] is None and arm["cpu_flags"] == ["asimd", "asimddp", "i8mm", "bf16"]
    unknown = machine.facts(tmp_path / "no such folder")
    assert unknown["cpu"] is None and unknown["cpu_flags"] is None


def test_versions_name_what_is_installed_and_import_nothing(monkeypatch):
    def installed(name):
        if name in ("numpy", "onnxruntime-gpu"):
            return "9.9"
        raise machine.metadata.PackageNotFoundError(name)

    assert "numpy" in machine.versions()
    monkeypatch.setattr(machine.metadata, "version", installed)
    assert machine.versions() == {"numpy": "9.9", "onnxruntime-gpu": "9.9"}


def test_peak_memory_never_falls_and_follows_a_big_allocation():
    before = machine.peak_memory_bytes()
    big = bytearray(64 << 20)
    big[::4096] = b"x" * len(big[::4096])  # touch every page, or the kernel hands out none
    held = machine.resident_memory_bytes()
    del big
    assert held >= 64 << 20
    assert machine.peak_memory_bytes() >= max(before, held - (1 << 20))


@pytest.mark.skipif(not LINUX, reason="the inherited peak is Linux's")
def test_a_small_child_does_not_report_its_parents_peak():
    code = (
        "import subprocess, sys\n"
        "big = bytearray(300 << 20)\n"
        "child = 'from t5accel.machine import peak_memory_bytes; print(peak_memory_bytes())'\n"
        "subprocess.run([sys.executable, '-c', child], check=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1 << 20 < int(done.stdout) < 200 << 20


def test_peak_memory_from_getrusage_knows_its_unit(monkeypatch):
    pytest.importorskip("resource")
    monkeypatch.setattr(machine, "_read", lambda path: None)
    monkeypatch.setattr(machine.sys, "platform", "linux")
    kib_counted = machine.peak_memory_bytes()
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    assert machine.peak_memory_bytes() * 1024 == pytest.approx(kib_counted, rel=0.2)


# --- rates ------------------------------------------------------------------------------------------------------------


def test_rates_are_positive_and_finite(monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)  # the numpy path; torch would take seconds to import
    for rate in (machine.bandwidth_bytes_per_s(1 << 20), machine.gemm_flops_per_s(32, "float64")):
        assert math.isfinite(rate) and rate > 0


def test_a_product_counts_two_operations_per_multiply_add(monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    monkeypatch.setattr(machine, "_best_s", lambda run: 0.5)
    assert machine.gemm_flops_per_s(10, "float64") == 2 * 10**3 / 0.5


def test_bandwidth_is_that_of_the_best_pass_and_every_byte_is_read(monkeypatch):
    read, seconds, dot = [], [2.0, 1.0, 4.0], machine.np.dot
    monkeypatch.setattr(machine.np, "dot", lambda a, b, out: read.append(a.nbytes) or dot(a, b, out=out))
    monkeypatch.setattr(machine.timeit, "repeat", lambda run, number, repeat: read.clear() or run() or seconds)
    rates = machine.read_rates(3 << 20, passes=3)
    assert rates == [sum(read) / one for one in seconds] and sum(read) >= 60 << 20
    assert machine.bandwidth_bytes_per_s(3 << 20) == max(rates)


def test_bad_values_say_what_was_given():
    refused(machine.bandwidth_bytes_per_s, "size_bytes", 100)
    refused(partial(machine.read_rates, 1 << 20), "passes", 0)
    refused(machine.gemm_flops_per_s, "n", 0, match="^n must")
    refused(partial(machine.gemm_flops_per_s, 8), "dtype", "int8", match="dtype .*float32")
    call = partial(step_roofline, dims(), bandwidth=1, gemm=1)
    refused(call, "precision", "fp8", match="precision .*fp32")
    for name, value in (("batch", 0), ("position", 1.5), ("bandwidth", 0), ("gemm", math.nan)):
        refused(call, name, value, match=f"{name} .* got {value}")
    refused(partial(step_roofline, bandwidth=1, gemm=1), "dims", dims(cross_heads=(8,)), match="one value per layer")


# --- roofline ---------------------------------------------------------------------------------------------------------


def test_t5_small_by_hand():
    layer = 4 * 512 * 512 + 2 * 512 * 512 + 2 * 512 * 2048 + 3 * 512
    assert decoder_weights_per_step(dims()) == 6 * layer + 512 + 32128 * 512
    step = step_roofline(dims(), bandwidth=60e9, gemm=214e9, source_tokens=64, position=32)
    assert step.weight_bytes == pytest.approx(154e6, rel=1e-3)
    assert step.bytes_per_step - step.weight_bytes == 6 * 2 * 8 * 64 * (64 + 32) * 4
    assert step.flops_per_step == 2 * (6 * layer + 512 + 32128 * 512) + 6 * 8 * (64 + 32) * (2 * 64 + 2 * 64)
    assert step.bound == "bandwidth" and step.floor_s == step.read_s


def test_the_count_equals_the_weights_of_a_real_decoder():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=96, d_model=24, d_kv=10, d_ff=40, num_layers=1, num_decoder_layers=3, num_heads=2,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
    left_out = ("embed_tokens", "relative_attention_bias", "EncDecAttention.k", "EncDecAttention.v")
    counted = sum(
        weight.numel()
        for name, weight in model.decoder.named_parameters()
        if not any(part in name for part in left_out)
    )  # fmt: skip
    from t5accel.models.sizes import T5Dims  # here, for it imports torch

    assert decoder_weights_per_step(T5Dims.of(model)) == counted + model.lm_head.weight.numel()


def test_pruned_layers_count_what_they_kept():
    full = decoder_weights_per_step(dims(2))
    pruned = dims(2, decoder_heads=(8, 5), cross_heads=(6, 8), decoder_ff=(2048, 1000))
    assert full - decoder_weights_per_step(pruned) == 512 * (3 * 64 * 4 + 2 * 64 * 2 + 1048 * 2)
    gated = decoder_weights_per_step(dims(2, gated=True))
    assert gated - full == 2 * 512 * 2048


def test_a_batch_shares_the_weights_and_turns_compute_bound():
    one, many = (step_roofline(dims(), batch=batch, bandwidth=60e9, gemm=214e9) for batch in (1, 64))
    assert many.weight_bytes == one.weight_bytes and many.flops_per_step == 64 * one.flops_per_step
    assert (one.bound, many.bound) == ("bandwidth", "compute")
    assert many.floor_s == many.compute_s > many.read_s


def test_precision_changes_the_bytes_and_not_the_operations():
    steps = {
        name: step_roofline(dims(), name, bandwidth=1, gemm=1) for name in ("fp32", "fp16", "bf16", "int8", "int4")
    }
    weights = decoder_weights_per_step(dims())
    per_weight = {name: step.weight_bytes / weights for name, step in steps.items()}
    assert per_weight == {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "int4": 0.5}
    cache = {name: step.bytes_per_step - step.weight_bytes for name, step in steps.items()}
    assert cache["fp32"] == cache["int8"] == cache["int4"] == 2 * cache["fp16"] == 2 * cache["bf16"]
    assert len({step.flops_per_step for step in steps.values()}) == 1


@pytest.mark.parametrize(("precision", "head"), [("fp32", 4.0), ("bf16", 2.0), ("int8", 1.0), ("int4", 0.5)])
def test_a_shortlist_reads_its_copy_of_the_head_in_8_bits(precision: str, head: float) -> None:
    whole, shortlist = (
        step_roofline(dims(), precision, bandwidth=1, gemm=1, shortlist=wanted).weight_bytes for wanted in (False, True)
    )
    saved = max(0, 32128 * 512 * (head - 1) - 4 * 32128)
    assert whole - shortlist == saved and (saved > 0) == (head > 1)


@given(
    batch=st.integers(1, 64),
    source_tokens=st.integers(1, 512),
    position=st.integers(1, 512),
    bandwidth=st.floats(1e6, 1e13),
    gemm=st.floats(1e6, 1e16),
    precision=st.sampled_from(["fp32", "bf16", "int8", "int4"]),
)
def test_the_floor_is_the_longer_bound_and_more_work_never_lowers_it(
    batch, source_tokens, position, bandwidth, gemm, precision
):
    def floor(**changes):
        options = {"batch": batch, "source_tokens": source_tokens, "position": position} | changes
        return step_roofline(dims(), precision, bandwidth=bandwidth, gemm=gemm, **options)

    step = floor()
    assert step.floor_s == max(step.read_s, step.compute_s) > 0
    assert step.floor_s == (step.read_s if step.bound == "bandwidth" else step.compute_s)
    for more in ({"batch": batch + 1}, {"source_tokens": source_tokens + 1}, {"position": position + 1}):
        assert floor(**more).bytes_per_step > step.bytes_per_step
        assert floor(**more).floor_s >= step.floor_s
    assert json.loads(json.dumps(asdict(step)))["bound"] == step.bound


# A GPU's facts, from made-up ones


def test_what_a_gpu_says_of_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    card = SimpleNamespace(name="NVIDIA H200", total_memory=150_000_000_000, major=9, minor=0,
                           multi_processor_count=132, memory_clock_rate=3_201_000, memory_bus_width=6144)  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = machine.facts()["gpu"]
    assert (found["name"], found["capability"], found["sm_count"]) == ("NVIDIA H200", [9, 0], 132)
    assert found["bus_bytes_per_s"] == pytest.approx(4.917e12, rel=1e-3) and found["driver"] is None
    del card.memory_clock_rate  # as in older releases of torch
    assert machine.facts()["gpu"]["bus_bytes_per_s"] is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\ncase $2 in *driver*) echo 580.65;; *) echo 1980, 3201;; esac\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert machine.facts()["gpu"]["driver"] == "580.65"
    assert machine.gpu_clocks_mhz() == {"sm": 1980, "memory": 3201}
    program.write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    assert machine.gpu_clocks_mhz() == {} and machine.facts()["gpu"]["driver"] is None
