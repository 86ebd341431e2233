"""Steps captured as CUDA graphs: the host asks once for all of a step's kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

WARM_UP = 2  # steps before a graph is captured, in which libraries choose their kernels


@cache
def side_stream(device: torch.device) -> Any:
    """The one side stream: every stream that products run on costs a workspace of tens of megabytes."""
    return torch.cuda.Stream(device)


@torch.inference_mode()
def captured(step: Callable[[], Any], undo: Callable[[], Any], device: torch.device) -> Any:
    """A step as a ``torch.cuda.CUDAGraph``, after it ran on the `side_stream` a few times.

    Args:
        step: touches memory that stays, and nothing that the host has to wait for.
        undo: brings that memory back to where it was; called after every step that ran.
        device: a GPU.
    """
    side, graph = side_stream(device), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
            undo()
    torch.cuda.current_stream(device).wait_stream(side)
    with torch.cuda.graph(graph, stream=side):
        step()
    return graph
