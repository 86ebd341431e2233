"""The Unigram tokenizer in plain Python gives what the Rust one gives: on the bundled file, on one with the steps of
published T5s, and on any vocabulary."""

import base64
import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ids import shown
from refused import refused
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bench.baselines import unigram
from bench.baselines.unigram import SPACES, UnigramTokenizer
from bench.evaluation import NAMES, references, rows, source_text
from t5accel.errors import InputError
from t5accel.models.load import data_folder

FOLDER = data_folder() / "mini-t5"
Pair = tuple[Tokenizer, UnigramTokenizer]

AWKWARD = [
    "", " ", "   ", "\t\n", "\r\n", "\x00", "\x1c \x1f", "\x85", "\u1680 \u2028", "\u00a0", "\u200b", "\ufeffa\u200d",
    "▁", "▁▁ ▁a▁", "e\u0301", "\u0301", " \u0301a", "\n\u0301", "e\u0323\u0302", "ﬁ\u0301", "ﬁ ½ ① ㎏ \u0345", "日本語",
    "\u1100\u1161\u11a8", "👩\u200d👩\u200d👧 🇫🇷", "日 本1語", "é日è本", "</s>", "a</s>b", " </s> ", "</s></s><pad>",
    "< /s>", "＜/s＞", "<</s>>", "</s", "日<unk>本", "<UNK>", "12.5", "1 2", "a1b2", "٣٤", "Ⅷ²", "...", "▁.", "!?",
    "Il a 12 ans !", " <extra_id_0>\t<extra_id_1> .", "a <extra_id_0>b", "<extra_id_0",
]  # fmt: skip


def is_supported(char: str) -> bool:
    """Whether a character was there in 2002, as Python can tell, and is no other exception of the docstring."""
    exception = "\u1000" <= char < "\u10a0" or char > "\U000dffff"  # Burmese, tag characters
    return unicodedata.ucd_3_2_0.category(char) not in ("Cn", "Co", "Cs") and not exception


MARKS = st.characters(categories=["Mn", "Me", "Lm", "No", "Sk", "Zs", "Cc", "Cf"], max_codepoint=0x36F)
SOME = MARKS | st.sampled_from("aé1. ") | st.characters(max_codepoint=0x233)
TEXTS = st.text(st.characters().filter(is_supported)) | st.text(SOME)


def same(pair: Pair, text: str) -> None:
    """Ids, pieces and decoded texts are equal."""
    rust, ours = pair
    expected = rust.encode(text)
    assert ours.encode(text) == expected.ids, ascii(text)
    bare = rust.encode(text, add_special_tokens=False)
    assert ours.encode(text, add_special_tokens=False) == bare.ids and ours.tokenize(text) == bare.tokens, ascii(text)
    for skip in (True, False):
        decoded = rust.decode(expected.ids, skip_special_tokens=skip)
        assert ours.decode(expected.ids, skip_special_tokens=skip) == decoded, ascii(text)


