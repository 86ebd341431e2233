"""The one-liner: from any kind of model to the same answers, faster."""

import copy
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from refused import refused

import t5accel
from t5accel.api import _choose_runtime, accelerate, open_backend
from t5accel.backends.model_defaults import by_defaults
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import (
    ExportError,
    InputError,
    MissingPackageError,
    ModelUnavailableError,
    NotT5Error,
    UnknownModelError,
    install,
)
from t5accel.graphs.export import export_model
from t5accel.graphs.export_cache import list_exports
from t5accel.parity import assert_varied
from t5accel.precision.recipes import as_recipe

pytestmark = pytest.mark.usefixtures("cache_of_its_own")

TEXT = "translate English to French: Where is my bag?"


def test_the_bundled_model_by_name(mini) -> None:
    model, tokenizer = mini
    accelerated = t5accel.accelerate("mini", progress=False)
    batch = accelerated.tokenizer([TEXT, "translate English to French: I am tired."], return_tensors="pt", padding=True)
    expected = model.generate(**batch, max_new_tokens=20)
    assert_varied(expected.numpy())
    assert torch.equal(accelerated.generate(**batch, max_new_tokens=20), expected)
    beams = dict(max_new_tokens=20, num_beams=3)
    assert torch.equal(accelerated.generate(**batch, **beams), model.generate(**batch, **beams))
    ours = greedy(accelerated.backend, batch["input_ids"], batch["attention_mask"], max_new_tokens=20).sequences
    assert tokenizer.batch_decode(ours, skip_special_tokens=True) == tokenizer.batch_decode(
        expected, skip_special_tokens=True
    )


def test_a_model_object_a_folder_and_an_export(tiny_t5, kind: str, padded_batch, tmp_path: Path) -> None:
    model, (ids, mask) = tiny_t5(kind), padded_batch
    model.save_pretrained(tmp_path / "model")
    export_model(model, tmp_path / "export")
    answers = []
    for given in (model, tmp_path / "model", str(tmp_path / "export")):
        accelerated = accelerate(given, progress=False)
        assert accelerated.tokenizer is None
        answers.append(greedy(accelerated.backend, ids, mask, max_new_tokens=12).sequences)
    assert_varied(answers[0])
    assert all((answer == answers[0]).all() for answer in answers)
    assert accelerated.backend.folder == tmp_path / "export"


def test_the_tokenizer_given_is_kept(tiny_t5, mini) -> None:
    accelerated = accelerate(tiny_t5(seed=3), tokenizer=mini[1], progress=False)
    assert accelerated.tokenizer(TEXT).input_ids == mini[1](TEXT).input_ids


@pytest.mark.parametrize("name", ["generate", "_get_logits_processor"])
def test_other_methods_of_generation_are_refused(tiny_t5, name: str) -> None:
    for change in ("class", "object"):
        model = copy.deepcopy(tiny_t5())
        own = getattr(model, name)
        if change == "class":
            model.__class__ = type(
                "Mine", (type(model),), {name: lambda self, *args, own=own, **others: own(*args, **others)}
            )
        else:
            setattr(model, name, lambda *args, own=own, **others: own(*args, **others))
        with pytest.raises(InputError, match=rf"\.{name} must be transformers' own"):
            accelerate(model, progress=False)


@pytest.mark.parametrize("value", [np.array([5, 6]), {5, 6}, range(5, 7)], ids=str)
def test_settings_of_a_model_that_no_file_can_hold_are_refused(tiny_t5, value) -> None:
    model = copy.deepcopy(tiny_t5())
    model.generation_config.suppress_tokens = value
    with pytest.raises(InputError, match="GenerationConfig must hold values that JSON can hold, got others: "):
        accelerate(model, progress=False)


@pytest.mark.parametrize("values", [{"suppress_tokens": "5"}, {"length_penalty": "a"}, {"bad_words_ids": [5]}], ids=str)
def test_settings_of_another_kind_are_refused(tiny_t5, tmp_path: Path, values) -> None:
    tiny_t5().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises((InputError, ModelUnavailableError), match="generation_config|bad_words_ids|suppress_tokens"):
        accelerate(tmp_path, progress=False)
    (tmp_path / "generation_config.json").write_text('{"num_beams": 4, "max_le')
    with pytest.raises(ModelUnavailableError, match="generation_config.json"):
        accelerate(tmp_path, progress=False)


