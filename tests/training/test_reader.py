"""How the bundled reader is trained: its labels, its loss, its first aims, an interrupted run, and what it is."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_up import log

import training.reader as module
from bench.bert.model import load_bert, threshold_of, widths
from bench.bert.pruning import Pruning
from bench.bert.spans import calibration_texts, read, torch_run
from t5accel.distillation.batches import Mixture, Phase, TaskShare
from t5accel.errors import InputError
from t5accel.metrics import UNANSWERABLE
from t5accel.models.prefixes import CONTEXT, QUESTION
from training.curriculum import evaluation_sources, mini_examples
from training.reader import Labels, ReaderConfig, draw_questions, encoder_of, new_reader, train_reader, train_wordpiece

TINY = ReaderConfig(steps=4, hidden_size=32, intermediate_size=64, num_layers=2, vocab_size=300, warmup_steps=1)

pytestmark = pytest.mark.usefixtures("random_state_put_back")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_wordpiece([text for text, _ in draw_questions(60, "some")], 300)


@pytest.fixture
def mixture() -> Mixture:
    return Mixture(
        mini_examples(), (Phase(0, (TaskShare("questions", 900),)),), evaluation_sources(), steps_per_block=2
    )


def test_every_answer_of_every_generator_is_found_where_it_stands_and_nowhere_else(tokenizer: Any) -> None:
    rng = random.Random(0)
    words = tuple((text, "") for text, _ in draw_questions(200, "words"))
    examples, labels = mini_examples(words), Labels(tokenizer)
    encode = encoder_of(tokenizer)
    for task in ("questions", "crowds", "composed questions", "composed crowds", "recall"):
        for source, target in (examples[task](rng) for _ in range(60)):
            (ids,), (answer,) = encode([source]), encode([target])
            places = labels.places(ids, answer)
            assert (places == [(0, 0)]) == (target == UNANSWERABLE)
            for first, last in places if target != UNANSWERABLE else ():
                assert tokenizer.decode(ids[first : last + 1]) == tokenizer.decode(answer)
                assert first > ids.index(tokenizer.sep_token_id)
    labels = Labels(tokenizer)
    encode = encoder_of(tokenizer)
    (ids,), (answer,) = encode(["question: Who? context: Ann and Annika came."]), encode(["Ann"])
    assert len(labels.places(ids, answer)) == 1
    with pytest.raises(InputError, match="stands nowhere"):
        labels.places(ids, encode(["Bob"])[0])


def test_the_loss_is_that_of_all_places_together_and_padding_changes_nothing(tokenizer: Any) -> None:
    labels, encode = Labels(tokenizer), encoder_of(tokenizer)
    texts = ["question: Who? context: Ann came. Then Ann left.", "question: Where? context: Ann came to Norbury."]
    batch = encode(texts), encode(["Ann", UNANSWERABLE])
    inputs, starts, ends = module.tensors(batch, labels)
    assert starts.sum(1).tolist() == ends.sum(1).tolist() == [2, 1] and bool(starts[1, 0])
    assert inputs["token_type_ids"][0].tolist() == tokenizer("Who?", "Ann came. Then Ann left.")["token_type_ids"]
    model = new_reader(TINY).eval()
    together, rows = module.span_loss(model, batch, labels)
    alone = [module.span_loss(model, ([batch[0][i]], [batch[1][i]]), labels)[0] for i in range(2)]
    assert rows == 2 and together.item() == pytest.approx(sum(alone).item(), rel=0.02)  # it is computed in bf16
    start = torch_run(model)({name: tensor.numpy() for name, tensor in inputs.items()})[0][0]
    length = int(inputs["attention_mask"][0].sum())
    share = np.exp(start[:length])[starts[0, :length].numpy()].sum() / np.exp(start[:length]).sum()
    both = module.span_loss(model, ([batch[0][0]], [batch[1][0]]), labels)[0].item() * 2
    assert both + np.log(share) > 0 and 0 < -np.log(share) < both


def test_aimed_heads_look_where_they_are_aimed(tokenizer: Any) -> None:
    model = new_reader(replace(TINY, hidden_size=128, intermediate_size=128, vocab_size=300))
    model.set_attn_implementation("eager")
    ids = torch.arange(20, 50)[None].repeat(2, 1)
    ids[:, 25] = ids[:, 5]
    looks = model(input_ids=ids, output_attentions=True).attentions[0][0]
    for head, away in enumerate((-1, 1, -2)):
        assert (looks[head].argmax(1)[3:27] == torch.arange(3, 27) + away).float().mean() > 0.7
        assert looks[head][torch.arange(3, 27), torch.arange(3, 27) + away].mean() > 0.5
    assert {5, 25} == set(looks[3][5].topk(2).indices.tolist())
    plain = new_reader(replace(TINY, hidden_size=128, intermediate_size=128, mimetic_init=False))
    plain.set_attn_implementation("eager")
    flat = plain(input_ids=ids, output_attentions=True).attentions[0][0]
    assert (flat[0].argmax(1)[3:27] == torch.arange(3, 27) - 1).float().mean() < 0.5


def test_the_frozen_calibration_texts_are_stories_of_their_own_seed() -> None:
    drawn = [source.removeprefix(QUESTION).split(CONTEXT, 1) for source, _ in draw_questions(64, "calibration")]
    assert [*map(list, calibration_texts())] == drawn


def test_a_run_is_its_seed_s_and_what_it_writes_loads(tmp_path: Path, mixture, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(module, "choose_threshold", lambda *_: 0.5)
    monkeypatch.setattr(module, "make_loss_validator", lambda *_: lambda model: {"questions": 1.0})
    for name in ("one", "same", "other"):  # the trainer of WordPiece breaks ties as it likes
        tokenizer.save_pretrained(tmp_path / name / "tokenizer")
    one, same, other = (
        load_bert(train_reader(tmp_path / name, replace(TINY, seed=seed), mixture=mixture))[0]
        for name, seed in (("one", 0), ("same", 0), ("other", 1))
    )
    for (name, weight), again in zip(one.named_parameters(), same.parameters(), strict=True):
        assert torch.equal(weight, again), name
    assert not torch.equal(one.qa_outputs.weight, other.qa_outputs.weight)
    positions = [model.bert.embeddings.position_embeddings.weight for model in (one, new_reader(TINY))]
    assert torch.allclose(*positions, atol=1e-3), "heads that look some words away find them by these"
    assert threshold_of(one) == 0.5 and [row["step"] for row in log(tmp_path / "one")] == [4]


def test_what_a_tokenizer_was_asked_last_is_not_saved(tmp_path: Path, tokenizer: Any, monkeypatch) -> None:
    ask = lambda model, asked: read(asked, ["Who?"], ["Ann."]) and 0.5  # noqa: E731
    monkeypatch.setattr(module, "choose_threshold", ask)
    module.save_reader(new_reader(TINY), tokenizer, tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert saved["truncation"] is saved["padding"] is None


def test_pruning_while_training_leaves_a_smaller_reader(tmp_path: Path, mixture: Mixture, monkeypatch) -> None:
    monkeypatch.setattr(module, "choose_threshold", lambda *_: 0.5)
    monkeypatch.setattr(module, "make_loss_validator", lambda *_: lambda model: {"questions": 1.0})
    monkeypatch.setattr(module, "PRUNE_EVERY", 1)
    folder = train_reader(tmp_path / "whole", TINY, mixture=mixture)
    model, tokenizer = load_bert(folder)
    config = replace(TINY, steps=6, pruning=Pruning(heads=0.5, neurons=0.5))
    small = load_bert(module.prune_reader(model, tokenizer, tmp_path / "pruned", config, mixture=mixture))[0]
    heads = widths(small)["heads"]
    assert sum(heads) == 4 + (max(heads) == 4)  # the other layer keeps one, though all of its heads were to go
    assert sum(widths(small)["neurons"]) == 64
    assert widths(model)["neurons"] == [64, 64] and log(tmp_path / "pruned")[-1]["step"] == 6
    with pytest.raises(InputError, match="pruning"):
        module.prune_reader(model, tokenizer, tmp_path / "not", TINY, mixture=mixture)
