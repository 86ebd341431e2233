"""Every number of the README and its guides comes from a recorded result."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from typer.main import get_command as command_of
from typer.testing import CliRunner

from bench.__main__ import app as bench_app
from bench.gpu.cells import PUBLISHED, PUBLISHED_BATCHES
from bench.record.results_page import MARKED, pictures, tables
from bench.results import step_ms
from bench.systems import BATCHES, BOUND, CAPTURED, DRAWN, FLIGHT, GRAPH, REFERENCE, THEIR_BATCHES, THEIR_DRAWS
from t5accel.cli import app
from t5accel.models.random_init import random_t5
from t5accel.serve.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
README, OWN_MODEL, RESULTS, SERVING, WORKSHOP = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/own-model.md", "docs/results.md", "docs/serving.md", "docs/WORKSHOP.md")
)
ON_A_GPU = RESULTS.split("## On a GPU\n")[1].split("\n## ")[0]


def test_tables_are_drawn_from_their_files() -> None:
    assert len(MARKED.findall(RESULTS)) >= 2
    assert tables(RESULTS) == RESULTS, "run python -m bench.record.results_page"


def test_every_picture_of_the_results_is_drawn_from_its_file(tmp_path: Path) -> None:
    pictures(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*re.findall(r"]\((\S+\.png)\)", RESULTS)}


@pytest.fixture
def snippets(tmp_path: Path) -> list[str]:
    """The Python of README and of the page about own models, a file for each block."""
    for number, text in enumerate(re.findall(r"^```python\n(.*?)^```", README + OWN_MODEL, re.DOTALL | re.MULTILINE)):
        (tmp_path / f"block_{number}.py").write_text(text, encoding="utf-8")
    found = sorted(map(str, tmp_path.iterdir()))
    assert len(found) >= 5
    return found


@pytest.mark.once
def test_the_page_about_encoders_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs/encoders.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    (tmp_path / "data").symlink_to(ROOT / "data")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(2, 256)") and "'retrieval': 100.0" in done.stdout


@pytest.mark.parametrize("name", ["encoders-intel", "encoders-intel-amx", "encoders-amd", "encoders-amd-largest"])
def test_the_table_of_encoders_is_recorded(name: str) -> None:
    rows = json.loads((ROOT / f"data/results/{name}.json").read_text(encoding="utf-8"))["rows"]
    page = (ROOT / "docs/encoders.md").read_text(encoding="utf-8")
    table = page.split(f"<!-- data/results/{name}.json -->")[1].split("\n\n")[0]
    told = {line.split(" | ")[0].strip("| "): line for line in table.splitlines() if " ms · " in line}
    for system in {row["system"] for row in rows}:
        own = [row for row in rows if row["system"] == system and row["measured"] == "speed"]
        shown = [f"{1e3 * median(row['latency_s']):,.0f} ms · {row['ratio']:.2f}" for row in own]
        shown += [f"{min(row['cosine'] for row in own):.3f}", f"{own[0]['peak_memory_bytes'] / 1e6:.0f} MB"]
        assert told.pop(system) == f"| {system} | {' | '.join(shown)} |"
    assert not told


def checked(command: list[str], folder: Path) -> None:
    pytest.importorskip(command[0])
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_accepts_the_python_that_is_shown(snippets: list[str], tmp_path: Path) -> None:
    """torch and transformers are not followed: that takes minutes."""
    config = "[mypy]\nfollow_imports = silent\nignore_missing_imports = True\nscripts_are_modules = True\n"
    config += "[mypy-torch.*,transformers.*,onnxruntime.*,numpy.*]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(config)
    checked(["mypy", "--config-file", "mypy.ini", *snippets], tmp_path)


def test_pyright_accepts_the_python_that_is_shown(snippets: list[str], tmp_path: Path) -> None:
    """By basedpyright, whose wheel has all that it needs, by Pyright's own rules.

    Of torch and transformers it is told one class: to read them takes nine tenths of its time.
    """
    anything = "from typing import Any\ndef __getattr__(name: str) -> Any: ...\n"
    model = "class PreTrainedModel:\n    def __getattr__(self, name: str) -> Any: ...\n"
    for package, known in (("torch", anything), ("transformers", anything + model)):
        (tmp_path / "typings" / package).mkdir(parents=True)
        (tmp_path / "typings" / package / "__init__.pyi").write_text(known)
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT)], "include": snippets}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    checked(["basedpyright", "--pythonpath", sys.executable, "--level", "error"], tmp_path)


@pytest.fixture(scope="module")
def cards() -> dict[str, dict]:
    return {card: json.loads((ROOT / f"data/results/gpu-{card}.json").read_text("utf-8")) for card in ("h100", "h200")}


def timed(record: dict, cell: str) -> dict[str, dict]:
    """The rows of a cell that have a time, by their system."""
    return {row["system"]: row for row in record["rows"] if row["cell"] == cell and row.get("latency_s")}


def tables_about_gpus() -> list[list[list[str]]]:
    """The tables' cells, line by line, without the heads."""
    tables = re.findall(r"(?:^\|.*\n)+", ON_A_GPU, re.MULTILINE)
    return [[[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]] for table in tables]


