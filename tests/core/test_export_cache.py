"""Exports kept between programs: found again without loading the model, mended when damaged, listed and cleared."""

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.normalizers import Lowercase

import t5accel.graphs.export_cache as module
import t5accel.models.load as checkpoints
from t5accel import AcceleratedEncoder, doctor
from t5accel.api import accelerate, open_backend
from t5accel.backends.ort_static import OrtStatic
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import ExportError, InputError, ModelUnavailableError, NotT5Error, UnknownModelError
from t5accel.graphs.export import export_model
from t5accel.graphs.export_cache import (
    cache_folder,
    cached_export,
    clear_exports,
    find_export,
    list_exports,
    verified_manifest,
)
from t5accel.graphs.manifest import files_of_export, read_manifest, write_manifest
from t5accel.models.load import data_folder, hub_snapshot, load_model
from t5accel.tokenization import text_to_text


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "exports"


@pytest.fixture
def folder(tiny_t5, tmp_path: Path) -> Path:
    """Of a tiny model."""
    tiny_t5().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_without_the_variable_it_lies_where_the_system_keeps_caches(monkeypatch) -> None:
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.delenv("T5ACCEL_CACHE")
    assert cache_folder() == platformdirs.user_cache_path("t5accel", appauthor=False) / "exports"
    monkeypatch.setenv("T5ACCEL_CACHE", "~/elsewhere")
    assert cache_folder() == Path.home() / "elsewhere" / "exports"


def test_a_user_without_a_home_opens_exports_and_keeps_none(tiny_t5, tmp_path: Path, monkeypatch) -> None:
    pwd = pytest.importorskip("pwd")

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    export_model(tiny_t5(), tmp_path / "export")
    for name in ("T5ACCEL_CACHE", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert verified_manifest(tmp_path / "export") == read_manifest(tmp_path / "export")
    assert doctor._cache().ok is False and "T5ACCEL_CACHE" in doctor._cache().remedy
    for chosen in ("", "~/elsewhere"):
        monkeypatch.setenv("T5ACCEL_CACHE", chosen)
        with pytest.raises(InputError, match="T5ACCEL_CACHE must be set to a folder: this user has no home"):
            cached_export(tiny_t5())


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


def test_a_named_model_is_not_loaded_again(folder: Path, monkeypatch) -> None:
    first = cached_export(folder)
    assert first.name.startswith("model-fp32-")
    monkeypatch.setattr(module, "load_model", lambda name: pytest.fail("loaded"))
    monkeypatch.setattr(module, "export_model", lambda *_, **__: pytest.fail("exported"))
    assert cached_export(str(folder)) == first


# --- the key: whatever changes an answer asks for a new result


def edit(folder: Path, file: str, **changed: Any) -> None:
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | changed))


def test_every_field_and_file_that_loading_may_read_is_in_the_key(folder: Path) -> None:
    found = [cached_export(folder)]
    for field, value in dict(layer_norm_epsilon=1e-3, feed_forward_proj="gelu", decoder_start_token_id=5).items():
        edit(folder, "config.json", **{field: value})
        found.append(cached_export(folder))
    for name in ("vocab.json", "added.spm", "generation_config.json"):
        (folder / name).write_text('{"num_beams": 2}')
        found.append(cached_export(folder))
    assert len({*found}) == len(found) == 7
    (folder / "README.md").write_text("of no account")
    (folder / "optimizer.pt").write_text("nor this")
    assert cached_export(folder) == found[-1]


