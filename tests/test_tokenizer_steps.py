"""The steps around a tokenizer's model beside the Rust ones: every character, and every pattern that is taken."""

from __future__ import annotations

import string
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from t5accel import tokenizer_steps
from t5accel.errors import InputError
from t5accel.tokenizer_steps import SPACES, decoder, normalizer, pre_tokenizer, template

FORMS = ("NFC", "NFD", "NFKC", "NFKD")
# All but ideographs, Hangul syllables, private characters and surrogates; from the high planes only special forms.
CHARACTERS = [
    chr(code)
    for code in chain(range(0x20000), range(0x2F800, 0x2FA20), range(0xE0000, 0xE01F0))
    if not (0x3401 <= code < 0x9FFF or 0xAC02 <= code < 0xD7A2 or 0xD800 <= code < 0xF900 or 0x17001 <= code < 0x18AFF)
]


def rust_words(step: Any, text: str) -> list[str]:
    return [word for word, _ in step.pre_tokenize_str(text)]


@pytest.mark.parametrize("form", FORMS)
def test_every_character_is_normalized_as_in_rust(form: str) -> None:
    """Alone and among combining marks, whose order depends on each other; whatever Unicode this Python knows."""
    rust, ours = getattr(normalizers, form)(), normalizer({"type": form})
    for char in CHARACTERS:
        for text in (char, f"a\u0301{char}\u0334"):
            assert ours(text) == rust.normalize_str(text), ascii(text)


def test_young_characters_need_their_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_steps, "_YOUNG", tokenizer_steps._characters("e000"))  # a private one
    with pytest.raises(AssertionError):
        test_every_character_is_normalized_as_in_rust("NFKC")


@settings(deadline=None)
@given(
    text=st.text(
        st.characters(categories=["Mn", "Mc", "Lo", "Ll", "Lm", "So"]) | st.sampled_from("ae\u1100\u1161\u11a8")
    )
)
def test_texts_are_normalized_as_in_rust(text: str) -> None:
    for form in FORMS:
        assert normalizer({"type": form})(text) == getattr(normalizers, form)().normalize_str(text)


def test_white_space_is_rust_s() -> None:
    strip, replace = normalizers.Strip(), normalizers.Replace(Regex(r"\s"), "")
    ours = normalizer({"type": "Replace", "pattern": {"Regex": r"\s"}, "content": ""})
    for char in CHARACTERS:
        assert (char in SPACES) == (strip.normalize_str(char) == "") == (replace.normalize_str(char) == ""), ascii(char)
        assert (char in SPACES) == (ours(char) == "")
    assert set("\x1c\x1d\x1e\x1f") == {char for char in map(chr, range(0x3001)) if char.isspace()} - set(SPACES)


@pytest.mark.parametrize("individual", [True, False])
def test_numerals_are_rust_s(individual: bool) -> None:
    rust = pre_tokenizers.Digits(individual_digits=individual)
    ours = pre_tokenizer({"type": "Digits", "individual_digits": individual})
    for char in CHARACTERS:
        text = f"a{char}{char}b"
        assert ours(text) == rust_words(rust, text), ascii(text)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("right", [True, False])
def test_strip(left: bool, right: bool) -> None:
    ours = normalizer({"type": "Strip", "strip_left": left, "strip_right": right})
    for text in ("", " ", " a ", "\x1c a\u3000", "\n\u0085é\t", "a b"):
        assert ours(text) == normalizers.Strip(left=left, right=right).normalize_str(text)


