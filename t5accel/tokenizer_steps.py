"""What a ``tokenizer.json`` does around its model: cut out added tokens, normalize, cut into words, frame, decode.

Each function reads one part of the file and gives what the Rust library ``tokenizers`` would. A part that it does not
know raises ``InputError``: to pass over it would mean other ids.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from t5accel.errors import InputError

# White space as Unicode and Rust have it: Python's also holds four control characters.
SPACES = "".join(char for char in map(chr, range(0x3001)) if char.isspace() and char not in "\x1c\x1d\x1e\x1f")

# What Oniguruma (in Rust) and `re` read alike: characters, escaped punctuation, \s and classes, one quantifier each.
_ESCAPED, _IN_CLASS = r"\\[!-&(-/:;=?@[-_{-~]", r"[A-Za-z0-9]-[A-Za-z0-9]|[^\\\[\]^&~|-]"
_SIMPLE = re.compile(rf"((\\s|{_ESCAPED}|[^][(){{}}\\.*+?|^$]|\[\^?({_ESCAPED}|{_IN_CLASS})+\])[?*+]?)+")


def _characters(ranges: str) -> re.Pattern[str]:
    """Hexadecimal ranges as a regular expression for one character, in a group."""
    return re.compile("([" + re.sub(r"\w+", lambda number: rf"\U{number[0]:0>8}", ranges).replace(" ", "") + "])")


# Rust normalizes by the tables of Unicode 9 and leaves younger characters alone. Here are all those (up to Unicode 18)
# that Python's tables would compose, decompose or reorder; the ranges also run over characters that never change.
_YOUNG = _characters(
    "558 58b-58c 5c8-5c9 7fd 897-8d3 9fe c3c d3b-d3c eba 1715 1abf-1af0 1df6-1dfa 209d-209f 32ff a7f1-a7f4 a82c ab69 "
    "105c9-107bf 10d24-10f85 11070 1133b 11382-113d0 1145e 11839-11a99 11d42-1612f 16d63-1b126 1ccd6-1d128 1d250-1d281 "
    "1d6a6 1df95-1dfff 1e030-1e6f5 1f16c 1fbf0-1fbf9"
)
# Its numerals, however, are those of Unicode 17: these are too young for Python 3.11, which has Unicode 14.
_YOUNG_NUMERAL = _characters(
    "10d40-10d49 116d0-116e3 11bf0-11bf9 11de0-11de9 11f50-11f59 16130-16139 16d70-16d79 16ff4-16ff6 1ccf0-1ccf9 "
    "1d2c0-1d2d3 1e4f0-1e4f9 1e5f1-1e5fa"
)

Parts = Iterator[tuple[str, int | None]]


def unsupported(what: str, given: Any) -> InputError:
    """The error for a part of the file that we would not treat as Rust does."""
    return InputError(f"{what} {str(given):.200} is not supported here: use the tokenizer of transformers")


def finder(tokens: list[dict[str, Any]]) -> Callable[[str], Parts]:
    """A function that cuts added tokens out of a text, the longest first: parts, each with its token's id or None.

    >>> token = {"id": 1, "content": "</s>", "lstrip": True, "rstrip": False}
    >>> list(finder([token])("Yes. </s>No."))
    [('Yes.', None), (' </s>', 1), ('No.', None)]
    """
    by_content = {token["content"]: token for token in tokens}
    contents = sorted(by_content, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, contents)) or r"(?!)")  # (?!) is found nowhere

    def find(text: str) -> Parts:
        done = 0
        for match in pattern.finditer(text):
            token, start, end = by_content[match[0]], match.start(), match.end()
            if token["lstrip"]:
                start = max(done, len(text[:start].rstrip(SPACES)))
            if token["rstrip"]:
                end = len(text) - len(text[end:].lstrip(SPACES))
            if done < start:
                yield text[done:start], None
            if start < end:  # else the token is white space that the one before it has swallowed
                yield text[start:end], token["id"]
            done = end
        if done < len(text):
            yield text[done:], None

    return find


def normalizer(step: Any) -> Callable[[str], str]:
    """A function from a raw text to a tidy one, from the file's ``normalizer``.

    >>> normalizer({"type": "Sequence", "normalizers": [{"type": "NFKC"}]})("ﬁve ½")
    'five 1⁄2'
    """
    functions = [_normalizer(part) for part in _steps(step, "normalizers")]

    def normalize(text: str) -> str:
        for function in functions:
            text = function(text)
        return text

    return normalize


def pre_tokenizer(step: Any) -> Callable[[str], list[str]]:
    """A function from a text to its words, none of them empty, from the file's ``pre_tokenizer``.

    >>> pre_tokenizer({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True})("I am  12.")
    ['▁I', '▁am', '▁', '▁12.']
    """
    functions = [_splitter(part) for part in _steps(step, "pretokenizers")]

    def split(text: str) -> list[str]:
        words = [text] if text else []
        for function in functions:
            words = [word for longer in words for word in function(longer) if word]
        return words

    return split


def template(step: Any) -> tuple[list[int], list[int]]:
    """The ids that go before and behind a single text, from the file's ``post_processor``."""
    sides: list[list[int]] = [[]]
    match step:
        case None:
            return [], []
        case {"type": "TemplateProcessing", "single": [*items], "special_tokens": {**special}}:
            for item in items:
                match item:
                    case {"Sequence": {"id": "A"}}:
                        sides.append([])
                    case {"SpecialToken": {"id": str(name)}}:
                        sides[-1] += _ids(special.get(name))
                    case _:
                        raise unsupported("the template's item", item)
    if len(sides) != 2:
        raise unsupported("the post-processor", step)
    return sides[0], sides[1]


