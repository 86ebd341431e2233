"""ONNX Runtime sessions with settings for decoding."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel.backends.ort_memory import huge_pages
from t5accel.checks import as_count
from t5accel.errors import ExportError, InputError, MissingPackageError, install
from t5accel.graphs.contract import WEIGHTS, GraphSpec
from t5accel.graphs.manifest import Manifest
from t5accel.graphs.ort_levels import as_level, import_onnxruntime, optimization_level

if TYPE_CHECKING:
    import onnxruntime

    from t5accel.decoding.certified_argmax import Shortlist

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
MAX_THREADS = 1024


@dataclass(frozen=True)
class SessionSettings:
    """How a graph is run; raises ``InputError`` for an invalid value.

    >>> SessionSettings(threads=2, spinning=False).device
    'cpu'
    """

    # Within one operator, 1 to 1024; by default as many as this process may use, which in a container is its quota.
    threads: int | None = None
    # Threads wait for the next operator awake: a step is hundreds of operators of microseconds, and waking takes longer
    # than most of them. Turn it off where cores are shared with other work.
    spinning: bool = True
    arena: bool = True  # keep freed memory for the next step
    huge_pages: bool = True  # move the weights to huge pages where the system can, see `ort_memory.huge_pages`
    shortlist: bool = True  # on a CPU, find the likeliest token by an export's shortlist
    openvino: bool = False  # encode batches of more than 2,048 tokens by OpenVINO, which keeps its own weights, in fp32
    encoder_precision: str = "fp32"  # or "bf16": OpenVINO encodes all batches, with keys and values some 2 % off
    device: str = "cpu"  # or "cuda"
    graph_optimization: str = "all"  # or "disable", "basic", "extended", "layout", see `graphs.ort_levels`

    def __post_init__(self) -> None:
        if self.threads is not None and as_count(self.threads, "threads", at_least=1) > MAX_THREADS:
            raise InputError(f"threads must be at most {MAX_THREADS}, got {self.threads}.")
        for name in ("spinning", "arena", "huge_pages", "shortlist", "openvino"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if not isinstance(self.device, str) or self.device not in PROVIDERS:
            raise InputError(f"device must be {' or '.join(PROVIDERS)}, got {self.device!r}.")
        if self.encoder_precision not in ("fp32", "bf16") or (self.encoder_precision == "bf16" and not self.openvino):
            raise InputError(
                f"encoder_precision must be 'fp32', or 'bf16' by OpenVINO (runtime='openvino'), got "
                f"{self.encoder_precision!r}."
            )
        if self.openvino and self.device != "cpu":
            raise InputError(f"device must be 'cpu' with openvino=True, got {self.device!r}.")
        as_level(self.graph_optimization, "graph_optimization")


def shared_weights(folder: Path, manifest: Manifest) -> dict[str, onnxruntime.OrtValue]:
    """The weights that both graphs of an export read, mapped into memory once, for `open_session`."""
    # Each session would map them by itself, and the system would count what it loads of them twice.
    ort_value = import_onnxruntime().OrtValue
    return {name: ort_value.ortvalue_from_numpy(_mapped(folder, place)) for name, place in manifest.shared.items()}


def shortlist_of(folder: Path, manifest: Manifest, weights: Mapping[str, onnxruntime.OrtValue]) -> Shortlist | None:
    """An export's shortlist, if it has one; ``weights`` are its `shared_weights`, which may hold the rows."""
    if not manifest.shortlist:
        return None
    from t5accel.decoding.certified_argmax import OutputHead, Shortlist

    place = manifest.shortlist["rows"]
    same = [weights[name].numpy() for name, shared in manifest.shared.items() if shared == place]
    known = {name: manifest.shortlist[name] for name in ("largest_row", "largest_error")}
    if bias := manifest.shortlist.get("bias"):
        known["bias"] = _mapped(folder, bias)
    return Shortlist(OutputHead(same[0] if same else _mapped(folder, place), **known))


def _mapped(folder: Path, place: Mapping[str, Any]) -> np.ndarray:
    """A weight in an export's weight file, mapped into memory; ``place`` is its entry in the manifest."""
    shape = tuple(place["shape"])
    return np.memmap(folder / WEIGHTS, place["dtype"], "r", place["offset"], shape).view(np.ndarray)


_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()
SETTLE_S = 0.01  # before a fork


