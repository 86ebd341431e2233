"""Forced, suppressed and final tokens, and search defaults: what a model's ``generation_config`` asks of every answer.

The rules are those of transformers' logits processors of these names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from t5accel.checks import as_count
from t5accel.errors import InputError

# Fields that change no token of our loops: lengths that every caller gives, outputs beside the tokens, caches and
# compilation, guesses that a model verifies, and what acts only on draws (``do_sample``) or groups of beams.
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
# What changes nothing, where transformers has more than one such value, or none that it names.
_NEUTRAL = dict(
    repetition_penalty=1, encoder_repetition_penalty=1, no_repeat_ngram_size=0, encoder_no_repeat_ngram_size=0,
    num_beam_groups=1, guidance_scale=1, penalty_alpha=0,
)  # fmt: skip


@dataclass(frozen=True)
class TokenConstraints:
    """What is asked of every answer of a model.

    Attributes:
        forced_bos_token_id: the first token, unless a prefix is given: the target's language, in NLLB and mBART.
        forced_eos_token_id: the last token of an answer that gets as long as it may.
        suppress_tokens: never chosen. They keep their share of the probability.
        eos_token_ids: all tokens that end an answer, where there are several; empty where the backend's one does.
        min_length: no end before an answer has that many tokens, the start token and a prefix included.
        min_new_tokens: the same without these, in place of ``min_length``; ``None`` where it says nothing.
        num_beams, length_penalty, early_stopping: of the search, where a caller names no others.
        renormalize_logits: beams score by a distribution over the tokens that may be chosen alone.
        unsupported: as ``"no_repeat_ngram_size=3"``, what our own loops do not apply, and therefore refuse.

    >>> TokenConstraints(forced_eos_token_id=2, suppress_tokens=(7,)).forced_token(4, longest=5)
    2
    """

    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    min_length: int = 0
    min_new_tokens: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    renormalize_logits: bool = False
    unsupported: tuple[str, ...] = ()

    def eos_tokens(self, eos_token_id: int) -> tuple[int, ...]:
        """All tokens that end an answer, given the backend's one.

        >>> TokenConstraints().eos_tokens(1), TokenConstraints(eos_token_ids=(1, 25)).eos_tokens(1)
        ((1,), (1, 25))
        """
        return self.eos_token_ids or (eos_token_id,)

    def with_bos(self, forced_bos_token_id: int | None) -> TokenConstraints:
        """The same with another first token, if one is given."""
        return self if forced_bos_token_id is None else replace(self, forced_bos_token_id=forced_bos_token_id)

    def suppressed(self, ends: tuple[int, ...]) -> int | tuple[int, ...] | None:
        """The tokens that may not be chosen, ``ends`` among them, as backends take them.

        >>> TokenConstraints().suppressed(()), TokenConstraints().suppressed((1,)), TokenConstraints(suppress_tokens=(7,)).suppressed((1, 2))
        (None, 1, (7, 1, 2))
        """
        never = (*self.suppress_tokens, *ends)
        return never if len(never) > 1 else never[0] if never else None

    def forced_token(self, length: int, *, longest: int, begun: bool = False) -> int | None:
        """The token behind ``length`` new ones, of ``longest`` at most, if it is not for the model to choose.

        Args:
            length, longest: new tokens.
            begun: a prefix beyond the start token was given.
        """
        if length == longest - 1 and self.forced_eos_token_id is not None:
            return self.forced_eos_token_id
        return self.forced_bos_token_id if not length and not begun else None

    def steps_alike(self, length: int, *, shortest: int, longest: int) -> int:
        """From behind ``length`` new tokens on, how many steps are asked the same of, before that changes.

        >>> rules = TokenConstraints(forced_eos_token_id=1)
        >>> rules.steps_alike(2, shortest=5, longest=9), rules.steps_alike(5, shortest=5, longest=9)
        (3, 3)
        """
        last = longest - (self.forced_eos_token_id is not None)
        return (min(shortest, last) if length < shortest else last) - length

    def min_new(self, given: int | None, *, longest: int, prefix: int = 1) -> int:
        """How many new tokens an answer has at least: as given, or by the model, as far as ``longest`` allows.

        Args:
            given: by the caller, who thereby overrules the model; ``None`` leaves it to that.
            longest: new tokens.
            prefix: tokens in front of the new ones, with the start token.

        >>> TokenConstraints(min_length=5).min_new(None, longest=9), TokenConstraints(min_length=5).min_new(0, longest=9)
        (4, 0)
        """
        if given is not None:
            return given
        wanted = self.min_length - prefix if self.min_new_tokens is None else self.min_new_tokens
        return min(max(wanted, 0), longest)

    def require_supported(self) -> None:
        """Raise ``InputError`` if the model asks for what our own loops do not apply.

        >>> TokenConstraints(unsupported=("no_repeat_ngram_size=3",)).require_supported()
        Traceback (most recent call last):
        t5accel.errors.InputError: generation_config sets no_repeat_ngram_size=3, which t5accel's own ...
        """
        if self.unsupported:
            raise InputError(
                f"generation_config sets {', '.join(self.unsupported)}, which t5accel's own decoding loops do not "
                "apply. Use the generate() of accelerate(model), or remove it from the model's generation_config."
            )

    def to_json(self) -> dict[str, Any]:
        """The values that differ from the defaults, as plain ones."""
        given = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value
                for name, (value, default) in given.items() if value != default}  # fmt: skip

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> TokenConstraints:
        """What `to_json` wrote."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in content.items()})


