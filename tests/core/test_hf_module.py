"""An accelerated model where transformers' users meet it: stored settings, Trainer, masks, the hub, copies, its end."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from refused import refused
from silence import quiet
from test_hf import SHORT, V5, Log, behind, check, decoder_ids, on_onnx, reference
from transformers import Seq2SeqTrainer

from t5accel.api import accelerate
from t5accel.backends.hf_generate import AcceleratedT5
from t5accel.backends.ort_static import OrtStatic
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import InputError
from t5accel.models.families import BEYOND_T5
from t5accel.models.random_init import random_model
from t5accel.parity import assert_close

SIZES = dict(
    d_model=32, vocab_size=300, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=1, eos_token_id=2,
    decoder_start_token_id=2, max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def batch(padded_batch) -> dict[str, torch.Tensor]:
    ids, mask = padded_batch
    return {"input_ids": torch.as_tensor(ids), "attention_mask": torch.as_tensor(mask)}


@pytest.fixture
def static(exported) -> AcceleratedT5:
    """A model of one's own on ONNX Runtime, over an export that is shared."""
    return AcceleratedT5.from_pretrained(exported())


# --------------------------------------------------------------------------------------------------- what is configured


@pytest.mark.parametrize("stored", [["output_hidden_states"], ["output_attentions"], ["output_attentions",
                                    "output_hidden_states", "return_dict_in_generate", "output_scores"]])  # fmt: skip
def test_outputs_that_only_a_stored_setting_asks_for(tiny_t5, batch, stored: list[str]) -> None:
    own = copy.deepcopy(tiny_t5())
    own.generation_config.update(**dict.fromkeys(stored, True))
    ours, expected = behind(TorchEager(own), own), reference(tiny_t5(), batch, **SHORT)
    # As a pipeline does, which hands on a copy of the model's own configuration.
    for given in ({}, {"generation_config": copy.deepcopy(ours.generation_config)}):
        found = ours.generate(**batch, **SHORT, **given)
        if "return_dict_in_generate" in stored:
            assert len(found.scores) == 10
            found = found.sequences
        assert torch.equal(found, expected)
    refused(partial(ours.generate, **batch, **SHORT), "output_hidden_states", True)
    given = copy.deepcopy(ours.generation_config)
    given.output_attentions = True
    refused(partial(ours.generate, **batch, **SHORT), "generation_config", given, match="output_attentions")
    assert all(getattr(own.generation_config, name) for name in stored), "the configuration given stays as it is"


@pytest.mark.parametrize("runtime", ["onnx", "torch"])
def test_a_model_whose_config_asks_for_tuples_is_checked_and_answers(tiny_t5, batch, runtime: str) -> None:
    own = copy.deepcopy(tiny_t5())
    own.config.return_dict = False
    ours = accelerate(own, runtime=runtime, progress=False)
    assert torch.equal(ours.generate(**batch, **SHORT), reference(tiny_t5(), batch, **SHORT))
    assert isinstance(ours(**batch, decoder_input_ids=decoder_ids(6, 3)), tuple)


def test_a_cache_that_is_configured_away_is_used_with_one_warning(tiny_t5, batch) -> None:
    own = copy.deepcopy(tiny_t5())
    own.generation_config.use_cache = False
    with pytest.warns(UserWarning, match="use_cache=False") as warned:
        ours = behind(TorchEager(own), own)
    assert len(warned) == 1
    log, expected = Log(ours.backend), reference(tiny_t5(), batch, max_new_tokens=3)
    with quiet():
        assert torch.equal(ours.generate(**batch, max_new_tokens=3), expected)
    assert log.stepped == [(6, 1, 1)] * 3
    assert torch.equal(ours.generate(**batch, max_new_tokens=3, use_cache=False), expected)
    assert log.stepped[3:] == [(6, 1, 1), (6, 1, 2), (6, 1, 3)]


# -------------------------------------------------------------------------------------------------------------- Trainer


