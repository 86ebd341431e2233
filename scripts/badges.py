"""Write the repository's address into README.md and the notebooks: `make badges REPO=owner/name [BRANCH=main]`.

Each notebook gets a cell of badges and the address that its first code cell clones; README gets links to all of
them. Run it again for another address; `REPO=owner/name`, literally, takes every address out again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

PLACEHOLDER = "owner/name"
OWNER = r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,38}"
NAME = r"(?!\.{1,2}$)(?!.*\.git$)[\w.-]{1,100}"
BRANCH = r"(?!.*(?:\.\.|//|\.lock$))\w(?:[\w./-]*[\w-])?"
BLOCK = re.compile(r"(<!-- make badges -->\n).*?(<!-- end of badges -->\n)", re.DOTALL)
# The first code cell of every notebook.
SETUP = """\
import sys

if "google.colab" in sys.modules:  # elsewhere the course is installed: `make lab`
    !git clone -q --depth=1 https://github.com/owner/name course && pip install -q -e "course[cpu,notebooks]"
sys.path.insert(0, "course" if "google.colab" in sys.modules else "..")
"""
ADDRESS = re.compile(r"(?:-b \S+ )?https://github\.com/\S+(?= course )")
UNSTAMPED = """\
Links that open the notebooks in Colab and Binder appear here once this repository has a public address:
`make badges REPO=owner/name` writes them, here and into every notebook.
"""


class BadgesError(Exception):
    """The address is invalid, or a file is not laid out as expected."""


def check(repository: str, branch: str) -> None:
    """Raise ``BadgesError`` unless both are names that GitHub allows."""
    if not repository:
        raise BadgesError("Say which repository on GitHub: make badges REPO=owner/name (and BRANCH=..., if not main).")
    if not re.fullmatch(f"{OWNER}/{NAME}", repository, re.ASCII):
        raise BadgesError(f"REPO={repository} is no owner/name on GitHub; give the two names only, without https://.")
    if not re.fullmatch(BRANCH, branch, re.ASCII):
        raise BadgesError(f"BRANCH={branch} is no name of a branch.")


def colab(repository: str, branch: str, notebook: str) -> str:
    """The address that opens a notebook of the repository in Colab."""
    return f"https://colab.research.google.com/github/{repository}/blob/{quote(branch)}/notebooks/{notebook}"


def binder(repository: str, branch: str, path: str) -> str:
    """The address that opens a file or folder of the repository in Binder's JupyterLab."""
    return f"https://mybinder.org/v2/gh/{repository}/{quote(branch, safe='')}?labpath={quote(path, safe='')}"


def badges(repository: str, branch: str, notebook: str) -> str:
    """The two badges of one notebook, in Markdown."""
    return (
        "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
        f"({colab(repository, branch, notebook)}) "
        "[![Open in Binder](https://mybinder.org/badge_logo.svg)]"
        f"({binder(repository, branch, f'notebooks/{notebook}')})"
    )


def stamped_notebook(path: Path, repository: str, branch: str) -> str:
    """A notebook's text with the address to clone set, and with its cell of badges written, replaced or removed."""
    text = path.read_text(encoding="utf-8")
    book = json.loads(text)
    if layout(book) != text:
        raise BadgesError(f"{path.name} is not laid out as Jupyter saves it: open it in JupyterLab and save it.")
    source = next((cell["source"] for cell in book["cells"] if cell["cell_type"] == "code"), [])
    lines = [number for number, line in enumerate(source) if ADDRESS.search(line)]
    if len(lines) != 1:
        raise BadgesError(f"The first code cell of {path.name} must be the SETUP of scripts/badges.py. Copy it there.")
    address = f"https://github.com/{repository}" if branch == "main" else f"-b {branch} https://github.com/{repository}"
    source[lines[0]] = ADDRESS.sub(lambda _: address, source[lines[0]])
    book["cells"] = [cell for cell in book["cells"] if cell.get("id") != "badges"]
    if repository != PLACEHOLDER:
        shown = [badges(repository, branch, path.name)]
        book["cells"].insert(0, {"cell_type": "markdown", "id": "badges", "metadata": {}, "source": shown})
    return layout(book)


def layout(book: dict[str, Any]) -> str:
    """A notebook's text as Jupyter lays it out."""
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def readme_block(repository: str, branch: str, notebooks: list[str]) -> str:
    """What stands between the two marks of README.md."""
    if repository == PLACEHOLDER:
        return UNSTAMPED
    links = " · ".join(f"[{name.removesuffix('.ipynb')}]({colab(repository, branch, name)})" for name in notebooks)
    address = f"https://github.com/{repository}" + ("" if branch == "main" else f"@{branch}")
    return (
        f"{badges(repository, branch, notebooks[0])}\n\nIn Colab: {links}.\n\n"
        f"Binder opens [all of them]({binder(repository, branch, 'notebooks')}) in JupyterLab. Into an environment of "
        f'your own: `pip install "t5accel[cpu] @ git+{address}"`.\n'
    )


def stamp(root: Path, repository: str, branch: str = "main") -> list[Path]:
    """Stamp README.md and every notebook below ``root``; returns what was stamped."""
    check(repository, branch)
    notebooks = sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    if not notebooks:
        raise BadgesError(f"There is no numbered notebook in {root / 'notebooks'}.")
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    if len(BLOCK.findall(text)) != 1:
        raise BadgesError("README.md lacks its two marks, <!-- make badges --> and <!-- end of badges -->.")
    block = readme_block(repository, branch, [path.name for path in notebooks])
    written = {path: stamped_notebook(path, repository, branch) for path in notebooks}
    written[readme] = BLOCK.sub(lambda marks: marks[1] + block + marks[2], text)
    for path, stamped in written.items():  # only now: a fault in one file leaves all as they are
        path.write_text(stamped, encoding="utf-8", newline="\n")
    return list(written)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", help="owner/name on GitHub")
    parser.add_argument("--branch", default="main")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="folder of README.md")
    given = parser.parse_args()
    try:
        stamped = stamp(given.root, given.repository, given.branch)
    except BadgesError as error:
        sys.exit(f"badges: {error}")
    print(f"{given.repository} (branch {given.branch}) now stands in {', '.join(path.name for path in stamped)}.")


if __name__ == "__main__":
    main()
