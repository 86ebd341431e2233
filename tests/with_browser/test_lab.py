"""What a reader does: open a notebook in JupyterLab, run all its cells from the menu, and look at it.

Run by `make test-browser`; plain `make test` does not come here. Screenshots and logs lie in build/browser/.
"""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import OUT, ROOT, Lab, lab_command
from playwright.sync_api import Page, expect

CHOSEN = "[0-9]*.ipynb" if os.environ.get("ALL_NOTEBOOKS") else "0[01]_*.ipynb"
NOTEBOOKS = sorted((ROOT / "notebooks").glob(CHOSEN))
RUN_S = 600  # about 40 on two idle cores

LOOK = """() => {
    const texts = (root, selector) => [...root.querySelectorAll(selector)].map((node) => node.textContent.trim());
    const notebook = document.querySelector(".jp-Notebook");
    return {
        prompts: texts(notebook, ".jp-CodeCell .jp-InputPrompt"),
        dialogs: texts(document, ".jp-Dialog-content"),
    };
}"""


@dataclass
class Seen:
    """What the page showed when every cell had its number, nothing ran any more, or time was up."""

    prompts: list[str]
    dialogs: list[str]
    page_errors: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of cells

    def all_numbered(self) -> bool:
        return self.prompts == [f"[{number}]:" for number in range(1, len(self.prompts) + 1)]

    def problems(self, code_cells: int) -> list[str]:
        found = [f"a cell failed: {text}" for text in self.errors]
        found += [f"a dialog stands in the way: {text}" for text in self.dialogs]
        found += [f"an error of the page: {text}" for text in self.page_errors]
        if len(self.prompts) != code_cells:
            found.append(f"{len(self.prompts)} of {code_cells} code cells are shown")
        if not self.all_numbered():
            found.append(f"not every cell ran, in order: {' '.join(self.prompts)}")
        return found


def menu(page: Page, title: str, command: str) -> None:
    page.locator(f'.lm-MenuBar-itemLabel:text-is("{title}")').click()
    page.locator(f'.lm-Menu-item[data-command="{command}"]').click()


def has_idle_kernel(lab: Lab) -> bool:
    return [(kernel["execution_state"], kernel["connections"] > 0) for kernel in lab.kernels()] == [("idle", True)]


def run_all(page: Page, lab: Lab, name: str, *, limit_s: float = RUN_S) -> Seen:
    """Open a notebook, choose "Run All Cells" in the menu, watch it, and save it."""
    page_errors: list[str] = []
    page.on("pageerror", lambda error: page_errors.append(str(error)))
    # A workspace of its own: the tabs of another notebook do not come back, and with them its kernel.
    page.goto(f"{lab.url}/lab/workspaces/{Path(name).stem}/tree/{name}?token={lab.token}")
    expect(page.locator(".jp-NotebookPanel .jp-Cell").first).to_be_visible(timeout=60_000)
    deadline = time.monotonic() + limit_s
    while not has_idle_kernel(lab):
        assert time.monotonic() < deadline, f"no kernel is ready: {lab.kernels()}"
        page.wait_for_timeout(200)
    menu(page, "Run", "runmenu:run-all")
    idle_looks = 0  # after an error the cells below are not run: nothing is busy, and numbers are missing
    while True:
        page.wait_for_timeout(500)
        seen = Seen(**page.evaluate(LOOK), page_errors=page_errors)
        idle_looks = 0 if "[*]:" in seen.prompts or not has_idle_kernel(lab) else idle_looks + 1
        if seen.all_numbered() or idle_looks > 5 or seen.dialogs or page_errors or time.monotonic() > deadline:
            break
    if not seen.dialogs:
        seen.errors = cell_errors(save(page, lab.folder / name))
    return seen


def save(page: Page, path: Path) -> dict[str, Any]:
    """Save by menu and return what was written: in the page an error looks like any text on standard error."""
    before = path.stat().st_mtime_ns
    menu(page, "File", "docmanager:save")
    deadline = time.monotonic() + 30
    while path.stat().st_mtime_ns == before:
        assert time.monotonic() < deadline, f"{path.name} was not saved"
        page.wait_for_timeout(200)
    page.wait_for_timeout(200)
    return json.loads(path.read_text(encoding="utf-8"))


def cell_errors(book: dict[str, Any]) -> list[str]:
    outputs = [output for cell in book["cells"] for output in cell.get("outputs", [])]
    return [f"{output['ename']}: {output['evalue']}" for output in outputs if output["output_type"] == "error"]


def screenshot(page: Page, name: str) -> Path:
    path = OUT / f"{name}.png"
    page.wait_for_timeout(500)  # what was scrolled to has to be drawn
    page.screenshot(path=path)
    assert path.stat().st_size > 10_000, f"{path} shows nothing"
    return path


def test_there_is_something_to_test() -> None:
    assert len(NOTEBOOKS) >= 2, f"notebooks/ holds {[path.name for path in NOTEBOOKS]} alone"


def test_make_lab_is_what_runs_here(lab: Lab) -> None:
    assert lab_command()[1:] == ["-m", "jupyter", "lab", "notebooks/"]
    assert (lab.folder / NOTEBOOKS[0].name).is_file()
    assert {entry["name"] for entry in lab.api("contents")["content"]} >= {path.name for path in NOTEBOOKS}
    assert lab.api("status")["kernels"] == 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_reader_can_run_the_notebook(path: Path, page: Page, lab: Lab) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    seen = run_all(page, lab, path.name)
    outer = page.locator(".jp-NotebookPanel .jp-WindowedPanel-outer")
    outer.evaluate("node => { node.scrollTop = 0; }")
    screenshot(page, f"{path.stem}-top")
    plots = page.locator(".jp-OutputArea-output img")
    if plots.count():
        plots.last.evaluate('node => node.scrollIntoView({block: "center"})')
        screenshot(page, f"{path.stem}-plot")
    assert seen.problems(sum(cell["cell_type"] == "code" for cell in cells)) == []
    assert plots.count(), "no plot is shown"
    widths = plots.evaluate_all("nodes => nodes.map((node) => node.complete && node.naturalWidth)")
    assert all(width and width > 100 for width in widths), f"a plot is not drawn: {widths}"
