"""Rows of one's own: what is accepted, what is refused and where, how files are mixed, and how students are scored."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up import PAIRS, characters, texts_of

from t5accel.distillation.batches import draw_block
from t5accel.distillation.examples import mix_examples, read_examples
from t5accel.distillation.pruning import PruneConfig, prune
from t5accel.distillation.student import DistillConfig, distill
from t5accel.distillation.validation import METRICS, make_validator
from t5accel.errors import InputError
from t5accel.models.prefixes import TRANSLATE

GOOD = b'{"source": "a: \xc3\xa9", "target": "b", "id": 1}'
ROWS = [{"source": TRANSLATE + english, "target": french} for english, french in PAIRS[:12]]


class Letters:
    """A tokenizer of letters."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": characters(texts)}


def test_rows_are_read_from_files_and_from_memory_and_other_fields_ignored(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    odd = {"source": "p: one\u2028two\u0085", "target": "\U0001f600\n"}
    file.write_bytes(GOOD + b"\r\n" + json.dumps(odd, ensure_ascii=False).encode() + b"\n\n")
    expected = [("a: é", "b"), tuple(odd.values())]
    assert read_examples(file) == read_examples(str(file)) == expected
    assert read_examples([{"source": "a: é", "target": "b"}, odd], Letters()) == expected
    assert read_examples(iter([odd]), Letters(), longest=11) == expected[1:]


def test_a_wrong_row_is_named_by_its_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for line, what in {
        b"": "JSON", b"source\ttarget": "JSON", b"\xff\xfe": "JSON", b"[1, 2]": "object", b"null": "object",
        b'{"source": "a"}': "'target'", b'{"text": "a", "target": "b"}': "'source'",
        b'{"source": "a", "target": ""}': "'target'", b'{"source": 3, "target": "b"}': "'source'",
        b'{"source": "\\ud800", "target": "b"}': "surrogate",
        b'{"source": "a", "target": "' + b"x" * 30 + b'"}': "target has 30 tokens, more than 20",
    }.items():  # fmt: skip
        file.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD + b"\n")
        with pytest.raises(InputError, match=f"rows.jsonl, line 2: .*{what}"):
            read_examples(file, Letters(), longest=20)
    with pytest.raises(InputError, match=r"examples\[1\]: .*'target'"):
        read_examples([*ROWS[:1], {"source": "a"}])


def test_without_rows_there_is_nothing_to_learn(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"\n \n")
    for rows, what in ((tmp_path / "empty.jsonl", "empty.jsonl holds no rows"), ([], "examples holds no rows"),
                       (tmp_path / "missing.jsonl", "missing.jsonl"), (tmp_path, tmp_path.name), (3, "examples"),
                       (["a"], r"examples\[0\]")):  # fmt: skip
        with pytest.raises(InputError, match=what):
            read_examples(rows)


def test_lists_are_drawn_from_by_weight_or_by_their_rows() -> None:
    few, many = [("a", "A")], [(f"b{i}", "B") for i in range(9)]
    for weights, share in ((None, 0.1), ([1, 1], 0.5), ([3.0, 1.0], 0.75)):
        draw, rng = mix_examples([few, many], weights).examples["examples"], random.Random(0)
        counts = Counter(draw(rng) for _ in range(4000))
        assert counts["a", "A"] / 4000 == pytest.approx(share, abs=0.03)
        assert len(counts) == 10 and min(counts.values()) > 50


def test_a_step_is_one_batch_within_its_tokens_and_without_what_is_forbidden() -> None:
    examples = [(row["source"], row["target"]) for row in ROWS]
    mixture = mix_examples([examples], tokens=300, forbidden=[examples[0][0]])
    steps = list(draw_block(mixture, characters, 0, 0))
    assert len(steps) == mixture.steps_per_block and all(len(step) == 1 for step in steps)
    seen = set()
    for ((_, (sources, targets)),) in steps:
        assert (max(map(len, sources)) + max(map(len, targets))) * len(sources) <= 300
        seen |= set(texts_of(sources))
    assert seen == {source for source, _ in examples[1:]}