def both(specification: dict[str, Any] | str, folder: Path) -> Pair:
    """The Rust tokenizer and ours of one file."""
    text = specification if isinstance(specification, str) else json.dumps(specification)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return Tokenizer.from_str(text), UnigramTokenizer.from_file(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """All sources and references of the evaluation sets."""
    pairs = [(name, row) for name in NAMES for row in rows(name)]
    return [text for name, row in pairs for text in (source_text(name, row), *references(name, row))]


@pytest.fixture(scope="module")
def bundled() -> Pair:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json")), UnigramTokenizer.from_file(FOLDER)


@pytest.fixture(scope="module")
def characters() -> bytes:
    """SentencePiece's table of characters, nmt_nfkc, as published T5s have it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    proto = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    model = sentencepiece.SentencePieceNormalizer(rule_name="nmt_nfkc").serialized_model_proto()
    return proto.ModelProto.FromString(model).normalizer_spec.precompiled_charsmap


def as_in_its_file(table: bytes) -> tuple[Any, Any]:
    """T5's steps as transformers 5 makes them, and nearly all published files have them."""
    words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    return normalizers.Precompiled(table), pre_tokenizers.Sequence(words)


def as_converted(table: bytes) -> tuple[Any, Any]:
    """T5's steps as transformers 4.57 makes them from SentencePiece's file."""
    tidy = [normalizers.Strip(left=False), normalizers.Replace(Regex(" {2,}"), "▁")]
    return normalizers.Sequence([normalizers.Precompiled(table), *tidy]), pre_tokenizers.Metaspace()


@pytest.fixture(scope="module", params=["bundled", as_in_its_file, as_converted])
def pair(request: pytest.FixtureRequest, folder: Path, bundled: Pair, characters: bytes, texts: list[str]) -> Pair:
    if request.param == "bundled":
        return bundled
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = request.param(characters)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    trainer = trainers.UnigramTrainer(
        vocab_size=250, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([text[:60] for text in texts[::5]], trainer)
    mask = {"lstrip": True, "rstrip": True, "normalized": False}
    tokenizer.add_special_tokens([AddedToken(f"<extra_id_{i}>", **mask) for i in range(2)])
    return both(tokenizer.to_str(), folder)


def test_evaluation_sets_and_awkward_texts(pair: Pair, texts: list[str]) -> None:
    rust, ours = pair
    assert len(texts) > 1400
    for text in texts[::15]:
        same(pair, text)
    some = texts[::3]
    expected = [encoding.ids for encoding in rust.encode_batch(some)]
    assert ours.encode_batch(some) == expected == ours.encode_batch(iter(some))
    assert ours.encode_batch([]) == []
    for text in AWKWARD:
        for around in (text, f"{text}a", f"a{text}", f"a {text} 1{text}"):
            same(pair, around)


def test_the_model_sees_the_same_ids(mini, bundled: Pair, texts: list[str]) -> None:
    assert bundled[1].encode_batch(texts[::20]) == mini[1](texts[::20])["input_ids"]


@settings(deadline=None, max_examples=60)
@given(text=TEXTS)
def test_any_text(pair: Pair, text: str) -> None:
    same(pair, text)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_text_of_pieces_and_special_tokens(pair: Pair, data: st.DataObject) -> None:
    pieces = sorted(pair[0].get_vocab())
    part = st.sampled_from(pieces) | st.sampled_from(AWKWARD) | st.sampled_from(["</s>", "<pad>", "<unk>", " "])
    same(pair, "".join(data.draw(st.lists(part, max_size=8))))


@settings(deadline=None, max_examples=40)
@given(ids=st.lists(st.integers(0, 40) | st.integers(0, 7000)), skip=st.booleans())
@example(ids=[0, 3, 1, 2**32 - 1], skip=True)
def test_any_ids(bundled: Pair, ids: list[int], skip: bool) -> None:
    rust, ours = bundled
    expected = rust.decode(ids, skip_special_tokens=skip)
    for given_as in (ids, np.array(ids, dtype=np.int64), torch.tensor(ids, dtype=torch.int64)):
        assert ours.decode(given_as, skip_special_tokens=skip) == expected


def test_every_old_character(characters: bytes) -> None:
    """Alone, and between combining marks, whose order depends on each other."""
    table = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(characters).decode()}
    steps = [
        (normalizers.NFKC(), unigram._normalizer({"type": "NFKC"})),
        (normalizers.Precompiled(characters), unigram._normalizer(table)),
        (normalizers.Replace(Regex(r"\s+"), "_"), unigram._normalizer(
            {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": "_"})),
    ]  # fmt: skip
    digits, split = pre_tokenizers.Digits(individual_digits=True), {"type": "Digits", "individual_digits": True}
    for char in filter(is_supported, map(chr, range(0x30000))):
        if "\u33ff" < char < "\ud7a4" and ord(char) % 9:
            continue  # ideographs and syllables, which are many and alike
        for rust, ours in steps:
            for text in (char, f"a\u0301{char}\u0334"):
                assert ours(text) == rust.normalize_str(text), ascii(text)
        words = [word for word, _ in digits.pre_tokenize_str(f"a{char}{char}b")]
        assert unigram._splitter(split)(f"a{char}{char}b") == words, ascii(char)
        assert (char in SPACES) == (normalizers.Strip().normalize_str(char) == ""), ascii(char)


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
OLDER = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}


def specification(vocab: list[Any], **parts: Any) -> dict[str, Any]:
    """The content of a small ``tokenizer.json``."""
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": METASPACE,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False}, **parts,
    }  # fmt: skip


TIES = st.sampled_from([-1, -2, -3, -0.1, -0.2, -0.3, 0, 2.5])
SCORES = TIES | st.integers(-(10**5), 500).map(lambda n: n / 1000)
PIECES = st.lists(st.tuples(st.text("ab▁ c", min_size=1, max_size=4), SCORES), min_size=1, max_size=12)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), vocab=PIECES)
def test_any_vocabulary_and_scores(folder: Path, data: st.DataObject, vocab: list[tuple[str, float]]) -> None:
    """Ties, twins, unknown characters, and an unknown piece in the text."""
    content = specification(vocab, pre_tokenizer=data.draw(st.sampled_from([None, METASPACE])))
    content["model"]["unk_id"] = data.draw(st.integers(0, len(vocab) - 1))
    pair = both(content, folder)
    for text in data.draw(st.lists(st.text("abcd▁ ", max_size=12), min_size=5)):
        same(pair, text)


