"""Texts to token ids and back, and texts to texts.

Any tokenizer of transformers works; a `TokenizerFile` needs the tokenizers library alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel.checks import as_count, as_integers, read_json_object
from t5accel.errors import InputError, MissingPackageError, ModelUnavailableError, T5AccelError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from t5accel.decoding.backend import Backend


GenerateIds = Callable[[np.ndarray, np.ndarray], Any]

# transformers' clean-up of decoded English, which a tokenizer's configuration turns on or off.
_CLEAN_UP = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"))
_CLEAN_UP += ((" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))
_SURROGATES = re.compile("[\ud800-\udfff]")
_SURROGATE = "A text holds a lone surrogate (usually from undecodable bytes). Decode it first."


def generate_texts(
    backend: Backend, tokenizer: PreTrainedTokenizerBase | TokenizerFile, texts: Iterable[str], *,
    max_new_tokens: int = 64, num_beams: int | None = None, batch_size: int = 32, prefix: str = "",
    on_batch: Callable[[int], Any] | None = None,
) -> list[str]:  # fmt: skip
    """Generate an output for each text, in their order, by the model's ``generation_config``.

    Texts of similar length share a batch, which saves padding. ``num_beams`` is 1 for greedy search, by default the
    model's; ``on_batch`` gets the number of texts of each finished batch. Raises ``InputError`` as `text_to_text`.

    >>> from t5accel.api import open_backend
    >>> backend, tokenizer, _ = open_backend("mini", progress=False)
    >>> generate_texts(backend, tokenizer, ["I am tired.", "Yes."], prefix="translate English to French: ")
    ['Je suis fatigué.', 'Oui.']
    """
    from t5accel.backends.model_defaults import by_defaults

    as_count(batch_size, "batch_size", at_least=1)
    given = as_texts(texts)
    search = by_defaults(backend, max_new_tokens=max_new_tokens, num_beams=num_beams)
    generate = text_to_text(tokenizer, search, prefix=prefix)
    outputs = [""] * len(given)
    by_length = sorted(range(len(given)), key=lambda i: len(given[i]))
    for start in range(0, len(given), batch_size):
        batch = by_length[start : start + batch_size]
        for i, text in zip(batch, generate([given[i] for i in batch]), strict=True):
            outputs[i] = text
        if on_batch is not None:
            on_batch(len(batch))
    return outputs


def text_to_text(
    tokenizer: PreTrainedTokenizerBase | TokenizerFile, generate_ids: GenerateIds, *, prefix: str = "",
    src_lang: str | None = None, skip_special_tokens: bool = True, ends: Sequence[int] | None = None,
) -> Callable[[list[str]], list[str]]:  # fmt: skip
    """Wrap a function from ids to ids into one from texts to texts.

    ``generate_ids`` gets ``input_ids`` and ``attention_mask``, both (B, S) int64, and returns (B, L) token ids.
    ``prefix`` goes before each text. ``src_lang`` is the texts' language, as the tokenizer of NLLB, mBART or M2M100
    names it, by default the one that it was saved with. For ``skip_special_tokens`` and ``ends`` see `decode`. Raises
    ``InputError`` for an unknown language; the returned function for anything but a non-empty list of texts and (B, L)
    ids, and where the tokenizer fails.

    >>> class Letters:  # a toy tokenizer
    ...     def __call__(self, texts, **_):
    ...         ids = np.array([[ord(c) for c in text] for text in texts])
    ...         return {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    ...     def batch_decode(self, ids, **_): return ["".join(map(chr, row)) for row in ids]
    >>> text_to_text(Letters(), lambda ids, mask: ids[:, ::-1])(["abc"])
    ['cba']
    """
    if tokenizer is None:
        raise InputError("This model has no tokenizer (random weights have none): give token ids instead of texts.")
    if not callable(generate_ids):
        raise InputError(f"generate_ids must be a function of input_ids and attention_mask, got {generate_ids!r}.")
    if not isinstance(prefix, str):
        raise InputError(f"prefix must be a text, got {prefix!r:.80}. Give what goes before each text.")
    language = None
    if src_lang is not None:
        from t5accel.models.prefixes import Languages

        languages = Languages(tokenizer)
        language = languages.source(src_lang)

    def generate(texts: list[str]) -> list[str]:
        given = as_texts(texts)
        if any(map(_SURROGATES.search, given)):
            raise InputError(_SURROGATE)
        ids, mask = tokenize(tokenizer, [prefix + text for text in given])
        if language is not None:
            ids = languages.set_language(ids, mask, language)
        outputs = as_integers(generate_ids(ids, mask), "the result of generate_ids", rank=2)
        if len(outputs) != len(given):
            raise InputError(f"generate_ids must return a row for each of {len(given)} texts, got {len(outputs)}.")
        return decode(tokenizer, outputs, skip_special_tokens=skip_special_tokens, ends=ends)

    return generate


def tokenize(tokenizer: Any, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Texts -> ``input_ids`` and ``attention_mask``, both (B, S) int64; raises ``InputError`` where that fails."""
    with _as_input_error("The tokenizer fails on a text"):
        batch = tokenizer(texts, return_tensors="np", padding=True)
        return np.asarray(batch["input_ids"], dtype=np.int64), np.asarray(batch["attention_mask"], dtype=np.int64)


def decode(
    tokenizer: Any, ids: Any, *, skip_special_tokens: bool = True, ends: Sequence[int] | None = None
) -> list[str]:
    """(B, L) ids of new tokens, without the start token -> B texts; raises ``InputError`` where that fails.

    With ``skip_special_tokens=False`` a text holds all tokens before its end, such as ``<triplet>`` of REBEL and
    ``<extra_id_0>`` of T5. ``ends`` are the end tokens, by default the tokenizer's one.
    """
    if not skip_special_tokens:
        end = getattr(tokenizer, "eos_token_id", None)
        ends = ends if ends is not None else () if end is None else (end,)
        ids = [before_end(row, ends) for row in ids]
    with _as_input_error("The tokenizer cannot decode its tokens"):
        return tokenizer.batch_decode(ids, skip_special_tokens=skip_special_tokens)


def before_end(tokens: Any, ends: Sequence[int]) -> list[int]:
    """The tokens in front of the first end token, or all of them."""
    row = [int(token) for token in tokens]
    return row[: next((place for place, token in enumerate(row) if token in ends), len(row))]


@contextmanager
def _as_input_error(sentence: str) -> Iterator[None]:
    """Turn every failure of a tokenizer into ``InputError``."""
    try:
        yield
    except (T5AccelError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of the Rust library is no Exception
        raise InputError(f"{sentence} ({first_line(error)}).") from error


def as_texts(texts: Any, *, at_least: int = 1) -> list[str]:
    """The argument ``texts`` as a list; accepts every iterable of texts, such as arrays, columns and generators."""
    given = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else [None]
    if len(given) < at_least or not all(isinstance(text, str) for text in given):
        raise InputError(f"texts must be a list of {at_least} or more texts, got {texts!r:.200}.")
    return given


class TokenizerFile:
    """A ``tokenizer.json`` without transformers, with the ids and texts of its fast tokenizer.

    ``path`` is that file or its folder (a saved model, an export). The configuration beside it names the padding and
    end tokens and whether decoded text is cleaned up; ``pad_token_id`` replaces its padding token. ``eos_token_id`` is
    ``None`` where no end token is named. As in transformers 5, texts of BPE are not cleaned up. Threads may share it.

    Raises ``ModelUnavailableError`` for a missing or damaged file, ``InputError`` without a known padding token, and
    ``MissingPackageError`` without the tokenizers library.

    >>> from t5accel.models.load import data_folder
    >>> tokenizer = TokenizerFile(data_folder() / "mini-t5")
    >>> batch = tokenizer(["The house is small.", "No"])
    >>> batch["attention_mask"][:, -1].tolist()  # the second text is shorter
    [1, 0]
    >>> tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
    ['The house is small.', 'No']
    """

    def __init__(self, path: str | os.PathLike[str], *, pad_token_id: int | None = None):
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingPackageError("A tokenizer.json needs tokenizers: pip install tokenizers.") from error
        if not isinstance(path, str | os.PathLike):
            raise InputError(f"path must be a folder of a model or export, or its tokenizer.json, got {path!r}.")
        file = Path(path) / "tokenizer.json" if os.path.isdir(path) else Path(path)
        if os.path.isfile(file.parent / "source.spm") and not os.path.isfile(file):
            raise ModelUnavailableError(
                f"{file.parent} holds Marian's tokenizer, source.spm and target.spm, which transformers reads: take "
                "tokenizer_of(folder)."
            )
        if not os.path.isfile(file):
            raise ModelUnavailableError(
                f"There is no file {file}: give a folder that holds a tokenizer.json, or that file. transformers "
                "writes it with tokenizer.save_pretrained(folder)."
            )
        try:
            self.tokenizer = Tokenizer.from_file(str(file))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a bare Exception for any damage, or a panic, which is none
            raise ModelUnavailableError(f"{file} cannot be read as a tokenizer: {error}") from error
        padding = self.tokenizer.padding or {}
        # A file saved after use may hold that use's padding and truncation.
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        config = _read(file.parent / "tokenizer_config.json")
        self.tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
        forced = config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output") is True
        is_bpe = type(self.tokenizer.model).__name__ == "BPE"
        self._cleans_up = config.get("clean_up_tokenization_spaces") is True and (forced or not is_bpe)
        token, end = _content(config, "pad_token"), _content(config, "eos_token")
        if token is None or end is None:
            special = _read(file.parent / "special_tokens_map.json")
            token, end = token or _content(special, "pad_token"), end or _content(special, "eos_token")
        self.eos_token_id = None if end is None else self.tokenizer.token_to_id(end)
        if pad_token_id is None:
            found = self.tokenizer.token_to_id(token or "<pad>")
            pad_token_id = padding.get("pad_id") if found is None else found
        if pad_token_id is None:
            raise InputError(f"{file} names no padding token: give pad_token_id.")
        self.pad_token_id = as_count(pad_token_id, "pad_token_id", at_least=0)
        if self.pad_token_id >= self.tokenizer.get_vocab_size():
            raise InputError(
                f"pad_token_id must be below {self.tokenizer.get_vocab_size()}, the size of {file}, got {pad_token_id}."
            )

    def __call__(
        self, texts: Sequence[str], *, return_tensors: str = "np", padding: bool = True
    ) -> dict[str, np.ndarray]:
        """Texts -> ``input_ids`` and ``attention_mask``, both (B, S) int64, padded on the right.

        ``return_tensors`` and ``padding`` take no other values; callers also pass them to transformers.
        """
        if return_tensors != "np" or padding is not True:
            raise InputError(
                "A TokenizerFile returns padded numpy arrays: leave return_tensors and padding as they are."
            )
        given = as_texts(texts)
        with _as_input_error("The tokenizer fails on a text"):
            try:
                rows = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(given)]
            except (TypeError, UnicodeEncodeError) as error:  # the library's answer to a lone surrogate
                raise InputError(_SURROGATE) from error
        mask = np.arange(max(map(len, rows))) < np.array([len(row) for row in rows])[:, None]
        ids = np.full(mask.shape, self.pad_token_id, dtype=np.int64)
        ids[mask] = np.concatenate(rows)
        return {"input_ids": ids, "attention_mask": mask.astype(np.int64)}

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of all special tokens, by their texts."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of one token; ``None`` if there is no such token."""
        return self.tokenizer.token_to_id(token)

    def convert_ids_to_tokens(self, number: int) -> str | None:
        """The token of one id; ``None`` if there is no such id."""
        return self.tokenizer.id_to_token(number)

    def batch_decode(self, ids: Any, skip_special_tokens: bool = False) -> list[str]:
        """(B, L) ids, or rows of different lengths -> B texts."""
        if isinstance(ids, str | bytes) or not isinstance(ids, Iterable) or getattr(ids, "ndim", 2) == 0:
            raise InputError(f"ids must be (B, L) token ids, got {ids!r:.200}.")
        rows = [as_integers(row, "a row of ids", rank=1) for row in ids]
        for row in rows:
            if row.size and (row.min() < 0 or row.max() > np.iinfo(np.uint32).max):
                raise InputError(f"ids must be 32-bit and not negative, got {row.min()} … {row.max()}.")
        with _as_input_error("The tokenizer cannot decode its tokens"):
            texts = self.tokenizer.decode_batch([row.tolist() for row in rows], skip_special_tokens=skip_special_tokens)
        return [_cleaned_up(text) for text in texts] if self._cleans_up else texts


def tokenizer_of(folder: str | os.PathLike[str]) -> Any:
    """The tokenizer in the folder of a model or export, without transformers where there is a ``tokenizer.json``.

    Tokenizers of NLLB and mBART put the source's language in front of texts, as saved: set ``src_lang`` before saving,
    or give it to `text_to_text`. Raises ``ModelUnavailableError`` if there is no tokenizer, or it is damaged.
    """
    if os.path.isdir(folder) and not os.path.isfile(Path(folder) / "tokenizer.json"):
        from t5accel.models.load import load_tokenizer

        if (tokenizer := load_tokenizer(folder)) is not None:
            return tokenizer
    return TokenizerFile(folder)


def _read(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    return read_json_object(path, ModelUnavailableError) if os.path.lexists(path) else {}


def _content(config: dict[str, Any], name: str) -> str | None:
    """A special token's text, which configurations write in two ways."""
    token = config.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _cleaned_up(text: str) -> str:
    for loose, tight in _CLEAN_UP:
        text = text.replace(loose, tight)
    return text
