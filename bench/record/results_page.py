"""Draw the marked tables and all pictures of docs/results.md again, from the recorded runs alone.

python -m bench.record.results_page
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from bench import figures
from bench.ladder import by_ladder
from bench.record import peers_quality
from bench.results import load_results

DOCS = Path(__file__).resolve().parents[2] / "docs"
MARKED = re.compile(r"(<!-- data/results/(\S+\.json) -->\n```text\n)(.*?)(?=\n```)", re.DOTALL)
PEERS = ("peers-amd", "peers-intel", "peers-families")
LADDERS = ("256", "summaries")  # what the titles of the ladders in the picture hold


def tables(page: str) -> str:
    """The page with every table below ``<!-- data/results/FILE -->`` as its file has it."""
    return MARKED.sub(lambda found: found[1] + _table(found[2]), page)


def _table(file: str) -> str:
    record = load_results(file)
    if file == "peers-quality.json":
        return peers_quality.table(record["rows"])
    return figures.board(record["rows"], record["machine"])


def pictures(folder: Path) -> None:
    """Every picture of the page, into ``folder``."""
    for name in PEERS:
        record = load_results(f"{name}.json")
        figures.plot_peers({record["machine"]["cpu"]: record["rows"]}, folder / f"{name}.png")
    ladders = by_ladder(load_results("ladder-amd.json")["rows"])
    shown = {title: rows for title, rows in ladders.items() if any(part in title for part in LADDERS)}
    figures.plot_ladders(shown, folder / "ladder.png")
    figures.plot_board(load_results("scoreboard-t5-small-amd.json")["rows"], folder / "scoreboard.png")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    page = DOCS / "results.md"
    page.write_text(tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    pictures(DOCS)
