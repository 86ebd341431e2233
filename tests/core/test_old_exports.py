"""Exports of each release, kept as files: today's package opens them, and answers as that release did."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from t5accel import AcceleratedEncoder, accelerate
from t5accel.backends.ort_cuda import OrtPointers
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import OrtStatic
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import ExportError
from t5accel.graphs.manifest import MANIFEST, read_manifest, write_manifest
from t5accel.tokenization import TokenizerFile, tokenize

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
RELEASES = {folder: json.loads((folder / "answers.json").read_text("utf-8")) for folder in FIXTURES.glob("exports-*")}
ANSWERS = {  # by "exports-VERSION/NAME": {text: tokens, or an embedding}
    f"{folder.name}/{name}": answers for folder, by_name in RELEASES.items() for name, answers in by_name.items()
}
ENCODERS = sorted(name for name in ANSWERS if "/encoder" in name)
MODELS = sorted(ANSWERS.keys() - {*ENCODERS})
ONE_THREAD = SessionSettings(threads=1)
BACKENDS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: partial(kind, settings=ONE_THREAD) for kind in (OrtNumpy, OrtStatic, OrtPointers)},
    "OpenVINO": partial(OrtStatic, settings=SessionSettings(threads=1, openvino=True)),
}


def test_every_export_has_its_answers() -> None:
    assert FIXTURES / "exports-0.1.0" in RELEASES
    for folder, by_name in RELEASES.items():
        assert {path.name for path in folder.iterdir() if path.is_dir()} == by_name.keys()
        versions = {read_manifest(folder / name).versions["t5accel"] for name in by_name}
        assert versions == {folder.name.removeprefix("exports-")}
    for name in MODELS:
        answers = [tuple(answer) for answer in ANSWERS[name].values()]
        assert len({*answers}) == 3 and all(len({*answer}) >= 5 for answer in answers), "answers vary"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_old_exports_give_the_tokens_that_they_gave(name: str, backend: str) -> None:
    if backend == "OpenVINO" and "int8" in name:
        pytest.skip("OpenVINO encodes exports in fp32")
    ids, mask = tokenize(TokenizerFile(FIXTURES / name), list(ANSWERS[name]))
    times = 2_048 // ids.size + 1 if backend == "OpenVINO" else 1  # smaller batches are left to ONNX Runtime
    opened = BACKENDS[backend](FIXTURES / name)
    found = greedy(opened, np.tile(ids, (times, 1)), np.tile(mask, (times, 1)), max_new_tokens=12).sequences
    assert found.tolist() == times * list(ANSWERS[name].values())


@pytest.mark.parametrize("name", MODELS)
def test_accelerate_opens_old_exports(name: str) -> None:
    model = accelerate(str(FIXTURES / name), threads=1, progress=False)
    batch = model.tokenizer(list(ANSWERS[name]), padding=True, return_tensors="pt")
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    found = model.generate(**inputs, max_new_tokens=12, num_beams=1)[:, 1:]
    assert torch.equal(found, torch.tensor(list(ANSWERS[name].values())))


@pytest.mark.parametrize("name", ENCODERS)
def test_an_old_encoder_gives_the_embeddings_that_it_gave(name: str) -> None:
    found = AcceleratedEncoder(str(FIXTURES / name)).embed(list(ANSWERS[name]))
    np.testing.assert_allclose(found, list(ANSWERS[name].values()), atol=0.02)


NEWER = ": it was written by a newer t5accel. Install that one."


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("format",), 3, "must have format 2, got 3. Install the newer t5accel that wrote it."),
        (("format",), "2", "must have format 2, got '2'. Export again"),
        (("family", "model_type"), "bart9", "has the unknown entry family.model_type = 'bart9'" + NEWER),
        *(
            (tuple(entry.split(".")), 2, f"has the unknown entry '{entry}'{NEWER}")
            for entry in (
                "later", "rules.later", "tokens.later", "family.later", "step.later", "shortlist.later", "dims.later",
                "source.later", "optimized.later", "recipe.later", "recipe.encoder.later", "recipe.embedding.later",
            )
        ),
        (("recipe", "overrides"), [["lm_head", {"bits": 8, "later": 2}]], "'recipe.overrides.later'" + NEWER),
        (("files", "config.json", "later"), 2, "'files.config.json.later'" + NEWER),
        (("graphs", "encoder.onnx", "inputs", 0, "later"), 2, "'graphs.encoder.onnx.inputs.later'" + NEWER),
    ],
)  # fmt: skip
@pytest.mark.parametrize("folder", sorted(RELEASES), ids=lambda folder: folder.name)
def test_what_this_release_does_not_know_is_refused_by_name(
    folder: Path, tmp_path: Path, path: Any, value: Any, said: str
) -> None:
    """An entry that nobody reads could change answers."""
    copy = shutil.copytree(folder / "t5-int8", tmp_path / "export")
    content = json.loads((copy / MANIFEST).read_text(encoding="utf-8"))
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    write_manifest(copy, content)
    with pytest.raises(ExportError) as caught:
        OrtStatic(copy)
    assert str(copy / MANIFEST) in str(caught.value) and said in str(caught.value)