def labelled(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    labels = decoder_ids(6, 5)
    labels[1, 3:] = labels[4, 2:] = -100
    return {**batch, "labels": labels}


@pytest.mark.parametrize("generates", [True, False])
def test_trainer_predicts_and_does_not_train(tiny_t5, mini, batch, tmp_path: Path, generates: bool) -> None:
    pytest.importorskip("accelerate")
    given = labelled(batch)
    rows = [{name: values[row].tolist() for name, values in given.items()} for row in range(6)]
    own, found = tiny_t5("shallower-decoder"), []
    arguments = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=generates, generation_max_length=9, per_device_eval_batch_size=4,
        per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True, max_steps=1,
    )  # fmt: skip
    for model in (copy.deepcopy(own), behind(on_onnx(own), own)):
        collator = transformers.DataCollatorForSeq2Seq(mini[1], model=model)
        trainer = Seq2SeqTrainer(model, arguments, collator, train_dataset=rows, eval_dataset=rows)
        found.append((trainer.predict(rows), trainer.evaluate()["eval_loss"]))
    (expected, loss), (ours, our_loss) = found
    assert abs(loss - our_loss) < 1e-4 and abs(expected.metrics["test_loss"] - ours.metrics["test_loss"]) < 1e-4
    theirs = expected.predictions if generates else expected.predictions[0]
    assert_close(torch.tensor(ours.predictions), torch.tensor(theirs), atol=1e-4)
    with pytest.raises(InputError, match="inference only"):
        trainer.train()


# ---------------------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int32])
def test_masks_of_each_type(tiny_t5, static, batch, dtype: torch.dtype) -> None:
    given = {**batch, "attention_mask": batch["attention_mask"].to(dtype)}
    tokens = decoder_ids(6, 3)
    prefix = dict(decoder_input_ids=tokens, decoder_attention_mask=torch.ones(6, 3, dtype=dtype))
    with torch.no_grad():
        assert_close(static(**given, **prefix).logits, tiny_t5()(**batch, decoder_input_ids=tokens).logits, atol=1e-4)
    check(tiny_t5(), static, given, num_beams=2, **SHORT)
    halves = torch.full((6, 9), 0.5)
    refused(partial(static.generate, batch["input_ids"]), "attention_mask", halves, halves * torch.nan)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_row_whose_mask_hides_all_of_it(tiny_t5, static, batch, num_beams: int) -> None:
    mask = batch["attention_mask"].clone()
    mask[2] = 0
    options, own = dict(num_beams=num_beams, **SHORT), tiny_t5()
    found = static.generate(batch["input_ids"], attention_mask=mask, **options)
    others = torch.arange(6) != 2
    assert torch.equal(found[others], static.generate(**batch, **options)[others])
    assert torch.equal(found, reference(own, {**batch, "attention_mask": mask}, **options))
    cached = behind(EncoderCache(static.backend), own)
    refused(partial(cached.generate, batch["input_ids"]), "attention_mask", mask, match="all zero in row 2")


@pytest.mark.parametrize("name", ["bart", "pegasus"])
def test_such_a_row_in_other_families(batch, name: str) -> None:
    own = random_model(BEYOND_T5[name], SIZES, seed=3)
    ours, mask = behind(on_onnx(own), own), batch["attention_mask"].clone()
    mask[2] = 0
    if V5:  # where these attend to nothing, and the graphs to everything
        refused(partial(ours.generate, batch["input_ids"]), "attention_mask", mask, match="all zero in row 2")
    else:
        check(own, ours, {**batch, "attention_mask": mask}, **SHORT)


# -------------------------------------------------------------------------------------------------------------- forward


@torch.no_grad()
@pytest.mark.parametrize("name", BEYOND_T5)
def test_forward_without_decoder_ids(batch, name: str) -> None:
    own = random_model(BEYOND_T5[name], SIZES, seed=3)
    ours = behind(TorchEager(own), own)
    ids = batch["input_ids"].clone()
    ids[:, -1] = 2  # mBART takes the last token that is no padding for the language
    if name in ("bart", "mbart"):
        assert_close(ours(ids, batch["attention_mask"]).logits, own(ids, batch["attention_mask"]).logits, atol=1e-4)
        assert_close(ours(ids, labels=ids).loss, own(ids, labels=ids).loss, atol=1e-4)
    else:
        with pytest.raises(ValueError):
            own(ids)
        refused(ours, "input_ids", ids, match="nothing to decode")


@pytest.mark.parametrize("text", ["text", ["a", "b"], ("a",)])
def test_text_in_place_of_token_ids(static, text: Any) -> None:
    for call in (static, static.generate, static.encoder):
        refused(call, "input_ids", text, match="got text")
    refused(static.generate, "inputs", text, match="got text")


def test_other_things_in_place_of_token_ids(static, batch) -> None:
    whole = transformers.BatchEncoding(batch)
    for call in (static, static.generate):
        refused(call, "input_ids", whole, match="input_ids")
    refused(
        static.generate, "inputs", batch["input_ids"].tolist(), batch["input_ids"].numpy(), match="must be a tensor"
    )


