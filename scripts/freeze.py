"""Freeze what a user gets: the acceptance test for a change that must change none of it.

Write the old file in a checkout of the commit before the change, and the new one in the changed checkout, both in the
same environment: ``python scripts/freeze.py /tmp/old.json`` there, ``python scripts/freeze.py /tmp/new.json --against
/tmp/old.json`` here. Every difference is printed by its key. The exit status is 1 if there is one, and 2 if the files
were made with different versions of libraries and cannot be compared. Sections are ``exports`` (the hash of each file
of an export), ``tokens`` (of each decoding algorithm on each backend), ``server`` (its OpenAPI schema and some
answers), ``cli`` (the help of each command), ``batch`` (the hash of each file of a job) and ``results`` (the hash of
each recorded result); ``--only exports,cli`` makes and compares these two. A key with "machine-bound" in it depends on
the CPU, and is compared only where both files name the same one.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from starlette.testclient import TestClient
from typer.main import get_command
from typer.testing import CliRunner

from bench.baselines.layout_backends import HybridOnnxT5, MergedGraphs, ThreeGraphs, WholeGraph
from bench.baselines.layouts import export_layout
from bench.baselines.ort_cuda_graph import OrtCaptured
from bench.baselines.ort_iobinding import OrtBound
from bench.baselines.torch_recompute import TorchRecompute
from bench.evaluation import rows, source_text
from t5accel.api import accelerate, open_backend
from t5accel.backends.ort_cuda import OrtPointers
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import OrtStatic
from t5accel.backends.torch_eager import TorchEager
from t5accel.backends.torch_static import TorchStatic
from t5accel.cli import app
from t5accel.decoding.beam import beam_search
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.decoding.sampling import sample
from t5accel.decoding.speculation import speculative
from t5accel.decoding.streaming import stream
from t5accel.graphs.export import export_model
from t5accel.graphs.export_cache import cached_export
from t5accel.machine import facts
from t5accel.models.families import BEYOND_T5
from t5accel.models.load import load_model
from t5accel.models.random_init import random_model, random_t5
from t5accel.precision.convert import convert_export
from t5accel.serve.app import make_app
from t5accel.serve.batch.job import JobSettings, ModelSource
from t5accel.serve.batch.job import run as run_job
from t5accel.serve.settings import Settings as ServerSettings

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("transformers", "torch", "numpy", "onnx", "onnxruntime", "openvino", "tokenizers", "typer", "rich",
             "fastapi", "pydantic")  # fmt: skip
MACHINE_BOUND = "machine-bound"
TOLERANCE = 2e-4  # of scores, which are rounded to 4 digits
RECIPES = ("fp16", "int8", "int8-dynamic", "int4")  # beside fp32; bf16 runs in torch, which no file is written for
TINY = dict(vocab_size=300, d_model=32, d_kv=12, d_ff=64, num_heads=4, num_layers=2, num_decoder_layers=3,
            eos_token_id=1, pad_token_id=0)  # fmt: skip
GATED = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deeper-decoder": ("t5", {}),
    "shallower-decoder": ("t5", dict(num_layers=3, num_decoder_layers=1)),
    "gated-untied": ("t5", GATED),
    "mt5": ("mt5", GATED),
    "umt5": ("umt5", GATED),
}
BART_LIKE = dict(vocab_size=1031, d_model=24, max_position_embeddings=40, scale_embedding=True, encoder_layers=1,
                 decoder_layers=2, encoder_attention_heads=3, decoder_attention_heads=2, encoder_ffn_dim=28,
                 decoder_ffn_dim=36)  # fmt: skip
MARIAN = dict(activation_function="swish", pad_token_id=1030, eos_token_id=0, decoder_start_token_id=1030)
LAYOUTS = {"whole": WholeGraph, "fastt5": ThreeGraphs, "merged": MergedGraphs}
LENGTH = dict(max_new_tokens=24)


def exports(work: Path) -> Iterator[tuple[str, Any]]:
    """The files of tiny models in each kind of export and of conversion, and those that `accelerate` would keep."""
    models = {name: random_t5({**TINY, **sizes}, seed=1, kind=kind) for name, (kind, sizes) in KINDS.items()}
    for name, family in BEYOND_T5.items():
        models[name] = random_model(family, {**BART_LIKE, **(MARIAN if name == "marian" else {})}, seed=1)
    apart = dict(share_encoder_decoder_embeddings=False, decoder_vocab_size=1031)
    models["marian, two embeddings"] = random_model(BEYOND_T5["marian"], {**BART_LIKE, **MARIAN, **apart}, seed=1)
    ways: dict[str, dict[str, Any]] = {
        "two graphs": {},
        "weights apart": dict(external_threshold_bytes=0),
        "step": dict(step=True),
        "step and shortlist": dict(step=True, shortlist=True),
    }
    for name, model in models.items():
        for way, options in ways.items():
            folder = work / name / way
            export_model(model, folder, check_logits=False, **options)
            yield f"{name}, {way}, fp32", written(folder)
            for recipe in RECIPES if way in ("two graphs", "step and shortlist") else ():
                convert_export(folder, work / name / f"{way} {recipe}", recipe)
                yield f"{name}, {way}, {recipe}", written(work / name / f"{way} {recipe}")
    for layout in (*LAYOUTS, "onnxt5"):
        export_layout(models["deeper-decoder"], work / layout, layout)
        yield f"layout {layout}", written(work / layout)
    for name in ("mini", "mini-d1p"):
        for recipe in ("fp32", *RECIPES):
            folder = cached_export(name, precision=recipe)
            yield f"{name}, cached, {recipe}", {"folder": folder.name, **written(folder)}


def written(folder: Path) -> dict[str, str]:
    """The hash of each file below a folder; of a manifest, that of its content without versions and its own hash."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"):
        content = path.read_bytes()
        if path.name == "manifest.json":  # bounds of a shortlist are sums, whose last digit is the CPU's
            manifest = json.loads(content, parse_float=lambda text: float(f"{float(text):.9g}"))
            kept = {key: value for key, value in manifest.items() if key not in ("versions", "sha256")}
            content = json.dumps(kept, sort_keys=True).encode()
        found[path.relative_to(folder).as_posix()] = hashlib.sha256(content).hexdigest()
    return found


