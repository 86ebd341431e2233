"""Task prefixes of T5 and language tokens of NLLB, mBART and M2M100."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from t5accel.checks import read_json_object
from t5accel.errors import InputError
from t5accel.models.load import BUNDLED

# T5 learned its tasks by these prefixes (Raffel et al. 2020, appendix D); a model is lost without the exact wording.
TRANSLATE = "translate English to French: "
SUMMARIZE = "summarize: "
QUESTION, CONTEXT = "question: ", " context: "

PREFIXES = (TRANSLATE, SUMMARIZE, QUESTION)  # of the bundled models
_LIKE_A_PREFIX = re.compile(r"\s*[\w ]{1,50}: ")  # as a user's own model may have it


def prefixes_of(backend: Any, model: str) -> tuple[str, ...]:
    """Prefixes of a bundled model, or those of a model's ``task_specific_params``.

    ``model`` is the name, used where the backend has no manifest.
    """
    if (backend.manifest.source["name"] if hasattr(backend, "manifest") else model) in BUNDLED:
        return PREFIXES
    params = None
    if hasattr(backend, "model"):
        params = getattr(backend.model.config, "task_specific_params", None)
    elif (config := Path(backend.folder) / "config.json").exists():
        params = read_json_object(config, InputError).get("task_specific_params")
    tasks = params.values() if isinstance(params, dict) else ()
    found = [task.get("prefix") for task in tasks if isinstance(task, dict)]
    return tuple(prefix for prefix in found if prefix and isinstance(prefix, str))


def prefix_hint(text: str, prefixes: tuple[str, ...]) -> str:
    """A hint for a text that starts with no prefix; empty where it has one or the model knows none."""
    if not prefixes or text.lstrip().startswith(prefixes) or _LIKE_A_PREFIX.match(text):
        return ""
    choices = " or ".join(f'"{prefix}"' for prefix in prefixes)
    return f"This model expects a prefix before each text: --prefix {choices}."


# fra_Latn of NLLB, fr_XX of mBART, __fr__ of M2M100
_FORMS = tuple(map(re.compile, (r"([a-z]{3}_[A-Z][a-z]{3})", r"([a-z]{2}_[A-Z]{2})", r"__([a-z]{2,3})__")))
_SHOWN = 5  # names in a message


class Languages:
    """The languages of a `TokenizerFile` or a tokenizer of transformers, which threads may share: it is not changed.

    >>> class Toy:  # a toy tokenizer with M2M100's marks
    ...     special_tokens = {"</s>": 2, "__en__": 7, "__fr__": 8}
    ...     def __call__(self, texts, **_):
    ...         ids = np.array([[7, *map(ord, text), 2] for text in texts])
    ...         return {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    >>> languages = Languages(Toy())
    >>> languages.ids
    {'en': 7, 'fr': 8}
    >>> languages.set_language(np.array([[7, 65, 2]]), np.array([[1, 1, 1]]), languages.source("fr")).tolist()
    [[8, 65, 2]]
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    @cached_property
    def _mark(self) -> tuple[re.Pattern[str] | None, bool]:
        """Pattern of language tokens, and whether a source ends with its own; read off an empty text."""
        names = {token: name for name, token in self._special_tokens.items()}
        ids = np.asarray(self._tokenizer([""], return_tensors="np", padding=True)["input_ids"])[0].tolist()
        for place in (0, -1) if ids else ():
            for form in _FORMS:
                if form.fullmatch(names.get(ids[place], "")):
                    return form, place == -1
        return None, False

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        own = getattr(self._tokenizer, "special_tokens", None)
        if own is not None:
            return own
        names = [*getattr(self._tokenizer, "all_special_tokens", ())]
        names += getattr(self._tokenizer, "lang_token_to_id", ())  # M2M100's are no special tokens everywhere
        return {name: self._tokenizer.convert_tokens_to_ids(name) for name in names}

    @cached_property
    def ids(self) -> dict[str, int]:
        """The token of each language by its name; empty where there are none."""
        form, _ = self._mark
        names = self._special_tokens.items() if form else ()
        return {match[1]: token for name, token in names if (match := form.fullmatch(name))}

    def source(self, src_lang: str) -> int:
        """The token of a source's language; raises ``InputError`` for an unknown one."""
        return self._id_of(src_lang, "src_lang")

    def set_language(self, ids: np.ndarray, mask: np.ndarray, language: int) -> np.ndarray:
        """Replace the language token of encoded sources: (B, S) -> (B, S) int64."""
        marked, is_last = np.array(ids), self._mark[1]
        place = mask[:, ::-1].argmax(axis=1) if is_last else mask.argmax(axis=1)
        marked[np.arange(len(ids)), mask.shape[1] - 1 - place if is_last else place] = language
        return marked

    def target(self, backend: Any, tgt_lang: str | None = None, forced_bos_token: str | None = None) -> dict[str, int]:
        """Decoding options for a target language or a forced first token.

        Raises ``InputError`` if the tokenizer knows neither, or both are given.
        """
        if tgt_lang is not None and forced_bos_token is not None:
            raise InputError("tgt_lang and forced_bos_token both name the first token: give one of them.")
        if forced_bos_token is not None:
            return {"forced_bos_token_id": _token_id(self._tokenizer, forced_bos_token, [*self._special_tokens])}
        if tgt_lang is None:
            return {}
        # mBART-25 starts its outputs with the language in place of the end token.
        starts_with_end = backend.decoder_start_token_id == backend.eos_token_id
        name = "forced_bos_token_id" if starts_with_end else "decoder_start_token_id"
        return {name: self._id_of(tgt_lang, "tgt_lang")}

    def _id_of(self, name: Any, option: str) -> int:
        if not self.ids:
            raise InputError(
                f"{option} is for models whose tokenizer has language tokens, such as NLLB, mBART and M2M100. Name the "
                "language in a prefix."
            )
        found = self.ids.get(name, self.ids.get(name.strip("_"))) if isinstance(name, str) else None
        if found is None:
            raise InputError(f"{option} must be a language of this model, got {name!r:.80}.{_nearest(name, self.ids)}")
        return found


def _token_id(tokenizer: Any, token: Any, known: list[str]) -> int:
    found = tokenizer.convert_tokens_to_ids(token) if isinstance(token, str) else None
    # transformers gives the id of <unk> for a token that it does not know.
    if found is None or tokenizer.convert_ids_to_tokens(found) != token:
        raise InputError(f"forced_bos_token must be a token of this model, got {token!r:.80}.{_nearest(token, known)}")
    return int(found)


def _nearest(given: Any, known: Any) -> str:
    """A sentence with the closest known names."""
    text, names = str(given)[:80], sorted(known)  # of a long text the search would take seconds
    near = get_close_matches(text, names, n=_SHOWN)
    near += [name for name in names if text[:2] and name.lower().startswith(text[:2].lower()) and name not in near]
    return f" Give one of {', '.join((near or names)[:_SHOWN])}{', …' * (not near)}." if names else ""