@cache
def session_class() -> type[onnxruntime.InferenceSession]:
    """ONNX Runtime's session, which refuses to run in a child of a process that was forked while it ran."""
    # The child has none of the threads: the run never ends there, and each further one would wait for it.

    class Session(import_onnxruntime().InferenceSession):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            self.threads: set[int] = set()  # in a run at the moment
            self.is_torn = False
            _OPEN.add(self)

        def run(self, *arguments: Any, **options: Any) -> Any:
            return self._watched(super().run, *arguments, **options)

        def run_with_iobinding(self, *arguments: Any, **options: Any) -> Any:
            return self._watched(super().run_with_iobinding, *arguments, **options)

        def _watched(self, run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            if self.is_torn:
                raise InputError(
                    "This process was forked while another thread ran the model, so ONNX Runtime would hang in it. "
                    "Open the model after the fork, or start processes by spawn."
                )
            thread = threading.get_ident()
            self.threads.add(thread)
            try:
                return run(*arguments, **options)
            finally:
                self.threads.discard(thread)

    return Session


def _before_a_fork() -> None:
    # A thread that has just run holds a lock while it goes to sleep. In a child that got it locked the next run would
    # wait for ever: 9 of 3,000 forks right after a run did so on two busy cores, and with this pause 0 of 2,600.
    if _OPEN:
        time.sleep(SETTLE_S)


def _after_a_fork() -> None:
    for session in _OPEN:
        session.is_torn = session.is_torn or bool(session.threads)
        session.threads.clear()


if hasattr(os, "register_at_fork"):  # which Windows lacks, as it lacks forks
    os.register_at_fork(before=_before_a_fork, after_in_child=_after_a_fork)


def open_session(
    path: str | os.PathLike[str],
    settings: SessionSettings,
    weights: Mapping[str, onnxruntime.OrtValue] | None = None,
    *,
    provider_options: Mapping[str, str] | None = None,
) -> onnxruntime.InferenceSession:
    """A session on one graph.

    ``weights`` replace the graph's own of the same name. Raises ``ExportError`` for
    a file that this ONNX Runtime cannot run, and ``MissingPackageError`` without the onnxruntime of the device.
    """
    from t5accel import machine

    onnxruntime = import_onnxruntime()
    provider = PROVIDERS[settings.device]
    if provider not in onnxruntime.get_available_providers():
        raise MissingPackageError(
            f"This onnxruntime has no {provider}, which device={settings.device!r} needs: {install('gpu')}, in an "
            "environment without the extra cpu."
        )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = optimization_level(settings.graph_optimization)
    options.intra_op_num_threads = settings.threads or machine.cpu_threads()
    options.inter_op_num_threads = 1  # the layers of a step depend on each other
    # A plan of a run's memory is made for each combination of input shapes, and kept: as the past grows, at every step.
    options.enable_mem_pattern = False
    options.enable_cpu_mem_arena = settings.arena
    options.log_severity_level = 3  # errors only
    # x86 without VNNI adds products of uint8 by int8 in pairs, in 16 bits that saturate. There, from level "extended"
    # on, this makes int8 weights uint8, whose sums are exact. With VNNI all sums are exact, and those of int8 take half
    # the time: ONNX Runtime itself would make them uint8 on every x86.
    with_vnni = bool({"avx512_vnni", "avx_vnni"} & {*(machine.facts(gpu=False)["cpu_flags"] or ())})
    options.add_session_config_entry("session.x64quantprecision", str(int(not with_vnni)))
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(settings.spinning)))
    # Encoder and decoder have their own threads; those of the one must not spin while the other runs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    for name, value in (weights or {}).items():
        options.add_initializer(name, value)
    # TensorFloat-32 would round the factors of every product to 10 bits: an error of 1e-3 in fp32.
    defaults = {"use_tf32": "0"} if settings.device == "cuda" else {}
    # No fallback: it prints to standard output and runs on the CPU in place of a GPU.
    how = dict(providers=[provider], provider_options=[{**defaults, **(provider_options or {})}], enable_fallback=0)
    try:
        with huge_pages(settings.huge_pages):
            session = session_class()(str(Path(path)), options, **how)
    except Exception as error:  # of several kinds, none of them documented
        raise ExportError(
            f"{path} cannot be run on device={settings.device!r} by onnxruntime {onnxruntime.__version__}: {error}"
        ) from error
    session.disable_fallback()
    session.weights = weights  # which ONNX Runtime only points to: a run may outlive the backend that was closed
    # Without its libraries onnxruntime logs that and goes on; 1.20 falls back to the CPU all the same while it opens.
    if provider not in session.get_providers():
        raise MissingPackageError(
            f"onnxruntime {onnxruntime.__version__} could not load {provider}: it needs CUDA and cuDNN libraries of "
            "its version. A torch with CUDA brings them; import it first, or call onnxruntime.preload_dlls()."
        )
    return session


def require_contract(session: onnxruntime.InferenceSession, spec: GraphSpec, path: Path) -> None:
    """Raise ``ExportError`` for a graph whose inputs or outputs differ from its manifest."""
    found = {value.name: (value.type, value.shape) for value in (*session.get_inputs(), *session.get_outputs())}
    for tensor in (*spec.inputs, *spec.outputs):
        kind, shape = found.get(tensor.name, ("", []))
        sizes = zip(tensor.shape, shape, strict=False)
        if (
            kind not in (f"tensor({tensor.dtype})", f"tensor({tensor.dtype.removesuffix('32')})")
            or len(shape) != len(tensor.shape)
            or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes)
        ):
            raise ExportError(
                f"{path} lacks {tensor.name} of shape {tensor.shape} in {tensor.dtype}, which its manifest describes. "
                "Export again with overwrite=True (t5accel export --model MODEL --out FOLDER --overwrite)."
            )
