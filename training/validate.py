"""Score a model on held-out translation pairs: sentences that training never saw, with all their references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.tasks import TRANSLATE
from t5accel.metrics import bleu, chrf
from training.pairs import HeldOut, read_pairs, split_pairs


@dataclass(frozen=True)
class HeldOutQuality:
    """Corpus BLEU and chrF (0–100) over the held-out English sentences."""

    sentences: int
    references: int
    bleu: float
    chrf: float

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, ready for ``json.dump``."""
        return asdict(self)


def held_out_quality(
    generate: Callable[[list[str]], list[str]], pairs_file: str | Path, *, held_out: int = 1000, batch_size: int = 64
) -> tuple[HeldOutQuality, HeldOutQuality | None]:
    """Translate what `pairs.split_pairs` keeps out of training, and score it: sentences of any length, and long ones.

    Args:
        generate: from texts with T5's prefix to translations.
        pairs_file: the file that the model was trained on; the second score is ``None`` if it has no long sentences.

    Raises:
        InputError: as `pairs.read_pairs`.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".tsv", delete=False) as file:
    ...     _ = file.write("A b c d e.\\tF g h i j.\\nK l m n o.\\tP q r s t.\\n")
    >>> held_out_quality(lambda texts: ["nothing"], file.name, held_out=1)
    (HeldOutQuality(sentences=1, references=1, bleu=0.0, chrf=11.27), None)
    """
    split = split_pairs(read_pairs(pairs_file), held_out)
    long = _scored(generate, split.held_out_long, batch_size) if split.held_out_long else None
    return _scored(generate, split.held_out, batch_size), long


def _scored(generate: Callable[[list[str]], list[str]], rows: HeldOut, batch_size: int) -> HeldOutQuality:
    sources = sorted((TRANSLATE + english for english, _ in rows), key=len)  # batches of alike length waste no padding
    references = {TRANSLATE + english: list(frenches) for english, frenches in rows}
    predictions: list[str] = []
    for first in range(0, len(sources), batch_size):
        predictions += generate(sources[first : first + batch_size])
    expected = [references[source] for source in sources]
    count = sum(map(len, expected))
    return HeldOutQuality(
        len(rows), count, round(bleu(predictions, expected), 2), round(chrf(predictions, expected), 2)
    )
