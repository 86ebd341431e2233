"""Where nothing may be said: warnings and log records of a block are failures."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def quiet(*but: str) -> Iterator[None]:
    """Nothing inside may warn, be it by Python's warnings or through a logger, but with these words."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    transformers_logging.warning_once.cache_clear()  # else only the first test of a process would hear it
    loggers = [logging.getLogger(name) for name in (None, "transformers", "filelock", "onnx")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert not [record.getMessage() for record in records if record.getMessage() not in but]
