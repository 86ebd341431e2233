"""The pipeline in a few lines: the answers of transformers' own, in the caller's order, whatever the batches are."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from refused import refused

from bench.tasks import rows, source_text
from t5accel.backends.hf_generate import AcceleratedT5
from t5accel.backends.torch_eager import TorchEager
from t5accel.models.prefixes import SUMMARIZE, TRANSLATE
from t5accel.tokenization import text2text

SHORT = dict(max_new_tokens=12, num_beams=1, do_sample=False)


@pytest.fixture(scope="module")
def sources() -> list[str]:
    """Two of each group of each task, so long and short ones, with their prefixes."""
    return [source_text(name, row) for name in ("summaries", "translation", "questions") for row in rows(name, limit=2)]


class Echo:
    """A model that answers with the source, and remembers what it was given."""

    device = torch.device("cpu")

    def __init__(self, result: Any = None):
        self.calls: list[dict[str, Any]] = []
        self.result = result

    def generate(self, **arguments: Any) -> Any:
        self.calls.append({**arguments, "gradient": torch.is_grad_enabled()})
        return arguments["input_ids"] if self.result is None else self.result(arguments["input_ids"])


# ------------------------------------------------------------------------------------------------- the bundled model


def test_batches_give_what_single_texts_give(mini, sources: list[str]) -> None:
    single = [text2text(*mini, source, **SHORT) for source in sources]
    assert len(set(single)) > len(single) // 2 and all(single)
    for batch_size in (3, 100):
        assert text2text(*mini, sources, batch_size=batch_size, **SHORT) == single
    assert text2text(*mini, sources[::-1], batch_size=3, **SHORT) == single[::-1]


def test_the_answers_of_generate(mini, sources: list[str]) -> None:
    model, tokenizer = mini
    batch = tokenizer(sources, return_tensors="pt", padding=True)
    options = dict(max_new_tokens=12, num_beams=3)
    expected = model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **options)
    answers = text2text(*mini, sources, batch_size=100, **options)
    assert answers == tokenizer.batch_decode(expected, skip_special_tokens=True)
    assert answers != text2text(*mini, sources, batch_size=100, max_new_tokens=4)


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) >= 5, reason="transformers 5.x dropped this pipeline")
@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_answers_of_the_pipeline_that_was_dropped(mini, sources: list[str], num_beams: int) -> None:
    model, tokenizer = copy.deepcopy(mini[0]), mini[1]
    old = transformers.pipeline("text2text-generation", model=model, tokenizer=tokenizer, device="cpu")
    options = dict(max_new_tokens=16, num_beams=num_beams)
    expected = [answer["generated_text"] for answer in old(list(sources), batch_size=4, **options)]
    assert text2text(*mini, sources, batch_size=4, **options) == expected
    (single,) = old(sources[0], **options)
    assert text2text(*mini, sources[0], **options) == single["generated_text"]


def test_only_the_prefix_that_is_given(mini) -> None:
    assert text2text(Echo(), mini[1], ["a", "a b"], prefix="b ") == ["b a", "b a b"]
    text = "Where is the station?"
    assert text2text(*mini, text, prefix=TRANSLATE, **SHORT) == text2text(*mini, TRANSLATE + text, **SHORT)
    model = copy.deepcopy(mini[0])
    model.config.prefix = SUMMARIZE
    model.config.task_specific_params = {"summarization": {"prefix": SUMMARIZE}}
    assert text2text(model, mini[1], text, **SHORT) == text2text(*mini, text, **SHORT)


NEWS = ["The library opens on Monday. It has new books. All people may come.", "Tom sold his old car in May."]


def test_a_task_brings_its_prefix_and_options(mini) -> None:
    model = copy.deepcopy(mini[0])
    model.config.task_specific_params = {
        "summarization": dict(prefix=SUMMARIZE, num_beams=2, max_length=14, min_length=3, early_stopping=True),
        "other": dict(max_length=6),
    }
    options = dict(num_beams=2, max_length=14, min_length=3, early_stopping=True)
    expected = text2text(*mini, NEWS, prefix=SUMMARIZE, **options)
    assert text2text(model, mini[1], NEWS, task="summarization") == expected != text2text(*mini, NEWS, **options)
    assert model.config.task_specific_params["summarization"]["prefix"] == SUMMARIZE
    # What is given counts more.
    given = text2text(model, mini[1], NEWS, task="summarization", prefix=TRANSLATE, num_beams=1, max_new_tokens=9)
    assert given == text2text(*mini, NEWS, prefix=TRANSLATE, num_beams=1, max_new_tokens=9, min_length=3)
    assert text2text(model, mini[1], NEWS, task="other") == text2text(*mini, NEWS, max_length=6)
    refused(partial(text2text, model, mini[1], "a"), "task", "summaries", "", match="summarization, other")
    refused(partial(text2text, *mini, "a"), "task", "summarization", match="names no tasks")


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) >= 5, reason="transformers 5.x dropped these pipelines")
def test_the_pipelines_of_an_accelerated_model_take_the_prefix_of_their_task(mini) -> None:
    tasks = {
        "summarization": dict(prefix=SUMMARIZE, num_beams=2, max_new_tokens=14, min_length=3, early_stopping=True),
        "translation_en_to_fr": dict(prefix=TRANSLATE, num_beams=1, max_new_tokens=20),
    }
    own, config = copy.deepcopy(mini[0]), copy.deepcopy(mini[0].config)
    own.config.task_specific_params = config.task_specific_params = tasks
    model = AcceleratedT5(TorchEager(mini[0]), config, mini[0].generation_config, mini[1])
    for task, key in (("summarization", "summary_text"), ("translation_en_to_fr", "translation_text")):
        expected = [one[key] for one in transformers.pipeline(task, copy.deepcopy(own), tokenizer=mini[1])(NEWS)]
        assert [one[key] for one in transformers.pipeline(task, model, tokenizer=mini[1])(NEWS)] == expected
        assert text2text(own, mini[1], NEWS, task=task) == expected


def test_more_than_ids_comes_back(mini) -> None:
    options = dict(**SHORT, return_dict_in_generate=True, output_scores=True)
    assert text2text(*mini, ["Yes."], **options) == text2text(*mini, ["Yes."], **SHORT)


# ------------------------------------------------------------------------------------------- what the model is given

TEXTS = ["a b c d e", "a", "a b c", "a b c d", "a b"]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 6])
def test_order_and_batches(mini, batch_size: int) -> None:
    model = Echo()
    assert text2text(model, mini[1], TEXTS, batch_size=batch_size) == TEXTS
    sizes = [call["input_ids"].shape[0] for call in model.calls]
    assert sum(sizes) == len(TEXTS) and max(sizes) <= batch_size and len(sizes) == -(-len(TEXTS) // batch_size)
    widths = [call["input_ids"].shape[1] for call in model.calls]
    assert widths == sorted(widths, reverse=True)  # the longest first: a lack of memory shows at once


def test_like_lengths_share_a_batch(mini) -> None:
    """Long and short texts in turn: sorted, they need much less padding than in the order that they came in."""
    texts = ["a " * length for length in (40, 1, 39, 2, 38, 3, 37, 4)]
    model = Echo()
    text2text(model, mini[1], texts, batch_size=2)
    padding = sum(int((call["attention_mask"] == 0).sum()) for call in model.calls)
    lengths = [len(ids) for ids in mini[1](texts)["input_ids"]]
    unsorted = sum(abs(a - b) for a, b in zip(lengths[::2], lengths[1::2], strict=True))
    assert padding * 10 < unsorted


def test_options_device_and_gradient(mini) -> None:
    model = Echo()
    text2text(model, mini[1], ["a b", "a"], num_beams=3, early_stopping=True)
    (call,) = model.calls
    assert call["num_beams"] == 3 and call["early_stopping"] is True and call["gradient"] is False
    assert set(call) == {"input_ids", "attention_mask", "num_beams", "early_stopping", "gradient"}
    for name in ("input_ids", "attention_mask"):
        assert call[name].dtype == torch.int64 and call[name].device == model.device
    assert call["attention_mask"].tolist() == (call["input_ids"] != mini[1].pad_token_id).long().tolist()
    assert torch.is_grad_enabled()


@pytest.mark.gpu
def test_a_model_on_the_gpu(mini, sources: list[str]) -> None:
    model = Echo()
    model.device = torch.device("cuda")
    assert text2text(model, mini[1], TEXTS) == TEXTS and model.calls[0]["input_ids"].is_cuda
    assert all(text2text(copy.deepcopy(mini[0]).to("cuda"), mini[1], sources, **SHORT))


@pytest.mark.parametrize("convert", [list, tuple, iter, np.array, lambda texts: (text for text in texts)])
def test_any_iterable_of_texts(mini, convert: Any) -> None:
    assert text2text(Echo(), mini[1], convert(TEXTS)) == TEXTS


def test_a_str_for_a_str(mini) -> None:
    assert text2text(Echo(), mini[1], "a b") == "a b"
    assert text2text(Echo(), mini[1], "") == "" and text2text(Echo(), mini[1], ["", "a"]) == ["", "a"]


# ------------------------------------------------------------------------------------------------------------ bad input


def test_what_is_refused(mini) -> None:
    def call(model: Any = Echo(), tokenizer: Any = mini[1], texts: Any = TEXTS, **options: Any) -> Any:  # noqa: B008
        return text2text(model, tokenizer, texts, **options)

    refused(call, "texts", [], (), iter([]), None, 5, b"Yes.", ["Yes.", None], [5], [["Yes."]], {}, match="Give a text")
    refused(call, "texts", "\ud800", ["Oui.", b"\xff".decode("utf-8", "surrogateescape")], match="surrogate")
    refused(call, "batch_size", 0, -1, None, 2.0, "8", True)
    refused(call, "prefix", 5, b"summarize: ")
    refused(call, "tokenizer", None)
    refused(call, "model", None, "mini", SimpleNamespace(device="cpu"), match="has no generate")
    refused(call, "model", copy.deepcopy(mini[0]).train(), match="training mode")
    refused(call, "model", Echo(lambda ids: ids[:1]), match="1 answers to 5 texts")
    refused(partial(call, model=mini[0], num_beams=2, max_new_tokens=2), "num_return_sequences", 2)
