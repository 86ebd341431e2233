"""Forced, suppressed and final tokens, and search defaults, from a model's generation config.

Each constraint works as the logits processor of transformers with its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from t5accel.checks import as_count
from t5accel.errors import InputError

# Fields that change no token of these loops: lengths that every caller gives, outputs beside the tokens, caches and
# compilation, drafts that a model verifies, and options of sampling (``do_sample``) or of groups of beams alone.
_HARMLESS = set(
    """
    max_length max_new_tokens use_cache cache_implementation cache_config max_cache_len return_legacy_cache
    prefill_chunk_size low_memory compile_config disable_compile continuous_batching_config
    num_return_sequences output_attentions output_hidden_states output_scores output_logits return_dict_in_generate
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight prompt_lookup_num_tokens
    max_matching_ngram_size speculation_type use_mtp remove_invalid_values
    temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff diversity_penalty
    transformers_version
    """.split()
)
_APPLIED = set(
    """
    pad_token_id bos_token_id eos_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    suppress_tokens bad_words_ids min_length min_new_tokens num_beams length_penalty early_stopping
    renormalize_logits
    """.split()
)
# Values without effect, for fields where transformers has several of them or names no default.
_NEUTRAL = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "guidance_scale": 1,
    "penalty_alpha": 0,
}


@dataclass(frozen=True)
class TokenConstraints:
    """A model's constraints on every sequence, and its search defaults.

    >>> constraints = TokenConstraints(suppress_tokens=(7,), min_length=5)
    >>> constraints.suppressed((1, 2)), constraints.min_new(None, longest=9)
    ((7, 1, 2), 4)
    """

    forced_bos_token_id: int | None = None  # the first token unless a prefix is given: NLLB's and mBART's language
    forced_eos_token_id: int | None = None  # the last token of a sequence of maximal length
    suppress_tokens: tuple[int, ...] = ()  # never chosen; they keep their share of the probability
    eos_token_ids: tuple[int, ...] = ()  # all end tokens, if there are several; empty: the backend's one
    min_length: int = 0  # tokens before an end token, the start token and the prefix included
    min_new_tokens: int | None = None  # without start token and prefix, instead of min_length
    num_beams: int = 1  # of the search, like the next two: defaults that a caller may override
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    renormalize_logits: bool = False  # beams score by a distribution over the permitted tokens alone
    unsupported: tuple[str, ...] = ()  # "no_repeat_ngram_size=3": not applied, and therefore refused

    def eos_tokens(self, eos_token_id: int) -> tuple[int, ...]:
        """All end tokens, given the backend's one."""
        return self.eos_token_ids or (eos_token_id,)

    def with_bos(self, forced_bos_token_id: int | None) -> TokenConstraints:
        """Copy with another first token, if one is given."""
        return self if forced_bos_token_id is None else replace(self, forced_bos_token_id=forced_bos_token_id)

    def suppressed(self, ends: tuple[int, ...]) -> int | tuple[int, ...] | None:
        """Return the suppressed tokens and ``ends`` in the form that backends take."""
        never = (*self.suppress_tokens, *ends)
        return never if len(never) > 1 else never[0] if never else None

    def forced_token(self, length: int, *, longest: int, has_prefix: bool = False) -> int | None:
        """Return the token that must follow ``length`` new tokens, or ``None``."""
        if length == longest - 1 and self.forced_eos_token_id is not None:
            return self.forced_eos_token_id
        return self.forced_bos_token_id if not length and not has_prefix else None

    def steps_until_change(self, length: int, *, shortest: int, longest: int) -> int:
        """Return how many steps after ``length`` new tokens suppress and force the same tokens."""
        last = longest - (self.forced_eos_token_id is not None)
        return (min(shortest, last) if length < shortest else last) - length

    def min_new(self, given: int | None, *, longest: int, prefix: int = 1) -> int:
        """Return the minimum of new tokens: the caller's, else the model's, at most ``longest``.

        ``prefix`` counts the tokens in front of the new ones, the start token included.
        """
        if given is not None:
            return given
        wanted = self.min_length - prefix if self.min_new_tokens is None else self.min_new_tokens
        return min(max(wanted, 0), longest)

    def require_supported(self) -> None:
        """Raise ``InputError`` if the model needs a constraint that these loops do not apply."""
        if self.unsupported:
            raise InputError(
                f"generation_config sets {', '.join(self.unsupported)}, which t5accel's own decoding loops do not "
                "apply. Use the generate() of accelerate(model), or remove it from the model's generation_config."
            )

    def to_json(self) -> dict[str, Any]:
        """Return the values that differ from the defaults."""
        changed = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                changed[field.name] = list(value) if isinstance(value, tuple) else value
        return changed

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> TokenConstraints:
        """Read what `to_json` wrote."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in content.items()})


NO_CONSTRAINTS = TokenConstraints()


def constraints_from_config(model: Any) -> TokenConstraints:
    """Read the constraints of a transformers model from its ``generation_config``.

    ``unsupported`` names every field that would change a token and is not applied. Raises ``InputError`` for an
    invalid value.
    """
    try:
        return _constraints(model, getattr(model, "generation_config", None))
    except InputError:
        raise
    except (TypeError, ValueError) as error:  # a text where numbers belong
        raise InputError(f"generation_config must hold numbers where they belong, got others: {error}.") from error


def _constraints(model: Any, config: Any) -> TokenConstraints:
    def value(name: str, default: Any) -> Any:
        found = getattr(config, name, None)
        return default if found is None else found

    ends = _ends(model)
    words = [[*word] for word in value("bad_words_ids", [])]
    # Of bad_words_ids the words of one token are applied; as in transformers, not if that is an end token.
    never = {word[0] for word in words if len(word) == 1 and word[0] not in ends}
    never.update(value("suppress_tokens", []))
    entries = _vocab_size(model)
    forced, unsupported = {}, []
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        tokens = _tokens(value(name, []))
        if len(tokens) > 1:
            unsupported.append(f"{name}={[*tokens]}")
        elif tokens:
            forced[name] = as_count(tokens[0], name, at_least=0)
    if longer := [word for word in words if len(word) > 1]:
        unsupported.append(f"bad_words_ids={_short(longer)}")
    beams = as_count(value("num_beams", 1), "generation_config.num_beams", at_least=1)
    least = value("min_new_tokens", None)
    return TokenConstraints(
        **forced,
        # transformers ignores tokens that the vocabulary does not have
        suppress_tokens=tuple(sorted(token for token in never if 0 <= token < entries)),
        eos_token_ids=ends if len(ends) > 1 else (),
        min_length=as_count(value("min_length", 0), "generation_config.min_length", at_least=0),
        min_new_tokens=None if least is None else as_count(least, "generation_config.min_new_tokens", at_least=0),
        num_beams=beams,
        length_penalty=float(value("length_penalty", 1.0)),
        early_stopping=value("early_stopping", False),
        renormalize_logits=value("renormalize_logits", False) is True,
        unsupported=(*unsupported, *_unsupported(config)),
    )


def _unsupported(config: Any) -> list[str]:
    """Name each field that is neither applied nor harmless and differs from its default, unknown fields included."""
    if config is None:
        return []
    defaults = vars(type(config)()) if hasattr(config, "to_diff_dict") else {}
    found = []
    for name, value in vars(config).items():
        if name.startswith("_") or name in _HARMLESS | _APPLIED or value is None or value is False:
            continue
        if isinstance(value, list | tuple | dict | set) and not value:
            continue
        neutral = _NEUTRAL.get(name, defaults.get(name))
        if type(value) is bool or value != neutral:
            found.append(f"{name}={_short(value)}")
    return sorted(found)


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, bool | int | float | str | list | tuple | dict) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


def _tokens(value: Any) -> tuple[Any, ...]:
    """A token, a list of tokens or ``None`` as a tuple without repetitions."""
    if value is None:
        return ()
    given = value.tolist() if hasattr(value, "tolist") else value
    return tuple(dict.fromkeys(given)) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


def _ends(model: Any) -> tuple[int, ...]:
    """All end tokens: those of ``generation_config``, else of the configuration."""
    found = _tokens(_first_given("eos_token_id", getattr(model, "generation_config", None), model.config))
    ends = tuple(as_count(end, "eos_token_id", at_least=0) for end in found)
    entries = _vocab_size(model)
    return tuple(end for end in ends if end < entries) or ends


def _vocab_size(model: Any) -> int:
    return getattr(model.config, "decoder_vocab_size", None) or model.config.vocab_size


def _first_given(name: str, *configs: Any) -> Any:
    return next((found for config in configs if (found := getattr(config, name, None)) is not None), None)


def special_tokens(model: Any) -> dict[str, int]:
    """Find the ids of padding, end and start, as transformers' ``generate()`` finds them.

    But of two different pad ids the configuration's, by which sources are padded, is taken. Raises ``InputError`` if
    the configurations name no end or no start.
    """
    config, generation = model.config, getattr(model, "generation_config", None)
    ends = _ends(model)
    # Of several ends the configuration's own, which also ends sources, else the first.
    own = [end for end in _tokens(getattr(config, "eos_token_id", None)) if end in ends]
    pad = _first_given("pad_token_id", config, generation)
    start = _first_given("decoder_start_token_id", generation, config)
    if pad is None and ends:
        pad = ends[0]
    if start is None:  # some mBARTs
        start = _first_given("bos_token_id", generation, config)
    found = {"pad_token_id": pad, "eos_token_id": next(iter((*own, *ends)), None), "decoder_start_token_id": start}
    return {key: as_count(value, f"model.config.{key}", at_least=0) for key, value in found.items()}


def check_special_tokens(config: Any, generation_config: Any, backend: Any) -> None:
    """Raise ``InputError`` unless these configurations of transformers name the backend's special tokens."""
    for name, fallback in (("pad_token_id", "eos_token_id"), ("eos_token_id", ""), ("decoder_start_token_id", "")):
        named = [*_tokens(getattr(config, name, None)), *_tokens(getattr(generation_config, name, None))]
        if not named and fallback:
            named = [*_ends(SimpleNamespace(config=config, generation_config=generation_config))]
        if getattr(backend, name) not in named and (named or name != "decoder_start_token_id"):
            raise InputError(
                f"config.{name} must be the backend's, {getattr(backend, name)!r}, got "
                f"{getattr(config, name, None)!r}. Give the configuration of the model that the backend runs."
            )


def is_eos(tokens: np.ndarray, ends: tuple[int, ...]) -> np.ndarray:
    """Return a mask of the end tokens."""
    found = tokens == ends[0]
    for end in ends[1:]:
        found = found | (tokens == end)
    return found


def truncate_at_eos(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    """Return the tokens up to and including the first end token."""
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in ends), tokens)
