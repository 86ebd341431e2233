"""The doctor on installations that lack this and that."""

from importlib import metadata
from subprocess import CompletedProcess

import pytest

from t5accel import doctor
from t5accel.doctor import Check, diagnose
from t5accel.errors import ModelUnavailableError, install


@pytest.fixture
def installed(monkeypatch):
    """Sets which distributions there are, by name and version; modules are looked up among the same names."""

    def install(**versions: str) -> None:
        names = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(name):
            if name not in names:
                raise metadata.PackageNotFoundError(name)
            return names[name]

        monkeypatch.setattr(doctor.metadata, "version", version)
        monkeypatch.setattr(doctor, "find_spec", lambda module: object() if module in versions else None)

    return install


def test_this_installation_is_sound():
    checks = diagnose()
    assert [check for check in checks if check.ok is False] == []
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        assert check.found and check.needed_for and (check.ok or check.remedy or check.name == "GPU")


def test_what_a_report_of_a_fault_needs_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path / "cache"))
    found = {check.name: check.found for check in diagnose()}
    assert found["t5accel"] == metadata.version("t5accel") and found["cache"] == str(tmp_path / "cache" / "exports")
    assert found["processor"].startswith(f"{doctor.machine.cpu_threads()} threads, ")
    assert {"fastapi", "uvicorn", "openvino", "pyarrow", "ray", "node"} <= found.keys()
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert doctor._cache().ok is False and "T5ACCEL_CACHE" in doctor._cache().remedy
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    assert doctor._node().ok is None and "Node.js" in doctor._node().remedy


def test_what_is_required_and_missing_is_wrong_what_is_optional_is_not(installed):
    installed()
    assert doctor._package("torch", "torch", "everything", required=True) == Check(
        "torch", False, "missing", "everything", "pip install torch"
    )
    check = doctor._package("datasets", "datasets", "evaluation.dataset()", "course")
    assert check.ok is None and check.remedy == install("course")


@pytest.mark.parametrize(
    ("version", "ok"),
    [
        ("4.57.0", True), ("4.57.6", True), ("5.0.0rc1", True), ("5.23.0", True), ("4.56.2", False), ("3.99", False),
        ("5.39.1", True), ("5.40.0", False), ("6.0.dev0", False),
    ],
)  # fmt: skip
def test_transformers_must_be_of_a_supported_line(installed, version, ok):
    installed(transformers=version)
    check = doctor._transformers()
    assert (check.ok, check.found) == (ok, version) and (ok or "transformers>=4.57,<5.40" in check.remedy)


def test_one_onnxruntime_is_right_two_are_wrong_and_none_is_optional_where_torch_is(installed):
    installed()
    assert doctor._onnxruntime().ok is doctor._of_torch("torch").ok is doctor._transformers().ok is False
    installed(torch="2.9.1")
    assert doctor._onnxruntime().ok is None and install("cpu") in doctor._onnxruntime().remedy
    for name in ("onnxruntime", "onnxruntime_gpu"):
        installed(**{name: "1.23.2"})
        assert doctor._onnxruntime().ok and doctor._onnxruntime().found == f"{name.replace('_', '-')} 1.23.2"
    installed(onnxruntime="1.23.2", onnxruntime_gpu="1.23.2")
    check = doctor._onnxruntime()
    assert check.ok is False and "pip uninstall onnxruntime onnxruntime-gpu" in check.remedy


def test_a_bundled_model_with_files_missing_or_none_at_all_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "data_folder", lambda: tmp_path)
    (tmp_path / "mini-t5").mkdir()
    (tmp_path / "mini-t5" / "config.json").write_text("{}")
    check = doctor._bundled_model()
    assert check.ok is False and check.found == "model.safetensors, tokenizer.json missing" and check.remedy

    def nowhere():
        raise ModelUnavailableError("No data folder: install the wheel.")

    monkeypatch.setattr(doctor, "data_folder", nowhere)
    check = doctor._bundled_model()
    assert (check.ok, check.found, check.remedy) == (False, "missing", "No data folder: install the wheel.")


