"""The registry of systems that generate: transformers, our loops on torch and on ONNX Runtime, TensorRT."""

# torch and the runtimes are imported by the systems that need them: `bench.scoreboard` measures the memory of the
# others in processes without them, and the GPU suite runs where only torch is installed.

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel.decoding.beam import beam_search
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.decoding.sampling import SamplingParams, sample
from t5accel.errors import InputError
from t5accel.graphs.manifest import read_manifest
from t5accel.models.load import cast_model, load_model
from t5accel.precision.recipes import RECIPES, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from t5accel.backends.torch_static import TorchStatic
    from t5accel.backends.torch_static_buffers import StaticBuffers
    from t5accel.decoding.backend import Backend, Generated
    from t5accel.serve.request import GenerationRequest
    from t5accel.serve.scheduler import Scheduler

SMALL = "random:t5-small"
SAMPLING = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)  # of the systems that sample
# (input_ids (B, S), attention_mask (B, S), shortest, longest, beams=1) -> new tokens (B, L), all int64 numpy
Generate = Callable[..., np.ndarray]


@dataclass
class BenchModel:
    """A model on the CPU in the forms that systems need, each made at its first use."""

    name: str  # as `models.load.load_model` knows it
    seed: int  # of random weights
    threads: int

    @cached_property
    def _loaded(self) -> tuple[PreTrainedModel, Any]:
        return load_model(self.name, seed=self.seed)

    @property
    def model(self) -> PreTrainedModel:
        return self._loaded[0]

    @property
    def tokenizer(self) -> Any:
        return self._loaded[1]

    def export(self, precision: str = "fp32") -> Path:
        """The folder of its ONNX export; from the cache without loading the model where possible."""
        from t5accel.graphs.export_cache import cached_export  # needs onnx

        if self.seed == 0:
            return cached_export(self.name, precision=precision)
        return cached_export(self.model, precision=precision, tokenizer=self.tokenizer)


@dataclass
class ModelOnDevice:
    """A model of one dtype on one device, with the backends built on it: compilers and captures take long."""

    name: str
    dtype: str  # "float32", "bfloat16" or "float16"
    device: str  # "cuda", or "cpu" for tests
    scratch: Path  # for exports
    first_s: dict[str, float] = field(default_factory=dict)  # a system's first generation, builds included
    _built: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def model(self) -> PreTrainedModel:
        import torch

        if self.name == SMALL or not self.name.startswith("random:"):  # SMALL has the weights of its export
            return cast_model(load_model(self.name)[0], self.dtype, self.device)
        if self.device == "cuda":
            torch.cuda.manual_seed(0)
        with torch.device(self.device):  # a GPU draws billions of random weights in no time
            model = load_model(self.name)[0]
        return cast_model(model, self.dtype, self.device)

    @cached_property
    def export(self) -> Path:
        """The folder of the ONNX export in this dtype; bf16 has none."""
        from t5accel.graphs.export import export_model
        from t5accel.precision.convert import convert_export  # needs onnx

        name = self.name.replace(":", "-").replace(os.sep, "-")
        whole, half = self.scratch / f"{name}-fp32", self.scratch / f"{name}-fp16"
        export_model(self.name, whole, external_threshold_bytes=0)
        if self.dtype == "float32":
            return whole
        convert_export(whole, half, "fp16")
        return half

    def backend(self, name: str) -> Backend:
        """The backend of one of `ON_DEVICE`, for its logits."""
        return self.once(name, SYSTEMS[name].open_backend)

    def once(self, name: str, build: Callable[[ModelOnDevice], Any]) -> Any:
        """The object built under this name before, else a new one."""
        if name not in self._built:
            self._built[name] = build(self)
        return self._built[name]

    def forget(self, name: str) -> None:
        """Let go of a backend and the memory that it keeps for earlier shapes."""
        self._built.pop(name, None)

    def generate(self, name: str, ids: np.ndarray, mask: np.ndarray, new_tokens: int, beams: int) -> np.ndarray:
        """Exactly ``new_tokens`` new tokens (B, L) by one of `ON_DEVICE`."""
        begun = perf_counter()
        found = SYSTEMS[name].build(self)(ids, mask, new_tokens, new_tokens, beams)
        self.first_s.setdefault(name, perf_counter() - begun)
        return found


