"""Backends over the older layouts; R = B * K rows, each with a copy of its source."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from bench.baselines.layout_graphs import INIT_DECODER, LAYOUTS, LM_HEAD, MERGED_DECODER, WHOLE
from bench.baselines.layouts import Layout, export_layout, read_layout
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.backends.torch_eager import TorchEager, TorchState
from t5accel.decoding.backend import PastLengths
from t5accel.decoding.token_constraints import TokenConstraints
from t5accel.errors import InputError
from t5accel.graphs.contract import DECODER, ENCODER, as_folder, kv_names
from t5accel.graphs.export import export_model, source_hash, t5_weights
from t5accel.models.t5_math import cache_name

if TYPE_CHECKING:
    from onnxruntime import InferenceSession
    from transformers import PreTrainedModel


Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class RowSource:
    """B sources, ready to be started."""

    inputs: Arrays  # what each of its rows brings to the graphs, by name, (B, …)


@dataclass
class RowState:
    """A decoder state of R rows."""

    rows: PastLengths  # how long each row's past is
    # what the graphs are handed for the sources, by name, (R, …): from the first step on also keys and values of
    # cross-attention, (R, H_i, S, d_kv)
    source: Arrays
    # what they are handed for the history: keys and values (R, H_i, P, d_kv), or tokens (R, P)
    past: Arrays = field(default_factory=dict)


class RowBackend(ABC):
    """What `ThreeGraphs`, `MergedGraphs` and `WholeGraph` have in common. Each is a `Backend`, fed with numpy arrays.

    Threads may share a backend; a state belongs to one of them. A method that raises leaves the state as it was.

    Args:
        folder: what `layouts.export_layout` wrote.
    """

    layout: str  # whose folders it opens

    def __init__(self, folder: str | os.PathLike[str], *, settings: SessionSettings | None = None):
        self.description, self.sessions = open_layout(folder, self.layout, settings)
        self.outputs = {file: [out.name for out in session.get_outputs()] for file, session in self.sessions.items()}
        self.dims, tokens = self.description.dims, self.description.tokens
        self.vocab_size, self.pad_token_id = self.dims.vocab_size, tokens["pad_token_id"]
        self.eos_token_id, self.decoder_start_token_id = tokens["eos_token_id"], tokens["decoder_start_token_id"]
        self.rules = TokenConstraints.from_json(dict(self.description.rules))

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> RowSource:
        return RowSource(self._run_encoder(np.ascontiguousarray(input_ids), np.ascontiguousarray(attention_mask)))

    def new_state(self, source: RowSource, rows_per_source: int = 1) -> RowState:
        rows = PastLengths.empty(len(source.inputs["attention_mask"]), rows_per_source)
        return RowState(rows, {name: array.repeat(rows.shape[1], 0) for name, array in source.inputs.items()})

    def step(self, state: RowState, input_ids: np.ndarray) -> np.ndarray:
        count = input_ids.shape[2]
        rows = state.rows.appended(count)
        file, inputs = self._inputs(state, np.ascontiguousarray(input_ids.reshape(-1, count)), rows)
        outputs = self._run(file, inputs)
        source, past = self._after(state, inputs, outputs)
        state.rows, state.source, state.past = rows, source, past
        return outputs["logits"][:, -count:].reshape(*input_ids.shape, self.vocab_size)

    def reorder(self, state: RowState, rows: np.ndarray) -> None:
        histories, index = state.rows.reordered(rows)
        if index is not None:  # the rows of a source share what it brings: only their pasts change places
            state.past = _rows_of(state.past, index)
        state.rows = histories

    def rollback(self, state: RowState, accepted: np.ndarray) -> None:
        histories, index = state.rows.trimmed(accepted)
        if index is not None:
            flat = index.reshape(math.prod(histories.shape), histories.width)
            state.past = {name: _positions_of(array, flat) for name, array in state.past.items()}
        state.rows = histories

    def select_sources(self, state: RowState, sources: np.ndarray) -> None:
        histories, kept = state.rows.kept(sources)
        rows_per_source = histories.shape[1]
        index = (kept[:, None] * rows_per_source + np.arange(rows_per_source)).ravel()
        source, past = (_rows_of(arrays, index) for arrays in (state.source, state.past))
        state.rows, state.source, state.past = histories, source, past

    # Which graphs run, on what, and what stays of it: with a cache

    def _run_encoder(self, ids: np.ndarray, mask: np.ndarray) -> Arrays:
        """(B, S) tokens and mask -> what a state starts with, (B, …)."""
        hidden = self._run(ENCODER, {"input_ids": ids, "attention_mask": mask})["last_hidden_state"]
        return {"attention_mask": mask, "encoder_hidden_states": hidden}

    @abstractmethod
    def _inputs(self, state: RowState, new: np.ndarray, rows: PastLengths) -> tuple[str, Arrays]:
        """For (R, T) tokens, after which the histories are ``rows``, the graph to run and all that it is handed."""

    def _after(self, state: RowState, inputs: Arrays, outputs: Arrays) -> tuple[Arrays, Arrays]:
        """What a state holds after a step: ``source``, ``past``."""
        layers, source = self.dims.decoder_layers, dict(state.source)
        if not self._has_begun(state):
            for cross, computed in zip(kv_names("cross", layers), kv_names("present_cross", layers), strict=True):
                source[cross] = outputs[computed]
        pairs = zip(kv_names("past", layers), kv_names("present", layers), strict=True)
        return source, {past: outputs[present] for past, present in pairs}

    # The same for all

    def _has_begun(self, state: RowState) -> bool:
        return "cross_key_0" in state.source

    def _past_mask(self, state: RowState) -> np.ndarray:
        """(R, P) int64."""
        return state.rows.mask().reshape(math.prod(state.rows.shape), state.rows.width)

    def _run(self, file: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        outputs = self.outputs[file]
        return dict(zip(outputs, self.sessions[file].run(outputs, inputs), strict=True))


class ThreeGraphs(RowBackend):
    """fastT5's layout: one decoder graph for the first step, another for all later ones.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.decoding.greedy_search import greedy
    >>> from bench.baselines.layouts import export_layout
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_layout("mini", f"{folder}/mini", "fastt5")
    ...     greedy(ThreeGraphs(f"{folder}/mini"), [[100, 200, 1]], min_new_tokens=5, max_new_tokens=5).sequences.shape
    (1, 5)
    """

    layout = "fastt5"

    def _inputs(self, state: RowState, new: np.ndarray, rows: PastLengths) -> tuple[str, Arrays]:
        if not self._has_begun(state):
            return INIT_DECODER, {"input_ids": new, **state.source}
        return DECODER, {"input_ids": new, "past_mask": self._past_mask(state), **state.source, **state.past}

    def _after(self, state: RowState, inputs: Arrays, outputs: Arrays) -> tuple[Arrays, Arrays]:
        source, past = super()._after(state, inputs, outputs)
        source.pop("encoder_hidden_states", None)  # later steps read the keys and values that were made of it
        return source, past


class MergedGraphs(RowBackend):
    """optimum's merged layout: one decoder graph, which is told at every step which branch of it to run.

    It asks for the inputs of both branches each time, also for those that the branch does not read.
    """

    layout = "merged"

    def _inputs(self, state: RowState, new: np.ndarray, rows: PastLengths) -> tuple[str, Arrays]:
        begun = self._has_begun(state)
        always = {"input_ids": new, "past_mask": self._past_mask(state), "use_cache_branch": np.array([begun])}
        nothing = {} if begun else self._nothing(len(new))
        return MERGED_DECODER, {**always, **nothing, **state.source, **state.past}

    def _nothing(self, rows: int) -> Arrays:
        """A history and cross tensors of no positions."""
        return {
            f"{prefix}_{name}_{layer}": np.zeros((rows, heads, 0, self.dims.d_kv), dtype=np.float32)
            for prefix, by_layer in (("past", self.dims.decoder_heads), ("cross", self.dims.cross_heads))
            for layer, heads in enumerate(by_layer)
            for name in ("key", "value")
        }


class WholeGraph(RowBackend):
    """The complete model as one graph: every step encodes the source and decodes all tokens so far again."""

    layout = "whole"

    def _run_encoder(self, ids: np.ndarray, mask: np.ndarray) -> Arrays:
        return {"input_ids": ids, "attention_mask": mask}

    def _inputs(self, state: RowState, new: np.ndarray, rows: PastLengths) -> tuple[str, Arrays]:
        past = state.past.get("decoder_input_ids", new[:, :0])
        tokens = np.concatenate([past, new], axis=1)
        mask = rows.mask().reshape(tokens.shape)
        return WHOLE, {"decoder_input_ids": tokens, "decoder_attention_mask": mask, **state.source}

    def _after(self, state: RowState, inputs: Arrays, outputs: Arrays) -> tuple[Arrays, Arrays]:
        return state.source, {"decoder_input_ids": inputs["decoder_input_ids"]}


def open_layout(
    folder: str | os.PathLike[str], layout: str, settings: SessionSettings | None = None
) -> tuple[Layout, dict[str, InferenceSession]]:
    """Read a folder of that layout and open a session on each of its graphs, by file name."""
    settings = SessionSettings() if settings is None else settings
    if not isinstance(settings, SessionSettings):
        raise InputError(f"settings must be SessionSettings, got {settings!r:.80}.")
    description, folder = read_layout(folder, layout), as_folder(folder)
    return description, {file: open_session(folder / file, settings) for file in LAYOUTS[layout]}


def layout_backend(
    model: PreTrainedModel, folder: str | os.PathLike[str], layout: str, settings: SessionSettings | None = None
) -> RowBackend | OrtNumpy:
    """Export a model to a new folder in a layout of notebook 02, the weights beside the graphs, and open it."""
    if layout == "two graphs":
        export_model(model, folder, external_threshold_bytes=0, check_logits=False)  # as the other layouts
        return OrtNumpy(folder, settings=settings)
    kind = {"whole": WholeGraph, "three graphs": ThreeGraphs, "merged": MergedGraphs}[layout]
    export_layout(model, folder, kind.layout, external_threshold_bytes=0)
    return kind(folder, settings=settings)


def _rows_of(arrays: Arrays, index: np.ndarray) -> Arrays:
    return {name: array[index] for name, array in arrays.items()}


def _positions_of(array: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Of (R, H, P, d_kv) or (R, P) the positions (R, n) of each row."""
    if array.ndim == 2:
        return np.take_along_axis(array, index, axis=1)
    return np.ascontiguousarray(np.take_along_axis(array, index[:, None, :, None], axis=2))


