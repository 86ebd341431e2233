"""Run one encoder in its own environment, asked line by line on standard input.

It imports nothing of t5accel unless the encoder is ours. First it answers ``{"versions", "base"}``; then each
``{"ids": "FILE.npy", "out": "FILE.npy" or null}`` with ``{"peak"}``, or with ``{"error"}``. Memory is in bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

LLAMA_TOKENS = 512  # of llama.cpp's longest text
Encode = Callable[[np.ndarray], Any]  # (B, S) ids, all of them real, to (B, S, d_model)


def _torch(dtype: str) -> Callable[[Path, Path, int], Encode]:
    def load(folder: Path, scratch: Path, threads: int) -> Encode:
        import torch
        from transformers import T5EncoderModel

        torch.set_num_threads(threads)
        model = T5EncoderModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        return _called(model)

    return load


def _dynamic_int8(folder: Path, scratch: Path, threads: int) -> Encode:
    import torch
    from transformers import T5EncoderModel

    torch.set_num_threads(threads)
    model = T5EncoderModel.from_pretrained(folder, dtype=torch.float32).eval()
    return _called(torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8))


def _called(model: Any) -> Encode:
    """A model of transformers or optimum."""
    import torch

    def encode(ids: np.ndarray) -> np.ndarray:
        tensor = torch.from_numpy(ids)
        with torch.inference_mode():
            states = model(input_ids=tensor, attention_mask=torch.ones_like(tensor)).last_hidden_state
        return states.float().numpy()

    return encode


def _optimum(folder: Path, scratch: Path, threads: int) -> Encode:
    """By the configuration with which optimum exports the text encoders of diffusion pipelines; it takes no mask."""
    import onnxruntime

    if not (scratch / "model.onnx").exists():
        from optimum.exporters.onnx import export
        from optimum.exporters.onnx.model_configs import T5EncoderOnnxConfig
        from transformers import T5EncoderModel

        model = T5EncoderModel.from_pretrained(folder).eval()
        scratch.mkdir(exist_ok=True)
        export(model, T5EncoderOnnxConfig(model.config, task="feature-extraction"), scratch / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(scratch / "model.onnx", options, providers=["CPUExecutionProvider"])
    name, kind = session.get_inputs()[0].name, np.int32 if "int32" in session.get_inputs()[0].type else np.int64
    return lambda ids: session.run(["last_hidden_state"], {name: ids.astype(kind)})[0]


def _openvino(bits: int) -> Callable[[Path, Path, int], Encode]:
    def load(folder: Path, scratch: Path, threads: int) -> Encode:
        import openvino
        import torch

        scratch.mkdir(exist_ok=True)
        if not (scratch / "model.xml").exists():
            from optimum.exporters.openvino.convert import export
            from optimum.exporters.openvino.model_configs import T5EncoderOpenVINOConfig
            from transformers import T5EncoderModel

            model = T5EncoderModel.from_pretrained(folder, dtype=torch.float32).eval()
            export(model, T5EncoderOpenVINOConfig(model.config, task="feature-extraction"), scratch / "model.xml")
            if bits == 8:
                import nncf

                graph = nncf.compress_weights(openvino.Core().read_model(scratch / "model.xml"))
                openvino.save_model(graph, scratch / "int8.xml", compress_to_fp16=False)
        # By itself it would compute in bf16 where it can.
        config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": str(threads)}
        config |= {"PERFORMANCE_HINT": "LATENCY"}
        model = openvino.compile_model(scratch / ("int8.xml" if bits == 8 else "model.xml"), "CPU", config)
        return lambda ids: model({"input_ids": ids})[0]

    return load


def _llama_cpp(folder: Path, scratch: Path, threads: int) -> Encode:
    """The library that npm's node-llama-cpp brings; of its structures only the fields that are set here are known."""
    import ctypes

    path = scratch / "q8_0.gguf"
    if not path.exists():
        scratch.mkdir(exist_ok=True)
        _write_gguf(folder, path)
    place = Path(sys.prefix) / "package/bins/linux-x64"
    ggml, llama = (ctypes.CDLL(str(next(place.glob(f"lib{name}.v*.so")))) for name in ("ggml", "llama"))
    ggml.ggml_backend_load_all_from_path(str(place).encode())

    class Parameters(ctypes.Structure):  # of a model or a context; larger than either
        _fields_ = [*((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch")),
                    ("others", ctypes.c_char * 1012)]  # fmt: skip

    class Batch(ctypes.Structure):
        _fields_ = [("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)), ("embd", ctypes.c_void_p),
                    ("pos", ctypes.POINTER(ctypes.c_int32)), ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
                    ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
                    ("logits", ctypes.POINTER(ctypes.c_int8))]  # fmt: skip

    for name, result, arguments in (
        ("model_default_params", Parameters, []), ("context_default_params", Parameters, []),
        ("model_load_from_file", ctypes.c_void_p, [ctypes.c_char_p, Parameters]),
        ("init_from_model", ctypes.c_void_p, [ctypes.c_void_p, Parameters]),
        ("set_embeddings", None, [ctypes.c_void_p, ctypes.c_bool]),
        ("set_n_threads", None, [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]),
        ("batch_init", Batch, [ctypes.c_int32] * 3), ("encode", ctypes.c_int32, [ctypes.c_void_p, Batch]),
        ("get_embeddings", ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p]),
    ):  # fmt: skip
        function = getattr(llama, f"llama_{name}")
        function.restype, function.argtypes = result, arguments
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    parameters = llama.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = LLAMA_TOKENS
    context = llama.llama_init_from_model(model, parameters)
    llama.llama_set_embeddings(context, True)
    llama.llama_set_n_threads(context, threads, threads)
    batch = llama.llama_batch_init(LLAMA_TOKENS, 0, 1)
    width = json.loads((folder / "config.json").read_text())["d_model"]

    def encode(ids: np.ndarray) -> np.ndarray:
        states = np.empty((*ids.shape, width), np.float32)
        batch.n_tokens = ids.shape[1]
        # Text by text: in a joint batch every token has scores with the tokens of all texts, and that takes longer.
        for text, found in zip(ids.tolist(), states, strict=True):
            for place, token in enumerate(text):
                batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            if llama.llama_encode(context, batch):
                raise RuntimeError("llama_encode failed.")
            found[:] = np.ctypeslib.as_array(llama.llama_get_embeddings(context), found.shape)
        return states

    return encode


def _write_gguf(folder: Path, path: Path) -> None:
    """A T5's encoder in q8_0, but for norms and the position bias; without its vocabulary."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "t5encoder")
    writer.add_context_length(LLAMA_TOKENS)
    for name, key in (
        ("embedding_length", "d_model"), ("feed_forward_length", "d_ff"), ("block_count", "num_layers"),
        ("head_count", "num_heads"), ("key_length", "d_kv"), ("value_length", "d_kv"), ("vocab_size", "vocab_size"),
        ("layer_norm_rms_eps", "layer_norm_epsilon"),
        ("relative_attn_buckets_count", "relative_attention_num_buckets"),
    ):  # fmt: skip
        getattr(writer, f"add_{name}")(config[key])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, config["num_layers"])
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, array in load_file(folder / "model.safetensors").items():
        own = names.get_name(name, try_suffixes=(".weight",))
        if array.ndim == 2 and "relative" not in name:
            writer.add_tensor(own, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(own, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _ours(precision: str) -> Callable[[Path, Path, int], Encode]:
    def load(folder: Path, scratch: Path, threads: int) -> Encode:
        from t5accel.encoder import IN_TORCH, AcceleratedEncoder

        if precision in IN_TORCH:
            return AcceleratedEncoder.from_pretrained(folder, precision=precision, threads=threads).encode
        if not scratch.exists():
            from t5accel.graphs.encoder_export import export_encoder

            export_encoder(folder, scratch, precision=precision)
        return AcceleratedEncoder(scratch, threads=threads).encode

    return load


ENCODERS = {
    "torch": _torch("float32"), "torch-bf16": _torch("bfloat16"), "torch-int8": _dynamic_int8, "optimum": _optimum,
    "openvino": _openvino(32), "openvino-int8": _openvino(8), "llama-cpp": _llama_cpp,
    "ours": _ours("fp32"), "ours-bf16": _ours("bf16"), "ours-int8": _ours("int8"), "ours-int4": _ours("int4"),
}  # fmt: skip
PACKAGES = ("torch", "transformers", "onnxruntime", "optimum-onnx", "optimum-intel", "openvino", "nncf", "gguf")


def _memory(name: str) -> int:
    """``VmHWM``, the peak, or ``VmRSS`` of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Load one encoder, then answer line by line until standard input ends."""
    parser = argparse.ArgumentParser(description="Run one encoder in its own environment.")
    parser.add_argument("encoder", choices=ENCODERS)
    parser.add_argument("model", type=Path, help="a folder that T5EncoderModel's save_pretrained wrote")
    parser.add_argument("--scratch", type=Path, required=True, help="for the model in the encoder's own form")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--convert", action="store_true", help="write the encoder's own form, and end")
    args = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print, too

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    from importlib import metadata

    encode = ENCODERS[args.encoder](args.model, args.scratch, args.threads)
    if args.convert:
        return
    installed = {name for name in PACKAGES if any(metadata.distributions(name=name))}
    say({"versions": {name: metadata.version(name) for name in sorted(installed)}, "peak": _memory("VmHWM")})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            states = encode(np.load(asked["ids"]))
            if asked["out"]:
                np.save(asked["out"], states)
            say({"peak": _memory("VmHWM")})
        except Exception:
            say({"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
