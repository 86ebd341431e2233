"""Making the bundled model, at toy size: one optimiser step, and a run that is interrupted."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from made_up import CORPUS, PAIRS, log
from test_batches import PHASES, SMALL

import t5accel.distillation.checkpointing as checkpointing
import training.train as training
from t5accel.distillation.batches import encode_and_pack
from t5accel.distillation.optimizer import batch_loss, new_optimizers, optimizer_step
from t5accel.errors import InputError
from t5accel.models.load import load_model
from t5accel.models.prefixes import TRANSLATE
from training.curriculum import FOURTH_CURRICULUM, SECOND_CURRICULUM, THIRD_CURRICULUM
from training.grow import grow_model
from training.head_init import HeadInit
from training.train import PooledDropout, TrainConfig, continued_model, new_model, reproduce, train_model
from training.vocabulary import train_tokenizer

pytestmark = pytest.mark.usefixtures("random_state_put_back")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(CORPUS, vocab_size=230)


@pytest.fixture
def pairs_file(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{english}\t{french}\n" for english, french in PAIRS), encoding="utf-8")
    return path


@pytest.fixture
def few_texts(monkeypatch):
    """A run's vocabulary is made of every thirtieth of its texts."""
    own = training.vocabulary_texts
    monkeypatch.setattr(training, "vocabulary_texts", lambda *given: own(*given)[::30])


@pytest.fixture
def made_before(tmp_path, tokenizer):
    """The folder of the model that a second or third stage begins with."""
    new_model(replace(TOY, steps=1)).half().save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    return tmp_path / "start"


def test_pooled_dropout_zeroes_its_share_keeps_the_mean_and_is_off_in_evaluation(monkeypatch):
    torch.manual_seed(0)
    p = 0.1
    dropout, x = PooledDropout(p), torch.ones(200, 500)
    out = dropout(x)
    assert out.shape == x.shape and out.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])
    assert (out == 0).float().mean().item() == pytest.approx(p, abs=0.01)
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)
    assert (dropout(x) != out).any()  # another place of the pool
    assert dropout(x.bfloat16()).dtype == torch.bfloat16
    assert dropout.eval()(x) is x and PooledDropout(0.0)(x) is x

    def mask(*before):
        monkeypatch.setattr(PooledDropout, "pools", {})
        dropout = PooledDropout(0.3)
        for size in before:
            dropout(torch.ones(size))
        torch.manual_seed(7)
        return dropout(torch.ones(1000))

    fresh = mask()
    assert torch.equal(fresh, mask(50)) and torch.equal(fresh, mask(1 << 23))  # a larger tensor needs another pool


