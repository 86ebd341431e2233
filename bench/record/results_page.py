"""Draw the marked tables and all pictures of docs/results.md again, from the recorded runs alone.

python -m bench.record.results_page
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import figures
from bench.ladder import by_ladder
from bench.peers import (
    BEAM_SEARCH,
    OPTIMUM,
    OURS_EXACT,
    OURS_GENERATE,
    OURS_OPENVINO,
    PEERS,
    int8_for,
    peer_results,
)
from bench.record import peers_quality
from bench.results import Row, load_results

DOCS = Path(__file__).resolve().parents[2] / "docs"
MARKED = re.compile(r"(<!-- data/results/(\S+\.json) -->\n```text\n)(.*?)(?=\n```)", re.DOTALL)
STANDINGS = re.compile(r"(<!-- standings: (.+) -->\n)((?:\|.*\n)+)")
LADDERS = ("256", "summaries")  # what the titles of the ladders in the picture hold
WITH_PICTURES = ("peers-amd", "peers-amd-avx2", "peers-intel", "peers-families")

_INT8 = {"ours": int8_for, "precision": "int8"}
_NO_OPERATOR = {"peers": [one.name for one in PEERS if not one.ours and BEAM_SEARCH not in one.name]}


def _range(ratios: Sequence[float]) -> str:
    return "–".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios))))


def _lost(ratios: Sequence[float]) -> str:
    return f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)}"


# The lines of a standings table: how the ratios are shown, what `peer_results` compares, and of which batches (None:
# of all).
_LINES: tuple[tuple[str, Callable[[Sequence[float]], str], Mapping[str, Any], bool | None], ...] = (
    ("fp32, one text", _range, {}, True),
    ("fp32, several texts", _range, {}, False),
    ("fp32 without our shortlist (greedy), one text", _range, {"ours": OURS_EXACT}, True),
    ("fp32 without our shortlist (greedy), several texts", _range, {"ours": OURS_EXACT}, False),
    ("fp32 with OpenVINO as our encoder's runtime, large batches", _range, {"ours": OURS_OPENVINO}, None),
    ("int8", _range, _INT8, None),
    ("cells in which a peer is faster, fp32", _lost, {}, None),
    ("cells in which a peer is faster, int8", _lost, _INT8, None),
    ("fp32, one text, without the BeamSearch operator", _range, _NO_OPERATOR, True),
    ("fp32, several texts, without the BeamSearch operator", _range, _NO_OPERATOR, False),
    ("int8, without the BeamSearch operator", _range, _INT8 | _NO_OPERATOR, None),
    ("`generate()` over our engine, beside optimum-onnx", _range, {"ours": OURS_GENERATE, "peers": [OPTIMUM]}, None),
)


def tables(page: str) -> str:
    """The page with every table below ``<!-- data/results/FILE -->`` or ``<!-- standings: FILES -->`` as its files
    have it.
    """
    page = MARKED.sub(lambda found: found[1] + _table(found[2]), page)
    return STANDINGS.sub(lambda found: found[1] + _standings(found[2].split()), page)


def _table(file: str) -> str:
    record = load_results(file)
    if file == "peers-quality.json":
        return peers_quality.table(record["rows"])
    return figures.board(record["rows"], record["machine"])


def _standings(files: Sequence[str]) -> str:
    """How many times as fast as the best peer we are, over the cells of each machine or, of one file, each model."""
    records = [load_results(file) for file in files]
    if len(records) > 1:
        columns = {f"{_cpu(record['machine'])}, {record['date']}": record["rows"] for record in records}
    else:
        models = dict.fromkeys(row["model"] for row in records[0]["rows"])
        columns = {
            model.removeprefix("random:"): [row for row in records[0]["rows"] if row["model"] == model]
            for model in models
        }
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    for title, show, how, one_text in _LINES:
        ratios = [_ratios(rows, how, one_text) for rows in columns.values()]
        cells = [show(found) if found else "" for found in ratios]
        lines += [[title, *cells]] if any(cells) else []
    return "".join("|" + "|".join(f" {cell} " if cell != "---" else cell for cell in line) + "|\n" for line in lines)


def _cpu(facts: Mapping[str, Any]) -> str:
    cpu = facts["cpu"].replace("(R)", "").removesuffix(" Processor")
    return f"{cpu}, {'AVX-512' if 'avx512f' in facts['cpu_flags'] else 'AVX2'}"


def _ratios(rows: Sequence[Row], how: Mapping[str, Any], one_text: bool | None) -> list[float]:
    if how.get("peers") == _NO_OPERATOR["peers"] and not any(BEAM_SEARCH in row["system"] for row in rows):
        return []  # they are those of the line with all peers
    return [one.ratio for one in peer_results(rows, **how) if one_text in (None, one.cell.batch == 1)]


def pictures(folder: Path) -> None:
    """Every picture of the page, into ``folder``."""
    for name in WITH_PICTURES:
        record = load_results(f"{name}.json")
        figures.plot_peers({_cpu(record["machine"]): record["rows"]}, folder / f"{name}.png")
    ladders = by_ladder(load_results("ladder-amd.json")["rows"])
    shown = {title: rows for title, rows in ladders.items() if any(part in title for part in LADDERS)}
    figures.plot_ladders(shown, folder / "ladder.png")
    figures.plot_board(load_results("scoreboard-t5-small-amd.json")["rows"], folder / "scoreboard.png")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    page = DOCS / "results.md"
    page.write_text(tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    pictures(DOCS)
