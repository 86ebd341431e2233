"""The site's pages that are made from data: contents, which notebook for which problem, scoreboards, course report.

They are tables that `docs/site/sift.js` lets a reader sort, filter and plot.
"""

import argparse
import html
import json
import re
from collections.abc import Callable, Iterable, Mapping
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from bench.figures import BOARD, LADDER
from bench.results import filter_rows, load_results, provenance, step_ms

ROOT = Path(__file__).resolve().parents[1]

Cell = Callable[[Mapping[str, Any]], str]

PEERS: dict[str, Cell] = {
    "system": lambda row: row["system"],
    **{key: lambda row, key=key: str(row[key]) for key in ("precision", "batch", "source_tokens", "beams")},
    "ms/token": lambda row: f"{step_ms(row):.2f}",
    "tokens/s": lambda row: f"{row['new_tokens'] * row['batch'] / median(row['latency_s']):.0f}",
    **{key: BOARD[key] for key in ("ratio", "range")},
}
CLIMBED: dict[str, Cell] = {"cell": lambda row: row["cell"], **LADDER}
BERT: dict[str, Cell] = {
    **{key: lambda row, key=key: row.get(key, "–") for key in ("cell", "rung", "adds", "on")},
    "ms": lambda row: f"{median(row['latency_s']) * 1e3:.1f}",
    "tokens/s": lambda row: f"{row['tokens_per_s']:.0f}",
    "factor": lambda row: f"{row['factor']:.2f}" if "factor" in row else "–",
    "in all": lambda row: f"{row['ratio']:.1f}x",
    "MB": lambda row: f"{row['size_bytes'] / 1e6:.1f}",
}
BOARDS = (
    ("scoreboard-mini-amd.json", "The bundled model, AMD EPYC", BOARD),
    ("scoreboard-mini-intel.json", "The bundled model, Intel Xeon", BOARD),
    ("scoreboard-t5-small-amd.json", "t5-small's size, AMD EPYC", BOARD),
    ("scoreboard-t5-small-intel.json", "t5-small's size, Intel Xeon", BOARD),
    ("ladder-amd.json", "From the naive loop upwards, AMD EPYC", CLIMBED),
    ("ladder-intel.json", "From the naive loop upwards, Intel Xeon", CLIMBED),
    ("peers-amd.json", "Beside its peers, AMD EPYC with AVX-512", PEERS),
    ("peers-amd-avx2.json", "Beside its peers, AMD EPYC with AVX2", PEERS),
    ("peers-intel.json", "Beside its peers, Intel Xeon", PEERS),
    ("peers-families.json", "Other families beside their peers", {"model": lambda row: row["model"], **PEERS}),
    ("peers-gemma.json", "T5Gemma beside its peers", {"model": lambda row: row["model"], **PEERS}),
    ("bert.json", "A BERT that answers questions", BERT),
    ("bert-amd-avx-vnni.json", "The same BERT, AMD EPYC with AVX-VNNI", BERT),
)
DAY = 390  # minutes without the breaks
TIMES = {"1 hour": 60, "2 hours": 120, "3½ hours (half a day)": 210, "6½ hours (a day)": DAY}
FILTERED = {"fits into", "cell", "model", "precision", "batch", "source_tokens", "beams", "gate", "task", "technique*",
            "hardware"}  # fmt: skip
PLOTTED = {"tokens/s", "ratio", "in all", "ms/token", "ms/text", "ms", "s", "MB", "peak MB", "BLEU", "ROUGE-L", "EM"}
LABELS = {"technique", "rung", "system", "on", "in the browser", "notebook"}


