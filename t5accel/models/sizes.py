"""The sizes of a T5-like model, from its weights or its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from t5accel.checks import as_count
from t5accel.errors import InputError, ModelUnavailableError, NotT5Error
from t5accel.models.pruned import layer_widths

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CLASS_PREFIXES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}  # of transformers' classes
T5_LIKE = tuple(CLASS_PREFIXES)
MAX_LAYERS = 1000  # of a stack; the largest published ones have some fifty
ONLY_T5 = f"this works on T5-shaped models only: {', '.join(T5_LIKE)} (flan, ByT5 and MADLAD-400 are of type t5)."


@dataclass(frozen=True)
class T5Dims:
    """The sizes of a T5-like model, per layer where layers may differ (pruned models).

    ``d_kv`` is read from the configuration: it is not always ``d_model // num_heads`` (flan-t5-small: 64, not 85).
    Heads are those of keys and values, which T5Gemma's queries share.
    """

    vocab_size: int
    d_model: int
    d_kv: int
    encoder_heads: tuple[int, ...]
    decoder_heads: tuple[int, ...]
    cross_heads: tuple[int, ...]
    encoder_ff: tuple[int, ...]
    decoder_ff: tuple[int, ...]
    gated: bool
    tied: bool

    @property
    def encoder_layers(self) -> int:
        return len(self.encoder_heads)

    @property
    def decoder_layers(self) -> int:
        return len(self.decoder_heads)

    @classmethod
    def of(cls, model: PreTrainedModel) -> T5Dims:
        """Read the sizes off the weights, as pruned models need.

        >>> from t5accel.models.random_init import random_t5
        >>> T5Dims.of(random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32)))
        ... # doctest: +ELLIPSIS
        T5Dims(vocab_size=32, d_model=8, d_kv=6, encoder_heads=(2,), ..., gated=False, tied=True)
        """
        config, kind = getattr(model, "config", None), type(model).__name__
        require_t5(config, kind)
        if not hasattr(model, "lm_head") or not hasattr(model, "decoder"):
            raise NotT5Error(f"{kind} cannot generate text: give a …ForConditionalGeneration.")
        try:
            return cls(
                vocab_size=model.lm_head.out_features,
                d_model=config.d_model,
                d_kv=config.d_kv,
                **{name: tuple(sizes) for name, sizes in layer_widths(model).items()},
                gated=hasattr(model.decoder.block[0].layer[-1].DenseReluDense, "wi_0"),
                tied=model.lm_head.weight is model.shared.weight,
            )
        except AttributeError as error:  # a module of another kind in the place of one
            raise NotT5Error(f"{kind} must have the modules of transformers' T5: {error}.") from error

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "The configuration") -> T5Dims:
        """Read the sizes from the contents of a ``config.json``, ``layer_widths`` of a pruned model included.

        Raises ``NotT5Error`` for another kind, ``ModelUnavailableError`` for a missing size; both call it ``name``.
        """
        # transformers 5 writes that all T5s are tied: there only `of` knows.
        kind = config.get("model_type", "t5")
        if kind not in T5_LIKE:
            raise NotT5Error(f"{name} is of type {kind!r}; {ONLY_T5}")
        needed = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
        sizes = {key: config.get(key) for key in needed}
        sizes["num_decoder_layers"] = config.get("num_decoder_layers") or sizes["num_layers"]
        for key, value in sizes.items():
            try:
                if as_count(value, key, at_least=1) > MAX_LAYERS and key.endswith("_layers"):
                    raise InputError(f"{key} must be at most {MAX_LAYERS}, got {value}.")
            except InputError as error:
                raise ModelUnavailableError(f"{name} does not describe a T5: {error}") from error
        heads, ff = (sizes["num_heads"],), (sizes["d_ff"],)
        encoder, decoder = sizes["num_layers"], sizes["num_decoder_layers"]
        layers = {"encoder_heads": heads * encoder, "decoder_heads": heads * decoder, "cross_heads": heads * decoder}
        layers |= {"encoder_ff": ff * encoder, "decoder_ff": ff * decoder}
        layers |= {kind: tuple(widths) for kind, widths in (config.get("layer_widths") or {}).items()}
        activation = str(config.get("feed_forward_proj", "relu" if kind == "t5" else "gated-gelu"))
        return cls(
            vocab_size=sizes["vocab_size"],
            d_model=sizes["d_model"],
            d_kv=sizes["d_kv"],
            **layers,
            gated=activation.startswith("gated-"),
            tied=config.get("tie_word_embeddings", kind == "t5"),
        )


def require_t5(config: Any, name: str) -> None:
    """Raise ``NotT5Error`` for the configuration of another kind of model."""
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in T5_LIKE:
        raise NotT5Error(f"{name} is of type {kind!r}; {ONLY_T5}")
