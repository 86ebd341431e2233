"""Rows are read and mixed; batches are packed within their budget, and drawn as the curriculum says."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import PAIRS, characters, texts_of
from test_distillation import same_weights, toy_tokenizer

from t5accel.distillation.batches import (
    Mixture,
    Phase,
    TaskShare,
    draw_block,
    mix_examples,
    pack,
    read_examples,
    steps_from,
)
from t5accel.distillation.pruning import PruneConfig, prune
from t5accel.distillation.student import DistillConfig, distill
from t5accel.distillation.validation import METRICS, make_validator
from t5accel.errors import InputError
from t5accel.models.prefixes import TRANSLATE
from training.curriculum import mini_examples

lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=30)


@settings(deadline=None)
@given(lengths, st.integers(1, 60))
def test_every_example_is_packed_once_within_the_budget(sizes, budget):
    sources = [[i] * source for i, (source, _) in enumerate(sizes)]
    targets = [[i] * target for i, (_, target) in enumerate(sizes)]
    batches = pack(sources, targets, budget)
    for rows, answers in batches:
        assert len(rows) == len(answers) > 0
        assert len(rows) == 1 or (max(map(len, rows)) + max(map(len, answers))) * len(rows) <= budget
        assert [row[0] for row in rows] == [answer[0] for answer in answers]  # each source beside its own target
    packed = [
        (row[0], len(row), len(answer)) for rows, answers in batches for row, answer in zip(rows, answers, strict=True)
    ]
    assert sorted(packed) == [(i, source, target) for i, (source, target) in enumerate(sizes)]


PHASES = (
    Phase(0, (TaskShare("translation", 400), TaskShare("summaries", 1500, 0.5), TaskShare("questions", 1500, 0.5))),
    Phase(4, (TaskShare("translation", 300, weight=0.5), TaskShare("summaries", 1200, weight=0.2),
              TaskShare("questions", 1200, weight=0.1), TaskShare("short questions", 900, weight=0.1),
              TaskShare("repetition", 200, weight=0.1))),
)  # fmt: skip
SMALL = Mixture(mini_examples(PAIRS, joined_share=0.5), PHASES, steps_per_block=4)


def test_a_phase_that_begins_within_a_block_or_out_of_turn_is_refused():
    for starts in ((), (4,), (0, 3), (0, 8, 4), (0, 0)):
        with pytest.raises(InputError, match="multiples of 4"):
            replace(SMALL, curriculum=tuple(replace(PHASES[0], from_step=start) for start in starts))


@pytest.mark.parametrize("per_step", [0.5, 2])
def test_a_phase_whose_first_part_is_not_one_batch_a_step_is_refused(per_step: float) -> None:
    with pytest.raises(InputError, match="first part must be 1"):
        replace(SMALL, curriculum=(Phase(0, (TaskShare("translation", 200, per_step=per_step),)),))


def test_the_digest_is_of_every_example_and_phase() -> None:
    def encode(texts: list[str]) -> list[list[int]]:
        return [[*text.encode()] for text in texts]

    rows = [(f"source {number}", f"target {number}") for number in range(3000)]
    mixed = mix_examples([rows], tokens=200)
    digests = {mixed.digest(encode, 0), mixed.digest(encode, 1), mix_examples([rows], tokens=201).digest(encode, 0)}
    digests |= {mix_examples([rows[:-1]], tokens=200).digest(encode, 0)}
    digests |= {mix_examples([rows[:9], rows[9:]], [1, 2], tokens=200).digest(encode, 0)}
    two = replace(mixed, curriculum=(*mixed.curriculum, Phase(50, (TaskShare("examples", 300),))))
    digests |= {two.digest(encode, 0), replace(mixed, excluded_sources=frozenset({"source 2999"})).digest(encode, 0)}
    assert len(digests) == 7 and mixed.digest(encode, 0) == mix_examples([list(rows)], tokens=200).digest(encode, 0)


@given(st.lists(st.lists(st.lists(st.just(5), min_size=1, max_size=9), min_size=1, max_size=4), min_size=2, max_size=4))
def test_weights_sum_to_one_and_follow_the_labels_or_the_phase(targets):
    batches = [(("translation", "summaries")[i > 0], ([], rows)) for i, rows in enumerate(targets)]
    labels = [sum(map(len, rows)) for rows in targets]
    alike, by_batch = (phase.weights(batches) for phase in PHASES)
    assert sum(alike) == pytest.approx(1.0) and sum(by_batch) == pytest.approx(1.0)
    assert [weight / count for weight, count in zip(alike, labels, strict=True)] == pytest.approx(
        [1 / sum(labels)] * len(labels)
    )
    assert [weight / by_batch[0] for weight in by_batch[1:]] == pytest.approx([0.2 / 0.5] * (len(targets) - 1))


def test_a_block_is_a_function_of_seed_and_number():
    first = list(draw_block(SMALL, characters, 0, 0))
    assert first == list(draw_block(SMALL, characters, 0, 0))
    assert first != list(draw_block(SMALL, characters, 0, 1)) and first != list(draw_block(SMALL, characters, 1, 0))


@pytest.mark.parametrize("number", [0, 1])
def test_each_step_sees_translation_and_the_other_tasks_as_its_phase_says(number):
    parts = {part.task: part for part in PHASES[number].parts}
    starts = {"translation": TRANSLATE, "summaries": "summarize: ", "repetition": "repeat: "}
    steps = list(draw_block(SMALL, characters, 0, number))
    assert [step[0][0] for step in steps] == ["translation"] * 4
    assert {len(step) for step in steps} == {round(sum(part.per_step for part in parts.values()))}
    for task, (sources, targets) in [batch for step in steps for batch in step]:
        assert all(text.startswith(starts.get(task, "question: ")) for text in texts_of(sources))
        padded_tokens = (max(map(len, sources)) + max(map(len, targets))) * len(sources)
        assert len(sources) == 1 or padded_tokens <= parts[task].tokens
    drawn = Counter(task for step in steps for task, _ in step)
    assert drawn == {task: round(4 * part.per_step) for task, part in parts.items()}


def test_steps_go_on_from_the_middle_of_a_block():
    whole = list(islice(steps_from(SMALL, characters, 0, 0), 9))
    assert whole[:4] == list(draw_block(SMALL, characters, 0, 0)) and whole[4:8] == list(
        draw_block(SMALL, characters, 0, 1)
    )
    for start in (1, 4, 6):
        assert list(islice(steps_from(SMALL, characters, 0, start), 9 - start)) == whole[start:]


def test_forbidden_sources_are_never_drawn():
    def drawn(mixture):
        steps = [step for number in range(2) for step in draw_block(mixture, characters, 0, number)]
        return {text for step in steps for _, (sources, _) in step for text in texts_of(sources)}

    free = drawn(SMALL)
    forbidden = frozenset(sorted(free)[::3])
    starts = {text.split(":")[0] for text in forbidden}
    assert starts == {"translate English to French", "summarize", "question", "repeat"}
    restricted = drawn(replace(SMALL, excluded_sources=forbidden))
    assert restricted and not restricted & forbidden


def test_what_the_teacher_wrote_takes_the_place_of_fresh_examples():
    phases = (Phase(0, (TaskShare("translation", 300), TaskShare("questions", 1500))),)
    written = [(TRANSLATE + f"Text {i}.", f"Texte {i}.") for i in range(9)]
    fresh = replace(SMALL, curriculum=phases, excluded_sources=frozenset([written[4][0]]))
    mixture = fresh.with_teacher_outputs({"translation": written})
    assert mixture.by_teacher and not fresh.by_teacher
    drawn: dict[str, set[tuple[str, str]]] = {"translation": set(), "questions": set()}
    for step in draw_block(mixture, characters, 0, 0):
        for task, (sources, targets) in step:
            drawn[task] |= set(zip(texts_of(sources), texts_of(targets), strict=True))
    assert drawn["translation"] == {*written[:4], *written[5:]}
    assert drawn["questions"] and all(source.startswith("question: ") for source, _ in drawn["questions"])


# --- rows ---------------------------------------------------------------------------------------------------------

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


def test_a_mixture_that_makes_no_sense_is_refused() -> None:
    rows = [("a", "A")]
    for examples, options, what in (
        ([], {}, "empty"), ([rows, []], {}, "empty"), ([rows], dict(weights=[1, 2]), "weights"),
        ([rows], dict(weights=[0]), "weights"), ([rows], dict(weights=[float("nan")]), "weights"),
        ([rows], dict(tokens=0), "tokens"), ([rows], dict(excluded_sources=["a"]), "evaluate"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=what):
            mix_examples(examples, **options)


# --- any T5, on rows --------------------------------------------------------------------------------------------------

TRAINING = DistillConfig(layers=(0, 2), steps=2, warmup_steps=1)


@pytest.mark.usefixtures("random_state_put_back")
def test_any_t5_learns_from_a_list_or_a_file_of_rows(tiny_t5, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    model, tokenizer = tiny_t5("umt5"), toy_tokenizer()
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
    assert make_validator(rows, tokenizer, "exact_match")(model)["exact_match"] == 100 and not model.training
    with pytest.raises(InputError, match="metric"):
        make_validator(rows, tokenizer, "luck")
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu.metrics", None)
    with pytest.raises(ImportError, match="sacrebleu"):
        make_validator(rows, tokenizer, "bleu")


def test_looking_at_a_student_does_not_change_what_it_learns(tiny_t5, tmp_path: Path) -> None:
    look = make_validator(ROWS[:2], toy_tokenizer(), "exact_match")
    state = torch.get_rng_state()
    blind, seen = (
        distill(tiny_t5(), toy_tokenizer(), ROWS, tmp_path / str(bool(given)), TRAINING, validate=given)
        for given in (None, look)
    )
    torch.set_rng_state(state)
    assert same_weights(blind, seen)
