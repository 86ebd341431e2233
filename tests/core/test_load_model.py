"""Models by name: the bundled one, folders, seeded random weights that are lively, and a clear sentence otherwise."""

from __future__ import annotations

import ast
import copy
import io
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from refused import refused
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer

from t5accel import AcceleratedEncoder, accelerate
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.greedy_search import greedy
from t5accel.distillation.importance import Gates
from t5accel.distillation.pruning import prune_to
from t5accel.errors import InputError, ModelUnavailableError, NotT5Error, UnknownModelError
from t5accel.graphs.export import export_model
from t5accel.models import load as checkpoints
from t5accel.models.load import HUB_ALIASES, load_model
from t5accel.models.random_init import RANDOM_SIZES, random_t5
from t5accel.models.sizes import T5Dims
from t5accel.parity import assert_varied
from t5accel.tokenization import tokenizer_of

V5 = int(transformers.__version__.split(".")[0]) >= 5
# Parameters of the published checkpoints (a tied head counted once), so that our table is checked against the world.
PUBLISHED = {
    "t5-small": 60_506_624, "t5-base": 222_903_552, "t5-large": 737_668_096, "flan-t5-small": 76_961_152,
    "flan-t5-base": 247_577_856, "flan-t5-large": 783_150_080, "flan-t5-xl": 2_849_757_184, "mt5-small": 300_176_768,
    "umt5-small": 306_601_984, "byt5-small": 299_637_760,
    "madlad400-3b-mt": 2_940_374_016,  # of which its card says 2.94 billion
}  # fmt: skip


def logits_of(model: Any) -> np.ndarray:
    vocabulary = model.config.vocab_size
    with torch.inference_mode():
        return model(
            input_ids=torch.arange(3, 12)[None] * 7 % vocabulary,
            decoder_input_ids=torch.arange(4)[None] * 11 % vocabulary,
        ).logits.numpy()


# Seeded random weights


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes(size: str) -> None:
    with torch.device("meta"):  # shapes without memory
        model, tokenizer = load_model(f"random:{size}")
    assert tokenizer is None and sum(p.numel() for p in model.parameters()) == PUBLISHED[size]
    dims, table = T5Dims.of(model), RANDOM_SIZES[size]
    original = size.startswith("t5")
    assert (dims.tied, dims.gated) == (original, not original)
    assert (dims.vocab_size, dims.d_model) == (model.config.vocab_size, model.config.d_model)
    below, above = table["num_layers"], table.get("num_decoder_layers", table["num_layers"])
    assert dims.encoder_heads == (table["num_heads"],) * below
    assert dims.decoder_heads == dims.cross_heads == (table["num_heads"],) * above
    assert (dims.encoder_ff, dims.decoder_ff) == ((table["d_ff"],) * below, (table["d_ff"],) * above)
    assert (model.config.pad_token_id, model.config.eos_token_id, model.config.decoder_start_token_id) == (0, 1, 0)


@pytest.mark.parametrize("size", ["t5-small", "flan-t5-small"])
def test_published_sizes_are_lively(size: str) -> None:
    backend = TorchEager(load_model(f"random:{size}")[0])
    source = np.random.default_rng(1).integers(3, 32000, 12)
    other_tokens, other_order = np.random.default_rng(2).integers(3, 32000, 12), source[::-1]
    batch = np.stack([source, other_tokens, other_order])
    answers = greedy(backend, batch, min_new_tokens=24, max_new_tokens=24).sequences
    for answer in answers:
        assert_varied(answer, 8)
    assert len(np.unique(answers, axis=0)) == 3, "the answer should depend on the source's tokens and on their order"


