"""Copying a helper must work: a module and what it imports, alone in an empty folder, and its examples still run.

The package's ``__init__`` files are emptied on the way, as for someone who copies single files: an example therefore
imports from the module that defines a name (``from t5accel.models.load import load_model``), not from the package.
"""

import ast
import doctest
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from test_layout import MODULES, ROOT, TREES, own_imports

import t5accel

# Modules that offer functions and no runnable example, each with its reason.
WITHOUT_EXAMPLE = {
    "t5accel.distillation.checkpointing": "tests/core/test_distillation.py interrupts and resumes runs",
    "t5accel.distillation.model_card": "tests/core/test_distillation.py saves students",
    "t5accel.cli": "its functions are commands; their tests run them",
    "t5accel.cli_options": "the same",
    "t5accel.cli_training": "the same",
    "t5accel.serve.cli": "the same",
    "t5accel.graphs.fused_step": "tests/core/test_ort_static.py runs its graph",
    "t5accel.graphs.gemma_layers": "tests/core/test_families.py runs its graphs",
    "t5accel.graphs.layers": "tests/core/test_export.py runs its graphs",
    "t5accel.graphs.weights": "tests/core/test_families.py exports families by it",
    "t5accel.precision.source_export": "tests/core/test_conversions.py reads and writes by it",
}
NOT_COPIED = {
    "t5accel",  # the lazy front door
    "t5accel.__main__",  # a script that runs when it is imported
    "bench.baselines.triton_attention",  # its kernels need Triton: make test-kernel
    "bench.record.web",  # it drives a browser: make test-web
}
COPIED = [
    name for name, path in MODULES.items()
    if path.name not in ("__init__.py", "__main__.py") and name not in NOT_COPIED
]  # fmt: skip
OF_THE_PACKAGE = [name for name in COPIED if name.startswith("t5accel.")]

# Runs in one process of its own: heavy libraries are imported once, ours afresh for each folder.
DRIVER = """
import doctest, importlib, io, json, os, sys, traceback
results = {}
for name, folder in json.load(sys.stdin).items():
    for old in [m for m in sys.modules if m.split(".")[0] in ("t5accel", "bench", "training")]:
        del sys.modules[old]
    os.chdir(folder)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    log, stdout = io.StringIO(), sys.stdout
    try:
        module = importlib.import_module(name)
        assert module.__file__.startswith(folder + os.sep), module.__file__
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
        for test in doctest.DocTestFinder().find(module):
            runner.run(test, out=log.write)
        results[name] = [runner.failures, runner.tries, log.getvalue()]
    except Exception:
        results[name] = [1, 0, log.getvalue() + traceback.format_exc()]
    finally:
        sys.stdout = stdout
        sys.path.remove(folder)
with open(sys.argv[1], "w") as file:
    json.dump(results, file)
"""


def docstrings(module: str) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in ast.walk(TREES[module]) if isinstance(node, documented)]


@cache
def example_lines(module: str) -> list[str]:
    return [line.source for text in docstrings(module) for line in doctest.DocTestParser().get_examples(text)]


def imports_of_examples(module: str) -> set[str]:
    """What the examples of ``module`` import of ours beyond the module's own needs: a backend's example decodes."""
    names = set()
    for node in (node for line in example_lines(module) for node in ast.walk(ast.parse(line))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & MODULES.keys()


def closure(module: str) -> set[str]:
    """``module``, all that it and its examples import of ours, all that these import, and so on."""
    found, open_ends = set(), [module, *imports_of_examples(module)]
    while open_ends:
        current = open_ends.pop()
        if current not in found:
            found.add(current)
            open_ends += own_imports(current)
    return found - {"t5accel"}


def copy(module: str, folder: Path) -> None:
    """The closure of ``module`` under ``folder``, and the data beside it where a copied file asks for the data."""
    sources = [MODULES[name] for name in closure(module)]
    for source in sources:
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        for package in [target.parent, *target.parent.parents]:
            if package == folder:
                break
            (package / "__init__.py").touch()
        if source.name != "__init__.py":
            shutil.copyfile(source, target)
    if any(re.search(r"data_folder|DATA\b", source.read_text(encoding="utf-8")) for source in sources):
        (folder / "data").symlink_to(ROOT / "data", target_is_directory=True)


def re_exports(package: str) -> dict[str, str]:
    """Name -> defining module, for what the ``__init__`` of ``package`` passes on; nothing for a plain module."""
    body = TREES[package].body if MODULES[package].name == "__init__.py" else []
    froms = [node for node in body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname or alias.name: node.module for node in froms for alias in node.names}


def require_that_examples_run(modules: list[str], root: Path) -> None:
    """Copy each module into a separate folder below ``root``, and run its examples there."""
    folders = {module: root.resolve() / module for module in modules}
    for module, folder in folders.items():
        copy(module, folder)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONPATH": ""}
    command, given = [sys.executable, "-c", DRIVER, root / "report.json"], json.dumps(folders, default=str)
    answer = subprocess.run(command, input=given, cwd=root, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    for module, (failures, tries, log) in json.loads((root / "report.json").read_text()).items():
        assert not failures, f"{module}, copied with empty __init__ files and {sorted(closure(module))}\n{log}"
        assert tries == len(example_lines(module)), f"{module}: its docstrings hold examples that were not run"


@pytest.mark.parametrize("half", (0, 1))  # one for each core
def test_examples_run_where_the_module_was_copied_to(half: int, tmp_path: Path) -> None:
    require_that_examples_run(OF_THE_PACKAGE[half::2], tmp_path)


def test_every_example_is_in_a_module_whose_examples_run() -> None:
    assert not [module for module in MODULES if module not in COPIED and example_lines(module)]


def test_names_are_imported_from_where_they_are_defined() -> None:
    """Through a package's ``__init__`` a name is a function; in a copy with an empty one it is missing or a module."""
    sources = [(module, text) for module in COPIED
               for text in (MODULES[module].read_text(encoding="utf-8"), *example_lines(module))]  # fmt: skip
    for module, source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module in MODULES.keys() - {"t5accel"} and not node.level:
                offered = re_exports(node.module)
                for alias in node.names:
                    assert alias.name not in offered, (
                        f"{module}: write `from {offered[alias.name]} import {alias.name}`, not from {node.module}"
                    )


def test_a_module_of_the_package_has_an_example() -> None:
    assert WITHOUT_EXAMPLE.keys() <= MODULES.keys()
    for module in OF_THE_PACKAGE:
        functions = [node.name for node in TREES[module].body if isinstance(node, ast.FunctionDef)]
        if public := [name for name in functions if not name.startswith("_")]:
            has_example, reason = any(">>>" in text for text in docstrings(module)), WITHOUT_EXAMPLE.get(module)
            assert has_example or reason, f"{module} offers {public} and no `>>>` example in a docstring"
            assert not (has_example and reason), f"{module} has an example now: take it off the list"


def test_each_public_name_tells_shapes_errors_and_an_example() -> None:
    for name in {*t5accel.__all__} - {"__version__"}:
        thing = getattr(t5accel, name)
        members = [one for key, one in vars(thing).items() if key[0] != "_"] if inspect.isclass(thing) else []
        told = "\n".join(inspect.getdoc(one) or "" for one in (thing, *members))
        assert ">>> " in told and re.search(r"Raises:|Raises ``\w+Error", told), name
        tensors = hasattr(thing, "embed") or "input_ids" in inspect.signature(thing).parameters
        assert not tensors or re.search(r"\([BNn]( \* \w)?,", told), f"{name}: with which shapes?"
