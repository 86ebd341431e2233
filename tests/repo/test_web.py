"""The web page's JavaScript that needs no browser, run by Node.js where it is installed. See tests/with_web."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

WEB = Path(__file__).resolve().parents[2] / "web"


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js")
@pytest.mark.parametrize("name", sorted(path.name for path in (WEB / "test").glob("*.test.js")))
def test_the_pages_javascript(name: str) -> None:
    answer = subprocess.run(["node", "--test", WEB / "test" / name], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stdout
