"""Run one encoder in its own environment, asked line by line on standard input.

It imports nothing of t5accel unless the encoder is ours. First it answers ``{"versions", "peak"}``; then each
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

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for `bench.llama_cpp`
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
    from bench.llama_cpp import LlamaCpp, write_gguf

    path = scratch / "q8_0.gguf"
    if not path.exists():
        scratch.mkdir(exist_ok=True)
        write_gguf(folder, path, "Q8_0", LLAMA_TOKENS)
    model = LlamaCpp(path, LLAMA_TOKENS, threads, embeddings=True)
    width = json.loads((folder / "config.json").read_text())["d_model"]

    def encode(ids: np.ndarray) -> np.ndarray:
        states = np.empty((*ids.shape, width), np.float32)
        # Text by text: in a joint batch every token has scores with the tokens of all texts, and that takes longer.
        for text, found in zip(ids.tolist(), states, strict=True):
            model.encode(text)
            found[:] = model.states(found.shape)
        return states

    return encode


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
