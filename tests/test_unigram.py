"""The Unigram tokenizer in plain Python gives what the Rust one gives, on the bundled file and on any vocabulary."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ids import shown
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from t5accel import unigram
from t5accel.checkpoints import data_folder
from t5accel.errors import InputError
from t5accel.tasks import NAMES, references, rows, source_text
from t5accel.unigram import UnigramTokenizer, viterbi

FOLDER = data_folder() / "mini-t5"
Pair = tuple[Tokenizer, UnigramTokenizer]

AWKWARD = [
    "", " ", "   ", "\t\n", "\x00", "\x1c \x1f", "\x85", "\u1680 \u2028", "\u00a0", "\u200b", "\ufeffa\u200d", "▁",
    "▁▁ ▁a▁", "e\u0301", "\u0301", " \u0301a", "a\u0327\u0301", "ﬁ ½ ① ㎏ \u0345", "\u1100\u1161\u11a8", "日本語",
    "👩\u200d👩\u200d👧 🇫🇷", "日 本1語", "é日è本", "</s>", "a</s>b", " </s> ", "</s></s><pad><unk>", "< /s>", "＜/s＞",
    "<</s>>", "</s", "日<unk>本", "<UNK>", "12.5", "1 2", "a1b2", "٣٤", "Ⅷ²", "...", "▁.", "!?", "«a»", "Il a 12 ans !",
    "\U00010f85\u0301\U000116d0",
]  # fmt: skip


def same(pair: Pair, text: str) -> None:
    """Ids, pieces and decoded texts are equal."""
    rust, ours = pair
    expected = rust.encode(text)
    assert ours.encode(text) == expected.ids, text
    bare = rust.encode(text, add_special_tokens=False)
    assert ours.encode(text, add_special_tokens=False) == bare.ids and ours.tokenize(text) == bare.tokens, text
    for skip in (True, False):
        decoded = rust.decode(expected.ids, skip_special_tokens=skip)
        assert ours.decode(expected.ids, skip_special_tokens=skip) == decoded, text


def both(specification: dict[str, Any] | str, folder: Path) -> Pair:
    """The Rust tokenizer and ours of one file."""
    text = specification if isinstance(specification, str) else json.dumps(specification)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return Tokenizer.from_str(text), UnigramTokenizer.from_file(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def bundled() -> Pair:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json")), UnigramTokenizer.from_file(FOLDER)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """All sources and references of the evaluation sets."""
    pairs = [(name, row) for name in NAMES for row in rows(name)]
    return [text for name, row in pairs for text in (source_text(name, row), *references(name, row))]


# ------------------------------------------------------------------------------------------------ the bundled tokenizer


def test_evaluation_sets(bundled: Pair, texts: list[str]) -> None:
    rust, ours = bundled
    assert len(texts) > 1400
    for text in texts[::5]:
        same(bundled, text)
    expected = [encoding.ids for encoding in rust.encode_batch(texts)]
    assert ours.encode_batch(texts) == expected == ours.encode_batch(iter(texts))
    bare = [encoding.ids for encoding in rust.encode_batch(texts, add_special_tokens=False)]
    assert ours.encode_batch(texts, add_special_tokens=False) == bare
    assert ours.encode_batch([]) == []


def test_the_model_sees_the_same_ids(mini, bundled: Pair, texts: list[str]) -> None:
    assert bundled[1].encode_batch(texts[::20]) == mini[1](texts[::20])["input_ids"]


@pytest.mark.parametrize("text", AWKWARD, ids=ascii)
def test_awkward_texts(bundled: Pair, text: str) -> None:
    for around in (text, f"{text}a", f"a{text}", f"a {text} 1{text}"):
        same(bundled, around)


@settings(deadline=None)
@given(text=st.text())
def test_any_text(bundled: Pair, text: str) -> None:
    same(bundled, text)


MARKS = st.characters(categories=["Mn", "Mc", "Lm", "No", "Sk", "Zs", "Cc", "Cf"])


@settings(deadline=None)
@given(text=st.text(MARKS | st.sampled_from("aé1. ") | st.characters(max_codepoint=0x2FF)))
def test_text_of_marks_and_letters(bundled: Pair, text: str) -> None:
    same(bundled, text)


@settings(deadline=None)
@given(data=st.data())
def test_text_of_pieces_and_special_tokens(bundled: Pair, data: st.DataObject) -> None:
    pieces = sorted(bundled[0].get_vocab())
    part = st.sampled_from(pieces) | st.sampled_from(AWKWARD) | st.sampled_from(["</s>", "<pad>", "<unk>", " "])
    same(bundled, "".join(data.draw(st.lists(part, max_size=8))))


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 40) | st.integers(0, 7000)), skip=st.booleans())
@example(ids=[0, 3, 1, 2**32 - 1], skip=True)
def test_any_ids(bundled: Pair, ids: list[int], skip: bool) -> None:
    rust, ours = bundled
    assert ours.decode(ids, skip_special_tokens=skip) == rust.decode(ids, skip_special_tokens=skip)
    assert ours.decode(np.array(ids, dtype=np.int64), skip_special_tokens=skip) == ours.decode(
        torch.tensor(ids, dtype=torch.int64), skip_special_tokens=skip
    )


def test_spaces_and_numbers_survive(bundled: Pair) -> None:
    ours = bundled[1]
    assert ours.decode(ours.encode(" Il  a 12 ans !\n")) == "Il a 12 ans !"
    assert ours.decode(ours.encode("a</s>b"), skip_special_tokens=False) == "a</s> b</s>"


# ----------------------------------------------------------------------------------------------------- other tokenizers

METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def specification(vocab: list[Any], *, unk_id: int = 0, added: list[Any] | None = None, **parts: Any) -> dict[str, Any]:
    """The content of a small ``tokenizer.json``."""
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added or [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": METASPACE,
        "model": {"type": "Unigram", "unk_id": unk_id, "vocab": vocab, "byte_fallback": False}, **parts,
    }  # fmt: skip


PIECES = st.text("ab▁ c", min_size=1, max_size=4)
NUMBERS = (
    st.sampled_from(["-1", "-2", "-3", "-0.1", "-0.2", "-0.3", "0", "-0.30000000000000004", "-1e-1", "2.5"])  # ties
    | st.floats(-20, 5).map(repr)
    | st.builds(
        lambda digits, places: f"{Decimal(digits).scaleb(-places):f}",
        st.integers(-(10**26), 10**26),
        st.integers(13, 26),
    )
)


@settings(deadline=None, max_examples=300)
@given(data=st.data(), vocab=st.lists(st.tuples(PIECES, NUMBERS), min_size=1, max_size=12))
def test_any_vocabulary_and_scores(folder: Path, data: st.DataObject, vocab: list[tuple[str, str]]) -> None:
    """Ties, near ties, numbers that Rust rounds twice, twins, unknown characters, and an unknown piece in the text."""
    unk_id = data.draw(st.integers(0, len(vocab) - 1))
    entries = ", ".join(f"[{json.dumps(piece)}, {number}]" for piece, number in vocab)
    text = json.dumps(
        specification(["HERE"], unk_id=unk_id, pre_tokenizer=data.draw(st.sampled_from([None, METASPACE])))
    )
    pair = both(text.replace('"HERE"', entries), folder)
    for text in data.draw(st.lists(st.text("abcd▁ ", max_size=12), min_size=5)):
        same(pair, text)


@settings(deadline=None)
@given(number=NUMBERS | st.floats(-1e15, 1e15).map(repr) | st.integers(-(10**15), 10**15).map(str))
@example("-15.9773618875875497619776735")
@example("1e-320")
@example("-0.0")
def test_scores_are_read_as_in_rust(number: str) -> None:
    text = json.dumps(specification(["HERE"])).replace('"HERE"', f'["a", {number}]')
    (expected,) = json.loads(Tokenizer.from_str(text).to_str())["model"]["vocab"]
    read = json.loads(number, parse_float=unigram._rust_float)
    assert (expected == ["a", read]) or number == "-0.0"


CONTENTS = st.sampled_from(["<x>", "<xx>", "x", "a", "ab", " ", " a", "a ", "\u00a0", "<x", "é", "▁"])


@settings(deadline=None, max_examples=300)
@given(
    contents=st.lists(CONTENTS, max_size=4, unique=True),
    flags=st.lists(st.tuples(*[st.booleans()] * 4), min_size=4, max_size=4),
    texts=st.lists(st.lists(CONTENTS | st.sampled_from("abc \t\x1c"), max_size=10).map("".join), min_size=5),
)
def test_added_tokens(folder: Path, contents: list[str], flags: list[tuple[bool, ...]], texts: list[str]) -> None:
    """In the vocabulary or behind it; with every combination of the flags that the file may hold."""
    vocab = [["<unk>", 0.0], ["a", -1.0], ["b", -1.0], ["▁", -1.0], ["▁a", -1.5], ["x", -2.0]]
    added, new_id = [], len(vocab)
    for content, (lstrip, rstrip, normalized, special) in zip(contents, flags, strict=False):
        known = [number for number, (piece, _) in enumerate(vocab) if piece == content]
        added.append({"id": known[0] if known else new_id, "content": content, "single_word": False, "lstrip": lstrip,
                      "rstrip": rstrip, "normalized": normalized, "special": special})  # fmt: skip
        new_id += not known
    pair = both(specification(vocab, added=added, pre_tokenizer=METASPACE), folder)
    for text in texts:
        try:
            pair[0].encode(text)
        except BaseException as error:  # a token of white space that strips what the one before it has stripped
            assert type(error).__name__ == "PanicException"
        else:
            same(pair, text)
    ids = [*range(len(vocab) + len(added)), 0, 1]
    assert pair[1].decode(ids) == pair[0].decode(ids)


def bare(tokenizer: Tokenizer) -> None:
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")


def as_t5(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()


def framed_on_both_sides(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(left=False), normalizers.NFD()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Metaspace(replacement="_", prepend_scheme="never"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(replacement="_", prepend_scheme="first")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> <pad> $A </s>", special_tokens=[("</s>", 1), ("<pad>", 0)]
    )


def cut_at_plain_strings(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("''", '"'), normalizers.Strip(right=False)])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("an", "isolated"), pre_tokenizers.Split(Regex(r"[aeiou]+[^a-m ]"), "isolated")]
    )
    tokenizer.decoder = decoders.Metaspace()


@pytest.fixture(scope="module", params=[bare, as_t5, framed_on_both_sides, cut_at_plain_strings])
def trained(request: pytest.FixtureRequest, folder: Path, texts: list[str]) -> Pair:
    tokenizer = Tokenizer(models.Unigram())
    request.param(tokenizer)
    trainer = trainers.UnigramTrainer(
        vocab_size=250, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([text[:60] for text in texts[::5]], trainer)
    return both(tokenizer.to_str(), folder)


def test_trained_tokenizers(trained: Pair, texts: list[str]) -> None:
    for text in [*texts[::10], *AWKWARD, *(f"a{text} 1{text}b" for text in AWKWARD)]:
        same(trained, text)


@settings(deadline=None, max_examples=50)
@given(text=st.text() | st.text("aenio'12 _▁.\u00e9\u0301日"))
def test_any_text_on_trained_tokenizers(trained: Pair, text: str) -> None:
    same(trained, text)


# --------------------------------------------------------------------------------------------------- the check can fail


def greedy(word: str, scores: dict[str, float], unknown_score: float, longest: int) -> list[str]:
    """The longest piece first: simple, and not Unigram."""
    pieces = []
    while word:
        ends = [end for end in range(min(longest, len(word)), 1, -1) if word[:end] in scores]
        pieces.append(word[: ends[0] if ends else 1])
        word = word[len(pieces[-1]) :]
    return pieces


def from_the_right(word: str, scores: dict[str, float], unknown_score: float, longest: int) -> list[str]:
    """As good a cut, and another one at a tie."""
    mirrored = {piece[::-1]: score for piece, score in scores.items()}
    return [piece[::-1] for piece in reversed(viterbi(word[::-1], mirrored, unknown_score, longest))]


def test_greedy_is_found_out(bundled: Pair, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unigram, "viterbi", greedy)
    with pytest.raises(AssertionError):
        for text in texts:
            same(bundled, text)


def test_another_order_at_ties_is_found_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = both(specification([["<unk>", 0.0], ["a", -1.0], ["aa", -1.0]]), folder)
    same(pair, "aaa")
    assert pair[1].tokenize("aaa") == ["a", "aa"]
    monkeypatch.setattr(unigram, "viterbi", from_the_right)
    assert pair[1].tokenize("aaa") == ["aa", "a"]
    with pytest.raises(AssertionError):
        same(pair, "aaa")


def test_scores_that_are_rounded_once_are_found_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rust reads both numbers as the same one: a tie, and the longer piece stays."""
    content = specification([["<unk>", 0.0], ["a", 0.0], ["b", -11.415630511980464], ["ab", -11.415630511980465]])
    pair = both(content, folder)
    same(pair, "ab")
    assert pair[1].tokenize("ab") == ["ab"]
    monkeypatch.setattr(unigram, "_rust_float", float)
    pair = both(content, folder)
    assert pair[1].tokenize("ab") == ["a", "b"]
    with pytest.raises(AssertionError):
        same(pair, "ab")


