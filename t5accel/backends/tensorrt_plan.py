"""For which sizes and in which numbers TensorRT shall build an export's two graphs: a plan, in plain Python.

An engine is built for a range of sizes of every input that varies, and it is tuned for one of them (a *profile*). It
runs any size in the range and no other. Sizes that belong together have to agree: the axis that is called S in one
input is the S of all others. So a plan says a range for each axis once, and the inputs' shapes follow from the export's
contract. Nothing here needs TensorRT.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from t5accel.checks import as_count
from t5accel.errors import InputError
from t5accel.graphs.contract import DECODER, ENCODER, WEIGHTS, GraphSpec
from t5accel.graphs.manifest import Manifest
from t5accel.precision.recipes import recipe_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Range:
    """From which size to which, and the one that is tuned for.

    Raises ``InputError`` unless 0 <= least <= usual <= most, all integers.

    >>> Range(1, 64, 512).holds(100), Range(1, 64, 512).holds(0)
    (True, False)
    """

    least: int
    usual: int
    most: int

    def __post_init__(self) -> None:
        least, usual, most = (as_count(getattr(self, size.name), size.name, at_least=0) for size in fields(self))
        if not least <= usual <= most:
            raise InputError(f"least is {least}, usual {usual} and most {most}: give them in rising order.")

    def holds(self, size: int) -> bool:
        """Whether an engine that was built for this range takes it."""
        return self.least <= size <= self.most


@dataclass(frozen=True)
class Sizes:
    """The range of every axis that varies, by the names of `graphs.contract`.

    Attributes:
        B: sources at once.
        K: rows for each of them: beams, samples, drafts.
        S: source positions.
        T: new positions of a step.
        P: past positions; from 0, for the first step has none.

    Raises ``InputError`` for a range that leaves out 0 past positions, or in which B, K, S or T may be 0.
    """

    B: Range = Range(1, 1, 8)
    K: Range = Range(1, 1, 4)
    S: Range = Range(1, 64, 512)
    T: Range = Range(1, 1, 16)
    P: Range = Range(0, 32, 512)

    def __post_init__(self) -> None:
        for field in fields(self):
            found = getattr(self, field.name)
            if not isinstance(found, Range):
                raise InputError(f"{field.name} is {found!r}; give a Range.")
            if field.name == "P" and found.least:
                raise InputError(f"P begins at {found.least}; the first step has no past: let it begin at 0.")
            if field.name != "P" and not found.least:
                raise InputError(f"{field.name} begins at 0; give at least 1.")


@dataclass(frozen=True)
class GraphPlan:
    """What an engine of one graph is built for.

    Attributes:
        profile: for each input the shapes (least, usual, most); fixed axes are the same in all three.
        dtypes: of every input and output; a strongly typed engine has those of its graph and no others.
    """

    profile: Mapping[str, tuple[Shape, Shape, Shape]]
    dtypes: Mapping[str, str]

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise ``InputError`` for shapes that the engine does not take; the message names the input and its range.

        >>> one = GraphPlan({"input_ids": ((1, 1), (1, 64), (8, 512))}, {"input_ids": "int64"})
        >>> one.check({"input_ids": (9, 64)})
        Traceback (most recent call last):
        t5accel.errors.InputError: input_ids is of shape (9, 64); this engine takes (1, 1) to (8, 512). Build ...
        """
        if missing := sorted(self.profile.keys() - shapes.keys()):
            raise InputError(f"There is no shape for {missing[0]}; the engine reads {', '.join(self.profile)}.")
        for name, (least, _, most) in self.profile.items():
            given = tuple(shapes[name])
            inside = len(given) == len(least) and all(
                low <= size <= high for low, size, high in zip(least, given, most, strict=True)
            )
            if not inside:
                raise InputError(
                    f"{name} is of shape {given}; this engine takes {least} to {most}. Build one for other Sizes."
                )


@dataclass(frozen=True)
class Plan:
    """What the engines of an export are built for.

    Attributes:
        graphs: by file name.
        sizes: that the profiles were made of.
        source: the sha256 of every file that an engine is built from.
    """

    graphs: Mapping[str, GraphPlan]
    sizes: Sizes
    source: str

    def key(self, *, version: str, device: str) -> str:
        """What an engine is kept under: 16 hexadecimal digits of all that it depends on.

        Args:
            version: of TensorRT, as ``"tensorrt 11.0.0"``.
            device: the GPU, by name and compute capability, or what the engine is built for without one.
        """
        facts = {**asdict(self), "version": version, "device": device}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def plan(manifest: Manifest, sizes: Sizes | None = None) -> Plan:
    """The plan for an export's encoder and decoder.

    Args:
        manifest: of an export in floats; engines take their numbers from the graphs.
        sizes: ranges; by default `Sizes()`.

    Raises:
        InputError: the export's weights are integers, or its graphs were optimised for ONNX Runtime.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.graphs.export import export_t5
    >>> with TemporaryDirectory() as folder:
    ...     decoder = plan(export_t5("mini", f"{folder}/mini")).graphs["decoder.onnx"]
    >>> decoder.profile["past_key_0"], decoder.dtypes["past_key_0"]
    (((1, 1, 8, 0, 32), (1, 1, 8, 32, 32), (8, 4, 8, 512, 32)), 'float32')
    """
    sizes = Sizes() if sizes is None else sizes
    if not isinstance(sizes, Sizes):
        raise InputError(f"sizes is {sizes!r}; give tensorrt_plan.Sizes.")
    recipe = manifest.recipe
    if recipe_of(recipe).integers:
        raise InputError(f"This export is in {recipe['name']}: give one whose weights are floats, in fp32 or fp16.")
    if manifest.optimized:
        raise InputError("This export was optimised for ONNX Runtime: give the one that it was made from.")
    graphs = {name: _graph_plan(manifest.graphs[name], sizes) for name in (ENCODER, DECODER)}
    read = {name: entry["sha256"] for name, entry in manifest.files.items() if name in (ENCODER, DECODER, WEIGHTS)}
    return Plan(graphs, sizes, json.dumps(read, sort_keys=True))


def _graph_plan(spec: GraphSpec, sizes: Sizes) -> GraphPlan:
    def at(shape: tuple[Any, ...], which: str) -> Shape:
        return tuple(getattr(getattr(sizes, axis), which) if isinstance(axis, str) else axis for axis in shape)

    profile = {
        tensor.name: (at(tensor.shape, "least"), at(tensor.shape, "usual"), at(tensor.shape, "most"))
        for tensor in spec.inputs
    }
    return GraphPlan(profile, {tensor.name: tensor.dtype for tensor in (*spec.inputs, *spec.outputs)})
