"""The errors of t5accel. Each is also the built-in kind that a caller would expect."""

ADDRESS = ""  # pip's name of the package once it is on PyPI; until then the checkout


class T5AccelError(Exception):
    """Base of all errors of this package."""


class InputError(T5AccelError, ValueError):
    """An argument has a wrong value, shape or type."""


class UnknownModelError(T5AccelError, ValueError):
    """A model name that is neither bundled, nor seeded-random, nor a folder, nor a hub id."""


class ModelUnavailableError(T5AccelError, OSError):
    """A known model that cannot be loaded: no network, or an incomplete folder."""


class NotT5Error(T5AccelError, ValueError):
    """A checkpoint that is not a T5-like encoder-decoder."""


class ExportError(T5AccelError, OSError):
    """An export that cannot be written, or used: a file missing or altered, another format."""


class JobError(T5AccelError, OSError):
    """A batch job or training run that cannot continue; finished work is kept."""


class ClusterError(T5AccelError, ConnectionError):
    """A Ray cluster that does not answer or start."""


class UnequalWorkError(T5AccelError, ValueError):
    """Two timings of different work, whose ratio would mean nothing."""


class MissingPackageError(T5AccelError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class PeerError(T5AccelError, RuntimeError):
    """A system under comparison did not start, or failed while generating."""


class GateError(T5AccelError, RuntimeError):
    """A quantised model lost more quality than allowed; nothing was written."""


class QueueFullError(T5AccelError, RuntimeError):
    """The queue is full: retry in ``retry_after_s`` seconds, or raise the limit."""

    def __init__(self, message: str, retry_after_s: int):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(T5AccelError, TimeoutError):
    """A request's deadline passed before its output was complete."""


class CancelledError(T5AccelError, RuntimeError):
    """The request was cancelled."""


class ShuttingDownError(T5AccelError, RuntimeError):
    """The scheduler takes no more requests, or ended before this one finished."""


class EngineError(T5AccelError, RuntimeError):
    """The engine raised while serving a request; other requests continue."""


def install(extras: str) -> str:
    """The command that installs the package with extras, such as ``"cpu,demo"``.

    >>> install("serving")
    'pip install ".[serving]" in a checkout of t5accel'
    """
    return f'pip install "{ADDRESS or "."}[{extras}]"' + " in a checkout of t5accel" * (not ADDRESS)


def first_line(error: BaseException) -> str:
    """A foreign error in one line: its type, and the first line of its message.

    >>> first_line(ValueError("no such token\\nat line 7"))
    'ValueError: no such token'
    """
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]:.300}" if said else type(error).__name__