def decoder(step: Any) -> Callable[[list[str]], str]:
    """A function from tokens to a text, from the file's ``decoder``.

    >>> decoder({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"})(["▁a", "b", "▁c"])
    'ab c'
    """
    match step:
        case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": "always" | "first" | "never" as scheme}:
            if len(mark) == 1 and "add_prefix_space" not in step:
                first = " " if scheme == "never" else ""  # what all marks of the first token become
                return lambda tokens: "".join(
                    token.replace(mark, " " if number else first) for number, token in enumerate(tokens)
                )
    raise unsupported("the decoder", step)


def _ids(token: Any) -> list[int]:
    match token:
        case {"ids": [*ids]} if all(isinstance(token_id, int) for token_id in ids):
            return ids
    raise unsupported("the template's token", token)


def _steps(step: Any, name: str) -> list[Any]:
    """A step that may be a sequence of steps, which may be sequences, as one list."""
    if isinstance(step, dict) and step.get("type") == "Sequence" and isinstance(step.get(name), list):
        return [inner for part in step[name] for inner in _steps(part, name)]
    return [] if step is None else [step]


def _normalizer(step: Any) -> Callable[[str], str]:
    match step:
        case {"type": "NFC" | "NFD" | "NFKC" | "NFKD" as form}:
            return lambda text: "".join(
                part if number % 2 else unicodedata.normalize(form, part)  # every second part is a young character
                for number, part in enumerate(_YOUNG.split(text))
            )
        case {"type": "Replace", "pattern": pattern, "content": str(content)}:
            regex = _regex(pattern)
            return lambda text: regex.sub(lambda _: content, text)
        case {"type": "Strip", "strip_left": bool(left), "strip_right": bool(right)}:
            spaces_left, spaces_right = SPACES if left else "", SPACES if right else ""
            return lambda text: text.lstrip(spaces_left).rstrip(spaces_right)
    raise unsupported("the normalizer", step)


def _splitter(step: Any) -> Callable[[str], list[str]]:
    """A function from a text to its words; it may return empty ones."""
    match step:
        case {
            "type": "Metaspace",
            "replacement": str(mark),
            "prepend_scheme": "always" | "never" as scheme,
            "split": True,
        } if len(mark) == 1 and "add_prefix_space" not in step:
            before = re.compile(f"(?={re.escape(mark)})")

            def split(text: str) -> list[str]:
                text = text.replace(" ", mark)
                return before.split(text if scheme == "never" or text.startswith(mark) else mark + text)

            return split
        case {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}:
            return _regex(pattern).split  # the pattern is a group: what it matches comes too
        case {"type": "Digits", "individual_digits": bool(individual)}:
            return lambda text: [
                part
                for numeral, group in groupby(text, key=_is_numeral)
                for part in (group if numeral and individual else ["".join(group)])
            ]
    raise unsupported("the pre-tokenizer", step)


def _is_numeral(char: str) -> bool:
    return unicodedata.category(char).startswith("N") or _YOUNG_NUMERAL.match(char) is not None


def _regex(pattern: Any) -> re.Pattern[str]:
    """The pattern, compiled, as one group."""
    match pattern:
        case {"String": str(text)} if text:
            return re.compile(f"({re.escape(text)})")
        case {"Regex": str(text)} if _SIMPLE.fullmatch(text):
            text = re.sub(r"\\(.)", lambda escape: f"[{SPACES}]" if escape[1] == "s" else escape[0], text)
            try:
                if not re.match(text, ""):  # at empty matches the two cut in different ways
                    return re.compile(f"({text})")
            except re.error:  # such as the class [z-a]
                pass
    raise unsupported("the pattern", pattern)
