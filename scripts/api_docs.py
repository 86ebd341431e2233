"""Write the API reference, docs/api/: a page for each public module, from its docstrings (`make docs`).

griffe reads the sources and their Google-style docstrings without importing anything, so a page depends on no installed
version of torch or transformers. Here is only the layout, made for GitHub: signatures as they stand in the source,
examples fenced, links that its anchors answer. `tests/test_api_docs.py` compares the pages with the docstrings.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "api"
INDEX = "README.md"
TITLES = {"parameters": "Arguments", "other parameters": "Further arguments"}  # else the section's own name


def public_modules(package: griffe.Module) -> Iterator[griffe.Module]:
    """``package`` and everything in it that no leading underscore hides (``__main__`` is hidden as well)."""
    yield package
    for module in sorted(package.modules.values(), key=lambda module: module.name):
        if not (module.is_alias or module.name.startswith("_")):
            yield from public_modules(module)


def shown(owner: griffe.Module | griffe.Class) -> list[griffe.Object]:
    """The classes and functions that ``owner`` itself defines and offers, in the order of the source."""
    own = [member for member in owner.members.values() if not member.is_alias and member.lineno]
    kinds = [member for member in own if member.is_class or member.is_function or "property" in member.labels]
    public = [member for member in kinds if not member.name.startswith("_") or member.name in ("__init__", "__call__")]
    return sorted(public, key=lambda member: member.lineno)


def documented(thing: griffe.Object) -> list[griffe.Object]:
    """The members of a class that have a docstring of their own."""
    return [member for member in shown(thing) if member.has_docstring] if thing.is_class else []


def file_of(module: griffe.Module) -> str:
    """The name of a module's page; all pages lie in one folder."""
    return f"{module.path.removeprefix('t5accel.')}.md"


def anchors(module: griffe.Module) -> dict[str, str]:
    """GitHub's anchor of each heading of a page: small letters, and where two are equal (`Work`, `work`) counted."""
    seen = [re.sub(r"\W", "", module.path)]
    found = {}
    for thing in shown(module):
        for name in [thing.name, *(f"{thing.name}.{member.name}" for member in documented(thing))]:
            plain = re.sub(r"\W", "", name.lower())
            found[name] = f"{plain}-{seen.count(plain)}" if plain in seen else plain
            seen.append(plain)
    return found


# ----------------------------------------------------------------------------------------------------------- signatures


def node_of(thing: griffe.Object) -> tuple[ast.stmt, list[str]]:
    """What Python's parser makes of a class or function, and its source lines."""
    source = textwrap.dedent(thing.source)
    return ast.parse(source).body[0], source.splitlines()


def header(thing: griffe.Object) -> str:
    """The lines of a ``def`` or ``class`` up to its body, as they stand in the source."""
    node, lines = node_of(thing)
    first = node.body[0]
    lines = lines[: first.lineno - 1] + [lines[first.lineno - 1].encode()[: first.col_offset].decode()]
    while not lines[-1].strip() or lines[-1].strip().startswith("#"):
        lines.pop()
    text = "\n".join(lines).rstrip().removesuffix(":")
    return f"@property\n{text}" if "property" in thing.labels else text


def assignments(body: list[ast.stmt], lines: list[str]) -> list[str]:
    """The public names that a class or module assigns, as they stand in the source, with the comments above them."""
    targets = [
        (getattr(node.target if isinstance(node, ast.AnnAssign) else node.targets[0], "id", "_"), node)
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign)
    ]
    grown = {getattr(node.target, "id", "") for node in body if isinstance(node, ast.AugAssign)}
    found = []
    for name, node in targets:
        if name.startswith("_"):
            continue
        start = node.lineno - 1
        while start and lines[start - 1].lstrip().startswith("# ") and lines[start - 1].count("---") == 0:
            start -= 1
        text = lines[start : node.end_lineno]
        if name in grown or node.end_lineno - node.lineno > 3:  # data: its name is enough
            indent = " " * node.col_offset
            typed = f"{name}: {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else name
            text = [*lines[start : node.lineno - 1], f"{indent}{typed} = ..."]
        found.append(textwrap.dedent("\n".join(text)))
    return found


def python(code: str) -> str:
    """Fenced, and without remarks to tools."""
    return "```python\n" + re.sub(r" *# (?:fmt: skip|noqa).*", "", code) + "\n```"


def stub(class_: griffe.Class) -> str:
    """A class as a reader wants to see it: its header, its fields, and the methods that need no words."""
    node, lines = node_of(class_)
    inside = assignments(node.body, lines)
    plain = [header(member) for member in shown(class_) if not member.has_docstring]
    parts = ["\n".join(inside)] * bool(inside) + plain
    return header(class_) + ":\n" * bool(parts) + textwrap.indent("\n\n".join(parts), "    ")


# ----------------------------------------------------------------------------------------------------------- docstrings


