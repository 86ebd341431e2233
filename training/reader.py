"""Train the bundled reader: a small BERT that answers questions on a story by a span of it, or abstains.

    python -m training.reader --out build/reader            # minutes on two cores; goes on after an interruption
    python -m training.reader --out build/reader-pruned --prune

It learns from T5's exercises and stories, whose answers stand in the texts letter by letter. An answer that occurs
several times may be found anywhere: the loss is that of all its places together (Clark and Gardner 2018).
"""

from __future__ import annotations

import argparse
import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from bench import evaluation
from bench.bert.model import READER, load_bert, threshold_of
from bench.bert.pruning import Pruning, attach, close, closing, removed
from bench.bert.spans import (
    CLS,
    PAD,
    SEP,
    UNK,
    answerer,
    answers,
    as_berts,
    best_spans,
    read,
    threshold_from,
    torch_run,
)
from t5accel import machine
from t5accel.distillation.batches import Batch, Encode, Example, Mixture, Phase, TaskShare, encode_and_pack
from t5accel.distillation.checkpointing import require_device, run_training
from t5accel.distillation.optimizer import learning_rate_factor, padded
from t5accel.errors import InputError
from t5accel.metrics import UNANSWERABLE, f1
from t5accel.models.load import load_pretrained
from t5accel.models.prefixes import CONTEXT, QUESTION
from training.curriculum import composed_question_example, evaluation_sources, mini_examples, question_example

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Whose what is comes first, from near to far, then what is asked for: which words are a place, a price, a name. In
# trials, a run that left near recall after 100 steps recalled one in five right at step 261, and one that stayed for
# 450 steps nine in ten at 747.
CURRICULUM = (
    Phase(0, (TaskShare("near recall", 4000),)),
    Phase(300, (TaskShare("recall", 2500), TaskShare("short questions", 1500))),
    Phase(700, (TaskShare("questions", 2000), TaskShare("crowds", 1500), TaskShare("recall", 1000, 0.5))),
    Phase(1800, (TaskShare("questions", 3000), TaskShare("crowds", 1000))),
)
PRUNING_CURRICULUM = (Phase(0, CURRICULUM[-1].parts),)
SAME = "the same word"
PRUNE_EVERY = 10  # steps between two rankings


@dataclass(frozen=True)
class ReaderConfig:
    """Everything that decides the outcome. ``steps`` may grow between runs; the rest must stay."""

    steps: int = 3600
    seed: int = 0
    learning_rate: float = 2e-3  # AdamW's, of embeddings, biases and norms
    matrix_learning_rate: float = 2.5e-3  # Muon's
    warmup_steps: int = 100
    decay_share: float = 0.25
    hidden_size: int = 128
    intermediate_size: int = 512
    num_heads: int = 4
    num_layers: int = 4
    vocab_size: int = 4000
    mimetic_init: bool = True  # whether some heads begin as others do
    pruning: Pruning | None = None  # what is masked while a finished reader trains on

    def factor(self, step: int) -> float:
        """Multiplier of the peak learning rates at ``step``."""
        return learning_rate_factor(step, self.steps, warmup_steps=self.warmup_steps, decay_share=self.decay_share)


PRUNED = ReaderConfig(steps=200, learning_rate=1e-3, matrix_learning_rate=2e-3, pruning=Pruning(heads=0.4, neurons=0.6))


def train_wordpiece(texts: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train an uncased WordPiece tokenizer of ``[CLS] question [SEP] text [SEP]``.

    >>> tokenizer = train_wordpiece(["Who came?", "Ann came at noon."] * 9, 60)
    >>> tokenizer.convert_ids_to_tokens(tokenizer("Who?", "Ann.").input_ids)
    ['[CLS]', 'who', '?', '[SEP]', 'ann', '.', '[SEP]']
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, UNK, CLS, SEP], show_progress=False,
        initial_alphabet=letters,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return as_berts(tokenizer)