NO_CONSTRAINTS = TokenConstraints()


def constraints_from_config(model: Any) -> TokenConstraints:
    """What a model of transformers asks of every answer, by its whole ``generation_config``.

    Of ``bad_words_ids`` the words of one token are applied, if that is no end. Everything else that would change an
    answer is named in ``unsupported``.

    Raises:
        InputError: a token, a length or a number of beams is none.
    """
    config = getattr(model, "generation_config", None)

    def value(name: str, default: Any) -> Any:
        found = getattr(config, name, None)
        return default if found is None else found

    ends = _ends(model)
    words = [[*word] for word in value("bad_words_ids", [])]
    never = {word[0] for word in words if len(word) == 1 and word[0] not in ends}
    never.update(value("suppress_tokens", []))
    entries = getattr(model.config, "decoder_vocab_size", None) or model.config.vocab_size
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
    """Each field that is neither applied nor harmless and differs from its default; one that nobody knows, too."""
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
    """A token or a list of tokens, or ``None`` -> a tuple without repetitions."""
    if value is None:
        return ()
    given = value.tolist() if hasattr(value, "tolist") else value
    return tuple(dict.fromkeys(given)) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


def _ends(model: Any) -> tuple[int, ...]:
    """All tokens that end an answer: by ``generation_config``, or where it names none, by the configuration."""
    found = _tokens(_first_given("eos_token_id", getattr(model, "generation_config", None), model.config))
    ends = tuple(as_count(end, "eos_token_id", at_least=0) for end in found)
    entries = getattr(model.config, "decoder_vocab_size", None) or model.config.vocab_size
    return tuple(end for end in ends if end < entries) or ends


def _first_given(name: str, *configs: Any) -> Any:
    return next((found for config in configs if (found := getattr(config, name, None)) is not None), None)


def special_tokens(model: Any) -> dict[str, int]:
    """The ids of its padding, end and start, as transformers' ``generate()`` finds them.

    Of several ends it is that of the configuration, with which sources end, too, else the first. The start is
    ``generation_config``'s, else the configuration's, else ``bos``, as in some of mBART's. Where nothing is named that
    pads, the first end does.

    Raises:
        InputError: its configurations name no end or no start.
    """
    config, generation = model.config, getattr(model, "generation_config", None)
    ends = _ends(model)
    pad = _first_given("pad_token_id", config, generation)
    start = _first_given("decoder_start_token_id", generation, config)
    own = [end for end in _tokens(getattr(config, "eos_token_id", None)) if end in ends]
    found = {
        "pad_token_id": pad if pad is not None or not ends else ends[0],
        "eos_token_id": next(iter((*own, *ends)), None),
        "decoder_start_token_id": _first_given("bos_token_id", generation, config) if start is None else start,
    }
    return {key: as_count(value, f"model.config.{key}", at_least=0) for key, value in found.items()}


def check_special_tokens(config: Any, generation_config: Any, found: Any) -> None:
    """Raise ``InputError`` if a backend's special tokens are none of those that these configurations name.

    Args:
        config, generation_config: of transformers; the second may be ``None``.
        found: the backend.
    """
    for name, fallback in (("pad_token_id", "eos_token_id"), ("eos_token_id", ""), ("decoder_start_token_id", "")):
        named = [*_tokens(getattr(config, name, None)), *_tokens(getattr(generation_config, name, None))]
        if not named and fallback:
            named = [*_ends(SimpleNamespace(config=config, generation_config=generation_config))]
        if getattr(found, name) not in named and (named or name != "decoder_start_token_id"):
            raise InputError(
                f"config.{name} is {getattr(config, name, None)!r} and the backend's {getattr(found, name)!r}: give "
                "the configuration of the model that the backend runs."
            )


def is_eos(tokens: np.ndarray, ends: tuple[int, ...]) -> np.ndarray:
    """Which tokens end an answer: (…) -> (…) bool.

    >>> is_eos(np.array([[7, 1], [25, 3]]), (1, 25)).tolist()
    [[False, True], [True, False]]
    """
    found = tokens == ends[0]
    for end in ends[1:]:
        found = found | (tokens == end)
    return found


def truncate_at_eos(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    """The tokens up to the first end, which is the last of them; all where there is none.

    >>> truncate_at_eos([7, 25, 1], (1, 25)), truncate_at_eos([7, 8], (1, 25))
    ([7, 25], [7, 8])
    """
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in ends), tokens)