@dataclass(frozen=True)
class System:
    """A way of generating; `build` returns the function to time, and raises where something is missing."""

    name: str  # in rows and tables
    build: Callable[[Any], Generate]  # from a BenchModel; `ON_DEVICE`'s from a ModelOnDevice
    backend: str = ""  # the module or library that runs it
    # Its imports: their memory is measured by itself, and onnxruntime means that it loads the graphs.
    libraries: tuple[str, ...] = ("torch", "transformers")
    recipe: Recipe = RECIPES["fp32"]
    student: str | None = None  # a student of "mini" to run in the model's place
    open_backend: Callable[[ModelOnDevice], Backend] | None = None  # for logits to compare with transformers'
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")

    @property
    def exact(self) -> bool:
        """Whether its tokens must equal the reference's; of others the shared ones are counted."""
        return self.recipe.name == "fp32" and self.student is None

    def measured_on(self, model: BenchModel) -> BenchModel:
        """The model, or the student in its place."""
        return model if self.student is None else BenchModel(self.student, model.seed, model.threads)

    def bytes_on_disk(self, model: BenchModel) -> int:
        """Bytes of the weights in the form that it loads."""
        if "onnxruntime" in self.libraries:
            return read_manifest(model.export(self.recipe.name), verify=False).graph_bytes
        return weight_bytes(model)


