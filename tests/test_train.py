"""Making the bundled model, at toy size: pairs, vocabulary, mixture, one optimiser step, and a run that is interrupted.

All pairs here are made up for the tests.
"""

import json
import random
import re
from collections import Counter
from dataclasses import asdict, replace
from itertools import islice, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import t5accel.students.mixture as mixture_module
import t5accel.mini.practice as practice
import t5accel.mini.train as training
import t5accel.mini.vocabulary as vocabulary
from t5accel.checkpoints import load_t5
from t5accel.errors import InputError
from t5accel.mini.aim import Aim
from t5accel.students.mixture import (
    CONTEXT,
    CURRICULUM,
    HIDE_WHAT_IS_ASKED,
    SECOND_CURRICULUM,
    Mixture,
    Part,
    Phase,
    block,
    draw_batches,
    evaluation_sources,
    pack,
    translation_example,
)
from t5accel.students.optimise import (
    IGNORED,
    PooledDropout,
    batch_loss,
    learning_rate_factor,
    new_optimizers,
    optimiser_step,
    padded,
    use_pooled_dropout,
)
from t5accel.mini.pairs import joined, read_pairs, split_pairs, tidy
from t5accel.mini.practice import common_words, matching_example, recall_example, repetition_example
from t5accel.students.resumable import prolong
from t5accel.mini.train import (
    SECOND_STAGE,
    TrainConfig,
    new_model,
    reproduce,
    second_model,
    steps_from,
    train,
)
from t5accel.mini.vocabulary import ALPHABET, train_tokenizer
from t5accel.tasks import TRANSLATE, UNANSWERABLE

# --- made-up pairs ----------------------------------------------------------------------------------------------------

WHO = {"The baker": "Le boulanger", "My sister": "Ma sœur", "An old sailor": "Un vieux marin", "Nobody": "Personne"}
DOES = {"paints": "peint", "carries": "porte", "forgets": "oublie", "repairs": "répare"}
WHAT = {"a red boat": "un bateau rouge", "the broken clock": "l'horloge cassée", "7 ladders": "7 échelles"}
PAIRS = tuple(
    (f"{who} {does} {what}{end}", f"{qui} {fait} {quoi}{fin}")
    for who, qui in WHO.items()
    for does, fait in DOES.items()
    for what, quoi in WHAT.items()
    for end, fin in ((".", "."), ("!", " !"))
)


@pytest.fixture(autouse=True)
def _random_state_put_back():
    """Training seeds torch; the tests around it keep their own chance."""
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