def test_unknown_neighbours_are_one_piece(folder: Path) -> None:
    pair = both(specification([["<unk>", 0.0], ["a", -1.0], ["xy", 30.0]], pre_tokenizer=METASPACE), folder)
    same(pair, "日本a語")
    assert pair[1].tokenize("日本a語") == ["▁日本", "a", "語"] and pair[1].encode("日本a語") == [0, 1, 0]


@pytest.mark.parametrize(("score", "pieces"), [(9.5, ["xa"]), (10.5, ["x", "a"])])
def test_an_unknown_character_costs_ten_more_than_the_worst_piece(
    folder: Path, score: float, pieces: list[str]
) -> None:
    pair = both(specification([["<unk>", 0.0], ["xa", -20.0], ["a", score]]), folder)
    same(pair, "xa")
    assert pair[1].tokenize("xa") == pieces


def test_a_joined_piece_may_be_in_the_vocabulary(folder: Path) -> None:
    """With scores that are no log probabilities two unknown characters can beat the piece that they make."""
    pair = both(specification([["<unk>", 30.0], ["a", 30.0], ["xy", 35.0]]), folder)
    same(pair, "xy")
    assert pair[1].encode("xy") == [2]
    assert viterbi("xy", {"<unk>": 30.0, "a": 30.0, "xy": 35.0}, 20.0, 5) == ["x", "y"]


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("text", [None, 5, b"Yes.", ["Yes."], object()], ids=shown)
def test_no_text(bundled: Pair, text: Any) -> None:
    for function in (bundled[1].encode, bundled[1].tokenize):
        with pytest.raises(InputError, match="is no text"):
            function(text)
    with pytest.raises(InputError, match="is no text"):
        bundled[1].encode_batch(["Yes.", text])


