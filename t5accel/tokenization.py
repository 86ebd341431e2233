"""From texts to texts: tokenise a batch, let any algorithm generate ids, and turn them back into text.

Any tokenizer of transformers will do; a `TokenizerFile` needs the tokenizers library alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel.checks import as_count, as_integers, read_json_object
from t5accel.errors import InputError, MissingPackageError, ModelUnavailableError, T5AccelError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


GenerateIds = Callable[[np.ndarray, np.ndarray], Any]

# transformers' clean-up of decoded English, which a tokenizer's configuration turns on or off.
_TIDIED = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"))
_TIDIED += ((" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))


def text_to_text(
    tokenizer: PreTrainedTokenizerBase | TokenizerFile, generate_ids: GenerateIds, *, prefix: str = "",
    src_lang: str | None = None, skip_special_tokens: bool = True, ends: Sequence[int] | None = None,
) -> Callable[[list[str]], list[str]]:  # fmt: skip
    """Wrap a function from ids to ids into one from texts to texts, as `quality.evaluate` wants it.

    Args:
        tokenizer: a `TokenizerFile`, or a transformers tokenizer with a padding token.
        generate_ids: called with ``input_ids`` and ``attention_mask``, both (B, S) int64; returns (B, L) token ids.
        prefix: goes before each text, such as ``"summarize: "``.
        src_lang: the language of the texts, as the tokenizer of NLLB, mBART or M2M100 names it; by default the one that
            the tokenizer was saved with.
        skip_special_tokens, ends: see `decode`.

    Raises:
        InputError: the tokenizer does not know ``src_lang``.

    The returned function raises ``InputError`` for anything but a non-empty list of texts, and if ``generate_ids``
    returns something else than (B, L) ids (such as a `Generated`: give its ``sequences``), or the tokenizer fails.

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
        raise InputError(f"generate_ids is {generate_ids!r}; give a function of input_ids and attention_mask.")
    if not isinstance(prefix, str):
        raise InputError(f"prefix must be a text, got {prefix!r:.80}. Give what goes before each text.")
    language = None
    if src_lang is not None:
        from t5accel.models.languages import Languages

        languages = Languages(tokenizer)
        language = languages.source(src_lang)

    def generate(texts: list[str]) -> list[str]:
        given = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else []
        if not given or not all(isinstance(text, str) for text in given):
            raise InputError(f"Give a non-empty list of texts; {texts!r} was given.")
        if not all(_is_unicode(text) for text in given):
            raise InputError("A text holds half of a surrogate pair, as undecodable bytes become: decode it first.")
        ids, mask = tokenize(tokenizer, [prefix + text for text in given])
        if language is not None:
            ids = languages.set_language(ids, mask, language)
        answers = as_integers(generate_ids(ids, mask), "the result of generate_ids", rank=2)
        if len(answers) != len(given):
            raise InputError(f"generate_ids returned {len(answers)} rows for {len(given)} texts.")
        return decode(tokenizer, answers, skip_special_tokens=skip_special_tokens, ends=ends)

    return generate


