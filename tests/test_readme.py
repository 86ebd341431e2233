"""Every number of the README comes from a recorded result."""

import json
import re
from pathlib import Path

from t5accel.cli import app
from t5accel.lab.draw import board

ROOT = Path(__file__).resolve().parents[1]
README, WORKSHOP = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/WORKSHOP.md"))


def test_tables_are_drawn_from_their_files() -> None:
    shown = re.findall(r"<!-- (data/results/\S+\.json) -->\n```text\n(.*?)\n```", README, re.DOTALL)
    assert len(shown) >= 2
    for path, text in shown:
        record = json.loads((ROOT / path).read_text(encoding="utf-8"))
        assert text == board(record["rows"], record["machine"]), f"draw the table of {path} again"


def test_notebook_table_lists_every_notebook_with_its_recorded_seconds() -> None:
    rows = json.loads((ROOT / "data/results/course.json").read_text(encoding="utf-8"))["rows"]
    recorded = {row["notebook"]: row["seconds"] for row in rows}
    listed = re.findall(r"\| \[(\w+)\]\(notebooks/(\w+\.ipynb)\) \| [^|]+\? \| (\d+) \| (no|yes|optional) \|", README)
    assert {file for _, file, *_ in listed} == {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    for name, file, seconds, _ in listed:
        assert file == f"{name}.ipynb"
        assert int(seconds) == round(recorded[file]), f"{file}: {seconds} s in README, {recorded[file]} s recorded"


def test_the_workshop_lists_every_notebook_with_its_recorded_seconds() -> None:
    rows = json.loads((ROOT / "data/results/course.json").read_text(encoding="utf-8"))["rows"]
    recorded = {row["notebook"].removesuffix(".ipynb"): f"{row['seconds']:.0f}" for row in rows}
    assert dict(re.findall(r"^\| (\d\d_\w+) \| [^|]+ \| (\d+) s \| \d+ min \|$", WORKSHOP, re.MULTILINE)) == recorded


def test_the_workshop_names_targets_and_commands_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([\w-]+)", WORKSHOP))
    assert targets >= {"test", "wheelhouse"}
    assert not [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)]
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(re.findall(r"`t5accel (\w+)", WORKSHOP)) <= commands