@pytest.mark.parametrize("texts", ["Yes.", None, 5], ids=repr)
def test_no_texts(bundled: Pair, texts: Any) -> None:
    with pytest.raises(InputError, match="give a list of texts"):
        bundled[1].encode_batch(texts)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", b"\xff".decode("utf-8", "surrogateescape")], ids=ascii)
def test_half_of_a_surrogate_pair(bundled: Pair, text: str) -> None:
    for function in (bundled[1].encode, bundled[1].tokenize):
        with pytest.raises(InputError, match="surrogate"):
            function(text)


@pytest.mark.parametrize("ids", [5, None, [0.5], ["a"], "ab", [[1, 2]], np.array([1.0])], ids=repr)
def test_no_ids(bundled: Pair, ids: Any) -> None:
    with pytest.raises(InputError, match="sequence of integers"):
        bundled[1].decode(ids)


def test_negative_ids(bundled: Pair) -> None:
    with pytest.raises(InputError, match="-100"):
        bundled[1].decode([3, -100])


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path / "nowhere")):
        with pytest.raises(InputError, match="does not exist"):
            UnigramTokenizer.from_file(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff{}", b"[]", b"5", b"{}", b'{"model": null}', b'{"model": []}'])
def test_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        UnigramTokenizer.from_file(tmp_path)


GOOD = [["<unk>", 0.0], ["a", -1.0]]
TOKEN = {"id": 2, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}  # fmt: skip


def model(**changes: Any) -> dict[str, Any]:
    return {"type": "Unigram", "unk_id": 0, "vocab": GOOD, "byte_fallback": False} | changes


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": model(type="BPE")}, "is a BPE"),
        ({"model": model(byte_fallback=True)}, "byte_fallback"),
        ({"model": model(unk_id=None)}, "unk_id"),
        ({"model": model(unk_id=2)}, "unk_id"),
        ({"model": model(vocab=[])}, "unk_id"),
        ({"model": model(vocab=[["a"]])}, "holds"),
        ({"model": model(vocab=[["a", None]])}, "holds"),
        ({"model": model(vocab=[["a", float("nan")]])}, "nan"),
        ({"model": model(vocab=[["a", float("-inf")]])}, "inf"),
        ({"truncation": {"max_length": 8}}, "truncation"),
        ({"padding": {"strategy": "BatchLongest"}}, "padding"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "tAIAAA"}}, "Precompiled"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}}, "Lowercase"),
        ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, "WhitespaceSplit"),
        ({"pre_tokenizer": METASPACE | {"prepend_scheme": "first"}}, "first"),
        ({"pre_tokenizer": METASPACE | {"split": False}}, "Metaspace"),
        ({"pre_tokenizer": METASPACE | {"add_prefix_space": True}}, "add_prefix_space"),
        ({"post_processor": {"type": "ByteLevel"}}, "ByteLevel"),
        ({"post_processor": {"type": "TemplateProcessing", "single": [], "special_tokens": {}}}, "TemplateProcessing"),
        ({"decoder": None}, "decoder None"),
        ({"decoder": {"type": "ByteFallback"}}, "ByteFallback"),
        ({"added_tokens": [TOKEN | {"single_word": True}]}, "<x>"),
        ({"added_tokens": [TOKEN | {"content": ""}]}, "added token"),
        ({"added_tokens": [TOKEN, TOKEN | {"id": 3}]}, "<x>"),
        ({"added_tokens": [TOKEN | {"id": 3}]}, "not its place"),
        ({"added_tokens": [TOKEN | {"content": "a"}]}, "not its place"),
        ({"added_tokens": None}, "added token"),
        (
            {"normalizer": {"type": "NFKC"}, "added_tokens": [TOKEN | {"content": "ﬁ", "normalized": True}]},
            "the normalizer changes",
        ),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, parts: dict[str, Any], message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(specification(GOOD) | parts), encoding="utf-8")
    with pytest.raises(InputError, match=message) as error:
        UnigramTokenizer.from_file(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_long_part_is_named_briefly() -> None:
    long = {"type": "Precompiled", "precompiled_charsmap": "A" * 300_000}
    with pytest.raises(InputError, match="Precompiled") as error:
        UnigramTokenizer(specification(GOOD, normalizer=long))
    assert len(str(error.value)) < 400


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


def test_a_file_with_any_wrong_part_is_refused_or_read_as_rust_reads_it(folder: Path) -> None:
    """Every part of the bundled file in turn is something else; what Rust does not load either proves nothing."""
    text = (FOLDER / "tokenizer.json").read_text(encoding="utf-8")
    whole = json.loads(text)
    whole["model"]["vocab"] = whole["model"]["vocab"][:40]
    refused = loaded = 0
    for path in places(whole)[1:]:
        for junk in (None, 5, "x", True, False, [], {}, {"type": "Lowercase"}):
            changed = json.loads(json.dumps(whole))
            target = changed
            for key in path[:-1]:
                target = target[key]
            target[path[-1]] = junk
            try:
                ours = UnigramTokenizer(changed)
            except InputError:
                refused += 1
                continue
            try:
                rust = Tokenizer.from_str(json.dumps(changed))
            except Exception:
                continue
            loaded += 1
            for sample in ("Il a 12 ans !", " a</s>b ", "e\u0301 日本"):
                same((rust, ours), sample)
    assert refused > 500 and loaded > 100