def test_a_mixture_that_makes_no_sense_is_refused() -> None:
    rows = [("a", "A")]
    for given, options, what in (
        ([], {}, "empty"), ([rows, []], {}, "empty"), ([rows], dict(weights=[1, 2]), "weights"),
        ([rows], dict(weights=[0]), "weights"), ([rows], dict(weights=[float("nan")]), "weights"),
        ([rows], dict(tokens=0), "tokens"), ([rows], dict(forbidden=["a"]), "evaluate"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=what):
            mix_examples(given, **options)


# --- any T5, on rows --------------------------------------------------------------------------------------------------

TRAINING = DistillConfig(layers=(0, 2), steps=2, warmup_steps=1)


@pytest.mark.usefixtures("random_state_put_back")
@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.long) for kind in ("deeper-decoder", "gated-untied")), "umt5"]
)
def test_any_t5_learns_from_a_list_or_a_file_of_rows(tiny_t5, tmp_path: Path, kind: str) -> None:
    from test_distillation import same_weights, toy_tokenizer

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    model, tokenizer = tiny_t5(kind), toy_tokenizer()
    students = [distill(model, tokenizer, rows, tmp_path / str(i), TRAINING) for i, rows in enumerate((ROWS, file))]
    assert same_weights(*students) and students[0].config.num_decoder_layers == 2
    config = PruneConfig(steps=2, every=1, examine=1, multiple_of=8, training=TRAINING)
    pruned = prune(model, tokenizer, file, tmp_path / "pruned", config)
    assert pruned.num_parameters() < model.num_parameters()
    for make, config in ((distill, TRAINING), (prune, PruneConfig(steps=0, multiple_of=8))):
        with pytest.raises(InputError, match=r"examples\[0\]"):
            make(model, tokenizer, [{"source": "a"}], tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


def test_scores_are_those_of_what_the_model_writes(mini: tuple[Any, Any], monkeypatch) -> None:
    model, tokenizer = mini
    texts = ["Where is my bag?", "I am tired.", "She is here.", "We are at home now."]
    ids = tokenizer([TRANSLATE + text for text in texts], return_tensors="pt", padding=True)
    answers = tokenizer.batch_decode(model.generate(**ids, max_new_tokens=40, num_beams=1), skip_special_tokens=True)
    rows = [{"source": TRANSLATE + text, "target": answer} for text, answer in zip(texts, answers, strict=True)]
    wrong = [*rows[1:], {**rows[0], "target": "tout autre chose"}]
    model = model.train()
    for metric in METRICS[1:]:
        right = make_validator(rows, tokenizer, metric, batch_size=3)(model)
        assert right.keys() == {"loss", metric} and right[metric] == 100 and model.training
        worse = make_validator(wrong, tokenizer, metric)(model)
        assert worse[metric] < 90 and worse["loss"] > right["loss"]
    assert make_validator(rows, tokenizer)(model) == {"loss": right["loss"]}
    model.eval()
    with pytest.raises(InputError, match="metric"):
        make_validator(rows, tokenizer, "luck")
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu.metrics", None)
    with pytest.raises(ImportError, match="sacrebleu"):
        make_validator(rows, tokenizer, "bleu")


def test_looking_at_a_student_does_not_change_what_it_learns(tiny_t5, tmp_path: Path) -> None:
    from test_distillation import same_weights, toy_tokenizer

    look = make_validator(ROWS[:2], toy_tokenizer(), "exact_match")
    state = torch.get_rng_state()
    blind, seen = (
        distill(tiny_t5(), toy_tokenizer(), ROWS, tmp_path / str(bool(given)), TRAINING, validate=given)
        for given in (None, look)
    )
    torch.set_rng_state(state)
    assert same_weights(blind, seen)
