"""What one family of encoder-decoders does otherwise than another: switches, as data.

A family is a file with one `Family` in it. The builder (`graphs.build`) reads the switches, `graphs.export.weights` the
names of the weights, which are those of BART in all families but T5's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """How the weights of a model are put together.

    What differs between models of one family (sizes, activation, forced tokens) is read from their configurations.

    Attributes:
        model_type: transformers' name for it, in ``config.json``.
        model_class: transformers' class, with a language-model head.
        norm: ``"layer"``, which subtracts the mean and adds a bias, or ``"rms"``.
        norm_first: a part of a layer reads the stream through its norm, and one norm more stands behind the last layer;
            else the norm stands behind the part, on the stream itself.
        norm_embedding: another one stands behind the embedding.
        position_offset: which row of the table of positions is the first one's; ``None`` if there is no table, because
            positions are in the attention scores, as distances.
        skips_padding: padding has no position, and real tokens are counted; the offset is then counted from the pad id.
        biases: linear layers have them.
        scales_attention: scores are divided by the root of the heads' width.
        scales_embedding: so is the embedding multiplied by the root of its own, where the configuration says so.
        head_bias: logits have a bias, of which most checkpoints make no use.
        sizes: of published checkpoints, by the name that they have behind ``random:``: keyword arguments of the
            configuration.
        generation: what published checkpoints set for ``generate()``; in place of ids ``"eos"`` stands for that one,
            and ``"pads"`` for the list of words that is the pad alone.

    >>> Family("bert", "BertModel").is_relative
    False
    """

    model_type: str
    model_class: str
    norm: str = "layer"
    norm_first: bool = False
    norm_embedding: bool = False
    position_offset: int | None = 0
    skips_padding: bool = False
    biases: bool = True
    scales_attention: bool = True
    scales_embedding: bool = True
    head_bias: bool = True
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_relative(self) -> bool:
        """Whether positions are in the attention scores, as T5's are."""
        return self.position_offset is None

    def first_position(self, pad_token_id: int) -> int:
        """Which row of the table of positions is that of the first token.

        >>> Family("m2m_100", "M2M100ForConditionalGeneration", position_offset=1, skips_padding=True).first_position(1)
        2
        """
        return (self.position_offset or 0) + (pad_token_id if self.skips_padding else 0)
