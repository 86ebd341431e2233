"""Which families there are, and which one a model belongs to."""

from __future__ import annotations

from typing import Any

from t5accel.errors import NotT5Error
from t5accel.families import bart, m2m_100, marian, mbart, pegasus
from t5accel.families.family import Family
from t5accel.families.t5 import T5
from t5accel.t5.sizes import T5_LIKE

BEYOND_T5 = {one.FAMILY.model_type: one.FAMILY for one in (bart, mbart, marian, m2m_100, pegasus)}
FAMILIES = dict.fromkeys(T5_LIKE, T5) | BEYOND_T5
# Published sizes by the name that they have behind "random:"; T5's own are in `t5.lively`.
SIZES = {size: (family, numbers) for family in BEYOND_T5.values() for size, numbers in family.sizes.items()}


def family_of(config: Any, name: str) -> Family:
    """The family of a configuration; raises ``NotT5Error`` for other kinds of models, which it calls ``name``.

    >>> from types import SimpleNamespace
    >>> family_of(SimpleNamespace(model_type="mbart"), "mine").norm_first
    True
    """
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in FAMILIES:
        raise NotT5Error(
            f"{name} is of type {kind!r}; t5accel handles {', '.join(T5_LIKE)} (flan, ByT5 and MADLAD-400 are of type "
            f"t5), {', '.join(BEYOND_T5)} (m2m_100 is NLLB, too)."
        )
    return FAMILIES[kind]
