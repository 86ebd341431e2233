"""Graphs optimised ahead of time, by ONNX Runtime or by its package for transformers.

A session optimises every graph that it opens, so such an export opens sooner and runs no faster.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from t5accel import machine
from t5accel.errors import ExportError, InputError, MissingPackageError
from t5accel.graphs.contract import DECODER, ENCODER, as_folder
from t5accel.graphs.export_folder import ALIGNMENT, ExportPlan, resolve_target, write_export
from t5accel.graphs.manifest import Manifest, read_manifest
from t5accel.graphs.ort_levels import as_level, import_onnxruntime, optimization_level, this_machine
from t5accel.graphs.rewriting import as_graph_path, check_external_data, contrib_operators, load_graphs

TOOLS = ("onnxruntime", "transformers")
PACKAGE_LEVELS = {"disable": 0, "basic": 1, "extended": 2, "all": 99}  # as onnxruntime.transformers calls ours
# In a separate process, because it puts its folders on sys.path, where its modules have names such as `metrics`.
PACKAGE = """
import sys
from onnxruntime.transformers.optimizer import optimize_model
level, *paths = sys.argv[1:]
for source, target in zip(paths[::2], paths[1::2]):
    optimized = optimize_model(source, model_type="t5", opt_level=int(level))
    optimized.save_model_to_file(target, use_external_data_format=True)
"""


@contextmanager
def optimized_graph(path: str | os.PathLike[str], level: str = "all") -> Iterator[Path]:
    """The graph as a session on the CPU optimises it: a file, until the block ends."""
    file, level = as_graph_path(path), as_level(level, "level")
    with _temporary_folder() as folder:
        _by_session(file, folder / "optimized.onnx", level)
        yield folder / "optimized.onnx"


def optimize_export(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    level: str = "all",
    tool: str = "onnxruntime",
    overwrite: bool = False,
) -> Manifest:
    """Write a copy of an export whose graphs are optimised for a CPU.

    Weights lie where they lay: inside the graphs, or in one file beside them. Where the embedding is tied, the copy is
    larger by one embedding: what the decoder's head multiplies by is its transpose, and is computed ahead.

    A copy that holds operators of ONNX Runtime's own is for this machine and this ONNX Runtime alone: elsewhere it is
    refused (`ort_levels.require_runnable_here`). Those of levels "disable" and "basic" hold none, and run anywhere.

    Args:
        tool: ``"onnxruntime"``; or ``"transformers"``, for the package onnxruntime.transformers, which first has ONNX
            Runtime optimise at ``level`` (it knows no "layout"). Below "extended" it looks for the norms by itself, and
            fails in that if numpy is 2.4 or newer.

    >>> from t5accel.graphs.export import export_model
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_model("mini", f"{folder}/mini")
    ...     optimize_export(f"{folder}/mini", f"{folder}/fused").optimized["contrib_operators"]
    ['SimplifiedLayerNormalization', 'com.microsoft.FusedMatMul']
    """
    source, target, level = as_folder(folder), resolve_target(out), as_level(level, "level")
    if not isinstance(tool, str) or tool not in TOOLS:
        raise InputError(f"tool must be one of {', '.join(TOOLS)}, got {tool!r}.")
    manifest = read_manifest(source)
    if manifest.optimized:
        raise InputError(f"{source} is optimised already: give the export that it was made from.")
    if others := sorted(name for name in manifest.files if name.endswith(".onnx") and name not in (ENCODER, DECODER)):
        raise InputError(f"{source} also holds {', '.join(others)}, which is not optimised: export without it.")
    if source.resolve() == target:
        raise InputError(f"{source} is the portable export, which is kept: give another folder for the copy.")
    for name in (ENCODER, DECODER):
        check_external_data(source / name, manifest.files)
    with _temporary_folder() as temporary:
        pairs = {source / name: temporary / name for name in (ENCODER, DECODER)}
        (_by_package if tool == "transformers" else _by_sessions)(pairs, level)
        optimized = {
            "tool": tool, "level": level, "onnxruntime": import_onnxruntime().__version__, "machine": this_machine(),
            "contrib_operators": sorted({name for graph in pairs.values() for name in contrib_operators(graph)}),
        }  # fmt: skip
        copy = replace(manifest, optimized=optimized, versions=machine.versions())
        plan = ExportPlan.derived(source, copy, load_graphs(pairs.values()))
        return write_export(target, plan, overwrite=overwrite)


def _by_sessions(pairs: Mapping[Path, Path], level: str) -> None:
    for source, target in pairs.items():
        _by_session(source, target, level)


def _by_session(source: Path, target: Path, level: str) -> None:
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = optimization_level(level)
    options.optimized_model_filepath = str(target)
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # else it warns that the result is for this machine; the manifest says so
    entries = {
        "session.disable_prepacking": "1",  # nothing will be run
        # A graph and what was computed ahead, in one file, might be more than an ONNX file can hold.
        "session.optimized_model_external_initializers_file_name": f"{target.name}.data",
        "session.optimized_model_external_initializers_min_size_in_bytes": str(ALIGNMENT),
    }
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    try:
        onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"], enable_fallback=0)
    except Exception as error:  # of several kinds, none of them documented
        raise ExportError(f"onnxruntime {onnxruntime.__version__} could not optimise {source}: {error}") from error


def _by_package(pairs: Mapping[Path, Path], level: str) -> None:
    if level not in PACKAGE_LEVELS:
        raise InputError(f"level must be one of {', '.join(PACKAGE_LEVELS)} with tool='transformers', got {level!r}.")
    import_onnxruntime()
    for package in ("torch", "sympy"):
        if not find_spec(package):
            raise MissingPackageError(f"tool='transformers' needs {package}: pip install {package}.")
    paths = [str(path) for pair in pairs.items() for path in pair]
    command = [sys.executable, "-P", "-c", PACKAGE, str(PACKAGE_LEVELS[level]), *paths]
    answer = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if answer.returncode:
        reason = answer.stderr.strip().rpartition("\n")[2]
        raise ExportError(f"onnxruntime.transformers could not optimise {paths[0]} at level {level!r}: {reason}")


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    try:
        folder = TemporaryDirectory(ignore_cleanup_errors=True)  # Windows keeps what is mapped into memory
    except OSError as error:
        raise ExportError(f"There is no place for temporary files ({error}): let TMPDIR name one.") from error
    with folder as name:
        yield Path(name)
