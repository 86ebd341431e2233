"""GPT-2's ways side by side: equal tokens first, then time, and the bytes that each hands over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.bert.exporting import quietly
from bench.gpt2 import Generate, Moved, cached, export_gpt2, recomputed, torch_greedy
from bench.harness import Way, measured
from bench.results import Row
from t5accel.models.load import in_floats
from t5accel.timing import Work

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PYTORCH, NO_CACHE, OPTIMUM = "PyTorch, cache", "PyTorch, no cache", "optimum, cache"
# By name: with a cache or not, whether memory stays bound, and whether the graph gives the last logits alone.
GRAPHS: Mapping[str, tuple[bool, bool, bool]] = {
    "ONNX Runtime, no cache, numpy": (False, False, False),
    "ONNX Runtime, no cache, bound": (False, True, False),
    "ONNX Runtime, no cache, bound, last logits": (False, True, True),
    "ONNX Runtime, cache, numpy": (True, False, False),
    "ONNX Runtime, cache, bound": (True, True, False),
}
WAYS = (PYTORCH, NO_CACHE, *GRAPHS, OPTIMUM)


@dataclass(frozen=True)
class Gpt2:
    """A GPT-2, which stays on the CPU, and where its graphs are written; what is there is used again.

    ``device`` is where all ways run but optimum's, ``"cpu"`` or ``"cuda"``.
    """

    model: PreTrainedModel
    folder: Path
    threads: int
    device: str = "cpu"

    def graph(self, *, cache: bool, last_logits: bool) -> Path:
        """The one with these two properties, made when it is missing."""
        path = self.folder / f"{'cache' if cache else 'anew'}{'-last' if last_logits else ''}" / "model.onnx"
        return path if path.is_file() else export_gpt2(self.model, path, cache=cache, last_logits=last_logits)

    def generate(self, way: str, moved: Moved) -> Generate:
        """The function of a way, one of `WAYS`, whose graphs count on ``moved``."""
        if way in GRAPHS:
            cache, bound, last_logits = GRAPHS[way]
            graph = self.graph(cache=cache, last_logits=last_logits)
            how = dict(moved=moved, threads=self.threads, device=self.device)
            if cache:
                return cached(graph, bound=bound, **how)
            return recomputed(graph, bound=bound, last_logits=last_logits, **how)
        if way == OPTIMUM:
            return torch_greedy(self._optimum())
        model = self.model if self.device == "cpu" else in_floats(self.model, "float32", self.device)
        return torch_greedy(model, cache=way == PYTORCH)

    def _optimum(self) -> Any:
        import onnxruntime
        from optimum.onnxruntime import ORTModelForCausalLM

        folder = self.folder / "optimum"
        if not (folder / "model.safetensors").is_file():
            self.model.save_pretrained(folder)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        with quietly():
            return ORTModelForCausalLM.from_pretrained(folder, export=True, session_options=options)


def gpt2_rows(
    gpt2: Gpt2, *, model: str, new_tokens: int, prompt_tokens: int = 8, batch: int = 1, rounds: int = 5,
    ways: Sequence[str] = WAYS, keep_going: bool = False,
) -> list[Row]:  # fmt: skip
    """A row for each way, of the same prompts and number of forced tokens; every one has to write the first's tokens.

    Raises:
        ParityError: a way writes other tokens.
        InputError: the tokens do not vary.

    >>> from bench.gpt2 import random_gpt2
    >>> tiny = random_gpt2(dict(vocab_size=200, n_embd=64, n_layer=2, n_head=4, n_positions=64))
    >>> rows = gpt2_rows(Gpt2(tiny, Path("graphs"), 1), model="tiny", new_tokens=12, rounds=3, ways=[PYTORCH, NO_CACHE])
    >>> [row["equal"] for row in rows]
    [12, 12]
    """
    import torch

    torch.set_num_threads(gpt2.threads)
    vocabulary = gpt2.model.config.vocab_size
    prompts = np.random.default_rng(0).integers(1, vocabulary, (batch, prompt_tokens))
    counters = {way: Moved() for way in ways}

    def built(way: str) -> Callable[[], np.ndarray]:
        generate = gpt2.generate(way, counters[way])

        def run() -> np.ndarray:
            counters[way].size_bytes = 0
            return generate(prompts, new_tokens)

        return run

    work = Work(batch, prompt_tokens, new_tokens, threads=gpt2.threads)
    found = [Way(way, lambda way=way: built(way)) for way in ways]
    cell = f"{model}, {new_tokens} tokens"
    rows = measured(found, work, rounds=rounds, keep_going=keep_going, model=model, cell=cell)
    for row in rows:
        if row["system"] in GRAPHS and "failed" not in row:
            row["moved_bytes"] = counters[row["system"]].size_bytes
    return rows