def test_bad_arguments_are_refused(tiny_t5, tmp_path: Path) -> None:
    refused(accelerate, "model", None, 7, torch.ones(2), {"a": 1}, match="^model (is|must be)")
    refused(partial(accelerate, progress=False), "model", torch.nn.Linear(2, 2), match="", error=NotT5Error)
    refused(partial(accelerate, progress=False), "model", "no such model", match="", error=UnknownModelError)
    call = partial(accelerate, tiny_t5())
    refused(call, "device", "tpu", match="device")
    refused(call, "device", "cuda:1", torch.device("cuda", 1), match="must be the first GPU.*CUDA_VISIBLE_DEVICES=1")
    refused(call, "device", "cpu:1", "cuda:x", None, torch.device("meta"), match="^device ")
    refused(call, "precision", torch.int8, torch.float64, match="^precision")
    refused(call, "threads", 0, match="threads")
    for runtime in ("onnx", "torch"):
        refused(partial(call, runtime=runtime), "tokenizer", "mini", match="^tokenizer must be")
    refused(call, "runtime", "onyx", match="^runtime must be")
    refused(call, "runtime", "tensorrt", match="^device must be 'cuda'")
    refused(partial(call, runtime="openvino"), "precision", "int8", match="runtime='openvino'")
    refused(partial(call, runtime="torch"), "precision", "int8", match="'onnx' for precision 'int8', got 'torch'")
    refused(partial(call, runtime="onnx"), "precision", "bf16", match="'torch' for precision 'bf16', got 'onnx'")
    refused(partial(call, runtime="torch"), "max_source_tokens", 4)
    refused(call, "encoder_precision", "bf16", "int8", None, match="^encoder_precision must be 'fp32', or 'bf16' by")
    assert accelerate(tiny_t5(), runtime="openvino", progress=False).backend.openvino
    export_model(tiny_t5(), tmp_path / "export")
    refused(partial(accelerate, tmp_path / "export"), "runtime", "torch", match="must not be an export")
    refused(partial(accelerate, tmp_path / "export"), "precision", "bf16", match="export|weights|loaded")
    (tmp_path / "export" / "decoder.onnx").write_bytes(b"cut")
    damaged = r"decoder\.onnx has 3 bytes.*Export again"
    refused(accelerate, "model", tmp_path / "export", match=damaged, error=ExportError)


def test_device_and_precision_as_torch_names_them(tiny_t5) -> None:
    for precision, device in ((torch.float32, torch.device("cpu")), ("float32", torch.device("cpu", 0))):
        assert accelerate(tiny_t5(), device=device, precision=precision, progress=False).dtype == torch.float32
    for precision in (torch.float16, torch.bfloat16):
        assert accelerate(tiny_t5(), precision=precision, progress=False).dtype == precision


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 0), torch.device("cuda")])
@pytest.mark.parametrize("runtime", [None, "onnx", "torch", "tensorrt"])
def test_without_a_gpu_one_sentence_says_so_and_nothing_is_exported(tiny_t5, monkeypatch, runtime, device) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = len(list_exports())
    with pytest.raises(MissingPackageError, match="^device='cuda'"):
        accelerate(tiny_t5(seed=9), device=device, runtime=runtime)
    assert len(list_exports()) == before


