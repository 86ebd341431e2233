"""What Windows refuses and does otherwise, imitated on Linux: files in use stay, line ends and letters differ."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner

from t5accel import cli_options
from t5accel.api import open_backend
from t5accel.cli import app
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import ExportError
from t5accel.graphs.export import export_model
from t5accel.graphs.manifest import read_manifest
from t5accel.graphs.rewriting import check_external_data

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="it reads /proc")


def in_use() -> Iterator[str]:
    """The files that this process has open or mapped."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # that of the listing itself
            pass
    for line in Path("/proc/self/maps").read_text().splitlines():
        yield line.split(maxsplit=5)[-1]


@pytest.fixture
def as_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below ``tmp_path`` files in use can be neither moved nor deleted; text files are written as Windows does."""
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def refusing(name: str, counted: int) -> None:
        real = getattr(os, name)

        def call(*paths: Any, dir_fd: int | None = None, **options: Any) -> Any:
            above = Path(os.readlink(f"/proc/self/fd/{dir_fd}")) if dir_fd is not None else Path()
            for path in paths[:counted]:
                path = os.path.abspath(above / path)
                # A folder that is listed is open here, and not there.
                held = [one for one in in_use() if one == path or one.startswith(f"{path}/")]
                if path.startswith(f"{tmp_path}/") and any(map(os.path.isfile, held)):
                    raise PermissionError(13, "The process cannot access the file", path)
            return real(*paths, **({} if dir_fd is None else {"dir_fd": dir_fd}), **options)

        monkeypatch.setattr(os, name, call)

    for name, counted in {"unlink": 1, "remove": 1, "rmdir": 1, "rename": 2, "replace": 2}.items():
        refusing(name, counted)

    def open_(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
              newline: Any = None, *rest: Any, real: Any = io.open) -> Any:  # fmt: skip
        if "b" not in mode and str(file).startswith(str(tmp_path)):
            encoding = "cp1252" if encoding in (None, "locale") else encoding
            newline = "\r\n" if newline is None and not mode.startswith("r") else newline
        return real(file, mode, buffering, encoding, errors, newline, *rest)

    monkeypatch.setattr(io, "open", open_)
    monkeypatch.setattr("builtins.open", open_)


def ran(*arguments: Any) -> str:
    answer = CliRunner().invoke(app, [*map(str, arguments)])
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_exports_are_made_converted_and_replaced(as_on_windows, tmp_path: Path) -> None:
    for precision in ("fp32", "int8", "fp16"):
        ran("export", "--model", "mini", "--precision", precision, "--out", tmp_path / "export", "--overwrite")
        assert "suis" in ran("run", "--model", tmp_path / "export", "translate English to French: I am tired.")
    ran("export", "--model", "mini", "--encoder", "--out", tmp_path / "encoder")


def test_an_export_that_is_in_use_is_kept(as_on_windows, tmp_path: Path) -> None:
    export_model("mini", tmp_path / "export", external_threshold_bytes=0)  # mapped by who opens it
    backend, _, _ = open_backend(tmp_path / "export")
    with pytest.raises(ExportError, match="export could not be written: The process cannot access the file"):
        export_model("mini-d1", tmp_path / "export", overwrite=True)
    assert greedy(backend, [[100, 200, 1]], max_new_tokens=3).sequences.size
    del backend
    assert read_manifest(tmp_path / "export").source["name"] == "mini"


def test_a_gate_runs_candidates_and_deletes_them(as_on_windows, tmp_path: Path, dev: Path) -> None:
    ran("quantize", "--model", "mini", "--out", tmp_path / "int8", "--eval", dev, "--max-loss", 100)
    assert not [*tmp_path.glob("tmp*")]
    ran("cache", "clear", "--yes")


def test_a_job_is_done_and_gone_on_with(as_on_windows, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"I am tired.\n\nWhere is my bag?\n")
    for _ in range(2):
        ran("batch", tmp_path / "in.txt", tmp_path / "out", "--prefix", "translate English to French: ")
    written = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert len(written) >= 4 and not [path for path, content in written.items() if b"\r" in content]


def test_redirected_output_has_the_letters_that_a_code_page_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252"))
    cli_options.use_utf8("linux")
    assert sys.stdout.encoding == "cp1252"
    cli_options.use_utf8("win32")
    print("Unde este geanta mea? Ștefan", flush=True)
    assert written.getvalue().decode("utf-8").startswith("Unde este geanta mea? Ștefan")


@pytest.mark.parametrize(
    "name", ["C:\\x", "C:x", "..\\x", "a\\b", "a/b", "../x", "\\\\server\\x", "//server/x", "plain"]
)
def test_a_graph_names_no_file_that_lies_elsewhere_on_any_system(tmp_path: Path, name: str) -> None:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=name)
    graph = tmp_path / "graph.onnx"
    graph.write_bytes(helper.make_model(helper.make_graph([], "g", [], [], [weight])).SerializeToString())
    if "/" not in name:
        (tmp_path / name).write_bytes(bytes(4))  # here every backslash is a letter
    if name == "plain":
        return check_external_data(graph)
    with pytest.raises(ExportError, match="which is not a file of this export"):
        check_external_data(graph)


CTRL_C = """
import asyncio, signal
from types import SimpleNamespace
import uvicorn.server

asyncio.SelectorEventLoop.add_signal_handler = asyncio.AbstractEventLoop.add_signal_handler
uvicorn.server.HANDLED_SIGNALS = (signal.SIGINT,)
for name in ("SIGTERM", "SIGKILL", "SIGHUP", "SIGUSR1"):
    delattr(signal, name)
from t5accel.serve import server
from t5accel.serve.settings import Settings

drained = []
scheduler = SimpleNamespace(running=1, waiting=0, drain=drained.append)


async def app(scope, receive, send):
    await receive()
    await send({"type": "lifespan.startup.complete"})
    asyncio.get_running_loop().call_later(0.2, signal.raise_signal, signal.SIGINT)
    while not drained:
        await asyncio.sleep(0.01)
    shutdown = asyncio.ensure_future(receive())
    await asyncio.sleep(0.5)
    print(drained, "waits" if not shutdown.done() else "does not wait", flush=True)
    scheduler.running = 0  # the last request has its answer
    await shutdown
    await send({"type": "lifespan.shutdown.complete"})


settings = Settings(port=0, shutdown_grace_s=20)
try:
    server.run_server(app, scheduler, settings, server.bound(settings))
except KeyboardInterrupt:  # uvicorn raises its signal again when it has ended
    pass
print("ended")
"""


def test_ctrl_c_drains_a_server_where_nothing_can_send_sigterm() -> None:
    """Windows has SIGINT, but no event loop that takes signals. The signal may end the process: it has its own."""
    pytest.importorskip("uvicorn")
    run = subprocess.run([sys.executable, "-c", CTRL_C], capture_output=True, text=True, timeout=120)
    assert run.stdout.splitlines() == ["[20.0] waits", "ended"], run.stderr[-2000:]