def tokens(work: Path) -> Iterator[tuple[str, Any]]:
    """What each algorithm answers on each backend: greedy search for 50 texts, the others for 12."""
    torch.set_num_threads(1)
    model, tokenizer = load_model("mini")
    batch = tokenizer(texts(50), padding=True, return_tensors="np")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    one, folder = SessionSettings(threads=1), cached_export("mini")
    draft = OrtNumpy(cached_export("mini-d1"), settings=one)
    for layout in (*LAYOUTS, "onnxt5"):
        export_layout(model, work / layout, layout)
    own = {"numpy": OrtNumpy, "iobinding": OrtBound, "static": OrtStatic, "pointers": OrtPointers,
           "captured": OrtCaptured}  # fmt: skip
    in_integers = {f"static, {recipe}, {MACHINE_BOUND}": cached_export("mini", precision=recipe) for recipe in RECIPES}
    backends: dict[str, Callable[[], Any]] = {
        "torch": lambda: TorchEager(model),
        "torch, static": lambda: TorchStatic(model),
        **{name: partial(kind, folder, settings=one) for name, kind in own.items()},
        "static, openvino": lambda: OrtStatic(folder, settings=replace(one, openvino=True)),
        **{name: partial(OrtStatic, export, settings=one) for name, export in in_integers.items()},
        "torch without a cache": lambda: TorchEager(model, use_cache=False),
        "onnxt5": lambda: HybridOnnxT5(work / "onnxt5", model, settings=one),
        **{name: partial(kind, work / name, settings=one) for name, kind in LAYOUTS.items()},
    }
    for name, opened in backends.items():
        backend, began = opened(), perf_counter()
        slow = name in ("whole", "torch without a cache")  # they decode everything again for every token
        count, given = (12, (ids[:6], mask[:6])) if slow else (50, (ids[:12], mask[:12]))
        yield f"{name}/greedy", generated(greedy(backend, ids[:count], mask[:count], **LENGTH))
        yield f"{name}/beams", generated(beam_search(backend, *given, num_beams=4, **LENGTH))
        yield f"{name}/sample", generated(sample(backend, *given, seed=3, temperature=0.8, top_k=20, **LENGTH))
        yield f"{name}/lookup", generated(prompt_lookup(backend, *given, **LENGTH))
        yield f"{name}/speculative", generated(speculative(backend, draft, *given, **LENGTH))
        chunks = list(stream(backend, *given, **LENGTH))
        streamed = [np.concatenate(pieces) for pieces in zip(*chunks, strict=True)]
        yield f"{name}/stream", {"rows": spelled(streamed), "chunks": len(chunks)}
        print(f"{name}: {perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    yield "recompute", spelled(TorchRecompute(model).generate(ids[:4], mask[:4], new_tokens=6))
    tensors = {"input_ids": torch.as_tensor(ids), "attention_mask": torch.as_tensor(mask)}
    for name, options in {"default": {}, "openvino": dict(runtime="openvino"), "torch": dict(runtime="torch"),
                          f"int8, {MACHINE_BOUND}": dict(precision="int8")}.items():  # fmt: skip
        accelerated = accelerate("mini", threads=1, progress=False, **options)
        for beams in (1, 4):
            some = {key: tensor[: 50 if beams == 1 else 12] for key, tensor in tensors.items()}
            found = accelerated.generate(
                **some, num_beams=beams, output_scores=beams > 1, return_dict_in_generate=beams > 1, **LENGTH
            )
            scores = {"scores": rounded(found.sequences_scores)} if beams > 1 else {}
            yield f"accelerate, {name}/{beams}", {"rows": spelled(getattr(found, "sequences", found)), **scores}


def texts(count: int) -> list[str]:
    """The shortest sources of the three sets, in turn."""
    names = ("translation", "summaries", "questions")
    by_set = [sorted((source_text(name, row) for row in rows(name)), key=lambda text: (len(text), text))
              for name in names]  # fmt: skip
    return [text for together in zip(*by_set, strict=False) for text in together][:count]


def generated(found: Any) -> dict[str, Any]:
    """Tokens, scores and counts of what an algorithm returned."""
    scores = {} if found.scores is None else {"scores": rounded(found.scores)}
    counts = {"calls": found.decoder_calls, "drafted": found.drafted, "accepted": found.accepted}
    return {"rows": spelled(found.sequences), **scores, **counts}


def spelled(sequences: Iterable[Any]) -> list[str]:
    """A row of tokens as one text, so that a difference shows the whole row."""
    return [" ".join(map(str, row.tolist())) for row in sequences]


def rounded(scores: Any) -> list[float]:
    """To four digits: what lies below differs with the CPU."""
    return [round(float(score), 4) for score in scores]


def server(work: Path) -> Iterator[tuple[str, Any]]:
    """The schema, and answers of one request after the other."""
    served = make_app(*open_backend("mini", threads=1, progress=False)[:2], ServerSettings())
    schema = served.openapi()
    schema["info"].pop("version")
    yield "openapi.json", schema
    with TestClient(served, base_url="http://localhost") as client:
        for way in ({}, {"num_beams": 2}, {"do_sample": True, "seed": 3}):
            found = client.post("/generate", json={"text": texts(6), **LENGTH, **way}).json()
            for answer in found["answers"]:
                answer.pop("timings")
            yield f"generate, {'-'.join(way) or 'greedy'}", found


def cli(work: Path) -> Iterator[tuple[str, Any]]:
    """The help of each command and of each group of them."""

    def helped(command: Any, *words: str) -> Iterator[tuple[str, Any]]:
        yield " ".join(["t5accel", *words]), CliRunner().invoke(app, [*words, "--help"], prog_name="t5accel").output
        for name, inner in sorted(getattr(command, "commands", {}).items()):
            yield from helped(inner, *words, name)

    return helped(get_command(app))


def batch(work: Path) -> Iterator[tuple[str, Any]]:
    """The files of jobs: 200 rows and an empty one that is rejected; and with beams."""
    for name, count, beams in (("greedy", 200, None), ("beams", 20, 2)):
        lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate([*texts(count), ""])]
        (work / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        settings = JobSettings(beams=beams, max_new_tokens=24, shard_rows=120)
        run_job(work / f"{name}.jsonl", work / name, ModelSource("mini", threads=1), settings)
        yield name, written(work / name)


def results(work: Path) -> Iterator[tuple[str, Any]]:
    """What was measured."""
    yield from written(ROOT / "data/results").items()


SECTIONS = {make.__name__: make for make in (exports, tokens, server, cli, batch, results)}


def leaves(content: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Each text and number in nested objects and lists, by its key."""
    if isinstance(content, dict | list):
        for name, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from leaves(value, f"{key}/{name}" if key else str(name))
    else:
        yield key, content


def differences(old: dict[str, Any], new: dict[str, Any], sections: Iterable[str]) -> Iterator[str]:
    """A line or more for each key whose values differ."""
    before, after = (dict(leaves({name: frozen[name] for name in sections if name in frozen})) for frozen in (old, new))
    for key in [*before, *(key for key in after if key not in before)]:
        one, other = before.get(key, "(missing)"), after.get(key, "(missing)")
        close = isinstance(one, float) and isinstance(other, float) and abs(one - other) <= TOLERANCE
        if one == other or close or (MACHINE_BOUND in key and old["cpu"] != new["cpu"]):
            continue
        if "\n" in f"{one}{other}":
            lines = difflib.unified_diff(str(one).splitlines(), str(other).splitlines(), lineterm="", n=0)
            yield "\n".join([f"{key}:", *(f"    {line}" for line in list(lines)[2:])])
        else:
            yield f"{key}: {one!s:.100} -> {other!s:.100}"


def main() -> int:
    """Write, compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the JSON file to write")
    parser.add_argument("--against", type=Path, help="an older one to compare it with")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas; by default all")
    args = parser.parse_args()
    sections = args.only.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"--only must name some of {', '.join(SECTIONS)}, got {', '.join(sorted(unknown))}")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    versions = {name: metadata.version(name) for name in LIBRARIES}
    frozen: dict[str, Any] = {"cpu": facts(gpu=False)["cpu"], "versions": versions, "commit": commit.stdout.strip()}
    old = json.loads(args.against.read_text(encoding="utf-8")) if args.against else None
    if old and old["versions"] != versions:
        print(f"{args.against} was made with {old['versions']}, and here are {versions}: make it again with these.")
        return 2
    with TemporaryDirectory() as temporary:
        for name in [name for name in os.environ if name.startswith("T5ACCEL_")]:
            del os.environ[name]
        os.environ.update(T5ACCEL_CACHE=f"{temporary}/cache", COLUMNS="100", NO_COLOR="1", HF_HUB_OFFLINE="1")
        for name in sections:
            began, work = perf_counter(), Path(temporary, name)
            work.mkdir()
            frozen[name] = dict(SECTIONS[name](work))
            print(f"{name}: {perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    args.out.write_text(json.dumps(frozen, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    found = list(differences(old, frozen, sections)) if old else []
    print("\n".join([*found, f"{len(found)} differences"]) if old else f"{args.out} is written")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