@pytest.mark.parametrize(
    ("vocab", "parts", "text", "pieces"),
    [
        ([["a", -1.0], ["aa", -1.0]], {}, "aaa", ["a", "aa"]),  # of equal cuts that with the longer last piece
        # Unknown neighbours are one piece.
        ([["a", -1.0], ["xy", 30.0]], {"pre_tokenizer": METASPACE}, "日本a語", ["▁日本", "a", "語"]),
        # An unknown character costs ten more than the worst piece.
        ([["xa", -20.0], ["a", 9.5]], {}, "xa", ["xa"]),
        ([["xa", -20.0], ["a", 10.5]], {}, "xa", ["x", "a"]),
        ([["▁a", -1.0]], {"pre_tokenizer": OLDER, "decoder": OLDER}, "a  b a", ["▁a", "▁", "▁b", "▁a"]),
    ],
)
def test_small_vocabularies(folder: Path, vocab: list[Any], parts: dict[str, Any], text: str, pieces: Any) -> None:
    pair = both(specification([["<unk>", 0.0], *vocab], **parts), folder)
    same(pair, text)
    assert pair[1].tokenize(text) == pieces


def test_what_is_refused(bundled: Pair, tmp_path: Path) -> None:
    ours = bundled[1]
    for function in (ours.encode, ours.tokenize, lambda text: ours.encode_batch(["Yes.", text])):
        refused(function, "text", None, 5, b"Yes.", ["Yes."])
    refused(ours.encode_batch, "texts", "Yes.", None, 5)
    refused(ours.decode, "ids", 5, None, [0.5], ["a"], "ab", [[1, 2]], np.array([1.0]), [3, -100])
    places = (tmp_path, tmp_path / "tokenizer.json", str(tmp_path / "nowhere"))
    refused(UnigramTokenizer.from_file, "path", *places, match="does not exist")
    for content in (b"", b"\xff{}", b"[]", b'{"model": null}'):
        (tmp_path / "tokenizer.json").write_bytes(content)
        refused(UnigramTokenizer.from_file, "path", tmp_path, match=r"tokenizer\.json")


TOKEN = {"id": 2, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}  # fmt: skip
GOOD = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]], "byte_fallback": False}
SPLIT = {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": GOOD | {"type": "BPE"}}, "BPE"),
        ({"model": GOOD | {"byte_fallback": True}}, "byte_fallback"),
        ({"model": GOOD | {"unk_id": 2}}, r"tokenizer\.json"),
        ({"truncation": {"max_length": 8}}, "truncation"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}}, "NFC"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "a*"}, "content": ""}}, r"a\*"),
        ({"normalizer": {"type": "BertNormalizer", "long": "A" * 300_000}}, "BertNormalizer"),
        ({"pre_tokenizer": SPLIT | {"behavior": "Removed"}}, "Removed"),
        ({"pre_tokenizer": {"type": "Digits", "individual_digits": False}}, "Digits"),
        ({"post_processor": {"type": "TemplateProcessing", "single": [], "special_tokens": {}}}, "TemplateProcessing"),
        ({"decoder": None}, "decoder None"),
        ({"added_tokens": [TOKEN | {"single_word": True}]}, "<x>"),
        ({"added_tokens": [TOKEN | {"id": 1}]}, "not at its id"),
    ],
    ids=shown,
)
def test_what_is_not_supported_is_refused(tmp_path: Path, parts: dict[str, Any], message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(specification([]) | {"model": GOOD} | parts), encoding="utf-8")
    with pytest.raises(InputError, match=message) as error:
        UnigramTokenizer.from_file(tmp_path)
    assert str(tmp_path) in str(error.value) and len(str(error.value)) < 600
