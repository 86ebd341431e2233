"""Tokens that an answer has to begin or end with, and tokens that it may not hold: what a model's checkpoint demands.

The rules are those of transformers' logits processors of these names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from t5accel.checks import as_count


@dataclass(frozen=True)
class Rules:
    """What is asked of every answer of a model.

    Attributes:
        forced_bos_token_id: the first token, unless a prefix is given: the target's language, in NLLB and mBART.
        forced_eos_token_id: the last token of an answer that gets as long as it may.
        suppress_tokens: never chosen. They keep their share of the probability.

    >>> Rules(forced_eos_token_id=2, suppress_tokens=(7,)).forced(4, longest=5)
    2
    """

    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()

    def forbidden(self, end: int | None) -> int | tuple[int, ...] | None:
        """What may not be chosen, beside ``end``, if that is a token: as backends take it.

        >>> Rules().forbidden(None), Rules().forbidden(1), Rules(suppress_tokens=(7,)).forbidden(1)
        (None, 1, (7, 1))
        """
        if not self.suppress_tokens:
            return end
        return self.suppress_tokens if end is None else (*self.suppress_tokens, end)

    def forced(self, length: int, *, longest: int, begun: bool = False) -> int | None:
        """The token behind ``length`` new ones, of ``longest`` at most, if it is not for the model to choose.

        Args:
            length, longest: new tokens.
            begun: a prefix beyond the start token was given.
        """
        if length == longest - 1 and self.forced_eos_token_id is not None:
            return self.forced_eos_token_id
        return self.forced_bos_token_id if not length and not begun else None

    def to_json(self) -> dict[str, Any]:
        """What differs from no rules at all, as plain values."""
        return {name: list(value) if isinstance(value, tuple) else value
                for name, value in vars(self).items() if value not in (None, ())}  # fmt: skip

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Rules:
        """What `to_json` wrote."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in content.items()})


NONE = Rules()


def rules_of(model: Any) -> Rules:
    """What a model of transformers asks of every answer, by its ``generation_config``.

    Of ``bad_words_ids`` the words of one token count, if that is not the end. Words of several tokens, and all else
    that may be configured, are for transformers' own ``generate()``.

    Raises:
        InputError: a forced token is no token.
    """
    config = getattr(model, "generation_config", None)
    given = {name: getattr(config, name, None) for name in ("forced_bos_token_id", "forced_eos_token_id")}
    forced = {name: None if token is None else as_count(token, name, at_least=0) for name, token in given.items()}
    words = getattr(config, "bad_words_ids", None) or []
    never = {word[0] for word in words if len(word) == 1 and word[0] != model.config.eos_token_id}
    never.update(getattr(config, "suppress_tokens", None) or [])
    return Rules(**forced, suppress_tokens=tuple(sorted(never)))


def special_tokens(model: Any) -> dict[str, int]:
    """The ids of its padding, end and start; raises ``InputError`` if its configuration lacks one.

    Some of mBART's name no start. Then it is what ``generate()`` takes: the generation's, else ``bos``.
    """
    found = {key: getattr(model.config, key) for key in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    if found["decoder_start_token_id"] is None and model.config.model_type == "mbart":
        places = ((model.generation_config, "decoder_start_token_id"), (model.config, "bos_token_id"))
        starts = [getattr(config, key, None) for config, key in places]
        found["decoder_start_token_id"] = next((start for start in starts if start is not None), None)
    return {key: as_count(value, f"model.config.{key}", at_least=0) for key, value in found.items()}
