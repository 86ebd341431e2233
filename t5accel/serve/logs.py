"""The server's log: its level, its form, and a limit to what clients can make it write."""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Literal

Level = Literal["debug", "info", "warning", "error", "critical"]
Form = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object per line, tracebacks included.

    >>> record = logging.makeLogRecord({"name": "a", "levelname": "INFO", "msg": "two\\nlines", "created": 0.0})
    >>> JsonFormatter().format(record)
    '{"time": "1970-01-01T00:00:00.000Z", "level": "info", "logger": "a", "message": "two\\\\nlines"}'
    """

    def format(self, record: logging.LogRecord) -> str:
        """A record as JSON; times are UTC."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        content = {
            "time": f"{moment}.{int(record.created % 1 * 1e3):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            content["stack"] = self.formatStack(record.stack_info)
        return json.dumps(content, ensure_ascii=False)


def configure(level: Level, form: Form) -> None:
    """Log to standard error, unless the process has handlers of its own. A thread's uncaught error is a line, too."""
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    threading.excepthook = _log_uncaught


def _log_uncaught(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread else "?"
    error = (args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
    logging.getLogger(__name__).critical("Thread %s ended.", name, exc_info=error)


class Sparing(logging.Filter):
    """Lets few records a second through: what clients can cause without end must not fill a disk.

    >>> sparing, record = Sparing(most=2), logging.makeLogRecord({"msg": "bad request"})
    >>> [sparing.filter(record) for _ in range(4)]
    [True, True, False, False]
    """

    def __init__(self, most: int = 5, each_s: float = 1.0):
        super().__init__()
        self._most, self._each_s, self._since_s, self._seen = most, each_s, -each_s, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is written; the first after a pause says how many were not."""
        now = time.monotonic()
        if now - self._since_s >= self._each_s:
            left_out, self._since_s, self._seen = max(0, self._seen - self._most), now, 0
            if left_out:
                record.msg, record.args = f"{record.getMessage()} (and {left_out} lines before it)", ()
        self._seen += 1
        return self._seen <= self._most
