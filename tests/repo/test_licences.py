"""NOTICE names what comes from others; licences, citation and the forms for issues are whole."""

import json
import re
from pathlib import Path

import pytest
import yaml
from test_repository import PYPROJECT, tracked_files

ROOT = Path(__file__).resolve().parents[2]
NOTICE = (ROOT / "NOTICE").read_text(encoding="utf-8")
# Fonts, compiled and minified files: nobody here writes them.
MADE_ELSEWHERE = re.compile(r"\.(woff2?|ttf|otf|eot|wasm|so|dll|dylib|whl|jar|map|min\.\w+)$")
# What those who copy code have to keep.
FOREIGN = re.compile(
    r"^\W*(Copyright (\(c\)|©|\d{4})|\(c\) \d{4}|SPDX-License-Identifier:)", re.MULTILINE | re.IGNORECASE
)
TEXTS = {"LICENSE", "LICENSE-docs", "NOTICE"}


def test_every_file_of_others_is_named() -> None:
    for path in tracked_files():
        name = path.relative_to(ROOT).as_posix()
        try:
            foreign = name not in TEXTS and FOREIGN.search(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            foreign = None  # weights and pictures
        assert not (foreign or MADE_ELSEWHERE.search(name)) or name in NOTICE, name


def test_every_entry_of_data_is_named_with_where_it_comes_from() -> None:
    heads = "\n".join(re.findall(r"^(data/.*?):", NOTICE, re.MULTILINE))
    named = set(re.findall(r"data/[\w.-]+", heads))
    parts = (path.relative_to(ROOT).parts for path in tracked_files())
    assert named == {f"data/{inside[0]}" for folder, *inside in parts if folder == "data"}
    (of_tatoeba,) = re.findall(r"^(data/.*): .*\n.*Tatoeba", NOTICE, re.MULTILINE)
    assert "CC BY 2.0 FR" in NOTICE
    cards = {
        f"data/{card.parent.name}"
        for card in (ROOT / "data").glob("*/README.md") if "CC BY 2.0 FR" in card.read_text(encoding="utf-8")
    }  # fmt: skip
    assert {*of_tatoeba.split(", ")} == cards and len(cards) == 3


def test_what_the_web_page_bundles_is_named_with_its_licence() -> None:
    """By the licences that the lock file records; `make test-web` reads the texts that the built page carries."""
    packages = json.loads((ROOT / "web/package.json").read_text(encoding="utf-8"))["dependencies"]
    locked = json.loads((ROOT / "web/package-lock.json").read_text(encoding="utf-8"))["packages"]
    for name in (*packages, "onnxruntime-common"):
        assert f"{name} ({locked[f'node_modules/{name}']['license']})" in NOTICE, name


def test_what_the_site_is_built_with_is_named() -> None:
    names = [re.split("[=<>]", line)[0] for line in PYPROJECT["project"]["optional-dependencies"]["site"]]
    assert names and not [name for name in names if not re.search(rf"^    {name} \(", NOTICE, re.MULTILINE)]


def test_the_licence_of_the_course_is_the_whole_one() -> None:
    text = (ROOT / "LICENSE-docs").read_text(encoding="utf-8")
    assert text.startswith("Attribution 4.0 International\n") and len(text.encode()) > 18_000
    assert [*map(int, re.findall(r"^Section (\d) --", text, re.MULTILINE))] == [*range(1, 9)]
    assert "CC BY 4.0" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert PYPROJECT["project"]["license"] == "Apache-2.0"


def test_the_citation_is_of_this_version() -> None:
    """By the Citation File Format 1.2.0: what it asks for, and no other key than it knows."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    required = {"cff-version", "message", "title", "authors"}
    known = required | {"type", "version", "license", "abstract", "keywords", "date-released", "repository-code", "url"}
    assert required <= citation.keys() <= known and citation["cff-version"] == "1.2.0"
    assert citation["version"] == PYPROJECT["project"]["version"] and citation["type"] == "software"
    assert citation["license"] == PYPROJECT["project"]["license"]
    assert citation["authors"] == PYPROJECT["project"]["authors"]


FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("path", [path for path in FORMS if path.stem != "config"], ids=lambda path: path.stem)
def test_a_form_for_issues_asks_for_what_the_doctor_says(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form.keys() <= {"name", "description", "title", "labels", "body"} and {"name", "description"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(field["attributes"]["label"] for field in fields)
    names = [field["id"] for field in fields]
    assert len(names) == len({*names})
    (doctor,) = (field for field in fields if "`t5accel doctor`" in field["attributes"]["label"])
    assert doctor["type"] == "textarea"