# -------------------------------------------------------------------------------------------------------- what it is


@pytest.mark.parametrize("kind", ["deeper-decoder", "gated-untied", "umt5"])
def test_the_count_of_parameters(tiny_t5, exported, kind: str) -> None:
    own = tiny_t5(kind)
    for ours in (AcceleratedT5.from_pretrained(exported(kind)), behind(TorchEager(own), own)):
        for options in ({}, {"exclude_embeddings": True}):
            assert ours.num_parameters(**options) == own.num_parameters(**options) > 0
        assert ours.num_parameters(only_trainable=True) == 0
    assert behind(TorchEager(own), own).get_memory_footprint() == own.get_memory_footprint()


def test_the_count_of_parameters_of_a_pruned_model() -> None:
    from t5accel.models.load import load_model

    own = load_model("mini-d1p")[0]
    ours = behind(on_onnx(own), own)
    assert ours.config.layer_widths and ours.num_parameters() == own.num_parameters()


def test_device_dtype_and_words(tiny_t5, static, exported) -> None:
    parameter = next(static.parameters())
    assert (parameter.device, parameter.dtype) == (static.device, static.dtype) == (torch.device("cpu"), torch.float32)
    assert static.get_memory_footprint() >= 4 * static.num_parameters()
    said = repr(static)
    for part in ("AcceleratedT5(t5, ONNX Runtime, fp32, cpu", " threads", " MB", str(exported())):
        assert part in said
    half = accelerate(tiny_t5(), runtime="torch", precision="bf16")
    assert half.dtype == torch.bfloat16 and repr(half).startswith("AcceleratedT5(t5, torch, bfloat16, cpu")
    assert half.to(torch.bfloat16) is half and half.bfloat16() is half
    refused(half.to, "dtype", torch.float32, match="holds no weights to move")


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_a_gpu_that_is_not_there(static) -> None:
    for move in (static.cuda, partial(static.to, "cuda"), partial(static.to, "cuda:0")):
        with pytest.raises(InputError, match="runs in torch.float32 on cpu.*accelerate"):
            move()
    assert static.to(static.device) is static


@pytest.mark.gpu
@pytest.mark.parametrize("runtime", [None, "onnx"])
def test_tensors_on_the_gpu(tiny_t5, batch, runtime: str | None) -> None:
    if runtime and "CUDAExecutionProvider" not in pytest.importorskip("onnxruntime").get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    own = tiny_t5()
    ours = accelerate(own, device="cuda:0", runtime=runtime, progress=False)
    assert ours.device == torch.device("cuda", 0) and ours.to("cuda") is ours.cuda() is ours
    there = {name: tensor.to(ours.device) for name, tensor in batch.items()}
    for options in ({}, dict(num_beams=3), dict(do_sample=True, top_k=1)):
        found = ours.generate(**there, **SHORT, **options)
        assert found.device == ours.device and torch.equal(found.cpu(), reference(own, batch, **SHORT, **options))
        encoded = ours.encoder(**there)
        assert torch.equal(ours.generate(encoder_outputs=encoded, **SHORT, **options).cpu(), found.cpu())
    labels = decoder_ids(6, 3)
    loss = ours(**there, labels=labels.to(ours.device)).loss
    assert_close(loss.cpu(), own(**batch, labels=labels).loss.detach(), atol=1e-3)
    refused(ours.to, "device", "cpu", match="holds no weights to move")


# ------------------------------------------------------------------------------------------------- saving and the hub