def table(columns: Iterable[str], rows: Iterable[Iterable[str]], *, escape: bool = True) -> str:
    """Rows of cells as a page's table. A column's name says what `sift.js` makes of it; a star there is not shown."""
    kinds = (("filter", FILTERED), ("plot", PLOTTED), ("label", LABELS))
    heads = "".join(
        f"<th{''.join(f' data-{kind}' for kind, names in kinds if name in names)}>{html.escape(name.strip('*'))}</th>"
        for name in columns
    )
    lines = ("".join(f"<td>{html.escape(cell) if escape else cell}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table class="sift"><thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody></table>'


def raw(content: str) -> str:
    """HTML inside of a Markdown page."""
    return f"```{{raw}} html\n{content}\n```"


def notebooks() -> dict[str, dict[str, Any]]:
    """By number, such as "00", what each notebook says of itself: its metadata, its question, the numbers it needs."""
    found = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        book = json.loads(path.read_text(encoding="utf-8"))
        header = next(text for text in map("".join, (cell["source"] for cell in book["cells"])) if text[:2] == "# ")
        number, question = re.match(r"# (\d\d) · (.*)", header).groups()
        needs = re.findall(r"\b\d\d\b", re.search(r"\*\*Needs\*\* ([^·;]*)", header)[1])
        found[number] = {"stem": path.stem, "question": question, "needs": needs, **book["metadata"]["t5accel"]}
    return found


def contents() -> str:
    """The page that leads from a question, or from the time that a reader has, to a notebook."""
    books = notebooks()

    def with_needed(number: str) -> set[str]:
        return {number}.union(*map(with_needed, books[number]["needs"]))

    def minutes(numbers: Iterable[str]) -> int:
        return sum(books[number]["minutes"] for number in numbers)

    lines = []
    for number, book in books.items():
        question = re.sub(r"`(.*?)`", r"<code>\1</code>", html.escape(book["question"]))
        link = f'<a href="notebooks/{book["stem"]}.html">{number} · {question}</a>'
        chain = sorted(with_needed(number))
        budget = next(name for name, most in TIMES.items() if minutes(chain) <= most)
        lines.append([link, str(book["minutes"]), ", ".join(chain[:-1]) or "–", str(minutes(chain)), budget])
    core = [number for number in books if number < "20"]
    columns = ["question", "minutes", "after", "from nothing", "fits into"]
    return (
        "# Contents by question and time\n\nMinutes are those of a workshop, with the exercise; *from nothing* adds "
        f"the notebooks that come before. The core, {core[0]} to {core[-1]}, takes "
        f"{minutes(core) / 60:.1f} hours, which are {ceil(minutes(core) / DAY)} days; with the extras from 20 on, "
        f"{minutes(books) / 60:.1f} hours, {ceil(minutes(books) / DAY)} days. [Teaching](docs/WORKSHOP.md) has plans "
        "with breaks.\n\n"
        f"{raw(table(columns, lines, escape=False))}\n"
    )


def which() -> str:
    """The page that leads from a problem to a notebook, from the notebooks' metadata and the last recorded run."""
    seconds = {row["notebook"]: row["seconds"] for row in load_results("course.json")["rows"]}
    lines = []
    for book in notebooks().values():
        stem = book["stem"]
        texts = [book["problem"], *(", ".join(book[key]) for key in ("technique", "task", "hardware"))]
        problem, *rest = map(html.escape, texts)
        ran = f"{seconds[f'{stem}.ipynb']:.0f}" if f"{stem}.ipynb" in seconds else "–"
        lines.append([problem, f'<a href="notebooks/{stem}.html">{stem}</a>', *rest, str(book["minutes"]), ran])
    columns = ["my problem", "notebook", "technique*", "task", "hardware", "minutes", "runs in, s"]
    return (
        "# Which notebook for my problem?\n\nChoose what you have. A task is one that the notebook measures; *any* "
        "means that nothing in it depends on the task, and fits them all.\n\n"
        f"{raw(table(columns, lines, escape=False))}\n"
    )


def boards() -> str:
    """The recorded scoreboards."""
    (notebook,) = (ROOT / "notebooks").glob("*_scoreboard_and_claims.ipynb")
    parts = [
        "# Scoreboards",
        "Recorded runs, equal output first; speeds of two tables are those of two runs and do not compare. Notebook "
        f"[{notebook.stem}](notebooks/{notebook.name}) climbs the ladder with you. An en dash stands for what was not "
        "measured.",
    ]
    for file, title, columns in BOARDS:
        record = load_results(file)
        rows = [row for row in filter_rows(record["rows"], measured="speed") if row.get("latency_s")]
        if rows:
            lines = ([text(row) for text in columns.values()] for row in rows)
            where, _ = provenance(record).split("\n")
            parts += [f"## {title}", f"{where}. From [{file}](data/results/{file}).", raw(table(columns, lines))]
    return "\n\n".join(parts) + "\n"


def report() -> str:
    """What the last recorded run of the course reported of each notebook."""
    record = load_results("course.json")
    about, command = provenance(record, tuple(record["versions"])).split("\n")
    lines = []
    for row in record["rows"]:
        stem = row["notebook"].removesuffix(".ipynb")
        peak = f"{row['peak_memory_bytes'] / 1e6:.0f}" if "peak_memory_bytes" in row else "–"
        link = f'<a href="notebooks/{stem}.html">{stem}</a>'
        lines.append([link, html.escape(row.get("status", "passed")), f"{row['seconds']:.1f}", peak])
    return (
        f"# Course report\n\n`{command}` runs every notebook from top to bottom, with the solutions of its tasks. The "
        "recorded run: memory is the peak of the notebook's kernel, and an en dash stands for what was not recorded. "
        f"From [course.json](data/results/course.json), which holds notebooks that passed.\n\nPython "
        f"{record['machine']['python']}; {about}.\n\n"
        f"{raw(table(['notebook', 'status', 's', 'peak MB'], lines, escape=False))}\n"
    )


def browser() -> str:
    """What `bench/record/web.py` recorded of the page, a row for each model."""
    record = load_results("web.json")
    lines = []
    for name in dict.fromkeys(row["system"] for row in record["rows"]):
        visit, speed, quality = (
            next(filter_rows(record["rows"], system=name, measured=what))
            for what in ("first visit", "speed", "quality")
        )
        sent = visit["settings"]["transfer_bytes"]
        times = f"{visit['first_s']:.2f}", f"{speed['first_p50_s']:.2f}", f"{speed['us_per_token'] / 1e3:.1f}"
        scores = (f"{quality[key]:.1f}" for key in ("bleu", "rougeL", "exact_match"))
        sizes = f"{speed['size_bytes'] / 1e6:.1f}", f"{sent / 1e6:.1f}"
        lines.append([name, *times, f"{speed['tokens_per_s']:.0f}", *sizes, *scores])
    if not lines:
        return ""
    columns = ["in the browser", "first visit, s", "first word, s", "ms/token", "tokens/s", "MB", "MB sent", "BLEU",
               "ROUGE-L", "EM"]  # fmt: skip
    how = visit["settings"]
    return (
        f"{record['machine']['cpu']}, one thread; {how['browser']} without a window, onnxruntime-web {how['version']}; "
        f"{record['date']}, commit {record['commit']}; files from the same machine. A first visit is clicked at once: "
        "its first word waits for the model. The others are medians of a page that is warm, over the examples. From "
        "[web.json](data/results/web.json).\n\n" + raw(table(columns, lines))
    )


SEE = """# The model in your browser

{first}

{figures}

How it is made: [`web/src/t5.js`](web/src/t5.js) is what an export asks of another language, in a hundred lines.
`python -m bench demo` compares several ways of running a model, side by side, on a machine of yours.
"""
HERE = (
    "This page loads the bundled model once and runs it on your own device: translate, summarise, ask. Nothing that is "
    "typed there leaves it.\n\n" + raw('<p><a href="web/index.html">Open it</a></p>')
)
NOT_HERE = "`make web` builds a page that runs the bundled model on your own device; this site was built without it."


def write(out: Path, *, web: bool) -> None:
    """The pages, as Markdown for Sphinx."""
    pages = {
        "contents": contents(),
        "which": which(),
        "boards": boards(),
        "report": report(),
        "see": SEE.format(first=HERE if web else NOT_HERE, figures=browser()),
    }
    for name, text in pages.items():
        (out / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--web", action="store_true", help="the web page is part of the site")
    args = parser.parse_args()
    write(args.out, web=args.web)
