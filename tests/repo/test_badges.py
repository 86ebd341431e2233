"""`make badges` on a copy of README and notebooks: right links, nothing else changed, and no trace when taken back."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from script import load_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "badges.py"


badges = load_script("badges")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=lambda _, names: set(names) - set(notebooks()))
    badges.stamp(tmp_path, badges.PLACEHOLDER)  # so that these tests also hold in a repository that was stamped
    return tmp_path


def notebooks() -> list[str]:
    return sorted(path.name for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def links(text: str) -> list[str]:
    found = re.findall(r"\]\((https://[^)]+)\)", text)
    return [link for link in found if re.search("colab|mybinder", link) and not link.endswith(".svg")]


@pytest.mark.parametrize("branch", ["main", "next/step"])
def test_every_link_opens_a_notebook_that_exists(copy: Path, branch: str) -> None:
    assert len(badges.stamp(copy, "someone/t5-course", branch)) == 1 + len(notebooks())
    colab = f"https://colab.research.google.com/github/someone/t5-course/blob/{branch}/"
    binder = f"https://mybinder.org/v2/gh/someone/t5-course/{branch.replace('/', '%2F')}?labpath="
    for path in [copy / "README.md", *(copy / "notebooks").iterdir()]:
        text = path.read_text(encoding="utf-8")
        found = links(text)
        images = re.findall(r"\((https://\S+\.svg)\)", text)
        assert len(found) >= 2 and len(images) == 2
        for link in found:
            start = colab if "colab" in link else binder
            assert link.startswith(start)
            assert (copy / unquote(link.removeprefix(start))).exists(), link
            own = path.suffix != ".ipynb" or link.endswith(path.name)
            assert own, f"{path.name} links another notebook: {link}"
    readme = (copy / "README.md").read_text(encoding="utf-8")
    assert all(f"{colab}notebooks/{name}" in readme for name in notebooks()), "README links every notebook"
    assert "public address" not in readme


def test_only_the_address_and_the_badges_change(copy: Path) -> None:
    before = contents(copy)
    badges.stamp(copy, "someone/t5-course")
    for name in notebooks():
        old, new = json.loads(before[name]), json.loads((copy / "notebooks" / name).read_bytes())
        nbformat.validate(nbformat.from_dict(new))
        cell = new["cells"].pop(0)
        assert cell["id"] == "badges" and len(links("".join(cell["source"]))) == 2
        first = next(cell for cell in new["cells"] if cell["cell_type"] == "code")
        assert " https://github.com/someone/t5-course course " in "".join(first["source"])
        first["source"] = [line.replace("someone/t5-course", "owner/name") for line in first["source"]]
        assert new == old and list(new) == list(old)
    marks = re.compile("(?<=<!-- make badges -->\n).*?(?=<!-- end of badges -->)", re.DOTALL)
    old, new = before["README.md"].decode(), (copy / "README.md").read_text(encoding="utf-8")
    assert marks.sub("", new) == marks.sub("", old) and marks.search(old)[0] == badges.UNSTAMPED


def test_stamping_again_changes_nothing_and_another_address_replaces_the_first(copy: Path) -> None:
    unstamped = contents(copy)
    badges.stamp(copy, "someone/t5-course")
    once = contents(copy)
    assert all(once[name] != unstamped[name] for name in unstamped)
    badges.stamp(copy, "someone/t5-course")
    assert contents(copy) == once
    badges.stamp(copy, "Other-One/Course_2.x", "v1.0")
    other = contents(copy)
    assert all(b"someone" not in data and b"Other-One/Course_2.x" in data for data in other.values())
    assert all(b" -b v1.0 https://github.com/Other-One/Course_2.x course " in other[name] for name in notebooks())
    badges.stamp(copy, "someone/t5-course")
    assert contents(copy) == once
    badges.stamp(copy, badges.PLACEHOLDER)
    assert contents(copy) == unstamped


@pytest.mark.parametrize(
    ("repository", "branch"),
    [
        *(
            (name, "main")
            for name in ("", "name", "https://github.com/a/b", "a/b.git", "-a/b", "a/..", 'a/b"', "a/b\n")
        ),
        *(("a/b", branch) for branch in ("", "a..b", "-x", "a b", "a\n")),
    ],
)
def test_an_address_that_is_none_is_refused_and_nothing_written(copy: Path, repository: str, branch: str) -> None:
    before = contents(copy)
    with pytest.raises(badges.BadgesError, match="REPO=|BRANCH="):
        badges.stamp(copy, repository, branch)
    assert contents(copy) == before


def test_a_broken_notebook_or_readme_stops_it_before_anything_is_written(copy: Path) -> None:
    path = copy / "notebooks" / notebooks()[-1]
    good = path.read_text(encoding="utf-8")
    for bad, message in (
        (good.replace("git clone", "git pull").replace("https://github.com/", ""), "SETUP"),
        (json.dumps(json.loads(good), indent=4), "laid out"),
    ):
        path.write_text(bad, encoding="utf-8")
        before = contents(copy)
        with pytest.raises(badges.BadgesError, match=message):
            badges.stamp(copy, "someone/t5-course")
        assert contents(copy) == before
    path.write_text(good, encoding="utf-8")
    (copy / "README.md").write_text("# no marks\n")
    with pytest.raises(badges.BadgesError, match="README.md"):
        badges.stamp(copy, "someone/t5-course")


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}  # `make test` sets it
    return subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_command(copy: Path) -> None:
    answer = command(sys.executable, SCRIPT, "someone/t5-course", "--root", copy)
    assert answer.returncode == 0 and "README.md" in answer.stdout
    assert "someone/t5-course" in (copy / "README.md").read_text(encoding="utf-8")
    answer = command(sys.executable, SCRIPT, "someone", "--root", copy)
    assert answer.returncode == 1 and answer.stderr == (
        "badges: REPO=someone is no owner/name on GitHub; give the two names only, without https://.\n"
    )


def test_make_without_an_address_explains_itself() -> None:
    answer = command("make", "badges", "REPO=")
    assert answer.returncode and "Say which repository on GitHub: make badges REPO=owner/name" in answer.stderr