def test_the_gpu_is_optional_and_a_torch_that_does_not_load_is_reported(installed, monkeypatch):
    installed(torch="2.9.1")
    monkeypatch.setattr(doctor.machine, "facts", lambda: {"gpu": None})
    assert doctor._gpu().ok is None
    monkeypatch.setattr(doctor.machine, "facts", lambda: {"gpu": {"name": "H200", "memory_bytes": 1}})
    assert doctor._gpu().ok is True and doctor._gpu().found == "H200"

    def broken():
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(doctor.machine, "facts", broken)
    assert doctor._gpu().ok is False and "libcudart.so.13" in doctor._gpu().remedy
    installed()
    assert doctor._gpu().ok is None  # no torch: the check for torch says so


def test_exports_run_without_torch_and_transformers(installed):
    installed(t5accel="0.1", onnxruntime="1.23.2", onnx="1.16", tokenizers="0.22")
    checks = {check.name: check for check in diagnose()}
    assert [check for check in checks.values() if check.ok is False] == []
    assert checks["torch"].ok is checks["transformers"].ok is None and checks["torch"].remedy == install("cpu")


def test_a_source_tree_an_old_node_and_a_file_in_place_of_the_cache(installed, tmp_path, monkeypatch):
    installed(transformers="5.0.0")
    monkeypatch.setattr(doctor.metadata, "version", lambda name: (_ for _ in ()).throw(metadata.PackageNotFoundError))
    assert (doctor._transformers().ok, doctor._transformers().found) == (True, "present")
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "node")
    for said, ok in (("v20.11.0\n", True), ("v22.1.0", True), ("v20.9.0", None), ("v12.22.9", None), ("", None)):
        answer = CompletedProcess([], not said, said, "")
        monkeypatch.setattr(doctor.subprocess, "run", lambda *_, answer=answer, **__: answer)
        assert doctor._node().ok is ok and "20.11" in doctor._node().remedy
    (tmp_path / "file").touch()
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    for folder in ("file", "file/below", "itself", 300 * "x"):
        monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path / folder))
        assert doctor._cache().ok is False
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path / "closed"))

    def closed(path):
        raise PermissionError if "closed" in str(path) else FileNotFoundError

    for look in ("stat", "lstat"):
        monkeypatch.setattr(doctor.os, look, closed)
    assert doctor._cache().ok is False


def test_what_is_damaged_is_a_finding_and_not_the_end(tmp_path, monkeypatch):
    (tmp_path / "gradio-1.0.dist-info").mkdir()  # without METADATA
    (tmp_path / "gradio.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert (doctor._gradio().ok, doctor._gradio().found) == (True, "present")
    (tmp_path / "node").write_bytes(b"\x7fELF")
    (tmp_path / "node").chmod(0o755)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: str(tmp_path / "node"))
    assert (doctor._node().ok, doctor._node().found) == (None, "does not run")

    def broken(module):
        raise RuntimeError(f"no {module}\nat all")

    monkeypatch.setattr(doctor, "find_spec", broken)
    checks = {check.name: check for check in diagnose()}
    assert (checks["rouge-score"].ok, checks["rouge-score"].found) == (False, "RuntimeError: no rouge_score")
    assert checks["torch"].ok is False and checks["python"].ok


@pytest.mark.parametrize(("capability", "advice"), [
    ([8, 6], "tensorrt-rtx-cu13"), ([8, 9], "tensorrt-rtx-cu13"), ([12, 0], "tensorrt-rtx-cu13"),
    ([9, 0], "NVIDIA's index"), ([8, 0], "NVIDIA's index"), ([7, 5], "NVIDIA's index")])  # fmt: skip
def test_the_tensorrt_that_runs_on_the_card_is_named(installed, monkeypatch, capability, advice):
    installed(torch="2.9.1")
    monkeypatch.setattr(doctor.machine, "facts", lambda: {"gpu": {"name": "a card", "capability": capability}})
    check = doctor._tensorrt()
    assert check.ok is None and advice in check.remedy
    installed(torch="2.9.1", tensorrt_rtx="1.2")
    assert doctor._tensorrt() == Check("tensorrt-rtx", True, "1.2", "runtime='tensorrt'")
