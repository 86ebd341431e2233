"""The model card of a student, and its checkpoint: an ordinary folder that transformers and `load_model` read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5accel.errors import InputError
from t5accel.graphs.atomic_write import locked, staged
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
PLAIN = "`T5ForConditionalGeneration.from_pretrained` loads it."
NARROW = (
    "Its layers differ in size: load it with `t5accel.models.load.load_model(folder)`, not with transformers alone."
)


def require_student_folder(folder: Path) -> None:
    """Raise ``InputError`` if a student must not be written there: something else has that place.

    >>> require_student_folder(Path("a/folder/that/is/new"))
    """
    try:
        is_student = MADE in folder.joinpath(CARD_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        is_student = False
    if not is_student and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} holds something else than a student of ours, so it is kept: give another folder.")


def save_student(
    student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, teacher: PreTrainedModel,
    teacher_name: str, how: str, command: str, settings: Mapping[str, Any],
) -> Path:  # fmt: skip
    """Write weights in fp16, tokenizer and ``README.md`` to ``folder``, which is returned: whole or not at all.

    An older student in that place is replaced.

    Args:
        student: in evaluation mode.
        teacher: for the sizes to compare with; ``teacher_name`` is what the card calls it.
        how: it was made, in a word: "distilled" or "pruned".
        command: that made it.
        settings: all others, for the card.

    Raises:
        InputError: ``folder`` holds something else.
        ExportError: the disk is full, or refuses.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.models.load import load_model
    >>> model, tokenizer = load_model("mini")
    >>> facts = dict(teacher_name="mini", how="copied", command="none", settings={"steps": 0})
    >>> with TemporaryDirectory() as folder:
    ...     made = save_student(model, tokenizer, Path(folder) / "copy", teacher=model, **facts)
    ...     (made / "README.md").read_text(encoding="utf-8").splitlines()[5]
    '# copy'
    """
    import torch

    card = CARD.format(
        tag=how, name=folder.name, teacher=teacher_name, made=MADE, how=how, parameters=student.num_parameters() / 1e6,
        of=teacher.num_parameters() / 1e6, sizes=_sizes(T5Dims.of(teacher), T5Dims.of(student)), command=command,
        settings="\n".join(f"- {key}: {value}" for key, value in settings.items()),
        loading=NARROW if getattr(student.config, "layer_widths", None) else PLAIN,
    )  # fmt: skip
    with locked(folder):
        require_student_folder(folder)
        with staged(folder) as partial:
            copy.deepcopy(student).to(torch.float16).save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            partial.joinpath(CARD_FILE).write_text(card, encoding="utf-8")
    return folder


def _sizes(theirs: T5Dims, own: T5Dims) -> str:
    rows = (
        ("encoder layers", "encoder_layers"), ("decoder layers", "decoder_layers"),
        ("heads of the encoder", "encoder_heads"), ("heads of the decoder", "decoder_heads"),
        ("heads of cross-attention", "cross_heads"), ("neurons of the encoder", "encoder_ff"),
        ("neurons of the decoder", "decoder_ff"),
    )  # fmt: skip
    return "\n".join(f"| {name} | {_shown(getattr(theirs, key))} | {_shown(getattr(own, key))} |" for name, key in rows)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
