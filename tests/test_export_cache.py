"""Exports kept between programs: found again without loading the model, mended when damaged, listed and cleared."""

import copy
from pathlib import Path

import pytest
import torch

import t5accel.graphs.export.cache as module
from t5accel.errors import ExportError, ModelUnavailableError, NotT5Error, UnknownModelError
from t5accel.graphs.export.cache import cache_folder, cached_export, clear_exports, list_exports
from t5accel.graphs.export.manifest import read_manifest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "exports"


def test_without_the_variable_it_lies_where_the_system_keeps_caches(monkeypatch) -> None:
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.delenv("T5ACCEL_CACHE")
    assert cache_folder() == platformdirs.user_cache_path("t5accel", appauthor=False) / "exports"
    monkeypatch.setenv("T5ACCEL_CACHE", "~/elsewhere")
    assert cache_folder() == Path.home() / "elsewhere" / "exports"


def test_equal_weights_are_exported_once_and_others_apart(tiny_t5, cache: Path) -> None:
    first = cached_export(tiny_t5())
    written = (first / "encoder.onnx").stat().st_mtime_ns
    assert cached_export(copy.deepcopy(tiny_t5())) == first
    assert (first / "encoder.onnx").stat().st_mtime_ns == written
    changed = copy.deepcopy(tiny_t5())
    with torch.no_grad():
        changed.decoder.block[0].layer[0].SelfAttention.q.weight[0, 0] += 1
    assert cached_export(changed) != first
    assert first.parent == cache and len(list_exports()) == 2


def test_both_graphs_share_one_file_of_weights(tiny_t5) -> None:
    assert "weights.data" in read_manifest(cached_export(tiny_t5())).files


def test_a_named_model_is_not_loaded_again(tiny_t5, tmp_path: Path, monkeypatch) -> None:
    tiny_t5().save_pretrained(tmp_path / "model")
    first = cached_export(tmp_path / "model")
    assert first.name.startswith("model-fp32-")
    monkeypatch.setattr(module, "load_t5", lambda name: pytest.fail("loaded"))
    monkeypatch.setattr(module, "export_t5", lambda *_, **__: pytest.fail("exported"))
    assert cached_export(str(tmp_path / "model")) == first


def test_a_folder_whose_files_changed_is_another_model(tiny_t5, tmp_path: Path) -> None:
    tiny_t5().save_pretrained(tmp_path / "model")
    first = cached_export(tmp_path / "model")
    tiny_t5(seed=2).save_pretrained(tmp_path / "model")
    assert cached_export(tmp_path / "model") != first


def test_the_bundled_model_brings_its_tokenizer() -> None:
    folder = cached_export("mini")
    assert (folder / "tokenizer.json").is_file() and read_manifest(folder).source["name"] == "mini"


def test_a_damaged_export_is_made_again(tiny_t5) -> None:
    folder = cached_export(tiny_t5())
    whole = (folder / "weights.data").read_bytes()
    (folder / "weights.data").write_bytes(whole[:-1])
    assert cached_export(tiny_t5()) == folder and (folder / "weights.data").read_bytes() == whole
    (folder / "manifest.json").unlink()
    with pytest.raises(ExportError, match="is no export of t5accel"):
        cached_export(tiny_t5())  # whatever it is, it may be somebody's


def test_what_is_listed_is_cleared_and_nothing_else(tiny_t5, cache: Path) -> None:
    assert list_exports() == [] and clear_exports() == []
    folder = cached_export(tiny_t5())
    (cache / "letters").mkdir()
    (cache / "letters" / "to-keep.txt").write_text("a letter")
    (entry,) = list_exports()
    assert entry.folder == folder and entry.manifest == read_manifest(folder)
    assert entry.size_bytes == sum(path.stat().st_size for path in folder.iterdir())
    (folder / "manifest.json").write_text("{}")
    assert [export.manifest for export in list_exports()] == [None]
    assert [export.folder for export in clear_exports()] == [folder]
    assert [path.name for path in cache.iterdir()] == ["letters"]


def test_engines_are_listed_as_such_and_cleared(tiny_t5, cache: Path) -> None:
    folder = cached_export(tiny_t5())
    engines = cache / "tensorrt-0123456789abcdef"
    engines.mkdir()
    (engines / "decoder.engine").write_bytes(b"12345")
    entries = {entry.folder: entry for entry in list_exports()}
    assert entries.keys() == {folder, engines} and entries[engines].size_bytes == 5
    assert (entries[folder].what, entries[engines].what) == ("T5ForConditionalGeneration", "TensorRT engines")
    (folder / "manifest.json").write_text("{}")
    assert [entry.what for entry in list_exports() if entry.folder == folder] == ["damaged"]
    clear_exports()
    assert not [*cache.iterdir()]


def test_what_is_no_model_leaves_nothing(cache: Path, tmp_path: Path, offline) -> None:
    for name, error in (("no such model", UnknownModelError), ("google-t5/t5-small", ModelUnavailableError)):
        with pytest.raises(error):
            cached_export(name)
    with pytest.raises(NotT5Error):
        cached_export(torch.nn.Linear(2, 2))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelUnavailableError):
        cached_export(tmp_path / "empty")
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_named(tiny_t5, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ExportError, match="file"):
        cached_export(tiny_t5())
