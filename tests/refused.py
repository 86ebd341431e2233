"""What a door refuses: junk for one argument after another, each by an error that names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from t5accel.errors import InputError


def refused(
    call: Callable[..., Any], argument: str, *junk: Any, match: str | None = None, error: type[Exception] = InputError
) -> None:
    """Each of these values for this argument raises an error that holds ``match``, by default the argument's name."""
    for value in junk:
        try:
            call(**{argument: value})
        except error as caught:
            assert re.search(argument if match is None else match, str(caught)), f"{argument}={value!r:.80}: {caught}"
        else:
            pytest.fail(f"{argument}={value!r:.80} should be refused")
