"""Batch jobs on a Ray cluster, by actors that answer shards."""

# Only descriptions of shards travel. An actor reads its rows and writes its file itself, so that memory does not grow
# with the data, and a job resumes by the same files and manifest as on one machine. Ray's own checkpoints are not used:
# in our trials they saved nothing (``CheckpointConfig`` of ray 2.60, on a local disk).

from __future__ import annotations

import logging
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from t5accel import machine
from t5accel.checks import is_number
from t5accel.errors import ClusterError, InputError, JobError, MissingPackageError, T5AccelError, install
from t5accel.serve.batch.generate import BatchGenerator
from t5accel.serve.batch.job import Job, Shard, process_shard
from t5accel.serve.batch.output import RESUME, ShardRecord

OBJECTS = 200 << 20  # bytes for what travels between processes of one machine: descriptions and answers, no data
WINDOW = 1000  # shards that Ray is handed at a time
BEAT_S = 1.0


@contextmanager
def connected(address: str | None = None) -> Iterator[Any]:
    """Yield the module ``ray``, connected to a cluster or to one started here.

    The latter has the cores that this process may use, and ends with the block. A program's own connection is kept.
    ``ClusterError``: no cluster answers, or none can be started. ``MissingPackageError``: ray is not installed.

    >>> with connected("127.0.0.1:1") as ray: pass
    Traceback (most recent call last):
    t5accel.errors.ClusterError: No cluster of Ray answers at '127.0.0.1:1': Connection refused
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if port.isdigit():  # Ray itself ends the process if nobody answers
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise ClusterError(f"No cluster of Ray answers at {address!r}: {error.strerror or error}") from error
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


def workers_for(ray: Any, count: int, threads: int, address: str | None) -> int:
    """How many workers of ``threads`` threads the cluster has cores for now."""
    found = int(ray.cluster_resources().get("CPU", 0)) // threads
    if found < count and not address:  # other clusters may grow, and are waited for
        cores = machine.cpu_threads()
        raise InputError(f"threads must leave cores for {count} workers, got {threads} with {cores} cores. Give fewer.")
    return max(found, 1)


class Heartbeat:
    """Counts signs of life of actors, in a separate process."""

    def __init__(self) -> None:
        self._beats = 0

    def record(self) -> None:
        self._beats += 1

    def beats(self) -> int:
        return self._beats


class Actor:
    """A worker that answers shards, with a heartbeat at most every second."""

    def __init__(self, job: Job, beat: Callable[[], Any]):
        self.job, self._beat, self._next_s = job, beat, 0.0
        self._answer: BatchGenerator | None = None

    def __call__(self, batch: Mapping[str, Sequence[bytes]]) -> dict[str, list[bytes]]:
        """Map pickled shards to pickled records or errors."""
        return {"made": [pickle.dumps(self._made(pickle.loads(shard))) for shard in batch["shard"]]}

    def _made(self, shard: Shard) -> ShardRecord | T5AccelError:
        try:
            if self._answer is None:
                self._answer, found = self.job.model.open(self.job.settings)
                if found != self.job.what:
                    raise InputError(f"The model of an actor must be {self.job.what}, got {found}. Give all the same.")
                self._alive()
            return process_shard(self._answer, self.job.settings, self.job.output, shard, self._alive)
        except T5AccelError as error:
            return error

    def _alive(self, *_: int) -> None:
        if (now := time.monotonic()) >= self._next_s:
            self._next_s = now + BEAT_S
            self._beat()


def on_ray(
    job: Job,
    pending: Sequence[Shard],
    answer: BatchGenerator | None,
    on_batch: Callable[[int, int], Any],
    *,
    address: str | None = None,
    unhealthy_after_s: float = 600.0,
) -> Iterator[ShardRecord]:
    """Engine of `job.run`: shards in any order, by actors of the model's threads (default 1) on all cores.

    The machines of a cluster at ``address`` must have t5accel, and see input, output and model under the same paths.
    ``JobError``: Ray gave up, or no actor gave a sign of life for ``unhealthy_after_s`` seconds: a pool may wait for a
    dead one for ever. Raises also as `connected` and `process_shard`.
    """
    del answer  # an actor opens its own
    if not is_number(unhealthy_after_s) or not unhealthy_after_s > 0:
        raise InputError(f"unhealthy_after_s must be seconds above 0, got {unhealthy_after_s!r}.")
    if not pending:
        return
    threads = job.model.threads or 1
    job = replace(job, model=replace(job.model.absolute(), threads=threads))
    shards = [replace(shard, source=replace(shard.source, path=shard.source.path.absolute())) for shard in pending]
    with connected(address) as ray:
        from ray import data

        logging.getLogger("ray.data").setLevel(logging.ERROR)  # which the import has set
        data.DataContext.get_current().enable_progress_bars = False
        most = workers_for(ray, 1, threads, address)
        heartbeat = ray.remote(num_cpus=0, max_restarts=-1)(Heartbeat).remote()
        for first in range(0, len(shards), WINDOW):
            items = [{"shard": pickle.dumps(shard)} for shard in shards[first : first + WINDOW]]
            actors = min(len(items), most)
            made = data.from_items(items, override_num_blocks=len(items)).map_batches(
                Actor,
                batch_size=1,
                batch_format="numpy",
                num_cpus=threads,
                compute=data.ActorPoolStrategy(min_size=1, max_size=actors, initial_size=actors),
                fn_constructor_args=(job, heartbeat.record.remote),
            )
            for row in _watched(made.iter_rows(), partial(_beats, ray, heartbeat), unhealthy_after_s):
                one = pickle.loads(row["made"])
                if isinstance(one, T5AccelError):
                    raise one
                on_batch(one.done.answered, one.done.tokens)
                yield one


def _beats(ray: Any, heartbeat: Any) -> int | None:
    try:
        return ray.get(heartbeat.beats.remote(), timeout=BEAT_S)
    except ray.exceptions.RayError:  # it is being started again, or all is lost
        return None


def _watched(rows: Iterable[Any], beats: Callable[[], int | None], unhealthy_after_s: float) -> Iterator[Any]:
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        try:
            for row in rows:
                found.put(row)
            found.put(None)
        except BaseException as error:
            found.put(error)

    threading.Thread(target=read, name="t5accel-rows", daemon=True).start()
    heard, count = time.monotonic(), None
    while True:
        try:
            row = found.get(timeout=BEAT_S)
        except queue.Empty:
            new, now = beats(), time.monotonic()
            if new is not None and new != count:
                heard, count = now, new
            elif now - heard > unhealthy_after_s:
                raise JobError(f"Nothing was heard of any actor for {now - heard:.0f} s. {RESUME}") from None
            continue
        if row is None:
            return
        if isinstance(row, BaseException):
            why = str(row).strip().splitlines() or [""]
            raise JobError(f"Ray gave up ({type(row).__name__}: {why[-1]:.300}). {RESUME}") from row
        heard = time.monotonic()
        yield row