@pytest.fixture
def pairs_file(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{english}\t{french}\n" for english, french in PAIRS), encoding="utf-8")
    return path


# --- pairs ------------------------------------------------------------------------------------------------------------


def test_pairs_are_read_tidied_and_further_columns_dropped(tmp_path, pairs_file):
    assert tuple(read_pairs(pairs_file)) == PAIRS
    path = tmp_path / "odd.tsv"
    path.write_bytes("Wait  here!\tAttends\u202fici !\tCC-BY\r\nTwo\u2028lines.\tDeux\u0085lignes.".encode())
    assert read_pairs(path) == [("Wait here!", "Attends ici !"), ("Two lines.", "Deux lignes.")]
    path.write_bytes(b"")
    assert read_pairs(path) == []


def test_a_missing_file_and_a_folder_say_where_to_obtain_pairs(tmp_path):
    for path in (tmp_path / "missing.tsv", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"No translation pairs at {path}.*tatoeba.org"):
            read_pairs(path)


@pytest.mark.parametrize("line", ["no tab", "", "\tSeul.", "Alone.\t", "Alone.\t  "])
def test_a_line_that_is_no_pair_is_named_by_its_number(tmp_path, line):
    path = tmp_path / "pairs.tsv"
    path.write_text(f"Wait!\tAttends !\n{line}\nGo!\tVa !\n")
    with pytest.raises(InputError, match=r"pairs\.tsv, line 2: no 'English<TAB>French' pair"):
        read_pairs(path)


def test_a_file_in_another_encoding_is_named(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes("Wait!\tÀ bientôt !\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"pairs\.tsv is not UTF-8.*Give a UTF-8 file"):
        read_pairs(path)


sentences = st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=3)


@settings(deadline=None)
@given(st.lists(st.tuples(sentences, sentences), min_size=2, max_size=30), st.data())
def test_no_held_out_sentence_is_trained_on_and_no_pair_is_lost(pairs, data):
    different = len({english for english, _ in pairs})
    count = data.draw(st.integers(0, different - 1))
    split = split_pairs(pairs, count)
    held_out = dict(split.held_out)
    assert len(held_out) == count
    assert not held_out.keys() & {english for english, _ in split.train}
    again = [(english, french) for english, references in split.held_out for french in references]
    assert sorted([*split.train, *again]) == sorted(pairs)


def test_what_is_held_out_depends_on_the_sentences_and_not_on_their_order():
    split = split_pairs(PAIRS, 10)
    assert split == split_pairs(PAIRS, 10)
    shuffled = list(PAIRS)
    random.Random(0).shuffle(shuffled)
    assert split_pairs(shuffled, 10).held_out == split.held_out
    assert split_pairs(PAIRS, 20).held_out[:10] == split.held_out  # a larger hold-out contains the smaller one
    assert [english for english, _ in split.held_out] != [english for english, _ in PAIRS[:10]]  # by hash, not position


@pytest.mark.parametrize("count", [-1, len(PAIRS), len(PAIRS) + 1])
def test_holding_out_everything_or_less_than_nothing_is_refused(count):
    with pytest.raises(InputError, match=f"Cannot hold out {count} of {len(PAIRS)}"):
        split_pairs(PAIRS, count)


def test_pairs_are_joined_in_step_and_as_often_as_asked():
    rng = random.Random(0)
    french_of = dict(PAIRS)
    counts = []
    for _ in range(400):
        english, french = joined(PAIRS, rng, share=0.5)
        parts = english.replace(". ", ".|").replace("! ", "!|").split("|")
        assert french == " ".join(french_of[part] for part in parts)
        counts.append(len(parts))
    assert set(counts) == {1, 2, 3, 4} and 150 < counts.count(1) < 250
    assert all(joined(PAIRS, rng, share=0.0) in PAIRS for _ in range(50))
    assert joined(PAIRS, random.Random(5)) == joined(PAIRS, random.Random(5))


# --- vocabulary -------------------------------------------------------------------------------------------------------

CORPUS = [TRANSLATE + english for english, _ in PAIRS] + [french for _, french in PAIRS]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(CORPUS, vocab_size=230)


def test_special_tokens_are_where_t5_has_them(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert len(tokenizer) <= 230 and tokenizer("red boat")["input_ids"][-1] == 1
    assert tokenizer("red boat")["input_ids"].count(1) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Ma sœur répare l'horloge cassée.", "«\xa0Où ça\xa0? À l'île, où Noël naît çà et là ; €\xa05\xa0!\xa0»",
        "Zygmunt Quôx", "Ÿ Œ Æ Ç", "3.14, 2025; (a) \"b\" c:d", "translate English to French: I'm 20°C",
    ],
)  # fmt: skip
def test_text_survives_the_round_trip_accents_and_unseen_names_included(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert 2 not in ids and tokenizer.decode(ids, skip_special_tokens=True) == tidy(text)


@given(st.text([*ALPHABET, " "], min_size=1, max_size=20))
@settings(deadline=None, max_examples=60)
def test_every_letter_of_the_alphabet_can_be_spelt(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert 2 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == tidy(text)


def test_digits_and_sentence_punctuation_stand_alone(tokenizer):
    pieces = [piece for piece in tokenizer.get_vocab() if piece not in ("<pad>", "</s>", "<unk>")]
    assert [piece for piece in pieces if any(map(str.isdigit, piece)) and len(piece.strip("▁")) > 1] == []
    assert [piece for piece in pieces if any(c in '.,!?;:"()' for c in piece) and len(piece.strip("▁")) > 1] == []
    assert [piece.strip("▁") for piece in tokenizer.tokenize("2025") if piece != "▁"] == ["2", "0", "2", "5"]


COMMON = ["▁French", "▁translate", "▁baker", "▁répare"]


def test_common_words_are_one_piece_thanks_to_their_twins(tokenizer, monkeypatch):
    assert [word for word in COMMON if word not in tokenizer.get_vocab()] == []
    assert tokenizer.tokenize("French") == ["▁French"]
    assert [piece for piece in tokenizer.get_vocab() if vocabulary.TWIN in piece and piece != vocabulary.TWIN] == []
    monkeypatch.setattr(vocabulary, "TWIN", "")  # the check can fail: without a mark the twin is the word itself
    without = train_tokenizer(CORPUS, vocab_size=230).get_vocab()
    assert [word for word in COMMON if word not in without] != []


# --- batches ----------------------------------------------------------------------------------------------------------

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


def characters(texts: list[str]) -> list[list[int]]:
    return [[ord(c) for c in text] for text in texts]


def texts_of(rows: list[list[int]]) -> list[str]:
    return ["".join(map(chr, row)) for row in rows]


PHASES = (
    Phase(0, (Part("translation", 400), Part("summaries", 1500, 0.5), Part("questions", 1500, 0.5))),
    Phase(4, (Part("translation", 300, weight=0.5), Part("summaries", 1200, weight=0.2),
              Part("questions", 1200, weight=0.1), Part("short questions", 900, weight=0.1),
              Part("repetition", 200, weight=0.1))),
)  # fmt: skip
SMALL = Mixture(PAIRS, joined_share=0.5, curriculum=PHASES, steps_per_block=4)


def test_a_phase_holds_from_its_step_until_the_next():
    assert [SMALL.phase(step) for step in (0, 3, 4, 99)] == [PHASES[0], PHASES[0], PHASES[1], PHASES[1]]
    assert Mixture(PAIRS).curriculum == CURRICULUM


@pytest.mark.parametrize("starts", [(), (4,), (0, 3), (0, 8, 4), (0, 0)])
def test_a_phase_that_begins_within_a_block_or_out_of_turn_is_refused(starts):
    with pytest.raises(InputError, match="rising multiples of 4"):
        replace(SMALL, curriculum=tuple(replace(PHASES[0], from_step=start) for start in starts))


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
    first = list(block(SMALL, characters, 0, 0))
    assert first == list(block(SMALL, characters, 0, 0))
    assert first != list(block(SMALL, characters, 0, 1)) and first != list(block(SMALL, characters, 1, 0))


@pytest.mark.parametrize("number", [0, 1])
def test_each_step_sees_translation_and_the_other_tasks_as_its_phase_says(number):
    parts = {part.task: part for part in PHASES[number].parts}
    starts = {"translation": TRANSLATE, "summaries": "summarize: ", "repetition": "repeat: "}
    steps = list(block(SMALL, characters, 0, number))
    assert [step[0][0] for step in steps] == ["translation"] * 4
    assert {len(step) for step in steps} == {round(sum(part.per_step for part in parts.values()))}
    for task, (sources, targets) in [batch for step in steps for batch in step]:
        assert all(text.startswith(starts.get(task, "question: ")) for text in texts_of(sources))
        padded_tokens = (max(map(len, sources)) + max(map(len, targets))) * len(sources)
        assert len(sources) == 1 or padded_tokens <= parts[task].tokens
    drawn = Counter(task for step in steps for task, _ in step)
    assert drawn == {task: round(4 * part.per_step) for task, part in parts.items()}


@given(st.integers(0, 10**9))
def test_a_repetition_asks_for_its_own_words(seed):
    source, target = repetition_example(PAIRS, random.Random(seed))
    assert source == "repeat: " + target and 1 <= len(target.split()) <= 8


@given(st.integers(0, 10**9))
def test_a_match_can_be_read_off_its_facts(seed):
    source, target = matching_example(PAIRS, random.Random(seed))
    asked, facts = source.removeprefix("match: ").split(" in: ")
    assert len(asked.split()) == len(target.split()) <= facts.count(".")
    for owner, thing in zip(asked.split(), target.split(), strict=True):
        assert any(
            fact.index(owner) < fact.rindex(thing) for fact in facts.split(".") if owner in fact and thing in fact
        )


MANY_WORDS = tuple("".join(letters) for letters in product("bdfgklmnprst", "aeiou", "bdfgklmnprst"))


def asked_and_clauses(source: str) -> tuple[str, list[str]]:
    for form in practice._ASKED:
        if found := re.fullmatch(re.escape(form).replace(r"\{\}", "(.+)") + r" (.+)\.", source):
            return found[1], found[2].split(". ")
    raise AssertionError(source)


@pytest.mark.parametrize("distance", [0, 2, 8])
def test_what_is_recalled_stands_so_far_from_what_is_asked_or_in_no_clause(distance):
    gaps, unanswerable = set(), 0
    for seed in range(600):
        source, target = recall_example(MANY_WORDS, random.Random(seed), distance=distance)
        asked, clauses = asked_and_clauses(source)
        assert 2 <= len(clauses) <= 5
        holding = [clause for clause in clauses if re.search(rf"\b{asked}\b", clause)]
        if target == UNANSWERABLE:
            assert not holding, source
            unanswerable += 1
        else:
            (clause,) = holding
            (between,) = re.findall(rf"\b(?:{asked}|{target})\b(.*)\b(?:{asked}|{target})\b", clause)
            gaps.add(len(between.split()))
    assert gaps == set(range(distance + 1))
    assert 30 <= unanswerable <= 90


def test_common_words_come_in_order_of_their_counts_without_fillers():
    pairs = [
        ("He took the tea.", "Du thé, du thé !"),
        ("Some cat jumps.", "Thé, thé ou café ?"),
        ("Six men.", "Le thé."),
    ]
    pairs += [("Big dogs run.", "Adieu, mes amis.")]
    assert common_words(pairs, 2) == ("thé", "tea")
    assert not {"the", "took", "He"} & set(common_words(pairs))
    with pytest.raises(InputError, match="have 2 words of more than two letters"):
        common_words([("He took the tea.", "Thé.")])


def test_steps_go_on_from_the_middle_of_a_block():
    whole = list(islice(steps_from(SMALL, characters, 0, 0), 9))
    assert whole[:4] == list(block(SMALL, characters, 0, 0)) and whole[4:8] == list(block(SMALL, characters, 0, 1))
    for start in (1, 4, 6):
        assert list(islice(steps_from(SMALL, characters, 0, start), 9 - start)) == whole[start:]


def test_forbidden_sources_are_never_drawn():
    def drawn(mixture):
        steps = [step for number in range(2) for step in block(mixture, characters, 0, number)]
        return {text for step in steps for _, (sources, _) in step for text in texts_of(sources)}

    free = drawn(SMALL)
    forbidden = frozenset(sorted(free)[::3])
    starts = {text.split(":")[0] for text in forbidden}
    assert starts == {"translate English to French", "summarize", "question", "repeat"}
    restricted = drawn(replace(SMALL, forbidden=forbidden))
    assert restricted and not restricted & forbidden


def test_when_every_source_is_forbidden_drawing_stops():
    mixture = replace(SMALL, joined_share=0.0, forbidden=frozenset(TRANSLATE + english for english, _ in PAIRS))
    with pytest.raises(InputError, match="are in the evaluation sets"):
        next(block(mixture, characters, 0, 0))


def test_as_many_batches_are_drawn_as_asked_and_each_within_its_budget():
    rng = random.Random(0)
    batches = draw_batches(lambda: translation_example(SMALL, rng), characters, 400, 5, frozenset(), rng)
    assert len(batches) == 5
    assert all((max(map(len, s)) + max(map(len, t))) * len(s) <= 400 for s, t in batches if len(s) > 1)
    assert draw_batches(lambda: translation_example(SMALL, rng), characters, 400, 0, frozenset(), rng) == []


def test_the_second_curriculum_begins_near_and_ends_with_every_task_and_dropout():
    assert Mixture(PAIRS, curriculum=SECOND_CURRICULUM).phase(0).parts[0].task == "near recall"
    assert {part.task for part in SECOND_CURRICULUM[-1].parts} >= {"translation", "summaries", "questions"}
    assert [phase.dropout for phase in SECOND_CURRICULUM] == [0.0] * 4 + [0.05]
    assert SECOND_CURRICULUM[-1].from_step < SECOND_STAGE.steps * (1 - SECOND_STAGE.decay_share)


def test_the_frozen_sets_are_forbidden_with_their_prefixes():
    sources = evaluation_sources()
    assert len(sources) == 700
    assert {source.split(":")[0] for source in sources} == {"translate English to French", "summarize", "question"}


# --- one step ---------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 500), st.integers(0, 100), st.sampled_from([0.0, 0.25, 1.0]), st.integers(0, 600)
)  # fmt: skip
def test_the_learning_rate_rises_stays_and_falls_to_zero(steps, warmup, decay, step):
    def factor(at):
        return learning_rate_factor(at, steps, warmup_steps=warmup, decay_share=decay)

    assert 0.0 <= factor(step) <= 1.0
    assert factor(steps) == 0.0
    falling = steps - max(1, round(steps * decay))
    if step + 1 < warmup and step < falling:
        assert factor(step) == pytest.approx((step + 1) / warmup)
    if warmup - 1 <= step <= falling:
        assert factor(step) == 1.0
    if step >= max(falling, warmup):
        assert factor(step + 1) <= factor(step)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_pooled_dropout_zeroes_its_share_keeps_the_mean_and_is_off_in_evaluation(p):
    torch.manual_seed(0)
    dropout, x = PooledDropout(p), torch.ones(200, 500)
    out = dropout(x)
    assert out.shape == x.shape and out.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])
    assert (out == 0).float().mean().item() == pytest.approx(p, abs=0.01)
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)
    assert (dropout(x) != out).any()  # another place of the pool
    assert dropout.eval()(x) is x and PooledDropout(0.0)(x) is x


