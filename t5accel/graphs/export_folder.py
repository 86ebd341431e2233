"""From graphs to the folder of an export: whose folder it is, where the weights lie, whole or not at all."""

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

LARGEST_INSIDE = 2_000_000_000  # bytes; one ONNX file cannot hold more than 2 GiB
ALIGNMENT = 4096  # so that weights in their own file can be mapped into memory page by page


@dataclass(frozen=True)
class ExportPlan:
    """What is to be written, known before a file is.

    Attributes:
        manifest: all but ``shared`` and ``files``, which are found out while writing, and the places of ``exact``.
        graphs: by file name.
        threshold: if the weights of a graph are more bytes, those of both graphs lie in one file beside them.
        tokenizer: whether ``add_files`` brings one.
        add_files: puts all else into the folder that it is given.
        exact: the names of the weights from which a shortlist's exact logits are computed, by what the manifest calls
            them; empty if there is no shortlist.
        check: is given the folder when it is complete, before it is kept; raises ``ExportError`` if it must not be.
    """

    manifest: Manifest
    graphs: Mapping[str, GraphBuilder]
    threshold: int
    tokenizer: bool
    add_files: Callable[[Path], None]
    exact: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Path], None] | None = None

    @classmethod
    def derived(cls, folder: Path, manifest: Manifest, graphs: Mapping[str, GraphBuilder]) -> ExportPlan:
        """Of a copy of the export in ``folder`` with these graphs: weights lie where they lay, other files stay."""
        kept = {name for name in manifest.files if name != WEIGHTS and not name.endswith(".onnx")}

        def add_files(partial: Path) -> None:
            for name in kept:
                shutil.copyfile(folder / name, partial / name)

        threshold = 0 if WEIGHTS in manifest.files else LARGEST_INSIDE
        return cls(manifest, graphs, threshold, "tokenizer_config.json" in kept, add_files)


def resolve_target(folder: str | os.PathLike[str]) -> Path:
    """Where links lead to, so that one folder has one lock, and it is the folder that is replaced and not a link.

    Raises:
        ExportError: it cannot be written to, or this process works in it.
        InputError: it is no path.

    >>> resolve_target("an/../export").name
    'export'
    """
    try:
        target = as_folder(folder).resolve()
        around = Path.cwd().is_relative_to(target)
    except (OSError, RuntimeError) as error:  # a loop of links, a working folder that is gone
        raise ExportError(f"{folder} cannot be written to: {error}") from error
    if around:
        raise ExportError(f"{target} is where this process works, and cannot be replaced: give another folder.")
    return target


def write_export(target: Path, plan: ExportPlan, *, overwrite: bool, progress: bool = False) -> Manifest:
    """Write an export, unless the same one is there.

    Raises:
        ExportError: the folder is taken, or cannot be written; nothing is left of the attempt.
    """
    layout = WeightsLayout.plan(plan.graphs, plan.threshold)
    manifest = replace(plan.manifest, shared=layout.shared(plan.graphs))
    places = {part: layout.place(name) for part, name in plan.exact.items()}
    manifest = replace(manifest, shortlist={**manifest.shortlist, **places})
    with locked(target):
        if is_occupied(target):
            if _same(target, manifest, plan, external=bool(layout.places)):
                return read_manifest(target, verify=False)
            _refuse_unless_replaceable(target, overwrite)
        with staged(target) as partial, _bar(progress, f"exporting {manifest.source['name']}") as bar:
            _write_graphs(partial, plan.graphs, layout, bar)
            plan.add_files(partial)
            manifest.write(partial)
            if plan.check is not None:
                plan.check(partial)
        return read_manifest(target, verify=False)


def is_occupied(target: Path) -> bool:
    """Whether anything but an empty folder lies there; raises ``ExportError`` if that cannot be found out."""
    try:
        return target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise ExportError(f"{target} cannot be read: {error}") from error


def require_free(target: Path, name: str, recipe: str = "fp32", *, overwrite: bool) -> None:
    """Raise ``ExportError`` if an export cannot be written there, before its model is loaded or scored.

    An export of the model ``name`` in the same recipe passes: the same export is kept.
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


def _same(target: Path, manifest: Manifest, plan: ExportPlan, *, external: bool) -> bool:
    """Whether an export of this very model lies there, whole, with the same configuration and tokenizer."""
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
    return wanted == beside if plan.tokenizer else wanted.items() <= beside.items()


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


def _bar(progress: bool, description: str) -> Any:

    return machine.progress_bar(shown=progress, total=0, unit="B", unit_scale=True, unit_divisor=1000, desc=description)


def _write_graphs(folder: Path, graphs: Mapping[str, GraphBuilder], layout: WeightsLayout, bar: Any) -> None:
    sizes = {name: 0 if layout.places else graph.size_bytes for name, graph in graphs.items()}
    bar.reset(total=sum(sizes.values()) + sum(array.nbytes for array, _ in layout.places.values()))
    if layout.places:
        layout.write(folder / WEIGHTS, bar)
    for name, graph in graphs.items():
        (folder / name).write_bytes(graph.proto(layout.references()).SerializeToString())
        bar.update(sizes[name])


@dataclass
class WeightsLayout:
    """Where each weight of several graphs lies in the one file that they share; nowhere if all are in the graphs."""

    places: dict[str, tuple[np.ndarray, int]] = field(default_factory=dict)
    size_bytes: int = 0

    @classmethod
    def plan(cls, graphs: Mapping[str, GraphBuilder], threshold: int) -> WeightsLayout:
        """One after the other, each name once. Small ones stay inside: shapes have to be known when a graph is read."""
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
        """For `GraphBuilder.proto`: file, offset and length of each."""
        return {name: (WEIGHTS, offset, array.nbytes) for name, (array, offset) in self.places.items()}

    def shared(self, graphs: Mapping[str, GraphBuilder]) -> dict[str, dict[str, Any]]:
        """For `Manifest`: where those lie that every graph reads."""
        return {
            name: self.place(name) for name in self.places if all(name in graph.weights for graph in graphs.values())
        }

    def place(self, name: str) -> dict[str, Any]:
        """Where one lies, for `Manifest`."""
        array, offset = self.places[name]
        return {"offset": offset, "shape": list(array.shape), "dtype": array.dtype.name}

    def write(self, path: Path, bar: Any = None) -> None:
        """Write them in order, and tell the bar, if there is one, how far it is."""
        with path.open("wb") as file:
            for array, offset in self.places.values():
                file.seek(offset)
                file.write(np.ascontiguousarray(array).data)
                if bar is not None:
                    bar.update(array.nbytes)
            file.truncate(self.size_bytes)