def test_weights_in_a_folder_below_are_in_the_key(folder: Path, tiny_t5) -> None:
    (folder / "shards").mkdir()
    (folder / "model.safetensors").rename(folder / "shards" / "one.safetensors")
    weights = load_file(folder / "shards" / "one.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, "shards/one.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    first = cached_export(folder)
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    save_file(zeros, folder / "shards" / "one.safetensors", metadata={"format": "pt"})
    assert cached_export(folder) != first


def set_both(model: Any, **tokens: int) -> None:
    for name, token in tokens.items():
        setattr(model.config, name, token)
        setattr(model.generation_config, name, token)


CHANGES: tuple[Callable[[Any], Any], ...] = (
    lambda model: model.shared.weight.data[5, 0].add_(1), lambda model: setattr(model.config, "pad_token_id", 3),
    lambda model: set_both(model, eos_token_id=4), lambda model: set_both(model, decoder_start_token_id=5),
    lambda model: setattr(model.generation_config, "forced_bos_token_id", 6),
    lambda model: setattr(model.generation_config, "suppress_tokens", [7]),
)  # fmt: skip


def test_what_changes_an_object_is_in_the_key(tiny_t5) -> None:
    model = copy.deepcopy(tiny_t5())
    found = [cached_export(model)]
    for change in CHANGES:
        change(model)
        found.append(cached_export(model))
    assert len({*found}) == 7


def test_versions_are_in_the_key(tiny_t5, folder: Path, monkeypatch) -> None:
    found, here = [cached_export(folder), cached_export(tiny_t5())], module._versions()
    for package in ("transformers", "t5accel"):
        monkeypatch.setattr(module, "_versions", lambda package=package: here | {package: "9.9"})
        found += [cached_export(folder), cached_export(tiny_t5())]
    assert len({*found}) == 6


def test_an_objects_own_defaults_are_handed_out_and_not_those_of_an_earlier_one(tiny_t5) -> None:
    own = copy.deepcopy(tiny_t5("shallower-decoder"))
    accelerate(own, progress=False)
    own.generation_config.num_beams, own.generation_config.no_repeat_ngram_size = 3, 2
    own.generation_config.max_length = 9
    fast, ids = accelerate(own, progress=False), torch.tensor([[5, 6, 1]])
    assert torch.equal(
        fast.generate(ids, attention_mask=torch.ones_like(ids)), own.generate(ids, attention_mask=torch.ones_like(ids))
    )


def test_a_given_tokenizer_is_handed_out_and_all_its_settings_are_in_the_key(mini) -> None:
    model, tokenizer = mini
    settings: tuple[Callable[[Any], Any], ...] = (
        copy.deepcopy, lambda other: other.add_tokens(["\n"]), lambda other: setattr(other, "model_max_length", 7),
        lambda other: setattr(other.backend_tokenizer, "normalizer", Lowercase()),
    )  # fmt: skip
    others = [copy.deepcopy(tokenizer) for _ in settings]
    for change, other in zip(settings, others, strict=True):
        change(other)
    hashes = [module.tokenizer_hash(other) for other in others]
    assert len({*hashes}) == 4 and hashes[0] == module.tokenizer_hash(tokenizer)
    accelerate(model, tokenizer=tokenizer, progress=False)
    assert accelerate(model, tokenizer=others[-1], progress=False).tokenizer is others[-1]


# --- fast starts: what was hashed before, and what the hub's cache knows


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files as they are hashed by the cache; files just written count as settled."""
    found: list[str] = []
    describe = module.describe_file
    monkeypatch.setattr(module, "describe_file", lambda path: found.append(path.name) or describe(path))
    monkeypatch.setattr(module, "SETTLED_NS", -(10**12))
    return found


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load_model", "export_model", "convert_export"):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("done again"))


def test_files_are_hashed_once(folder: Path, hashed: list[str], monkeypatch) -> None:
    first = [cached_export(folder, precision=name) for name in ("fp32", "int8")]
    assert [folder.name[:11] for folder in first] == ["model-fp32-", "model-int8-"]
    assert hashed.count("model.safetensors") == 1 and not {*hashed} & {"encoder.onnx", "weights.data"}
    hashed.clear()
    forbid(monkeypatch)
    assert [cached_export(folder, precision=name) for name in ("fp32", "int8")] == first
    assert [verified_manifest(folder) for folder in first] == [read_manifest(folder) for folder in first]
    assert hashed == []


def test_a_file_that_was_just_written_is_not_trusted(folder: Path, hashed: list[str], monkeypatch) -> None:
    monkeypatch.setattr(module, "SETTLED_NS", 3600 * 10**9)
    for _ in range(2):
        hashed.clear()
        cached_export(folder)
        assert "model.safetensors" in hashed


def test_a_changed_file_is_never_served_from_before(folder: Path, hashed: list[str]) -> None:
    """Of the same size, with the old times put back: what only the system may write tells them apart."""
    file = folder / "model.safetensors"
    times, first = file.stat(), cached_export(folder)
    changed = bytearray(file.read_bytes())
    changed[-3] ^= 8  # of a weight
    for write in (lambda: file.write_bytes(changed), lambda: os.replace(copied(file, changed), file)):
        write()
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert (file.stat().st_size, file.stat().st_mtime_ns) == (times.st_size, times.st_mtime_ns)
        second = cached_export(folder)
        assert second != first
        first, changed[-3] = second, changed[-3] ^ 24
    weights = second / "weights.data"
    times, content = weights.stat(), weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ExportError, match=r"weights\.data was altered"):
        verified_manifest(second)
    assert cached_export(folder) == second and weights.read_bytes() == content, "made again"


def copied(file: Path, content: bytes) -> Path:
    (file.parent / "new").write_bytes(content)
    return file.parent / "new"


def test_a_folder_that_changes_while_it_is_read_is_refused(folder: Path, monkeypatch) -> None:

    def disturbed(name: str) -> Any:
        loaded = load_model(name)
        (folder / "config.json").open("a").write("\n")
        return loaded

    monkeypatch.setattr(module, "load_model", disturbed)
    with pytest.raises(ExportError, match="model changed while it was read"):
        cached_export(str(folder))
    assert not list_exports()


def test_damaged_memories_are_forgotten(folder: Path, cache: Path) -> None:
    first = cached_export(folder)
    for content in (b"", b"null", b'{"a": [1, 2]}', b"\xff"):
        (cache / ".hashes.json").write_bytes(content)
        assert cached_export(folder) == first


def publish(hub: Path, name: str, model: Any, commit: str, others: dict[str, str] | None = None) -> None:
    """Lay a model into the hub's cache as a download does: refs, blobs named by their hash, and links to them."""
    folder = hub / f"models--{name.replace('/', '--')}"
    for part in ("refs", "blobs", f"snapshots/{commit}"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder / "saved")
    for file_name, text in (others or {}).items():
        (folder / "saved" / file_name).write_text(text)
    for path in (folder / "saved").iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(folder / "blobs" / digest)
        link = folder / "snapshots" / commit / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(Path("../../blobs") / digest)
    (folder / "saved").rmdir()
    (folder / "refs" / "main").write_text(commit)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def load(name: str) -> Any:  # as from the hub, whose client has its folder fixed when it is imported
        return load_model(hub_snapshot(name) or name)

    monkeypatch.setattr(module, "load_model", load)
    return tmp_path / "hub"


def test_a_published_model_is_neither_loaded_nor_hashed_again(tiny_t5, hub: Path, hashed, monkeypatch) -> None:
    monkeypatch.setattr(module, "LARGE", 0)
    publish(hub, "google-t5/t5-small", tiny_t5(), "1" * 40)
    first = [cached_export("google-t5/t5-small", precision=name) for name in ("fp32", "int8")]
    assert first[0].name.startswith("t5-small-fp32-") and hashed == [], "the hub's cache knows their hashes"
    forbid(monkeypatch)
    assert [cached_export("google-t5/t5-small", precision=name) for name in ("fp32", "int8")] == first
    assert cached_export("t5-small") == first[0] and hashed == []


def test_a_file_that_was_edited_in_the_hub_s_cache_is_another_model(tiny_t5, hub: Path, tmp_path: Path) -> None:
    publish(hub, "google-t5/t5-small", tiny_t5(), "1" * 40)
    first = cached_export("google-t5/t5-small")
    (settings,) = hub.rglob("snapshots/*/generation_config.json")
    content = settings.read_text().replace("{", '{"num_beams": 4, ', 1)
    settings.write_text(content)
    assert open_backend("google-t5/t5-small", progress=False)[0].rules.num_beams == 4
    assert cached_export("google-t5/t5-small") != first
    linked = tmp_path / "linked"  # a folder called blobs need not be the hub's
    tiny_t5().save_pretrained(linked)
    (tmp_path / "blobs").mkdir()
    (linked / "model.safetensors").rename(weights := tmp_path / "blobs" / "latest")
    (linked / "model.safetensors").symlink_to(weights)
    first = cached_export(str(linked))
    tiny_t5(seed=5).save_pretrained(tmp_path / "others")
    shutil.copyfile(tmp_path / "others" / "model.safetensors", weights)
    assert cached_export(str(linked)) != first


def test_another_commit_is_another_model_unless_its_files_are_the_same(tiny_t5, hub: Path) -> None:
    name = "google-t5/t5-small"
    publish(hub, name, tiny_t5(), "1" * 40)
    first = cached_export(name)
    publish(hub, name, tiny_t5(), "2" * 40, {"README.md": "A better card."})
    assert cached_export(name) == first
    publish(hub, name, tiny_t5(seed=2), "3" * 40)
    second = cached_export(name)
    assert second != first and read_manifest(second).source["sha256"] != read_manifest(first).source["sha256"]
    (hub / "models--google-t5--t5-small" / "refs" / "main").write_text("1" * 40)
    assert cached_export(name) == first
    (hub / "models--google-t5--t5-small" / "refs" / "main").write_text("4" * 40)  # known, and not downloaded
    with pytest.raises(ModelUnavailableError):
        cached_export(name)


# --- exports on the hub


class Published:
    """An export as a model that can be saved, for `publish`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def save_pretrained(self, folder: Path) -> None:
        shutil.copytree(self.folder, folder)


class FakeHub:
    """The hub's two ways of downloading, which keep what they send in a cache of links; and what was asked of them."""

    def __init__(self, hub: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.hub, self.folder, self.asked = hub, folder, []
        monkeypatch.setattr("huggingface_hub.hf_hub_download", self.one)
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.all)
        monkeypatch.setattr(checkpoints.socket, "getaddrinfo", lambda *_: [])

    def send(self, name: str, files: list[str]) -> Path:
        chosen = self.hub / "chosen"
        chosen.mkdir(parents=True)
        for file in files:
            shutil.copy(self.folder / file, chosen)
        publish(self.hub, name, Published(chosen), "1" * 40)
        shutil.rmtree(chosen)
        return self.hub / f"models--{name.replace('/', '--')}" / "snapshots" / ("1" * 40)

    def one(self, name: str, file: str, *, cache_dir: str, revision: str | None) -> str:
        self.asked.append((name, file))
        if not (self.folder / file).is_file():
            raise FileNotFoundError(file)
        return str(self.send(name, [file]) / file)

    def all(self, name: str, *, revision: str | None, allow_patterns: list[str], cache_dir: str) -> None:
        self.asked.append((name, revision, allow_patterns))
        self.send(name, [file.name for file in self.folder.iterdir() if any(map(file.match, allow_patterns))])


@pytest.fixture
def exported(mini, tmp_path: Path) -> Path:
    export_model(mini[0], tmp_path / "own", tokenizer=mini[1], step=True, check_logits=False)
    return tmp_path / "own"


def answers(name: str) -> tuple[list[str], list[str]]:
    """By `accelerate` and by `open_backend`."""
    texts = ["translate English to French: I am tired."]
    model = accelerate(name, progress=False)
    tokens = model.generate(**model.tokenizer(texts, return_tensors="pt"), max_new_tokens=16)
    backend, tokenizer, _ = open_backend(name)
    say = text_to_text(tokenizer, lambda ids, mask: greedy(backend, ids, mask, max_new_tokens=16).sequences)
    return model.tokenizer.batch_decode(tokens, skip_special_tokens=True), say(texts)


def test_an_export_in_the_hubs_cache_runs_like_a_folder_and_without_a_network(exported: Path, hub: Path, cache) -> None:
    publish(hub, "me/my-export", Published(exported), "1" * 40)
    assert answers("me/my-export") == answers(str(exported)) == (["Je suis fatigué."],) * 2
    assert not list_exports(), "it is not exported again"
    (hub / "models--me--my-export" / "snapshots" / ("1" * 40) / "decoder.onnx").unlink()
    with pytest.raises(ModelUnavailableError, match="me/my-export lacks decoder.onnx"):
        accelerate("me/my-export")


def test_an_altered_export_of_the_hub_is_refused(exported: Path, hub: Path) -> None:
    publish(hub, "me/my-export", Published(exported), "1" * 40, {"tokenizer.json": "{}"})
    for door in (accelerate, open_backend):
        with pytest.raises(ExportError, match=r"tokenizer.json has 2 bytes instead of"):
            door("me/my-export")


def test_an_export_is_downloaded_once_and_only_its_own_files(exported: Path, hub: Path, monkeypatch) -> None:
    (exported / "evil.py").write_text("raise SystemExit")
    (exported / "huge.bin").write_text("not for us")
    fake, name = FakeHub(hub, exported, monkeypatch), "me/my-export"
    assert answers(name)[1] == ["Je suis fatigué."]
    files = sorted({*read_manifest(exported).files, "manifest.json"})
    assert fake.asked == [(name, "manifest.json"), (name, "1" * 40, files)]
    assert answers(name)[0] == ["Je suis fatigué."] and len(fake.asked) == 2


def test_a_download_that_stopped_goes_on(exported: Path, hub: Path, monkeypatch) -> None:
    fake = FakeHub(hub, exported, monkeypatch)
    (exported / "decoder.onnx").rename(exported / "elsewhere")
    with pytest.raises(ModelUnavailableError, match="lacks decoder.onnx"):
        accelerate("me/my-export")
    (exported / "elsewhere").rename(exported / "decoder.onnx")
    assert answers("me/my-export")[0] == ["Je suis fatigué."]
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: 1 / 0)
    (fake.hub / "models--me--my-export" / "snapshots" / ("1" * 40) / "decoder.onnx").unlink()
    with pytest.raises(ModelUnavailableError, match="cannot be downloaded: ZeroDivisionError"):
        accelerate("me/my-export")