def prose(text: str) -> str:
    """A docstring's text as Markdown: examples are fenced, and what looks like HTML stays readable."""
    done, fenced = [], False
    for line in text.splitlines():
        if not fenced and line.lstrip().startswith(">>>"):
            done += [""] * bool(done and done[-1]) + ["```pycon"]
            fenced = True
        elif fenced and not line.strip():
            done.append("```")
            fenced = False
        # Even pieces lie between code spans, odd ones are spans.
        pieces = re.split(r"(``.+?``|`[^`]+`)", line)
        pieces[::2] = [re.sub(r"([<*])(?=\S)", r"\\\1", piece) for piece in pieces[::2]]
        done.append(line if fenced else "".join(pieces))
    return "\n".join([*done, "```"] if fenced else done)


def item(entry: griffe.DocstringElement) -> str:
    """An argument, attribute, error or result as one entry of a list."""
    name = getattr(entry, "name", None) or (entry.annotation if isinstance(entry, griffe.DocstringRaise) else None)
    if str(name).endswith(","):  # "hidden, mask: ..." is read as the name "hidden," and the type "mask"
        name = f"{name} {entry.annotation}"
    text = f"`{name}`: {prose(entry.description)}" if name else prose(entry.description)
    return "- " + text.replace("\n", "\n  ")


def sections(docstring: griffe.Docstring | None) -> Iterator[str]:
    """The parts of a docstring in their order; raises ``TypeError`` for a kind that has no layout here."""
    for section in docstring.parsed if docstring else []:
        if section.kind is griffe.DocstringSectionKind.text:
            yield prose(section.value)
        elif section.kind is griffe.DocstringSectionKind.admonition:
            yield f"**{section.title}** " + prose(section.value.description)
        elif isinstance(section.value, list) and all(hasattr(entry, "description") for entry in section.value):
            title = TITLES.get(section.kind.value, section.kind.value.capitalize())
            yield f"**{title}**\n\n" + "\n".join(item(entry) for entry in section.value)
        else:
            raise TypeError(f"no layout for a section of {section.kind.value}: write it as prose, or add it here")


def summary(module: griffe.Module) -> str:
    """The first sentence of a module's docstring."""
    return prose(module.docstring.value.split("\n\n")[0].replace("\n", " ")) if module.docstring else ""


# ---------------------------------------------------------------------------------------------------------------- pages


def passed_on(module: griffe.Module, modules: list[griffe.Module]) -> Iterator[str]:
    """Links to the names of ``__all__`` that are defined elsewhere, imported or fetched lazily, and to submodules."""
    for name in module.exports or []:
        homes = [home for home in modules if name in anchors(home)]
        member = module.members.get(name)
        if member is not None and member.is_alias:
            homes = [home for home in homes if f"{home.path}.{name}" == member.target_path]
        if homes and module not in homes:
            yield f"- [`{name}`]({file_of(homes[0])}#{anchors(homes[0])[name]}) of `{homes[0].path}`"
    for home in modules:
        if home.parent is module:
            yield f"- [`{home.path}`]({file_of(home)}): {summary(home)}"


def page(module: griffe.Module, modules: list[griffe.Module]) -> str:
    """One module: what it says of itself, its constants, then each class and function under a heading."""
    source = module.filepath.relative_to(ROOT).as_posix()
    parts = [f"# `{module.path}`", f"[All modules]({INDEX}) · [source](../../{source})", *sections(module.docstring)]
    parts.append("\n".join(passed_on(module, modules)))
    things, places = shown(module), anchors(module)
    if len(things) > 1:
        parts.append(" · ".join(f"[`{thing.name}`](#{places[thing.name]})" for thing in things))
    text = module.filepath.read_text(encoding="utf-8")
    if constants := assignments(ast.parse(text).body, text.splitlines()):
        parts.append(python("\n".join(constants)))
    for thing in things:
        code = stub(thing) if thing.is_class else header(thing)
        parts += [f"## `{thing.name}`", python(code), *sections(thing.docstring)]
        for member in documented(thing):
            parts += [f"### `{thing.name}.{member.name}`", python(header(member)), *sections(member.docstring)]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def index(modules: list[griffe.Module]) -> str:
    """The table of all modules."""
    lines = ["# API reference", "", "Written by `make docs` from the docstrings: change those, not these pages.", ""]
    lines += ["| module | what it is for | offers |", "|---|---|---|"]
    for module in modules:
        names = ", ".join(f"`{name}`" for name in module.exports or [thing.name for thing in shown(module)])
        what = summary(module).replace("|", "\\|")
        lines.append(f"| [`{module.path}`]({file_of(module)}) | {what} | {names} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """File name -> text, for the index and every page of the reference."""
    package = griffe.load(
        "t5accel", search_paths=[ROOT], try_relative_path=False, allow_inspection=False, docstring_parser="google",
        docstring_options={"warnings": False, "returns_named_value": False, "returns_multiple_items": False},
    )  # fmt: skip
    modules = list(public_modules(package))
    return {INDEX: index(modules)} | {file_of(module): page(module, modules) for module in modules}


def main() -> None:
    """Write the pages, and remove those of modules that are gone."""
    written = pages()
    PAGES.mkdir(parents=True, exist_ok=True)
    for old in PAGES.glob("*.md"):
        if old.name not in written:
            old.unlink()
    for name, text in written.items():
        (PAGES / name).write_text(text, encoding="utf-8")
    print(f"Wrote {len(written)} pages to {PAGES.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
