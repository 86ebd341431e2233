"""GPT-2 on ONNX Runtime: with a key/value cache or without, fed or bound, bytes counted.

Michaël Benesty's post on accelerating generative models (ELS-RD, 2021/22) found ONNX Runtime slower than PyTorch until
the tensors stayed. Logits for every position, computed anew, add up to more than 6 GB for 256 tokens of GPT-2.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.bert.graphs import export_quietly, quietly
from bench.harness import Contender, run_comparison
from bench.results import Row
from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.errors import UnknownModelError
from t5accel.graphs.contract import kv_names
from t5accel.models.load import cast_model
from t5accel.timing import Work

if TYPE_CHECKING:
    from transformers import PreTrainedModel


RANDOM_SIZES: dict[str, dict[str, int]] = {
    "gpt2": {},  # the configuration's own defaults: 124 million weights (Radford et al. 2019)
    "gpt2-medium": dict(n_embd=1024, n_layer=24, n_head=16),
}
# From prompts (B, P) and a number of tokens N to the tokens (B, N) that follow greedily.
Generate = Callable[[np.ndarray, int], np.ndarray]


@dataclass
class Moved:
    """Counter of the bytes handed over between Python and the runtime, in both directions."""

    size_bytes: int = 0

    def count(self, *arrays: np.ndarray) -> None:
        self.size_bytes += sum(array.nbytes for array in arrays)


def random_gpt2(size: str | Mapping[str, Any] = "gpt2", *, seed: int = 0) -> PreTrainedModel:
    """A seeded ``GPT2LMHeadModel`` whose greedy output varies; ``size``: of `RANDOM_SIZES`, or a config's arguments."""
    # As transformers draws it, a tied head repeats the token just read: here the last norm has random signs, and
    # attention is sharper.
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    if isinstance(size, str) and size not in RANDOM_SIZES:
        raise UnknownModelError(f"No random size {size!r}: there are {', '.join(RANDOM_SIZES)}.")
    sizes = RANDOM_SIZES[size] if isinstance(size, str) else size
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, pad_token_id=0, **sizes)).eval()
        for name, weight in model.named_parameters():
            if "wpe" in name:
                weight.normal_(0.0, 0.1)
            elif name.endswith("c_attn.weight") or name.endswith("c_proj.weight"):
                weight.mul_(5.0)
        norm = model.transformer.ln_f.weight
        norm.mul_(torch.randint(2, norm.shape) * 2.0 - 1.0)
    return model


def export_gpt2(
    model: PreTrainedModel, path: str | os.PathLike[str], *, cache: bool, last_logits: bool = False
) -> Path:
    """The model as one graph, written out here in plain PyTorch, so that it exports alike on all transformers.

    ``input_ids (B,T)``, with a cache also ``past_key_i`` and ``past_value_i (B,H,P,d)`` → ``logits (B,T,V)``, with a
    cache also ``present_key_i`` and ``present_value_i (B,H,P+T,d)``.

    Args:
        last_logits: those of the last position alone, (B,1,V).
    """
    import torch

    config, transformer = model.config, model.transformer
    heads, size = config.n_head, config.n_embd // config.n_head
    past_names, present_names = (kv_names(kind, config.n_layer if cache else 0) for kind in ("past", "present"))

    def attention(block: Any, x: Any, past: Sequence[Any]) -> tuple[Any, Any, Any]:
        batch, new, width = x.shape
        q, k, v = (
            part.view(batch, new, heads, size).transpose(1, 2) for part in block.attn.c_attn(x).split(width, dim=2)
        )
        if past:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        columns = torch.arange(k.shape[2])
        hidden = columns[None, :] > columns[k.shape[2] - new :][:, None]
        scores = (q @ k.transpose(2, 3) / size**0.5).masked_fill(hidden, torch.finfo(torch.float32).min)
        mixed = (scores.softmax(3) @ v).transpose(1, 2).reshape(batch, new, width)
        return block.attn.c_proj(mixed), k, v

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model  # whose weights become the graph's

        def forward(self, input_ids: Any, *past: Any) -> tuple[Any, ...]:
            begin = past[0].shape[2] if past else 0
            positions = torch.arange(begin, begin + input_ids.shape[1])
            x = transformer.wte(input_ids) + transformer.wpe(positions)
            present: list[Any] = []
            for layer, block in enumerate(transformer.h):
                added, *kept = attention(block, block.ln_1(x), past[2 * layer : 2 * layer + 2])
                present += kept
                x = x + added
                x = x + block.mlp(block.ln_2(x))
            x = transformer.ln_f(x[:, -1:] if last_logits else x)
            return (model.lm_head(x), *present) if cache else (model.lm_head(x),)

    ids = torch.ones(2, 3, dtype=torch.int64)
    past = tuple(torch.zeros(2, heads, 4, size) for _ in past_names)
    axes = {"input_ids": {0: "batch", 1: "new"}, "logits": {0: "batch"} if last_logits else {0: "batch", 1: "new"}}
    axes |= {name: {0: "batch", 2: "past"} for name in past_names}
    axes |= {name: {0: "batch", 2: "all"} for name in present_names}
    return export_quietly(Flat(), (ids, *past), path, ["input_ids", *past_names], ["logits", *present_names], axes)