def test_what_a_gpu_reaches_is_told_as_it_was_recorded(cards: dict[str, dict]) -> None:
    cells = {
        "t5-small, one text": "t5-small", "t5-base": "t5-base", "flan-t5-large": "flan-t5-large",
        "t5-small, 512 source tokens": "t5-small, source 512", "t5-small, 8 texts": "t5-small, batch 8",
        "t5-small, 64 texts": "t5-small, batch 64", "t5-small, 4 beams": "t5-small, 4 beams",
        "t5-small, 8 texts with 4 beams": "t5-small, 8 x 4 beams", "t5-small, sampling": "t5-small, sampling",
        "BART-base": "bart-base", "opus-mt": "opus-mt", "NLLB-200, 600M": "nllb-200-distilled-600M",
        "ByT5-small": "byt5-small",
    }  # fmt: skip
    table, _ = tables_about_gpus()
    assert [label for label, *_ in table] == [*cells]
    for label, *told in table:
        expected = []
        for record in cards.values():
            rows = timed(record, cells[label])
            theirs, ours = rows.get(REFERENCE, rows.get(THEIR_DRAWS)), rows.get(GRAPH, rows.get(DRAWN))
            if theirs is None or ours is None:
                expected += ["–"] * 4
                continue
            digits = 0 if ours["ratio"] >= 10 else 1
            speed = f"{ours['ratio']:.{digits}f}", f"{ours['tokens_per_s']:,.0f}"
            expected += [f"{step_ms(theirs):.2f}", f"{step_ms(ours):.2f}", *speed]
        assert told == expected, label


def test_figures_in_the_text_about_gpus_are_recorded(cards: dict[str, dict]) -> None:
    told = " ".join(ON_A_GPU.split())
    for record in cards.values():
        (floor,) = (row for row in record["rows"] if row["measured"] == "floor")
        assert f"asks for {floor['kernels']} kernels where transformers asks for {floor['eager_kernels']:.0f}" in told
    exact, half = (timed(cards["h100"], f"runtimes, {dtype}") for dtype in ("float32", "float16"))
    bound, captured = (exact[system]["ratio"] for system in (BOUND, CAPTURED))
    words = f"is {bound:.1f} times as fast as transformers on the H100, in a CUDA graph {captured:.1f} times"
    assert words in told
    assert f"factor is {exact[GRAPH]['ratio']:.0f} there, in fp16 {half[GRAPH]['ratio']:.0f}" in told
    theirs = sorted(
        step_ms(timed(cards["h200"], cell)[REFERENCE]) for cell in ("t5-small", "cache, 16 tokens", "cache, 64 tokens")
    )
    assert "it took {:.1f}, {:.1f} and {:.1f} ms".format(*theirs) in told
    fewer, more = (timed(cards["h200"], f"in flight, {rows} rows") for rows in (64, 256))
    rates = [rows[FLIGHT]["answers_per_s"] for rows in (fewer, more)]
    assert "With 64 rows {:,.0f} are answered a second, with 256 rows {:,.0f}".format(*rates) in told
    slower = [timed(cards["h100"], f"in flight, {rows} rows")[FLIGHT]["answers_per_s"] for rows in (64, 256)]
    assert "machine answered {:,.0f} and {:,.0f}".format(*slower) in told
    batches = [fewer[system]["answers_per_s"] for system in (BATCHES, THEIR_BATCHES)]
    assert f"static batches of 64 answer {batches[0]:,.0f} a second, and transformers, in" in told
    assert f"in batches of 64 as well, {batches[1]:.0f}." in told


