"""Open ONNX Runtime sessions for decoding: the settings that matter for it, and why."""

from __future__ import annotations

import os
import threading
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
MOST_THREADS = 1024


@dataclass(frozen=True)
class SessionSettings:
    """How a graph is run.

    Attributes:
        threads: within one operator, 1 to 1024; by default those that this process may really use, so that a container
            with a quota of two cores on a machine of 64 does not start 64.
        spinning: threads wait for the next operator awake. A decoding step is hundreds of operators of microseconds
            each, and waking a thread takes longer than most of them; where cores are shared with other work, turn it
            off.
        memory_pattern: plan all memory of a run ahead, once for each combination of input shapes. While the history
            grows no combination comes twice: every step would make a plan, and all plans are kept. So it is off.
        arena: keep freed memory for the next step instead of giving it back to the system each time.
        huge_pages: move the weights to huge pages, where the system lets us; see `huge_pages`.
        shortlist: find the likeliest token by a short list, where an export has one (`shortlist`): the same token,
            sooner, on a CPU.
        openvino: encode batches of more than 2,048 tokens by OpenVINO, which multiplies faster there, from the same
            graph in fp32; it takes memory for weights of its own (`openvino_encoder`).
        device: ``"cpu"`` or ``"cuda"``.
        graph_optimization: what is made of the graph when it is opened: ``"disable"``, ``"basic"``, ``"extended"``,
            ``"layout"`` or ``"all"``; see `portability`.

    Raises:
        InputError: a value is none of these.

    >>> SessionSettings(threads=2, spinning=False).device
    'cpu'
    """

    threads: int | None = None
    spinning: bool = True
    memory_pattern: bool = False
    arena: bool = True
    huge_pages: bool = True
    shortlist: bool = True
    openvino: bool = False
    device: str = "cpu"
    graph_optimization: str = "all"

    def __post_init__(self) -> None:
        if self.threads is not None and as_count(self.threads, "threads", at_least=1) > MOST_THREADS:
            raise InputError(f"threads is {self.threads}; more than {MOST_THREADS} are a mistake.")
        for name in ("spinning", "memory_pattern", "arena", "huge_pages", "shortlist", "openvino"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} is {getattr(self, name)!r}; give True or False.")
        if not isinstance(self.device, str) or self.device not in PROVIDERS:
            raise InputError(f"device is {self.device!r}; give one of {', '.join(PROVIDERS)}.")
        if self.openvino and self.device != "cpu":
            raise InputError(f"openvino=True is for device='cpu', not {self.device!r}.")
        as_level(self.graph_optimization, "graph_optimization")


def shared_weights(folder: Path, manifest: Manifest) -> dict[str, onnxruntime.OrtValue]:
    """The weights that both graphs of an export read, mapped into memory once, for `open_session`.

    A session maps the file of weights by itself, but each one apart. Of the embedding a step reads single rows; still
    the system may load much of it around them, and would count that twice.
    """
    ort_value = import_onnxruntime().OrtValue
    return {name: ort_value.ortvalue_from_numpy(mapped(folder, place)) for name, place in manifest.shared.items()}


def shortlist_of(folder: Path, manifest: Manifest, weights: Mapping[str, onnxruntime.OrtValue]) -> Shortlist | None:
    """That of an export, if it has one; ``weights`` are its `shared_weights`, which may hold the rows."""
    if not manifest.shortlist:
        return None
    from t5accel.decoding.certified_argmax import OutputHead, Shortlist  # most exports have none

    place = manifest.shortlist["rows"]
    same = [weights[name].numpy() for name, shared in manifest.shared.items() if shared == place]
    known = {name: manifest.shortlist[name] for name in ("largest_row", "largest_error")}
    if bias := manifest.shortlist.get("bias"):
        known["bias"] = mapped(folder, bias)
    return Shortlist(OutputHead(same[0] if same else mapped(folder, place), **known))


def mapped(folder: Path, place: Mapping[str, Any]) -> np.ndarray:
    """A weight in an export's file of weights, mapped into memory: only what is read of it is loaded.

    Args:
        folder: of the export.
        place: where in the file it lies, as its manifest says: ``{"offset", "shape", "dtype"}``.
    """
    shape = tuple(place["shape"])
    return np.memmap(folder / WEIGHTS, place["dtype"], "r", place["offset"], shape).view(np.ndarray)


