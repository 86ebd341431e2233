"""Run one engine in its own environment, asked line by line on standard input.

It imports nothing of t5accel unless the engine is ours. First it answers ``{"versions"}`` (the engine ``none`` does
nothing else); then each ``{"ids": [[…]], "least": n, "most": n, "beams": k}`` new tokens with ``{"tokens"}`` or
``{"error"}``. The sources of a batch are equally long, so that none needs padding.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

LLAMA_TOKENS = 512  # of llama.cpp's longest text
sys.path.append(str(Path(__file__).resolve().parents[1]))  # for `bench.llama_cpp`
# From ids, least and most new tokens, and beams to the new tokens; without a least number an answer may end earlier.
Generate = Callable[[list[list[int]], int, int, int], list[list[int]]]


def _transformers(model: Any) -> Generate:
    """generate() of transformers, around any library's model."""
    import torch

    def generate(ids: list[list[int]], least: int, most: int, beams: int) -> list[list[int]]:
        tensor = torch.tensor(ids)
        with torch.inference_mode():
            out = model.generate(
                input_ids=tensor, attention_mask=torch.ones_like(tensor), min_new_tokens=least, max_new_tokens=most,
                num_beams=beams, do_sample=False,
            )  # fmt: skip
        return out[:, 1:].tolist()

    return generate


def _model(folder: Path) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_pretrained(folder).eval()


def _eager(folder: Path, scratch: Path, threads: int) -> Generate:
    return _transformers(_model(folder))


def _compiled(folder: Path, scratch: Path, threads: int) -> Generate:
    return _transformers(_with_compiled_decoder(_model(folder)))


def _with_compiled_decoder(model: Any) -> Any:
    """By torch.compile, with a cache of a fixed size so that its shapes stay the same."""
    import torch

    model.generation_config.cache_implementation = "static"
    model.decoder.forward = torch.compile(model.decoder.forward)
    return model


def _dynamic_int8(folder: Path, scratch: Path, threads: int) -> Generate:
    import torch

    return _transformers(torch.ao.quantization.quantize_dynamic(_model(folder), {torch.nn.Linear}, dtype=torch.qint8))


def _torchao(bits: int, *, compiled: bool = False) -> Callable[[Path, Path, int], Generate]:
    """Weights alone in integers; activations in bf16, as its products for CPUs want them."""

    def load(folder: Path, scratch: Path, threads: int) -> Generate:
        import torch
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        model = _model(folder).to(torch.bfloat16)
        quantize_(model, Int8WeightOnlyConfig() if bits == 8 else PrototypeInt4WeightOnlyConfig(group_size=32))
        return _transformers(_with_compiled_decoder(model) if compiled else model)

    return load


def _optimum_onnx(folder: Path, scratch: Path, threads: int) -> Generate:
    from optimum.onnxruntime import ORTModelForSeq2SeqLM

    if not (scratch / "config.json").exists():
        ORTModelForSeq2SeqLM.from_pretrained(folder, export=True).save_pretrained(scratch)
    return _transformers(ORTModelForSeq2SeqLM.from_pretrained(scratch, session_options=_options(threads)))


def _optimum_onnx_int8(folder: Path, scratch: Path, threads: int) -> Generate:
    """Dynamic, as its documentation does it: each graph by itself, so that the decoder is there twice."""
    from optimum.onnxruntime import ORTModelForSeq2SeqLM, ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig

    scratch = scratch.with_name(f"{scratch.name}-int8")
    if not (scratch / "config.json").exists():
        apart = scratch.with_name(f"{scratch.name}-apart")
        model = ORTModelForSeq2SeqLM.from_pretrained(folder, export=True, use_merged=False)
        model.save_pretrained(apart)
        how = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
        for name in ("encoder_model", "decoder_model", "decoder_with_past_model"):
            quantizer = ORTQuantizer.from_pretrained(apart, file_name=f"{name}.onnx")
            quantizer.quantize(save_dir=scratch, quantization_config=how, file_suffix="")
        model.config.save_pretrained(scratch)
        model.generation_config.save_pretrained(scratch)
    model = ORTModelForSeq2SeqLM.from_pretrained(scratch, use_merged=False, session_options=_options(threads))
    return _transformers(model)


