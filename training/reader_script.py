"""Train the bundled reader, a small BERT that answers questions by spans, and a pruned one from it.

    python -m training.reader_script --out build/reader
    python -m training.reader_script --out build/reader-pruned --prune

Both need nothing but the generated stories, take minutes on two cores, and go on where they were interrupted. The model
is written to ``OUT/model``; what the bundled one scores is in `data/mini-bert/README.md`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from bench import evaluation as quality
from bench.bert.model import READER, load_bert, threshold_of
from bench.bert.spans import answerer, torch_run
from t5accel import machine
from training.reader import PRUNED, ReaderConfig, prune_reader, train_reader


def main() -> None:
    """Train, and say what the result scores."""
    parser = argparse.ArgumentParser(description="Train the bundled reader, or prune it.")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, log and the finished model")
    parser.add_argument("--prune", action="store_true", help="train a copy of --start on, while parts are removed")
    parser.add_argument("--start", default=READER, help=f"the reader that is pruned ({READER})")
    parser.add_argument("--steps", type=int, help="may be raised later; the run goes on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args()
    torch.set_num_threads(machine.cpu_threads())
    config = replace(PRUNED if args.prune else ReaderConfig(), seed=args.seed)
    config = replace(config, steps=args.steps or config.steps)
    if args.prune:
        folder = prune_reader(*load_bert(args.start), args.out, config, device=args.device)
    else:
        folder = train_reader(args.out, config, device=args.device)
    model, tokenizer = load_bert(folder)
    print(f"Wrote {folder}")
    print(quality.evaluate(answerer(tokenizer, torch_run(model), threshold=threshold_of(model)), names=["questions"]))


if __name__ == "__main__":
    main()