def new_reader(config: ReaderConfig) -> PreTrainedModel:
    """A new ``BertForQuestionAnswering`` of the configured size.

    >>> round(new_reader(ReaderConfig()).num_parameters() / 1e6, 1)
    1.4
    """
    from transformers import BertConfig, BertForQuestionAnswering

    torch.manual_seed(config.seed)
    model = BertForQuestionAnswering(
        BertConfig(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads, intermediate_size=config.intermediate_size,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,  # each story is met once
            initializer_range=0.06, pad_token_id=0,  # 0.02 is for 768 wide: here layers would hardly add anything
        )
    )  # fmt: skip
    if config.mimetic_init:
        init_heads(model)
    return model


@torch.no_grad()
def init_heads(model: PreTrainedModel) -> None:
    """Let heads begin as those of trained models end up: at the words around, and at the same word elsewhere.

    After Trockman and Kolter (2023), "Mimetic Initialization of Self-Attention Layers".
    """
    # Positions are sinusoids in the last quarter of a token's numbers, words are drawn into the others; all are as
    # large as T5's embeddings, beside which a step of AdamW is small. A query whose sinusoids are turned by some
    # positions looks that far away; a query and a key that are the same projection of the words look at the same word.
    config, bert = model.config, model.bert
    width, size = config.hidden_size, config.hidden_size // config.num_attention_heads
    waves = width // 8
    table, words = bert.embeddings.position_embeddings.weight, bert.embeddings.word_embeddings.weight
    turns = torch.pow(200.0, -torch.arange(waves) / waves)
    angles = torch.arange(len(table))[:, None] * turns
    table.zero_()
    table[:, -2 * waves : -waves], table[:, -waves:] = angles.sin(), angles.cos()
    words.normal_()[0] = 0.0
    words[:, -2 * waves :] = 0.0
    bert.embeddings.token_type_embeddings.weight.normal_(std=0.5)[:, -2 * waves :] = 0.0
    # By layer: how far each head looks, or at the same word. The others are as drawn: a sharp head unlearns slowly.
    aims = [(-1, 1, -2, SAME), *[(SAME,)] * (config.num_hidden_layers - 1)]
    for layer, ways in zip(bert.encoder.layer, aims, strict=True):
        attention = layer.attention.self
        for head, away in enumerate(ways[: config.num_attention_heads]):
            rows = slice(head * size, (head + 1) * size)
            query, key = attention.query.weight[rows], attention.key.weight[rows]
            if away == SAME:
                same = torch.randn(size, width) * (1.4 / math.sqrt(width))
                same[:, -2 * waves :] = 0.0
                query.copy_(same)
                key.copy_(same)
                continue
            query.zero_()
            key.zero_()
            for wave, turn in enumerate((away * turns).tolist()):
                if wave >= size // 2:
                    break
                sin, cos = width - 2 * waves + wave, width - waves + wave
                key[2 * wave, sin] = key[2 * wave + 1, cos] = 1.0
                query[2 * wave, sin], query[2 * wave, cos] = math.cos(turn), math.sin(turn)
                query[2 * wave + 1, cos], query[2 * wave + 1, sin] = math.cos(turn), -math.sin(turn)
            query *= 10.0


