"""Greedy steps on ONNX Runtime that need not read the whole output head: near logits first, all exact ones if need be.

What is near and why the answer is still exact: `decoding.shortlist`. The graph: `graphs.shortlist`. One session holds
the layers and both heads, so that a step which is not certain can be taken again, in full, with the same numbers as
without a shortlist. That is 66 MB more in memory than near logits need (of t5-small's shape); two sessions would hold
the layers twice, and open the second one in the middle of an answer.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from t5accel.backends.ort.session import mapped
from t5accel.decoding.shortlist import Head, NearLogits, certified
from t5accel.graphs.build.contract import NEAR_ONLY
from t5accel.graphs.export.manifest import Manifest

if TYPE_CHECKING:
    import onnxruntime

MOST_ROWS = 64  # of a step; what is beyond was not measured
# It is given up for steps of so many rows of which more than 16 and one in 8 had to be taken again: near logits save
# less than that. Where the order of additions decides one token in 200, as in random weights, 32 rows are too many.
PATIENCE, SHARE = 16, 8
NEAR = ["logits", *NEAR_ONLY]


class Shortlist:
    """What a backend knows of an export's shortlist, and how often that was enough.

    Attributes:
        head: the exact rows of the head, mapped from the file of weights, and the bounds of its copy.

    >>> shortlist = Shortlist(Head(np.eye(2, dtype=np.float32), largest_row=1.0, largest_error=0.0))
    >>> shortlist.pays(rows=1), shortlist.pays(rows=1000), shortlist.steps, shortlist.fallbacks
    (True, False, 0, 0)
    """

    def __init__(self, head: Head):
        self.head = head
        self._steps: Counter[int] = Counter()  # by their number of rows
        self._fallbacks: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def steps(self) -> int:
        """How many were tried with it."""
        return self._steps.total()

    @property
    def fallbacks(self) -> int:
        """How many of these were taken again with all exact logits."""
        return self._fallbacks.total()

    @classmethod
    def of_export(
        cls, folder: Path, manifest: Manifest, weights: Mapping[str, onnxruntime.OrtValue]
    ) -> Shortlist | None:
        """That of an export, if it has one; ``weights`` are `session.shared_weights`, which may hold the rows."""
        if not manifest.shortlist:
            return None
        place = manifest.shortlist["rows"]
        same = [weights[name].numpy() for name, shared in manifest.shared.items() if shared == place]
        bounds = {name: manifest.shortlist[name] for name in ("largest_row", "largest_error")}
        return cls(Head(same[0] if same else mapped(folder, place), **bounds))

    def pays(self, rows: int) -> bool:
        """Whether to try it on a step of so many rows."""
        return rows <= MOST_ROWS and self._fallbacks[rows] <= PATIENCE + self._steps[rows] / SHARE

    def choose(self, near: NearLogits, forbidden: int | None) -> np.ndarray | None:
        """(R,) tokens, or ``None`` where one of them is not certain; counted."""
        tokens = certified(self.head, near, forbidden)
        with self._lock:
            self._steps[near.norms.size] += 1
            self._fallbacks[near.norms.size] += tokens is None
        return tokens
