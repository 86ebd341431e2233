"""What is wanted of a model, and how far a measured run is from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from t5accel.checks import as_count
from t5accel.errors import InputError

METRICS = {"translation": "bleu", "summaries": "rougeL", "questions": "exact_match"}
MATTERS = ("latency", "throughput", "memory", "quality")
USUAL_LOSS = 1.0  # of each score, where nothing else is asked for
NEAR, FAR = 2.0, 8.0  # factors up to which a run is near, and up to which it says anything


@dataclass(frozen=True)
class Need:
    """What is wanted.

    Attributes:
        model: as `checkpoints.load_t5` knows it.
        task: one of `METRICS`, or ``None``: all of them.
        matters: one of `MATTERS`. With ``"quality"`` the same tokens are wanted, unless ``max_loss`` allows a loss.
        batch: texts at a time; by default 32 where throughput matters, the largest batch that is recorded, else 1.
        beams, source_tokens, new_tokens: of a typical call.
        max_loss: what each score may be lower than in fp32, by its name in `METRICS`; by default 1.0 of each score of
            the task.
        device: ``"cpu"`` or ``"cuda"``.
        threads: by default those that this process may use.

    Raises:
        InputError: a value is none of these.

    >>> Need(matters="throughput").batch, Need(task="summaries").limits
    (32, {'rougeL': 1.0})
    """

    model: str = "mini"
    task: str | None = None
    matters: str = "latency"
    batch: int | None = None
    beams: int = 1
    source_tokens: int = 64
    new_tokens: int = 64
    max_loss: Mapping[str, float] = field(default_factory=dict)
    device: str = "cpu"
    threads: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise InputError(f"model is {self.model!r}; give a name, a folder or a hub id.")
        choices = {"task": (None, *METRICS), "matters": MATTERS, "device": ("cpu", "cuda")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                named = ", ".join(str(one) for one in allowed if one)
                raise InputError(f"{name} is {getattr(self, name)!r}; give one of {named}.")
        if self.batch is None:
            object.__setattr__(self, "batch", 32 if self.matters == "throughput" else 1)
        counts = ["batch", "beams", "source_tokens", "new_tokens", *(["threads"] if self.threads is not None else [])]
        for name in counts:
            object.__setattr__(self, name, as_count(getattr(self, name), name, at_least=1))
        if not isinstance(self.max_loss, Mapping) or not self.max_loss.keys() <= {*METRICS.values()}:
            raise InputError(f"max_loss is {self.max_loss!r}; its names are some of {', '.join(METRICS.values())}.")
        for name, value in self.max_loss.items():
            right = isinstance(value, int | float) and not isinstance(value, bool)
            if not right or not (math.isfinite(value) and value >= 0):
                raise InputError(f"max_loss[{name!r}] is {value!r}; give a number of 0 or more.")

    @property
    def limits(self) -> dict[str, float]:
        """What each score that counts may lose."""
        names = METRICS.values() if self.task is None else [METRICS[self.task]]
        usual = 0.0 if self.matters == "quality" else USUAL_LOSS
        return dict(self.max_loss) or dict.fromkeys(names, usual)


@dataclass(frozen=True)
class Distance:
    """What a measured run has, over what is needed: 8.0 is eight times as much."""

    model_size: float
    batch: float
    beams: float
    source_tokens: float
    new_tokens: float

    @property
    def factors(self) -> dict[str, float]:
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @property
    def doublings(self) -> float:
        """How often something is doubled or halved on the way, all in all.

        >>> Distance(model_size=1.0, batch=8.0, beams=1.0, source_tokens=0.5, new_tokens=1.0).doublings
        4.0
        """
        return sum(abs(math.log2(factor)) for factor in self.factors.values())

    @property
    def farthest(self) -> float:
        """The largest factor, up or down."""
        return max(max(factor, 1 / factor) for factor in self.factors.values())

    @property
    def fits(self) -> bool:
        return self.farthest <= FAR

    @property
    def is_near(self) -> bool:
        return self.farthest <= NEAR


def parse_limits(texts: Iterable[str]) -> dict[str, float]:
    """Limits as the command line writes them. Raises ``InputError`` for a text of another form.

    >>> parse_limits(["bleu=0.5", "exact_match=1"])
    {'bleu': 0.5, 'exact_match': 1.0}
    """
    limits = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            limits[name.strip()] = float(value)
        except ValueError as error:
            raise InputError(f"--max-loss is {text!r}; give a score and a number, as in bleu=0.5.") from error
    return limits
