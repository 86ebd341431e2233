"""An export is whole or not there: its manifest, its folder, and what kills, crowds and full disks do to it."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import ExportError, InputError
from t5accel.graphs.atomic_write import locked
from t5accel.graphs.contract import DECODER, ENCODER, MANIFEST, SHORTLIST, WEIGHTS, decoder_spec, encoder_spec
from t5accel.graphs.export import export_model
from t5accel.graphs.manifest import Manifest, read_manifest, write_manifest
from t5accel.models.random_init import random_t5
from t5accel.models.sizes import T5Dims

ROOT = Path(__file__).resolve().parents[2]
AGAIN = r"overwrite=True"
Snapshot = dict[str, Any]


def snapshot(folder: Path) -> Snapshot:
    """All that is there, hidden files too: content, time and inode of files, and nothing of folders but their names."""
    found: Snapshot = {}
    for path in sorted(folder.rglob("*")):
        stat, is_file = path.lstat(), path.is_file()
        found[str(path.relative_to(folder))] = is_file and (path.read_bytes(), stat.st_mtime_ns, stat.st_ino)
    return found


def beside(folder: Path) -> set[str]:
    """What lies in a folder, but for lock files."""
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


@pytest.fixture(scope="module")
def original(tiny_t5, mini, tmp_path_factory) -> Path:
    """An export with every file that there may be. To be copied, not changed."""
    folder = tmp_path_factory.mktemp("original")
    export_model(tiny_t5(), folder, tokenizer=mini[1], name="tiny", external_threshold_bytes=0)
    return folder


@pytest.fixture
def whole(original: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(original, tmp_path / "whole")


FILES = (ENCODER, DECODER, WEIGHTS, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")

# The manifest


def test_the_manifest_tells_the_truth(tiny_t5, original: Path) -> None:
    content = json.loads((original / MANIFEST).read_text(encoding="utf-8"))
    assert content.keys() == {
        "family", "rules", "format", "layout", "source", "dims", "tokens", "recipe", "opset", "versions", "shared",
        "graphs", "files", "optimized", "shortlist", "step", "sha256",
    }  # fmt: skip
    assert content["optimized"] == content["shortlist"] == content["step"] == content["rules"] == {}
    assert (content["format"], content["layout"], content["opset"]) == (2, "two graphs", 20)
    assert content["recipe"] == {"name": "fp32"} and content["source"]["name"] == "tiny"
    assert re.fullmatch("[0-9a-f]{64}", content["source"]["sha256"])
    assert content["tokens"] == {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    dims = T5Dims.of(tiny_t5())
    assert content["dims"] == json.loads(json.dumps(asdict(dims))) and content["dims"]["decoder_heads"] == [4, 4, 4]
    assert content["versions"]["torch"] == version("torch") and content["versions"]["numpy"] == np.__version__
    assert {"transformers", "onnx"} <= content["versions"].keys()
    assert content["graphs"].keys() == {ENCODER, DECODER}
    assert content["graphs"][ENCODER]["inputs"][0] == {"name": "input_ids", "dtype": "int64", "shape": ["B", "S"]}
    assert content["graphs"][DECODER]["outputs"][1]["shape"] == ["B", "K", 4, "P + T", 12]

    assert set(FILES) <= content["files"].keys() == beside(original) - {MANIFEST}
    for name, entry in content["files"].items():
        data = (original / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}

    manifest = read_manifest(original)
    assert manifest.dims == dims and manifest.graphs == {ENCODER: encoder_spec(dims), DECODER: decoder_spec(dims)}
    assert manifest.size_bytes == sum(path.stat().st_size for path in original.iterdir() if path.name != MANIFEST)
    assert read_manifest(str(original), verify=False) == manifest


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "altered": alter,
    "missing": Path.unlink,
    "a folder": replace_by_folder,
}


@pytest.mark.parametrize(
    ("name", "damage"),
    [*((WEIGHTS, damage) for damage in DAMAGES.values()), (ENCODER, alter), ("tokenizer.json", Path.unlink)],
)
def test_damage_is_noticed_and_named(whole: Path, name: str, damage: Callable[[Path], Any]) -> None:
    damage(whole / name)
    for read in (read_manifest, OrtNumpy):
        with pytest.raises(ExportError, match=re.escape(str(whole / name))) as caught:
            read(whole)
        assert re.search(AGAIN, str(caught.value)), "it should say what to do"


def test_without_hashing_sizes_are_checked(whole: Path) -> None:
    alter(whole / "config.json")
    assert read_manifest(whole, verify=False) == OrtNumpy(whole, verify=False).manifest
    os.truncate(whole / "config.json", 5)
    with pytest.raises(ExportError, match="config.json has 5 bytes"):
        read_manifest(whole, verify=False)


def put(*keys: Any, value: Any = ...) -> Callable[[Any], Any]:
    """Replace what lies under these keys; without a value, drop it."""

    def change(content: Any) -> Any:
        place = content
        for key in keys[:-1]:
            place = place[key]
        if value is ...:
            del place[keys[-1]]
        else:
            place[keys[-1]] = value
        return content

    return change


drop = put


def rename_file(name: str) -> Callable[[Any], Any]:
    """Say that a file of the export is another one, of the same size and hash."""

    def change(content: Any) -> Any:
        content["files"][name] = content["files"].pop("config.json")
        return content

    return change


WRONG: list[dict[str, Any]] = [
    {"offset": -1}, {"offset": 10**9}, {"shape": [10**9]}, {"shape": ["1"]}, {"shape": [-1]}, {"shape": []},
    {"dtype": "object"},
]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        put("format", value=1), drop("format"), put("layout", value="one graph"), drop("layout"),
        lambda content: [content], lambda content: {}, lambda content: "two graphs",
        put("more", value=1), drop("dims"), put("dims", value=7), put("files", value=[]), put("recipe", value=None),
        put("shared", value={"w": {}}),
        *(put("shared", value={"w": {"offset": 0, "shape": [1], "dtype": "float32", **wrong}}) for wrong in WRONG),
        put("tokens", "eos_token_id", value=300), put("dims", "vocab_size", value=299),
        put("dims", "decoder_heads", value=[4, 4]), put("dims", "more", value=1),
        drop("graphs", ENCODER), drop("graphs", DECODER, "inputs"),
        put("graphs", DECODER, "inputs", 0, "dtype", value="int32"),
        drop("files", ENCODER), drop("files", DECODER, "size_bytes"), put("files", ENCODER, "size_bytes", value="1"),
        put("dims", "vocab_size", value="300"), put("tokens", value=7), put("tokens", "pad_token_id", value=None),
        put("rules", value=[1]), put("optimized", value=None), put("family", value=None),
        put("rules", value={"suppress_tokens": [5, 10**9]}),
        put("rules", value={"forced_bos_token_id": "x"}), put("recipe", "floats", value="float99"),
        put("recipe", "floats", value=None), put("step", value=3), put("shortlist", value=[1]),
        *(rename_file(name) for name in ("../config.json", "..", "", "a/b", "x\0y", "\ud800", "n" * 300)),
    ],
)  # fmt: skip
def test_manifests_of_another_shape(whole: Path, change: Callable[[Any], Any]) -> None:
    path = whole / MANIFEST
    shutil.copy(whole / "config.json", whole.parent)  # as "../config.json"
    content = change(json.loads(path.read_text()))
    if isinstance(content, dict):
        write_manifest(whole, content)  # with the right hash
    else:
        path.write_text(json.dumps(content))
    for read in (read_manifest, partial(read_manifest, verify=False), OrtNumpy):
        with pytest.raises(ExportError, match=re.escape(str(whole))):
            read(whole)


def test_manifests_that_are_none(whole: Path) -> None:
    for data in (b"", b"{}", b"null", b"\xff\xfe{\x00}\x00", b"[" * 100_000, b"9" * 10_000, b'{"format": NaN}'):
        (whole / MANIFEST).write_bytes(data)
        for read in (read_manifest, OrtNumpy):
            with pytest.raises(ExportError, match=MANIFEST) as caught:
                read(whole)
            assert re.search(AGAIN, str(caught.value))


def test_folders_without_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder" / MANIFEST).mkdir(parents=True)
    for name in ("nothing", "empty", "file", "folder"):
        for read in (read_manifest, OrtNumpy):
            with pytest.raises(ExportError, match=MANIFEST):
                read(tmp_path / name)


def check_reading(folder: Path, write: Callable[[], Any]) -> None:
    """The manifest is refused, or it is read as it stands there: nothing is made of it that it does not say."""
    path = folder / MANIFEST
    before = path.read_bytes()
    try:
        write()
        data = path.read_bytes()
        manifest = read_manifest(folder)
    except ExportError:
        return
    finally:
        path.write_bytes(before)
    content = json.loads(data)
    says = json.loads(json.dumps(asdict(manifest)))
    assert content["format"] == 2 and content["layout"] == "two graphs"
    assert says == {field.name: content.get(field.name, {}) for field in fields(Manifest)}


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_bytes(whole: Path, data: st.DataObject) -> None:
    content = (whole / MANIFEST).read_bytes()
    start = data.draw(st.integers(0, len(content)), "start")
    removed = data.draw(st.integers(0, 20) | st.just(len(content)), "removed")
    changed = content[:start] + data.draw(st.binary(max_size=4), "put there") + content[start + removed :]
    check_reading(whole, partial((whole / MANIFEST).write_bytes, changed))


# A folder that is taken


def test_the_same_model_is_kept(tiny_t5, mini, whole: Path) -> None:
    before = snapshot(whole)
    options = dict(external_threshold_bytes=0)
    for model in (tiny_t5(), copy.deepcopy(tiny_t5()), copy.deepcopy(tiny_t5()).double()):
        for more in ({}, dict(tokenizer=mini[1]), dict(overwrite=True), dict(name="another name")):
            assert export_model(model, whole, **options, **more) == read_manifest(whole)
    assert snapshot(whole) == before, "not a byte, a time or an inode has changed"


@pytest.mark.parametrize("name", ["tokenizer.json", WEIGHTS, SHORTLIST])
def test_the_same_model_with_more_wishes_is_not_the_same(tiny_t5, mini, tmp_path: Path, name: str) -> None:
    """What was asked for is there afterwards, or an error says that it is not."""
    more = {WEIGHTS: dict(external_threshold_bytes=0), SHORTLIST: dict(shortlist=True)}.get(name)
    more = more or dict(tokenizer=mini[1])
    export_model(tiny_t5(), tmp_path / "x")
    before = snapshot(tmp_path)
    with pytest.raises(ExportError, match=AGAIN):
        export_model(tiny_t5(), tmp_path / "x", **more)
    assert snapshot(tmp_path) == before
    assert name in export_model(tiny_t5(), tmp_path / "x", overwrite=True, **more).files


def test_another_model_needs_to_be_told(tiny_t5, whole: Path, padded_batch) -> None:
    before = snapshot(whole)
    for other in (tiny_t5(seed=2), tiny_t5("gated-untied"), tiny_t5(eos_token_id=9)):
        with pytest.raises(ExportError, match=AGAIN):
            export_model(other, whole)
    assert snapshot(whole) == before
    manifest = export_model(tiny_t5(seed=2), whole, overwrite=True)
    assert manifest.source["sha256"] != json.loads(before[MANIFEST][0])["source"]["sha256"]
    assert beside(whole) == {ENCODER, DECODER, MANIFEST, "config.json", "generation_config.json"}, "nothing old stays"
    assert beside(whole.parent) == {"whole"}
    assert greedy(OrtNumpy(whole), *padded_batch, max_new_tokens=2).decoder_calls == 2


@pytest.mark.parametrize(
    ("name", "damage"), [(WEIGHTS, DAMAGES["cut short"]), (MANIFEST, lambda path: path.write_bytes(b"{}}"))]
)
def test_a_damaged_export_is_replaced_when_told(tiny_t5, mini, whole, name: str, damage: Callable[[Path], Any]) -> None:
    damage(whole / name)
    before = snapshot(whole)
    with pytest.raises(ExportError, match=AGAIN):
        export_model(tiny_t5(), whole, tokenizer=mini[1], external_threshold_bytes=0)
    assert snapshot(whole) == before
    export_model(tiny_t5(), whole, tokenizer=mini[1], external_threshold_bytes=0, overwrite=True)
    assert read_manifest(whole).files.keys() >= set(FILES) and beside(whole.parent) == {"whole"}


WEB_APP = '{"name": "app", "format": 1, "icons": [], "start_url": "/"}'


def user_files(folder: Path) -> None:
    for name in (ENCODER, "notes.txt"):
        (folder / name).unlink(missing_ok=True)
    for path in folder.glob("*"):
        path.rename(folder / f"my-{path.name}")


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "other files": user_files,
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "a folder called manifest.json": lambda folder: replace_by_folder(folder / MANIFEST),
    "an export and notes": lambda folder: (folder / "notes.txt").write_text("mine"),
    "another manifest and notes": lambda folder: (
        (folder / MANIFEST).write_text(WEB_APP), (folder / "index.html").write_text("mine")),
    "a web app": lambda folder: (
        [path.unlink() for path in folder.iterdir()], (folder / MANIFEST).write_text(WEB_APP)),
    "a web app with a configuration": lambda folder: (
        [path.unlink() for path in folder.iterdir()], (folder / MANIFEST).write_text(WEB_APP),
        (folder / "config.json").write_text("{}")),
}  # fmt: skip


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_what_is_not_ours_is_never_replaced(tiny_t5, whole: Path, make: Callable[[Path], Any], overwrite: bool) -> None:
    make(whole)
    before = snapshot(whole)
    with pytest.raises(ExportError, match="another folder"):
        export_model(tiny_t5(seed=2), whole, overwrite=overwrite)
    assert snapshot(whole) == before and beside(whole.parent) == {"whole"}


class Failing:
    """Raises at the n-th call of a function, and after the last one, and lets the others through."""

    def __init__(self, function: Callable[..., Any], call: int, error: BaseException):
        self.function, self.call, self.error, self.calls = function, call, error, 0

    def __get__(self, owner: Any, kind: Any) -> Any:  # as a method
        return partial(self, owner) if owner is not None else self

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self.call:
            raise self.error
        return self.function(*args, **options)


FULL = OSError(errno.ENOSPC, "No space left on device")


STEPS = [(Path, "mkdir", 2), (Path, "write_bytes", 2), (Path, "write_text", 1), (os, "fsync", 3), (Path, "rename", 1)]


@pytest.mark.parametrize(
    ("there", "owner", "name", "call", "error"),
    [
        *((True, *step, FULL) for step in STEPS), *((False, *step, FULL) for step in STEPS),
        (True, Path, "rename", 2, KeyboardInterrupt()),  # the first one made room
    ],
)  # fmt: skip
def test_a_failure_half_way_changes_nothing(
    tiny_t5, whole: Path, monkeypatch, there: bool, owner: Any, name: str, call: int, error: BaseException
) -> None:
    target = whole if there else whole.parent / "new"
    before = snapshot(target)
    failing = Failing(getattr(owner, name), call, error)
    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(ExportError if error is FULL else type(error)) as caught:
        export_model(tiny_t5(seed=2), target, overwrite=True)
    assert failing.calls >= call, "it should have happened"
    if error is FULL:
        assert "No space left on device" in str(caught.value) and str(target) in str(caught.value)
    monkeypatch.undo()
    assert snapshot(target) == before and beside(whole.parent) == {"whole"}
    export_model(tiny_t5(seed=2), target, overwrite=True)
    read_manifest(target)


def test_a_flush_that_folders_do_not_know_is_no_failure(tiny_t5, tmp_path: Path, monkeypatch) -> None:
    def fsync(descriptor: int, real: Any = os.fsync) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert export_model(tiny_t5(), tmp_path / "x") == read_manifest(tmp_path / "x")


def test_the_tokenizers_own_errors(tiny_t5, tmp_path: Path) -> None:
    class Tokenizer:
        error: BaseException = Exception("File too large (os error 27)")  # what the tokenizers library raises

        def save_pretrained(self, folder: Path) -> None:
            raise self.error

    with pytest.raises(ExportError, match="tokenizer.*os error 27"):
        export_model(tiny_t5(), tmp_path / "x", tokenizer=Tokenizer())
    assert not beside(tmp_path)


# Beside the folder


def hexadecimal(digit: str) -> str:
    return digit * 32


def test_remnants_are_cleared_and_those_of_living_neighbours_are_not(tiny_t5, tmp_path: Path) -> None:
    ours = [tmp_path / f".model.{hexadecimal(digit)}.partial" for digit in "0f"]
    dead = [tmp_path / f".{name}.{hexadecimal('a')}.partial" for name in ("model.v2", "model2", "a\nb")]
    living = [tmp_path / f".{name}.{hexadecimal('a')}.partial" for name in ("other", "model.v3")]
    names = ["model.{}.partial", ".model.{}.partial.x", ".model.{}0.partial", ".model.notes.partial", "{}.partial"]
    strangers = [tmp_path / name.format(hexadecimal("a")) for name in names]
    pushed_aside = tmp_path / f".replaced.{hexadecimal('b')}.old"
    with locked(tmp_path / "other"), locked(tmp_path / "model.v3"):
        for options in ({}, {}, dict(overwrite=True)):  # new, kept, and again
            for folder in [*ours, *dead, *living, *strangers, pushed_aside]:
                folder.mkdir(exist_ok=True)
                (folder / ENCODER).write_bytes(b"cut sho")
            export_model(tiny_t5(seed=2 if options else 1), tmp_path / "model", **options)
            assert beside(tmp_path) == {"model", "replaced", *(folder.name for folder in living + strangers)}
            assert all((folder / ENCODER).exists() for folder in [*living, *strangers, tmp_path / "replaced"])
    export_model(tiny_t5(seed=2), tmp_path / "model")
    assert beside(tmp_path) == {"model", "replaced", *(folder.name for folder in strangers)}, "they are dead now"


@pytest.mark.parametrize(
    "name",
    ["[x]*", ".hidden", "ünï-モデル", "a'b\"c", "new\nline", "deep/er/still"],
)
def test_any_name_will_do(tiny_t5, tmp_path: Path, monkeypatch, name: str) -> None:
    remnant = tmp_path / f".{name}.{hexadecimal('b')}.partial"
    if "/" not in name:
        remnant.mkdir()
    monkeypatch.chdir(tmp_path)
    for target in (name, tmp_path / name, f"{tmp_path}/{name}/", f"./{name}"):
        manifest = export_model(tiny_t5(), target, external_threshold_bytes=0)
    assert manifest == read_manifest(name) and not remnant.exists()
    export_model(tiny_t5(seed=2), name, overwrite=True)
    OrtNumpy(name)
    assert beside((tmp_path / name).parent) == {Path(name).name}


def test_links_stay_links(tiny_t5, whole: Path) -> None:
    link, dangling = whole.parent / "link", whole.parent / "dangling"
    link.symlink_to(whole)
    dangling.symlink_to(whole.parent / "later")
    export_model(tiny_t5(seed=2), link, overwrite=True)
    manifest = export_model(tiny_t5(seed=2), dangling)
    assert link.is_symlink() and dangling.is_symlink()
    assert read_manifest(whole) == read_manifest(link) == manifest == read_manifest(whole.parent / "later")
    assert beside(whole.parent) == {"whole", "link", "dangling", "later"}


@pytest.mark.parametrize("where", ["here", "above"])
def test_the_working_folder_is_not_pulled_away(tiny_t5, tmp_path: Path, monkeypatch, where: str) -> None:
    target = tmp_path / "x"
    working = target if where == "here" else target / "inside"
    working.mkdir(parents=True)
    monkeypatch.chdir(working)
    for name in (target, "." if where == "here" else ".."):
        with pytest.raises(ExportError, match="another folder"):
            export_model(tiny_t5(), name, overwrite=True)
    assert Path.cwd() == working and beside(tmp_path) == {"x"}


def with_loop(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop" / "x"


def with_file(folder: Path) -> Path:
    (folder / "file").write_text("mine")
    return folder / "file"


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc on this system")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        pytest.param(lambda folder: with_file(folder) / "x", "file", id="beneath-a-file"),
        pytest.param(with_file, "file", id="a-file"),
        pytest.param(lambda folder: folder / ("n" * 300), "n{300}.*name too long", id="long-name"),
        pytest.param(lambda folder: folder / ("n" * 250), "n{250}.*name too long", id="name-too-long-for-its-lock"),
        pytest.param(with_loop, "", id="loop-of-links"),
        pytest.param(lambda folder: "/", "another folder", id="root"),
        pytest.param(lambda folder: "/proc/x", "/proc/x", id="no-real-folder", marks=needs_proc),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_where_nothing_can_be_written(tiny_t5, tmp_path: Path, make: Any, match: str, overwrite: bool) -> None:
    target = make(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(ExportError, match=f"(?i){match}"):
        export_model(tiny_t5(), target, overwrite=overwrite)
    assert {name for name in snapshot(tmp_path) if not name.endswith(".lock")} == before.keys()


@pytest.mark.parametrize("folder", [None, "", b"x", "x\0y", "\ud800"], ids=repr)
def test_what_is_no_path(tiny_t5, tmp_path: Path, monkeypatch, folder: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (partial(export_model, tiny_t5()), read_manifest):
        with pytest.raises(InputError, match="folder"):
            use(folder)
    assert not list(tmp_path.iterdir())


# In other processes

SMALL: dict[str, Any] = dict(
    vocab_size=300, d_model=32, d_kv=12, d_ff=64, num_heads=4, num_layers=2, eos_token_id=1, pad_token_id=0
)
PRELOAD = ["torch", "pytest", "hypothesis", "tqdm", "filelock", "transformers.modeling_outputs"]
PRELOAD += ["t5accel.backends.ort_numpy", "transformers.models.t5.modeling_t5", "t5accel.graphs.export"]
PRELOAD += ["t5accel.models.random_init", "unittest.mock"]


class Child:
    """A process that calls ``function(*args, say)`` of this module; what it says can be awaited.

    It is forked from a process that has imported everything and done nothing, which takes milliseconds; forking pytest
    itself would copy threads and locks in whatever state they are.
    """

    context = None

    def __init__(self, function: Callable[..., Any], *args: Any):
        if Child.context is None:
            Child.context = multiprocessing.get_context("forkserver")
            Child.context.set_forkserver_preload(PRELOAD)
        self.pipe, theirs = Child.context.Pipe()
        self.process = Child.context.Process(target=run, args=(theirs, function, *args))
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        """The next thing that it says; ``EOFError`` where it has died."""
        assert self.pipe.poll(60), "the child does not answer"
        return self.pipe.recv()

    def last_word(self) -> Any:
        """The last thing that it says before it ends."""
        word = None
        while True:
            try:
                word = self.hear()
            except EOFError:
                self.process.join()
                return word


def run(pipe: Any, function: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own lock is shared between processes, and outlives those that are killed
    function(*args, pipe.send)


@pytest.fixture(scope="module")
def small() -> Callable[[int], Any]:
    return lambda seed: random_t5(SMALL, seed=seed)


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}


def export_and_die(folder: Path, last: int, say: Callable[[Any], None]) -> None:
    """Replace an export, and die by SIGKILL before change number ``last`` of the file system; say what they are."""
    model, changes = random_t5(SMALL, seed=2), []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[0], str) and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in CHANGES) and str(folder.parent) in str(args[0]):
            changes.append(event)
            if len(changes) == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    export_model(model, folder, overwrite=True)
    say(changes)


@needs_fork
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "every"])
def test_killed_before_any_change_the_old_or_the_new_export_is_there(small, tmp_path: Path, every: bool) -> None:
    old, target = tmp_path / "old", tmp_path / "here" / "model"
    before, template = export_model(small(1), old), snapshot(old)
    after = export_model(small(2), tmp_path / "new")
    shutil.copytree(old, target)
    changes = Child(export_and_die, target, 0).last_word()
    assert read_manifest(target) == after and len(changes) > 12
    away, there = (number for number, change in enumerate(changes, 1) if change == "os.rename")
    assert there == away + 1, "only between two renames there is none"
    for last in range(1, len(changes) + 1) if every else (1, away, there, there + 1):
        shutil.rmtree(target.parent)
        shutil.copytree(old, target)
        assert Child(export_and_die, target, last).last_word() is None, f"child {last} should be killed"
        if last <= away:
            assert read_manifest(target) == before
            assert {name: data for name, (data, *_) in snapshot(target).items()} == {
                name: data for name, (data, *_) in template.items()
            }
        else:
            assert read_manifest(target) == after if last > there else not target.exists()
        again = export_model(small(2), target, overwrite=True)
        assert again == after and beside(target.parent) == {"model"}, "the next one clears up, and the lock is free"


def export_and_count(folder: Path, seed: int, barrier: Any, marker: Path, say: Callable[[Any], None]) -> None:
    model, real = random_t5(SMALL, seed=seed), Path.write_bytes

    def write_bytes(path: Path, data: bytes) -> int:
        with marker.open("ab") as file:
            file.write(b"x")
        time.sleep(0.2)  # the other processes come in the meantime
        return real(path, data)

    Path.write_bytes = write_bytes
    barrier.wait(60)
    try:
        say(export_model(model, folder))
    except ExportError as error:
        say(f"ExportError: {error}")


def start_forkserver(say: Callable[[Any], None]) -> None:
    say(None)


def together(folder: Path, *seeds: int) -> tuple[list[Any], int]:
    """What processes that start at once say of their exports to one folder, and how many graphs were written."""
    Child(start_forkserver).last_word()
    barrier, marker = Child.context.Barrier(len(seeds)), folder.parent / "marker"
    children = [Child(export_and_count, folder, seed, barrier, marker) for seed in seeds]
    return [child.last_word() for child in children], marker.stat().st_size


@needs_fork
def test_processes_that_export_the_same_do_the_work_once(tmp_path: Path) -> None:
    answers, written = together(tmp_path / "model", 1, 1, 1)
    assert answers == [read_manifest(tmp_path / "model")] * 3
    assert written == 2, "two graphs, each once"
    assert beside(tmp_path) == {"model", "marker"}


def export_without_permission(folder: Path, say: Callable[[Any], None]) -> None:
    model, answers = random_t5(SMALL, seed=1), []
    export_model(model, folder / "warm")  # imports everything, for soon nothing can be read any more
    for name in ("unreadable", "closed"):
        shutil.copytree(folder / "warm", folder / name)
    (folder / "unreadable" / MANIFEST).chmod(0)
    (folder / "closed").chmod(0)
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)  # nobody
    for attempt in (
        *(partial(export_model, model, folder / name, overwrite=True) for name in ("x", "x/y", "warm", "closed")),
        *(partial(read_manifest, folder / name) for name in ("unreadable", "closed", "warm")),
    ):
        try:
            answers.append(type(attempt()).__name__)
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")
    say(answers)


@needs_fork
def test_without_permission() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own is closed to others
        answers = Child(export_without_permission, Path(name)).last_word()
        Path(name).chmod(0o755)
    assert answers[-1] == "Manifest"
    for answer in answers[:-1]:
        assert re.match("ExportError: .*[Pp]ermission denied", answer)


def test_waiting_for_another_writer_is_said(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("t5accel.graphs.atomic_write.PATIENCE_S", 0.05)
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with locked(tmp_path / "export"):
            entered.set()
            leave.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(10)
    threading.Timer(0.3, leave.set).start()
    with locked(tmp_path / "export"):
        pass
    holder.join()
    assert capsys.readouterr().err == f"Another process is writing {tmp_path / 'export'}: waiting for its end.\n"