@pytest.mark.parametrize(
    ("device", "precision", "is_export", "expected"),
    [
        ("cpu", "fp32", False, "onnx"), ("cpu", "bf16", False, "torch"), ("cpu", "int8", True, "onnx"),
        ("cuda", "fp32", False, "torch"), ("cuda", "fp16", False, "torch"), ("cuda", "bf16", False, "torch"),
        ("cuda", "int4", False, "onnx"), ("cuda", "fp16", True, "onnx"),
    ],
)  # fmt: skip
def test_the_runtime_that_suits(device: str, precision: str, is_export: bool, expected: str) -> None:
    assert _choose_runtime(None, device, as_recipe(precision), is_export=is_export) == expected


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_torch_by_name_on_a_cpu(tiny_t5, padded_batch, precision: str) -> None:
    model = tiny_t5()
    accelerated = accelerate(model, runtime="torch", precision=precision)
    assert next(model.parameters()).dtype == torch.float32, "the model that was given stays as it is"
    wo = accelerated.backend.model.decoder.block[0].layer[-1].DenseReluDense.wo.weight.dtype
    assert wo == (torch.bfloat16 if precision == "bf16" else torch.float32)
    ids, options = torch.from_numpy(padded_batch[0]), dict(max_new_tokens=6, min_new_tokens=6)
    tokens = accelerated.generate(ids, **options)
    assert tokens.shape == (6, 7)
    if precision == "fp32":
        assert torch.equal(tokens, accelerate(model, progress=False).generate(ids, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_on_a_gpu(mini, precision: str) -> None:
    model, tokenizer = mini
    accelerated = accelerate("mini", device="cuda", precision=precision)
    batch = tokenizer([TEXT], return_tensors="pt")
    answer = greedy(accelerated.backend, batch["input_ids"], max_new_tokens=20).sequences
    assert tokenizer.batch_decode(answer, skip_special_tokens=True) == tokenizer.batch_decode(
        model.generate(**batch, max_new_tokens=20), skip_special_tokens=True
    )
    assert accelerated.backend.captured > 0


def test_longer_sources_than_stated_are_refused(tiny_t5) -> None:
    accelerated = accelerate(tiny_t5(), max_source_tokens=4, progress=False)
    with pytest.raises(InputError, match="max_source_tokens"):
        accelerated.generate(input_ids=torch.full((1, 5), 7), max_new_tokens=2)


def test_it_shows_that_it_exports(tiny_t5, monkeypatch, capfd) -> None:
    monkeypatch.setattr("t5accel.machine.watches_stderr", lambda: True)
    accelerate(tiny_t5(seed=5))
    assert "exporting T5ForConditionalGeneration" in capfd.readouterr().err
    accelerate(tiny_t5(seed=5))
    assert "exporting" not in capfd.readouterr().err


def test_without_torch_a_sentence_says_what_to_install() -> None:
    program = (
        "import sys\nsys.modules['torch'] = None\nfrom t5accel import accelerate, load_model\n"
        "from t5accel.errors import MissingPackageError\n"
        "for function in (accelerate, load_model):\n"
        "    try:\n        function('mini')\n    except MissingPackageError as error:\n        print(error)\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = answer.stdout.splitlines()
    assert "open_backend" in first and all(install("cpu") in line for line in (first, second))


def test_stop_strings_of_a_model_end_its_answers(mini, saved) -> None:
    model, tokenizer = copy.deepcopy(mini[0]), mini[1]
    batch = tokenizer([TEXT], return_tensors="pt")
    whole = model.generate(**batch, max_new_tokens=20)
    model.generation_config.stop_strings = [tokenizer.decode(whole[0, 2:4])]
    expected = whole[:, :4]  # transformers 4.57 hands the tokenizer on to a T5, which does not take it
    backend = open_backend(saved(model), progress=False)[0]
    found = by_defaults(backend, max_new_tokens=20)(batch["input_ids"].numpy(), batch["attention_mask"].numpy())
    assert found.tolist() == expected[:, 1:].tolist()


def test_without_transformers_a_tokenizer_of_its_own_says_what_to_install(tmp_path) -> None:
    for name in ("config.json", "source.spm", "target.spm", "vocab.json"):  # as Marian has it
        (tmp_path / name).write_text("{}")
    program = (
        "import sys\nsys.modules['transformers'] = sys.modules['torch'] = None\n"
        "from t5accel.errors import MissingPackageError\nfrom t5accel.tokenization import tokenizer_of\n"
        "try:\n    tokenizer_of(sys.argv[1])\nexcept MissingPackageError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert answer == f"The tokenizer of {tmp_path} needs transformers: {install('cpu')}.\n"
