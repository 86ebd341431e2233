"""T5's Unigram tokenizer in plain Python: the steps of ``tokenizer.json``.

A file that lists other steps is refused. The ids are those of the Rust library ``tokenizers``, except for characters
that Unicode added after 2016, letters with some Burmese vowels or tag characters where SentencePiece's table is used,
and exact ties between scores of more than 15 digits, which Rust rounds twice.
"""

from __future__ import annotations

import base64
import operator
import re
import struct
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from t5accel.checks import read_json_object
from t5accel.errors import InputError

UNKNOWN_PENALTY = 10.0  # an unknown character scores this much below the worst piece

# White space as Unicode and Rust have it: Python's also holds four control characters.
SPACES = "".join(char for char in map(chr, range(0x3001)) if char.isspace() and char not in "\x1c\x1d\x1e\x1f")
# The patterns of T5's tokenizers for Python's `re`; other libraries read other patterns differently.
PATTERNS = {r"\s+": f"[{SPACES}]+", " {2,}": " {2,}", '▁?[.,!?;:"()]': '▁?[.,!?;:"()]'}


def viterbi(word: str, scores: Mapping[str, float], unknown_score: float, longest: int) -> list[str]:
    """Cut ``word`` into the pieces whose scores sum highest.

    From left to right, the best cut of all that is before each position; of equally good ones that with the longer
    last piece, as in Rust. It looks up at most ``len(word) * longest`` pieces.

    Args:
        scores: the log probability of each piece.
        unknown_score: the score of a single character that is no piece.

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
    """A Unigram tokenizer as a ``tokenizer.json`` describes it; `from_file` makes one."""

    def __init__(self, specification: dict[str, Any]) -> None:
        model = specification["model"]
        if model.get("type") != "Unigram":
            raise _refused("the model", model.get("type"))
        for what, given in {**specification, **model}.items():
            if what in ("truncation", "padding", "byte_fallback") and given:
                raise _refused(what, given)
        self.scores = {piece: float(score) for piece, score in model["vocab"]}
        self._tokens = [piece for piece, _ in model["vocab"]]
        self._unknown_id = range(len(self._tokens))[model["unk_id"]]
        self._ids = {piece: token_id for token_id, piece in enumerate(self._tokens)}
        self._unknown_score = min(self.scores.values()) - UNKNOWN_PENALTY
        self._longest = max(map(len, self._tokens))
        self._normalizers = [_normalizer(step) for step in _steps(specification.get("normalizer"), "normalizers")]
        self._splitters = [_splitter(step) for step in _steps(specification.get("pre_tokenizer"), "pretokenizers")]
        self._after = _after(specification.get("post_processor"))
        if not _is_metaspace(specification.get("decoder")):
            raise _refused("the decoder", specification.get("decoder"))
        self._added: dict[str, dict[str, Any]] = {}
        for token in specification["added_tokens"]:
            if token["normalized"] or token["single_word"]:
                raise _refused("the added token", token)
            self._added[token["content"]] = token
            if token["id"] == len(self._tokens):
                self._tokens.append(token["content"])
            elif self._tokens[token["id"]] != token["content"]:
                raise InputError(f"the added token {token['content']!r} is not at its id, {token['id']}")
        contents = sorted(self._added, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, contents)) or "(?!)")  # (?!) is found nowhere

    @classmethod
    def from_file(cls, path: str | Path) -> UnigramTokenizer:
        """Read a ``tokenizer.json``, or the one in a folder."""
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise InputError(f"{file} does not exist: give a tokenizer.json, or the folder of a model that has one")
        content = read_json_object(file, InputError)
        try:
            return cls(content)
        except InputError as error:
            raise InputError(f"{file}: {error}") from error
        except (ValueError, TypeError, LookupError, AttributeError) as error:  # missing parts
            raise InputError(f"{file} is no tokenizer.json: {error!r}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``, and ``</s>`` unless ``add_special_tokens=False``."""
        return [token_id for _, token_id in self._pieces(text)] + (self._after if add_special_tokens else [])

    def encode_batch(self, texts: Iterable[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of each text, without padding. Errors as `encode`."""
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise InputError(f"texts must be a list of texts, got {texts!r}. For a single one call encode.")
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def tokenize(self, text: str) -> list[str]:
        """The pieces of ``text`` without the final ``</s>``; an unknown one is shown as it stands in the text."""
        return [piece for piece, _ in self._pieces(text)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` (L,). Ids beyond the vocabulary are skipped, as in Rust."""
        try:
            numbers = [operator.index(number) for number in ids]
        except TypeError as error:
            raise InputError(f"ids must be one sequence of integers, got {ids!r}.") from error
        if min(numbers, default=0) < 0:
            raise InputError(f"ids must not be negative, got {min(numbers)}.")
        special = {content for content, token in self._added.items() if token["special"] and skip_special_tokens}
        tokens = [token for number in numbers for token in self._tokens[number : number + 1] if token not in special]
        return "".join(token.replace("▁", " " if number else "") for number, token in enumerate(tokens))

    def _pieces(self, text: str) -> Iterator[tuple[str, int]]:
        """Each piece of ``text`` with its id."""
        if not isinstance(text, str):
            raise InputError(f"text must be a str, got {text!r}.")
        done = 0
        for match in self._find.finditer(text):
            token, start, end = self._added[match[0]], match.start(), match.end()
            if token["lstrip"]:
                start = max(done, len(text[:start].rstrip(SPACES)))
            if token["rstrip"]:
                end = len(text) - len(text[end:].lstrip(SPACES))
            yield from self._pieces_between(text[done:start])
            yield text[start:end], token["id"]
            done = end
        yield from self._pieces_between(text[done:])

    def _pieces_between(self, text: str) -> Iterator[tuple[str, int]]:
        """The pieces of a text without added tokens: normalized, cut into words, and those by Viterbi."""
        for normalize in self._normalizers:
            text = normalize(text)
        words = [text]
        for split in self._splitters:
            words = [word for longer in words if longer for word in split(longer)]
        for word in words:
            pieces = viterbi(word, self.scores, self._unknown_score, self._longest)
            for token_id, group in groupby(pieces, key=self._id):
                for piece in ["".join(group)] if token_id == self._unknown_id else group:  # unknown neighbours are one
                    yield piece, self._id(piece)

    def _id(self, piece: str) -> int:
        return self._ids.get(piece, self._unknown_id)


def _refused(what: str, given: Any) -> InputError:
    return InputError(f"{what} {str(given):.200} is not supported here: use the tokenizer of transformers")


def _steps(step: Any, name: str) -> list[Any]:
    """A step that may be a sequence of steps as a list."""
    return [] if step is None else step[name] if step["type"] == "Sequence" else [step]


def _normalizer(step: dict[str, Any]) -> Callable[[str], str]:
    """A function from a raw text to a tidier one."""
    match step:
        case {"type": "NFKC"}:
            return lambda text: unicodedata.normalize("NFKC", text)
        case {"type": "Precompiled", "precompiled_charsmap": str(table)}:
            return _precompiled(base64.b64decode(table))
        case {"type": "Replace", "pattern": {"Regex": pattern}, "content": str(content)} if pattern in PATTERNS:
            return lambda text: re.sub(PATTERNS[pattern], lambda _: content, text)
        case {"type": "Strip", "strip_left": bool(left), "strip_right": bool(right)}:
            return lambda text: text.lstrip(SPACES if left else "").rstrip(SPACES if right else "")
    raise _refused("the normalizer", step)


def _splitter(step: dict[str, Any]) -> Callable[[str], list[str]]:
    """A function from a text to its words; it may return empty ones."""
    match step:
        case {"type": "WhitespaceSplit"}:
            return lambda text: re.split(f"[{SPACES}]", text)
        case {"type": "Metaspace"} if _is_metaspace(step):
            return lambda text: re.split("(?=▁)", re.sub("^(?!▁)", "▁", text.replace(" ", "▁")))
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} if (
            pattern in PATTERNS
        ):
            return re.compile(f"({PATTERNS[pattern]})").split  # as a group: what it matches comes too
        case {"type": "Digits", "individual_digits": True}:
            return lambda text: [
                word
                for numeral, group in groupby(text, key=lambda char: unicodedata.category(char)[0] == "N")
                for word in (group if numeral else ["".join(group)])
            ]
    raise _refused("the pre-tokenizer", step)


def _is_metaspace(step: Any) -> bool:
    """Whether a step turns spaces into ``▁`` or back as T5's do: one stands before every text, too."""
    match step:
        case {"type": "Metaspace", "replacement": "▁", **more}:
            return more in ({"prepend_scheme": "always", "split": True}, {"add_prefix_space": True})
    return False


def _after(step: Any) -> list[int]:
    """The ids that go behind a text."""
    match step:
        case None:
            return []
        case {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A"}}, {"SpecialToken": {"id": name}}],
            "special_tokens": {**special},
        }:
            return special[name]["ids"]
    raise _refused("the post-processor", step)


def _precompiled(table: bytes) -> Callable[[str], str]:
    """SentencePiece's table of characters: the size of a double-array trie, the trie, and the texts it leads to."""
    (size,) = struct.unpack_from("<I", table)
    units = struct.unpack_from(f"<{size // 4}I", table, 4)
    texts = table[4 + size :]

    def look_up(key: str) -> str | None:
        """What the shortest entry that ``key`` begins with becomes."""
        place = units[0] >> 10
        for byte in key.partition("\0")[0].encode():
            unit = units[place ^ byte]
            if unit & 0x800000FF != byte:  # the label: whether this unit is that byte's
                return None
            place ^= byte ^ (unit >> 10 << (unit >> 6 & 8))
            if unit >> 8 & 1:  # an entry ends here, and its value follows
                begin = units[place] & 0x7FFFFFFF
                return texts[begin : texts.index(b"\0", begin)].decode()
        return None

    def replace(cluster: str) -> str:
        found = look_up(cluster) if len(cluster.encode()) < 6 else None
        if found is None and len(cluster) > 1:
            return "".join(map(replace, cluster))
        return cluster if found is None else found

    def normalize(text: str) -> str:
        clusters: list[str] = []  # characters with their marks, as Rust looks them up
        for char in text:
            mark = unicodedata.category(char)[0] == "M" or char in "\u200c\u200d\u0e33\u0eb3\uff9e\uff9f"
            if mark and clusters and unicodedata.category(clusters[-1][-1]) not in ("Cc", "Cf", "Zl", "Zp"):
                clusters[-1] += char
            else:
                clusters.append(char)
        return "".join(map(replace, clusters))

    return normalize
