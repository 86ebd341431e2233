"""Ray, connected to a cluster or started on this machine, and ended with whoever asked for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from t5accel import machine
from t5accel.errors import ClusterError, InputError, MissingPackageError, install

OBJECTS = 200 << 20  # bytes for what travels between processes of one machine: descriptions and answers, no data


@contextmanager
def connected(address: str | None = None) -> Iterator[Any]:
    """The module ``ray``, of which a program that has connected by itself keeps its own connection.

    Args:
        address: of a cluster, as of ``ray.init``; by default one is started here, on the cores that this process may
            use, and ends with the block.

    Raises:
        MissingPackageError: ray is not installed.
        ClusterError: there is no cluster at that address, or none can be started.

    >>> with connected("127.0.0.1:1") as ray: pass
    Traceback (most recent call last):
    t5accel.errors.ClusterError: No cluster of Ray answers at '127.0.0.1:1': Connection refused
    """
    _look_for(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingPackageError(f"The engine ray needs Ray: {install('ray')}.") from error
    if ray.is_initialized():
        yield ray
        return
    here = {} if address else dict(num_cpus=machine.cpu_threads(), include_dashboard=False, object_store_memory=OBJECTS)
    try:
        ray.init(address=address or "local", logging_level="error", log_to_driver=False, **here)
    except Exception as error:  # of many kinds
        where = f"answers at {address!r}" if address else "could be started"
        why = str(error).strip().partition("\n")[0]
        token = " If it wants a token, set RAY_AUTH_MODE=token." if address else ""
        raise ClusterError(f"No cluster of Ray {where}: {why.rstrip('.'):.300}.{token}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def cores_for(ray: Any, count: int, threads: int, address: str | None) -> int:
    """How many of so many threads each the cluster has cores for now.

    Raises:
        InputError: for fewer than ``count``, in a cluster of this machine alone: others may grow, and are waited for.
    """
    found = int(ray.cluster_resources().get("CPU", 0)) // threads
    if found < count and not address:
        cores = machine.cpu_threads()
        raise InputError(f"{count} of {threads} threads each were asked for, and there are {cores} cores: give fewer.")
    return max(found, 1)


def _look_for(address: str | None) -> None:
    """Ray itself ends the process when nobody is there."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise ClusterError(f"No cluster of Ray answers at {address!r}: {error.strerror or error}") from error
