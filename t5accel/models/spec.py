"""What the runtimes must know of a model besides its weights, derived once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from t5accel.decoding.token_constraints import TokenConstraints, constraints_from_config, special_tokens
from t5accel.models.families import FAMILIES, T5, Family, dims_of, family_of_model, gemma_configs, position_table
from t5accel.models.sizes import T5Dims


@dataclass(frozen=True)
class ModelSpec:
    """A model's family, sizes, special tokens and constraints, from its weights and configurations or a manifest.

    >>> from t5accel.models.random_init import random_t5
    >>> ModelSpec.of(random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))).tokens
    {'pad_token_id': 0, 'eos_token_id': 1, 'decoder_start_token_id': 0}
    """

    family: Family
    dims: T5Dims
    tokens: Mapping[str, int]  # pad_token_id, eos_token_id, decoder_start_token_id
    rules: TokenConstraints
    # None where positions are distances: source and target then share a vocabulary, too
    source_vocab_size: int | None = None
    positions: int | None = None

    @classmethod
    def of(cls, model: Any) -> ModelSpec:
        """Read a model object; raises as `family_of_model`, `special_tokens` and `constraints_from_config`."""
        family = family_of_model(model)
        rules, tokens = constraints_from_config(model), special_tokens(model)
        entries, positions = None, None
        if family.is_gemma:
            configs = gemma_configs(model.config)
            entries = configs["encoder"].vocab_size
            positions = min(config.max_position_embeddings for config in configs.values())
        elif not family.is_relative:
            first = family.first_position(tokens["pad_token_id"])
            positions = len(position_table(model.model.decoder)) - first
            entries = model.model.encoder.embed_tokens.num_embeddings
        return cls(family, dims_of(model, family), tokens, rules, entries, positions)

    @classmethod
    def of_manifest(cls, manifest: Any) -> ModelSpec:
        rules, entry = TokenConstraints.from_json(manifest.rules), manifest.family
        family = FAMILIES[entry["model_type"]] if entry else T5
        positions, entries = entry.get("positions"), entry.get("source_vocab_size")
        return cls(family, manifest.dims, manifest.tokens, rules, entries, positions)

    def family_entry(self) -> dict[str, Any]:
        """The manifest's ``family``, empty for T5."""
        if self.family.is_relative:
            return {}
        return {
            "model_type": self.family.model_type,
            "positions": self.positions,
            "source_vocab_size": self.source_vocab_size,
        }

    def describe(self, backend: Any) -> None:
        """Give a backend the attributes of `decoding.backend.Backend`."""
        backend.dims, backend.vocab_size, backend.rules = self.dims, self.dims.vocab_size, self.rules
        for name, token in self.tokens.items():
            setattr(backend, name, token)
        if self.positions is not None:
            backend.positions, backend.source_vocab_size = self.positions, self.source_vocab_size