def test_deterministic_per_seed_and_different_across_seeds(tiny_t5, kind: str) -> None:
    build = tiny_t5.__wrapped__  # without the fixture's cache
    first, again, other = (build(kind, seed=seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    changed = {name for name in first if not torch.equal(first[name], other[name])}
    constant = {name for name in first if name.endswith("layer_norm.weight")} - {"decoder.final_layer_norm.weight"}
    assert changed == set(first) - constant


def test_leaves_the_random_state_alone(tiny_t5, kind: str) -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    tiny_t5.__wrapped__(kind, seed=9)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()


@pytest.mark.parametrize("kind", ["t5", "mt5", "umt5"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_or_not_as_asked_and_saved_so(kind: str, tied: bool, tmp_path: Path) -> None:
    sizes = dict(vocab_size=50, d_model=16, d_kv=6, d_ff=16, num_heads=2, num_layers=1, tie_word_embeddings=tied)
    model = random_t5(sizes, kind=kind)
    assert T5Dims.of(model).tied == tied
    assert (model.lm_head.weight.data_ptr() == model.shared.weight.data_ptr()) == tied
    model.save_pretrained(tmp_path)
    loaded, _ = load_model(tmp_path)
    assert T5Dims.of(loaded).tied == tied
    np.testing.assert_allclose(logits_of(loaded), logits_of(model), atol=1e-5)


# T5Dims


def test_dims_from_a_configuration_are_those_of_its_weights(tiny_t5, kind: str) -> None:
    def from_config(model):
        dims = T5Dims.from_config(model.config.to_dict())
        return replace(dims, tied=T5Dims.of(model).tied) if V5 else dims  # there a configuration always says True

    model = tiny_t5(kind)
    assert from_config(model) == T5Dims.of(model)
    narrow = prune_to(model, {name: every[1:] for name, every in Gates(model).kept().items()})
    dims = from_config(narrow)
    assert dims == T5Dims.of(narrow) and dims.decoder_ff != T5Dims.of(model).decoder_ff


def test_dims_of_something_else() -> None:
    things = (None, "mini", 5, torch.nn.Linear(1, 1))
    refused(lambda model: T5Dims.of(model), "model", *things, match="t5, mt5, umt5", error=NotT5Error)
    with pytest.raises(NotT5Error, match="bert.json is of type 'bert'"):
        T5Dims.from_config({"model_type": "bert"}, "bert.json")
    with pytest.raises(ModelUnavailableError, match="d_kv"):
        T5Dims.from_config({key: value for key, value in RANDOM_SIZES["t5-small"].items() if key != "d_kv"})


# The bundled model and folders


def test_mini_survives_save_pretrained(mini, tmp_path: Path) -> None:
    model, tokenizer = mini
    copy.deepcopy(model).to(torch.float16).save_pretrained(tmp_path)
    assert load_model(tmp_path)[0].dtype == torch.float32 and load_model(tmp_path)[1] is None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for where in (tmp_path, str(tmp_path)):
        loaded, loaded_tokenizer = load_model(where)
        assert loaded.dtype == torch.float32 and not loaded.training
        np.testing.assert_array_equal(logits_of(loaded), logits_of(model))
        assert loaded_tokenizer("Il a 12 ans !")["input_ids"] == tokenizer("Il a 12 ans !")["input_ids"]


@pytest.fixture
def saved(tiny_t5, tmp_path: Path) -> Path:
    """A folder with a tiny model and no tokenizer."""
    tiny_t5().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vocabularies without a ``tokenizer.json``: of byte pairs, of sentencepiece, and of whole words."""
    folder = tmp_path_factory.mktemp("vocabularies")
    text = folder / "text.txt"
    text.write_text("\n".join(f"the house number {number} is small" for number in range(300)))
    pairs = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pairs.train([str(text)], vocab_size=330, special_tokens=special, show_progress=False)
    pairs.save_model(str(folder))
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    options = dict(vocab_size=60, hard_vocab_limit=False, minloglevel=2, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    trainer.train(input=str(text), model_prefix=str(folder / "pieces"), **options)
    (folder / "vocab.txt").write_text("\n".join("[PAD] [UNK] [CLS] [SEP] [MASK] the house".split()))
    return folder


@pytest.mark.parametrize(
    "kind, files, named",
    [("bart", ["merges.txt", "vocab.json"], {}),
     ("t5", ["merges.txt", "vocab.json"], {"tokenizer_class": "RobertaTokenizer"}),  # CodeT5's
     ("t5", ["spiece.model"], {}), ("t5", ["tokenizer.model"], {}), ("mbart", ["sentencepiece.bpe.model"], {}),
     ("bart", ["vocab.txt"], {"tokenizer_class": "BertTokenizer"}), ("t5", [], {"tokenizer_class": "ByT5Tokenizer"})],
)  # fmt: skip
def test_a_tokenizer_by_its_vocabulary_files_alone(
    vocabularies: Path, tmp_path: Path, kind: str, files: list[str], named: dict[str, str]
) -> None:
    """The same ids as by transformers, from whichever files of a vocabulary transformers reads."""
    rewrite(tmp_path / "config.json", model_type=kind, **named)
    for name in files:
        shutil.copy(vocabularies / ("pieces.model" if name.endswith(".model") else name), tmp_path / name)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)("the house", return_tensors="np")["input_ids"]
    for ours in (checkpoints.load_tokenizer(tmp_path), tokenizer_of(tmp_path)):
        np.testing.assert_array_equal(ours(["the house"], return_tensors="np")["input_ids"], theirs)


@pytest.mark.parametrize("files", [["merges.txt", "vocab.json"], ["tokenizer_config.json"]])
def test_a_tokenizer_without_its_vocabulary_is_refused(saved: Path, vocabularies: Path, files: list[str]) -> None:
    """transformers 5 makes a T5Tokenizer of nothing, which knows no word."""
    for name in files:
        content = (vocabularies / name).read_bytes() if (vocabularies / name).exists() else b"{}"
        (saved / name).write_bytes(content)
    with pytest.raises(ModelUnavailableError, match="spiece.model" if V5 else "cannot be loaded"):
        load_model(saved)


def drop_a_layer(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "decoder.block.2" not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


DAMAGES: dict[str, Callable[[Path], Any] | dict[str, Any]] = {
    "nothing": lambda folder: [path.unlink() for path in folder.iterdir()],
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "half of the weights": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    "a header cut short": {"model.safetensors": "12345"},
    "a layer less": drop_a_layer,
    "wider than its weights": lambda folder: (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"d_model": 32', '"d_model": 64')),
    "half a configuration": {"config.json": '{"model_type": "t5"'},
    "a list as configuration": {"config.json": "[]"},
    "nothing as configuration": {"config.json": "null"},
    "a configuration nested without end": {"config.json": "[" * 100_000},
    "layers without end": lambda folder: rewrite(folder / "config.json", num_layers=10**9),
    "no type": {"config.json": "{}"},
    "weights of TensorFlow alone": lambda folder: (folder / "model.safetensors").rename(folder / "tf_model.h5"),
    "a text as size": {"config.json": '{"model_type": "t5", "d_model": "wide"}'},
    "a broken tokenizer": {
        "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}', "tokenizer.json": "{}"},
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_named(saved: Path, name: str) -> None:
    load_model(saved)
    damage = DAMAGES[name]
    if isinstance(damage, dict):
        for file, content in damage.items():
            (saved / file).write_text(content)
    else:
        damage(saved)
    with pytest.raises(ModelUnavailableError) as caught:
        load_model(saved)
    assert str(saved) in str(caught.value) and isinstance(caught.value, OSError)


def test_weights_that_the_model_does_not_have_are_not_dropped(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors") | {"encoder.block.0.adapter.down.weight": torch.ones(2, 2)}
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnavailableError, match=r"1 weights .* such as encoder\.block\.0\.adapter\.down"):
        load_model(saved)


# What the files hold, and what transformers makes of it


EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def untied(folder: Path, held: tuple[str, ...], form: str = "safetensors") -> Any:
    """An untied T5 in a folder whose files hold its embedding under these names; returns the model."""
    sizes = dict(d_model=16, d_kv=8, d_ff=32, num_heads=2, num_layers=2, vocab_size=60, feed_forward_proj="gated-gelu")
    model = random_t5(sizes | dict(tie_word_embeddings=False))
    weights = {name: weight.clone() for name, weight in model.state_dict().items() if name not in EMBEDDINGS}
    weights |= {name: model.shared.weight.detach().clone() for name in held}
    model.config.save_pretrained(folder)
    if form == "safetensors":
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        save_file({"shared.weight": model.lm_head.weight}, folder / "model.fp16.safetensors")  # which nobody reads
    elif form == "shards":
        shards = {f"model-0000{i}-of-00002.safetensors": sorted(weights)[i - 1 :: 2] for i in (1, 2)}
        for file, names in shards.items():
            save_file({name: weights[name] for name in names}, folder / file, metadata={"format": "pt"})
        places = {name: file for file, names in shards.items() for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    else:
        new = form == "archive"
        torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    return model


@pytest.mark.parametrize(
    ("form", "held"),
    [
        *(("safetensors", held) for held in (EMBEDDINGS, EMBEDDINGS[:1], EMBEDDINGS[1:2], EMBEDDINGS[1:])),
        *((form, EMBEDDINGS[2:]) for form in ("safetensors", "shards", "archive", "pickle of before torch 1.6")),
    ],
)
def test_an_untied_embedding_under_any_of_its_names(tmp_path: Path, held: tuple[str, ...], form: str) -> None:
    """MADLAD-400's files hold the decoder's alone."""
    model = untied(tmp_path, held, form)
    np.testing.assert_array_equal(logits_of(load_model(tmp_path)[0]), logits_of(model))


@pytest.mark.parametrize("held", [EMBEDDINGS[1:2], EMBEDDINGS[2:], EMBEDDINGS[1:]])
def test_an_embedding_that_transformers_takes_from_the_head_is_put_right(
    tmp_path: Path, monkeypatch, held: tuple[str, ...]
) -> None:
    """As releases 5.0 to 5.17 do, silently: a name that the files lack is filled with the head."""
    saved, load = untied(tmp_path, held), checkpoints.load_pretrained
    expected = logits_of(saved)

    def as_in_5_17(from_pretrained: Any, where: Any, **options: Any) -> Any:
        found = load(from_pretrained, where, **options)
        if "output_loading_info" in options:
            model = found[0].eval()
            right, head = saved.shared.weight.detach().clone(), saved.lm_head.weight.detach().clone()
            parts = [torch.nn.Embedding.from_pretrained(right if name in held else head) for name in EMBEDDINGS]
            model.shared, model.encoder.embed_tokens, model.decoder.embed_tokens = parts
            assert not np.allclose(logits_of(model), expected) or held == EMBEDDINGS[1:]
        return found

    monkeypatch.setattr(checkpoints, "load_pretrained", as_in_5_17)
    model = load_model(tmp_path)[0]
    np.testing.assert_array_equal(logits_of(model), expected)
    for part in (model.shared, model.encoder.embed_tokens, model.decoder.embed_tokens):
        assert torch.equal(part.weight, saved.shared.weight)


def test_a_model_object_with_two_embeddings_is_refused(tmp_path: Path) -> None:
    model = untied(tmp_path, EMBEDDINGS[:1])
    model.encoder.embed_tokens = torch.nn.Embedding.from_pretrained(model.lm_head.weight.detach().clone())
    with pytest.raises(InputError, match="one embedding for encoder and decoder"):
        accelerate(model)


@pytest.mark.parametrize("name", ["lm_head.weight", "encoder.block.1.layer.0.SelfAttention.q.weight"])
def test_a_weight_that_is_not_the_files_is_refused(tmp_path: Path, monkeypatch, name: str) -> None:
    untied(tmp_path, EMBEDDINGS[:1])
    load = checkpoints.load_pretrained

    def wrong(*arguments: Any, **options: Any) -> Any:
        found = load(*arguments, **options)
        if "output_loading_info" in options:
            found[0].get_parameter(name).data.normal_()
        return found

    monkeypatch.setattr(checkpoints, "load_pretrained", wrong)
    with pytest.raises(ModelUnavailableError, match=f"hold a {name} that transformers"):
        load_model(tmp_path)


def test_a_head_that_the_configuration_ties_away_is_refused(tmp_path: Path) -> None:
    """transformers 4.57 drops it, and 5 uses it."""
    untied(tmp_path, EMBEDDINGS[:1])
    rewrite(tmp_path / "config.json", tie_word_embeddings=True, transformers_version="4.57.6")
    with pytest.raises(ModelUnavailableError, match=r"lm_head\.weight .* set tie_word_embeddings to false"):
        load_model(tmp_path)


def test_two_embeddings_are_refused(tmp_path: Path) -> None:
    untied(tmp_path, EMBEDDINGS[1:])
    weights = load_file(tmp_path / "model.safetensors")
    weights[EMBEDDINGS[1]] = weights[EMBEDDINGS[1]] + 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnavailableError):
        load_model(tmp_path)


# Code beside weights


TOUCH = "import pathlib; pathlib.Path({marker!r}).touch()\n"


class Pickled:
    """Unpickling it touches a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def rewrite(path: Path, **changed: Any) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | changed))


def with_custom_generate(folder: Path, marker: Path) -> None:
    (folder / "custom_generate").mkdir()
    code = TOUCH.format(marker=str(marker))
    (folder / "custom_generate" / "generate.py").write_text(f"{code}def generate(model, *args, **kwargs): {code}")


def mapped(file: str, **changed: Any) -> Callable[[Path, Path], None]:
    def write(folder: Path, marker: Path) -> None:
        (folder / "evil.py").write_text(TOUCH.format(marker=str(marker)) + "class Evil: pass\n")
        rewrite(folder / file, **changed)

    return write


def with_pickled_weights(folder: Path, marker: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"shared.weight": Pickled(marker)}, folder / "pytorch_model.bin")


def with_pickles_that_nobody_needs(folder: Path, marker: Path) -> None:
    for name in ("training_args.bin", "optimizer.pt", "adapter_model.bin", "pytorch_model.bin"):
        torch.save({"weight": Pickled(marker)}, folder / name)


def with_templates(folder: Path, marker: Path) -> None:
    template = f"{{{{ cycler.__init__.__globals__.os.mknod('{marker}') }}}}"
    (folder / "chat_template.jinja").write_text(template)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "other.jinja").write_text(template)
    rewrite(folder / "tokenizer_config.json", chat_template=template)


