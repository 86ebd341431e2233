"""Every number of the README comes from a recorded result."""

import json
import re
from pathlib import Path

from t5accel import scoreboard

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_are_drawn_from_their_files() -> None:
    shown = re.findall(r"<!-- (data/results/\S+\.json) -->\n```text\n(.*?)\n```", README, re.DOTALL)
    assert len(shown) >= 2
    for path, text in shown:
        assert text == scoreboard.table(scoreboard.Results.read(ROOT / path).rows), f"draw the table of {path} again"


def test_notebook_table_lists_every_notebook_with_its_recorded_seconds() -> None:
    rows = json.loads((ROOT / "data/results/course.json").read_text(encoding="utf-8"))["rows"]
    recorded = {row["notebook"]: row["seconds"] for row in rows}
    listed = re.findall(r"\| \[(\w+)\]\(notebooks/(\w+\.ipynb)\) \| [^|]+\? \| (\d+) \| (no|yes|recorded) \|", README)
    assert {file for _, file, *_ in listed} == {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    for name, file, seconds, _ in listed:
        assert file == f"{name}.ipynb"
        assert int(seconds) == round(recorded[file]), f"{file}: {seconds} s in README, {recorded[file]} s recorded"


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    missing = [target for target in targets if "://" not in target and not (ROOT / target).exists()]
    assert not missing
