"""Servers as processes of this machine: started, asked until they are ready, watched, and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from t5accel.errors import PeerError

ROOT = Path(__file__).resolve().parents[2]
READY_WITHIN_S = 120.0


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Server:
    """How a server is started, and how it is asked.

    Attributes:
        name: what a reader calls it.
        command: ``{port}`` stands for the port, in arguments and in ``environment``.
        base: of the URL, behind the port.
        path: where requests are posted, behind that; and ``ready`` is where it says that it is ready.
        streams: whether it can hand out a token before the answer is complete.
        environment: what the process has beyond ours; ``None`` takes away.
        precision: of the weights. In fp32 its answers have to be those of our engine.
    """

    name: str
    command: Sequence[str]
    base: str = ""
    path: str = "/generate"
    ready: str = "/health/ready"
    streams: bool = False
    environment: Mapping[str, str | None] = field(default_factory=dict)
    precision: str = "fp32"


def ours(model: str, *, precision: str = "fp32", name: str | None = None, **flags: Any) -> Server:
    """``t5accel serve``: continuous batching.

    >>> ours("mini", rows=8).command[2:]
    ['t5accel', 'serve', '--model=mini', '--precision=fp32', '--port={port}', '--rows=8']
    """
    given = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
    command = [
        sys.executable,
        "-m",
        "t5accel",
        "serve",
        f"--model={model}",
        f"--precision={precision}",
        "--port={port}",
    ]
    return Server(name or "t5accel serve", [*command, *given], streams=True, precision=precision)


def other(kind: str, model: str, *, name: str, threads: int) -> Server:
    """One of `other_servers`."""
    command = [
        sys.executable,
        "-m",
        "bench.serving.other_servers",
        kind,
        model,
        "--port={port}",
        f"--threads={threads}",
    ]
    return Server(name, command)


class Running:
    """A server that runs, until the ``with`` block ends.

    Args:
        server: which one.
        log: takes what it writes.
        port: by default one that is free.

    Attributes:
        url: what requests go to, without the path.
        started_s: from the start of the process until it was ready.

    Raises:
        PeerError: it does not get ready; the end of its log is quoted.

    >>> with Running(Server("nothing", [sys.executable, "-c", "print('bye')"]), Path(os.devnull)): pass
    Traceback (most recent call last):
    t5accel.errors.PeerError: nothing ended with exit status 0 before it was ready: ...
    """

    def __init__(self, server: Server, log: Path, port: int | None = None):
        self.server, self.log, self.port = server, log, port or free_port()
        self.url = f"http://127.0.0.1:{self.port}{server.base}"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment: dict[str, str | None] = {**os.environ, "PYTHONPATH": path, **server.environment}
        began = time.perf_counter()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [part.replace("{port}", str(self.port)) for part in server.command],
                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={name: value for name, value in environment.items() if value is not None},
            )  # fmt: skip
        try:
            self._until_ready()
        except BaseException:
            self.end()
            raise
        self.started_s = time.perf_counter() - began

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def _until_ready(self) -> None:
        ends = time.perf_counter() + READY_WITHIN_S
        while time.perf_counter() < ends:
            if (status := self.process.poll()) is not None:
                said = self.log.read_text(errors="replace")[-2000:]
                raise PeerError(f"{self.server.name} ended with exit status {status} before it was ready: {said}")
            try:
                with urlopen(f"http://127.0.0.1:{self.port}{self.server.ready}", timeout=5) as response:
                    if response.status == 200:
                        return
            except (URLError, OSError):
                time.sleep(0.02)
        raise PeerError(f"{self.server.name} was not ready within {READY_WITHIN_S:g} s.")

    def kill(self) -> None:
        """At once, as a machine that fails."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """In order, if it ends within twenty seconds; else at once."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
