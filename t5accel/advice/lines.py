"""The lines of Python that follow advice: the model, the call that was measured, and the gate before a recipe."""

from __future__ import annotations

import json
from pathlib import Path

from t5accel.advice.evidence import GENERATE
from t5accel.advice.need import METRICS, Need
from t5accel.advise import Candidate
from t5accel.graphs.recipes import RECIPES

_GATE_IMPORTS = ("from t5accel.graphs.export_cache import cached_export", "from t5accel.scoring import text_quality")


def line(one: Candidate, need: Need) -> str:
    """The line of Python that makes a candidate's model of the needed one.

    >>> from t5accel.advice.evidence import Setting, Source, Speed
    >>> from t5accel.timing import Ratio
    >>> run = Source("a.json", 0, {}, {}, "2026-01-01", None), Setting("mini", 1, 1, 64, 64, 2)
    >>> one = Candidate(Speed(*run, "int8-dynamic", "our loop", Ratio((2.0,), 2.0, 2.0, 2.0), 100.0), "same tokens")
    >>> print(line(one, Need("mini", threads=4)))
    model = accelerate("mini", precision="int8", tuned_for="throughput", threads=4)
    """
    from t5accel.api import TUNED_FOR

    recipe, arguments = one.speed.recipe, [json.dumps(need.model, ensure_ascii=False)]
    tuned = [(of, tuned_for) for tuned_for, others in TUNED_FOR.items() for of, other in others.items()
             if other == recipe]  # fmt: skip
    if tuned:
        arguments += [f'precision="{tuned[0][0]}"', f'tuned_for="{tuned[0][1]}"']
    elif recipe != "fp32":
        arguments.append(f'precision="{recipe}"')
    if need.threads is not None:
        arguments.append(f"threads={need.threads}")
    return f"model = accelerate({', '.join(arguments)})"


def call(one: Candidate, need: Need) -> str:
    """The call that was measured: our own loops skip what transformers' ``generate()`` keeps account of."""
    if one.speed.loop == GENERATE:
        return f"model.generate(**batch, num_beams={need.beams}, do_sample=False)"
    source = 'batch["input_ids"], batch["attention_mask"]'
    if need.beams > 1:
        return f"beam_search(model.backend, {source}, num_beams={need.beams}).sequences"
    return f"greedy(model.backend, {source}).sequences"


def program(one: Candidate, need: Need) -> list[str]:
    """From the imports to the call; ``texts`` are the reader's own, for random weights ``ids`` and ``mask``."""
    loop = "beam import beam_search" if need.beams > 1 else "greedy import greedy"
    ours = [] if one.speed.loop == GENERATE else [f"from t5accel.decoding.{loop}"]
    tokens = 'batch = model.tokenizer(texts, return_tensors="pt", padding=True)'
    if need.model.startswith("random:"):  # which has no tokenizer
        tokens = 'batch = {"input_ids": ids, "attention_mask": mask}'
    return ["from t5accel import accelerate", *ours, line(one, need), tokens, call(one, need)]


def gate(one: Candidate, need: Need) -> list[str]:
    """The lines that score a recipe on this model: `quantize` refuses what loses too much; fp16 is yours to compare."""
    model, recipe = json.dumps(need.model, ensure_ascii=False), one.speed.recipe
    names = [task for task, metric in METRICS.items() if metric in need.limits]
    score = f"text_quality(names={json.dumps(names)})"
    if not RECIPES[recipe].integers:
        compared = [f'{score}(cached_export({model}, precision="{p}"))' for p in ("fp32", recipe)]
        return [*_GATE_IMPORTS, *compared]
    folder = json.dumps(f"{Path(need.model.replace(':', '-')).name}-{recipe}", ensure_ascii=False)
    limits = json.dumps(need.limits)
    return [
        *_GATE_IMPORTS, "from t5accel.graphs.quantize import quantize",
        f'quantize(cached_export({model}), {folder}, "{recipe}", score={score}, max_loss={limits})',
        f"model = accelerate({folder})",
    ]  # fmt: skip
