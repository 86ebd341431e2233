"""Resumable training with the results of an uninterrupted run."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from t5accel import machine
from t5accel.distillation.batches import Encode, Mixture, TaskBatch, steps_from
from t5accel.distillation.optimizer import optimizer_step
from t5accel.errors import InputError, JobError
from t5accel.graphs.atomic_write import flush, reason

SAVE_SHARE = 0.05  # most of a run's time that goes into checkpoints due to save_seconds
_OTHERS = {"weights": "another model or teacher", "batches": "other texts, or batches of another size"}


def weights_digest(models: Iterable[torch.nn.Module]) -> str:
    """The sha256 of the models' weights and their names."""
    digest = hashlib.sha256()
    for model in models:
        for name, weight in model.state_dict().items():
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            digest.update(weight.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


class Checkpoint:
    """``checkpoint.pt``: states of model and optimizers, step, mean loss, configuration, and digests by `_OTHERS`."""

    def __init__(
        self, folder: Path, config: Any, model: torch.nn.Module, optimizers: list[Any], made_from: Mapping[str, str]
    ):
        self.file = folder / "checkpoint.pt"
        self.config, self.made_from = asdict(config), dict(made_from)
        self.model = model
        self.optimizers = optimizers
        self.mean: float | None = None

    def save(self, path: Path, step: int) -> None:
        """Write atomically: a kill, a power cut or a full disk leaves the old file or the new one."""
        partial = path.with_suffix(".partial")
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": optimizers, "step": step, "config": self.config,
                 "made_from": self.made_from, "mean": self.mean}  # fmt: skip
        try:
            with partial.open("wb") as file:  # given a path, torch.save hides the system's error
                torch.save(state, file)
            flush(partial)
            os.replace(partial, path)
            flush(path.parent)
        except BaseException as error:
            partial.unlink(missing_ok=True)
            why = _system_error(error)
            if why is None or not isinstance(error, Exception):
                raise
            raise JobError(
                f"{path} could not be written: {reason(why)}. The checkpoint before it is kept, and the same command "
                "goes on from there."
            ) from error

    def resume(self, device: str, file: Path) -> int:
        """Load the state of ``file``, which becomes the last, and return its step, 0 without one."""
        for name in ("checkpoint.partial", "stable.partial"):  # half-written
            file.with_name(name).unlink(missing_ok=True)
        if not file.is_file():
            return 0
        try:
            state = torch.load(file, map_location=device, weights_only=True)
            self._require_same_run(file, dict(state["config"]), state.get("made_from", {}), state["step"])
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        except InputError:
            raise
        except Exception as error:  # whatever torch and zipfile make of a broken file
            raise InputError(f"{file} cannot be read. Delete it to begin anew, or use another folder.") from error
        os.replace(file, self.file)
        self.mean = state.get("mean")
        return state["step"]

    def _require_same_run(self, file: Path, config: dict[str, Any], made_from: Mapping[str, str], step: int) -> None:
        if {**config, "steps": 0} != {**self.config, "steps": 0}:
            raise InputError(f"{file} was made with {config}, not {self.config}. Use another folder.")
        for what, digest in self.made_from.items():
            if made_from.get(what, digest) != digest:  # an older file has none
                raise InputError(f"{file} was made with {_OTHERS[what]}. Use another folder.")
        if step > self.config["steps"]:
            raise InputError(f"steps must be at least the {step} of {file}, got {self.config['steps']}.")


def _system_error(error: BaseException | None) -> OSError | None:
    # torch's own error says only that a stream has another length.
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _log(file: Path, row: dict[str, Any]) -> None:
    try:
        with file.open("ab", buffering=0) as log:
            end = log.tell()
            line = (json.dumps(row) + "\n").encode()
            if log.write(line) != len(line):  # the disk took part of the line: keep whole lines only
                log.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise JobError(
            f"{file} could not be written: {reason(error)}. The last checkpoint is kept, and the same command goes on."
        ) from error


