"""The API reference is what the docstrings say now, a page for each public module, and its links lead somewhere."""

import re
from collections import Counter
from pathlib import Path

import pytest
from script import load_script
from test_repository import MODULES, ROOT

PUBLIC = [name for name in MODULES if not re.search(r"\._", name)]


api_docs = load_script("api_docs")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return api_docs.pages()


def page_name(module: str) -> str:
    return f"{module.removeprefix('t5accel.')}.md"


def anchors(markdown: str) -> set[str]:
    """What GitHub makes of the headings: small letters, no punctuation, the second of two equal ones counted."""
    prose = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    plain = [re.sub(r"[^\w\- ]", "", text.lower()) for text in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)]
    return {f"{text}-{earlier}" if (earlier := Counter(plain[:i])[text]) else text for i, text in enumerate(plain)}


def test_the_committed_pages_are_what_the_docstrings_say(pages: dict[str, str]) -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs/api").iterdir()}
    changed = sorted(name for name in committed.keys() | pages.keys() if committed.get(name) != pages.get(name))
    assert not changed, "`make docs` writes them again"


def test_every_public_module_has_a_page(pages: dict[str, str]) -> None:
    assert {"t5accel", "t5accel.timing", "t5accel.decoding.greedy"} <= set(PUBLIC)
    assert pages.keys() == {"README.md"} | {page_name(module) for module in PUBLIC}
    for module in PUBLIC:
        assert f"[`{module}`]({page_name(module)})" in pages["README.md"]


def test_links_lead_somewhere(pages: dict[str, str]) -> None:
    checked = 0
    for name, text in pages.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
            file, _, anchor = target.partition("#")
            if "://" not in target:
                assert not file or file in pages or (ROOT / "docs/api" / file).is_file(), f"{name}: {target}"
                assert not anchor or anchor in anchors(pages[file or name]), f"{name}: {target}"
                checked += 1
    assert checked > 100
    assert "docs/api/README.md" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_page_holds_signature_shapes_errors_and_example(pages: dict[str, str]) -> None:
    page = pages["decoding.greedy.md"]
    assert "    max_new_tokens: int = 64,\n" in page
    assert "- `input_ids`: (B, S) integers" in page
    assert "**Raises**\n\n- `InputError`: " in page
    assert "\n```pycon\n>>> import numpy as np\n" in page
    assert "_prefix" not in page


def test_examples_are_fenced_and_headings_are_public(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        assert text.count("\n```") % 2 == 0, f"{name}: a fence stays open"
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        assert ">>>" not in prose, f"{name}: an example would become a quotation"
        for heading in re.findall(r"^##+ `(.*)`$", prose, re.MULTILINE):
            hidden = [
                part for part in heading.split(".") if part.startswith("_") and part not in ("__init__", "__call__")
            ]
            assert not hidden, f"{name}: {heading}"


TOY = '''
"""What a toy is for.

More about ``<pad>`` and *emphasis* and <b>.
"""

# How many.
LIMIT_S = 45.0  # fmt: skip
DATA = [
    1,
    2,
    3,
    4,
]
_HIDDEN = 1


class Work:
    """A thing.

    Attributes:
        left, right: both sides.
    """

    left: int

    def __init__(self, left: int): ...

    def bare(self) -> int:
        # a remark
        return 1

    @property
    def told(self) -> int:
        """Told.

        >>> 1
        1
        """
        return 1

    def _hidden(self): ...


def work(
    *names: str,  # several
) -> None:
    """Work.

    Raises:
        InputError: never, or
            rarely.
    """
'''

TOY_PAGE = """
# `t5accel`

[All modules](README.md) · [source](../../t5accel/__init__.py)

What a toy is for.

More about ``<pad>`` and \\*emphasis* and \\<b>.

[`Work`](#work) · [`work`](#work-1)

```python
# How many.
LIMIT_S = 45.0
DATA = ...
```

## `Work`

```python
class Work:
    left: int

    def __init__(self, left: int)

    def bare(self) -> int
```

A thing.

**Attributes**

- `left, right`: both sides.

### `Work.told`

```python
@property
def told(self) -> int
```

Told.

```pycon
>>> 1
1
```

## `work`

```python
def work(
    *names: str,  # several
) -> None
```

Work.

**Raises**

- `InputError`: never, or
  rarely.
"""


def test_a_toy_module_becomes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t5accel").mkdir()
    (tmp_path / "t5accel/__init__.py").write_text(TOY.lstrip())
    (tmp_path / "t5accel/_hidden.py").write_text('"""Not shown."""\n')
    monkeypatch.setattr(api_docs, "ROOT", tmp_path)
    monkeypatch.setattr(api_docs, "PAGES", tmp_path / "docs/api")
    made = api_docs.pages()
    assert made.keys() == {"README.md", "t5accel.md"}
    assert made["t5accel.md"] == TOY_PAGE.lstrip()

    (tmp_path / "docs/api").mkdir(parents=True)
    (tmp_path / "docs/api/gone.md").write_text("a module that is no more")
    api_docs.main()
    assert {path.name: path.read_text() for path in (tmp_path / "docs/api").iterdir()} == made
