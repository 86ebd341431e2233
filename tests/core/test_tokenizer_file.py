"""A tokenizer.json without transformers: its ids and its texts are those of transformers' own tokenizer."""

from __future__ import annotations

import json
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import panicking_tokenizer
from refused import refused
from test_encoder_cache import in_threads

from bench.results import DATA
from t5accel.errors import InputError, MissingPackageError, ModelUnavailableError
from t5accel.models.load import data_folder
from t5accel.tokenization import TokenizerFile, text_to_text

BUNDLED = data_folder() / "mini-t5"
TASKS = ("translation", "summaries", "questions")


@pytest.fixture(scope="module")
def ours() -> TokenizerFile:
    return TokenizerFile(BUNDLED)


@pytest.fixture(scope="module")
def theirs(mini) -> Any:
    return mini[1]


def eval_texts(name: str) -> list[str]:
    """Every text of an evaluation set: sources, references, questions, contexts, answers."""
    lines = (DATA / "eval" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    values = [value for line in lines for value in json.loads(line).values()]
    return [text for value in values for text in ([value] if isinstance(value, str) else value)]


def check(ours: TokenizerFile, theirs: Any, texts: list[str]) -> None:
    batch, expected = ours(texts), theirs(texts, return_tensors="np", padding=True)
    assert batch.keys() == {"input_ids", "attention_mask"}
    for name, array in batch.items():
        assert array.dtype == np.int64
        np.testing.assert_array_equal(array, expected[name])
    for skip in (False, True):
        decoded = ours.batch_decode(batch["input_ids"], skip_special_tokens=skip)
        assert decoded == theirs.batch_decode(expected["input_ids"], skip_special_tokens=skip)


# The same as transformers


@pytest.mark.parametrize("name", TASKS)
def test_every_text_of_the_evaluation_sets(ours, theirs, name: str) -> None:
    texts = eval_texts(name)
    assert len(texts) > 400 and len(set(map(len, texts))) > 50
    check(ours, theirs, texts)
    assert (ours(texts)["input_ids"].max(axis=1) > 1).all()


ODD = ["", " ", "\n\t", "</s>", "<pad>", "a</s>b", "<unk> x", "日本語 ☃ 𝔘", "Ａｂ½", "a" * 3000, "e\u0301 é",
       "\x00\u200b", " 's n't ,"]  # fmt: skip


@pytest.mark.parametrize("text", ODD)
def test_odd_texts(ours, theirs, text: str) -> None:
    check(ours, theirs, [text, "The house is small."])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=4))
def test_any_texts(ours, theirs, texts: list[str]) -> None:
    check(ours, theirs, texts)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 9000), max_size=8), min_size=1, max_size=4))
def test_any_ids(ours, theirs, rows: list[list[int]]) -> None:
    """Also those that the model never emits, and rows of different lengths."""
    for skip in (False, True):
        assert ours.batch_decode(rows, skip_special_tokens=skip) == theirs.batch_decode(rows, skip_special_tokens=skip)


def test_takes_numpy_torch_and_lists(ours) -> None:
    import torch

    rows = ours(["The house is small.", "No"])["input_ids"]
    expected = ours.batch_decode(rows, skip_special_tokens=True)
    for given_rows in (rows.tolist(), torch.as_tensor(rows), rows.astype(np.int32), list(rows)):
        assert ours.batch_decode(given_rows, skip_special_tokens=True) == expected == ["The house is small.", "No"]
    assert ours.batch_decode([]) == [] and ours.batch_decode([[]]) == [""]


def test_threads_share_it(ours) -> None:
    texts = eval_texts("translation")[:200]
    expected, begin = ours(texts), threading.Barrier(3)

    def work() -> None:
        begin.wait(timeout=30)
        for _ in range(5):
            np.testing.assert_array_equal(ours(texts)["input_ids"], expected["input_ids"])
            ours.batch_decode(expected["input_ids"])

    in_threads(work, work, work)


# What lies beside the file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled tokenizer, to be changed."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / name).write_bytes((BUNDLED / name).read_bytes())
    return tmp_path


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **entries}), encoding="utf-8")


def test_a_folder_or_the_file_itself(folder: Path) -> None:
    for path in (folder, str(folder), folder / "tokenizer.json", str(folder / "tokenizer.json")):
        assert TokenizerFile(path)(["No"])["input_ids"][0, -1] == 1
    (folder / "tokenizer.json").rename(folder / "other.json")
    assert TokenizerFile(folder / "other.json").pad_token_id == 0


def test_padding_and_cutting_saved_in_the_file_do_not_matter(folder: Path, ours) -> None:
    """As transformers leaves them there after a call with padding and truncation."""
    padding = {"strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
               "pad_token": "<pad>"}  # fmt: skip
    cutting = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    change(folder / "tokenizer.json", padding=padding, truncation=cutting)
    texts = ["The house is small.", "No"]
    np.testing.assert_array_equal(TokenizerFile(folder)(texts)["input_ids"], ours(texts)["input_ids"])


def test_special_tokens_of_texts_are_split_where_the_configuration_says_so(folder: Path) -> None:
    from transformers import AutoTokenizer

    whole = TokenizerFile(folder)(["<pad>a"])["input_ids"].tolist()
    change(folder / "tokenizer_config.json", split_special_tokens=True)
    split = TokenizerFile(folder)(["<pad>a"])["input_ids"].tolist()
    assert split == AutoTokenizer.from_pretrained(folder)(["<pad>a"])["input_ids"] and split != whole


