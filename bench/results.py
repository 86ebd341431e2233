"""Files of results: one flat kind of row, written atomically, continued after an interruption, tabulated."""

from __future__ import annotations

import argparse
import html
import json
import os
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

from t5accel import machine
from t5accel.errors import InputError

DATA = Path(__file__).resolve().parents[1] / "data"  # of the checkout
LIBRARIES = ("torch", "transformers", "onnxruntime")  # whose versions a reader asks for first


class Row(TypedDict, total=False):
    """One measurement, flat: plain values and lists of them. A row omits what does not apply to it.

    The name says the unit: ``_s`` seconds, ``_bytes`` bytes, ``_us`` microseconds. Scores run from 0 to 100.
    Besides these keys there are the scores of a part of the evaluation sets, such as ``bleu_3-5`` or ``f1_unseen``:
    see `SCORES`; and the losses on composed texts, see `COMPOSED`.
    """

    # What was measured, and of what.
    measured: str  # "speed", "quality", "size", "floor", "equality" …: what the row is about
    cell: str  # the comparison that a row belongs to, where a file holds several kinds
    system: str  # what was timed or scored, as a reader calls it
    reference: str  # the system that ratios refer to
    backend: str  # the module or library that ran it
    model: str
    made_from: str  # the model that this one was distilled or pruned from
    bundled: str  # the name that this model has in the package
    quality_of: str  # the model whose scores these are, if it is another one with the same recipe
    task: str
    precision: str  # the recipe's name, such as "int8"; for others' systems the kind of numbers
    recipe_hash: str
    sha256: str  # of the model: of its sizes and weights
    settings: dict[str, Any]  # how it was configured, trained or sized: plain values by name, one level deep
    failed: str  # why there is no time
    lacks: list[str]  # what could not be found out, and why
    commit: str  # where a file's rows are of several

    # The work.
    batch: int
    beams: int
    source_tokens: int
    new_tokens: int  # of each sequence; of all answers together where `forced` is false
    past_tokens: int
    texts: int
    threads: int
    forced: bool  # false: answers ended by themselves. Omitted: the length was forced.
    encoder: str  # "included" in the time, or run "beforehand"

    # Time.
    latency_s: list[float]  # one sample for each round
    first_s: float  # loading and the first run
    ratio: float  # reference time over this time, the median over rounds: above 1 is faster
    ratio_samples: list[float]
    tokens_per_s: float
    seconds: float  # of something done once
    price: float  # of a decoder call, in calls of one token
    ms_per_step: float
    us_per_token: float
    share: float  # of a whole call

    # Servers under load. Latencies count from the moment at which a request should have been sent.
    rate_per_s: float  # offered
    clients: int  # in place of a rate: so many, each of which waits for its answer
    answered: int
    unanswered: int  # refused, failed or given up
    answers_per_s: float
    goodput_per_s: float  # answers within …
    limit_s: float  # … this
    p50_s: float
    p99_s: float
    short_p99_s: float  # of the requests for short answers alone
    first_p50_s: float  # to the first token
    first_p99_s: float
    mean_s: float
    deviation_s: float
    generator_cpu: float  # share of one core that the load generator took
    sent_late_s: float  # at most

    # Equality with the reference.
    equal: int  # tokens (answers, where their length is natural) that are the reference's …
    of: int  # … of so many
    distinct: int  # tokens of the reference's output
    error: float  # norm of the difference over that of the reference
    allowed_error: float  # of which more is a failure
    largest_difference: float
    largest: float  # number of the reference

    # Quality; see also SCORES.
    bleu: float
    chrf: float
    rouge1: float
    rouge2: float
    rougeL: float  # noqa: N815 (the field's name for it)
    exact_match: float
    f1: float
    agreement: float  # positions with the reference's next token, in per cent
    cosine: float  # between hidden states and the reference's, the least over tokens
    closeness: float  # minus the mean KL divergence from the reference, in nats
    limit: int  # texts scored of each part; omitted: the whole sets
    group: str  # the weights that alone were rounded

    # Size.
    size_bytes: int  # of the weights on disk, graphs included
    base_memory_bytes: int  # of a process that has imported the libraries
    peak_memory_bytes: int  # of the same process after it has generated once
    resident_bytes: list[int]
    growth: float  # of the memory, once it has settled: 0.01 is one per cent
    weights_per_step: int  # of the decoder
    packages: list[str]
    nodes: int
    contrib_operators: list[str]
    input_bytes: int  # of the files that a job read
    output_bytes: int  # of those that it wrote
    moved_bytes: int  # handed over between Python and the runtime, both directions, of the whole work

    # Drafts.
    decoder_calls: int
    drafted: int
    accepted: int

    # Ladders.
    rung: str
    adds: str
    on: str  # the rung below
    exact: bool  # whether it has to give the first rung's tokens
    inside: bool  # whether it loses no more than the gate allows
    factor: float  # over the rung below, the median over rounds
    factor_samples: list[float]

    # The floor of a step.
    weight_bytes: int
    bytes_per_step: int
    flops_per_step: int
    bytes_per_s: float
    flops_per_s: float
    read_s: float
    compute_s: float
    floor_s: float
    bound: str
    operators: float
    eager_operators: float
    kernels: float
    eager_kernels: float
    launch_s: float
    replayed_s: float
    kernel_names: list[str]  # "12 × name", the most frequent first
    clock_sm_mhz: int  # of the GPU under load
    clock_memory_mhz: int
    copies_to_host: int  # in 16 steps
    copies_to_device: int
    compile_s: float
    saves_s_per_step: float
    break_even_steps: float

    # Training, and the course.
    step: int
    stage: int
    steps: int
    train_loss: float
    translation: float  # loss on held-out batches of a task, in nats per token
    summaries: float
    questions: float
    notebook: str
    status: str  # of a notebook: "passed" or "failed"