def torch_greedy(model: PreTrainedModel, *, cache: bool = True) -> Generate:
    """transformers' own ``generate``, also that of optimum's models."""
    import torch

    def generate(prompts: np.ndarray, new_tokens: int) -> np.ndarray:
        ids = torch.from_numpy(prompts).to(model.device)
        tokens = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, use_cache=cache,
            min_new_tokens=new_tokens, max_new_tokens=new_tokens, pad_token_id=0, eos_token_id=model.config.vocab_size,
        )  # fmt: skip
        return tokens[:, ids.shape[1] :].cpu().numpy()

    return generate


def recomputed(
    path: str | os.PathLike[str], *, bound: bool, moved: Moved, last_logits: bool = False, threads: int | None = None,
    device: str = "cpu",
) -> Generate:  # fmt: skip
    """Every step computes all positions anew, by a graph without cache.

    Args:
        bound: ids and logits lie in memory that stays; else both are handed over in every step.
        device: ``"cpu"`` or ``"cuda"``. There only the logits stay, in a tensor of torch's.
    """
    session = open_session(path, SessionSettings(threads=threads, device=device))
    vocabulary = session.get_outputs()[0].shape[2]

    def fed(prompts: np.ndarray, new_tokens: int) -> np.ndarray:
        ids = prompts
        for _ in range(new_tokens):
            (logits,) = session.run(["logits"], {"input_ids": ids})
            moved.count(ids, logits)
            ids = np.concatenate([ids, logits[:, -1].argmax(1)[:, None]], axis=1)
        return ids[:, prompts.shape[1] :]

    def stays(prompts: np.ndarray, new_tokens: int) -> np.ndarray:
        batch, begin = prompts.shape
        longest = begin + new_tokens
        ids = np.concatenate([prompts, np.zeros((batch, new_tokens), np.int64)], axis=1)
        memory = np.empty(batch * (1 if last_logits else longest) * vocabulary, np.float32)
        binding = session.io_binding()
        moved.count(prompts)
        for length in range(begin, longest):
            given = np.ascontiguousarray(ids[:, :length])
            shape = (batch, 1 if last_logits else length, vocabulary)
            binding.bind_input("input_ids", "cpu", 0, np.int64, given.shape, given.ctypes.data)
            binding.bind_output("logits", "cpu", 0, np.float32, shape, memory.ctypes.data)
            session.run_with_iobinding(binding)
            logits = memory[: int(np.prod(shape))].reshape(shape)[:, -1]
            ids[:, length] = logits.argmax(1)
            moved.count(logits)  # the row that is looked at: all others stay where they are
        return ids[:, begin:]

    if bound and device != "cpu":
        return recomputed_on_tensors(session, device, moved, last_logits=last_logits)
    return stays if bound else fed