def test_a_mask_depends_on_the_seed_and_not_on_what_the_process_did_before(monkeypatch):
    def mask(*before):
        monkeypatch.setattr(PooledDropout, "pools", {})
        dropout = PooledDropout(0.3)
        for size in before:
            dropout(torch.ones(size))
        torch.manual_seed(7)
        return dropout(torch.ones(1000))

    fresh = mask()
    assert torch.equal(fresh, mask(50)) and torch.equal(fresh, mask(1 << 23))  # a larger tensor needs another pool


def test_dropout_takes_the_type_of_its_input():
    assert PooledDropout(0.1)(torch.ones(4, dtype=torch.bfloat16)).dtype == torch.bfloat16


TOY = TrainConfig(
    steps=8, learning_rate=1e-2, matrix_learning_rate=1e-2, warmup_steps=2, d_model=16, d_kv=8, d_ff=32, num_heads=2,
    num_layers=1, vocab_size=230,
)  # fmt: skip


def test_every_dropout_of_the_model_is_pooled_and_none_is_left_in_attention():
    model = new_model(TOY)
    modules = list(model.modules())
    assert not any(type(module) is torch.nn.Dropout for module in modules)
    pooled = [module for module in modules if isinstance(module, PooledDropout)]
    assert pooled and {module.p for module in pooled} == {TOY.dropout}
    attention = [module for module in modules if type(module).__name__ == "T5Attention"]
    assert len(attention) == 3 and {module.dropout for module in attention} == {0.0}
    plain = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Sequential(torch.nn.Dropout(0.4)))
    use_pooled_dropout(plain)
    assert plain[0].p == 0.2 and isinstance(plain[1][0], PooledDropout)


