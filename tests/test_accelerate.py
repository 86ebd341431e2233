"""The one-liner: from any kind of model to the same answers, faster."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import t5accel
from t5accel.accelerate import accelerate
from t5accel.decoding.greedy import greedy
from t5accel.errors import ExportError, InputError, MissingPackageError, NotT5Error, UnknownModelError
from t5accel.graphs.export import export_t5
from t5accel.parity import assert_varied

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
    export_t5(model, tmp_path / "export")
    answers = []
    for given in (model, tmp_path / "model", str(tmp_path / "export")):
        accelerated = accelerate(given, progress=False)
        assert accelerated.tokenizer is None
        answers.append(greedy(accelerated.backend, ids, mask, max_new_tokens=12).sequences)
    assert_varied(answers[0])
    assert all((answer == answers[0]).all() for answer in answers)
    assert accelerated.backend.folder == tmp_path / "export"


def test_random_sizes_by_name(monkeypatch) -> None:
    accelerated = accelerate("random:flan-t5-small", threads=1, progress=False)
    assert accelerated.config.model_type == "t5" and accelerated.backend.dims.gated
    assert accelerated.backend.settings.threads == 1


def test_the_tokenizer_given_is_kept(tiny_t5, mini) -> None:
    accelerated = accelerate(tiny_t5(seed=3), tokenizer=mini[1], progress=False)
    assert accelerated.tokenizer(TEXT).input_ids == mini[1](TEXT).input_ids


def test_the_function_and_the_module_of_the_same_name() -> None:
    program = (
        "import t5accel, sys\n"
        "first = t5accel.accelerate\n"
        "import t5accel.accelerate\n"
        "from t5accel import accelerate\n"
        "from t5accel.accelerate import accelerate as function\n"
        "assert callable(first) and callable(t5accel.accelerate) and callable(accelerate)\n"
        "try: t5accel.accelerate('no such model', progress=False)\n"
        "except ValueError as error: print(error)\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("No model 'no such model'")


def test_bad_arguments_are_refused(tiny_t5, tmp_path: Path) -> None:
    for bad in (None, 7, torch.ones(2), {"a": 1}):
        with pytest.raises(InputError, match="give a name, a folder or a T5 model"):
            accelerate(bad)
    with pytest.raises(NotT5Error):
        accelerate(torch.nn.Linear(2, 2), progress=False)
    with pytest.raises(UnknownModelError):
        accelerate("no such model", progress=False)
    with pytest.raises(InputError, match="device is 'tpu'"):
        accelerate(tiny_t5(), device="tpu")
    with pytest.raises(InputError, match="threads is 0"):
        accelerate(tiny_t5(), threads=0)
    if not torch.cuda.is_available():
        with pytest.raises(MissingPackageError, match="gpu"):
            accelerate(tiny_t5(), device="cuda", progress=False)
    export_t5(tiny_t5(), tmp_path / "export")
    (tmp_path / "export" / "decoder.onnx").write_bytes(b"cut")
    with pytest.raises(ExportError, match=r"decoder\.onnx has 3 bytes.*Export again"):
        accelerate(tmp_path / "export")


def test_longer_sources_than_stated_are_refused(tiny_t5) -> None:
    accelerated = accelerate(tiny_t5(), max_source_tokens=4, progress=False)
    with pytest.raises(InputError, match="longer than max_source_tokens, 4"):
        accelerated.generate(input_ids=torch.full((1, 5), 7), max_new_tokens=2)


def test_it_shows_that_it_exports(tiny_t5, capfd) -> None:
    accelerate(tiny_t5(seed=5))
    assert "exporting T5ForConditionalGeneration" in capfd.readouterr().err
    accelerate(tiny_t5(seed=5))
    assert "exporting" not in capfd.readouterr().err