# The parts of the evaluation sets that are scored separately, and those scores.
SCORES = {
    "translation": (("bleu",), ("3-5", "6-8", "9-14")),
    "summaries": (("rouge1", "rouge2", "rougeL"), ("seen", "unseen")),
    "questions": (("exact_match", "f1"), ("seen", "unseen", "has_answer", "no_answer")),
}
COMPOSED = frozenset({"composed reports", "composed questions"})  # losses on texts like summaries' and questions'
KEYS = (
    COMPOSED
    | frozenset(Row.__annotations__)
    | {f"{score}_{part}" for scores, parts in SCORES.values() for score in scores for part in parts}
)


def checked(row: Mapping[str, Any]) -> Row:
    """The row, unchanged. Raises ``InputError`` for a key outside `KEYS`, or a nested value.

    >>> checked({"system": "ours", "latency_s": [0.5, 0.6]})["latency_s"]
    [0.5, 0.6]
    """
    if unknown := sorted(row.keys() - KEYS):
        raise InputError(f"A row has no key {unknown[0]!r}: use one of bench.results.Row, or add it there.")
    for key, value in row.items():
        parts = value.values() if key == "settings" and isinstance(value, Mapping) else [value]
        for part in parts:
            for one in part if isinstance(part, list | tuple) else [part]:
                if not isinstance(one, str | int | float) and not (one is None and key == "settings"):
                    raise InputError(f"{key} must be a plain value or a list of them, got {value!r}. Or omit it.")
    return row


def scores(report: Mapping[str, Any] | None) -> Row:
    """A ``QualityReport`` as JSON, flat: the scores of each whole set and of its parts. ``None`` has none."""
    if report is None:
        return {}
    found: dict[str, Any] = {}
    if translation := report.get("translation"):
        by_length = {f"bleu_{part}": value for part, value in translation["bleu_by_length"].items()}
        found |= {"bleu": translation["bleu"], **by_length, "chrf": translation["chrf"]}
    for task in ("summaries", "questions"):
        for part, values in (report.get(task) or {}).items():
            suffix = "" if part == "all" else f"_{part}"
            found |= {f"{score}{suffix}": (values or {}).get(score) for score in SCORES[task][0]}
    found["limit"] = report["limit"]
    return {key: value for key, value in found.items() if value is not None}


def filter_rows(rows: Sequence[Mapping[str, Any]], **wanted: Any) -> Iterator[Mapping[str, Any]]:
    """The rows that have all these values."""
    return (row for row in rows if all(row.get(key) == value for key, value in wanted.items()))


