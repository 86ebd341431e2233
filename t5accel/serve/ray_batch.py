"""Shards of a batch job on a Ray cluster: a pool of actors that each hold the model, through which Ray Data streams.

Only descriptions of shards travel. An actor reads its rows and writes its file itself, so that memory does not grow
with the data, and a job goes on by the same files and manifest as on one machine. Ray's own checkpoints are not used:
in our trials they saved nothing (``CheckpointConfig`` of ray 2.60, on a local disk).
"""

from __future__ import annotations

import logging
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from t5accel.checks import is_number
from t5accel.errors import InputError, JobError, T5AccelError
from t5accel.serve.batch.generate import BatchGenerator
from t5accel.serve.batch.job import Job, Shard, process_shard
from t5accel.serve.batch.output import ShardRecord
from t5accel.serve.ray_cluster import connected, cores_for

WINDOW = 1000  # shards that Ray is handed at a time
BEAT_S = 1.0


class Heartbeat:
    """Counts signs of life, in a process of its own: an actor that is dead or stuck gives none.

    >>> heartbeat = Heartbeat()
    >>> heartbeat.beat()
    >>> heartbeat.beats()
    1
    """

    def __init__(self) -> None:
        self._beats = 0

    def beat(self) -> None:
        """One more."""
        self._beats += 1

    def beats(self) -> int:
        """So far."""
        return self._beats


class Actor:
    """Holds the model, and does shards.

    Args:
        job: whose model it opens, with the first shard.
        beat: is called when something was done, but not more often than once a second.

    >>> from t5accel.serve.batch.job import Model, Settings
    >>> from t5accel.serve.batch.output import Output
    >>> actor = Actor(Job(Model(), Settings(), Output("out"), {}), lambda: None)
    >>> actor({"shard": []})
    {'made': []}
    """

    def __init__(self, job: Job, beat: Callable[[], Any]):
        self.job, self._beat, self._next_s = job, beat, 0.0
        self._answer: BatchGenerator | None = None

    def __call__(self, batch: Mapping[str, Sequence[bytes]]) -> dict[str, list[bytes]]:
        """Ray Data's batches: pickled shards -> the record of each, or the error that was raised on purpose."""
        return {"made": [pickle.dumps(self._made(pickle.loads(shard))) for shard in batch["shard"]]}

    def _made(self, shard: Shard) -> ShardRecord | T5AccelError:
        try:
            if self._answer is None:
                self._answer, found = self.job.model.open(self.job.settings)
                if found != self.job.what:
                    raise InputError(f"Where an actor runs the model is another one: {found}, here {self.job.what}.")
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
    stuck_s: float = 600.0,
) -> Iterator[ShardRecord]:
    """An engine of `serve.batch.job.run`: all shards, by as many actors as the cluster has cores for.

    Args:
        job: with ``threads`` of each actor, by default 1.
        pending: done in any order.
        answer: of this process; given up.
        on_batch: told of every shard.
        address: of a cluster, whose machines have t5accel, and see input, output and model under the same paths; by
            default one is started here, and ends with the job.
        stuck_s: when nothing was heard of any actor for so long, the job ends: a pool may wait for a dead one for ever.

    Raises:
        MissingPackageError, ClusterError: as of `ray_session.connected`.
        JobError, InputError: as of `job.process_shard`, wherever it was raised; or Ray gave up, or is stuck.
    """
    del answer
    if not is_number(stuck_s) or stuck_s <= 0:
        raise InputError(f"stuck_s is {stuck_s!r}; give seconds above 0.")
    if not pending:
        return
    threads = job.model.threads or 1
    job = replace(job, model=replace(job.model.absolute(), threads=threads), output=job.output.absolute())
    shards = [replace(shard, source=replace(shard.source, path=shard.source.path.absolute())) for shard in pending]
    with connected(address) as ray:
        from ray import data

        logging.getLogger("ray.data").setLevel(logging.ERROR)  # which the import has set
        data.DataContext.get_current().enable_progress_bars = False
        most = cores_for(ray, 1, threads, address)
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
                fn_constructor_args=(job, heartbeat.beat.remote),
            )
            for row in _watched(made.iter_rows(), partial(_beats, ray, heartbeat), stuck_s):
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


def _watched(rows: Iterable[Any], beats: Callable[[], int | None], stuck_s: float) -> Iterator[Any]:
    """Rows as they come. When none comes and there is no sign of life for so long, ``JobError``."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        try:
            for row in rows:
                found.put(row)
            found.put(None)
        except BaseException as error:
            found.put(error)

    threading.Thread(target=read, name="t5accel-rows", daemon=True).start()
    heard, count, goes_on = time.monotonic(), None, "What is done is kept, and the same command goes on."
    while True:
        try:
            row = found.get(timeout=BEAT_S)
        except queue.Empty:
            new, now = beats(), time.monotonic()
            if new is not None and new != count:
                heard, count = now, new
            elif now - heard > stuck_s:
                raise JobError(f"Nothing was heard of any actor for {now - heard:.0f} s. {goes_on}") from None
            continue
        if row is None:
            return
        if isinstance(row, BaseException):
            why = str(row).strip().splitlines() or [""]
            raise JobError(f"Ray gave up ({type(row).__name__}: {why[-1]:.300}). {goes_on}") from row
        heard = time.monotonic()
        yield row
