"""A training run that may be interrupted at any moment: it goes on from its last checkpoint as if nothing had been.

What a step is made of is the caller's; here are the order of things, the files and the bar.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from t5accel import machine
from t5accel.errors import InputError, JobError
from t5accel.graphs.atomic_write import flush, reason

Step = TypeVar("Step")
SAVE_SHARE = 0.05  # of a run's time, at most, goes into checkpoints that only the clock asked for


class RunConfig(Protocol):
    """A frozen dataclass that decides the outcome of a run. ``steps`` may grow between runs; the rest must stay."""

    @property
    def steps(self) -> int: ...

    @property
    def seed(self) -> int: ...

    def factor(self, step: int) -> float:
        """What multiplies the peak learning rates at ``step``."""


class Checkpoint:
    """What a run needs to go on: the states of its modules and optimisers, step and configuration, in one file.

    ``stable.pt`` beside it keeps the state before the learning rate fell: `extend_run` goes back to it.
    """

    def __init__(self, folder: Path, config: Any, model: torch.nn.Module, optimizers: list[Any]):
        self.file, self.stable = folder / "checkpoint.pt", folder / "stable.pt"
        self.config, self.model, self.optimizers = asdict(config), model, optimizers

    def save(self, path: Path, step: int) -> None:
        """Write in one piece: a kill or a power cut leaves either the old file or the new one.

        Raises:
            JobError: the disk is full, or refuses; the old file is kept.
        """
        partial = path.with_suffix(".partial")
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": optimizers, "step": step, "config": self.config}
        try:
            with partial.open("wb") as file:  # of a path torch.save would not say why it cannot be written
                torch.save(state, file)
            flush(partial)
            os.replace(partial, path)
            flush(path.parent)
        except BaseException as error:
            partial.unlink(missing_ok=True)
            why = _of_the_system(error)
            if why is None or not isinstance(error, Exception):
                raise
            raise JobError(
                f"{path} could not be written: {reason(why)}. The checkpoint before it is kept, and the same command "
                "goes on from there."
            ) from error

    def resume(self, device: str) -> int:
        """Load the last state, if there is one, and return its step (0 without); clear half-written files away."""
        for path in (self.file, self.stable):
            path.with_suffix(".partial").unlink(missing_ok=True)
        if not self.file.is_file():
            return 0
        try:
            state = torch.load(self.file, map_location=device, weights_only=True)
            made_with = dict(state["config"])
        except Exception as error:  # whatever torch and zipfile make of a broken file
            raise InputError(f"{self.file} cannot be read: delete it to begin anew, or use another folder.") from error
        if {**made_with, "steps": 0} != {**self.config, "steps": 0}:
            raise InputError(f"{self.file} was made with {made_with}, not {self.config}: use another folder.")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return state["step"]


def _of_the_system(error: BaseException | None) -> OSError | None:
    """The operating system's error behind another one; that of torch only says that a stream has another length."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _log(file: Path, row: dict[str, Any]) -> None:
    """Append a line, whole or not at all."""
    try:
        with file.open("ab", buffering=0) as log:
            end = log.tell()
            line = (json.dumps(row) + "\n").encode()
            if log.write(line) != len(line):  # the disk had place for a part of it
                log.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise JobError(
            f"{file} could not be written: {reason(error)}. The last checkpoint is kept, and the same command goes on."
        ) from error


def extend_run(folder: Path) -> None:
    """Put the state before the learning rate fell back in place, so that a longer run can go on from there."""
    if not (folder / "stable.pt").is_file():
        raise InputError(f"No {folder / 'stable.pt'}: this run has not reached its decay, just give it more steps.")
    os.replace(folder / "stable.pt", folder / "checkpoint.pt")


def run_steps(
    folder: Path, config: RunConfig, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], *,
    batches_from: Callable[[int], Iterator[Step]], update: Callable[[int, Step], float],
    validate: Callable[[], dict[str, float]], device: str = "cpu", validate_every: int = 250, save_every: int = 250,
    save_seconds: float = 30.0, label: str | None = None,
) -> None:  # fmt: skip
    """Train until ``config.steps``, from the checkpoint in ``folder`` if there is one.

    Args:
        folder: for ``checkpoint.pt``, ``stable.pt`` and ``log.jsonl``; made if it is missing.
        model: all that is trained or has a state.
        batches_from: the batches of this step and of those after it, without end.
        update: takes a step's number and its batches, changes the model and returns the loss.
        validate: losses by task, for ``log.jsonl``.
        save_seconds: of training without a checkpoint, at most, where steps are slow; more where saving takes long.
        label: of the bar.

    Raises:
        InputError: the checkpoint was made with another configuration, or cannot be read.
        JobError: the disk is full, or refuses; the last checkpoint is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = Checkpoint(folder, config, model, optimizers)
    step = checkpoint.resume(device)
    if step:
        print(f"Going on after step {step}, from {checkpoint.file}.", file=sys.stderr)
    mean, started = None, time.perf_counter()
    saved, saving = started, 0.0
    with machine.progress_bar(total=config.steps, initial=step, desc=label, unit="step", mininterval=5) as bar:
        for batches in batches_from(step):
            if step >= config.steps:
                break
            torch.manual_seed(config.seed * 1_000_003 + step)  # dropout too repeats after a resume
            loss = update(step, batches)
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
    """Raise ``InputError`` if torch cannot put anything on this device.

    >>> require_device("cpu")
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r}: {str(error).splitlines()[0]}; give 'cpu', or 'cuda' on a GPU.") from error