def _drop_rows_after(step: int, file: Path) -> None:
    """Drop the log's rows of steps that are taken again."""
    lines = file.read_bytes().splitlines(keepends=True) if file.is_file() else []
    kept = [line for line in lines if not (found := re.match(rb'{"step": (\d+)', line)) or int(found[1]) <= step]
    if kept != lines:
        file.write_bytes(b"".join(kept))


def run_training(
    folder: Path,
    config: Any,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    mixture: Mixture,
    encode: Encode,
    *,
    loss_of: Callable[[TaskBatch], tuple[torch.Tensor, int]],
    validate: Callable[[], dict[str, float]],
    before_step: Callable[[int], None] | None = None,
    after_step: Callable[[], None] | None = None,
    state: torch.nn.Module | None = None,
    made_from: Iterable[torch.nn.Module] = (),
    stable: Path | None = None,
    goes_back: bool = False,
    device: str = "cpu",
    validate_every: int = 250,
    save_every: int = 250,
    save_seconds: float = 30.0,
    label: str | None = None,
) -> None:
    """Train on a mixture until ``config.steps``, from the checkpoint in ``folder`` if there is one.

    ``config`` is a frozen dataclass with ``steps``, which alone may grow when a run is resumed, ``seed`` and
    ``factor(step)`` of the learning rates. ``loss_of`` is that of `optimizer_step`. ``state``, by default the model, is
    what checkpoints hold besides the optimizers. ``folder`` gets ``checkpoint.pt`` and ``log.jsonl``, to which
    ``validate()`` adds losses by task. ``stable`` is a file for the state before the learning rate decays, to which the
    run may go back. Slow steps are saved every ``save_seconds``, or less often where saving is slow. Raises
    ``InputError`` for a damaged checkpoint or one of another configuration, of more steps, of models other than
    ``made_from`` or of other batches, ``JobError`` on a full disk, which leaves the last checkpoint.
    """
    digests = {"weights": weights_digest(made_from), "batches": mixture.digest(encode, config.seed)}
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = Checkpoint(folder, config, model if state is None else state, optimizers, digests)
    step = checkpoint.resume(device, stable if goes_back else checkpoint.file)
    if step:
        print(f"Going on after step {step}, from {checkpoint.file}.", file=sys.stderr)
    _drop_rows_after(step, folder / "log.jsonl")
    started = saved = time.perf_counter()
    saving = 0.0
    with machine.progress_bar(total=config.steps, initial=step, desc=label, unit="step", mininterval=5) as bar:
        for batches in steps_from(mixture, encode, config.seed, step):
            if step >= config.steps:
                break
            torch.manual_seed(config.seed * 1_000_003 + step)  # a resumed run repeats its dropout
            if before_step is not None:
                before_step(step)
            weights = mixture.phase(step).weights(batches)
            loss = optimizer_step(model, optimizers, batches, weights, factor=config.factor(step), loss_of=loss_of)
            if after_step is not None:
                after_step()
            checkpoint.mean = mean = loss if checkpoint.mean is None else 0.98 * checkpoint.mean + 0.02 * loss
            step += 1
            bar.update()
            bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
            if step % validate_every == 0 or step == config.steps:
                seconds = round(time.perf_counter() - started, 1)
                row = {"step": step, "train_loss": round(mean, 4), **validate(), "seconds": seconds}
                _log(folder / "log.jsonl", row)
            if stable is not None and config.factor(step) < 1.0 <= config.factor(step - 1):
                checkpoint.save(stable, step)
            now = time.perf_counter()
            overdue = now - saved > max(save_seconds, saving / SAVE_SHARE)
            if overdue or step % save_every == 0 or step == config.steps:
                checkpoint.save(checkpoint.file, step)
                saved = time.perf_counter()
                saving = saved - now


def require_device(device: str) -> None:
    """Raise ``InputError`` if torch cannot put a tensor on this device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        message = str(error).splitlines()[0]
        raise InputError(f"device must be 'cpu', or 'cuda' on a GPU, got {device!r} ({message}).") from error