def test_published_figures_are_not_told_as_ours(cards: dict[str, dict]) -> None:
    _, table = tables_about_gpus()
    told = {label: values for label, *values in table}
    for model, published in PUBLISHED.items():
        for card, record in cards.items():
            rows = [timed(record, f"{model}, batch {batch}")[GRAPH] for batch in PUBLISHED_BATCHES]
            assert told.pop(f"{model}: ours, {card.upper()}") == [f"{row['tokens_per_s']:,.0f}" for row in rows]
        for name, values in published.items():
            assert told.pop(f"{model}: {name}, published") == [f"{value:,}" for value in values]
    assert not told


def test_readme_and_workshop_list_every_notebook_with_its_recorded_seconds() -> None:
    rows = json.loads((ROOT / "data/results/course.json").read_text(encoding="utf-8"))["rows"]
    recorded = {row["notebook"]: row["seconds"] for row in rows}
    in_workshop = re.findall(r"^\| (\d\d_\w+) \| [^|]+ \| (\d+) s \| \d+ min \|$", WORKSHOP, re.MULTILINE)
    assert dict(in_workshop) == {row["notebook"].removesuffix(".ipynb"): f"{row['seconds']:.0f}" for row in rows}
    listed = re.findall(r"^\| \[(\w+)\]\(notebooks/(\w+\.ipynb)\) \| (.+) \| (\d+) \| (\w+) \|$", README, re.MULTILINE)
    assert {file for _, file, *_ in listed} == {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    for name, file, question, seconds, gpu in listed:
        assert file == f"{name}.ipynb"
        assert int(seconds) == round(recorded[file]), f"{file}: {seconds} s in README, {recorded[file]} s recorded"
        header = "".join(json.loads((ROOT / "notebooks" / file).read_text(encoding="utf-8"))["cells"][0]["source"])
        assert header.startswith(f"# {name[:2]} · {question}\n"), f"{file} asks another question than README"
        assert re.search(rf"\*\*GPU\*\* {gpu}\b", header) and gpu in ("no", "optional"), f"{file}: GPU {gpu} in README"


def test_the_workshop_has_a_block_for_every_notebook() -> None:
    blocks = dict(re.findall(r"^\*\*(\d\d)\.?\*\*(.*?)\n\n", WORKSHOP, re.MULTILINE | re.DOTALL))
    assert [*blocks] == sorted(path.name[:2] for path in (ROOT / "notebooks").glob("*.ipynb"))
    for number, block in blocks.items():
        told = [mark for mark in re.findall(r"\*(Let happen|[A-Z]\w+)\*", block) if mark != "Slow"]
        assert told == ["Ask", "Let happen", "Usual", "Discuss"] and "In the task:" in " ".join(block.split()), number


def test_the_workshop_names_targets_and_commands_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([\w-]+)", WORKSHOP))
    assert targets >= {"translate", "wheelhouse"}
    assert not [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)]
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(re.findall(r"`t5accel (\w+)", WORKSHOP)) <= commands


