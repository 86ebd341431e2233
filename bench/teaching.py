"""What every notebook does in the same way: judge a prediction, check the reader's own code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def verdict(number: int, held: bool, found: str) -> None:
    """Print whether a numbered prediction held, and what was found.

    >>> verdict(1, held=2.4 > 2.5, found="predicted 3.0x, measured 2.4x")
    Prediction 1 missed: predicted 3.0x, measured 2.4x
    """
    print(f"Prediction {number} {'held' if held else 'missed'}: {found}")


@contextmanager
def your_turn(task: str) -> Iterator[None]:
    """Say whether the checks inside pass; their error is printed in one line, so that a notebook runs on.

    >>> with your_turn("double"):
    ...     assert 2 * 2 == 5, "2 doubled is not 5"
    double: not solved yet (AssertionError: 2 doubled is not 5)
    """
    try:
        yield
    except Exception as error:  # whatever the reader's code raises
        first = (str(error).strip().splitlines() or ["no message"])[0]
        print(f"{task}: not solved yet ({type(error).__name__}: {first})")
    else:
        print(f"{task}: solved.")