def test_the_hub_is_asked_once_for_a_model_and_never_for_one_that_is_there(tiny_t5, hub, tmp_path, monkeypatch) -> None:
    publish(hub, "google-t5/t5-small", tiny_t5(), "1" * 40, {"manifest.json": '{"files": ["of somebody else"]}'})
    fake = FakeHub(hub, tmp_path, monkeypatch)
    for name in ("mini", "t5-small", "random:t5-small", str(tmp_path), "", tiny_t5(), None):
        assert find_export(name) is None
    assert fake.asked == [] and find_export("me/my-model") is None
    assert fake.asked == [("me/my-model", "manifest.json")]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert find_export("me/my-model") is None and len(fake.asked) == 1


def test_a_manifest_that_names_other_files_is_refused(exported: Path, hub: Path, monkeypatch) -> None:
    content = json.loads((exported / "manifest.json").read_text())
    content["files"]["*"] = content["files"]["config.json"]
    write_manifest(exported, content)
    fake = FakeHub(hub, exported, monkeypatch)
    with pytest.raises(ModelUnavailableError, match=r"lists '\*', which is no file of an export"):
        accelerate("me/my-export")
    assert len(fake.asked) == 1


def test_a_model_with_a_manifest_of_something_else_is_a_model(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")
    assert find_export(folder) is None and cached_export(folder)


def test_an_export_beside_weights_is_refused(tiny_t5, folder: Path, tmp_path: Path) -> None:
    """A model that was saved there later leaves every hash of the manifest as it was."""
    export_model(tiny_t5(), tmp_path / "out")
    tiny_t5(seed=5).save_pretrained(tmp_path / "out")
    with pytest.raises(InputError, match="holds an export and a model's weights"):
        find_export(tmp_path / "out")


@pytest.mark.parametrize("is_there", [True, False])
def test_an_export_is_no_model_to_load_and_says_so(exported: Path, hub: Path, monkeypatch, is_there: bool) -> None:
    if is_there:
        publish(hub, "me/my-export", Published(exported), "1" * 40)
    else:
        FakeHub(hub, exported, monkeypatch).send("me/my-export", ["config.json"])  # transformers asks for it first
    monkeypatch.setattr(checkpoints, "_from_pretrained", lambda *_, **__: 1 / 0)
    for name in (str(exported), "me/my-export"):
        with pytest.raises(ModelUnavailableError, match=f"{name} is an export"):
            checkpoints.load_model(name)


def test_a_damaged_export_is_made_again(tiny_t5) -> None:
    folder = cached_export(tiny_t5())
    whole = (folder / "weights.data").read_bytes()
    (folder / "weights.data").write_bytes(whole[:-1])
    assert cached_export(tiny_t5()) == folder and (folder / "weights.data").read_bytes() == whole
    (folder / "manifest.json").unlink()
    assert cached_export(tiny_t5()) == folder and read_manifest(folder)


def test_a_link_among_the_exports_is_cleared_and_its_target_kept(tiny_t5, cache: Path, tmp_path: Path) -> None:
    folder = cached_export(tiny_t5())
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert cached_export(tiny_t5()) == folder
    clear_exports()
    assert not [*cache.iterdir()] and read_manifest(tmp_path / "elsewhere")


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


@pytest.mark.parametrize("lacking", ["tokenizer", "model-00001"])
def test_an_encoder_that_is_partly_in_the_hubs_cache_is_had_whole(hub: Path, tmp_path, monkeypatch, lacking) -> None:
    """Without a tokenizer, as programs leave it that read weights alone; without a shard, as a download that stops."""
    folder, name, shard = tmp_path / "sharded", "me/my-model", "model-00001-of-00001.safetensors"
    shutil.copytree(data_folder() / "mini-t5", folder)
    (folder / "model.safetensors").rename(folder / shard)
    index = {"weight_map": dict.fromkeys(load_file(folder / shard), shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fake = FakeHub(hub, folder, monkeypatch)
    fake.send(name, [path.name for path in folder.iterdir() if not path.name.startswith(lacking)])
    for _ in range(2):
        assert AcceleratedEncoder.from_pretrained(name, progress=False).embed(["No"]).shape == (1, 256)
    ((*_, revision, patterns),) = (asked for asked in fake.asked if len(asked) == 3)
    assert revision == "1" * 40 and "pytorch_model*.bin" not in patterns


def test_an_adapter_beside_weights_on_the_hub_is_refused(tiny_t5, hub: Path, tmp_path, monkeypatch) -> None:
    """Which transformers loads without it, unless peft is installed."""
    publish(hub, "me/tuned", tiny_t5(), "1" * 40)
    (tmp_path / "adapter_config.json").write_text("{}")
    FakeHub(hub, tmp_path, monkeypatch)
    monkeypatch.setattr(checkpoints, "_from_pretrained", lambda *_, **__: (tiny_t5(), None))
    for door in (checkpoints.load_model, AcceleratedEncoder.from_pretrained):
        with pytest.raises(ModelUnavailableError, match="me/tuned holds an adapter"):
            door("me/tuned")


def test_a_hook_is_found_also_where_the_export_is_there(tiny_t5, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_t5())
    manifest = export_model(model, tmp_path / "x")
    model.lm_head.register_forward_hook(lambda module, args, output: -output)
    with pytest.raises(ExportError, match="other logits"):
        export_model(model, tmp_path / "x")
    assert export_model(model, tmp_path / "x", check_logits=False) == manifest


def test_a_folder_that_is_being_written_is_neither_listed_nor_cleared(tiny_t5, monkeypatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr("t5accel.graphs.export.check_export", lambda *_: found.extend(clear_exports()))
    folder = cached_export(tiny_t5())
    assert found == [] and [entry.folder for entry in list_exports()] == [folder]


def test_a_relative_folder_is_that_of_when_it_was_given(exported: Path, monkeypatch) -> None:
    monkeypatch.chdir(exported.parent)
    monkeypatch.setenv("T5ACCEL_CACHE", "cache")
    backend, cached = OrtStatic(exported.name), cache_folder()
    monkeypatch.chdir("/")
    assert cached == exported.parent / "cache" / "exports"
    prefix = [[0, *range(5, 15)]]  # so long that the portable decoder reads it, which is opened now
    assert greedy(backend, [[5, 6, 1]], decoder_input_ids=prefix, max_new_tokens=2).decoder_calls


def test_a_bundled_name_is_no_folder(exported: Path, monkeypatch) -> None:
    exported.rename(exported.parent / "mini")
    monkeypatch.chdir(exported.parent)
    assert find_export("mini") is None and find_export("./mini") == Path("mini")


def test_a_given_tokenizer_is_in_the_key_of_a_model_that_lies_elsewhere(tiny_t5, mini, hub, monkeypatch) -> None:
    """Outside of the hub's cache, as with TRANSFORMERS_CACHE."""
    other = copy.deepcopy(mini[1])
    other.add_tokens(["\n"])
    monkeypatch.setattr(module, "load_model", lambda name: (tiny_t5(), mini[1]))
    assert cached_export("me/elsewhere") != cached_export("me/elsewhere", tokenizer=other)


def test_a_damaged_export_with_bartphos_vocabulary_is_one_of_ours(exported: Path) -> None:
    (exported / "dict.txt").write_text("a 1")
    (exported / "manifest.json").write_text("")
    assert {path.name for path in exported.iterdir()} <= files_of_export(exported)