def test_readme_is_short_and_shows_the_first_commands_of_the_page_about_own_models() -> None:
    assert len(README.splitlines()) < 150 and len(re.findall(r"!\[", README)) == 1
    (block,) = re.findall(r"## Your own T5\n\n```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert [shlex.split(line, comments=True) for line in block.splitlines()] == [command for command, _ in walk()[:3]]


def test_flags_that_documents_name_exist() -> None:
    """Those of our commands, in the page about servers, SECURITY and README."""
    known = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    known |= {flag for command in command_of(app).commands.values() for one in command.params for flag in one.opts}
    security = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(--[a-z-]+)|t5accel .*? (--[a-z-]+)", README + security + SERVING))
    assert len(named) > 20 and {*map("".join, named)} - known <= {"--help", "--share"}  # the latter is the demo's


def walk() -> list[tuple[list[str], str]]:
    """The commands on an own model, each with the output that is shown."""
    (shown,) = re.findall(r"^<!-- own model -->\n```console\n(.*?)^```", OWN_MODEL, re.MULTILINE | re.DOTALL)
    commands = [part.partition("\n") for part in shown.removeprefix("$ ").split("\n$ ")]
    return [(shlex.split(command), output.strip()) for command, _, output in commands]


def ran(command: list[str]) -> Any:
    """``t5accel …`` or ``python -m bench …``, in this process."""
    if command[0] == "t5accel":
        return CliRunner().invoke(app, command[1:])
    assert command[:3] == ["python", "-m", "bench"]
    return CliRunner().invoke(bench_app, command[3:])


def same_lines(shown: str, found: str, *, scores_within: float) -> bool:
    """Whether each line that is shown was printed, and numbers are near: in 8 bits they depend on the processor."""
    number = r"\d+(?:\.\d+)?"
    for line, printed in zip(shown.splitlines(), found.splitlines(), strict=False):
        near = zip(re.findall(number, line), re.findall(number, printed), strict=False)
        word = re.sub(number, "0.0", line).replace("gains", "loses"), re.sub(number, "0.0", printed)
        if word[0] != word[1].replace("gains", "loses") or any(
            abs(float(one) - float(other)) > scores_within for one, other in near
        ):
            return False
    return len(found.splitlines()) >= len(shown.splitlines())


@pytest.fixture
def own_data(tmp_path: Path, monkeypatch, cache_of_its_own, threads_put_back, random_state_put_back) -> Path:
    """A folder with the stand-in and its data, in which the commands run."""
    (stand_in,) = re.findall(r"^<!-- a stand-in -->\n```python\n(.*?)^```", OWN_MODEL, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(stand_in, {})  # noqa: S102
    return tmp_path


def test_the_commands_on_ones_own_t5_do_what_is_shown_until_they_train(own_data: Path) -> None:
    """Word for word; a smaller model is distilled in place of the stand-in, and not quantised."""
    rows = [(own_data / name).read_text(encoding="utf-8").splitlines() for name in ("train.jsonl", "dev.jsonl")]
    assert len({*rows[0], *rows[1]}) == 300 and not {*rows[0]} & {*rows[1]}
    commands = walk()
    assert len(commands) == 6 and all(output for _, output in commands)
    for command, output in commands[:3]:
        found = ran(command)
        assert found.exit_code == 0 and "Warning" not in found.stderr, found.output
        assert same_lines(output, found.stdout, scores_within=1.0), found.stdout
    assert (own_data / "my-t5-int8" / "manifest.json").is_file()
    sizes = dict(vocab_size=8000, d_model=16, d_kv=8, d_ff=32, num_heads=2, num_layers=2, num_decoder_layers=4)
    random_t5(sizes).save_pretrained("my-t5")
    distilled = ran(commands[3][0])
    assert distilled.exit_code == 0, distilled.output
    assert same_lines(commands[3][1], distilled.stdout, scores_within=1e3)
    assert re.search(r"Warning: The student scores bleu 0\.\d\d: below 5 points", distilled.stderr)


@pytest.mark.long
def test_the_commands_on_ones_own_t5_end_in_a_student_that_translates(own_data: Path) -> None:
    for command, output in walk()[3:]:
        found = ran(command)
        assert found.exit_code == 0 and "Warning" not in found.stderr, found.output
        assert same_lines(output, found.stdout, scores_within=3.0), found.stdout


def alike(shown: Any, found: Any) -> bool:
    """Whether a printed answer has the fields and texts that are shown; times, counts and ids are of one run."""
    if isinstance(shown, dict):
        return all(
            name in found and (name in ("id", "created") or alike(value, found[name])) for name, value in shown.items()
        )
    if isinstance(shown, list):
        return len(shown) == len(found) and all(map(alike, shown, found))
    return isinstance(found, float) if isinstance(shown, float) else shown == found


def answer(printed: str) -> Any:
    """One answer; of a stream the last event, with the text of all."""
    events = [json.loads(line.removeprefix("data: ")) for line in printed.splitlines() if line]
    return {**events[-1], "text": "".join(event["text"] for event in events)} if len(events) > 1 else events[0]


def test_the_server_answers_the_requests_shown_with_the_answers_shown(cache_of_its_own) -> None:
    """Word for word, but for the port."""
    part = SERVING.split("## As a server\n")[1].split("\n## ")[0]
    (command,) = re.findall(r"^```bash\n(t5accel serve .*)$", part, re.MULTILINE)
    (client,) = re.findall(r"^<!-- a client -->\n```console\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program, *arguments = shlex.split(command, comments=True)
    server = subprocess.Popen(
        [sys.executable, "-m", program, *arguments, "--port", str(port)], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 60
        while subprocess.run(["curl", "-s", f"localhost:{port}/health/ready"], stdout=subprocess.DEVNULL).returncode:
            assert server.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        requests = re.findall(r"^\$ (.*?[^\\])\n(.*?\n)(?=\$ |\Z)", client, re.MULTILINE | re.DOTALL)
        assert len(requests) == client.count("$ ") == 4
        for request, shown in requests:
            asked = request.replace("localhost:8000/", f"localhost:{port}/")
            assert asked != request
            found = subprocess.run(asked, shell=True, capture_output=True, text=True, check=True).stdout
            assert alike(answer(shown), answer(found)), f"{request}\n{found}"
    finally:
        server.terminate()
        server.wait(30)
