"""T5's Unigram tokenizer in plain Python: how a text becomes ids, in the steps that ``tokenizer.json`` lists.

1. Added tokens such as ``</s>`` are cut out of the raw text.
2. A normalizer tidies what is left: one form for each character, single spaces.
3. A pre-tokenizer cuts it into words; a space becomes a ``▁`` that starts the next word.
4. Each word is cut into the pieces of the vocabulary whose scores, log probabilities, sum highest: `viterbi`.
5. A template adds ``</s>``.

The ids are those of the Rust library ``tokenizers``, ties and roundings included. What a file asks for beyond this is
refused when it is loaded. Steps 1, 2, 3 and 5 are in `tokenizer_steps`, the fourth is here.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from t5accel.errors import InputError
from t5accel.tokenizer_steps import decoder, finder, normalizer, pre_tokenizer, template, unsupported

UNKNOWN_PENALTY = 10.0  # an unknown character scores this much below the worst piece


def viterbi(word: str, scores: Mapping[str, float], unknown_score: float, longest: int) -> list[str]:
    """Cut ``word`` into the pieces whose scores sum highest.

    From left to right, the best cut of all that is before each position; of equally good ones that with the longer
    last piece, as in Rust. It looks up at most ``len(word) * longest`` pieces.

    Args:
        scores: the log probability of each piece.
        unknown_score: the score of a single character that is no piece.
        longest: characters of the longest piece, at least 1.

    >>> viterbi("cats", {"c": -3.0, "a": -3.0, "t": -3.0, "s": -2.0, "cat": -4.0, "ats": -5.0}, -13.0, longest=3)
    ['cat', 's']
    """
    best = [0.0] + [float("-inf")] * len(word)  # best[end]: the highest sum for word[:end]
    begin = [0] * (len(word) + 1)  # begin[end]: where the last piece of that cut begins
    for start in range(len(word)):
        for end in range(start + 1, min(start + longest, len(word)) + 1):
            score = scores.get(word[start:end], unknown_score if end == start + 1 else None)
            if score is not None and best[start] + score > best[end]:
                best[end], begin[end] = best[start] + score, start
    pieces, end = [], len(word)
    while end > 0:
        pieces.append(word[begin[end] : end])
        end = begin[end]
    return pieces[::-1]


class UnigramTokenizer:
    """A Unigram tokenizer as a ``tokenizer.json`` describes it; `from_file` makes one.

    Args:
        specification: the content of the file.

    Attributes:
        scores: the log probability of each piece of the vocabulary.

    Raises:
        InputError: it asks for something that this class does not do; the message names it.

    >>> from t5accel.checkpoints import data_folder
    >>> tokenizer = UnigramTokenizer.from_file(data_folder() / "mini-t5")
    >>> tokenizer.tokenize("12")
    ['▁', '1', '2']
    >>> tokenizer.decode(tokenizer.encode("Il a 12 ans !"))
    'Il a 12 ans !'
    """

    def __init__(self, specification: dict[str, Any]) -> None:
        for name in ("truncation", "padding"):
            if specification.get(name) is not None:
                raise unsupported(name, specification[name])
        self._tokens, scores, self._unknown_id = _model(specification.get("model"))
        self._ids = {piece: token_id for token_id, piece in enumerate(self._tokens)}
        self.scores = dict(zip(self._tokens, scores, strict=True))
        self._unknown_score = min(scores) - UNKNOWN_PENALTY
        self._longest = max(1, *map(len, self._tokens))
        self._normalize = normalizer(specification.get("normalizer"))
        self._split = pre_tokenizer(specification.get("pre_tokenizer"))
        self._before, self._after = template(specification.get("post_processor"))
        self._join = decoder(specification.get("decoder"))
        added = specification.get("added_tokens", [])
        self._add(added)
        self._special = {token["content"] for token in added if token["special"]}
        self._find_raw = finder([token for token in added if not token["normalized"]])
        self._find_normalized = finder([token for token in added if token["normalized"]])

    @classmethod
    def from_file(cls, path: str | Path) -> UnigramTokenizer:
        """Read a ``tokenizer.json``, or the one in a folder.

        Raises:
            InputError: no such file, no JSON, or a tokenizer that is not supported.
        """
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise InputError(f"{file} does not exist: give a tokenizer.json, or the folder of a model that has one")
        try:
            specification = json.loads(file.read_text(encoding="utf-8"), parse_float=_rust_float)
        except ValueError as error:  # bad JSON and bad UTF-8 alike
            raise InputError(f"{file} is no JSON: {error}") from error
        if not isinstance(specification, dict):
            raise InputError(f"{file} is no tokenizer.json: it holds no object")
        try:
            return cls(specification)
        except InputError as error:
            raise InputError(f"{file}: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``, and the template's ``</s>`` unless ``add_special_tokens=False``.

        Raises:
            InputError: no text, or one with half of a surrogate pair.
        """
        ids = [token_id for _, token_id in self._pieces(text)]
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def encode_batch(self, texts: Iterable[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of each text, without padding. Errors as `encode`."""
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise InputError(f"texts is {texts!r}: give a list of texts, or call encode for a single one")
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def tokenize(self, text: str) -> list[str]:
        """The pieces of ``text`` without the template's; an unknown one is shown as it stands in the text."""
        return [piece for piece, _ in self._pieces(text)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` (L,). Ids beyond the vocabulary are skipped, as in Rust.

        Raises:
            InputError: not one sequence of integers, or a negative one.
        """
        try:
            numbers = [operator.index(number) for number in ids]
        except TypeError as error:
            raise InputError(f"ids is {ids!r}: give one sequence of integers") from error
        if min(numbers, default=0) < 0:
            raise InputError(f"ids holds {min(numbers)}: no id is negative")
        tokens = [self._tokens[number] for number in numbers if number < len(self._tokens)]
        return self._join([token for token in tokens if not (skip_special_tokens and token in self._special)])

    def _pieces(self, text: str) -> Iterator[tuple[str, int]]:
        """Each piece of ``text`` with its id."""
        if not isinstance(text, str):
            raise InputError(f"{text!r} is no text: give a str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError("the text holds half of a surrogate pair, as undecodable bytes become") from error
        for raw, raw_id in self._find_raw(text):
            if raw_id is not None:
                yield raw, raw_id
                continue
            for part, part_id in self._find_normalized(self._normalize(raw)):
                if part_id is not None:
                    yield part, part_id
                    continue
                for word in self._split(part):
                    yield from self._pieces_of_word(word)

    def _pieces_of_word(self, word: str) -> Iterator[tuple[str, int]]:
        """What Viterbi finds, with unknown neighbours joined into one piece."""

        def token_id(piece: str) -> int:
            return self._ids.get(piece, self._unknown_id)

        pieces = viterbi(word, self.scores, self._unknown_score, self._longest)
        for group_id, group in groupby(pieces, key=token_id):
            for piece in ["".join(group)] if group_id == self._unknown_id else group:
                yield piece, token_id(piece)  # asked again: by chance, what was joined may be in the vocabulary

    def _add(self, added: Any) -> None:
        """Check the added tokens, and give a place behind the vocabulary to those that are not in it."""
        contents: set[str] = set()
        for token in added if isinstance(added, list) else [added]:
            match token:
                case {
                    "id": int(token_id),
                    "content": str(content),
                    "lstrip": bool(),
                    "rstrip": bool(),
                    "normalized": bool(normalized),
                    "special": bool(),
                    "single_word": False,
                } if content and content not in contents:
                    contents.add(content)
                case _:
                    raise unsupported("the added token", token)
            if normalized and self._normalize(content) != content:  # which versions of Rust decode differently
                raise unsupported("an added token that the normalizer changes, as", token)
            if token_id != self._ids.get(content, len(self._tokens)):
                raise InputError(f"the added token {content!r} has the id {token_id}, which is not its place")
            if token_id == len(self._tokens):
                self._tokens.append(content)


def _model(model: Any) -> tuple[list[str], list[float], int]:
    """The pieces, their scores, and the id of the unknown one."""
    match model:
        case {"type": str(kind)} if kind != "Unigram":
            raise InputError(f"the model is a {kind}, not a Unigram")
        case {"byte_fallback": True}:
            raise InputError("the model's byte_fallback is not supported")
        case {"type": "Unigram", "vocab": [*vocab], "unk_id": int(unknown_id)} if 0 <= unknown_id < len(vocab):
            for entry in vocab:
                match entry:
                    case [str(), int(score) | float(score)] if abs(score) < 2**53:  # no NaN, no sum that overflows
                        pass
                    case _:
                        raise InputError(f"the vocabulary holds {entry!r}, not a piece and its log probability")
            return [piece for piece, _ in vocab], [float(score) for _, score in vocab], unknown_id
    raise InputError("the model needs the type Unigram, a vocabulary, and an unk_id within it")


def _rust_float(number: str) -> float:
    """A JSON number as Rust reads it: all digits as one integer, then divided by a power of ten; rounded twice."""
    digits, _, exponent = number.lower().partition("e")
    whole, _, fraction = digits.partition(".")
    while fraction and abs(int(whole + fraction)) >= 2**64:
        fraction = fraction[:-1]
    value, power = float(int(whole + fraction)), int(exponent or 0) - len(fraction)
    while power < -308:
        value, power = value / 1e308, power + 308
    return value * float(f"1e{power}") if power >= 0 else value / float(f"1e{-power}")
