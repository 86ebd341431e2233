"""Shards on a Ray cluster: a pool of actors that each hold the model, through which Ray Data streams.

Only the shards' descriptions travel; an actor reads its rows and writes its file itself, so memory does not grow with
the data, and a job goes on by the same files and manifest as on one machine. Ray's own checkpoints are not used: in our
trials they saved nothing (``CheckpointConfig`` of ray 2.60, on a local disk).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from t5accel.batch.job import Done, Model, Settings, Shard, do_shard
from t5accel.batch.output import Output
from t5accel.errors import InputError, MissingPackageError, T5AccelError

MOST_BLOCKS = 1000  # in which Ray Data is handed the shards


class Actor:
    """Holds the model, and does shards.

    >>> from t5accel.batch.output import Output
    >>> model = Model("mini", threads=1)
    >>> actor = Actor(model, Settings(), Output("out"), model.open(Settings())[1])
    >>> actor({"shard": []})
    {'answered': [], 'rejected': [], 'tokens': []}
    """

    def __init__(self, model: Model, settings: Settings, output: Output, what: Mapping[str, str]):
        self.answer, found = model.open(settings)
        self.settings, self.output = settings, output
        if found != what:
            raise InputError(f"On another machine the model is another one: {found} there, {what} here.")

    def __call__(self, batch: Mapping[str, Sequence[bytes]]) -> dict[str, list[int]]:
        """Ray Data's batches: pickled shards -> what became of their rows."""
        done = [do_shard(self.answer, self.settings, self.output, pickle.loads(one)) for one in batch["shard"]]
        return {name: [getattr(one, name) for one in done] for name in asdict(Done())}


def on_ray(
    pending: Sequence[Shard], model: Model, settings: Settings, output: Output, what: Mapping[str, str],
    address: str | None,
) -> Iterator[Done]:  # fmt: skip
    """Do all shards, by as many actors as the cluster has cores for, and yield what became of each.

    Args:
        pending: in any order; they are done in any.
        model: with ``threads`` for each actor, by default 1.
        settings, output: of the job; paths are made absolute.
        what: the model as this process opened it: an actor that opens another one ends the job.
        address: of a cluster; by default one is started here, and ended with the job.

    Raises:
        MissingPackageError: ray is not installed.
        JobError, InputError: as `job.do_shard`, wherever it was raised.
    """
    if not pending:
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import data
    except ImportError as error:
        raise MissingPackageError("The engine ray needs Ray: pip install 't5accel[ray]'.") from error
    model = replace(model, threads=model.threads or 1)
    absolute = [replace(shard, source=replace(shard.source, path=shard.source.path.absolute())) for shard in pending]
    started = not ray.is_initialized()
    if started:
        here = {} if address else {"include_dashboard": False, "object_store_memory": 200 << 20}
        ray.init(address=address, logging_level="error", log_to_driver=False, **here)
    try:
        data.DataContext.get_current().enable_progress_bars = False
        actors = max(1, min(len(pending), int(ray.cluster_resources().get("CPU", 1)) // model.threads))
        items = [{"shard": pickle.dumps(shard)} for shard in absolute]
        made = data.from_items(items, override_num_blocks=min(len(items), MOST_BLOCKS)).map_batches(
            Actor, batch_size=1, batch_format="numpy", num_cpus=model.threads,
            compute=data.ActorPoolStrategy(min_size=1, max_size=actors),
            fn_constructor_args=(model, settings, Output(output.folder.absolute()), dict(what)),
        )  # fmt: skip
        for row in made.iter_rows():
            yield Done(**{name: int(value) for name, value in row.items()})
    except Exception as error:
        raise _own(error) from error
    finally:
        if started:
            ray.shutdown()


def _own(error: BaseException) -> BaseException:
    """What an actor raised on purpose, out of what Ray wrapped around it."""
    inner: Any = error
    while inner is not None:
        if isinstance(inner, T5AccelError):
            return inner
        inner = getattr(inner, "cause", None) or inner.__cause__
    return error