def _options(threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    return options


def _beam_search_operator(bits: int) -> Callable[[Path, Path, int], Generate]:
    """ONNX Runtime's own export of T5, around whose two graphs its BeamSearch operator loops; one beam is greedy."""

    def load(folder: Path, scratch: Path, threads: int) -> Generate:
        import numpy as np
        import onnxruntime

        path = scratch / f"beam-search-{bits}.onnx"
        if not path.exists():
            _convert_to_beam_search(folder, path, bits)
        session = onnxruntime.InferenceSession(path, _options(threads), providers=["CPUExecutionProvider"])

        def generate(ids: list[list[int]], least: int, most: int, beams: int) -> list[list[int]]:
            # Lengths count the start token.
            numbers = {"max_length": most + 1, "min_length": least + 1, "num_beams": beams, "num_return_sequences": 1}
            inputs = {name: np.array([number], np.int32) for name, number in numbers.items()}
            inputs |= {"input_ids": np.array(ids, np.int32), "attention_mask": np.ones_like(ids, np.int32)}
            inputs |= {f"{name}_penalty": np.ones(1, np.float32) for name in ("length", "repetition")}
            return session.run(["sequences"], inputs)[0][:, 0, 1:].tolist()

        return generate

    return load


def _convert_to_beam_search(folder: Path, path: Path, bits: int) -> None:
    """Without its optimizer, whose RelativePositionBias has no kernel on CPUs; int8 before the graphs are joined."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import convert_generation  # it makes `models` known
    from models.t5.convert_to_onnx import export_onnx_models  # isort: skip

    parts = export_onnx_models(str(folder), str(path.parent), str(path.parent))
    if bits == 8:
        for part in parts:
            quantize_dynamic(part, part, weight_type=QuantType.QInt8, per_channel=True)
    # By itself, the operator takes no token for padding but in front.
    given = ["--model_type", "t5", "--custom_attention_mask", "-m", folder, "--output", path]
    given += ["--encoder_decoder_init_onnx", parts[0], "--decoder_onnx", parts[1]]
    convert_generation.convert_generation_model(convert_generation.parse_arguments([*map(str, given)]))
    for part in parts:
        Path(part).unlink()


def _openvino(bits: int) -> Callable[[Path, Path, int], Generate]:
    def load(folder: Path, scratch: Path, threads: int) -> Generate:
        from optimum.intel import OVModelForSeq2SeqLM

        # By itself it would compute in bf16 where it can, and keep the cache in 8 bits, of which beams' logits are NaN
        # behind 32 tokens; their answers then end there.
        config = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": str(threads),
            "PERFORMANCE_HINT": "LATENCY",
            "KV_CACHE_PRECISION": "f32",
        }
        if bits == 32:
            config |= {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
        else:
            scratch = scratch.with_name(f"{scratch.name}-int8")
        if not (scratch / "config.json").exists():
            OVModelForSeq2SeqLM.from_pretrained(
                folder, export=True, compile=False, load_in_8bit=bits == 8
            ).save_pretrained(scratch)
        return _transformers(OVModelForSeq2SeqLM.from_pretrained(scratch, ov_config=config))

    return load


def _ctranslate2(compute_type: str) -> Callable[[Path, Path, int], Generate]:
    def load(folder: Path, scratch: Path, threads: int) -> Generate:
        import ctranslate2

        if not (scratch / "model.bin").exists():
            _convert_to_ctranslate2(folder, scratch)
        translator = ctranslate2.Translator(
            str(scratch), device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=threads
        )

        def generate(ids: list[list[int]], least: int, most: int, beams: int) -> list[list[int]]:
            out = translator.translate_batch(
                [[f"t{token}" for token in row] for row in ids], beam_size=beams, max_input_length=0,
                min_decoding_length=least, max_decoding_length=most,
            )  # fmt: skip
            return [[int(token[1:]) for token in row.hypotheses[0]] for row in out]

        return generate

    return load


def _convert_to_ctranslate2(folder: Path, scratch: Path) -> None:
    """It knows tokens as texts only, and this model has no tokenizer: each id gets a made-up one."""
    from ctranslate2.converters.transformers import _MODEL_LOADERS

    model = _model(folder)
    config, loader = model.config, _MODEL_LOADERS[type(model.config).__name__]
    ids = {
        "pad": config.pad_token_id,
        "eos": config.eos_token_id,
        "bos": getattr(config, "bos_token_id", None),
        "unk": 2,
    }

    class Tokens:
        """As much of a tokenizer as the loader asks for."""

        pad_token, eos_token, bos_token, unk_token = (f"t{ids[name] or 0}" for name in ("pad", "eos", "bos", "unk"))

        def convert_ids_to_tokens(self, token: int) -> str:
            return f"t{token}"

    spec = loader.get_model_spec(model)
    loader.set_config(spec.config, model, Tokens())
    embedding = spec.encoder.embeddings[0].weight  # of a Marian without the padding token, the last one
    loader.set_vocabulary(spec, [f"t{i}" for i in range(len(embedding))])
    spec.validate()
    spec.optimize(quantization="float32")
    scratch.mkdir(parents=True, exist_ok=True)
    spec.save(str(scratch))


def _llama_cpp(kind: str) -> Callable[[Path, Path, int], Generate]:
    """Greedy search around its decoder, for it has no beams; text by text."""

    def load(folder: Path, scratch: Path, threads: int) -> Generate:
        import math

        from bench.llama_cpp import LlamaCpp, write_gguf

        config, path = json.loads((folder / "config.json").read_text()), scratch / f"{kind}.gguf"
        if not path.exists():
            scratch.mkdir(parents=True, exist_ok=True)
            write_gguf(folder, path, kind, LLAMA_TOKENS)
        model, end = LlamaCpp(path, LLAMA_TOKENS, threads), config["eos_token_id"]

        def answer(text: list[int], least: int, most: int) -> list[int]:
            model.encode(text)
            tokens = [config["decoder_start_token_id"]]
            while len(tokens) <= most and tokens[-1] != end:
                logits = model.logits(tokens[-1], len(tokens) - 1, config["vocab_size"])
                if len(tokens) <= least:
                    logits[end] = -math.inf
                tokens.append(int(logits.argmax()))
            return tokens[1:]

        def generate(ids: list[list[int]], least: int, most: int, beams: int) -> list[list[int]]:
            if beams > 1:
                raise NotImplementedError("llama.cpp has no beam search.")
            return [answer(text, least, most) for text in ids]

        return generate

    return load


def _transformers_js(dtype: str) -> Callable[[Path, Path, int], Generate]:
    """optimum's merged decoder in onnxruntime-node; the process of Node is asked as this one is."""

    def load(folder: Path, scratch: Path, threads: int) -> Generate:
        if not (scratch / "config.json").exists():
            _convert_to_transformers_js(folder, scratch)
        command = ["node", Path(__file__).with_name("transformers_js.mjs"), sys.prefix, scratch, dtype, threads]
        node = subprocess.Popen([*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def generate(ids: list[list[int]], least: int, most: int, beams: int) -> list[list[int]]:
            if beams > 1:
                raise NotImplementedError("transformers.js has no beam search.")
            node.stdin.write(json.dumps({"ids": ids, "least": least, "most": most}) + "\n")
            node.stdin.flush()
            if not (line := node.stdout.readline()):
                raise RuntimeError(f"Node ended with exit status {node.wait()}.")
            return json.loads(line)["tokens"]

        return generate

    return load


def _convert_to_transformers_js(folder: Path, scratch: Path) -> None:
    """Its own layout of files; 8 bits as its script for quantisation makes them."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from optimum.onnxruntime import ORTModelForSeq2SeqLM

    ORTModelForSeq2SeqLM.from_pretrained(folder, export=True, use_merged=True).save_pretrained(scratch / "onnx")
    for name in ("encoder_model", "decoder_model_merged"):
        quantize_dynamic(
            scratch / f"onnx/{name}.onnx", scratch / f"onnx/{name}_quantized.onnx", weight_type=QuantType.QInt8,
            per_channel=True, extra_options={"EnableSubgraph": True, "MatMulConstBOnly": True},
        )  # fmt: skip
    for path in (scratch / "onnx").glob("*.json"):
        path.rename(scratch / path.name)


def _ours(precision: str = "fp32", **settings: bool) -> Callable[[Path, Path, int], Generate]:
    """Our own loops on our own engine; torch is not loaded."""

    def load(folder: Path, scratch: Path, threads: int) -> Generate:
        import numpy as np

        from t5accel.backends.ort_session import SessionSettings
        from t5accel.backends.ort_static import OrtStatic
        from t5accel.decoding.beam import beam_search
        from t5accel.decoding.greedy_search import greedy
        from t5accel.graphs.export_cache import cached_export

        export = cached_export(folder, precision=precision)
        backend = OrtStatic(export, settings=SessionSettings(threads=threads, **settings))

        def generate(ids: list[list[int]], least: int, most: int, beams: int) -> list[list[int]]:
            length = {"min_new_tokens": least, "max_new_tokens": most}
            if beams == 1:
                return greedy(backend, np.array(ids), **length).sequences.tolist()
            return beam_search(backend, np.array(ids), num_beams=beams, **length).sequences.tolist()

        return generate

    return load


def _ours_generate(folder: Path, scratch: Path, threads: int) -> Generate:
    from t5accel.api import accelerate

    return _transformers(accelerate(folder, threads=threads, progress=False))


ENGINES = {
    "none": lambda *_: None,
    "eager": _eager, "compiled": _compiled, "dynamic-int8": _dynamic_int8, "optimum-onnx": _optimum_onnx,
    "optimum-onnx-int8": _optimum_onnx_int8, "openvino": _openvino(32), "openvino-int8": _openvino(8),
    "ctranslate2": _ctranslate2("float32"), "ctranslate2-int8": _ctranslate2("int8"),
    "torchao-int8": _torchao(8), "torchao-int8-compiled": _torchao(8, compiled=True),
    "torchao-int4": _torchao(4), "torchao-int4-compiled": _torchao(4, compiled=True),
    "beam-search": _beam_search_operator(32), "beam-search-int8": _beam_search_operator(8),
    "llama-cpp": _llama_cpp("F32"), "llama-cpp-int8": _llama_cpp("Q8_0"),
    "transformers-js": _transformers_js("fp32"), "transformers-js-int8": _transformers_js("q8"),
    "ours": _ours(), "ours-exact": _ours(shortlist=False), "ours-openvino": _ours(openvino=True),
    "ours-generate": _ours_generate, "ours-int8": _ours("int8"),
    "ours-int8-dynamic": _ours("int8-dynamic"), "ours-int4": _ours("int4"),
}  # fmt: skip
PACKAGES = (
    "torch", "transformers", "torchao", "onnxruntime", "optimum-onnx", "optimum-intel", "openvino", "nncf",
    "ctranslate2", "gguf", "numpy",
)  # fmt: skip
NPM_PACKAGES = ("package", "node_modules/@huggingface/transformers", "node_modules/onnxruntime-node")


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    for path in (file for pattern in NPM_PACKAGES for file in Path(sys.prefix).glob(f"{pattern}/package.json")):
        package = json.loads(path.read_text())
        found[package["name"]] = package["version"]
    return found


def main() -> None:
    """Load one engine, then answer line by line until standard input ends."""
    parser = argparse.ArgumentParser(description="Run one engine in its own environment.")
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", type=Path, help="a folder that save_pretrained wrote")
    parser.add_argument("--scratch", type=Path, required=True, help="for the model in the engine's own form")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print, too

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    generate = ENGINES[args.engine](args.model, args.scratch, args.threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(args.threads)
    say({"versions": _versions()})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            say({"tokens": generate(asked["ids"], asked["least"], asked["most"], asked["beams"])})
        except Exception:
            say({"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