# The encoder and the head on ONNX Runtime, the decoder between them in torch: the layout of the class OnnxT5 of 2020.
# A graph takes no missing history, so a single decoder graph could have no cache; transformers' decoder has one. At
# every step the decoder's output goes from torch to the runtime, and the logits come back: on a CPU neither is
# copied.


class HybridOnnxT5(TorchEager):
    """A `Backend` like `TorchEager` with its cache, whose encoder and head are graphs.

    Args:
        folder: what ``layouts.export_layout(model, folder, "onnxt5")`` wrote.
    """

    def __init__(
        self, folder: str | os.PathLike[str], model: PreTrainedModel, *, settings: SessionSettings | None = None
    ):
        super().__init__(model)
        self.description, self.sessions = open_layout(folder, "onnxt5", settings)
        if source_hash(model, t5_weights(model)) != self.description.source["sha256"]:
            raise InputError(
                f"The graphs in {folder} were written from {self.description.source['name']!r} with other weights than "
                "this model's: write them again with export_layout."
            )

    def fingerprint(self) -> Hashable:
        """Always the same: the weights of a session do not change."""
        return self.description.source["sha256"]

    def _run_encoder(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": ids.cpu().numpy(), "attention_mask": mask.cpu().numpy()}
        (hidden,) = self.sessions[ENCODER].run(["last_hidden_state"], inputs)
        return torch.from_numpy(hidden).to(self.device, self.model.dtype)

    def _run_decoder(
        self, state: TorchState, tokens: torch.Tensor, past_mask: torch.Tensor | None, count: int
    ) -> np.ndarray:
        hidden = self.model.decoder(
            input_ids=tokens,
            attention_mask=past_mask,
            encoder_hidden_states=state.hidden,
            encoder_attention_mask=state.mask,
            use_cache=True,
            **{cache_name(): state.cache},
        ).last_hidden_state
        (logits,) = self.sessions[LM_HEAD].run(["logits"], {"hidden_states": hidden.float().cpu().numpy()})
        return logits
