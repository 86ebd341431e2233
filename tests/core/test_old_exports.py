"""Exports of 0.1.0, kept as files: today's package opens them, and answers as it did then."""

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

KEPT = Path(__file__).resolve().parents[1] / "fixtures" / "exports-0.1.0"
ANSWERS = json.loads((KEPT / "answers.json").read_text(encoding="utf-8"))
ENCODER_ALONE = "encoder-int8"
ONE_THREAD = SessionSettings(threads=1)
BACKENDS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: partial(kind, settings=ONE_THREAD) for kind in (OrtNumpy, OrtStatic, OrtPointers)},
    "OpenVINO": partial(OrtStatic, settings=SessionSettings(threads=1, openvino=True)),
}


def test_every_export_has_its_answers() -> None:
    assert {folder.name for folder in KEPT.iterdir() if folder.is_dir()} == ANSWERS.keys()
    assert {read_manifest(KEPT / name).versions["t5accel"] for name in ANSWERS} == {"0.1.0"}
    for name in ANSWERS.keys() - {ENCODER_ALONE}:
        answers = [tuple(answer) for answer in ANSWERS[name].values()]
        assert len({*answers}) == 3 and all(len({*answer}) >= 5 for answer in answers), "answers vary"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", sorted(ANSWERS.keys() - {ENCODER_ALONE}))
def test_old_exports_give_the_tokens_that_they_gave(name: str, backend: str) -> None:
    if backend == "OpenVINO" and "int8" in name:
        pytest.skip("OpenVINO encodes exports in fp32")
    ids, mask = tokenize(TokenizerFile(KEPT / name), list(ANSWERS[name]))
    times = 2_048 // ids.size + 1 if backend == "OpenVINO" else 1  # smaller batches are left to ONNX Runtime
    opened = BACKENDS[backend](KEPT / name)
    found = greedy(opened, np.tile(ids, (times, 1)), np.tile(mask, (times, 1)), max_new_tokens=12).sequences
    assert found.tolist() == times * list(ANSWERS[name].values())


@pytest.mark.parametrize("name", sorted(ANSWERS.keys() - {ENCODER_ALONE}))
def test_accelerate_opens_old_exports(name: str) -> None:
    model = accelerate(str(KEPT / name), threads=1, progress=False)
    batch = model.tokenizer(list(ANSWERS[name]), padding=True, return_tensors="pt")
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    found = model.generate(**inputs, max_new_tokens=12, num_beams=1)[:, 1:]
    assert torch.equal(found, torch.tensor(list(ANSWERS[name].values())))


def test_an_old_encoder_gives_the_embeddings_that_it_gave() -> None:
    texts = list(ANSWERS[ENCODER_ALONE])
    found = AcceleratedEncoder(str(KEPT / ENCODER_ALONE)).embed(texts)
    np.testing.assert_allclose(found, list(ANSWERS[ENCODER_ALONE].values()), atol=0.02)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("format",), 3, "must have format 2, got 3. Install the newer t5accel that wrote it."),
        (("format",), "2", "must have format 2, got '2'. Export again"),
        (("scale",), 2, "unexpected keyword argument 'scale'"),
        (("rules", "no_digits"), True, "unexpected keyword argument 'no_digits'"),
        (("tokens", "sep_token_id"), 3, "tokens has the unknown entry 'sep_token_id'"),
        *(
            ((part, "scaling"), 2, f"{part} has the unknown entry 'scaling'")
            for part in ("family", "step", "shortlist")
        ),
    ],
)
def test_what_this_release_does_not_know_is_refused_by_name(tmp_path: Path, path: Any, value: Any, said: str) -> None:
    """An entry that nobody reads could change answers."""
    folder = shutil.copytree(KEPT / "t5-fp32", tmp_path / "export")
    content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    write_manifest(folder, content)
    with pytest.raises(ExportError) as caught:
        OrtStatic(folder)
    assert str(folder / MANIFEST) in str(caught.value) and said in str(caught.value)
