"""Write graphs and files as the folder of an export, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from t5accel import machine
from t5accel.errors import ExportError
from t5accel.graphs.atomic_write import locked, staged
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.contract import WEIGHTS, as_folder
from t5accel.graphs.manifest import Manifest, describe_file, files_of_export, read_manifest

LARGEST_INSIDE = 2_000_000_000  # bytes; an ONNX file holds less than 2 GiB
ALIGNMENT = 4096  # a page: weights in their own file are memory-mapped


@dataclass(frozen=True)
class ExportPlan:
    """The content of an export, before any file is written."""

    manifest: Manifest  # without shared and files, which follow from writing
    graphs: Mapping[str, GraphBuilder]  # by file name
    threshold: int  # bytes of a graph's weights above which all graphs' weights lie in one file beside them
    add_files: Callable[[Path], None]  # writes all other files into a folder
    exact: Mapping[str, str] = field(default_factory=dict)  # names of the weights of a shortlist's exact logits
    check: Callable[[Path], None] | None = None  # may refuse the finished folder with ExportError

    @classmethod
    def derived(cls, folder: Path, manifest: Manifest, graphs: Mapping[str, GraphBuilder]) -> ExportPlan:
        """A copy of the export in ``folder`` with other graphs: same place of the weights, same other files."""
        kept = {name for name in manifest.files if name != WEIGHTS and not name.endswith(".onnx")}

        def add_files(partial: Path) -> None:
            for name in kept:
                shutil.copyfile(folder / name, partial / name)

        threshold = 0 if WEIGHTS in manifest.files else LARGEST_INSIDE
        return cls(manifest, graphs, threshold, add_files)


def resolve_target(folder: str | os.PathLike[str]) -> Path:
    """The folder to write to, with links resolved, so that one folder has one lock.

    Raises ``ExportError`` where it cannot be written to, or is this process's working folder.

    >>> resolve_target("an/../export").name
    'export'
    """
    try:
        target = as_folder(folder).resolve()
        around = Path.cwd().is_relative_to(target)
    except (OSError, RuntimeError) as error:  # a loop of links, a working folder that is gone
        raise ExportError(f"{folder} cannot be written to: {error}") from error
    if around:
        raise ExportError(f"{target} is this process's working folder, and cannot be replaced: give another folder.")
    return target


def write_export(target: Path, plan: ExportPlan, *, overwrite: bool, progress: bool = False) -> Manifest:
    """Write an export, unless the same one is there; raises ``ExportError`` if the folder is taken or not writable."""
    layout = WeightsLayout.plan(plan.graphs, plan.threshold)
    manifest = replace(plan.manifest, shared=layout.shared(plan.graphs))
    places = {part: layout.place(name) for part, name in plan.exact.items()}
    manifest = replace(manifest, shortlist={**manifest.shortlist, **places})
    with locked(target):
        if is_occupied(target):
            if _is_same_export(target, manifest, plan, external=bool(layout.places)):
                if plan.check is not None:  # a hook or an overridden forward() leaves the hash as it is
                    plan.check(target)
                return read_manifest(target, verify=False)
            _refuse_unless_replaceable(target, overwrite)
        with staged(target) as partial:
            write_graphs(partial, plan.graphs, layout, f"exporting {manifest.source['name']}" if progress else "")
            plan.add_files(partial)
            manifest.write(partial)
            if plan.check is not None:
                plan.check(partial)
        return read_manifest(target, verify=False)


def is_occupied(target: Path) -> bool:
    """Whether anything but an empty folder is there."""
    try:
        return target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise ExportError(f"{target} cannot be read: {error}") from error


def require_free(target: Path, name: str, recipe: str = "fp32", *, overwrite: bool) -> None:
    """Raise ``ExportError`` if an export cannot be written there, before its model is loaded or scored.

    An export of the same model in the same recipe passes, because it may be kept.
    """
    if not is_occupied(target):
        return
    try:
        there = read_manifest(target, verify=False)
        same = not overwrite and (there.source["name"], there.recipe["name"].split("+")[0]) == (name, recipe)
    except ExportError:
        same = False
    if not same:
        _refuse_unless_replaceable(target, overwrite)


def _is_same_export(target: Path, manifest: Manifest, plan: ExportPlan, *, external: bool) -> bool:
    """Whether an export of this very model is there, whole, with the same configuration and tokenizer."""
    try:
        there = read_manifest(target)
    except ExportError:
        return False
    if (WEIGHTS in there.files) != external:
        return False
    deciding = [
        (m.source["sha256"], m.recipe, m.opset, m.versions.get("t5accel"), m.optimized, not m.shortlist, m.step)
        for m in (there, manifest)
    ]
    there_written, ours_written = (json.dumps(facts, sort_keys=True) for facts in deciding)  # lists for tuples
    if there_written != ours_written:
        return False
    with TemporaryDirectory() as folder:
        plan.add_files(Path(folder))
        wanted = {path.name: describe_file(path) for path in Path(folder).iterdir()}
    beside = {name: entry for name, entry in there.files.items() if name != WEIGHTS and not name.endswith(".onnx")}
    return wanted == beside if "tokenizer_config.json" in wanted else wanted.items() <= beside.items()


def _refuse_unless_replaceable(target: Path, overwrite: bool) -> None:
    ours = files_of_export(target)
    if not ours:
        raise ExportError(f"{target} is no export of t5accel and not empty, so it is kept: give another folder.")
    others = sorted({path.name for path in target.iterdir()} - ours)
    if others:
        raise ExportError(f"{target} also holds {', '.join(others[:3])}, so it is kept: give another folder.")
    if not overwrite:
        raise ExportError(
            f"{target} holds another export, or a damaged one: give another folder, or overwrite=True (--overwrite)."
        )


def write_graphs(folder: Path, graphs: Mapping[str, GraphBuilder], layout: WeightsLayout, title: str = "") -> None:
    """Write graphs, and their weights where ``layout`` places them; ``title`` is shown on a bar of progress."""
    sizes = {name: 0 if layout.places else graph.size_bytes for name, graph in graphs.items()}
    total = sum(sizes.values()) + sum(array.nbytes for array, _ in layout.places.values())
    units = {"unit": "B", "unit_scale": True, "unit_divisor": 1000}
    with machine.progress_bar(shown=bool(title), total=total, desc=title, **units) as bar:
        if layout.places:
            layout.write(folder / WEIGHTS, bar.update)
        for name, graph in graphs.items():
            (folder / name).write_bytes(graph.proto(layout.references()).SerializeToString())
            bar.update(sizes[name])


@dataclass
class WeightsLayout:
    """Each weight's place in the file that graphs share; empty if weights are inside the graphs."""

    places: dict[str, tuple[np.ndarray, int]] = field(default_factory=dict)
    size_bytes: int = 0

    @classmethod
    def plan(cls, graphs: Mapping[str, GraphBuilder], threshold: int) -> WeightsLayout:
        """Lay out each name once. Small weights stay inside: ONNX Runtime needs shapes when it reads a graph."""
        layout = cls()
        if max(graph.size_bytes for graph in graphs.values()) <= threshold:
            return layout
        for graph in graphs.values():
            for name, array in graph.weights.items():
                if array.nbytes >= ALIGNMENT and name not in layout.places:
                    layout.places[name] = array, layout.size_bytes
                    layout.size_bytes += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return layout

    def references(self) -> dict[str, tuple[str, int, int]]:
        """File, offset and length of each weight, for `GraphBuilder.proto`."""
        return {name: (WEIGHTS, offset, array.nbytes) for name, (array, offset) in self.places.items()}

    def shared(self, graphs: Mapping[str, GraphBuilder]) -> dict[str, dict[str, Any]]:
        """The places of the weights that every graph reads, for `Manifest`."""
        return {
            name: self.place(name) for name in self.places if all(name in graph.weights for graph in graphs.values())
        }

    def place(self, name: str) -> dict[str, Any]:
        """A weight's place, for `Manifest`."""
        array, offset = self.places[name]
        return {"offset": offset, "shape": list(array.shape), "dtype": array.dtype.name}

    def write(self, path: Path, on_bytes: Callable[[int], Any] = lambda size: None) -> None:
        """Write the weights in order, telling ``on_bytes`` the size of each."""
        with path.open("wb") as file:
            for array, offset in self.places.values():
                file.seek(offset)
                file.write(np.ascontiguousarray(array).data)
                on_bytes(array.nbytes)
            file.truncate(self.size_bytes)
