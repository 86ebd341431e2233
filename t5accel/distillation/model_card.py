"""Write a student: checkpoint, tokenizer and model card."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from t5accel.errors import ExportError, InputError
from t5accel.graphs.atomic_write import locked, staged
from t5accel.graphs.export import save_tokenizer
from t5accel.models.sizes import T5Dims

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CARD_FILE, MADE = "README.md", "made with t5accel"
CARD = """---
library_name: transformers
tags: [t5, {tag}]
---

# {name}

A student of `{teacher}`, {made} ({how}). It has {parameters:.1f} million parameters, its teacher {of:.1f}.

| | {teacher} | this model |
|---|---|---|
{sizes}

## Made with

```bash
{command}
```

{settings}

{loading}
Prefixes and limits are its teacher's. The licenses of its teacher and of the data that it was trained on apply to it.
"""
PLAIN = "`{}.from_pretrained` loads it."
PRUNED = (
    "Its layers differ in size: load it with `t5accel.models.load.load_model(folder)`, not with transformers alone."
)


def require_student_folder(folder: Path) -> None:
    """Raise ``InputError`` if the folder holds anything but a student of ours."""
    try:
        is_student = MADE in folder.joinpath(CARD_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        is_student = False
    if not is_student and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} must be new, empty or an older student's folder. Give another one.")


def save_student(
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    teacher: PreTrainedModel,
    teacher_name: str,
    how: str,
    command: str,
    settings: Mapping[str, Any],
) -> Path:
    """Write fp16 weights, tokenizer and ``README.md`` to ``folder``, atomically, and return it.

    An older student there is replaced. The card compares the sizes with the teacher's and names ``how`` ("distilled" or
    "pruned"), ``command`` and ``settings``. Raises ``InputError`` if the folder holds anything else, and
    ``ExportError`` on a full disk.
    """
    import torch

    card = CARD.format(
        tag=how,
        name=folder.name,
        teacher=teacher_name,
        made=MADE,
        how=how,
        parameters=student.num_parameters() / 1e6,
        of=teacher.num_parameters() / 1e6,
        sizes=_sizes(T5Dims.of(teacher), T5Dims.of(student)),
        command=command,
        settings="\n".join(f"- {key}: {value}" for key, value in settings.items()),
        loading=PRUNED if getattr(student.config, "layer_widths", None) else PLAIN.format(type(student).__name__),
    )
    with locked(folder):
        require_student_folder(folder)
        with staged(folder) as partial:
            try:
                copy.deepcopy(student).to(torch.float16).save_pretrained(partial)
            except SafetensorError as error:
                raise ExportError(f"{folder} cannot be written to: {error}. Nothing was left behind.") from error
            save_tokenizer(tokenizer, partial)
            partial.joinpath(CARD_FILE).write_text(card, encoding="utf-8")
    return folder


def _sizes(theirs: T5Dims, own: T5Dims) -> str:
    rows = (
        ("encoder layers", "encoder_layers"),
        ("decoder layers", "decoder_layers"),
        ("heads of the encoder", "encoder_heads"),
        ("heads of the decoder", "decoder_heads"),
        ("heads of cross-attention", "cross_heads"),
        ("neurons of the encoder", "encoder_ff"),
        ("neurons of the decoder", "decoder_ff"),
    )
    lines = []
    for name, key in rows:
        values = [str(getattr(dims, key)).strip("(,)") for dims in (theirs, own)]  # tuples: one number per layer
        lines.append(f"| {name} | {values[0]} | {values[1]} |")
    return "\n".join(lines)
