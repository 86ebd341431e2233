"""Named recipes: in which numbers each part of a T5 is stored and multiplied. Plain data, the same for every module.

A recipe decides speed, size and quality together, so they are reported for one recipe, by its hash, and never mixed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from t5accel.checks import as_count
from t5accel.errors import InputError

METHODS = ("weight-only", "dynamic", "static")
DTYPES = ("float32", "float16", "bfloat16")
KINDS = ("attention", "feed_forward", "wo")  # of a layer's products; `feed_forward` is what comes before `wo`
HEAD, EMBEDDING = "lm_head", "embedding"
_WRITTEN = {"dtype": "floats"}
_PLACE = re.compile(
    r"(encoder|decoder)\.block\.(\d+)\.layer\.\d\.(SelfAttention|EncDecAttention|DenseReluDense)\.(\w+)\."
)
_GROUP = re.compile(rf"(encoder|decoder)\.\d+\.({'|'.join(KINDS)})|{HEAD}|{EMBEDDING}")


@dataclass(frozen=True)
class Scheme:
    """How weights are stored as integers, and what a product with them is computed in.

    Attributes:
        method: ``"weight-only"``: integers in blocks along the input, each with a scale, by ONNX Runtime's operator
            MatMulNBits. ``"dynamic"``: what is multiplied is quantised, too, with a scale found anew at each call,
            over the whole batch: an answer may change with those beside it. ``"static"``: the same with scales that a
            calibration has found.
        bits: 8; with "weight-only" also 4.
        block_size: of "weight-only": so many weights share a scale. A power of two from 16 to 256.
        accuracy_level: of "weight-only", as MatMulNBits defines it: 1 multiplies in fp32, 4 in 8-bit integers.
        per_channel: of the other two: a scale for each output in place of one for the whole weight.
        reduce_range: of the other two: 7 bits, for CPUs that add products of 8 bits in 16 and saturate (x86 without
            VNNI).

    Raises:
        InputError: a value is not one of these.

    >>> Scheme("weight-only", bits=4, block_size=32)
    Scheme(method='weight-only', bits=4, block_size=32, accuracy_level=4, per_channel=True, reduce_range=False)
    """

    method: str = "weight-only"
    bits: int = 8
    block_size: int = 64
    accuracy_level: int = 4
    per_channel: bool = True
    reduce_range: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"method is {self.method!r}; give one of {', '.join(METHODS)}.")
        allowed = {"bits": (4, 8) if self.method == "weight-only" else (8,), "block_size": (16, 32, 64, 128, 256),
                   "accuracy_level": (0, 1, 2, 3, 4)}  # fmt: skip
        for name, values in allowed.items():
            count = as_count(getattr(self, name), name, at_least=0)
            if count not in values:
                raise InputError(f"{name} is {count}; {self.method} takes one of {values}.")
            object.__setattr__(self, name, count)  # numbers of numpy cannot be written down
        for name in ("per_channel", "reduce_range"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} is {getattr(self, name)!r}; give True or False.")


@dataclass(frozen=True)
class Recipe:
    """In which numbers a model runs. What has no scheme stays in ``dtype``.

    Attributes:
        name: what a reader calls it.
        dtype: of all that is no integer: ``"float32"``, ``"float16"`` or ``"bfloat16"`` (which runs in torch alone).
        encoder, decoder: of all weights that a layer multiplies by, in the one graph and in the other. The decoder's
            keys and values of the source belong to the encoder's graph.
        head: of the output head.
        embedding: of the rows that are looked up. Where head and embedding are tied and have the same "weight-only"
            scheme, they are stored once.
        overrides: for single groups (`group_of`) another scheme, or ``None`` to leave them in ``dtype``.
        kept: of fp16: groups whose products are computed in fp32 all the same.

    Raises:
        InputError: a value is of the wrong kind, or a group does not exist.

    >>> RECIPES["int8"].hash == replace(RECIPES["int8"], name="another").hash
    False
    >>> RECIPES["int4"].without(["decoder.0.wo"]).scheme("decoder.0.wo", "decoder") is None
    True
    """

    name: str
    dtype: str = "float32"
    encoder: Scheme | None = None
    decoder: Scheme | None = None
    head: Scheme | None = None
    embedding: Scheme | None = None
    overrides: tuple[tuple[str, Scheme | None], ...] = ()
    kept: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.+-]{1,60}", self.name):
            raise InputError(f"name is {self.name!r:.80}; give up to 60 letters, digits, or any of _ . + -")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype is {self.dtype!r}; give one of {', '.join(DTYPES)}.")
        for name in ("encoder", "decoder", "head", "embedding"):
            if not isinstance(getattr(self, name), Scheme | None):
                raise InputError(f"{name} is {getattr(self, name)!r:.80}; give a Scheme or None.")
        if not isinstance(self.overrides, tuple) or not all(_is_override(pair) for pair in self.overrides):
            raise InputError(f"overrides is {self.overrides!r:.200}; give a tuple of (group, Scheme or None).")
        if not isinstance(self.kept, tuple):
            raise InputError(f"kept is {self.kept!r:.80}; give a tuple of groups.")
        groups = [*(group for group, _ in self.overrides), *self.kept]
        if bad := [group for group in groups if not isinstance(group, str) or not _GROUP.fullmatch(group)]:
            raise InputError(f"{bad[0]!r} is no group of weights; one is decoder.0.wo, lm_head or embedding.")
        embedding = self.scheme(EMBEDDING, "encoder")
        if embedding and embedding.method != "weight-only":
            raise InputError(f"embedding is {embedding}; rows that are looked up take a weight-only Scheme.")
        if self.name == "fp32" and (self.dtype != "float32" or self.integers):
            raise InputError("name is 'fp32', by which an export that was not converted is known: give another.")

    @property
    def integers(self) -> bool:
        """Whether anything is stored as integers."""
        return bool(self.schemes)

    @property
    def schemes(self) -> list[Scheme]:
        """All that are used somewhere."""
        schemes = (self.encoder, self.decoder, self.head, self.embedding, *dict(self.overrides).values())
        return [scheme for scheme in schemes if scheme is not None]

    @property
    def batch_dependent_stacks(self) -> set[str]:
        """The graphs, ``"encoder"`` or ``"decoder"``, whose numbers depend on what else is in a batch ("dynamic").

        >>> RECIPES["int8"].batch_dependent_stacks
        {'encoder'}
        """
        schemes = [("encoder", self.encoder), ("decoder", self.decoder), ("decoder", self.head)]
        late = ("decoder", HEAD)
        schemes += [("decoder" if group.startswith(late) else "encoder", scheme) for group, scheme in self.overrides]
        return {graph for graph, scheme in schemes if scheme and scheme.method == "dynamic"}

    @property
    def hash(self) -> str:
        """16 hex digits that stand for all of it."""
        return hashlib.sha256(json.dumps(self._written(), sort_keys=True).encode()).hexdigest()[:16]

    def scheme(self, group: str, graph: str) -> Scheme | None:
        """That of a group of weights in one of the graphs, ``"encoder"`` or ``"decoder"``."""
        overrides = dict(self.overrides)
        if group in overrides:
            return overrides[group]
        return {HEAD: self.head, EMBEDDING: self.embedding}.get(group, getattr(self, graph))

    def without(self, groups: list[str] | tuple[str, ...], *, instead: Scheme | None = None) -> Recipe:
        """The same, but these groups stay in floats, or take another scheme; ``+`` and their number join the name."""
        overrides = dict(self.overrides) | dict.fromkeys(groups, instead)
        return replace(self, name=f"{self.name}+{len(groups)}", overrides=tuple(sorted(overrides.items(), key=str)))

    def to_json(self) -> dict[str, Any]:
        """For a manifest or a row of results: plain values, with the ``"hash"``."""
        return {**json.loads(json.dumps(self._written())), "hash": self.hash}  # lists, as they are read again

    def _written(self) -> dict[str, Any]:
        """The names of its fields in manifests, results and hashes, which are older than one of them."""
        return {_WRITTEN.get(name, name): value for name, value in asdict(self).items()}


def recipe_from_json(content: Mapping[str, Any]) -> Recipe:
    """The recipe that `Recipe.to_json` wrote; entries that it does not know are left aside.

    >>> recipe_from_json(RECIPES["int4"].to_json()) == RECIPES["int4"]
    True
    """
    written = {field.name: _WRITTEN.get(field.name, field.name) for field in fields(Recipe)}
    known = {name: content[key] for name, key in written.items() if key in content}
    for name in ("encoder", "decoder", "head", "embedding"):
        known[name] = _scheme(known.get(name))
    known["overrides"] = tuple((group, _scheme(scheme)) for group, scheme in known.get("overrides", ()))
    known["kept"] = tuple(known.get("kept", ()))
    return Recipe(**known)


def group_of(weight: str) -> str | None:
    """The group that a layer's weight belongs to, by transformers' name for it; ``None`` for what is no product's.

    >>> group_of("decoder.block.3.layer.1.EncDecAttention.q.weight")
    'decoder.3.attention'
    >>> group_of("encoder.block.0.layer.1.layer_norm.weight")
    >>> group_of("encoder.block.0.layer.1.DenseReluDense.wo.weight.T")
    'encoder.0.wo'
    """
    if weight.startswith(("lm_head.", "shared.")):
        return HEAD
    found = _PLACE.match(weight)
    if not found or found[4] == "relative_attention_bias":
        return None
    kind = "attention" if found[3] != "DenseReluDense" else "wo" if found[4] == "wo" else "feed_forward"
    return f"{found[1]}.{found[2]}.{kind}"


def as_recipe(value: Any) -> Recipe:
    """A recipe, or one of ``RECIPES`` by its name; raises ``InputError``."""
    if isinstance(value, Recipe):
        return value
    if isinstance(value, str) and value in RECIPES:
        return RECIPES[value]
    raise InputError(f"precision is {value!r:.80}; give a Recipe or one of {', '.join(RECIPES)}.")


def _is_override(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Scheme | None)


def _scheme(content: Mapping[str, Any] | None) -> Scheme | None:
    return None if content is None else Scheme(**content)


_INT8, _DYNAMIC = Scheme(), Scheme("dynamic")
# With 4 bits the layers do as well with blocks of 64, which are faster; in head and embedding they cost BLEU.
_INT4, _INT4_HEAD = Scheme(bits=4, block_size=64), Scheme(bits=4, block_size=32)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32"),
        Recipe("fp16", dtype="float16"),
        Recipe("bf16", dtype="bfloat16"),
        Recipe("int8", encoder=_DYNAMIC, decoder=_INT8, head=_INT8, embedding=_INT8),
        Recipe("int8-dynamic", encoder=_DYNAMIC, decoder=_DYNAMIC, head=_DYNAMIC, embedding=_INT8),
        Recipe("int4", encoder=_DYNAMIC, decoder=_INT4, head=_INT4_HEAD, embedding=_INT4_HEAD),
    )
}