@pytest.mark.parametrize("scheme", ["always", "never"])
@pytest.mark.parametrize("mark", ["▁", "_", "^", "."])
def test_metaspace(scheme: str, mark: str) -> None:
    rust = pre_tokenizers.Metaspace(replacement=mark, prepend_scheme=scheme)
    ours = pre_tokenizer({"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme, "split": True})
    for text in ("", " ", "  ", "a", " a", "a ", "a  b", f"a{mark}b", f"{mark}{mark}a", f" {mark} ", "a\u00a0b\nc"):
        assert ours(text) == rust_words(rust, text), text


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_marks_become_spaces(scheme: str) -> None:
    rust = decoders.Metaspace(replacement="_", prepend_scheme=scheme)
    ours = decoder({"type": "Metaspace", "replacement": "_", "prepend_scheme": scheme, "split": True})
    for tokens in ([], [""], ["_"], ["_a", "b", "_c"], ["_", "_", "a"], ["__a_b_", "__a_b_"], ["", "_a"]):
        assert ours(tokens) == rust.decode(tokens)


# ------------------------------------------------------------------------------------------------------------- patterns

BUNDLED = ['▁?[.,!?;:"()]', r"\s+"]
ATOM = (
    st.sampled_from([*"ab ▁é#<>'\"&-~/@=:;,!%`_\n", r"\s"])
    | st.sampled_from(string.punctuation).map(lambda char: "\\" + char)
    | st.tuples(st.sampled_from(["[", "[^"]), st.text("ab ▁é#<>'\".?*+(){}$|!", min_size=1, max_size=4))
    .map("".join)
    .map(lambda text: text + "]")
    | st.sampled_from(
        [
            "[a-z]",
            "[^0-9a]",
            "[A-Z▁]",
            r"[\]\[]",
            r"[\^\-\&]",
            r"[^\\]",
            "[-a]",
            "[a-]",
            "[^^]",
            "[[a]",
            "[z-a]",
            "[]a]",
            "[&&]",
        ]
    )
)
PATTERNS = st.lists(
    st.tuples(ATOM, st.sampled_from(["", "?", "*", "+", "", ""])).map("".join), min_size=1, max_size=4
).map("".join)


def cut(pattern: str) -> Any:
    return pre_tokenizer({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})


@settings(deadline=None, max_examples=300)
@given(
    pattern=PATTERNS | st.sampled_from(BUNDLED), texts=st.lists(st.text("ab ▁é.,-#<>'\"&~\\]^[\n?0Z\x1c"), min_size=5)
)
def test_a_pattern_is_refused_or_cuts_as_in_rust(pattern: str, texts: list[str]) -> None:
    try:
        ours = cut(pattern)
    except InputError:
        assert pattern not in BUNDLED
        return
    rust = pre_tokenizers.Split(Regex(pattern), "isolated")
    for text in [*texts, string.printable, "ab▁. é"]:
        assert ours(text) == rust_words(rust, text), (pattern, text)


@pytest.mark.parametrize(
    "pattern", [*BUNDLED, *(f"\\{char}" for char in '.[]()*+?^$|\\{}-&~#/"'), "a+b?[^c]", "[a-z]+"]
)
def test_patterns_that_are_taken(pattern: str) -> None:
    rust = pre_tokenizers.Split(Regex(pattern), "isolated")
    for text in (string.printable, string.printable * 2, "", " ", "▁.a▁?", "aabb"):
        assert cut(pattern)(text) == rust_words(rust, text)


@pytest.mark.parametrize(
    "pattern",
    ["", "a*", "a?b?", "(a)", "a|b", ".", "^a", "a$", r"\w", r"\d+", r"\p{L}", r"\bA", "a++", "a+?", "a{2,}", "(?i)a",
     "[[:alpha:]]", "[a&&b]", r"[\s]", "[z-a]", "[]a]", "[a-]", r"\`", r"\'", r"\<", "a\\", None, 5],
)  # fmt: skip
def test_patterns_that_mean_something_else_or_might(pattern: Any) -> None:
    with pytest.raises(InputError, match="pattern"):
        cut(pattern)


@settings(deadline=None)
@given(
    pattern=st.text(string.punctuation + "a ▁\n", min_size=1, max_size=3), text=st.text(string.punctuation + "a ▁\n")
)
def test_plain_strings_are_taken_literally(pattern: str, text: str) -> None:
    ours = pre_tokenizer({"type": "Split", "pattern": {"String": pattern}, "behavior": "Isolated", "invert": False})
    replace = normalizer({"type": "Replace", "pattern": {"String": pattern}, "content": r"\1x"})
    for sample in (text, f"a{pattern}{text}{pattern}"):
        assert ours(sample) == rust_words(pre_tokenizers.Split(pattern, "isolated"), sample)
        assert replace(sample) == normalizers.Replace(pattern, r"\1x").normalize_str(sample)


# --------------------------------------------------------------------------------------------------------- other parts


def test_parts_that_are_not_there() -> None:
    assert normalizer(None)(" ﬁ ") == " ﬁ "
    assert pre_tokenizer(None)("a b") == ["a b"] and pre_tokenizer(None)("") == []
    assert template(None) == ([], [])


def test_sequences_within_sequences() -> None:
    strip = {"type": "Strip", "strip_left": True, "strip_right": False}
    inner = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, strip]}
    assert normalizer({"type": "Sequence", "normalizers": [inner, {"type": "NFD"}]})("\u3000é ") == "e\u0301 "
    assert normalizer({"type": "Sequence", "normalizers": []})(" a") == " a"


@pytest.mark.parametrize(
    ("function", "step"),
    [
        (normalizer, {"type": "Lowercase"}),
        (normalizer, {"type": "Sequence"}),
        (normalizer, {"type": "Sequence", "pretokenizers": []}),
        (normalizer, {"type": "Strip"}),
        (normalizer, "NFKC"),
        (normalizer, []),
        (pre_tokenizer, {"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": False}),
        (pre_tokenizer, {"type": "Split", "pattern": {"String": "a"}, "behavior": "Isolated", "invert": True}),
        (pre_tokenizer, {"type": "Metaspace", "replacement": "__", "prepend_scheme": "always", "split": True}),
        (pre_tokenizer, {"type": "Digits"}),
        (template, {"type": "TemplateProcessing"}),
        (template, {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x"}}], "special_tokens": {}}),
        (template, {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B"}}], "special_tokens": {}}),
        (template, {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}] * 2, "special_tokens": {}}),
        (decoder, None),
        (decoder, {"type": "Metaspace", "replacement": "", "prepend_scheme": "always"}),
        (decoder, {"type": "Sequence", "decoders": []}),
    ],
)
def test_what_is_not_supported_is_refused(function: Any, step: Any) -> None:
    with pytest.raises(InputError, match="is not supported here"):
        function(step)
