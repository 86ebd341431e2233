"""What every notebook does in the same way: judge a prediction, check the reader's own code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


def verdict(number: int, held: bool | None | tuple[bool | None, ...], found: str) -> None:
    """Print whether a numbered prediction held, and what was found.

    ``None`` is undecided. Of a tuple, the parts of a prediction, one that failed decides, then one that is undecided.

    >>> verdict(1, held=2.4 > 2.5, found="predicted 3.0x, measured 2.4x")
    Prediction 1 missed: predicted 3.0x, measured 2.4x
    >>> verdict(2, held=(True, None), found="1.12x, and predicted more than 1.1x")
    Prediction 2 undecided: 1.12x, and predicted more than 1.1x
    """
    parts = held if isinstance(held, tuple) else (held,)
    missed, undecided = any(part is not None and not part for part in parts), any(part is None for part in parts)
    print(f"Prediction {number} {'missed' if missed else 'undecided' if undecided else 'held'}: {found}")


def exceeds(value: float, bound: float, control: Iterable[float]) -> bool | None:
    """Whether ``value`` is above ``bound``, or None where their ratio is inside the scatter of the ``control``.

    The control holds ratios of a system to itself, one for each round; the one furthest from 1 is the scatter. For
    "less than" swap value and bound.

    >>> [exceeds(value, 1.1, control=[0.96, 1.02]) for value in (1.2, 1.12, 1.0)]
    [True, None, False]
    """
    scatter = max(max(ratio, 1 / ratio) for ratio in control)
    if value > bound * scatter:
        return True
    return False if value * scatter < bound else None


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
