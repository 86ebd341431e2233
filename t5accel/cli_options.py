"""Shared options and messages of the commands."""

from __future__ import annotations

import os

# No command reports to the makers of ONNX Runtime and of the hub's client, unless told to.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import io
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer

from t5accel.errors import T5AccelError
from t5accel.precision.recipes import RECIPES

TRACEBACK = "T5ACCEL_TRACEBACK"


def _precisions(kind: str, names: list[str]) -> type[StrEnum]:
    return StrEnum(kind, {name.upper().replace("-", "_"): name for name in names})


Precision = _precisions("Precision", [*RECIPES])  # the numbers that a model runs in
# bf16 runs in torch alone; fp32 and fp16 have no integers.
ExportPrecision = _precisions("ExportPrecision", [name for name in RECIPES if name != "bf16"])
IntegerPrecision = _precisions("IntegerPrecision", [name for name in RECIPES if name.startswith("int")])
EncoderPrecision = _precisions("EncoderPrecision", [*(name for name in RECIPES if "int8-" not in name), "auto"])


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
_TO_RUN_IN = typer.Option(help="The precision to run in. Default: fp32; an export runs in its own.")
PrecisionOption = Annotated[Precision | None, _TO_RUN_IN]
ExportPrecisionOption = Annotated[ExportPrecision | None, _TO_RUN_IN]
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
    """Print progress on a terminal's standard error."""
    from t5accel import machine  # it brings numpy, without which help is shown sooner

    if machine.watches_stderr():
        typer.echo(sentence, err=True)


def warn(sentence: str) -> None:
    """Print a warning on standard error, unless it is empty."""
    if sentence:
        typer.echo(f"Warning: {sentence}", err=True)


@contextmanager
def kept(sentence: str) -> Iterator[None]:
    """Say after Ctrl-C what an interrupted command has kept."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(sentence) from error


def use_utf8(platform: str = sys.platform) -> None:
    """Write redirected output in UTF-8 on Windows, as input is read, and not in a code page that lacks letters."""
    if platform == "win32" and isinstance(sys.stdout, io.TextIOWrapper) and "PYTHONIOENCODING" not in os.environ:
        sys.stdout.reconfigure(encoding="utf-8")


class _Group(typer.core.TyperGroup):
    """Print every failure as one sentence, without warnings; ``T5ACCEL_TRACEBACK=1`` shows Python's traceback."""

    def invoke(self, ctx):  # noqa: ANN001
        use_utf8()
        if os.environ.get(TRACEBACK):
            return super().invoke(ctx)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        with warnings.catch_warnings():
            warnings.showwarning = lambda *_, **__: None  # filters are set by libraries, too
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as error:
                typer.echo(f"\nt5accel: interrupted. {error}".rstrip(), err=True)
                raise typer.Exit(130) from error
            except (BrokenPipeError, SystemExit):
                raise
            except BaseException as error:  # a panic of a Rust library is no Exception
                if hasattr(error, "exit_code") or isinstance(error, typer.Abort):  # typer's own
                    raise
                sentence = _with_flags(_sentence(error), self.commands.get(ctx.invoked_subcommand or ""))
                typer.echo(f"t5accel: {sentence}", err=True)
                raise typer.Exit(2 if isinstance(error, T5AccelError | OSError) else 1) from error


def _sentence(error: BaseException) -> str:
    if isinstance(error, T5AccelError):
        return " ".join(str(error).split("\n"))
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    what = (str(error).strip().splitlines() or ["nothing more is known"])[0]
    return f"unexpected {type(error).__name__}: {what} ({TRACEBACK}=1 in the environment shows where.)"


def _with_flags(sentence: str, command: Any) -> str:
    """Replace the argument's name at the start of a sentence by its flag."""
    name = re.match(r"\w+(?= is | must )", sentence)
    flags = {param.name: param.opts[0] for param in getattr(command, "params", ()) if param.opts[0].startswith("--")}
    return flags.get(name[0], name[0]) + sentence[name.end() :] if name else sentence


def command_line(about: str, *, completion: bool = False) -> typer.Typer:
    """A command line whose failures are sentences."""
    return typer.Typer(
        cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=completion,
        context_settings={"help_option_names": ["-h", "--help"]}, help=about,
    )  # fmt: skip
