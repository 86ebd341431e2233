"""`torch.onnx.export` by tracing, without the noise that it makes in both lines of transformers."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings, of Python or of loggers; errors are raised as ever."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def export_quietly(
    module: Any, example: tuple[Any, ...], path: str | os.PathLike[str], inputs: Sequence[str], outputs: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
) -> Path:  # fmt: skip
    """One graph of what ``module`` computes, whose sizes along ``axes`` may be any.

    It is traced (``dynamo=False``): the fusions of ONNX Runtime's tools know the patterns that tracing leaves.

    >>> import torch
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = f"{folder}/line.onnx"
    ...     export_quietly(torch.nn.Linear(2, 3), (torch.ones(1, 2),), path, ["x"], ["y"], {"x": {0: "rows"}}).name
    'line.onnx'
    """
    import torch

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with quietly(), torch.no_grad():
        torch.onnx.export(
            module.eval(), example, os.fspath(path), input_names=list(inputs), output_names=list(outputs),
            dynamic_axes={name: dict(by) for name, by in axes.items()}, opset_version=17, dynamo=False,
        )  # fmt: skip
    return Path(path)
