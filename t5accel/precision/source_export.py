"""Read an fp32 export and write converted copies of it."""

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
_FILES = {**STACKS, "step": STEP}


@dataclass(frozen=True)
class Fp32Export:
    """An fp32 export that is not optimised, the source of conversions."""

    folder: Path
    manifest: Manifest

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Fp32Export:
        """Verify every file; raises ``ExportError`` for damage, ``InputError`` for an optimised or converted export."""
        folder = as_folder(folder)
        manifest = read_manifest(folder)
        if manifest.optimized or manifest.recipe["name"] != "fp32":
            state = "optimised" if manifest.optimized else f"in {manifest.recipe['name']}"
            raise InputError(f"{folder} is {state} already: give the export in fp32 that it was made from.")
        manifest.require_whole_model(folder)
        return cls(folder, manifest)

    def graphs(self, *, step: bool = False) -> dict[str, GraphBuilder]:
        """Both graphs, to be changed, and ``"step"`` if asked for and exported; weights are mapped from the files."""
        wanted = _FILES if step and self.manifest.step else STACKS
        found = load_graphs((self.folder / name for name in wanted.values()), self.manifest.files)
        if STEP in found and self.manifest.shortlist:
            drop_shortlist(found[STEP])
        return {part: found[name] for part, name in wanted.items()}

    def target(self, out: str | os.PathLike[str]) -> Path:
        """``out`` as a folder to write to; it must not be this export's own."""
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
        """Write a copy with these graphs; its manifest has the recipe and ``notes``."""
        step = asdict(step_spec(self.manifest.dims)) if "step" in graphs else {}
        manifest = replace(
            self.manifest,
            recipe={**recipe.to_json(), **notes},
            versions=machine.versions(),
            shortlist={},  # its 8-bit logits approximate exact ones in fp32, and save nothing beside an 8-bit head
            step=step,
        )
        plan = ExportPlan.derived(self.folder, manifest, {_FILES[part]: graph for part, graph in graphs.items()})
        return write_export(target, plan, overwrite=overwrite)
