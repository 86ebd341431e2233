"""Which weights mind being rounded: quantise one group at a time, score each, and rank them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from t5accel.errors import InputError
from t5accel.graphs.manifest import read_manifest
from t5accel.precision.gate import Score, quantize_export
from t5accel.precision.recipes import EMBEDDING, HEAD, KINDS, Recipe, as_recipe


@dataclass(frozen=True)
class GroupScores:
    """What came of a model in floats but for one group.

    Attributes:
        group: as `recipes.group_of` names it.
        scores: of the model.
        losses: against the model in floats.
        size_bytes: of all files.
    """

    group: str
    scores: Mapping[str, float]
    losses: Mapping[str, float]
    size_bytes: int


def groups_of(folder: str | os.PathLike[str]) -> list[str]:
    """All groups of weights of an export's model, from the encoder's first layer to the head.

    Raises:
        ExportError: there is no export, or it is damaged.

    >>> from t5accel.graphs.export import export_model
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_model("mini", f"{folder}/mini")
    ...     groups_of(f"{folder}/mini")[:4]
    ['embedding', 'encoder.0.attention', 'encoder.0.feed_forward', 'encoder.0.wo']
    """
    dims = read_manifest(folder, verify=False).dims
    layers = [("encoder", layer) for layer in range(dims.encoder_layers)]
    layers += [("decoder", layer) for layer in range(dims.decoder_layers)]
    return [EMBEDDING, *(f"{stack}.{layer}.{kind}" for stack, layer in layers for kind in KINDS), HEAD]


def sweep(
    folder: str | os.PathLike[str],
    recipe: Recipe | str,
    score: Score,
    *,
    groups: Iterable[str] | None = None,
    on_group: Callable[[GroupScores], None] | None = None,
) -> list[GroupScores]:
    """Quantise one group of weights after the other, all others in floats, and score each model.

    Args:
        folder: an export in fp32.
        recipe: of whose schemes each group takes its own; one that has none is left out.
        score: from the folder of an export to named numbers, the higher the better.
        groups: by default `groups_of`.
        on_group: called after each, for a bar.

    Raises:
        ExportError, InputError: as of `quantize.quantize_export`.
    """
    recipe, chosen = as_recipe(recipe), list(groups_of(folder) if groups is None else groups)
    if unknown := sorted({*chosen} - {*groups_of(folder)}):
        raise InputError(f"{unknown[0]!r} is no group of this model; `groups_of` lists them.")
    baseline = dict(score(Path(folder)))
    found = []
    for group in chosen:
        single = only(recipe, group, chosen_from=groups_of(folder))
        if single is None:
            continue
        with TemporaryDirectory() as temporary:
            manifest = quantize_export(folder, Path(temporary) / "one", single)
            scores = dict(score(Path(temporary) / "one"))
        losses = {name: baseline[name] - value for name, value in scores.items()}
        found.append(GroupScores(group, scores, losses, manifest.size_bytes))
        if on_group is not None:
            on_group(found[-1])
    return found


def ranked(found: Sequence[GroupScores], name: str) -> list[str]:
    """The groups, that which loses most of one score first, as `quantize.quantize` takes them.

    >>> rows = [GroupScores("lm_head", {}, {"bleu": 0.1}, 0), GroupScores("decoder.0.wo", {}, {"bleu": 0.7}, 0)]
    >>> ranked(rows, "bleu")
    ['decoder.0.wo', 'lm_head']
    """
    if bad := [one.group for one in found if name not in one.losses]:
        raise InputError(f"There is no score {name!r} of {bad[0]}.")
    return [one.group for one in sorted(found, key=lambda one: -one.losses[name])]


def only(recipe: Recipe, group: str, *, chosen_from: Iterable[str]) -> Recipe | None:
    """The recipe for one group alone; ``None`` if it leaves that in floats anyway.

    >>> one = only(as_recipe("int4"), "decoder.0.wo", chosen_from=["decoder.0.wo", "lm_head"])
    >>> one.scheme("lm_head", "decoder"), one.scheme("decoder.0.wo", "decoder").bits
    (None, 4)
    """
    # A layer's weights are in its own graph; the decoder's keys and values of the source are in the encoder's, too.
    own = ["encoder"] if group.startswith("encoder") else ["decoder"]
    if group.startswith("decoder") and group.endswith("attention"):
        own.append("encoder")
    if not any(recipe.scheme(group, stack) for stack in own):
        return None
    others = [other for other in chosen_from if other != group]
    return replace(recipe.without(others), name=f"{recipe.name}-{group}")
