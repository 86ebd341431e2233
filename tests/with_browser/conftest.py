"""JupyterLab as `make lab` starts it, on a copy of the notebooks, and a headless Chromium to open it in."""

import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "browser"  # logs, screenshots and the copy; made afresh by every run
START_S, STOP_S = 90, 20
TEST_S = 720  # a notebook may run for 600 s; beyond this something hangs that has no limit of its own

# A new JupyterLab asks whether it may fetch news, in front of everything else.
NOTIFICATIONS = {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True}


def lab_command() -> list[str]:
    """The command of `make lab`, as make itself prints it, with the absolute path of its Python."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    printed = subprocess.check_output(["make", "-n", "lab"], cwd=ROOT, env=environment, text=True)
    python, *arguments = shlex.split(printed.splitlines()[-1])
    return [str(ROOT / python), *arguments]


def without_outputs(book: dict[str, Any]) -> dict[str, Any]:
    """The notebook as if it had never run: a number in front of a cell then comes from this run."""
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return book


@dataclass
class Lab:
    """A running server and the folder that it serves."""

    url: str
    token: str
    folder: Path
    process: subprocess.Popen

    def api(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(
            f"{self.url}/api/{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or "null")

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, f"JupyterLab ended at once: see {OUT / 'jupyter.log'}"
            with suppress(OSError):
                self.api("status")
                return
            assert time.monotonic() < deadline, f"JupyterLab did not answer in {START_S} s: see {OUT / 'jupyter.log'}"
            time.sleep(0.2)

    def kernels(self) -> list[dict[str, Any]]:
        for _ in range(50):
            try:
                return self.api("kernels")
            except urllib.error.HTTPError as error:
                if error.code != 500:  # the server's answer while a kernel is about to start
                    raise
            time.sleep(0.2)
        raise AssertionError(f"JupyterLab cannot list its kernels: see {OUT / 'jupyter.log'}")

    def stop_kernels(self) -> None:
        for kernel in self.kernels():
            self.api(f"kernels/{kernel['id']}", "DELETE")
        assert self.kernels() == []

    def stop(self) -> None:
        """Politely first, so that it ends its kernels; a kernel whose server is gone ends by itself."""
        with suppress(OSError):
            self.api("shutdown", "POST")
        for request in (signal.SIGTERM, signal.SIGKILL, None):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
                return
            if request:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, request)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    shutil.rmtree(OUT, ignore_errors=True)
    folder, private = OUT / "copy" / "notebooks", OUT / "private"
    folder.mkdir(parents=True)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        book = without_outputs(json.loads(path.read_text(encoding="utf-8")))
        (folder / path.name).write_text(json.dumps(book), encoding="utf-8")
    settings = private / "config/lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(NOTIFICATIONS))

    token = secrets.token_hex(16)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it holds playwright
    environment |= {
        "JUPYTER_TOKEN": token,
        "JUPYTER_CONFIG_DIR": str(private / "config"),
        "JUPYTER_DATA_DIR": str(private / "data"),
        "JUPYTER_RUNTIME_DIR": str(private / "runtime"),
        "IPYTHONDIR": str(private / "ipython"),
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0", "--allow-root"]
    with (OUT / "jupyter.log").open("w") as log:
        process = subprocess.Popen(
            [*lab_command(), *options],
            cwd=folder.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all of it can be ended, and nothing else
        )
    lab = Lab(f"http://127.0.0.1:{port}", token, folder, process)
    try:
        lab.wait_until_ready()
        yield lab
    finally:
        lab.stop()
        assert process.poll() is not None


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    assert os.environ.get("CHROMIUM"), "CHROMIUM is not set: run `make test-browser`, which finds a browser"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ["CHROMIUM"],
            # No sandbox in containers and as root; it opens our own server only.
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        yield browser
        browser.close()


@pytest.fixture
def page(lab: Lab, browser: Browser) -> Iterator[Page]:
    """An empty page; the kernels that it starts end with it."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    try:
        yield context.new_page()
    finally:
        context.close()
        lab.stop_kernels()


@pytest.fixture(autouse=True)
def overall_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"the test took more than {TEST_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(TEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