def test_muon_takes_the_matrices_of_the_layers_and_adamw_everything_else():
    model = new_model(TOY)
    adamw, muon = new_optimizers(model, learning_rate=0.1, matrix_learning_rate=0.2)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert matrices | rest == set(names.values()) and not matrices & rest
    assert all(".SelfAttention." in n or ".EncDecAttention." in n or ".DenseReluDense." in n for n in matrices)
    assert {n for n in rest if n.endswith("q.weight")} == set() and "shared.weight" in rest
    assert (adamw.param_groups[0]["peak_lr"], muon.param_groups[0]["peak_lr"]) == (0.1, 0.2)
    (alone,) = new_optimizers(model, learning_rate=0.1, matrix_learning_rate=None)
    assert sum(len(group["params"]) for group in alone.param_groups) == len(names)


BATCH = ([[5, 6, 7, 1], [8, 9, 1]], [[10, 11, 1], [12, 13, 14, 1]])


def test_the_loss_is_summed_over_labels_and_padding_changes_nothing():
    model = new_model(TOY).eval()
    with torch.no_grad():
        both, labels = batch_loss(model, BATCH, 0.0)
        apart = [batch_loss(model, ([source], [target]), 0.0) for source, target in zip(*BATCH, strict=True)]
    assert labels == 7 == sum(count for _, count in apart)
    assert both.item() == pytest.approx(sum(loss.item() for loss, _ in apart), rel=0.01)  # bf16
    with torch.no_grad():
        assert batch_loss(model, BATCH, 0.5)[0].item() != pytest.approx(both.item(), rel=1e-3)