EVIL = ["evil.Evil", "evil.Evil"]
CODE: dict[str, Callable[[Path, Path], None]] = {
    "custom generate": with_custom_generate,
    "a class for the configuration": mapped("config.json", auto_map={"AutoConfig": "evil.Evil"}),
    "a class for a configuration of no known type":
        mapped("config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil"}),
    "a class for the model": mapped("config.json", auto_map={"AutoModelForSeq2SeqLM": "evil.Evil"}),
    "a class for the tokenizer": mapped("tokenizer_config.json", auto_map={"AutoTokenizer": EVIL}),
    "a class for a tokenizer of no known type":
        mapped("tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": EVIL}),
    "a kernel of a hub": mapped("config.json", attn_implementation="evil/kernel"),
    "pickled weights": with_pickled_weights,
    "pickles beside the weights": with_pickles_that_nobody_needs,
    "templates": with_templates,
}  # fmt: skip
DOORS: dict[str, Callable[[Path, Path], Any]] = {
    "load_model": lambda folder, _: load_model(folder),
    "accelerate": lambda folder, _: accelerate(folder, progress=False).generate(
        torch.tensor([[5, 6, 1]]), attention_mask=torch.ones(1, 3, dtype=torch.long), max_new_tokens=2),
    "export": lambda folder, above: export_model(folder, above / "export"),
    "tokenizer_of": lambda folder, _: tokenizer_of(folder),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "door"),
    [
        *((kind, "load_model") for kind in CODE), *((kind, "tokenizer_of") for kind in CODE if "token" in kind),
        ("custom generate", "accelerate"), ("pickled weights", "export"), ("templates", "tokenizer_of"),
    ],
)  # fmt: skip
def test_nothing_that_lies_beside_weights_runs_and_nobody_is_asked(
    tiny_t5, mini, tmp_path: Path, monkeypatch, kind: str, door: str
) -> None:
    folder, marker, typed = tmp_path / "model", tmp_path / "ran", io.StringIO("y\n" * 9)
    tiny_t5(vocab_size=mini[0].config.vocab_size).save_pretrained(folder)
    mini[1].save_pretrained(folder)
    if door == "tokenizer_of":
        (folder / "tokenizer.json").unlink()  # so that transformers is asked
    CODE[kind](folder, marker)
    monkeypatch.setattr("sys.stdin", typed)
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path / "cache"))
    with suppress(ModelUnavailableError):
        DOORS[door](folder, tmp_path)
    assert not marker.exists() and typed.tell() == 0


