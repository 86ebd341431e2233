"""Measure the BERT and GPT-2 studies; an interrupted run goes on where it stopped.

python -m bench.record.other_models bert --json data/results/bert.json
python -m bench.record.other_models gpt2 --json data/results/gpt2.json
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import evaluation
from bench.bert.graphs import fed_run
from bench.bert.ladder import RUNGS, Readers, quality_rows, random_inputs, speed_rows
from bench.bert.model import PRUNED, RANDOM_SIZES, READER, load_bert, random_bert, threshold_of, widths
from bench.bert.served import Protocol, Served, numbered, served_rows, single_words
from bench.bert.spans import answerer, calibration_texts, read, torch_run
from bench.evaluation import source_text
from bench.gpt2 import NO_CACHE, WAYS, Gpt2, gpt2_rows, random_gpt2
from bench.results import Row, environment, record_parser, rows_so_far, write_rows
from t5accel import machine

LARGE, GPT2 = "random:bert-large", "random:gpt2"
GRAPHS = Path("build/study")  # where graphs are kept
TOKENS, BATCHES = 512, (1, 8)
ON_THE_WAY = [rung for rung in RUNGS if "whole" not in rung.name]
BESIDE = [rung for rung in RUNGS if rung.name == "PyTorch" or "whole" in rung.name]
TOO_LONG = (NO_CACHE, "ONNX Runtime, no cache, bound, last logits")  # a minute for 256 tokens
Part = tuple[str, Callable[[], list[Row]]]


@cache
def small(out: Path, threads: int) -> tuple[Readers, Any, dict[str, float]]:
    """The bundled reader and the pruned one; calibrated with stories that neither was trained or is scored on."""
    (whole, tokenizer), (pruned, _) = (load_bert(name) for name in (READER, PRUNED))
    told = calibration_texts()
    batches = [read(tokenizer, *zip(*told[at : at + 8], strict=True)).inputs for at in range(0, len(told), 8)]
    models = {"whole": whole, "pruned": pruned}
    readers = Readers(models, out / READER, batches, threads)
    return readers, tokenizer, {which: threshold_of(model) for which, model in models.items()}


@cache
def large(out: Path, threads: int) -> Readers:
    """Random weights of BERT large, and of each of its layers the share that the pruned reader has left in all."""
    whole = load_bert(LARGE)[0]
    narrow = widths(small(out, threads)[0].models["pruned"])
    full = widths(small(out, threads)[0].models["whole"])
    own = widths(whole)
    share = {kind: sum(narrow[kind]) / sum(full[kind]) for kind in own}
    left = {kind: [max(1, round(count * share[kind])) for count in own[kind]] for kind in own}
    pruned = random_bert({**RANDOM_SIZES["bert-large"], "layer_widths": left}, seed=1)
    calibration = [random_inputs(whole.config.vocab_size, 1, 128, seed=seed) for seed in range(2)]
    return Readers({"whole": whole, "pruned": pruned}, out / "bert-large", calibration, threads)


def bert_parts(out: Path, threads: int) -> Iterator[Part]:
    """The cells of bert.json, each with what measures it."""
    yield "quality", lambda: quality(out, threads)
    for model in (READER, LARGE):
        yield f"{model}, served", lambda model=model: served(model, out, threads)
    for batch in BATCHES:
        for title, rungs in (("the way", ON_THE_WAY), ("beside it", BESIDE)):
            for model, rounds in ((READER, 11), (LARGE, 5 if batch == 1 else 3)):
                if model == LARGE and batch > 1 and rungs is BESIDE:
                    continue

                def measure(model=model, rungs=rungs, batch=batch, rounds=rounds) -> list[Row]:  # noqa: ANN001
                    readers = small(out, threads)[0] if model == READER else large(out, threads)
                    return speed_rows(rungs, readers, model=model, batch=batch, tokens=TOKENS, rounds=rounds,
                                      keep_going=True)  # fmt: skip

                yield f"{model}, {batch} × {TOKENS}, {title}", measure


def served(model: str, out: Path, threads: int) -> list[Row]:
    """Behind FastAPI: PyTorch, the fused graph, the last two rungs. BERT large is asked less, for it takes seconds."""
    if model == LARGE:
        readers, tokenizer, thresholds = large(out, threads), numbered(30522), {"whole": 0.0, "pruned": 0.0}
        where, protocol, told = LARGE, Protocol(requests=8, seconds=15.0), []
    else:
        (readers, tokenizer, thresholds), where, protocol = small(out, threads), model, Protocol()
        told = [source_text("questions", row) for row in evaluation.rows("questions", limit=4)]
    kept = readers.folder / "tokenizer"
    tokenizer.save_pretrained(kept)

    def one(name: str, which: str, model: str, answer: Any, **how: Any) -> Served:
        return Served(name, model, str(kept), thresholds[which], answer, **how)

    fused, last = str(readers.graph("whole", "fused")), str(readers.graph("pruned", "int8"))
    in_torch = answerer(tokenizer, torch_run(readers.models["whole"]), threshold=thresholds["whole"])
    in_int8 = answerer(tokenizer, fed_run(last, readers.settings()), threshold=thresholds["pruned"])
    ways = [
        one("FastAPI, transformers", "whole", where, in_torch),
        one("FastAPI, ONNX Runtime", "whole", fused, in_torch),
        one("FastAPI, pruned, int8", "pruned", last, in_int8, precision="int8"),
        one("FastAPI, pruned, int8, bound", "pruned", last, in_int8, precision="int8", bound=True),
    ]
    words = single_words(tokenizer)
    return served_rows(ways, words, protocol, threads=threads, logs=readers.folder, stories=told, model=model)


def quality(out: Path, threads: int) -> list[Row]:
    """Of every rung, with the bundled reader."""
    readers, tokenizer, thresholds = small(out, threads)
    return quality_rows(RUNGS, readers, tokenizer, thresholds, model=READER, keep_going=True)


def gpt2_parts(out: Path, threads: int) -> Iterator[Part]:
    """The cells of gpt2.json, by the number of new tokens."""

    @cache
    def subject() -> Gpt2:
        return Gpt2(random_gpt2(), out / "gpt2", threads)

    for new_tokens in (16, 64, 256):
        ways = [way for way in WAYS if new_tokens <= 64 or way not in TOO_LONG]
        yield (
            f"{GPT2}, {new_tokens} tokens",
            lambda new_tokens=new_tokens, ways=ways: gpt2_rows(
                subject(), model=GPT2, new_tokens=new_tokens, ways=ways, rounds=3, keep_going=True
            ),
        )


def main() -> None:
    """Measure what is not measured yet."""
    parser = record_parser("Measure the BERT study or the GPT-2 study.")
    parser.add_argument("study", choices=("bert", "gpt2"))
    args = parser.parse_args()
    threads = machine.cpu_threads()
    command = f"python -m bench.record.other_models {args.study}"
    rows = rows_so_far(args.json, {**environment(), "command": command})
    parts = list({"bert": bert_parts, "gpt2": gpt2_parts}[args.study](GRAPHS, threads))
    with tqdm(parts, unit="part") as bar:
        for name, measure in bar:
            bar.set_postfix_str(name)
            if any(row["cell"] == name for row in rows):
                continue
            rows += [{**row, "cell": name} for row in measure()]
            write_rows(args.json, rows, command=command)
            gc.collect()  # sessions of a size that must not stay while the next part runs


if __name__ == "__main__":
    main()
