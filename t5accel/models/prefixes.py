"""Task prefixes of T5, and a hint for texts without one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from t5accel.checks import read_json_object
from t5accel.errors import InputError
from t5accel.models.load import BUNDLED

# T5 learned its tasks by these prefixes (Raffel et al. 2020, appendix D); a model is lost without the exact wording.
TRANSLATE = "translate English to French: "
SUMMARIZE = "summarize: "
QUESTION, CONTEXT = "question: ", " context: "

PREFIXES = (TRANSLATE, SUMMARIZE, QUESTION)  # of the bundled models
_LIKE_A_PREFIX = re.compile(r"\s*[\w ]{1,50}: ")  # as a user's own model may have it


def prefixes_of(backend: Any, model: str) -> tuple[str, ...]:
    """Prefixes of a bundled model, or those of a model's ``task_specific_params``.

    ``model`` is the name, used where the backend has no manifest.

    >>> from types import SimpleNamespace
    >>> prefixes_of(SimpleNamespace(), "mini")
    ('translate English to French: ', 'summarize: ', 'question: ')
    """
    if (backend.manifest.source["name"] if hasattr(backend, "manifest") else model) in BUNDLED:
        return PREFIXES
    if hasattr(backend, "model"):
        params = getattr(backend.model.config, "task_specific_params", None)
    else:
        folder = getattr(backend, "folder", None)
        config = Path(folder) / "config.json" if folder else None
        params = (
            read_json_object(config, InputError).get("task_specific_params") if config and config.exists() else None
        )
    found = (
        [task.get("prefix") for task in params.values() if isinstance(task, dict)] if isinstance(params, dict) else []
    )
    return tuple(prefix for prefix in found if prefix and isinstance(prefix, str))


def prefix_hint(text: str, prefixes: tuple[str, ...]) -> str:
    """A hint for a text that starts with no prefix; empty where it has one or the model knows none."""
    if not prefixes or text.lstrip().startswith(prefixes) or _LIKE_A_PREFIX.match(text):
        return ""
    choices = " or ".join(f'"{prefix}"' for prefix in prefixes)
    return f"This model expects a prefix before each text: --prefix {choices}."
