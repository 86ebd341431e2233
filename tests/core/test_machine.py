"""Limits are read from a fake file tree, no test depends on how fast anything is."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from t5accel import machine
from t5accel.machine import cpu_threads, memory_bytes

LINUX = sys.platform.startswith("linux")


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


def test_bandwidth_is_that_of_the_best_pass_and_every_byte_is_read(monkeypatch):
    read, seconds, dot = [], [2.0, 1.0, 4.0], machine.np.dot
    monkeypatch.setattr(machine.np, "dot", lambda a, b, out: read.append(a.nbytes) or dot(a, b, out=out))
    monkeypatch.setattr(machine.timeit, "repeat", lambda run, number, repeat: read.clear() or run() or seconds)
    rates = machine.read_rates(3 << 20, passes=3)
    assert rates == [sum(read) / one for one in seconds] and sum(read) >= 60 << 20
    assert machine.bandwidth_bytes_per_s(3 << 20) == max(rates)


# A GPU's facts, from made-up ones


def test_what_a_gpu_says_of_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    card = SimpleNamespace(name="NVIDIA H200", total_memory=150_000_000_000, major=9, minor=0,
                           multi_processor_count=132, memory_clock_rate=3_201_000, memory_bus_width=6144)  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)  # a build with CUDA asks the card
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
    assert machine.nvidia_smi("clocks.sm", "clocks.mem") == ["1980", "3201"]
    program.write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    assert machine.nvidia_smi("clocks.sm") == [] and machine.facts()["gpu"]["driver"] is None
