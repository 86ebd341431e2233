"""Recipes: the precision in which each part of a model is stored and multiplied."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from t5accel.checks import as_count
from t5accel.errors import InputError

METHODS = ("weight-only", "dynamic", "per-token", "static")
DTYPES = ("float32", "float16", "bfloat16")
KINDS = ("attention", "feed_forward", "wo")  # of a layer's products; `feed_forward` is what comes before `wo`
HEAD, EMBEDDING = "lm_head", "embedding"
_WRITTEN = {"dtype": "floats"}  # keys of fields in manifests, results and hashes, which are older than the field
NOTES = ("kept", "hash", "gated", "gate", "in_fp32", "probed", "ranges")  # what else manifests and results hold
_PLACE = re.compile(
    r"(encoder|decoder)\.block\.(\d+)\.layer\.\d\.(SelfAttention|EncDecAttention|DenseReluDense)\.(\w+)\."
)
_GROUP = re.compile(rf"(encoder|decoder)\.\d+\.({'|'.join(KINDS)})|{HEAD}|{EMBEDDING}")


@dataclass(frozen=True)
class Scheme:
    """How weights are stored as integers, and the arithmetic of their products.

    "weight-only" stores blocks along the input, each with a scale, for ONNX Runtime's MatMulNBits. "dynamic" quantises
    the product's input as well, with one scale over the whole batch, so that rows depend on their neighbours;
    "per-token" with a scale for each token, so that none does. "static" takes the input's scale from calibration.
    """

    method: str = "weight-only"
    bits: int = 8  # 4 with "weight-only" alone
    block_size: int = 64  # of "weight-only"
    accuracy_level: int = 4  # of "weight-only", as in MatMulNBits: 1 multiplies in fp32, 4 in 8-bit integers
    per_channel: bool = True  # of the others: a scale for each output instead of one for the weight
    reduce_range: bool = False  # of the others: 7 bits, for x86 without VNNI, which saturates sums of 16 bits

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}.")
        allowed = {
            "bits": (4, 8) if self.method == "weight-only" else (8,),
            "block_size": (16, 32, 64, 128, 256),
            "accuracy_level": (0, 1, 2, 3, 4),
        }
        for name, values in allowed.items():
            count = as_count(getattr(self, name), name, at_least=0)
            if count not in values:
                raise InputError(f"{name} must be one of {values} with {self.method}, got {count}.")
            object.__setattr__(self, name, count)  # numpy's integers are not JSON
        for name in ("per_channel", "reduce_range"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be True or False, got {getattr(self, name)!r}.")


@dataclass(frozen=True)
class Recipe:
    """The precision of a whole model; parts without a scheme stay in ``dtype``.

    ``encoder`` and ``decoder`` are the layers' weights of each graph; the cross-attention's key and value projections
    belong to the encoder's. ``overrides`` replace the scheme of single groups (`group_of`), ``None`` meaning ``dtype``.
    """

    name: str
    dtype: str = "float32"  # or "float16", or "bfloat16", which runs in torch alone
    encoder: Scheme | None = None
    decoder: Scheme | None = None
    head: Scheme | None = None
    embedding: Scheme | None = None  # stored once with a tied head of the same "weight-only" scheme
    overrides: tuple[tuple[str, Scheme | None], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.+-]{1,60}", self.name):
            raise InputError(f"name must be up to 60 letters, digits or any of _ . + -, got {self.name!r:.80}.")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")
        for name in ("encoder", "decoder", "head", "embedding"):
            if not isinstance(getattr(self, name), Scheme | None):
                raise InputError(f"{name} must be a Scheme or None, got {getattr(self, name)!r:.80}.")
        if not isinstance(self.overrides, tuple) or not all(_is_override(pair) for pair in self.overrides):
            raise InputError(f"overrides must be a tuple of (group, Scheme or None), got {self.overrides!r:.200}.")
        if bad := [group for group, _ in self.overrides if not isinstance(group, str) or not _GROUP.fullmatch(group)]:
            raise InputError(f"A group of weights must be like decoder.0.wo, lm_head or embedding, got {bad[0]!r}.")
        embedding = self.scheme(EMBEDDING, "encoder")
        if embedding and embedding.method != "weight-only":
            raise InputError(f"embedding must have a weight-only Scheme, got {embedding}.")
        if self.name == "fp32" and (self.dtype != "float32" or self.integers):
            raise InputError("name must not be 'fp32', which stands for exports that were not converted.")

    @property
    def schemes(self) -> list[Scheme]:
        schemes = (self.encoder, self.decoder, self.head, self.embedding, *dict(self.overrides).values())
        return [scheme for scheme in schemes if scheme is not None]

    @property
    def integers(self) -> bool:
        """Whether any part is stored as integers."""
        return bool(self.schemes)

    @property
    def batch_dependent_stacks(self) -> set[str]:
        """The graphs whose numbers depend on the other rows of a batch ("dynamic")."""
        schemes = [("encoder", self.encoder), ("decoder", self.decoder), ("decoder", self.head)]
        schemes += [("encoder" if group.startswith("encoder") else "decoder", one) for group, one in self.overrides]
        return {graph for graph, scheme in schemes if scheme and scheme.method == "dynamic"}

    @property
    def saturates(self) -> bool:
        """Whether products of 8 by 8 bits may exceed the 16 bits in which x86 without VNNI adds them in pairs."""
        return any(scheme.method != "weight-only" and not scheme.reduce_range for scheme in self.schemes)

    @property
    def hash(self) -> str:
        """16 hex digits; reported beside every speed, size and quality, which belong to one recipe."""
        return hashlib.sha256(json.dumps(self._written(), sort_keys=True).encode()).hexdigest()[:16]

    def scheme(self, group: str, graph: str) -> Scheme | None:
        """The scheme of a group of weights in one graph, ``"encoder"`` or ``"decoder"``."""
        overrides = dict(self.overrides)
        if group in overrides:
            return overrides[group]
        return {HEAD: self.head, EMBEDDING: self.embedding}.get(group, getattr(self, graph))

    def without(self, groups: list[str] | tuple[str, ...], *, instead: Scheme | None = None) -> Recipe:
        """The same with these groups in floats, or in another scheme; their number is appended to the name."""
        overrides = dict(self.overrides) | dict.fromkeys(groups, instead)
        return replace(self, name=f"{self.name}+{len(groups)}", overrides=tuple(sorted(overrides.items(), key=str)))

    def to_json(self) -> dict[str, Any]:
        """Plain values for a manifest or a row of results, with the ``"hash"``."""
        return {**json.loads(json.dumps(self._written())), "hash": self.hash}  # lists, as they are read again

    def _written(self) -> dict[str, Any]:
        written = {_WRITTEN.get(name, name): value for name, value in asdict(self).items()}
        return written | {"kept": ()}  # a field of before, which is in every hash


def recipe_from_json(content: Mapping[str, Any]) -> Recipe:
    """The recipe that `Recipe.to_json` wrote, a manifest's notes aside; ``InputError`` for an unknown entry."""
    written = {field.name: _WRITTEN.get(field.name, field.name) for field in fields(Recipe)}
    _require_known(content, {*written.values(), *NOTES}, "recipe")
    known = {name: content[key] for name, key in written.items() if key in content}
    for name in ("encoder", "decoder", "head", "embedding"):
        known[name] = _scheme(known.get(name))
    known["overrides"] = tuple((group, _scheme(scheme)) for group, scheme in known.get("overrides", ()))
    return Recipe(**known)