class Hub:
    """What the model hub is asked for."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.repositories: list[str] = []

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        self.repositories.append(repo_id)
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def create_commit(self, repo_id: str, operations: Any, **_: Any) -> str:
        self.files = {one.path_in_repo: Path(one.path_or_fileobj).stat().st_size for one in operations}
        return repo_id


@pytest.fixture
def hub(monkeypatch) -> Hub:
    from transformers.utils import hub as place

    fake = Hub()
    if V5:
        monkeypatch.setattr(place, "hf_api", lambda *_, **__: fake)
    else:
        monkeypatch.setattr(place, "create_repo", fake.create_repo)
        monkeypatch.setattr(place, "create_commit", fake.create_commit)
    card = SimpleNamespace(save=lambda path: Path(path).write_text("card"))
    monkeypatch.setattr(place, "create_and_tag_model_card", lambda *_, **__: card)
    return fake


def test_push_to_hub(static, exported, hub, tmp_path: Path, monkeypatch) -> None:
    there = {path.name for path in exported().iterdir()}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-t5").mkdir()  # into which transformers 4.57 would save
    (tmp_path / "my-t5" / "mine").touch()
    assert static.push_to_hub("my-t5") == "me/my-t5" and hub.repositories == ["my-t5"]
    assert set(hub.files) == {*there, "README.md"} and all(hub.files.values())
    static.save_pretrained("new", push_to_hub=True)
    assert hub.repositories == ["my-t5", "new"]


def test_save_pretrained_takes_the_arguments_of_transformers(static, hub, batch, tmp_path: Path) -> None:
    static.save_pretrained(
        tmp_path / "new", max_shard_size="1GB", safe_serialization=False, save_peft_format=True, state_dict=None,
        variant=None, token=None,
    )  # fmt: skip
    again = AcceleratedT5.from_pretrained(tmp_path / "new")
    assert torch.equal(again.generate(**batch, **SHORT), static.generate(**batch, **SHORT)) and not hub.repositories
    static.save_pretrained(tmp_path / "my-t5", push_to_hub=True, commit_message="mine")
    assert hub.repositories == ["my-t5"] and "manifest.json" in hub.files
    static.save_pretrained(tmp_path / "other", push_to_hub=True, repo_id="named")
    assert hub.repositories[-1] == "named"
    static.save_pretrained(tmp_path / "none", is_main_process=False)
    assert not (tmp_path / "none").exists()
    call = partial(static.save_pretrained, tmp_path / "refused")
    for name, value in (("state_dict", {}), ("variant", "fp16"), ("save_function", torch.save), ("max_shards", 3)):
        refused(call, name, value)
    assert not (tmp_path / "refused").exists()


# ------------------------------------------------------------------------------------------------- copies and the end


def test_a_copy_keeps_what_was_changed(static, batch) -> None:
    static.generation_config.update(num_beams=2, max_length=7)
    static.config.note, static.tokenizer = "mine", {"any": 1}
    for found in (pickle.loads(pickle.dumps(static)), copy.deepcopy(static)):
        assert isinstance(found.backend, OrtStatic) and found.backend is not static.backend
        assert (found.config.note, found.tokenizer) == ("mine", {"any": 1})
        answer = found.generate(**batch)
        assert answer.shape[1] == 7 and torch.equal(answer, static.generate(**batch))


class Answering(torch.utils.data.Dataset):
    """A data set whose worker asks the model, as when it translates what it reads."""

    def __init__(self, model: AcceleratedT5):
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> torch.Tensor:
        ids = torch.tensor([[5 + row, 17, 44, 8, 1]])
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4)[0]


@pytest.mark.long
def test_a_spawning_data_loader(static) -> None:
    rows = Answering(static)
    loader = torch.utils.data.DataLoader(rows, num_workers=1, multiprocessing_context="spawn")
    assert [found[0].tolist() for found in loader] == [rows[row].tolist() for row in range(2)]


def test_close(tiny_t5, static, batch, tmp_path: Path) -> None:
    with static as model:
        assert model is static
        backend, state = model.backend, model(**batch, decoder_input_ids=decoder_ids(6, 1)).past_key_values
    static.close()
    assert repr(static) == "AcceleratedT5(closed)"
    uses = [
        partial(static.generate, **batch), partial(static, **batch, decoder_input_ids=decoder_ids(6, 1)),
        partial(static.encoder, **batch), partial(static.save_pretrained, tmp_path / "new"), static.num_parameters,
        lambda: static.device, partial(greedy, backend, batch["input_ids"], max_new_tokens=2),
        partial(backend.step, state.state, decoder_ids(6, 1)[:, None].numpy()), partial(pickle.dumps, backend),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(InputError, match="closed"):
            use()
    own = tiny_t5()
    with behind(TorchEager(own), own) as other:
        pass
    refused(other.generate, "input_ids", batch["input_ids"], match="closed")
    check(own, behind(TorchEager(own), own), batch, **SHORT)  # the model given is still its owner's


def test_close_frees_memory(exported) -> None:
    """Sessions and buffers, though the backend is still held."""
    import weakref

    model = AcceleratedT5.from_pretrained(exported())
    backend, session = model.backend, weakref.ref(model.backend.encoder)
    model.close()
    assert session() is None and set(vars(backend)) == {"is_closed"}