def test_a_folder_that_needs_its_own_code_is_refused_without_advice_to_trust_it(saved: Path, tmp_path: Path) -> None:
    CODE["a class for a configuration of no known type"](saved, tmp_path / "ran")
    with pytest.raises(ModelUnavailableError, match="without running Python code that comes with it") as caught:
        load_model(saved)
    assert "trust_remote_code" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
@pytest.mark.parametrize("name", ["config.json", "special_tokens_map.json", "generation_config.json"])
def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(saved: Path, mini, name: str) -> None:
    mini[1].save_pretrained(saved)
    (saved / name).unlink(missing_ok=True)
    os.mkfifo(saved / name)
    with pytest.raises(ModelUnavailableError, match=rf"{name} must be a regular file, got a named pipe"):
        load_model(saved)
    (saved / "tokenizer.json").unlink()
    with pytest.raises(ModelUnavailableError, match="must be a regular file"):
        tokenizer_of(saved)


def test_every_loader_of_transformers_is_called_through_our_door() -> None:
    package = Path(checkpoints.__file__).parent
    calls = {
        f"{path.relative_to(package)}: {ast.unparse(node.func)}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("from_pretrained")
        and ast.unparse(node.func).startswith("Auto")
    }  # fmt: skip
    assert not calls, "load_pretrained(AutoTokenizer.from_pretrained, folder) runs no code beside the files"