def tokenize(tokenizer: Any, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Texts -> ``input_ids`` and ``attention_mask``, both (B, S) int64, by any tokenizer.

    Raises:
        InputError: the tokenizer fails, whatever it raises.
    """
    with _failures("The tokenizer fails on a text"):
        batch = tokenizer(texts, return_tensors="np", padding=True)
        ids, mask = (np.asarray(batch[name], dtype=np.int64) for name in ("input_ids", "attention_mask"))
    return ids, mask


def decode(
    tokenizer: Any, ids: Any, *, skip_special_tokens: bool = True, ends: Sequence[int] | None = None
) -> list[str]:
    """(B, L) ids of new tokens -> B texts, by any tokenizer.

    Args:
        tokenizer: with transformers' ``batch_decode``.
        ids: without the start token.
        skip_special_tokens: whether to leave out special tokens. With ``False`` a text holds all tokens before its end:
            ``<triplet>`` of REBEL, ``<extra_id_0>`` of T5, but neither the end itself nor padding.
        ends: the tokens that end an answer; by default the tokenizer's one.

    Raises:
        InputError: the tokenizer fails, whatever it raises.
    """
    if not skip_special_tokens:
        ids = [before_end(row, ends_of(tokenizer, ends)) for row in ids]
    with _failures("The tokenizer cannot decode its tokens"):
        return tokenizer.batch_decode(ids, skip_special_tokens=skip_special_tokens)


def ends_of(tokenizer: Any, given: Sequence[int] | None = None) -> tuple[int, ...]:
    """The tokens that end an answer: as given, or the tokenizer's one, if it names one."""
    if given is not None:
        return (*given,)
    end = getattr(tokenizer, "eos_token_id", None)
    return () if end is None else (end,)


def before_end(tokens: Any, ends: Sequence[int]) -> list[int]:
    """The tokens in front of the first end; all where there is none.

    >>> before_end([7, 8, 1, 0], (1,)), before_end([7, 8], (1,))
    ([7, 8], [7, 8])
    """
    row = [int(token) for token in tokens]
    return row[: next((place for place, token in enumerate(row) if token in ends), len(row))]


@contextmanager
def _failures(sentence: str) -> Iterator[None]:
    """Turn every failure of a tokenizer into ``InputError``."""
    try:
        yield
    except (T5AccelError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of the Rust library is no Exception
        raise InputError(f"{sentence} ({first_line(error)}).") from error


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class TokenizerFile:
    """A ``tokenizer.json`` without transformers: what `text_to_text` and a decoding algorithm need of a tokenizer.

    It gives the ids and texts of transformers' fast tokenizer with ``padding=True``, and starts in a fraction of its
    time. Threads may share it.

    Args:
        path: a folder with ``tokenizer.json`` (a saved model, an export), or that file. The configuration beside it
            is read, too, if there is one: the padding token, and whether decoded text is tidied.
        pad_token_id: which id fills up shorter rows; by default the padding token of the configuration, else that of
            the file.

    Attributes:
        pad_token_id: as above.
        eos_token_id: what ends an answer, by the configuration; ``None`` where it names none.

    Raises:
        ModelUnavailableError: there is no such file, or it is damaged.
        InputError: no padding token is known, or the one given is not in the vocabulary.
        MissingPackageError: tokenizers is not installed.

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
            raise InputError(f"path is {path!r}; give the folder of a model or export, or its tokenizer.json.")
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
        except BaseException as error:  # a bare Exception, whatever is wrong with the file, or a panic, which is none
            raise ModelUnavailableError(f"{file} cannot be read as a tokenizer: {error}") from error
        padding = self.tokenizer.padding or {}
        # A file saved after use may hold how that use padded and cut; here that is the caller's business.
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        config = _read(file.parent / "tokenizer_config.json")
        self._is_tidied = config.get("clean_up_tokenization_spaces") is True
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
                f"pad_token_id is {pad_token_id}; {file} has {self.tokenizer.get_vocab_size()} tokens, numbered from 0."
            )

    def __call__(
        self, texts: Sequence[str], *, return_tensors: str = "np", padding: bool = True
    ) -> dict[str, np.ndarray]:
        """Texts -> ``input_ids`` and ``attention_mask``, both (B, S) int64, padded on the right.

        Args:
            texts: at least one. Each ends with the tokens that the file's post-processor adds, in T5 ``</s>``.
            return_tensors, padding: only these values; there for callers that also pass them to transformers.

        Raises:
            InputError: no texts, other options, or a text on which the tokenizers library fails.
        """
        if return_tensors != "np" or padding is not True:
            raise InputError(
                "A TokenizerFile returns padded numpy arrays: leave return_tensors and padding as they are."
            )
        given = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else []
        if not given or not all(isinstance(text, str) for text in given):
            raise InputError(f"Give a non-empty list of texts; {texts!r} was given.")
        with _failures("The tokenizer fails on a text"):
            try:
                rows = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(given)]
            except (TypeError, UnicodeEncodeError) as error:  # the library's answer to a text that cannot be encoded
                raise InputError(
                    "A text holds half of a surrogate pair, as undecodable bytes become: decode it first."
                ) from error
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
        """(B, L) ids, or rows of different lengths -> B texts.

        Raises:
            InputError: no rows of integers, one that no token can have, or the tokenizers library fails.
        """
        if isinstance(ids, str | bytes) or not isinstance(ids, Iterable) or getattr(ids, "ndim", 2) == 0:
            raise InputError(f"ids is {ids!r}; give (B, L) token ids.")
        rows = [as_integers(row, "a row of ids", rank=1) for row in ids]
        for row in rows:
            if row.size and (row.min() < 0 or row.max() > np.iinfo(np.uint32).max):
                raise InputError(f"ids hold {row.min()} … {row.max()}; a token's id is not negative and has 32 bits.")
        with _failures("The tokenizer cannot decode its tokens"):
            texts = self.tokenizer.decode_batch([row.tolist() for row in rows], skip_special_tokens=skip_special_tokens)
        return [_tidied(text) for text in texts] if self._is_tidied else texts


def tokenizer_of(folder: str | os.PathLike[str]) -> Any:
    """The tokenizer in the folder of a model or export; without transformers, where there is a ``tokenizer.json``.

    Other files, such as Marian's, are read by transformers. Tokenizers of NLLB and mBART write the source's language in
    front of texts, as the file was saved: give their ``src_lang`` before that.

    Raises:
        ModelUnavailableError: there is none, or it is damaged.
    """
    if os.path.isdir(folder) and not os.path.isfile(Path(folder) / "tokenizer.json"):
        from t5accel.models.load import load_tokenizer

        if (tokenizer := load_tokenizer(folder)) is not None:
            return tokenizer
    return TokenizerFile(folder)


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is no such file."""
    return read_json_object(path, ModelUnavailableError) if os.path.lexists(path) else {}


def _content(config: dict[str, Any], name: str) -> str | None:
    """A special token's text, which is written in two ways."""
    token = config.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _tidied(text: str) -> str:
    for loose, tight in _TIDIED:
        text = text.replace(loose, tight)
    return text


# Texts in, texts out: the ten lines for transformers' pipelines of translation and summaries, which 5.x dropped.


def text2text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: str | Iterable[str],
    *,
    batch_size: int = 8,
    prefix: str | None = None,
    task: str | None = None,
    **generate_options: Any,
) -> Any:
    """What ``model.generate`` answers to ``texts``: a list in their order, or one str for one str.

    Texts of like length share a batch, so that little is padded. Nothing is cut off.

    Args:
        model: has ``generate`` and a ``device``, and is in evaluation mode (dropout would make the answers random).
        tokenizer: a transformers tokenizer with a padding token.
        batch_size: at most so many texts at a time.
        prefix: goes before each text, such as ``"summarize: "``. By default that of ``task``, or nothing.
        task: a key of the configuration's ``task_specific_params``, such as ``"summarization"``: its prefix and options
            are used where none are given.
        generate_options: passed on to ``generate``, such as ``max_new_tokens`` and ``num_beams``.

    Raises:
        InputError: no texts, no tokenizer, a batch size below 1, a model in training mode, a task that the
            configuration does not name, or options that ask for more than one answer to a text.

    >>> from t5accel.models.load import load_model
    >>> model, tokenizer = load_model("mini")
    >>> texts = ["I am tired.", "Where is the station?"]
    >>> answers = text2text(model, tokenizer, texts, prefix="translate English to French: ", num_beams=2)
    >>> answers[0] == text2text(model, tokenizer, "translate English to French: I am tired.", num_beams=2)
    True
    """
    as_count(batch_size, "batch_size", at_least=1)
    given = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Iterable) else []
    if not given or not all(isinstance(text, str) for text in given):
        raise InputError(f"Give a text, or a list of at least one; {texts!r} was given.")
    if prefix is not None and not isinstance(prefix, str):
        raise InputError(f"prefix is {prefix!r}; give the text that goes before each of the others.")
    if not hasattr(model, "generate"):
        raise InputError(f"{type(model).__name__} has no generate(): give a model of transformers or optimum.")
    if getattr(model, "training", False):
        raise InputError("The model is in training mode, where dropout makes answers random: call model.eval() first.")

    if task is not None:
        own = _options_of(model, task)
        own_prefix = own.pop("prefix", "")
        prefix = own_prefix if prefix is None else prefix
        if "max_new_tokens" in generate_options:
            own.pop("max_length", None)  # which transformers would warn of
        generate_options = {**own, **generate_options}

    def generate_ids(input_ids: Any, attention_mask: Any) -> Any:
        import torch

        ids, mask = (torch.as_tensor(array, device=model.device) for array in (input_ids, attention_mask))
        with torch.no_grad():
            answers = model.generate(input_ids=ids, attention_mask=mask, **generate_options)
        answers = getattr(answers, "sequences", answers)  # with return_dict_in_generate they come in a larger object
        if len(answers) != len(ids):
            raise InputError(
                f"generate gave {len(answers)} answers to {len(ids)} texts: leave num_return_sequences at 1."
            )
        return answers

    answer = text_to_text(tokenizer, generate_ids, prefix=prefix or "")
    longest_first = sorted(range(len(given)), key=lambda number: len(given[number]), reverse=True)
    answers: dict[int, str] = {}
    for start in range(0, len(given), batch_size):
        numbers = longest_first[start : start + batch_size]
        answers.update(zip(numbers, answer([given[number] for number in numbers]), strict=True))
    return answers[0] if isinstance(texts, str) else [answers[number] for number in range(len(given))]


def _options_of(model: Any, task: str) -> dict[str, Any]:
    known = getattr(model.config, "task_specific_params", None) or {}
    if task not in known:
        named = f"one of {', '.join(known)}" if known else "a prefix, for this model's configuration names no tasks"
        raise InputError(f"task must be a key of the model's task_specific_params, got {task!r:.80}. Give {named}.")
    return dict(known[task])
