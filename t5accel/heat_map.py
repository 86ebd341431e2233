"""Draw how we stand against our peers, cell by cell: batches down, sources across, a panel for each number of beams."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from t5accel.errors import InputError, MissingPackageError
from t5accel.peers import Standing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDEST = 4.0  # the ratio at which a colour is full, either way


def plot_standings(boards: Mapping[str, Sequence[Standing]], path: str | os.PathLike[str] | None = None) -> Figure:
    """A row of panels for each titled board; blue cells are ours, red ones the peer's, each with ratio and peer.

    Raises ``InputError`` without any standings.

    >>> from t5accel.peers import Cell
    >>> figure = plot_standings({"ours over best": [Standing(Cell(1, 32, 1, 64), "OpenVINO", 1.25)]})
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['1.25x\\nOpenVINO']
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError("Drawing needs matplotlib: pip install 't5accel[course]'.") from error

    boards = {title: board for title, board in boards.items() if board}
    if not boards:
        raise InputError("There are no standings to draw: measure peers first (`make peers`).")
    beams = sorted({standing.cell.beams for board in boards.values() for standing in board})
    figure = Figure(figsize=(4.4 * len(beams) + 0.6, 2.9 * len(boards) + 0.3), layout="constrained")
    panels = figure.subplots(len(boards), len(beams), squeeze=False)
    for panel, (title, board) in zip(panels, boards.items(), strict=True):
        for axes, number in zip(panel, beams, strict=True):
            _panel(axes, [standing for standing in board if standing.cell.beams == number])
            axes.set_title(f"{title}\n{'greedy' if number == 1 else f'{number} beams'}", fontsize=10)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure


def _panel(axes: Axes, board: Sequence[Standing]) -> None:
    import numpy as np

    batches = sorted({standing.cell.batch for standing in board})
    sources = sorted({standing.cell.source_tokens for standing in board})
    logs = np.full((len(batches), len(sources)), np.nan)
    for standing in board:
        row, column = batches.index(standing.cell.batch), sources.index(standing.cell.source_tokens)
        logs[row, column] = np.log(standing.ratio) / np.log(WIDEST)
        axes.text(column, row, f"{standing.ratio:.2f}x\n{standing.peer}", ha="center", va="center", fontsize=9)
    for row, column in np.argwhere(np.isnan(logs)):
        axes.text(column, row, "not measured", ha="center", va="center", fontsize=9, color="0.4")
    axes.imshow(logs, cmap="RdBu", vmin=-1, vmax=1, aspect="auto", alpha=0.75)
    axes.set_xticks(range(len(sources)), sources)
    axes.set_yticks(range(len(batches)), batches)
    axes.set_xlabel("source tokens")
    axes.set_ylabel("batch")