def test_where_the_padding_token_is_read(folder: Path) -> None:
    config, special = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    change(config, pad_token="</s>")
    assert TokenizerFile(folder).pad_token_id == 1
    change(config, pad_token={"content": "<unk>"})
    assert TokenizerFile(folder).pad_token_id == 2
    assert TokenizerFile(folder, pad_token_id=7).pad_token_id == 7
    config.unlink()
    assert TokenizerFile(folder).pad_token_id == 0
    change(special, pad_token="</s>")
    assert TokenizerFile(folder).pad_token_id == 1
    special.unlink()
    assert TokenizerFile(folder).pad_token_id == 0  # T5's own
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text.replace('"<pad>"', '"<filler>"'), encoding="utf-8")
    with pytest.raises(InputError, match="pad_token_id"):
        TokenizerFile(folder)
    assert TokenizerFile(folder, pad_token_id=0).pad_token_id == 0
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 5,
               "pad_type_id": 0, "pad_token": "<filler>"}  # fmt: skip
    change(folder / "tokenizer.json", padding=padding)
    assert TokenizerFile(folder).pad_token_id == 5


def test_decoded_text_is_tidied_where_the_configuration_says_so(folder: Path) -> None:
    from transformers import AutoTokenizer

    texts = ["Well , it 's not ' here ' . I do n't know ? We 've , they 're ! I 'm"]
    loose = TokenizerFile(folder)
    ids = loose(texts)["input_ids"]
    change(folder / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    theirs = AutoTokenizer.from_pretrained(folder)
    tidied = TokenizerFile(folder).batch_decode(ids, skip_special_tokens=True)
    assert (
        tidied
        == theirs.batch_decode(ids, skip_special_tokens=True)
        != loose.batch_decode(ids, skip_special_tokens=True)
    )


def test_texts_of_bpe_are_not_tidied_as_in_transformers_5(tmp_path: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, models

    bpe = Tokenizer(models.BPE({"<pad>": 0, "a": 1, "?": 2}, []))  # without a decoder tokens are joined by spaces
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", clean_up_tokenization_spaces=True
    )
    theirs.save_pretrained(tmp_path)
    ours = TokenizerFile(tmp_path).batch_decode([[1, 2]])
    assert ours == ["a ?"]
    assert transformers.__version__ < "5" or ours == theirs.batch_decode([[1, 2]])
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    change(tmp_path / "tokenizer_config.json", **{forced: True})
    assert TokenizerFile(tmp_path).batch_decode([[1, 2]]) == ["a?"]


# Bad input


def test_what_is_refused(ours, tmp_path: Path) -> None:
    missing = (tmp_path, tmp_path / "tokenizer.json", tmp_path / "no" / "folder", "")
    refused(TokenizerFile, "path", *missing, match=r"There is no file .*save_pretrained", error=ModelUnavailableError)
    refused(TokenizerFile, "path", None, 5, b"folder", ["folder"])
    refused(partial(TokenizerFile, BUNDLED), "pad_token_id", -1, 1.0, "0", True, 10**6, 2**70)
    refused(ours, "texts", [], (), "one text", None, 5, [None], ["a", 5], [["a"]], [b"a"], {}, [("a", "b")])
    refused(ours, "texts", ["fine", "half \ud800"], match="surrogate")
    refused(partial(ours, ["text"]), "return_tensors", "pt", None)
    refused(partial(ours, ["text"]), "padding", False, "max_length", match="return_tensors")
    refused(ours.batch_decode, "ids", None, 5, "text", b"x", [5], [[-1]], [[2**32]], [[0.5]], [["a"]], [None],
            np.zeros((1, 2, 3), dtype=int), np.array(3))  # fmt: skip


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_damaged_file(folder: Path, name: str) -> None:
    damaged = [b"", b"no json", b"\xff\xfe", b"[1, 2]"]
    if name == "tokenizer.json":
        damaged += [b"{}", b'{"model": 5}', (BUNDLED / "tokenizer.json").read_bytes()[:5000]]
    else:
        (folder / "tokenizer_config.json").unlink()
    for content in damaged:
        (folder / name).write_bytes(content)
        with pytest.raises(ModelUnavailableError, match=name):
            TokenizerFile(folder)


class Fails:
    """A library whose every call raises."""

    def __init__(self, error: BaseException):
        self.error = error

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any, **__: Any) -> None:
            raise self.error

        return fail


def test_a_panic_of_the_library_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    panicking = panicking_tokenizer(tmp_path)
    assert panicking(["a a"])["attention_mask"].all()
    for call in (panicking, text_to_text(panicking, lambda ids, mask: ids)):
        with pytest.raises(InputError, match="The tokenizer fails on a text .PanicException: "):
            call(["a", "a\n a"])
    for error in (BaseException("bad split"), MemoryError(), RuntimeError("no"), RecursionError()):
        panicking.tokenizer = Fails(error)
        with pytest.raises(InputError, match=type(error).__name__):
            panicking(["a"])
        with pytest.raises(InputError, match=f"cannot decode.*{type(error).__name__}"):
            panicking.batch_decode([[2]])
        monkeypatch.setattr("tokenizers.Tokenizer", Fails(error))
        with pytest.raises(ModelUnavailableError, match="cannot be read as a tokenizer"):
            TokenizerFile(BUNDLED)
    for ends in (KeyboardInterrupt, SystemExit):
        panicking.tokenizer = Fails(ends())
        with pytest.raises(ends):
            panicking(["a"])


def test_without_the_library(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingPackageError, match="pip install tokenizers"):
        TokenizerFile(BUNDLED)
