"""Advice for a model and a need, from recorded rows: filtered, ranked, printed."""

# Ratios compare within one run: the run nearest to the need comes first, and its rows are the candidates. Beyond a
# factor of `FAR` in any direction the advice is the command that measures the case.

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.model_sizes import config_of, family_name, guessed_size, weights_or_none, weights_per_step
from bench.peers import OURS, OURS_GENERATE, OURS_INT4, OURS_INT8, OURS_INT8_THROUGHPUT
from bench.peers import REFERENCE as PEERS_REFERENCE
from bench.results import DATA, format_table
from bench.systems import CPU_REFERENCE
from t5accel import machine
from t5accel.api import TUNED_FOR
from t5accel.checks import as_count, read_json_object
from t5accel.errors import InputError
from t5accel.models.families import BEYOND_T5
from t5accel.precision.recipes import RECIPES

METRICS = {"translation": "bleu", "summaries": "rougeL", "questions": "exact_match"}
LABELS = {"bleu": "BLEU", "rougeL": "ROUGE-L", "exact_match": "exact match"}
MATTERS = ("latency", "throughput", "memory", "quality")
USUAL_LOSS = 1.0  # of each score, where nothing else is asked for
FAR = 8.0
# Systems that `line` and `call` make, by their names in boards, peers and recipes.
ADVISED = {
    OURS, OURS_GENERATE, OURS_INT8, OURS_INT8_THROUGHPUT, OURS_INT4, *RECIPES, "ONNX Runtime, generate()",
    *(f"ONNX Runtime, our loop, {name}" for name in ("numpy feeds", *RECIPES)),
}  # fmt: skip
# The same for `gpu-*.json`, with the runtime that `line` asks for.
ON_GPU = {"static cache, CUDA graph": None, "ONNX Runtime, bound": "onnx", "TensorRT": "tensorrt"}
GPU_REFERENCE = "transformers, cache"  # in the precision of the row
FLOATS = ("fp32", "fp16", "bf16")
WORK = ("batch", "beams", "source_tokens", "new_tokens")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Need:
    """A model, a task (``None``: all), what matters, and a typical call.

    >>> Need(matters="throughput").batch, Need(task="summaries").limits
    (32, {'rougeL': 1.0})
    """

    model: str = "mini"
    task: str | None = None
    matters: str = "latency"
    batch: int | None = None  # 32 where throughput matters, else 1
    beams: int = 1
    source_tokens: int = 64
    new_tokens: int = 64
    max_loss: Mapping[str, float] = field(default_factory=dict)  # points that a score may lose against fp32
    device: str = "cpu"
    threads: int | None = None  # by default those that this process may use

    def __post_init__(self) -> None:
        choices = {"task": (None, *METRICS), "matters": MATTERS, "device": ("cpu", "cuda")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                options = ", ".join(filter(None, allowed))
                raise InputError(f"{name} must be one of {options}, got {getattr(self, name)!r}.")
        if self.batch is None:
            object.__setattr__(self, "batch", 32 if self.matters == "throughput" else 1)
        for name in (*WORK, *(["threads"] if self.threads is not None else [])):
            object.__setattr__(self, name, as_count(getattr(self, name), name, at_least=1))
        for name, value in self.max_loss.items():
            if name not in self._scores or not (math.isfinite(value) and value >= 0):
                names = ", ".join(self._scores)
                raise InputError(f"max_loss must be numbers of 0 or more for {names}, got {self.max_loss!r}.")

    @property
    def _scores(self) -> list[str]:
        return [score for task, score in METRICS.items() if self.task in (None, task)]

    @property
    def limits(self) -> dict[str, float]:
        """The most points that each score of the task may lose."""
        return dict.fromkeys(self._scores, 0.0 if self.matters == "quality" else USUAL_LOSS) | dict(self.max_loss)


@dataclass(frozen=True)
class Found:
    """A recorded row, its file, its number there, and the file's own facts."""

    row: Row
    file: str
    number: int
    about: Mapping[str, Any]

    def __str__(self) -> str:
        facts = self.about["machine"]
        on = facts["gpu"]["name"] if _device(self) == "cuda" else "{cpu}, {usable_threads} threads".format(**facts)
        return f"{self.file}, row {self.number} ({on}; {self.about['date']})"


@dataclass(frozen=True)
class Advice:
    """The recommendation, and the rows that it rests on."""

    need: Need
    run: tuple[Found, ...] = ()  # the nearest run, the best row first; empty where it is too far
    losses: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by scored precision, against fp32
    allowed: tuple[Found, ...] = ()  # rows within the need's limits and faster than transformers
    far: Mapping[str, float] = field(default_factory=dict)  # factors between the nearest run and the need
    family: str | None = None  # of the run's model, where it is another one
    unscored: Found | None = None  # the fastest row that was left out because its precision was never scored here

    @property
    def recommended(self) -> Found | None:
        return self.allowed[0] if self.allowed else None


def recommend(need: Need, *, results: Iterable[str | os.PathLike[str]] = ()) -> Advice:
    """Advice from the recorded results, and from more files or folders of results."""
    here, own_family = machine.facts(gpu=False), family_name(need.model)
    of_sizes = {need.model: weights_per_step(need.model)}
    record = list(_recorded([DATA / "results", *results]))
    losses = _losses(need, record)
    runs: dict[Any, list[Found]] = {}  # within one, ratios compare
    for found in record:
        if _is_evidence(found, need):
            same = (found.row.get(key) for key in ("cell", "model", "reference", "threads", *WORK))
            runs.setdefault((found.file, *same), []).append(found)

    def size(model: str) -> float:
        if model not in of_sizes:
            of_sizes[model] = weights_or_none(model)
        return of_sizes[model] or math.nan

    def factors(run: Sequence[Found]) -> dict[str, float]:
        row = run[0].row
        sizes = 1.0 if row["model"] == need.model else size(row["model"]) / size(need.model)
        return {"model size": sizes, **{key.replace("_", " "): row[key] / getattr(need, key) for key in WORK}}

    def other_family(run: Sequence[Found]) -> str | None:
        found = family_name(run[0].row["model"])
        return None if found == own_family else found

    def preference(run: Sequence[Found]) -> tuple[Any, ...]:
        doublings = sum(abs(math.log2(factor)) for factor in factors(run).values())
        doublings += other_family(run) is not None  # such a run says as much as one of twice the size
        return (doublings, not same_machine(run[0].about["machine"], here), -len(run))

    able = sorted((run for run in runs.values() if not math.isnan(factors(run)["model size"])), key=preference)
    if not able:
        return Advice(need)
    # On a GPU each precision is a separate run: the nearest one whose quality is known goes first.
    nearest = next((run for run in able if any(_passes(need, one.row["precision"], losses) for one in run)), able[0])
    far = factors(nearest)
    if max(max(factor, 1 / factor) for factor in far.values()) > FAR:
        return Advice(need, far=far)
    in_memory = all("peak_memory_bytes" in found.row for found in nearest)
    size_key = "peak_memory_bytes" if in_memory else "size_bytes"

    def rank(found: Found) -> tuple[float, float]:  # less is better
        return (found.row.get(size_key, math.inf) if need.matters == "memory" else 0, -found.row["ratio"])

    rows = sorted(nearest, key=rank)
    allowed = [found for found in rows if _passes(need, found.row["precision"], losses) and found.row["ratio"] > 1]
    ahead = sorted(able[0], key=rank) if able[0] is not nearest else rows[: rows.index(allowed[0]) if allowed else None]
    is_open = need.matters != "quality" and not need.model.startswith("random:")
    unscored = next((found for found in ahead if is_open and found.row["precision"] not in losses), None)
    return Advice(need, tuple(rows), losses, tuple(allowed), far, family=other_family(nearest), unscored=unscored)


def same_machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two machines have the same processor, instructions and threads."""
    return all(one.get(name) == other.get(name) for name in ("cpu", "usable_threads", "cpu_flags"))


def _recorded(places: Iterable[str | os.PathLike[str]]) -> Iterator[Found]:
    for place in map(Path, places):
        if not place.exists():
            raise InputError(f"results must exist, got {place}. `python -m bench board --json {place}` writes some.")
        for file in sorted(place.glob("*.json")) if place.is_dir() else [place]:
            try:
                content = read_json_object(file, InputError)
                for number, row in enumerate([*map(dict, content["rows"])]):  # what is no row is an error here
                    yield Found(row, file.name, number, content)
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"results must be files that `python -m bench board` writes, got {file}.") from error


def _is_current(row: Row) -> bool:
    """Whether its recipe is unchanged since; GPU rows in floats record no recipe."""
    name = row.get("precision")
    if row.get("reference") == GPU_REFERENCE and name in FLOATS:
        return True
    return name in RECIPES and row.get("recipe_hash") == RECIPES[name].hash


def _device(found: Found) -> str:
    return found.about.get("device", "cpu")  # that a machine has a GPU does not say that it was used


def _is_evidence(found: Found, need: Need) -> bool:
    row = found.row
    if need.device == "cuda":
        known = row.get("reference") == GPU_REFERENCE and row.get("system") in ON_GPU
        # Steps are captured for T5s alone, and ONNX Runtime computes a UMT5 wrongly there.
        kind = (config_of(need.model) or {}).get("model_type", "t5") if known else "t5"
        known = known and (kind not in BEYOND_T5 if ON_GPU[row["system"]] is None else kind != "umt5")
    else:
        known = row.get("system") in ADVISED and row.get("reference") in (CPU_REFERENCE, PEERS_REFERENCE)
    return (
        known and "latency_s" in row and _is_current(row) and _device(found) == need.device
        and (row["precision"] != "fp32" or row.get("equal") == row.get("of"))
        and (row["beams"] == 1) == (need.beams == 1)
    )  # fmt: skip


def _losses(need: Need, record: Sequence[Found]) -> dict[str, dict[str, float]]:
    """From the first file with scores of a recipe and of fp32, on this model and the whole sets."""
    scored: dict[tuple[str, str], Row] = {}
    for found in record:
        row = found.row
        is_own = row.get("model") == need.model and row.get("system", "fp32") in ADVISED and "quality_of" not in row
        if is_own and _is_current(row) and {*METRICS.values()} <= row.keys() and "limit" not in row:
            scored.setdefault((found.file, row["precision"]), row)
    losses = {"fp32": dict.fromkeys(need.limits, 0.0)}
    for (file, precision), row in scored.items():
        if whole := scored.get((file, "fp32")):
            losses.setdefault(precision, {name: whole[name] - row[name] for name in need.limits})
    return losses


def _passes(need: Need, precision: str, losses: Mapping[str, Mapping[str, float]]) -> bool:
    if need.matters == "quality" and not need.max_loss:  # that no score fell is no proof where tokens change
        return precision == "fp32"
    if precision not in losses:
        return need.model.startswith("random:")  # which has nothing to lose
    return all(losses[precision][name] <= most for name, most in need.limits.items())


def line(need: Need, precision: str, system: str = "") -> str:
    """The line of Python that loads the model; ``system`` is a row's."""
    tuned = {own: f'"{of}", tuned_for="{what}"' for what, others in TUNED_FOR.items() for of, own in others.items()}
    how = "" if need.device == "cpu" else f", device={json.dumps(need.device)}"
    how += "" if precision == "fp32" else f", precision={tuned.get(precision, json.dumps(precision))}"
    how += f", runtime={json.dumps(ON_GPU[system])}" if ON_GPU.get(system) else ""
    how += "" if need.threads is None else f", threads={need.threads}"
    return f"model = accelerate({json.dumps(need.model, ensure_ascii=False)}{how})"


def call(need: Need, row: Row) -> str:
    """The measured call."""
    if "generate()" in row["system"]:
        return f"model.generate(**batch, num_beams={need.beams}, do_sample=False)"
    search, beams = ("beam_search", f", num_beams={need.beams}") if need.beams > 1 else ("greedy", "")
    return f'{search}(model.backend, batch["input_ids"], batch["attention_mask"]{beams}).sequences'


def program(need: Need, row: Row) -> list[str]:
    """A whole program around the measured call, line by line."""
    own_loop = "generate()" not in row["system"]
    search = "beam import beam_search" if need.beams > 1 else "greedy_search import greedy"
    texts = '["Your text."]' + (f" * {need.batch}" if need.batch and need.batch > 1 else "")
    batch = f'batch = model.tokenizer({texts}, return_tensors="{"np" if own_loop else "pt"}")'
    if need.model.startswith("random:"):  # which has no tokenizer
        size = (need.batch, need.source_tokens)
        batch = f'batch = dict.fromkeys(["input_ids", "attention_mask"], torch.ones({size}, dtype=torch.long))'
    return [
        "from t5accel import accelerate",
        *([f"from t5accel.decoding.{search}"] if own_loop else []),
        *(["import torch"] if need.model.startswith("random:") else []),
        line(need, row["precision"], row["system"]), batch, f"answers = {call(need, row)}",
    ]  # fmt: skip


def report(advice: Advice, *, explain: bool = False) -> str:
    """The advice as text of at most 15 lines; ``explain`` adds the compared rows."""
    need, best = advice.need, advice.recommended
    lines = [f"{need.model}, {need.task or 'all tasks'}, for {need.matters}: {_work(vars(need))}, on {need.device}"]
    differing = [f"{name} {factor:.2g} times" for name, factor in advice.far.items() if factor != 1]
    if best is None:
        lines.append(
            "No recommendation: " + (
                "no measured configuration is inside the limits and faster than transformers; --explain shows them."
                if advice.run else
                f"the nearest run that is recorded is too far, with {', '.join(differing)} yours." if differing else
                f"the sizes of {need.model} are unknown here, for its config.json is not on this machine."
                if weights_per_step(need.model) is None else
                f"no run of such a model is recorded (beams {need.beams}, {need.device})."
            )
        )  # fmt: skip
        lines += _next_step(need)
    else:
        row = best.row
        low, high = min(row["ratio_samples"]), max(row["ratio_samples"])
        lines += [
            f"Recommended: {row['precision']}. {row['ratio']:.2f} times ({low:.2f}–{high:.2f}) as fast as transformers "
            "with its cache" + (f" in {row['precision']}" if need.device == "cuda" else ""),
            *(f"  {text}" for text in program(need, row)), f"Rests on {best}:",
            f"  {row['model']}, {_work(row)}"
            + (f", {row['threads']} threads" if need.device == "cpu" else "") + f"; {row['system']}",
            f"Quality: {_lost(advice, row)}",
        ]  # fmt: skip
    lines += [f"Not measured: {text}" for text in _not_measured(advice, differing)]
    if best and not explain:
        lines.append("--explain shows what it was chosen from.")
    return "\n".join([*lines, *(_explained(advice) if explain else [])])


def _next_step(need: Need) -> list[str]:
    """The commands that measure the case."""
    again = f"python -m bench advise --model {need.model} --results mine.json, with the options of this call."
    if need.device == "cuda":
        return ["Measure your card: python -m bench.gpu.suite --json mine.json", f"Then ask again: {again}"]
    if need.beams > 1:
        return [
            "Ask for --beams 1, which `python -m bench board` measures; `make peers`, in a checkout, measures 4 beams."
        ]
    work = f"--batch {need.batch} --source-tokens {need.source_tokens} --new-tokens {need.new_tokens}"
    if need.threads is not None:
        work += f" --threads {need.threads}"
    measure = f"python -m bench board --model {need.model} {work} --json mine.json"
    return [f"Measure it: {measure}", f"Then ask again: {again}"]


def _work(row: Mapping[str, Any]) -> str:
    beams = "greedy" if row["beams"] == 1 else f"{row['beams']} beams"
    return f"batch {row['batch']}, {beams}, {row['source_tokens']} source and {row['new_tokens']} new tokens"


def _lost(advice: Advice, row: Row) -> str:
    losses = advice.losses.get(row["precision"])
    if row["precision"] == "fp32":
        return "the same tokens"
    if losses is None:
        return "never scored on this model"
    return ", ".join(f"{LABELS[name]} {round(-lost, 1) + 0.0:+.1f}" for name, lost in losses.items()) + " against fp32"


def _not_measured(advice: Advice, differing: Sequence[str]) -> Iterator[str]:
    need, best, here = advice.need, advice.recommended, machine.facts(gpu=False)
    size = guessed_size(need.model)
    case = [f"its size is taken from its name, {size}" if size else "",
            f"the run has {', '.join(differing)} yours" if differing else "",
            f"it is of another family, {advice.family}" if advice.family else ""]  # fmt: skip
    if best and any(case):
        yield f"your case itself; {'; '.join(filter(None, case))}"
    if best and need.device == "cuda":
        yield f"another card than {best.about['machine']['gpu']['name']}: ratios differ between cards"
    elif best and not same_machine(best.about["machine"], here):
        yield f"this machine ({here['cpu']}, {here['usable_threads']} threads): ratios differ between machines"
    if best and need.threads not in (None, best.row.get("threads")):
        yield f"{need.threads} threads"
    if advice.unscored:
        row = advice.unscored.row
        judge = "your scores allow" if row["precision"] in FLOATS else "`t5accel quantize` lets it pass"
        speed = f"at {row['ratio']:.2f} times the speed"
        yield f"the quality of {row['precision']} on this model, {speed}: take it if {judge}"


def _explained(advice: Advice) -> Iterator[str]:
    if advice.run:
        cells = [("", "configuration", "ratio", "MB", "peak MB", "row", "quality")]
        for found in advice.run:
            row = found.row
            mark = "*" if found is advice.recommended else "" if found in advice.allowed else "no"
            sizes = [f"{row[key] / 1e6:.0f}" if key in row else "–" for key in ("size_bytes", "peak_memory_bytes")]
            name = f"{row['precision']}, {'generate()' if 'generate()' in row['system'] else 'our loop'}"
            cells.append((mark, name, f"{row['ratio']:.2f}x", *sizes, str(found.number), _lost(advice, row)))
        yield from ("", f"All of {advice.run[0].file} in that run (*: recommended, no: loses too much, or unknown)")
        yield from format_table(cells, left={0, 1, 6})
