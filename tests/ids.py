"""How parameters are shown in the names of tests."""

import re
from typing import Any


def shown(value: Any) -> str:
    """Its ``repr`` without an address: two workers of pytest-xdist have to find the same names."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
