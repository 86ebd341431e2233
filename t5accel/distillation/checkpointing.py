"""Resumable training with the results of an uninterrupted run."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable
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


class Checkpoint:
    """``checkpoint.pt``: states of model and optimizers, step and configuration.

    ``stable.pt`` keeps the state before the learning rate decays, for `extend_run`.
    """

    def __init__(self, folder: Path, config: Any, model: torch.nn.Module, optimizers: list[Any]):
        self.file = folder / "checkpoint.pt"
        self.stable = folder / "stable.pt"
        self.config = asdict(config)
        self.model = model
        self.optimizers = optimizers

    def save(self, path: Path, step: int) -> None:
        """Write atomically: a kill, a power cut or a full disk leaves the old file or the new one."""
        partial = path.with_suffix(".partial")
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": optimizers, "step": step, "config": self.config}
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

    def resume(self, device: str, *, checks_only: bool = False) -> int:
        """Load the last state and return its step, 0 without one; remove half-written files."""
        for path in (self.file, self.stable):
            path.with_suffix(".partial").unlink(missing_ok=True)
        if not self.file.is_file():
            return 0
        try:
            state = torch.load(self.file, map_location=device, weights_only=True)
            made_with = dict(state["config"])
        except Exception as error:  # whatever torch and zipfile make of a broken file
            raise InputError(f"{self.file} cannot be read. Delete it to begin anew, or use another folder.") from error
        if {**made_with, "steps": 0} != {**self.config, "steps": 0}:
            raise InputError(f"{self.file} was made with {made_with}, not {self.config}. Use another folder.")
        if checks_only:
            return state["step"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return state["step"]


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


def extend_run(folder: Path) -> None:
    """Restore the state before the learning rate decayed, so that a longer run can continue from there."""
    if not (folder / "stable.pt").is_file():
        raise InputError(f"No {folder / 'stable.pt'}: this run has not reached its decay. Give it more steps.")
    os.replace(folder / "stable.pt", folder / "checkpoint.pt")


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
    device: str = "cpu",
    validate_every: int = 250,
    save_every: int = 250,
    save_seconds: float = 30.0,
    label: str | None = None,
) -> None:
    """Train on a mixture until ``config.steps``, from the checkpoint in ``folder`` if there is one.

    ``config`` is a frozen dataclass with ``steps``, which alone may grow when a run is resumed, ``seed`` and
    ``factor(step)`` of the learning rates. ``loss_of`` is that of `optimizer_step`. ``state``, by default the model, is
    what checkpoints hold besides the optimizers. ``folder`` gets ``checkpoint.pt``, ``stable.pt`` and ``log.jsonl``, to
    which ``validate()`` adds losses by task. Slow steps are saved every ``save_seconds``, or less often where saving is
    slow. Raises ``InputError`` for a damaged checkpoint or one of another configuration, ``JobError`` on a full disk,
    which leaves the last checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = Checkpoint(folder, config, model if state is None else state, optimizers)
    step = checkpoint.resume(device)
    if step:
        print(f"Going on after step {step}, from {checkpoint.file}.", file=sys.stderr)
    mean = None
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
            mean = loss if mean is None else 0.98 * mean + 0.02 * loss
            step += 1
            bar.update()
            bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
            if step % validate_every == 0 or step == config.steps:
                seconds = round(time.perf_counter() - started, 1)
                row = {"step": step, "train_loss": round(mean, 4), **validate(), "seconds": seconds}
                _log(folder / "log.jsonl", row)
            if config.factor(step) < 1.0 <= config.factor(step - 1):
                checkpoint.save(checkpoint.stable, step)
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