_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()


@cache
def session_class() -> type[onnxruntime.InferenceSession]:
    """ONNX Runtime's session, which refuses to run in a child of a process that was forked while it ran.

    The child has a copy of the memory and none of the threads, so that a run which another thread had begun never ends
    there, and each further one waits for it.
    """

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
                    "This process was forked while another thread ran the model, and ONNX Runtime cannot go on in it: "
                    "open the model after the fork, or start processes by spawn."
                )
            thread = threading.get_ident()
            self.threads.add(thread)
            try:
                return run(*arguments, **options)
            finally:
                self.threads.discard(thread)

    return Session


def _after_a_fork() -> None:
    for session in _OPEN:
        session.is_torn = session.is_torn or bool(session.threads)
        session.threads.clear()


if hasattr(os, "register_at_fork"):  # which Windows lacks, as it lacks forks
    os.register_at_fork(after_in_child=_after_a_fork)


def open_session(
    path: str | os.PathLike[str],
    settings: SessionSettings,
    weights: Mapping[str, onnxruntime.OrtValue] | None = None,
    *,
    profile: Path | None = None,
    provider_options: Mapping[str, str] | None = None,
) -> onnxruntime.InferenceSession:
    """A session on one graph.

    Args:
        path: the graph.
        settings: how it is run.
        weights: used in place of the graph's own of the same name. The caller keeps them as long as the session.
        profile: every run is measured node by node; how the name of the file begins that `end_profiling` writes.
        provider_options: of what runs it on the device, as ``{"enable_cuda_graph": "1"}``.

    Raises:
        ExportError: the file is no graph that this ONNX Runtime can run.
        MissingPackageError: onnxruntime is not installed, or not the one for this device.
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
    options.enable_mem_pattern = settings.memory_pattern
    options.enable_cpu_mem_arena = settings.arena
    options.log_severity_level = 3  # errors only: what else it has to say is not for our users
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(settings.spinning)))
    # Encoder and decoder have their own threads; those of the one must not spin while the other runs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    for name, value in (weights or {}).items():
        options.add_initializer(name, value)
    # TensorFloat-32 would round the factors of every product to 10 bits: an error of 1e-3 in what is called fp32.
    ours = {"use_tf32": "0"} if settings.device == "cuda" else {}
    how = dict(providers=[provider], provider_options=[{**ours, **(provider_options or {})}], enable_fallback=0)
    try:
        # No fallback, which prints to standard output and goes on with the CPU in place of a GPU. Older releases (1.20)
        # do so all the same while they open a graph; then the providers tell.
        with huge_pages(settings.huge_pages):
            session = session_class()(str(Path(path)), options, **how)
    except Exception as error:  # of several kinds, none of them documented
        raise ExportError(
            f"{path} cannot be run on device={settings.device!r} by onnxruntime {onnxruntime.__version__}: {error}"
        ) from error
    session.disable_fallback()
    if provider not in session.get_providers():  # its libraries were not found: onnxruntime logs that and goes on
        raise MissingPackageError(
            f"onnxruntime {onnxruntime.__version__} could not load {provider}: it needs CUDA and cuDNN libraries of "
            "its version. A torch with CUDA brings them; import it first, or call onnxruntime.preload_dlls()."
        )
    return session


def require_contract(session: onnxruntime.InferenceSession, spec: GraphSpec, path: Path) -> None:
    """Raise ``ExportError`` for a graph whose inputs or outputs are not those that its manifest describes."""
    for specs, values in ((spec.inputs, session.get_inputs()), (spec.outputs, session.get_outputs())):
        found = {value.name: (value.type, value.shape) for value in values}
        for tensor in specs:
            kind, shape = found.get(tensor.name, ("", []))
            sizes = zip(tensor.shape, shape, strict=False)
            if (
                kind not in (f"tensor({tensor.dtype})", f"tensor({tensor.dtype.removesuffix('32')})")
                or len(shape) != len(tensor.shape)
                or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes)
            ):
                raise ExportError(
                    f"{path} has not the {tensor.name} of shape {tensor.shape} in {tensor.dtype} that its manifest "
                    "describes. Export again with overwrite=True (t5accel export --model MODEL --out FOLDER "
                    "--overwrite)."
                )