def weight_bytes(model: BenchModel) -> int:
    """Bytes of the weights as ``save_pretrained`` writes them: shared tensors count once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.model.parameters())


# Parts that several systems share


def by_generate(model: Any, **options: Any) -> Generate:
    """``generate()`` of a model of transformers, or of ours that looks like one."""
    import torch

    def generate(ids: np.ndarray, mask: np.ndarray, shortest: int, longest: int, beams: int = 1) -> np.ndarray:
        out = model.generate(
            input_ids=torch.as_tensor(ids, device=model.device), num_beams=beams, min_new_tokens=shortest,
            attention_mask=torch.as_tensor(mask, device=model.device), max_new_tokens=longest,
            **{"do_sample": False, "use_cache": True, **options},
        )  # fmt: skip
        return getattr(out, "sequences", out)[:, 1:].cpu().numpy()

    return generate


def by_our_loop(backend: Backend, decode: Callable[..., Generated] = greedy) -> Generate:
    """Our beam search, or ``decode`` for one beam."""

    def generate(ids: np.ndarray, mask: np.ndarray, shortest: int, longest: int, beams: int = 1) -> np.ndarray:
        length = {"min_new_tokens": shortest, "max_new_tokens": longest}
        if beams > 1:
            return beam_search(backend, ids, mask, num_beams=beams, **length).sequences
        return decode(backend, ids, mask, **length).sequences

    return generate


# On a CPU


def _eager_loop(model: BenchModel, use_cache: bool) -> Generate:
    from t5accel.backends.torch_eager import TorchEager

    return by_our_loop(TorchEager(model.model, use_cache=use_cache))


def _engine(
    model: BenchModel, precision: str = "fp32", *, kind: str = "static", shortlist: bool = True,
    decode: Callable[..., Generated] = greedy,
) -> Generate:  # fmt: skip
    from bench.baselines.ort_iobinding import OrtBound
    from t5accel.backends.ort_numpy import OrtNumpy
    from t5accel.backends.ort_session import SessionSettings
    from t5accel.backends.ort_static import OrtStatic

    backend = {"numpy": OrtNumpy, "bound": OrtBound, "static": OrtStatic}[kind]
    settings = SessionSettings(threads=model.threads, shortlist=shortlist)
    return by_our_loop(backend(model.export(precision), settings=settings), decode)


def _behind_generate(model: BenchModel, **options: bool) -> Generate:
    from t5accel.api import accelerate

    return by_generate(accelerate(model.export(), threads=model.threads, progress=False), **options)


def _engine_in(precision: str, student: str | None = None) -> System:
    """Our engine in this precision, with the model itself or a student of it."""
    return System(
        f"{student or 'ONNX Runtime'}, our loop, {precision}", partial(_engine, precision=precision),
        "backends.ort.static", ("onnxruntime",), RECIPES[precision], student,
    )  # fmt: skip


CPU_REFERENCE = "transformers with cache"
_HF, _TORCH, _ORT = "transformers generate()", "backends.torch_eager", ("onnxruntime",)
_BEHIND_GENERATE = System(
    "ONNX Runtime, generate()", _behind_generate, "backends.hf", ("onnxruntime", "torch", "transformers")
)
BOARD = (  # what `bench.scoreboard` measures
    System("transformers without cache", lambda model: by_generate(model.model, use_cache=False), _HF),
    System(CPU_REFERENCE, lambda model: by_generate(model.model), _HF),
    System("our loop without cache", partial(_eager_loop, use_cache=False), _TORCH),
    System("our loop with cache", partial(_eager_loop, use_cache=True), _TORCH),
    _BEHIND_GENERATE,
    System("ONNX Runtime, our loop, all logits", partial(_engine, kind="numpy", shortlist=False),
           "backends.ort.numpy", _ORT),
    System("ONNX Runtime, our loop, numpy feeds", partial(_engine, kind="numpy"), "backends.ort.numpy", _ORT),
    System("ONNX Runtime, our loop, bound", partial(_engine, kind="bound"), "backends.ort.bound", _ORT),
    System("ONNX Runtime, our loop, fused step", _engine, "backends.ort.static", _ORT),
    _engine_in("int8"),
    _engine_in("int4"),
    _engine_in("fp32", "mini-d1"),
    _engine_in("int8", "mini-d1"),
    _engine_in("int8", "mini-d1p"),
)  # fmt: skip
# Systems for ladders alone. Our `generate()` searches greedily in our loop unless it returns more than tokens; drafts
# need real texts.
THEIR_LOOP = replace(_BEHIND_GENERATE, name="ONNX Runtime, transformers' loop",
                     build=partial(_behind_generate, return_dict_in_generate=True))  # fmt: skip
THROUGHPUT = _engine_in("int8-dynamic")
LOOKUP = replace(_engine_in("int8"), name="ONNX Runtime, lookup, int8", backend="decoding.lookup",
                 build=partial(_engine, precision="int8", decode=prompt_lookup))  # fmt: skip


def select_systems(parts: Sequence[str], *, model: str = "mini") -> tuple[System, ...]:
    """The systems of `BOARD` whose name holds one of ``parts``, and the reference; all without parts.

    Students are for "mini" alone. Raises ``InputError`` for a part that no name holds.

    >>> [system.name for system in select_systems(["loop without"])]
    ['transformers with cache', 'our loop without cache']
    """
    for part in parts:
        if not any(part in system.name for system in BOARD):
            names = [system.name for system in BOARD]
            raise InputError(f"technique must be part of a system's name, got {part!r}. Choose from {names}.")
    return tuple(
        system for system in BOARD
        if (not parts or system.name == CPU_REFERENCE or any(part in system.name for part in parts))
        and (system.student is None or model == "mini")
    )  # fmt: skip


# On a device


def _ours(name: str, open_backend: Callable[[ModelOnDevice], Backend], **more: Any) -> System:
    return System(name, lambda model: by_our_loop(model.backend(name)), open_backend=open_backend, **more)


def _static(**options: Any) -> Callable[[ModelOnDevice], Backend]:
    def open_backend(model: ModelOnDevice) -> Backend:
        from t5accel.backends.torch_static import TorchStatic

        return TorchStatic(model.model, **options)

    return open_backend


# What the compiler is asked for: one graph for each shape, and products of one row as reductions that take in what
# surrounds them (PyTorch's gpt-fast found that option to matter most for one text).
COMPILE = dict(fullgraph=True, dynamic=False, options={"coordinate_descent_tuning": True})
MAX_SHAPES = 64  # that one process compiles; torch gives up after eight


def compile_steps(backend: TorchStatic) -> TorchStatic:
    """Run the backend's greedy steps through ``torch.compile``; each shape takes a minute or so at its first use.

    With CUDA graphs the compiled step is captured. Steps of beams and samples stay as they are.
    """
    import torch

    step, compiled = torch.compile(backend.decoder.advance, **COMPILE), set()

    def advance(buffers: StaticBuffers) -> None:
        if buffers.shape in compiled:
            return step(buffers)
        with torch._dynamo.config.patch(recompile_limit=MAX_SHAPES):
            step(buffers)
        compiled.add(buffers.shape)

    backend.decoder.advance = advance
    return backend


def _compiled(model: ModelOnDevice) -> Backend:
    return compile_steps(_static()(model))


def _eager(model: ModelOnDevice) -> Backend:
    from t5accel.backends.torch_eager import TorchEager

    return TorchEager(model.model)


def _triton(model: ModelOnDevice) -> Backend:
    from bench.baselines.triton_attention import TorchTriton  # needs Triton

    return TorchTriton(model.model)


def _onnx(kind: str) -> Callable[[ModelOnDevice], Backend]:
    def open_backend(model: ModelOnDevice) -> Backend:
        from bench.baselines.ort_cuda_graph import OrtCaptured
        from t5accel.backends.ort_cuda import OrtPointers
        from t5accel.backends.ort_numpy import OrtNumpy
        from t5accel.backends.ort_session import SessionSettings

        backend = {"numpy": OrtNumpy, "pointers": OrtPointers, "captured": OrtCaptured}[kind]
        return backend(model.export, settings=SessionSettings(device=model.device))

    return open_backend


def _tensorrt(model: ModelOnDevice) -> Backend:
    from t5accel.backends.tensorrt import Range, Sizes, TensorRT  # imports torch, and needs onnx

    sizes = Sizes(B=Range(1, 1, 4), K=Range(1, 1, 1), S=Range(1, 64, 64), T=Range(1, 1, 8), P=Range(0, 64, 160))
    return TensorRT(model.export, sizes=sizes)


def _recompute(model: ModelOnDevice) -> Generate:
    from bench.baselines.torch_recompute import TorchRecompute

    running = model.once(f"{RECOMPUTE}, all of it", lambda model: TorchRecompute(model.model))
    return lambda ids, mask, shortest, longest, beams: running.generate(ids, mask, new_tokens=longest)


def _sampling_by_transformers(model: ModelOnDevice) -> Generate:
    sampling = {"temperature": SAMPLING.temperature, "top_k": SAMPLING.top_k, "top_p": SAMPLING.top_p}
    return by_generate(model.model, do_sample=True, **sampling)


def _sampling(model: ModelOnDevice) -> Generate:
    return by_our_loop(model.backend(GRAPH), partial(sample, sampling=SAMPLING))


def scheduler(model: ModelOnDevice, rows: int) -> Scheduler:
    """A scheduler of ``rows`` rows on a separate backend; it encodes every text in every round."""
    from t5accel.serve.limits import SchedulerLimits
    from t5accel.serve.scheduler import Scheduler

    limits = SchedulerLimits(rows=rows, queue=4096, encoder_cache_bytes=0)
    return Scheduler(model.once(f"{FLIGHT}, {rows} rows", _static()), limits)


def jobs(ids: np.ndarray, mask: np.ndarray, lengths: np.ndarray) -> list[GenerationRequest]:
    """A request for each text (B, S), for exactly ``lengths`` (B,) new tokens."""
    from t5accel.serve.request import GenerationRequest

    return [
        GenerationRequest(text[seen > 0], min_new_tokens=int(length), max_new_tokens=int(length))
        for text, seen, length in zip(ids, mask, lengths, strict=True)
    ]


def _in_flight(model: ModelOnDevice) -> Generate:
    """Half as many rows as texts, so that requests wait, leave and join."""

    def generate(ids: np.ndarray, mask: np.ndarray, shortest: int, longest: int, beams: int) -> np.ndarray:
        with scheduler(model, max(1, len(ids) // 2)) as serving:
            tickets = serving.submit_all(jobs(ids, mask, np.full(len(ids), longest)))
            return np.array([ticket.result(timeout_s=60)[0].tokens for ticket in tickets])

    return generate


IN_ONNX = ("float32", "float16")
REFERENCE, NAIVE = "transformers, cache", "transformers, no cache"
STATIC, GRAPH, RECOMPUTE = "static cache", "static cache, CUDA graph", "no cache, CUDA graph"
COMPILED = "static cache, torch.compile, CUDA graph"
KERNEL = "static cache, own attention kernel, CUDA graph"
FED, BOUND, CAPTURED = "ONNX Runtime, numpy feeds", "ONNX Runtime, bound", "ONNX Runtime, CUDA graph"
TENSORRT = "TensorRT"
EAGER = "torch, growing cache"
THEIR_DRAWS, DRAWN = "transformers, sampling", "static cache, CUDA graph, sampling"
THEIR_BATCHES, BATCHES, FLIGHT = "transformers, batches", "static cache, CUDA graph, batches", "requests in flight"
THEIRS = (REFERENCE, NAIVE, THEIR_DRAWS, THEIR_BATCHES)  # ours are compared with them

ON_DEVICE = (  # what `bench.gpu.suite` measures
    System(REFERENCE, lambda model: by_generate(model.model)),
    System(NAIVE, lambda model: by_generate(model.model, use_cache=False)),
    _ours(STATIC, _static(graphs=False)),
    _ours(GRAPH, _static()),
    System(RECOMPUTE, _recompute, open_backend=_static(graphs=False)),  # the same decoder
    _ours(EAGER, _eager),
    System(THEIR_DRAWS, _sampling_by_transformers),
    System(DRAWN, _sampling, open_backend=_static(graphs=False)),
    System(THEIR_BATCHES, lambda model: SYSTEMS[REFERENCE].build(model)),
    System(BATCHES, lambda model: SYSTEMS[GRAPH].build(model), open_backend=_static()),
    System(FLIGHT, _in_flight, open_backend=_static(graphs=False)),
    _ours(COMPILED, _compiled),
    _ours(KERNEL, _triton),
    _ours(FED, _onnx("numpy"), dtypes=IN_ONNX),
    _ours(BOUND, _onnx("pointers"), dtypes=IN_ONNX),
    _ours(CAPTURED, _onnx("captured"), dtypes=IN_ONNX),
    _ours(TENSORRT, _tensorrt, dtypes=IN_ONNX),
)
SYSTEMS = {system.name: system for system in (*BOARD, THEIR_LOOP, LOOKUP, THROUGHPUT, *ON_DEVICE)}