def recomputed_on_tensors(session: Any, device: str, moved: Moved, *, last_logits: bool = False) -> Generate:
    """The same with logits in a tensor of torch's, where the likeliest token is found: only that comes to the host."""
    import torch

    from t5accel.backends.ort_cuda import bind_tensor  # which needs torch

    vocabulary = session.get_outputs()[0].shape[2]

    def generate(prompts: np.ndarray, new_tokens: int) -> np.ndarray:
        batch, begin = prompts.shape
        longest = begin + new_tokens
        ids = np.concatenate([prompts, np.zeros((batch, new_tokens), np.int64)], axis=1)
        on = torch.device(device, 0) if device == "cuda" else torch.device(device)
        size = batch * (1 if last_logits else longest) * vocabulary
        memory, binding = torch.empty(size, dtype=torch.float32, device=on), session.io_binding()
        for length in range(begin, longest):
            given = np.ascontiguousarray(ids[:, :length])
            shape = (batch, 1 if last_logits else length, vocabulary)
            logits = memory[: math.prod(shape)].view(shape)
            binding.bind_cpu_input("input_ids", given)
            bind_tensor(binding, "logits", logits, dtype=torch.float32, device=on, is_output=True)
            session.run_with_iobinding(binding)  # returns when all is computed
            chosen = logits[:, -1].argmax(1).cpu().numpy()
            ids[:, length] = chosen
            moved.count(given, chosen)
        return ids[:, begin:]

    return generate


def cached(
    path: str | os.PathLike[str], *, bound: bool, moved: Moved, threads: int | None = None, device: str = "cpu"
) -> Generate:
    """Every step computes the new position alone, by a graph with a key/value cache.

    Args:
        bound: keys and values stay with the runtime, and a row of scores comes to the host; else all of them are
            handed over, in and out, in every step.
        device: ``"cpu"`` or ``"cuda"``, where keys and values stay.
    """
    session = open_session(path, SessionSettings(threads=threads, device=device))
    kinds = [one for one in session.get_inputs() if one.name != "input_ids"]
    past_names, present_names = (kv_names(kind, len(kinds) // 2) for kind in ("past", "present"))
    heads, size = kinds[0].shape[1], kinds[0].shape[3]

    def fed(prompts: np.ndarray, new_tokens: int) -> np.ndarray:
        past = [np.zeros((len(prompts), heads, 0, size), np.float32)] * len(past_names)
        ids, found = prompts, []
        for _ in range(new_tokens):
            feeds = {"input_ids": ids, **dict(zip(past_names, past, strict=True))}
            logits, *present = session.run(["logits", *present_names], feeds)
            moved.count(*feeds.values(), logits, *present)
            ids, past = logits[:, -1].argmax(1)[:, None], present
            found.append(ids)
        return np.concatenate(found, axis=1)

    def stays(prompts: np.ndarray, new_tokens: int) -> np.ndarray:
        import onnxruntime

        empty = (len(prompts), heads, 0, size)
        past = [onnxruntime.OrtValue.ortvalue_from_shape_and_type(empty, np.float32, device, 0)] * len(past_names)
        ids, found = prompts, []
        for _ in range(new_tokens):
            binding = session.io_binding()
            ids = np.ascontiguousarray(ids)
            binding.bind_cpu_input("input_ids", ids)
            for name, value in zip(past_names, past, strict=True):
                binding.bind_ortvalue_input(name, value)
            binding.bind_output("logits", "cpu")
            for name in present_names:
                binding.bind_output(name, device)
            session.run_with_iobinding(binding)
            logits, *past = binding.get_outputs()
            scores = logits.numpy()
            moved.count(ids, scores)
            ids = scores[:, -1].argmax(1)[:, None]
            found.append(ids)
        return np.concatenate(found, axis=1)

    return stays if bound else fed


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
        model = self.model if self.device == "cpu" else cast_model(self.model, "float32", self.device)
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
    """A row for each way, of the same prompts and forced tokens; all must write the first way's tokens."""
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
    found = [Contender(way, lambda way=way: built(way)) for way in ways]
    cell = f"{model}, {new_tokens} tokens"
    rows = run_comparison(found, work, rounds=rounds, keep_going=keep_going, model=model, cell=cell)
    for row in rows:
        if row["system"] in GRAPHS and "failed" not in row:
            row["moved_bytes"] = counters[row["system"]].size_bytes
    return rows