TOY = TrainConfig(
    steps=8, learning_rate=1e-2, matrix_learning_rate=1e-2, warmup_steps=2, d_model=16, d_kv=8, d_ff=32, num_heads=2,
    num_layers=1, vocab_size=230,
)  # fmt: skip


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
    for name in ("encoder", "decoder"):
        own = getattr(model, name)
        own.register_forward_pre_hook(lambda _, given, named, name=name: seen.update({name: named}), with_kwargs=True)
    whole, labels = batch_loss(model, batch, 0.0)
    hidden, same = batch_loss(model, batch, 0.0, hidden_until=9)
    assert labels == same == 4 and whole != hidden
    assert seen["encoder"]["attention_mask"].tolist() == [[1] * 7, [1] * 3 + [0] * 4]
    assert seen["decoder"]["encoder_attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]]
    first = [[9, 4, 1]], [[2, 1]]
    assert torch.equal(batch_loss(model, first, 0.0, hidden_until=9)[0], batch_loss(model, first, 0.0)[0])
    with pytest.raises(InputError, match="A source has no token 9"):
        batch_loss(model, ([[9, 4, 1], [5, 6, 1]], [[2, 1], [2, 1]]), 0.0, hidden_until=9)


def test_a_factor_of_zero_changes_no_weight_and_the_loss_is_the_weighted_mean():
    model = new_model(replace(TOY, dropout=0.0)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizers = new_optimizers(model, learning_rate=1.0, matrix_learning_rate=1.0)
    other = ([[20, 21, 1]], [[22, 1]])
    means = [loss.item() / count for loss, count in (batch_loss(model, batch, 0.1) for batch in (BATCH, other))]
    loss = optimizer_step(model, optimizers, [BATCH, other], (0.25, 0.75), factor=0.0, smoothing=0.1)
    assert loss == pytest.approx(0.25 * means[0] + 0.75 * means[1], rel=1e-3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


SHORT = [tuple(replace(part, tokens=min(part.tokens, 800)) for part in phase.parts) for phase in PHASES]
MIXTURE = replace(SMALL, curriculum=tuple(map(lambda phase, parts: replace(phase, parts=parts), PHASES, SHORT)))
HELD_OUT = [(TRANSLATE + english, french) for english, french in PAIRS[:4]]


@pytest.fixture
def quick_validation(monkeypatch):
    """Only the held-out pairs; a report of 20 sentences is long for a toy vocabulary."""

    def sets(held_out, encode):
        return {"translation": encode_and_pack(held_out, encode, 6000)}

    monkeypatch.setattr(training, "validation_sets", sets)


def run(folder, tokenizer, config=TOY, **options):
    return train_model(
        MIXTURE, tokenizer, HELD_OUT, folder, config, **{"validate_every": 4, "save_every": 2, **options}
    )


def test_dropout_is_the_phase_s_or_the_run_s(tmp_path, tokenizer, quick_validation, monkeypatch):
    phases = (replace(PHASES[0], dropout=0.0), PHASES[1])
    monkeypatch.setitem(globals(), "MIXTURE", replace(MIXTURE, curriculum=phases))
    seen = []

    def watched(model, *given, **named):
        seen.append({module.p for module in model.modules() if isinstance(module, PooledDropout)})
        return optimizer_step(model, *given, **named)

    monkeypatch.setattr(checkpointing, "optimizer_step", watched)
    run(tmp_path, tokenizer, replace(TOY, steps=6))
    assert seen == [{0.0}] * 4 + [{TOY.dropout}] * 2


def test_the_second_stage_goes_on_from_a_model_with_aimed_heads_and_leaves_it_alone(
    tmp_path, tokenizer, quick_validation
):
    first = run(tmp_path / "first", tokenizer, replace(TOY, steps=2))
    before = {name: value.clone() for name, value in first.state_dict().items()}
    config = replace(TOY, steps=2, warmup_steps=10**9, head_inits=(HeadInit(1, like=0, first=1, last=1),))
    second = run(tmp_path / "second", tokenizer, config, start=first)
    assert all(torch.equal(value, before[name]) for name, value in first.state_dict().items())
    aimed = continued_model(first, config).state_dict()
    assert not torch.equal(aimed["encoder.block.0.layer.0.SelfAttention.v.weight"],
                           before["encoder.block.0.layer.0.SelfAttention.v.weight"])  # fmt: skip
    for name, value in second.state_dict().items():  # rates that hardly begin to rise
        assert torch.allclose(value, aimed[name], atol=1e-5), name


@pytest.mark.long
def test_prolong_goes_back_to_before_the_learning_rate_fell(tmp_path, tokenizer, quick_validation):
    with pytest.raises(InputError, match="has not reached its decay"):
        run(tmp_path, tokenizer, prolong=True)
    run(tmp_path, tokenizer)
    falls = next(step for step in range(TOY.steps) if TOY.factor(step) == 1.0 > TOY.factor(step + 1))
    stable = torch.load(tmp_path / "stable.pt", weights_only=True)
    assert stable["step"] == falls + 1 < TOY.steps
    finished, longer = (tmp_path / "checkpoint.pt").read_bytes(), replace(TOY, steps=12)
    for wrong in (dict(config=replace(longer, seed=1)), dict(start=new_model(TOY))):
        with pytest.raises(InputError, match="was made with"):
            run(tmp_path, tokenizer, **{"config": longer, **wrong}, prolong=True)
    assert (tmp_path / "checkpoint.pt").read_bytes() == finished and (tmp_path / "stable.pt").exists()
    went_on = run(tmp_path, tokenizer, longer, prolong=True)
    assert [row["step"] for row in log(tmp_path)] == [4, 8, 12]
    at_once = run(tmp_path / "at once", tokenizer, longer)  # the same as if it had been planned so
    assert all(torch.equal(value, went_on.state_dict()[name]) for name, value in at_once.state_dict().items())


def test_from_a_file_of_pairs_to_a_model_that_loads_and_writes(tmp_path, pairs_file, few_texts, monkeypatch):
    monkeypatch.setattr(training, "mini_mixture", lambda pairs, curriculum: MIXTURE)
    config = replace(TOY, steps=2, vocab_size=400)
    folder = reproduce(pairs_file, tmp_path / "out", config, held_out=10)

    model, tokenizer = load_model(folder)
    assert model.config.d_model == 16 and len(tokenizer) <= model.config.vocab_size == 400
    assert {str(v.dtype) for v in torch.load(tmp_path / "out" / "checkpoint.pt")["model"].values()} == {"torch.float32"}
    batch = tokenizer(TRANSLATE + PAIRS[0][0], return_tensors="pt")
    assert model.generate(**batch, max_new_tokens=3).shape[0] == 1
    (row,) = log(tmp_path / "out")
    tasks = {"translation", "summaries", "questions", "composed reports", "composed questions"}
    assert set(row) == {"step", "train_loss", *tasks, "seconds"}
    assert asdict(config) == torch.load(tmp_path / "out" / "checkpoint.pt")["config"]

    made = (tmp_path / "out" / "tokenizer" / "tokenizer.json").stat().st_mtime_ns
    monkeypatch.setattr(training, "train_tokenizer", lambda *_: pytest.fail("the vocabulary of a run stays as it is"))
    assert reproduce(pairs_file, tmp_path / "out", config, held_out=10) == folder
    assert (tmp_path / "out" / "tokenizer" / "tokenizer.json").stat().st_mtime_ns == made


def test_the_second_and_the_fourth_stage_keep_the_vocabulary_and_have_curricula_of_their_own(
    tmp_path, pairs_file, made_before, monkeypatch, quick_validation
):
    seen = []

    def watched(mixture, tokenizer, held_out, folder, config, *, start, prolong, device):
        seen.append((mixture.curriculum, config, start.dtype))
        return start

    found, looked_at = (HeadInit(1, like=0, first=1, last=1),), []
    monkeypatch.setattr(training, "choose_head_inits", lambda *given: looked_at.append(given) or found)
    monkeypatch.setattr(training, "train_model", watched)
    for config in (TOY, replace(TOY, head_inits=None)):
        folder = reproduce(pairs_file, tmp_path / "out", config, stage=2, start=str(made_before), held_out=10)
    assert seen == [(SECOND_CURRICULUM, replace(TOY, head_inits=inits), torch.float32) for inits in ((), found)]
    ((model, batches),) = looked_at  # only where no head_inits were given
    assert model.config.d_model == 16 and batches
    kept = (made_before / "tokenizer.json").read_text()
    assert json.loads((folder / "tokenizer.json").read_text())["model"] == json.loads(kept)["model"]
    assert not (tmp_path / "out" / "tokenizer").exists()
    reproduce(pairs_file, tmp_path / "fourth", TOY, stage=4, start=str(made_before), held_out=10)
    assert seen[-1][0] == FOURTH_CURRICULUM and not (tmp_path / "fourth" / "tokenizer").exists()


def test_the_third_stage_has_a_vocabulary_of_its_own_and_goes_on_when_called_again(
    tmp_path, tokenizer, pairs_file, made_before, few_texts, monkeypatch, quick_validation
):
    seen = []

    def watched(mixture, tokenizer, held_out, folder, config, *, start, prolong, device):
        seen.append((mixture.curriculum, start.config.num_layers, start.config.num_decoder_layers, len(tokenizer)))
        return start

    monkeypatch.setattr(training, "train_model", watched)
    config = replace(TOY, num_layers=TOY.num_layers + 2, vocab_size=420)
    for _ in range(2):
        folder = reproduce(pairs_file, tmp_path / "out", config, stage=3, start=str(made_before), held_out=10)
        monkeypatch.setattr(training, "train_tokenizer", lambda *_: pytest.fail("a run keeps its vocabulary"))
    model, made = load_model(folder)
    assert seen == [(THIRD_CURRICULUM, TOY.num_layers + 2, TOY.num_layers, len(made))] * 2
    assert len(made) != len(tokenizer) and model.config.vocab_size == 420


def test_a_grown_model_computes_what_the_old_one_did(tokenizer):
    start = new_model(replace(TOY, num_layers=2)).half().eval()
    model = grow_model(start, tokenizer, tokenizer, num_layers=5, vocab_size=len(tokenizer) + 7).eval()
    batch = tokenizer([TRANSLATE + PAIRS[0][0]], return_tensors="pt")
    answer = torch.tensor([[0, 9, 8, 7]])
    with torch.no_grad():
        logits = model(**batch, decoder_input_ids=answer).logits
        expected = start.float()(**batch, decoder_input_ids=answer).logits
    assert model.config.num_layers == 5 and model.dtype == torch.float32
    assert torch.allclose(logits[..., : len(tokenizer)], expected[..., : len(tokenizer)], atol=1e-5)
    assert torch.equal(model.get_output_embeddings().weight, model.shared.weight)
    for layers, pieces in ((1, 500), (2, 100)):  # it does not shrink
        with pytest.raises(InputError, match="num_layers"):
            grow_model(start, tokenizer, tokenizer, num_layers=layers, vocab_size=pieces)


def test_a_new_piece_begins_as_the_mean_of_the_old_pieces_that_it_consists_of(tokenizer):
    start = new_model(TOY).eval()
    other = train_tokenizer([*CORPUS, "zebrafish zebrafishes"] * 3, vocab_size=260)
    model = grow_model(start, tokenizer, other, num_layers=TOY.num_layers, vocab_size=260)
    (piece,) = set(other.get_vocab()) & {"▁zebrafish"}
    consists_of = tokenizer("zebrafish", add_special_tokens=False).input_ids
    assert len(consists_of) > 1 and tokenizer.unk_token_id not in consists_of
    assert torch.allclose(model.shared.weight[other.get_vocab()[piece]], start.shared.weight[consists_of].mean(0))
    shared = set(other.get_vocab()) & set(tokenizer.get_vocab())
    for text in shared:
        was, now = tokenizer.get_vocab()[text], other.get_vocab()[text]
        assert torch.equal(model.shared.weight[now], start.shared.weight[was])


def test_a_stage_and_its_start_belong_together_and_a_bad_configuration_is_refused(tmp_path, pairs_file):
    for stage, start in ((0, None), (1, "mini"), (2, None), (4, None), (5, "mini"), (2, "random:t5-small")):
        with pytest.raises(InputError, match="start must have a tokenizer" if start == "random:t5-small" else "stage"):
            reproduce(pairs_file, tmp_path / "out", TOY, stage=stage, start=start, held_out=10)
    assert not (tmp_path / "out").exists()
    for wrong in ({"steps": 0}, {"steps": -5}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            TrainConfig(**wrong)