def step_ms(row: Mapping[str, Any]) -> float:
    """Milliseconds for a step of a row that was timed."""
    return median(row["latency_s"]) / row["new_tokens"] * 1e3


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write a file of results in one piece: an interrupted write leaves the old file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_rows(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], *, command: str, **more: Any) -> None:
    """Write rows with their machine, versions, commit, date and command; ``more`` adds to these or replaces them."""
    command = command.replace(str(path), os.path.basename(path))  # no folders of this machine
    content = {**environment(), "date": today(), "command": command, **more}
    write_json(path, {**content, "rows": [checked(row) for row in rows]})


def file_path(text: str) -> Path:
    """The ``type`` of an option that names a file to write: a folder is refused before anything is measured."""
    if os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"must be a file, got the folder {text}.")
    return Path(text)


def record_parser(description: str, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """A parser of a recording program: ``--json`` and, with a default, ``--rounds``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=file_path, required=True, help="where the rows go")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"of the interleaved timing ({rounds})")
    return parser


def rows_so_far(path: str | os.PathLike[str], conditions: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of an interrupted run under the same conditions; a file of other conditions is put aside.

    ``conditions`` are values of the file by key, such as `environment`'s; ``"machine.gpu.name"`` is a nested key.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, Mapping):
            raise ValueError(f"it holds a {type(found).__name__}")
        changed = [name for name, value in conditions.items() if get_path(found, name) != value]
        if not changed:
            return found["rows"]
    except (ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is no file of results ({error!r}): give another name, or delete it.") from error
    aside = path.with_name(f"{path.stem}-{found.get('commit')}-{int(path.stat().st_mtime)}{path.suffix}")
    os.replace(path, aside)
    print(f"The rows that are there were measured with another {', '.join(changed)}: they are in {aside} now.")
    return []


def load_results(file: str) -> dict[str, Any]:
    """A file under ``data/results``; with no rows where nothing is recorded yet."""
    path = DATA / "results" / file
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": []}


def provenance(record: Mapping[str, Any], libraries: Sequence[str] = LIBRARIES) -> str:
    """Origin of a file of results in two lines: machine, versions, date and short commit; and the command."""
    if not record["rows"]:
        return "Nothing is recorded yet."
    facts, versions = record["machine"], record["versions"]
    gpu = facts.get("gpu")
    on = gpu["name"] if gpu else f"{facts['cpu']}, {facts['usable_threads']} threads"
    with_what = ", ".join(f"{name} {versions[name]}" for name in libraries if name in versions)
    short = "-".join(part[:7] for part in str(record["commit"]).split("-"))  # or 7 digits and "dirty"
    return f"{on}; {with_what}; {record['date']}, commit {short}\n{record['command']}"


def format_table(lines: Sequence[Sequence[str]], *, left: Collection[int] = (0,), rule: bool = False) -> list[str]:
    """Cells of text as lines of a table; columns in ``left`` are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    dashes = [tuple("-" * width for width in widths)] if rule else []
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (lines[0], *dashes, *lines[1:])
    ]


def html_table(lines: Sequence[Sequence[str]]) -> str:
    """Cells of text as a table of HTML, whose first line is the head.

    >>> html_table([["&"], ["44"]])
    '<table><thead><tr><th>&amp;</th></tr></thead><tbody><tr><td>44</td></tr></tbody></table>'
    """
    head, *body = (
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line) + "</tr>"
        for tag, line in zip(["th", *["td"] * (len(lines) - 1)], lines, strict=True)
    )
    return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"


def environment() -> dict[str, Any]:
    """This machine, the versions of what is installed, and the commit."""
    return {"machine": machine.facts(), "versions": machine.versions(), "commit": commit()}


def today() -> str:
    """The date, as files of results have it."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def commit() -> str | None:
    """``T5ACCEL_COMMIT``, else the checkout's commit, with ``-dirty`` where it was changed; else ``None``."""
    if named := os.environ.get("T5ACCEL_COMMIT"):
        return named  # of what was copied here without its history
    folder = DATA.parent
    if not (folder / ".git").exists():
        return None  # as in an installed wheel
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:  # no git on this machine
        return None


def get_path(found: Any, path: str) -> Any:
    """``found["a"]["b"]`` for ``"a.b"``; ``None`` where there is nothing."""
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
