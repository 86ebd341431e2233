"""llama.cpp's library, as npm's node-llama-cpp brings it, and models in its format; nothing of ours is imported."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


class _Parameters(ctypes.Structure):  # of a model or a context; larger than either, and only what is set here is known
    _fields_ = [*((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
                ("others", ctypes.c_char * 1008)]  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = [("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)), ("embd", ctypes.c_void_p),
                ("pos", ctypes.POINTER(ctypes.c_int32)), ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
                ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
                ("logits", ctypes.POINTER(ctypes.c_int8))]  # fmt: skip


class LlamaCpp:
    """One model and one context of ``length`` tokens; ``embeddings``: of an encoder alone, whose states it keeps."""

    def __init__(self, gguf: Path, length: int, threads: int, *, embeddings: bool = False):
        place = Path(sys.prefix) / "package/bins/linux-x64"
        ggml, self._llama = (ctypes.CDLL(str(next(place.glob(f"lib{name}.v*.so")))) for name in ("ggml", "llama"))
        ggml.ggml_backend_load_all_from_path(str(place).encode())
        pointer, integer, floats = ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_float)
        for name, result, arguments in (
            ("model_default_params", _Parameters, []), ("context_default_params", _Parameters, []),
            ("model_load_from_file", pointer, [ctypes.c_char_p, _Parameters]),
            ("init_from_model", pointer, [pointer, _Parameters]), ("set_embeddings", None, [pointer, ctypes.c_bool]),
            ("set_n_threads", None, [pointer, integer, integer]), ("batch_init", _Batch, [integer] * 3),
            ("encode", integer, [pointer, _Batch]), ("decode", integer, [pointer, _Batch]),
            ("get_embeddings", floats, [pointer]), ("get_logits_ith", floats, [pointer, integer]),
            ("get_memory", pointer, [pointer]), ("memory_clear", None, [pointer, ctypes.c_bool]),
        ):  # fmt: skip
            function = getattr(self._llama, f"llama_{name}")
            function.restype, function.argtypes = result, arguments
        model = self._llama.llama_model_load_from_file(str(gguf).encode(), self._llama.llama_model_default_params())
        parameters = self._llama.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = length
        self._context = self._llama.llama_init_from_model(model, parameters)
        self._llama.llama_set_embeddings(self._context, embeddings)
        self._llama.llama_set_n_threads(self._context, threads, threads)
        self._batch = self._llama.llama_batch_init(length, 0, 1)

    def encode(self, text: Sequence[int]) -> None:
        """Run the encoder on the tokens of one text; what the decoder has seen is forgotten."""
        self._run("encode", text, 0)
        if memory := self._llama.llama_get_memory(self._context):  # an encoder alone has none
            self._llama.llama_memory_clear(memory, True)

    def states(self, shape: tuple[int, int]) -> np.ndarray:
        """The encoder's last hidden states (S, d_model), in a buffer that the next text overwrites."""
        return np.ctypeslib.as_array(self._llama.llama_get_embeddings(self._context), shape)

    def logits(self, token: int, position: int, vocab_size: int) -> np.ndarray:
        """Scores (V) of the token behind this one, in a buffer that the next one overwrites."""
        self._run("decode", [token], position)
        return np.ctypeslib.as_array(self._llama.llama_get_logits_ith(self._context, -1), (vocab_size,))

    def _run(self, what: str, tokens: Sequence[int], first: int) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place], batch.logits[place] = token, first + place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        if getattr(self._llama, f"llama_{what}")(self._context, batch):
            raise RuntimeError(f"llama_{what} failed.")


def write_gguf(folder: Path, path: Path, kind: str, length: int) -> None:
    """A T5 or its encoder with weights of a ``kind`` of gguf's; norms and position bias in fp32, no vocabulary."""
    import gguf
    from safetensors.numpy import load_file

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    encoder_alone = config["architectures"] == ["T5EncoderModel"]
    writer = gguf.GGUFWriter(path, "t5encoder" if encoder_alone else "t5")
    writer.add_context_length(length)
    for name, key in (
        ("embedding_length", "d_model"), ("feed_forward_length", "d_ff"), ("block_count", "num_layers"),
        ("head_count", "num_heads"), ("key_length", "d_kv"), ("value_length", "d_kv"), ("vocab_size", "vocab_size"),
        ("layer_norm_rms_eps", "layer_norm_epsilon"),
        ("relative_attn_buckets_count", "relative_attention_num_buckets"),
        *([] if encoder_alone else [("decoder_block_count", "num_decoder_layers"),
                                    ("decoder_start_token_id", "decoder_start_token_id")]),
    ):  # fmt: skip
        getattr(writer, f"add_{name}")(config[key])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH.T5ENCODER if encoder_alone else gguf.MODEL_ARCH.T5,
        max(config["num_layers"], config["num_decoder_layers"]),
    )
    wanted = gguf.GGMLQuantizationType[kind]
    for name, array in load_file(folder / "model.safetensors").items():
        own = names.get_name(name, try_suffixes=(".weight",))
        if array.ndim == 2 and "relative" not in name and kind != "F32":
            writer.add_tensor(own, gguf.quants.quantize(array, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(own, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
