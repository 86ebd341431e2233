"""Options that several commands share, and what commands say while they work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import typer


class Precision(StrEnum):
    """The numbers that a model runs in: the recipes of `precision.recipes`."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    INT8_DYNAMIC = "int8-dynamic"
    INT4 = "int4"


# bf16 runs in torch alone; fp32 and fp16 have no integers.
ExportPrecision = StrEnum("ExportPrecision", {one.name: one.value for one in Precision if one != "bf16"})
IntegerPrecision = StrEnum("IntegerPrecision", {one.name: one.value for one in Precision if one.startswith("int")})


class Runtime(StrEnum):
    """The libraries that run a model."""

    TORCH = "torch"
    ONNX = "onnx"
    OPENVINO = "openvino"
    TENSORRT = "tensorrt"


class Device(StrEnum):
    """The processors that run a model."""

    CPU = "cpu"
    CUDA = "cuda"


NAMES = "mini, mini-d1, mini-d1p, a folder, or a hub id"
ModelOption = Annotated[str, typer.Option(help=f"The model: {NAMES}.")]
AnyModelOption = Annotated[
    str, typer.Option(help=f"The model: {NAMES}; random:t5-small has random weights and no tokenizer.")
]
PrecisionOption = Annotated[
    Precision | None, typer.Option(help="The precision to run in. Default: fp32; an export runs in its own.")
]
ExportPrecisionOption = Annotated[
    ExportPrecision | None, typer.Option(help="The precision to run in. Default: fp32; an export runs in its own.")
]
RuntimeOption = Annotated[
    Runtime | None, typer.Option(help="Default: onnx, which exports the model once; torch for bf16 and on a GPU.")
]
DeviceOption = Annotated[Device, typer.Option(help="The processor to run on.")]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="CPU threads. Default: all cores that this process may use.")
]
BeamsOption = Annotated[
    int | None, typer.Option(min=1, help="Beams; 1 is greedy search. Default: the number in the model's settings.")
]
NewTokensOption = Annotated[int, typer.Option(min=1, help="The most tokens that an answer may have.")]

SourceLanguage = Annotated[
    str | None,
    typer.Option("--src-lang", help="Language of the texts, as NLLB, mBART and M2M100 name it: eng_Latn, en_XX, en."),
]
TargetLanguage = Annotated[
    str | None, typer.Option("--tgt-lang", help="Language of the answers, likewise: fra_Latn, fr_XX, fr.")
]
ForcedBos = Annotated[str | None, typer.Option("--forced-bos", help="Token that every answer begins with.")]
KeepSpecialTokens = Annotated[
    bool, typer.Option("--keep-special-tokens", help="Keep special tokens in answers: REBEL's <triplet>.")
]


def status(sentence: str) -> None:
    """Tell somebody who waits at a terminal what is being done.

    >>> status("Loading mini …")  # nothing in a file
    """
    from t5accel import machine  # it brings numpy, without which help is shown sooner

    if machine.watches_stderr():
        typer.echo(sentence, err=True)


@contextmanager
def kept(sentence: str) -> Iterator[None]:
    """Say after Ctrl-C what an interrupted command has kept.

    >>> try:
    ...     with kept("The last checkpoint is kept."):
    ...         raise KeyboardInterrupt
    ... except KeyboardInterrupt as error:
    ...     str(error)
    'The last checkpoint is kept.'
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(sentence) from error