def encoder_of(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """A function to token ids: an exercise's source as a pair, an answer without special tokens."""

    def encode(texts: list[str]) -> list[list[int]]:
        parts = [text.split(CONTEXT, 1) for text in texts]
        if all(len(part) == 2 for part in parts):
            asked = [part[0].split(": ", 1)[-1] for part in parts]  # without "question" or "match"
            return tokenizer(asked, [part[1] for part in parts])["input_ids"]
        return tokenizer(texts, add_special_tokens=False)["input_ids"]

    return encode


class Labels:
    """Finds answers by their token ids: WordPiece joins no two words, so an answer's tokens are its text's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.abstain = tokenizer(UNANSWERABLE, add_special_tokens=False)["input_ids"]
        self.separator = tokenizer.sep_token_id
        vocabulary = tokenizer.get_vocab()
        self.inside = {number for piece, number in vocabulary.items() if piece.startswith("##")}

    def places(self, source: list[int], target: list[int]) -> list[tuple[int, int]]:
        """First and last token of every place of the answer; (0, 0) without an answer."""
        if target == self.abstain:
            return [(0, 0)]
        begin, length = source.index(self.separator) + 1, len(target)
        found = [
            (at, at + length - 1)
            for at in range(begin, len(source) - length)
            if source[at : at + length] == target and source[at + length] not in self.inside
        ]
        if not found:
            raise InputError(f"The answer {target} stands nowhere in {source}.")
        return found


def tensors(batch: Batch, labels: Labels) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Inputs of a BERT for a batch, and where answers may start and end: (B, S) bool each."""
    sources, targets = batch
    ids = padded(sources, 0)
    begins = torch.tensor([source.index(labels.separator) + 1 for source in sources])
    mask = ids != 0
    kinds = (torch.arange(ids.shape[1]) >= begins[:, None]) & mask
    starts, ends = torch.zeros_like(mask), torch.zeros_like(mask)
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        for first, last in labels.places(source, target):
            starts[row, first] = ends[row, last] = True
    inputs = {"input_ids": ids, "token_type_ids": kinds.long(), "attention_mask": mask.long()}
    return inputs, starts, ends


def span_loss(model: PreTrainedModel, batch: Batch, labels: Labels) -> tuple[torch.Tensor, int]:
    """Minus the log probability of all right places together, in nats summed over a batch, and its rows."""
    device = next(model.parameters()).device
    inputs, starts, ends = tensors(batch, labels)
    with torch.autocast(device.type, torch.bfloat16):
        outputs = model(**{name: tensor.to(device) for name, tensor in inputs.items()})
    total = torch.zeros((), device=device)
    hidden = (inputs["attention_mask"] == 0).to(device)
    for logits, right in ((outputs.start_logits, starts), (outputs.end_logits, ends)):
        logits = logits.float().masked_fill(hidden, -1e4)
        chosen = logits.masked_fill(~right.to(device), -1e4)
        total = total + (logits.logsumexp(1) - chosen.logsumexp(1)).sum()
    return total / 2, len(starts)


def optimizers_of(model: PreTrainedModel, config: ReaderConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for all else; positions stay fixed."""
    # Each position would be trained alone, and a head that looks one word back needs all of them to turn alike: where
    # they were trained, its attention to the word before fell from 44 to 15% in 261 steps.
    model.bert.embeddings.position_embeddings.weight.requires_grad_(False)
    inside: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.endswith("factor"):  # of `Mask`
            (inside if parameter.ndim == 2 and ".layer." in name else rest).append(parameter)
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01),
        torch.optim.Muon(inside, lr=config.matrix_learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
    ]
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return found


def reader_mixture(curriculum: tuple[Phase, ...] = CURRICULUM) -> Mixture:
    """Training mixture of the reader, without the evaluation sets."""
    rng = random.Random("words")
    told = tuple((composed_question_example(rng)[0], "") for _ in range(1500))  # for the words in the exercises
    return Mixture(mini_examples(told), curriculum, evaluation_sources())


def draw_questions(count: int, seed: str) -> list[Example]:
    """Questions of seen templates with answers, outside the evaluation sets."""
    rng, forbidden = random.Random(seed), evaluation_sources()
    return [example for example in (question_example(rng) for _ in range(count)) if example[0] not in forbidden]


def make_loss_validator(
    tokenizer: PreTrainedTokenizerBase, count: int = 256
) -> Callable[[PreTrainedModel], dict[str, float]]:
    """A function from a model to its loss on stories that it is not trained on."""
    labels = Labels(tokenizer)
    batches = encode_and_pack(draw_questions(count, "validation"), encoder_of(tokenizer), 6000)

    @torch.no_grad()
    def validate(model: PreTrainedModel) -> dict[str, float]:
        sums = [span_loss(model.eval(), batch, labels) for batch in batches]
        model.train()
        return {"questions": round(float(sum(loss for loss, _ in sums)) / sum(rows for _, rows in sums), 4)}

    return validate


def choose_threshold(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, count: int = 1000) -> float:
    """Lead that "no answer" needs for the best F1, on stories drawn for this alone."""
    told, run = draw_questions(count, "threshold"), torch_run(model.eval())
    differences, scores = [], []
    for begin in range(0, len(told), 32):
        parts = [source.removeprefix(QUESTION).split(CONTEXT, 1) for source, _ in told[begin : begin + 32]]
        batch = read(tokenizer, [part[0] for part in parts], [part[1] for part in parts])
        start, end = run(batch.inputs)
        differences += best_spans(start, end, batch.in_context)[1].tolist()
        found = answers(batch, start, end, threshold=np.inf)
        right = [answer for _, answer in told[begin : begin + 32]]
        scores += [f1([text], [[answer]]) for text, answer in zip(found, right, strict=True)]
    return threshold_from(differences, scores, [answer == UNANSWERABLE for _, answer in told])


def train_reader(folder: Path, config: ReaderConfig, *, mixture: Mixture | None = None, device: str = "cpu") -> Path:
    """Train vocabulary, model and threshold; returns ``folder/model``, in fp16. A checkpoint is continued from."""
    from transformers import AutoTokenizer

    require_device(device)
    kept = folder / "tokenizer"
    if not (kept / "tokenizer.json").is_file():
        rng = random.Random(f"{config.seed}/vocabulary")
        draws = [question_example] * 2 + [composed_question_example]
        train_wordpiece([draw(rng)[0] for _ in range(2000) for draw in draws], config.vocab_size).save_pretrained(kept)
    tokenizer = load_pretrained(AutoTokenizer.from_pretrained, kept)
    model = new_reader(config).to(device)
    _train(model, tokenizer, folder, config, mixture or reader_mixture(), device)
    return save_reader(model, tokenizer, folder / "model")


def prune_reader(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, config: ReaderConfig, *,
    mixture: Mixture | None = None, device: str = "cpu",
) -> Path:  # fmt: skip
    """Train a copy of a reader while more and more of it is masked; save the smaller model to ``folder/model``."""
    if config.pruning is None:
        raise InputError("config must have a pruning, got None.")
    require_device(device)
    whole = copy.deepcopy(model).to(device)
    masks = attach(whole, config.pruning)

    def before_step(step: int) -> None:
        if step % PRUNE_EVERY == 0 and (step == 0 or closing(step - PRUNE_EVERY, config.steps) < 1):
            close(masks, config.pruning, closing(step, config.steps))

    mixture = mixture or reader_mixture(PRUNING_CURRICULUM)
    _train(whole, tokenizer, folder, config, mixture, device, before_step)
    return save_reader(removed(whole.to("cpu")), tokenizer, folder / "model")


def _train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    config: ReaderConfig,
    mixture: Mixture,
    device: str,
    before_step: Callable[[int], None] | None = None,
) -> None:
    labels = Labels(tokenizer)
    run_training(
        folder,
        config,
        model,
        optimizers_of(model.train(), config),
        mixture,
        encoder_of(tokenizer),
        loss_of=lambda batch: span_loss(model, batch[1], labels),
        validate=partial(make_loss_validator(tokenizer), model),
        before_step=before_step,
        device=device,
        validate_every=100,
        save_every=100,
    )


def save_reader(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """Write the model in fp16, with the threshold of these rounded weights, and its tokenizer."""
    model = model.to("cpu", torch.float16).float()
    model.config.null_score_diff_threshold = round(choose_threshold(model, tokenizer), 3)
    model.half().save_pretrained(folder)
    tokenizer.backend_tokenizer.no_truncation()  # of its last call, which tokenizer.json would ask of every reader
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    """Train or prune a reader and score it."""
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
    print(
        evaluation.evaluate(answerer(tokenizer, torch_run(model), threshold=threshold_of(model)), names=["questions"])
    )


if __name__ == "__main__":
    main()
