"""Weights that stay in their files until they are used, one at a time; and whether transformers read them right."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

import numpy as np

from t5accel.checks import read_json_object
from t5accel.errors import ModelUnavailableError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPUTED = ("embed_positions.weight", "embed_positions.weights")  # which old checkpoints hold all the same
SMALL = 1 << 20  # elements of a weight that is read at once
_HEADER = 1 << 27  # bytes: no file's list of weights is longer
_STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F64": np.float64}  # numpy has no bfloat16


@dataclass(frozen=True)
class StoredArray:
    """A weight in a file, which numpy's functions take for a float32 array; each use reads it anew."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    dtype = np.dtype(np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read() if dtype is None else self.read().astype(dtype, copy=False)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in float32."""
        return 4 * math.prod(self.shape)

    @property
    def T(self) -> StoredArray:  # noqa: N802  # numpy's name
        return replace(self, shape=self.shape[::-1], read=lambda: self.read().T)


def read_weights(folder: Path, wanted: Callable[[str], bool]) -> dict[str, np.ndarray | StoredArray]:
    """The weights of a folder's files whose names are ``wanted``, as float32; large ones are `StoredArray`.

    Reads ``model.safetensors`` and ``pytorch_model.bin``, whole or in shards. Raises ``ModelUnavailableError`` for a
    damaged file and for a weight that is not in floating point.

    >>> from t5accel.models.load import data_folder
    >>> weights = read_weights(data_folder() / "mini-t5", lambda name: name == "encoder.final_layer_norm.weight")
    >>> [(name, array.shape) for name, array in weights.items()]
    [('encoder.final_layer_norm.weight', (256,))]
    """
    found: dict[str, np.ndarray | StoredArray] = {}
    for path in weight_files(folder):
        entries = _safetensors(path) if path.suffix == ".safetensors" else _pickled(path)
        for name, shape, read in entries:
            if wanted(name):
                found[name] = StoredArray(shape, read) if math.prod(shape) > SMALL else read()
    return found


def weight_files(folder: Path) -> list[Path]:
    """The files of weights in a folder, as transformers chooses them; raises ``ModelUnavailableError``."""
    config = folder / "config.json"
    named = read_json_object(config, ModelUnavailableError).get("transformers_weights") if config.is_file() else None
    if named not in (None, "model.safetensors"):
        raise ModelUnavailableError(f"{config}: transformers_weights must be left out, got {named!r:.80}.")
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            content = read_json_object(index, ModelUnavailableError)
            try:
                return [folder / shard for shard in sorted({*content["weight_map"].values()})]
            except (LookupError, TypeError, AttributeError) as error:
                raise ModelUnavailableError(f"{index} is damaged: it has no weight_map to files.") from error
    return []


def _safetensors(path: Path) -> Iterator[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]]:
    # Not by the library, which maps the file: what has been read would count as this process's memory to the end.
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _HEADER:
                raise ValueError(f"a list of weights of {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in _STORED:
                raise ModelUnavailableError(
                    f"{path}: {name} must be stored as one of {', '.join(_STORED)}, got {entry['dtype']}. Give the "
                    "model as it was before it was quantised."
                )
            shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
            kind = np.dtype(_STORED[entry["dtype"]])
            if end - begin != kind.itemsize * math.prod(shape) or 8 + length + end > path.stat().st_size:
                raise ValueError(f"{name} does not fit in the file")
            yield name, shape, partial(_read_stored, path, 8 + length + begin, kind, shape)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelUnavailableError(f"{path} cannot be read: {error}.") from error


def _read_stored(path: Path, offset: int, kind: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    stored = np.fromfile(path, kind, math.prod(shape), offset=offset)
    if kind == np.uint16:  # bfloat16 is the upper half of a float32
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False).reshape(shape)


def _pickled(path: Path) -> Iterator[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]]:
    import torch

    try:  # files of before torch 1.6 are no archives
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except Exception as error:  # of several kinds
        raise ModelUnavailableError(f"{path} cannot be read: {error}") from error
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise ModelUnavailableError(f"{path}: {name} must be in floating point, got {weight.dtype}.")
        yield name, tuple(weight.shape), lambda weight=weight: weight.float().numpy()


def check_loaded(model: PreTrainedModel, folder: Path | None, where: str) -> None:
    """Compare a row of every weight with the files of a folder, and give all stacks the one embedding that they share.

    An untied T5 whose files hold the embedding under a stack's name alone, as MADLAD-400's, gets the head's weights in
    its place from transformers 5.0 to 5.17. Raises ``ModelUnavailableError`` where weights are read otherwise.
    """
    import torch

    if folder and (settings := folder / "generation_config.json").is_file():
        read_json_object(settings, ModelUnavailableError)  # transformers takes a damaged one for none
    loaded, names = model.state_dict(), set()
    for name, row in _stored_rows(folder) if folder else ():
        names.add(name)
        weight = loaded.get(name)
        if weight is None or not weight.numel() or name.endswith(COMPUTED):
            continue
        if not torch.allclose(_middle_row(weight), row.to(weight.dtype), rtol=0, atol=0, equal_nan=True):
            raise _misread(where, name)
    # transformers 4 drops a head that its configuration ties away, and 5 uses it. 5 itself saves untied T5s as tied.
    asked = read_json_object(folder / "config.json", ModelUnavailableError) if "lm_head.weight" in names else {}
    by_5 = str(asked.get("transformers_version", "4")) >= "5"
    if asked and not by_5 and asked.get("tie_word_embeddings", True):
        embedding = model.get_decoder().embed_tokens.weight
        if model.lm_head.weight is not embedding and not torch.equal(model.lm_head.weight, embedding):
            raise _misread(where, "lm_head.weight")
    prefix, body = ("", model) if hasattr(model, "shared") else ("model.", getattr(model, "model", None))
    if not hasattr(body, "shared") or not getattr(model.config, "share_encoder_decoder_embeddings", True):
        return
    parts = {"shared": body.shared, "encoder.embed_tokens": body.encoder.embed_tokens,
             "decoder.embed_tokens": body.decoder.embed_tokens}  # fmt: skip
    held = [part for name, part in parts.items() if f"{prefix}{name}.weight" in names]
    if not held:  # they are the head's
        return
    right = held[0].weight
    for part in parts.values():
        if part.weight is right or torch.equal(part.weight, right):
            continue
        if part in held:
            raise ModelUnavailableError(f"{where} must hold one embedding for encoder and decoder, got two.")
        if model.lm_head.weight is part.weight and "lm_head.weight" not in names:
            model.lm_head.weight = right
        part.weight = right


def _misread(where: str, name: str) -> ModelUnavailableError:
    import transformers

    return ModelUnavailableError(
        f"{where}: the files hold a {name} that transformers {transformers.__version__} does not read as they say. If "
        "config.json ties it to another weight, make both equal or set tie_word_embeddings to false; else install "
        "another release of transformers."
    )


def _stored_rows(folder: Path) -> Iterator[tuple[str, Any]]:
    """Name and middle row of every weight in the files of a folder that transformers reads."""
    import torch
    from safetensors import safe_open

    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118  # it is no dict
                    part = stored.get_slice(name)
                    shape = part.get_shape()
                    if 0 not in shape:
                        yield name, part[shape[0] // 2] if shape else stored.get_tensor(name)
            continue
        # Files of before torch 1.6 are no archives.
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        yield from ((name, _middle_row(weight)) for name, weight in weights.items() if weight.numel())


def _middle_row(weight: Any) -> Any:
    return weight[len(weight) // 2] if weight.dim() else weight