def test_what_is_hidden_from_the_decoder_reaches_it_through_the_encoder_alone():
    model = new_model(TOY).eval()
    batch = ([[5, 6, 9, 7, 8, 9, 1], [9, 4, 1]], [[3, 1], [2, 1]])
    seen = {}
    hooks = [
        getattr(model, name).register_forward_pre_hook(
            lambda module, given, named, name=name: seen.update({name: named}), with_kwargs=True
        )
        for name in ("encoder", "decoder")
    ]
    whole, labels = batch_loss(model, batch, 0.0)
    hidden, same = batch_loss(model, batch, 0.0, hidden_until=9)
    for hook in hooks:
        hook.remove()
    assert labels == same == 4 and whole != hidden
    assert seen["encoder"]["attention_mask"].tolist() == [[1] * 7, [1] * 3 + [0] * 4]
    assert seen["decoder"]["encoder_attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]]
    assert torch.equal(batch_loss(model, ([[9, 4, 1]], [[2, 1]]), 0.0, hidden_until=9)[0],
                       batch_loss(model, ([[9, 4, 1]], [[2, 1]]), 0.0)[0])  # fmt: skip
    with pytest.raises(InputError, match="A source has no token 9"):
        batch_loss(model, ([[9, 4, 1], [5, 6, 1]], [[2, 1], [2, 1]]), 0.0, hidden_until=9)


def test_the_word_after_what_is_asked_is_one_token_in_every_exercise():
    _, tokenizer = load_t5("mini")
    marker = tokenizer.convert_tokens_to_ids(CONTEXT)
    assert marker != tokenizer.unk_token_id
    mixture = replace(SMALL, pairs=tuple((f"{a} {b}", c) for a, b, c in product(MANY_WORDS[::40], repeat=3)))
    for task in HIDE_WHAT_IS_ASKED:
        rng = random.Random(task)
        for _ in range(100):
            source, _ = mixture_module._EXAMPLES[task](mixture, rng)
            ids = tokenizer(source)["input_ids"]
            assert (
                "context: " + tokenizer.decode(ids[ids.index(marker) + 2 :], skip_special_tokens=True)
                == (source[source.index("context: ") :])
            )


def test_rows_are_padded_to_the_right_and_labels_with_what_the_loss_ignores():
    assert padded([[1], [2, 3]], IGNORED).tolist() == [[1, IGNORED], [2, 3]]


@pytest.mark.parametrize("matrix_learning_rate", [1e-2, None], ids=["muon", "adamw"])
def test_steps_on_one_batch_lower_its_loss(matrix_learning_rate):
    model = new_model(replace(TOY, dropout=0.0)).train()
    optimizers = new_optimizers(model, learning_rate=1e-2, matrix_learning_rate=matrix_learning_rate)
    losses = [optimiser_step(model, optimizers, [BATCH], (1.0,), factor=1.0, smoothing=0.0) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_factor_of_zero_changes_no_weight_and_the_loss_is_the_weighted_mean():
    model = new_model(replace(TOY, dropout=0.0)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizers = new_optimizers(model, learning_rate=1.0, matrix_learning_rate=1.0)
    other = ([[20, 21, 1]], [[22, 1]])
    means = [loss.item() / count for loss, count in (batch_loss(model, batch, 0.1) for batch in (BATCH, other))]
    loss = optimiser_step(model, optimizers, [BATCH, other], (0.25, 0.75), factor=0.0, smoothing=0.1)
    assert loss == pytest.approx(0.25 * means[0] + 0.75 * means[1], rel=1e-3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- a run ------------------------------------------------------------------------------------------------------------

MIXTURE = replace(
    SMALL,
    curriculum=tuple(
        replace(p, parts=tuple(replace(part, tokens=min(part.tokens, 800)) for part in p.parts)) for p in PHASES
    ),
)
HELD_OUT = [(TRANSLATE + english, french) for english, french in PAIRS[:4]]


@pytest.fixture
def quick_validation(monkeypatch):
    """Only the held-out pairs; a report of 20 sentences is long for a toy vocabulary."""

    def sets(held_out, encode):
        return {"translation": pack(encode([s for s, _ in held_out]), encode([t for _, t in held_out]), 6000)}

    monkeypatch.setattr(training, "validation_sets", sets)


def run(folder, tokenizer, config=TOY, **options):
    return train(MIXTURE, tokenizer, HELD_OUT, folder, config, **{"validate_every": 4, "save_every": 2, **options})


def log(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_an_interrupted_run_ends_with_exactly_the_weights_of_an_uninterrupted_one(
    tmp_path, tokenizer, quick_validation, monkeypatch, optimizer
):
    config = replace(TOY, optimizer=optimizer)
    whole = run(tmp_path / "whole", tokenizer, config)
    assert not whole.training
    assert [row["step"] for row in log(tmp_path / "whole")] == [4, 8]
    assert set(log(tmp_path / "whole")[0]) == {"step", "train_loss", "translation", "seconds"}
    assert torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)["step"] == 8

    steps = []

    def killed(*arguments, **options):
        if len(steps) == 5:
            raise KeyboardInterrupt
        steps.append(1)
        return optimiser_step(*arguments, **options)

    monkeypatch.setattr(training, "optimiser_step", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", tokenizer, config)
    assert torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)["step"] == 4
    monkeypatch.setattr(training, "optimiser_step", optimiser_step)
    monkeypatch.setattr(PooledDropout, "pools", {})  # as in another process
    resumed = run(tmp_path / "cut", tokenizer, config)

    start = new_model(config).state_dict()
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert any(not torch.equal(value, start[name]) for name, value in whole.state_dict().items())
    assert log(tmp_path / "cut")[-1]["translation"] == log(tmp_path / "whole")[-1]["translation"]
    assert not list((tmp_path / "cut").glob("*.partial"))


def test_a_finished_run_is_not_trained_on_and_more_steps_go_on(tmp_path, tokenizer, quick_validation, monkeypatch):
    done = run(tmp_path, tokenizer)
    counted = []

    def counting(*arguments, **options):
        counted.append(1)
        return optimiser_step(*arguments, **options)

    monkeypatch.setattr(training, "optimiser_step", counting)
    again = run(tmp_path, tokenizer)
    assert not counted and all(torch.equal(v, again.state_dict()[n]) for n, v in done.state_dict().items())
    run(tmp_path, tokenizer, replace(TOY, steps=11))
    assert len(counted) == 3 and log(tmp_path)[-1]["step"] == 11


def test_dropout_is_the_phase_s_or_the_run_s(tmp_path, tokenizer, quick_validation, monkeypatch):
    phases = (replace(PHASES[0], dropout=0.0), PHASES[1])
    monkeypatch.setitem(globals(), "MIXTURE", replace(MIXTURE, curriculum=phases))
    seen = []
    real = training.optimiser_step

    def watched(model, *given, **named):
        seen.append({module.p for module in model.modules() if isinstance(module, PooledDropout)})
        return real(model, *given, **named)

    monkeypatch.setattr(training, "optimiser_step", watched)
    run(tmp_path, tokenizer, replace(TOY, steps=6))
    assert seen == [{0.0}] * 4 + [{TOY.dropout}] * 2


def test_the_second_stage_goes_on_from_a_model_with_aimed_heads_and_leaves_it_alone(
    tmp_path, tokenizer, quick_validation
):
    first = run(tmp_path / "first", tokenizer, replace(TOY, steps=2))
    before = {name: value.clone() for name, value in first.state_dict().items()}
    config = replace(TOY, steps=2, warmup_steps=10**9, aims=(Aim(1, like=0, first=1, last=1),))
    second = run(tmp_path / "second", tokenizer, config, start=first)
    assert all(torch.equal(value, before[name]) for name, value in first.state_dict().items())
    aimed = second_model(first, config).state_dict()
    assert not torch.equal(aimed["encoder.block.0.layer.0.SelfAttention.v.weight"],
                           before["encoder.block.0.layer.0.SelfAttention.v.weight"])  # fmt: skip
    for name, value in second.state_dict().items():  # rates that hardly begin to rise
        assert torch.allclose(value, aimed[name], atol=1e-5), name


def test_another_configuration_is_refused_and_the_checkpoint_kept(tmp_path, tokenizer, quick_validation):
    run(tmp_path, tokenizer, replace(TOY, steps=2))
    before = (tmp_path / "checkpoint.pt").read_bytes()
    for other in (replace(TOY, seed=1), replace(TOY, d_ff=64), replace(TOY, optimizer="adamw")):
        with pytest.raises(InputError, match="was made with .*use another folder"):
            run(tmp_path, tokenizer, other)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_prolong_goes_back_to_before_the_learning_rate_fell(tmp_path, tokenizer, quick_validation):
    with pytest.raises(InputError, match="has not reached its decay"):
        prolong(tmp_path)
    run(tmp_path, tokenizer)
    falls = next(step for step in range(TOY.steps) if TOY.factor(step) == 1.0 > TOY.factor(step + 1))
    stable = torch.load(tmp_path / "stable.pt", weights_only=True)
    assert stable["step"] == falls + 1 < TOY.steps
    prolong(tmp_path)
    assert not (tmp_path / "stable.pt").exists()
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == stable["step"]
    longer = replace(TOY, steps=12)
    went_on = run(tmp_path, tokenizer, longer)
    at_once = run(tmp_path / "at once", tokenizer, longer)  # the same as if it had been planned so
    assert all(torch.equal(value, went_on.state_dict()[name]) for name, value in at_once.state_dict().items())


def test_a_checkpoint_that_is_cut_short_leaves_the_old_one(tmp_path, tokenizer, quick_validation, monkeypatch):
    run(tmp_path, tokenizer, replace(TOY, steps=2))
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def half(state, path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        run(tmp_path, tokenizer)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize("wrong", [{"optimizer": "sgd"}, {"steps": 0}, {"steps": -5}])
def test_a_bad_configuration_is_refused(wrong):
    with pytest.raises(InputError, match=f"{next(iter(wrong))} is .*; give"):
        TrainConfig(**wrong)


def test_a_device_that_is_not_there_is_refused(tmp_path, tokenizer):
    with pytest.raises(InputError, match="device 'abacus'"):
        run(tmp_path / "out", tokenizer, device="abacus")
    assert not (tmp_path / "out").exists()


def test_from_a_file_of_pairs_to_a_model_that_loads_and_writes(tmp_path, pairs_file, monkeypatch):
    monkeypatch.setattr(training, "Mixture", lambda *given: replace(MIXTURE, pairs=given[0], forbidden=given[1]))
    config = replace(TOY, steps=2, vocab_size=400)
    folder = reproduce(pairs_file, tmp_path / "out", config, held_out=10)

    model, tokenizer = load_t5(folder)
    assert model.config.d_model == 16 and len(tokenizer) <= model.config.vocab_size == 400
    assert {str(v.dtype) for v in torch.load(tmp_path / "out" / "checkpoint.pt")["model"].values()} == {"torch.float32"}
    batch = tokenizer(TRANSLATE + PAIRS[0][0], return_tensors="pt")
    assert model.generate(**batch, max_new_tokens=3).shape[0] == 1
    (row,) = log(tmp_path / "out")
    assert set(row) == {"step", "train_loss", "translation", "summaries", "questions", "seconds"}
    assert asdict(config) == torch.load(tmp_path / "out" / "checkpoint.pt")["config"]

    made = (tmp_path / "out" / "tokenizer" / "tokenizer.json").stat().st_mtime_ns
    monkeypatch.setattr(training, "train_tokenizer", lambda *_: pytest.fail("the vocabulary of a run stays as it is"))
    assert reproduce(pairs_file, tmp_path / "out", config, held_out=10) == folder
    assert (tmp_path / "out" / "tokenizer" / "tokenizer.json").stat().st_mtime_ns == made


def test_the_second_stage_keeps_the_vocabulary_and_has_its_own_curriculum(
    tmp_path, tokenizer, pairs_file, monkeypatch, quick_validation
):
    new_model(replace(TOY, steps=1)).half().save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    seen = []

    def watched(mixture, tokenizer, held_out, folder, config, *, start, device):
        seen.append((mixture.curriculum, config, start.dtype))
        return start

    found = (Aim(1, like=0, first=1, last=1),)
    looked_at = []
    monkeypatch.setattr(training, "choose_aims", lambda model, batches: looked_at.append((model, batches)) or found)
    monkeypatch.setattr(training, "train", watched)
    for config in (TOY, replace(TOY, aims=None)):
        folder = reproduce(pairs_file, tmp_path / "out", config, start=str(tmp_path / "start"), held_out=10)
    assert seen == [(SECOND_CURRICULUM, replace(TOY, aims=aims), torch.float32) for aims in ((), found)]
    ((model, batches),) = looked_at  # only where no aims were given
    assert model.config.d_model == 16 and batches
    kept = (tmp_path / "start" / "tokenizer.json").read_text()
    assert json.loads((folder / "tokenizer.json").read_text())["model"] == json.loads(kept)["model"]
    assert not (tmp_path / "out" / "tokenizer").exists()


def test_the_second_stage_does_not_begin_with_random_weights(tmp_path, pairs_file):
    with pytest.raises(InputError, match="random:t5-small has no tokenizer; give the name or the folder of a trained"):
        reproduce(pairs_file, tmp_path / "out", TOY, start="random:t5-small", held_out=10)
    assert not (tmp_path / "out").exists()


def test_without_pairs_nothing_is_written(tmp_path):
    with pytest.raises(FileNotFoundError, match="tatoeba.org"):
        reproduce(tmp_path / "missing.tsv", tmp_path / "out", TOY)
    assert not (tmp_path / "out").exists()
