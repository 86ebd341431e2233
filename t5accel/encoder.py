"""The encoder of a T5 or a relative alone: hidden states as transformers gives them, and embeddings of texts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel import machine
from t5accel.backends import ort_memory as memory
from t5accel.backends.ort_memory import length_slices, run_into
from t5accel.backends.ort_session import SessionSettings, open_session, require_contract
from t5accel.checks import as_batch, as_count, as_integers
from t5accel.errors import GateError, InputError
from t5accel.graphs.contract import ENCODER_ONLY, MODULES, as_folder
from t5accel.graphs.manifest import Manifest, read_manifest
from t5accel.graphs.ort_levels import require_runnable_here
from t5accel.models.spec import ModelSpec
from t5accel.tokenization import as_texts, tokenize, tokenizer_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from t5accel.precision.recipes import Recipe

POOLINGS = ("mean", "first", "none")
IN_TORCH = ("bf16", "fp16")
CHARACTERS = 100_000  # of the texts that are tokenized together, padding counted
MIN_GAIN = 1.5  # of bfloat16's products over float32's, for which precision="auto" takes it
_FOLLOWED_BY = ("Transformer", "Pooling", "Normalize")  # of its modules, those that `embed` has


class AcceleratedEncoder:
    """An encoder, called as transformers' ``T5EncoderModel`` is; for inference.

    ``AcceleratedEncoder(folder)`` opens an export of `graphs.encoder_export`, without torch and transformers;
    `from_pretrained` opens any model. Threads may share it. Texts do not depend on the others of a batch, but for
    roundings of the last bits.

    >>> encoder = AcceleratedEncoder.from_pretrained("mini", progress=False)
    >>> encoder.embed(["I am tired.", "The house is small."]).shape
    (2, 256)
    """

    main_input_name = "input_ids"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        threads: int | None = None,
        manifest: Manifest | None = None,
        max_source_tokens: int | None = None,
    ):
        folder = as_folder(folder)
        self.manifest = read_manifest(folder) if manifest is None else manifest
        if not self.manifest.is_encoder_only:
            raise InputError(
                f"{folder} must be the export of an encoder alone (export_encoder, t5accel export --encoder), got one "
                "of a whole model, whose encoder gives keys and values in place of hidden states."
            )
        require_runnable_here(self.manifest, folder, "cpu")
        # The graph's weights are not mapped for it: what ONNX Runtime maps itself, it gives up once it has packed it.
        path = folder / ENCODER_ONLY
        self._session = open_session(path, SessionSettings(threads=threads, huge_pages=False))
        require_contract(self._session, self.manifest.graphs[ENCODER_ONLY], path)
        self._module = None
        spec = ModelSpec.of_manifest(self.manifest)
        tokenizer = (
            tokenizer_of(folder) if {"tokenizer.json", "tokenizer_config.json"} & {*self.manifest.files} else None
        )
        self._set(folder, spec, tokenizer, self.manifest.recipe["name"], max_source_tokens)

    @classmethod
    def from_pretrained(
        cls,
        model: PreTrainedModel | str | os.PathLike[str],
        *,
        precision: str | Recipe | None = None,
        device: str = "cpu",
        threads: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_source_tokens: int | None = None,
        progress: bool = True,
        check_outputs: bool = True,
    ) -> AcceleratedEncoder:
        """Open an encoder, or that of a whole model.

        Args:
            model: ``"mini"``, a hub id, a folder of ``save_pretrained`` or of an export, or a model object.
            precision: ``"fp32"`` (the default), ``"int8"``, ``"int4"`` or a `Recipe`, on ONNX Runtime, exported once
                into the user's cache; ``"bf16"`` or ``"fp16"``, in torch; ``"auto"``: bf16 where this CPU multiplies it
                1.5 times as fast as fp32, measured now, else fp32. An export runs in its own.
            device: ``"cpu"``, or ``"cuda"`` for fp32, bf16 and fp16, in torch.
            max_source_tokens: refuse longer texts, whose attention grows with the square of their length.
            check_outputs: as in `graphs.encoder_export.export_encoder`.

        Raises:
            InputError: the precision does not run on the device, or the export has another one.
            ExportError, ModelUnavailableError, MissingPackageError: as for `accelerate`.
        """
        from t5accel.graphs.encoder_export import cached_encoder
        from t5accel.graphs.export_cache import find_export, verified_manifest
        from t5accel.models.load import require_gpu

        if device not in ("cpu", "cuda"):
            raise InputError(f"device must be 'cpu' or 'cuda', got {device!r:.80}.")
        folder = find_export(model)
        if precision == "auto" and folder is not None:
            precision = None
        elif precision == "auto":
            gain = machine.gemm_flops_per_s(dtype="bfloat16") / machine.gemm_flops_per_s() if device == "cpu" else 2
            precision = "bf16" if gain >= MIN_GAIN else "fp32"
        if device == "cuda":
            require_gpu()
        if precision in IN_TORCH or device == "cuda":
            if folder is not None:
                raise InputError(f"precision {precision!r} on {device} runs a model, got the export {folder}.")
            return cls._in_torch(model, precision or "fp32", device, threads, tokenizer, max_source_tokens)
        if folder is None:
            options = dict(tokenizer=tokenizer, progress=progress, check_outputs=check_outputs)
            folder, manifest = cached_encoder(model, precision=precision or "fp32", **options)
        else:
            manifest = verified_manifest(folder)
            own = manifest.recipe["name"]
            if precision is not None and getattr(precision, "name", precision) != own:
                raise InputError(f"precision must be that of the export {folder}, {own!r}, got {precision!r:.80}.")
        encoder = cls(folder, threads=threads, manifest=manifest, max_source_tokens=max_source_tokens)
        encoder.tokenizer = encoder.tokenizer if tokenizer is None else tokenizer
        return encoder

    @classmethod
    def _in_torch(
        cls, model: Any, precision: str, device: str, threads: int | None, tokenizer: Any, most: int | None
    ) -> AcceleratedEncoder:
        import torch

        from t5accel.graphs.encoder_export import EncoderSource, encoder_module
        from t5accel.graphs.export import require_tokenizer
        from t5accel.models.load import cast_model

        floats = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(precision)
        if floats is None:
            raise InputError(f"precision on device='cuda' must be fp32, bf16 or fp16, got {precision!r:.80}.")
        require_tokenizer(tokenizer)
        if threads is not None:
            as_count(threads, "threads", at_least=1)
        source = EncoderSource.of(model)
        self = cls.__new__(cls)
        torch.set_num_threads(threads or machine.cpu_threads())
        if source.module is None:
            self._module = encoder_module(source.config, source.weights, floats, device).encoder
        else:
            self._module = cast_model(source.module, floats, device).eval()
        self.manifest, self._session = None, None
        tokenizer = source.tokenizer if tokenizer is None else tokenizer
        self._set(source.folder, source.spec, tokenizer, precision, most)
        self.config = source.config
        return self

    def _set(self, folder: Path | None, spec: ModelSpec, tokenizer: Any, precision: str, most: int | None) -> None:
        if most is not None:
            as_count(most, "max_source_tokens", at_least=1)
        self.folder, self.precision, self.tokenizer = folder, precision, tokenizer
        self.dims, self.pad_token_id = spec.dims, spec.tokens["pad_token_id"]
        self._masks_padding = spec.family.model_type == "t5gemma"
        self.source_vocab_size = spec.source_vocab_size or spec.dims.vocab_size
        self.max_source_tokens = min((n for n in (most, spec.positions) if n is not None), default=None)

    @cached_property
    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder)

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu") if self._module is None else next(self._module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the hidden states."""
        import torch

        return torch.float32 if self._module is None else next(self._module.parameters()).dtype

    def encode(self, input_ids: Any, attention_mask: Any = None) -> np.ndarray:
        """Hidden states (B, S, d_model) float32 of token ids (B, S); without a mask every position counts."""
        return self._states(*self.checked(input_ids, attention_mask))

    def __call__(
        self, input_ids: Any = None, attention_mask: Any = None, return_dict: bool | None = None, **options: Any
    ) -> Any:
        """``BaseModelOutput`` with the ``last_hidden_state`` (B, S, d_model), a tensor on the device of ``input_ids``.

        With ``return_dict=False`` a tuple of it. Padded positions hold what transformers computes there.
        """
        import torch
        from transformers.modeling_outputs import BaseModelOutput

        for name, value in options.items():
            if value is not None and value is not False:
                raise InputError(f"{name} is not supported here: leave it out, or use transformers' own encoder.")
        if input_ids is None:
            raise InputError("input_ids must be token ids (B, S), got None.")
        ids, mask = self.checked(input_ids, attention_mask)
        hidden = torch.from_numpy(self._numpy(ids, mask)) if self._module is None else self._torch(ids, mask)
        hidden = hidden.to(getattr(input_ids, "device", "cpu"))
        return (hidden,) if return_dict is False else BaseModelOutput(last_hidden_state=hidden)

    forward = __call__

    def embed(
        self, texts: Iterable[str], *, pooling: str = "mean", normalize: bool = False, batch_tokens: int = 2048
    ) -> Any:
        """Embeddings (N, d_model) float32 of N texts, in their order.

        Args:
            pooling: ``"mean"`` or ``"first"`` of a text's tokens, or ``"none"``: a list of (tokens, d_model).
            normalize: scale them to length 1, for cosine similarity by a dot product.
            batch_tokens: the most padded tokens of one call; texts of similar length share one.
        """
        if pooling not in POOLINGS:
            raise InputError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r:.80}.")
        texts = as_texts(texts, at_least=0)
        if self.tokenizer is None:
            raise InputError("This model has no tokenizer: give one to from_pretrained(), or token ids to encode().")
        self._require_no_more_modules()
        as_count(batch_tokens, "batch_tokens", at_least=1)
        found: list[Any] = [None] * len(texts)
        for rows, ids, mask in self._batches(texts, batch_tokens):
            for row, vector in zip(rows, self.embed_ids(ids, mask, pooling, normalize), strict=True):
                found[row] = vector
        if pooling == "none":
            return found
        return np.stack(found) if found else np.empty((0, self.dims.d_model), np.float32)

    def embed_ids(
        self, input_ids: Any, attention_mask: Any = None, pooling: str = "mean", normalize: bool = False
    ) -> list[np.ndarray]:
        """Embeddings of token ids (B, S), pooled as by `embed`."""
        ids, mask = self.checked(input_ids, attention_mask)
        found = []
        for states, real in zip(self._states(ids, mask), mask.astype(bool), strict=True):
            vector = states[real]
            if pooling != "none":
                vector = vector.mean(axis=0) if pooling == "mean" else vector[0]
            if normalize:
                vector = vector / np.maximum(np.linalg.norm(vector, axis=-1, keepdims=True), 1e-12)
            found.append(vector)
        return found

    def as_module(self) -> torch.nn.Module:
        """A ``torch.nn.Module`` around this encoder.

        Such as for ``SentenceTransformer(…)[0].model``, which before sentence-transformers 6 is ``auto_model``.
        """
        import torch

        encoder = self

        class Module(torch.nn.Module):
            config, main_input_name = encoder.config, encoder.main_input_name

            def forward(self, *args: Any, **options: Any) -> Any:
                return encoder(*args, **options)

        return Module()

    def _batches(self, texts: list[str], most: int) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
        lengths = np.array([max(len(text), 1) for text in texts])
        left = np.argsort(-lengths, kind="stable")
        while left.size:  # a tokenizer pads: a text of a megabyte is tokenized with others of its length alone
            count = max(1, CHARACTERS // lengths[left[0]])
            places, left = np.sort(left[:count]), left[count:]
            ids, mask = tokenize(self.tokenizer, [texts[place] for place in places])
            behind = np.argsort(mask == 0, axis=1, kind="stable")  # padding, which a tokenizer may put in front
            ids, mask = (np.take_along_axis(array, behind, axis=1) for array in (ids, mask))
            for rows, width in length_slices(mask, most):
                yield places[rows].tolist(), ids[rows, :width], mask[rows, :width]

    def checked(self, input_ids: Any, attention_mask: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Ids and mask (B, S) int64; ``InputError`` where the encoder does not take them."""
        ids = as_integers(input_ids, "input_ids", rank=2)
        if attention_mask is None:  # T5Gemma's own encoder masks padding, others do not
            attention_mask = ids != self.pad_token_id if self._masks_padding else np.ones_like(ids)
        ids, mask = as_batch(ids, attention_mask, vocab_size=self.source_vocab_size)
        if self.max_source_tokens is not None and ids.shape[1] > self.max_source_tokens:
            raise InputError(
                f"A text must have at most max_source_tokens, {self.max_source_tokens}, got {ids.shape[1]}: split it."
            )
        return ids, mask

    def _states(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return self._numpy(ids, mask) if self._module is None else self._torch(ids, mask).float().cpu().numpy()

    def _numpy(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        hidden = np.empty((*ids.shape, self.dims.d_model), np.float32)
        # Attention scores of a few rows stay in the processor's caches.
        at_once = max(1, memory.SLICE_TOKENS // ids.shape[1])
        for first in range(0, len(ids), at_once):
            part = slice(first, first + at_once)
            inputs = {"input_ids": ids[part], "attention_mask": mask[part]}
            run_into(self._session, inputs, {"last_hidden_state": hidden[part]})
        return hidden

    def _torch(self, ids: np.ndarray, mask: np.ndarray) -> torch.Tensor:
        import torch

        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        with torch.inference_mode():
            return self._module(**{name: one.to(self.device) for name, one in inputs.items()}).last_hidden_state

    def _require_no_more_modules(self) -> None:
        path = self.folder / MODULES if self.folder else None
        if path is None or not path.is_file():
            return
        kinds = [entry["type"].rsplit(".", 1)[-1] for entry in json.loads(path.read_text(encoding="utf-8"))]
        if more := [kind for kind in kinds if kind not in _FOLLOWED_BY]:
            raise InputError(
                f"{self.folder} is a model of sentence-transformers whose {more[0]} embed() does not apply: open it as "
                "SentenceTransformer(…), and set its [0].model (before version 6: auto_model) to as_module()."
            )


def encoder_scores(exact: AcceleratedEncoder, other: AcceleratedEncoder, texts: Iterable[str]) -> dict[str, float]:
    """How close ``other`` is to ``exact`` on these texts, each from 0 to 100.

    ``"cosine"`` is 100 times the mean over tokens of the cosine between both hidden states; ``"retrieval"`` the share
    of texts whose nearest other text, by mean-pooled cosine, is the same.
    """
    texts = as_texts(texts, at_least=3)  # each has a nearest other one
    pairs = [one.embed(texts, pooling="none", normalize=True) for one in (exact, other)]
    cosines = [(a * b).sum(axis=1) for a, b in zip(*pairs, strict=True)]
    nearest = []
    for encoder in (exact, other):
        vectors = encoder.embed(texts, normalize=True)
        likeness = vectors @ vectors.T
        np.fill_diagonal(likeness, -np.inf)
        nearest.append(likeness.argmax(axis=1))
    same = float((nearest[0] == nearest[1]).mean())
    return {"cosine": 100 * float(np.concatenate(cosines).mean()), "retrieval": 100 * same}


def quantize_encoder(
    model: PreTrainedModel | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    precision: Recipe | str = "int8",
    *,
    texts: Sequence[str],
    max_loss: Mapping[str, float],
    overwrite: bool = False,
) -> dict[str, float]:
    """Write an encoder in integers if it loses no more than ``max_loss`` of its `encoder_scores` on your own texts.

    ``max_loss`` is in points, such as ``{"cosine": 0.5, "retrieval": 5}``. Returns the scores. Raises ``GateError``
    if it loses more; nothing was written then.
    """
    from t5accel.graphs.encoder_export import export_encoder
    from t5accel.precision.gate import checked_limits

    max_loss = checked_limits(max_loss)
    if not set(max_loss) <= {"cosine", "retrieval"}:
        raise InputError(f"max_loss must map cosine or retrieval to the points that may be lost, got {max_loss!r:.80}.")
    exact, scores = AcceleratedEncoder.from_pretrained(model, progress=False), {}

    def gate(written: Path) -> None:
        scores.update(encoder_scores(exact, AcceleratedEncoder(written), texts))
        lost = {name: 100 - scores[name] for name in max_loss}
        over = [name for name, loss in lost.items() if not loss <= max_loss[name]]  # NaN is a loss, too
        if over:
            said = ", ".join(f"{name} {lost[name]:.3g} (allowed {max_loss[name]:g})" for name in over)
            raise GateError(f"In {precision} the encoder lost {said}. Nothing was written.")

    export_encoder(model, folder, precision=precision, overwrite=overwrite, check=gate, max_loss=max_loss)
    return scores
