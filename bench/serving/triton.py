"""A model repository for NVIDIA's Triton Inference Server, whose models run our sessions.

Triton's ONNX Runtime backend runs one graph once per request, while a T5 takes a loop around two graphs; so the models
use its Python backend, with ``model.py`` (`triton_model`). ``NAME`` has dynamic batching; ``NAME-in-flight`` has
iterative sequences, in which requests join a running batch.
"""

# Its Python needs t5accel, onnxruntime, tokenizers, and numpy 1.26 (with numpy 2 Triton 2.51 loses the outputs).

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from bench.serving import triton_model
from bench.serving.servers import ROOT, Server
from t5accel import machine
from t5accel.checks import as_count
from t5accel.errors import InputError, MissingPackageError
from t5accel.graphs.export_cache import cached_export_and_manifest
from t5accel.models.load import require_tokenizer

IN_FLIGHT = "-in-flight"

CONFIG = """\
name: "{name}"
backend: "python"
max_batch_size: {rows}
input [
  {{ name: "text" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "max_new_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true }},
  {{ name: "min_new_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true }},
  {{ name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }}
]
output [
  {{ name: "text" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "tokens" data_type: TYPE_INT32 dims: [ 1 ] }}
]
version_policy: {{ all {{ }} }}
instance_group [ {{ kind: KIND_CPU count: {instances} }} ]
parameters {{ key: "threads" value: {{ string_value: "{threads}" }} }}
"""
BATCHING = """\
dynamic_batching {{ max_queue_delay_microseconds: {window_us} }}
"""
SEQUENCES = """\
parameters {{ key: "export_of" value: {{ string_value: "{export_of}" }} }}
sequence_batching {{
  iterative_sequence: true
  max_sequence_idle_microseconds: 60000000
  oldest {{ max_candidate_sequences: {rows} }}
}}
model_transaction_policy {{ decoupled: true }}
"""


def write_repository(
    folder: str | os.PathLike[str], model: str, *, precision: str = "fp32", name: str | None = None, version: int = 1,
    rows: int = 32, window_ms: float = 20.0, instances: int = 1, threads: int | None = None, progress: bool = False,
) -> Path:  # fmt: skip
    """Write a model repository, or add a version to the one that is there.

    Args:
        name: of the model in Triton; by default ``model``, where that can be a name.
        version: a number; Triton serves all, and by default answers with the highest.
        window_ms: how long Triton collects a batch that is not full.
        instances: processes that each hold the model, of the one with dynamic batching.
        threads: of each instance; by default the cores that there are, shared.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as here:
    ...     sorted(path.parent.name for path in write_repository(here, "mini").glob("*/config.pbtxt"))
    ['mini', 'mini-in-flight']
    """
    for what, value in (("version", version), ("rows", rows), ("instances", instances)):
        as_count(value, what, at_least=1)
    if not 0 <= window_ms < float("inf"):
        raise InputError(f"window_ms must be a number of 0 or more, got {window_ms!r}.")
    threads = max(1, machine.cpu_threads() // instances) if threads is None else threads
    as_count(threads, "threads", at_least=1)
    name = Path(model).name if name is None else name
    if not name.replace("-", "").replace("_", "").isalnum():
        raise InputError(f"name must be of letters, digits, - and _ for Triton, got {name!r}. Give another one.")
    require_tokenizer(model)
    export, manifest = cached_export_and_manifest(model, precision=precision, progress=progress)
    if "tokenizer.json" not in manifest.files:
        raise InputError(f"{model} has no tokenizer.json: a server of texts needs one beside the model.")
    values = dict(rows=rows, threads=threads, window_us=round(window_ms * 1e3), export_of=name)
    for one, kind, count in ((name, BATCHING, instances), (name + IN_FLIGHT, SEQUENCES, 1)):
        target = Path(folder) / one / str(version)
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(triton_model.__file__, target / "model.py")
        config = (CONFIG + kind).format(name=one, instances=count, **values)
        (target.parent / "config.pbtxt").write_text(config, encoding="utf-8")
    kept = Path(folder) / name / str(version) / "export"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(export, kept)
    return Path(folder)


def triton_server(environment: Path, repository: Path, name: str, *, in_flight: bool = False) -> Server:
    """How the Triton that the package ``nvidia-pytriton`` brings is started on a repository, for one of its models.

    Args:
        environment: a virtual environment with that package and what ``model.py`` needs.
        repository: of `write_repository`; both of its models are loaded.
        in_flight: ask the other one.
    """
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment / "lib" / python / "site-packages"
    triton = packages / "pytriton/tritonserver"
    if not triton.is_dir():
        raise MissingPackageError(f"{environment} has no Triton: `make build/servers/triton/.stamp` installs it.")
    # The backend takes the Python that it finds, and no PYTHONPATH.
    (packages / "t5accel.pth").write_text(f"{ROOT}\n", encoding="utf-8")
    backends = _backends(triton, environment / "backends", python.removeprefix("python"))
    libraries = [
        sysconfig.get_config_var("LIBDIR"),
        str(packages / "nvidia_pytriton.libs"),
        os.environ.get("LD_LIBRARY_PATH"),
    ]
    served = name + IN_FLIGHT if in_flight else name
    command = [
        str(triton / "bin/tritonserver"), f"--model-repository={repository}", f"--backend-directory={backends}",
        "--disable-auto-complete-config", "--http-address=127.0.0.1", "--http-port={port}", "--allow-grpc=false",
        "--allow-metrics=false", "--model-control-mode=explicit", f"--load-model={served}",
    ]  # fmt: skip
    return Server(
        "Triton, iterative sequences" if in_flight else "Triton, dynamic batching", command,
        base=f"/v2/models/{served}", path="/generate_stream" if in_flight else "/generate", ready="/v2/health/ready",
        streams=in_flight,
        environment={"PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": None,
                     "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries))},
    )  # fmt: skip


def _backends(triton: Path, folder: Path, version: str) -> Path:
    """Triton's backends with the part of the Python backend that fits our Python."""
    if not (folder / "python/triton_python_backend_stub").exists():
        shutil.copytree(triton / "backends/python", folder / "python", dirs_exist_ok=True)
        stub = triton / "python_backend_stubs" / version / "triton_python_backend_stub"
        shutil.copy(stub, folder / "python")
    return folder