def group_of(weight: str) -> str | None:
    """The group of a layer's weight, by transformers' name for it; ``None`` for one that no product reads.

    >>> group_of("decoder.block.3.layer.1.EncDecAttention.q.weight")
    'decoder.3.attention'
    """
    if weight.startswith(("lm_head.", "shared.")):
        return HEAD
    found = _PLACE.match(weight)
    if not found or found[4] == "relative_attention_bias":
        return None
    if found[3] == "DenseReluDense":
        kind = "wo" if found[4] == "wo" else "feed_forward"
    else:
        kind = "attention"
    return f"{found[1]}.{found[2]}.{kind}"


def as_recipe(value: Any) -> Recipe:
    """A recipe, given as one or by its name in ``RECIPES``."""
    if isinstance(value, Recipe):
        return value
    if isinstance(value, str) and value in RECIPES:
        return RECIPES[value]
    raise InputError(f"precision must be a Recipe or one of {', '.join(RECIPES)}, got {value!r:.80}.")


def as_encoder_recipe(value: Any) -> Recipe:
    """A recipe for an encoder alone, given as one or by its name: fp32, int8 or int4."""
    recipe = ENCODER_RECIPES[value] if isinstance(value, str) and value in ENCODER_RECIPES else value
    if not isinstance(recipe, Recipe) or recipe.dtype != "float32":
        raise InputError(
            f"precision must be a Recipe in float32 or one of {', '.join(ENCODER_RECIPES)}, got {value!r:.80}."
        )
    if any(scheme.method in ("dynamic", "static") for scheme in recipe.schemes):
        raise InputError(f"precision must have weight-only and per-token schemes, got {recipe.name}.")
    return recipe


def _is_override(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Scheme | None)


def _scheme(content: Mapping[str, Any] | None) -> Scheme | None:
    if content is None:
        return None
    _require_known(content, {field.name for field in fields(Scheme)}, "scheme")
    return Scheme(**content)


def _require_known(content: Mapping[str, Any], known: set[str], what: str) -> None:
    if unknown := content.keys() - known:
        raise InputError(
            f"{what} has the unknown entry {min(unknown)!r:.80}: it was written by a newer t5accel. Install that one."
        )


_INT8, _DYNAMIC = Scheme(), Scheme("dynamic")
# With weights in 7 bits no x86 processor saturates; that costs a hundredth of a point of cosine on the bundled model.
_PER_TOKEN = Scheme("per-token", reduce_range=True)
# With 4 bits the layers do as well with blocks of 64, which are faster; in head and embedding they cost BLEU.
_INT4, _INT4_HEAD = Scheme(bits=4, block_size=64), Scheme(bits=4, block_size=32)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32"),
        Recipe("fp16", dtype="float16"),
        Recipe("bf16", dtype="bfloat16"),
        Recipe("int8", encoder=_DYNAMIC, decoder=_INT8, head=_INT8, embedding=_INT8),
        Recipe("int8-per-token", encoder=_PER_TOKEN, decoder=_INT8, head=_INT8, embedding=_INT8),
        Recipe("int8-dynamic", encoder=_DYNAMIC, decoder=_DYNAMIC, head=_DYNAMIC, embedding=_INT8),
        Recipe("int4", encoder=_DYNAMIC, decoder=_INT4, head=_INT4_HEAD, embedding=_INT4_HEAD),
    )
}
# Of an encoder alone, many tokens at once: integers multiply twice as fast as floats, where MatMulNBits' do not.
ENCODER_RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32"),
        Recipe("int8", encoder=_PER_TOKEN, embedding=_INT8),
        Recipe("int4", encoder=_INT4, embedding=_INT4_HEAD),
    )
}