# What is no model, or another one


def small(kind: str) -> Any:
    sizes = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    sizes |= dict(d_model=16, d_kv=8, d_ff=16, num_heads=2, num_layers=1, n_embd=16, n_layer=1, n_head=2)
    sizes |= {f"{stack}_{what}": 2 for stack in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    model = getattr(transformers, kind)
    return model(model.config_class(**sizes))


class Holder(torch.nn.Module):
    """As a training framework's: it has the model, and no configuration."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model


CLASSES = {
    "T5ForSequenceClassification": "T5ForConditionalGeneration", "T5EncoderModel": "T5ForConditionalGeneration",
    "BartForQuestionAnswering": "BartForConditionalGeneration", "BartForCausalLM": "BartForConditionalGeneration",
    "GPT2LMHeadModel": "a decoder without an encoder", "BertModel": "an encoder without a decoder",
}  # fmt: skip
DOORS_FOR_OBJECTS: dict[str, Callable[[Any, Path], Any]] = {
    "accelerate": lambda model, folder: accelerate(model, progress=False),
    "accelerate in torch": lambda model, folder: accelerate(model, precision="bf16"),
    "export": lambda model, folder: export_model(model, folder / "export"),
    "torch": lambda model, folder: TorchEager(model),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_a_class_that_cannot_generate_is_refused_by_the_one_that_can(tmp_path: Path, kind: str) -> None:
    model = small(kind)
    for door in DOORS_FOR_OBJECTS.values():
        with pytest.raises(NotT5Error, match=rf"{kind} .*{CLASSES[kind]}"):
            door(model, tmp_path)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(NotT5Error, match=rf"{tmp_path}.*{CLASSES[kind]}"):
        load_model(tmp_path / "model")


WRAPPED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "DataParallel": (torch.nn.DataParallel, r"give its \.module"),
    "torch.compile": (torch.compile, r"give its \._orig_mod"),
    "a framework's module": (Holder, r"give its \.model"),
    "a pipeline or a trainer": (lambda model: type("Pipeline", (), {"model": model})(), r"give its \.model"),
    "shards": (lambda model: type("FSDPT5ForConditionalGeneration", (Holder,), {})(model), "in shards"),
    "an adapter": (
        lambda model: type("PeftModel", (Holder,), {"merge_and_unload": 1})(model), r"merge_and_unload\(\) returns"),
}  # fmt: skip


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_wrapped_model_is_refused_by_where_the_model_is(tiny_t5, tmp_path: Path, wrapped: str) -> None:
    wrap, advice = WRAPPED[wrapped]
    for door in DOORS_FOR_OBJECTS.values():
        with pytest.raises(NotT5Error, match=advice):
            door(wrap(tiny_t5()), tmp_path)


def changed(model: Any, what: str) -> Any:
    model = copy.deepcopy(model)
    if what == "distances":
        model.config.relative_attention_max_distance = 30
    elif what == "epsilon":
        model.config.layer_norm_epsilon = 1e-4
    elif what == "head":
        model.lm_head = torch.nn.Sequential(model.lm_head)
    elif what == "feed-forward":
        model.encoder.block[0].layer[1] = torch.nn.Identity()
    else:
        model.encoder.block = model.encoder.block[1:]
    return model


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("distances", "relative_attention_max_distance must be 128, as the model was built, got 30"),
        ("epsilon", "layer_norm_epsilon must be 1e-06, as the model was built, got 0.0001"),
        ("head", "must have the modules of transformers' T5"), ("feed-forward", "must have the modules of"),
        ("first layer", "must have the weight of biases by distance in layer 0"),
    ],
)  # fmt: skip
def test_a_changed_model_is_refused_by_what_is_missing(tiny_t5, tmp_path: Path, what: str, said: str) -> None:
    with pytest.raises((InputError, NotT5Error), match=said):
        export_model(changed(tiny_t5(), what), tmp_path / "export")


@pytest.mark.parametrize("junk", [None, 5, b"mini", ["mini"], {}, transformers.T5Config(), TorchEager], ids=str)
def test_what_is_no_model_is_refused_by_its_class_alone(tmp_path: Path, junk: Any) -> None:
    for door in DOORS_FOR_OBJECTS.values():
        with pytest.raises(InputError, match=f"got an object of class {type(junk).__name__}\\.$"):
            door(junk, tmp_path)


def test_an_accelerated_model_needs_no_acceleration(exported_mini, tmp_path: Path) -> None:
    model = accelerate(exported_mini)
    for door in DOORS_FOR_OBJECTS.values():
        with pytest.raises(InputError, match="accelerated already"):
            door(model, tmp_path)


@pytest.mark.parametrize("whole", [True, False])
def test_an_adapter_is_refused_also_beside_weights(saved: Path, tmp_path: Path, whole: bool) -> None:
    """transformers loads the weights without it, unless peft is installed."""
    (saved / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    if not whole:
        (saved / "config.json").unlink()
    for door in (load_model, accelerate, AcceleratedEncoder.from_pretrained):
        with pytest.raises(ModelUnavailableError, match=r"holds an adapter: .*merge_and_unload\(\)"):
            door(saved)


def test_an_adapter_on_the_hub_is_refused_as_one(offline: None, asked: list[Any], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoints, "hub_resolves", lambda: True)

    def download(_: str, name: str, **__: Any) -> str:
        if name != "adapter_config.json":
            raise FileNotFoundError(name)
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refs = tmp_path / "models--nobody--adapter" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("1" * 40)  # the hub has answered that there is no config.json
    with pytest.raises(ModelUnavailableError, match="nobody/adapter holds an adapter"):
        load_model("nobody/adapter")


def test_without_a_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkpoints, "__file__", str(tmp_path / "copied" / "checkpoints.py"))
    with pytest.raises(ModelUnavailableError, match="wheel"):
        load_model("mini")


# Names


@pytest.mark.parametrize(
    "name",
    ["nope", "mini ", "random:t5-huge", "a/b/c", "../nowhere", "é/é", "-a/b", "", "a\0b", "x" * 5000,
     "/" + "x" * 300, Path("nowhere"), b"mini", None, 5, ["mini"], Path],
)  # fmt: skip
def test_unknown_names_list_what_is_allowed(name: Any) -> None:
    with pytest.raises(UnknownModelError) as caught:
        load_model(name)
    for allowed in ("'mini'", *(f"'random:{size}'" for size in RANDOM_SIZES), "folder", "hub id"):
        assert allowed in str(caught.value)


@pytest.mark.parametrize("name", ["nobody/has-this-model", "nobody/x--y", "nobody/x.git", "nobody/" + "x" * 200])
def test_without_a_network_one_sentence_names_the_alternative(offline: None, name: str) -> None:
    with pytest.raises(ModelUnavailableError) as caught:
        load_model(name)
    message = str(caught.value)
    assert "\n" not in message and "Traceback" not in message
    for part in (repr(name), "no network", "load_model('mini')", "load_model('random:t5-small')", "folder"):
        assert part in message


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[tuple[str, dict[str, Any]]]:
    """What is asked of the hub. Every request fails with the test's parameter, an error, or an OSError."""
    import transformers

    requests: list[tuple[str, dict[str, Any]]] = []

    def fail(where: str, **options: Any) -> None:
        requests.append((where, options))
        raise getattr(request, "param", OSError("We couldn't connect to the hub.\nCheck your connection."))

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    return requests


def test_short_names_ask_for_the_originals(offline: None, asked: list[Any]) -> None:
    for name, hub_id in HUB_ALIASES.items():
        with pytest.raises(ModelUnavailableError, match=hub_id):
            load_model(name)
        # Offline, only files that are there already.
        assert asked[-1] == (hub_id, {"local_files_only": True, "trust_remote_code": False})


@pytest.mark.parametrize("reachable", ["by name", "by proxy"])
def test_a_hub_that_fails_although_it_resolves(offline: None, asked: list[Any], monkeypatch, reachable: str) -> None:
    if reachable == "by name":
        monkeypatch.setattr(checkpoints.socket, "getaddrinfo", lambda *_: [])
    else:
        monkeypatch.setenv("https_proxy", "http://proxy.invalid:3128")
    with pytest.raises(ModelUnavailableError, match=r"load_model\('mini'\)") as caught:
        load_model("google/flan-t5-small")
    assert "\n" not in str(caught.value) and isinstance(caught.value.__cause__, OSError)
    assert asked == [("google/flan-t5-small", {"local_files_only": False, "trust_remote_code": False})]


@pytest.mark.parametrize("asked", [ValueError("unknown type"), RuntimeError("size mismatch")], indirect=True)
def test_a_hub_model_that_cannot_be_read(offline: None, asked: list[Any]) -> None:
    with pytest.raises(ModelUnavailableError, match="google/flan-t5-small.*(unknown type|size mismatch)"):
        load_model("google/flan-t5-small")


def test_exceptions_from_a_proxy_are_no_proxy(offline: None, monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "localhost")
    assert not checkpoints.hub_resolves()
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:3128")
    assert checkpoints.hub_resolves()


def test_weights_that_are_no_numbers_are_read_as_the_files_say(tiny_t5, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_t5())
    with torch.no_grad():
        model.encoder.block[0].layer[0].SelfAttention.q.weight[:] = float("nan")
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)[0].state_dict()
    assert all(
        torch.equal(weight.nan_to_num(), loaded[name].nan_to_num()) for name, weight in model.state_dict().items()
    )


def test_layers_may_share_weights(tiny_t5, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_t5())
    for stack in (model.encoder, model.decoder):
        first, second = (block.layer[-1].DenseReluDense for block in stack.block[:2])
        second.wi.weight, second.wo.weight = first.wi.weight, first.wo.weight
    assert export_model(model, tmp_path / "x").files, "compared with the model"
