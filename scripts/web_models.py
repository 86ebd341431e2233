"""What the web page is about, for `make web`: exports of the bundled models, its tasks, and examples for each.

`page.json` has all that the page's code does not know: other models, sizes and vocabularies change nothing there.
"""

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import onnxruntime

from bench.demo.race import example_tasks
from bench.results import filter_rows, load_results
from t5accel.graphs.contract import DECODER, ENCODER, MANIFEST, WEIGHTS
from t5accel.graphs.export import export_model
from t5accel.graphs.manifest import Manifest, describe_file
from t5accel.precision.convert import convert_export

READ = (MANIFEST, ENCODER, DECODER, WEIGHTS, "tokenizer.json", "tokenizer_config.json")  # by the page's code

# The first one is what a visitor gets who chooses nothing: the least to load. In 8 bits they are "int8-dynamic":
# ONNX Runtime's WebAssembly multiplies integers fast, and unpacks the blocks of "int8" so slowly that fp32 is faster.
MODELS = (
    ("student", "Student, int8", "mini-d1", "int8-dynamic"),
    ("int8", "Teacher, int8", "mini", "int8-dynamic"),
    ("fp32", "Teacher, fp32", "mini", "fp32"),
)
SCORES = (("bleu", "BLEU"), ("rougeL", "ROUGE-L"), ("exact_match", "exact match"))
MAX_SOURCE_TOKENS, MAX_NEW_TOKENS = 512, 128


def export(model: str, precision: str, out: Path, id_: str) -> tuple[str, Manifest]:
    """The two portable graphs and the file of weights that they share, without the fused step; and their folder.

    Its name changes with what is in it: a page that is kept somewhere never mixes files of two versions.
    """
    with TemporaryDirectory() as temporary:  # an export leaves a lock beside its folder
        made = Path(temporary) / "fp32"
        manifest = export_model(model, made, external_threshold_bytes=0)
        if precision != "fp32":
            in_fp32, made = made, Path(temporary) / precision
            manifest = convert_export(in_fp32, made, precision)
        folder = f"models/{id_}-{describe_file(made / MANIFEST)['sha256'][:8]}/"
        shutil.copytree(made, out / folder)
    return folder, manifest


def quality(label: str, manifest: Manifest) -> str | None:
    """The scores that `bench/record/web.py` recorded of these weights, in words; ``None`` if it has not met them."""
    wanted = dict(measured="quality", system=label, settings={"checkpoint": manifest.source["sha256"]})
    found = next(filter_rows(load_results("web.json")["rows"], **wanted), None)
    return found and ", ".join(f"{name} {found[key]:.1f}" for key, name in SCORES)


def licences() -> str:
    """The licences of t5accel and of ONNX Runtime with its parts; `build.mjs` adds those of the other packages.

    The text of ONNX Runtime comes from its Python package: its package for the web has none.
    """
    root, runtime = Path(__file__).resolve().parents[1], Path(onnxruntime.__file__).parent
    texts = {
        "t5accel, its models and this page": [root / "NOTICE", root / "LICENSE"],
        "onnxruntime-web and onnxruntime-common: the JavaScript and the WebAssembly of ONNX Runtime":
            [runtime / "LICENSE", runtime / "ThirdPartyNotices.txt"],
    }  # fmt: skip
    return "".join(
        f"{'=' * 80}\n{title}\n{'=' * 80}\n\n"
        + "\n\n".join(path.read_text(encoding="utf-8") for path in paths)
        + "\n\n"
        for title, paths in texts.items()
    )


def write(out: Path) -> None:
    """``models/``, ``page.json`` and ``LICENSES.txt``; what was in ``out`` is gone."""
    shutil.rmtree(out, ignore_errors=True)
    models = []
    for id_, label, model, precision in MODELS:
        folder, manifest = export(model, precision, out, id_)
        files = {name: describe_file(path) for name in READ if (path := out / folder / name).is_file()}
        size_bytes = sum(file["size_bytes"] for file in files.values())
        scores = quality(label, manifest)
        models.append(dict(id=id_, label=label, folder=folder, bytes=size_bytes, quality=scores, files=files))
    tasks = example_tasks()
    page = dict(
        tasks=[asdict(task) for task in tasks], models=models, warm_up=tasks[0].source(tasks[0].examples[0]),
        max_source_tokens=MAX_SOURCE_TOKENS, max_new_tokens=MAX_NEW_TOKENS,
    )  # fmt: skip
    (out / "page.json").write_text(json.dumps(page), encoding="utf-8")
    (out / "LICENSES.txt").write_text(licences(), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    write(parser.parse_args().out)
