"""Every error that t5accel raises on purpose. Each says what was given, what is allowed and what to change.

They share one base, so that `except T5AccelError` catches ours and nothing else, and each is also the built-in kind
(`ValueError`, `OSError`) that a caller who does not know this package would expect.
"""

ADDRESS = ""  # what pip installs: "t5accel" once that is on PyPI; until then the checkout in which one stands


class T5AccelError(Exception):
    """Base of all errors of this package."""


class InputError(T5AccelError, ValueError):
    """An argument has a wrong value, shape or type."""


class UnknownModelError(T5AccelError, ValueError):
    """A model name that is neither bundled, nor seeded-random, nor a folder, nor a hub id."""


class ModelUnavailableError(T5AccelError, OSError):
    """A model that exists in principle and cannot be had now: no network, or an incomplete folder."""


class NotT5Error(T5AccelError, ValueError):
    """A checkpoint that is not a T5-like encoder-decoder."""


class ExportError(T5AccelError, OSError):
    """An export that cannot be written, or one that cannot be used: a file missing or altered, another format."""


class JobError(T5AccelError, OSError):
    """A batch job or training run that cannot go on: an input changed, a disk is full. Finished work is kept."""


class ClusterError(T5AccelError, ConnectionError):
    """A cluster of Ray that does not answer, or could not be started."""


class UnequalWorkError(T5AccelError, ValueError):
    """Two timings that did not do the same work: their ratio would mean nothing."""


class MissingPackageError(T5AccelError, ImportError):
    """An optional package that this call needs is not installed; the message names the extra that brings it."""


class PeerError(T5AccelError, RuntimeError):
    """A system that we compare ourselves with could not be started, or failed while it generated."""


class GateError(T5AccelError, RuntimeError):
    """A quantised model lost more quality than was allowed, whatever was left in floats; nothing was written."""


class QueueFullError(T5AccelError, RuntimeError):
    """As many requests wait as may wait: come again in ``retry_after_s`` seconds, or raise the limit."""

    def __init__(self, message: str, retry_after_s: int):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(T5AccelError, TimeoutError):
    """A request's deadline passed before its answer was complete, in the queue or at work."""


class CancelledError(T5AccelError, RuntimeError):
    """Whoever asked has cancelled the request."""


class ShuttingDownError(T5AccelError, RuntimeError):
    """The scheduler takes no more requests, or ended before this one was done."""


class EngineError(T5AccelError, RuntimeError):
    """The engine failed at a request; others may go on. The message names what it raised."""


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
