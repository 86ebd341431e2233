"""From an export in fp32 to a copy in other numbers: read it, take its graphs, write them changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from t5accel import machine
from t5accel.errors import InputError
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.contract import DECODER, ENCODER, STEP, as_folder, step_spec
from t5accel.graphs.export_folder import ExportPlan, resolve_target, write_export
from t5accel.graphs.manifest import Manifest, read_manifest
from t5accel.graphs.rewriting import load_graphs
from t5accel.graphs.shortlist_head import drop_shortlist
from t5accel.precision.recipes import Recipe

STACKS = {"encoder": ENCODER, "decoder": DECODER}


@dataclass(frozen=True)
class Fp32Export:
    """An export in fp32 that is not optimised, of which converted copies are made.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.graphs.export import export_model
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_model("mini", f"{folder}/mini")
    ...     Fp32Export.read(f"{folder}/mini").graphs().keys()
    dict_keys(['encoder', 'decoder'])
    """

    folder: Path
    manifest: Manifest

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Fp32Export:
        """Check an export, every file of it.

        Raises:
            ExportError: there is no export, or it is damaged.
            InputError: it is optimised, or in other numbers already.
        """
        folder = as_folder(folder)
        manifest = read_manifest(folder)
        if manifest.optimized or manifest.recipe["name"] != "fp32":
            state = "optimised" if manifest.optimized else f"in {manifest.recipe['name']}"
            raise InputError(f"{folder} is {state} already: give the export in fp32 that it was made from.")
        return cls(folder, manifest)

    def graphs(self, *, step: bool = False) -> dict[str, GraphBuilder]:
        """Both graphs, to be changed; their weights are mapped from the files.

        With ``step`` also ``"step"``, if the export has one: without the shortlist, whose 8 bits belong to fp32.
        """
        wanted = {**STACKS, "step": STEP} if step and self.manifest.step else STACKS
        found = load_graphs((self.folder / name for name in wanted.values()), self.manifest.files)
        if STEP in found and self.manifest.shortlist:
            drop_shortlist(found[STEP])
        return {part: found[name] for part, name in wanted.items()}

    def target(self, out: str | os.PathLike[str]) -> Path:
        """``out`` as a folder that can be written to. Raises ``ExportError``, or ``InputError`` if it is this one."""
        target = resolve_target(out)
        if target == self.folder.resolve():
            raise InputError(f"{self.folder} is the export in fp32, which is kept: give another folder for the copy.")
        return target

    def write(
        self,
        target: Path,
        graphs: Mapping[str, GraphBuilder],
        recipe: Recipe,
        notes: Mapping[str, Any],
        *,
        overwrite: bool = False,
    ) -> Manifest:
        """Write a copy with these graphs; its manifest has the recipe, and ``notes`` beside it.

        It has no shortlist: near logits of 8 bits belong to exact ones in fp32.

        Raises:
            ExportError: ``target`` is taken, or cannot be written; nothing is left of the attempt.
        """
        entry = {**recipe.to_json(), **notes}
        step = asdict(step_spec(self.manifest.dims)) if "step" in graphs else {}
        manifest = replace(self.manifest, recipe=entry, versions=machine.versions(), shortlist={}, step=step)
        files = {**STACKS, "step": STEP}
        plan = ExportPlan.derived(self.folder, manifest, {files[part]: graph for part, graph in graphs.items()})
        return write_export(target, plan, overwrite=overwrite)
