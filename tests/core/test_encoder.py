"""An encoder alone: equal to transformers' own, from files of either kind, in a stream, and embeddings of texts."""

import copy
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import GATED, TINY
from safetensors.torch import load_file, save_file
from test_families import GEMMA_KINDS, gemma_sizes, ids_of

from t5accel import AcceleratedEncoder, accelerate
from t5accel.api import open_backend
from t5accel.encoder import quantize_encoder
from t5accel.errors import ExportError, GateError, InputError, ModelUnavailableError, NotT5Error
from t5accel.graphs import encoder_export
from t5accel.graphs.encoder_export import EncoderSource, export_encoder
from t5accel.graphs.export import export_model, model_weights
from t5accel.graphs.export_cache import list_exports
from t5accel.graphs.manifest import read_manifest
from t5accel.models import stored_weights as stored
from t5accel.models.families import BEYOND_T5, GEMMAS
from t5accel.models.load import data_folder, load_model
from t5accel.models.random_init import random_model, random_t5
from t5accel.precision.recipes import RECIPES, Recipe, Scheme
from t5accel.precision.source_export import Fp32Export

TEXTS = ["I am tired.", "The house is small and old.", "No", "Where is my bag, and where is yours?"]
FIRST = "encoder.block.1.layer"
BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
KINDS = [("t5", {}), ("t5", GATED), ("mt5", GATED), ("umt5", GATED)]
SMALL = dict(
    d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=2,
    encoder_ffn_dim=48, decoder_ffn_dim=32, vocab_size=96, max_position_embeddings=40,
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def mini():
    return load_model("mini")[0]


def batch(entries: int, lengths=(9, 4, 7), seed: int = 0):
    """Ragged token ids and their mask; padding is 0."""
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    return np.random.default_rng(seed).integers(2, entries, mask.shape) * mask, mask


def own_states(encoder, ids, mask):
    with torch.no_grad():
        return encoder(torch.from_numpy(ids), torch.from_numpy(mask)).last_hidden_state.float().numpy()


def saved(folder, model, *, whole: bool, dtype=torch.float32):
    """A folder of a whole model, or of its encoder as ``T5EncoderModel`` saves it."""
    if not whole:
        kind = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}[model.config.model_type]
        alone = getattr(transformers, f"{kind}EncoderModel")(model.config)
        alone.encoder.load_state_dict(model.encoder.state_dict())
        alone.shared.weight = alone.encoder.embed_tokens.weight
        model = alone
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "sizes"), KINDS, ids=["t5", "gated", "mt5", "umt5"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "encoder"])
def test_hidden_states_are_transformers_own_padding_included(tmp_path, kind, sizes, whole):
    model = random_t5(TINY | sizes, kind=kind)
    ids, mask = batch(300)
    expected = own_states(model.encoder, ids, mask)
    encoder = AcceleratedEncoder.from_pretrained(saved(tmp_path / "model", model, whole=whole), progress=False)
    np.testing.assert_allclose(encoder.encode(ids, mask), expected, atol=2e-5)
    everywhere = own_states(model.encoder, ids, np.ones_like(mask))
    np.testing.assert_allclose(encoder.encode(ids), everywhere, atol=2e-5)  # as without a mask in transformers


@pytest.mark.parametrize("family", BEYOND_T5.values(), ids=BEYOND_T5)
def test_encoders_of_other_families(family, tmp_path):
    sizes = dict(SMALL, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2)
    model = random_model(family, sizes)
    ids, mask = batch(96)
    ids = np.where(mask == 1, np.maximum(ids, 3), 1)
    encoder = AcceleratedEncoder.from_pretrained(model, progress=False)
    real = mask == 1
    np.testing.assert_allclose(
        encoder.encode(ids, mask)[real], own_states(model.model.encoder, ids, mask)[real], atol=2e-5
    )
    with pytest.raises(InputError, match="at most max_source_tokens, 40, got 41"):
        encoder.encode(np.full((1, 41), 5))


@pytest.mark.parametrize("kind", GEMMA_KINDS)
def test_encoders_of_t5gemmas(kind):
    model = random_model(GEMMAS[kind], gemma_sizes(kind))
    ids, mask = ids_of(model)
    encoder = AcceleratedEncoder.from_pretrained(model, progress=False)
    model.model.decoder.embed_tokens.register_buffer("delta", torch.ones(3))
    with pytest.raises(NotT5Error, match="There is a weight model.decoder.embed_tokens.delta"):
        model_weights(model)
    expected, real = own_states(model.model.encoder, ids, mask), mask == 1
    np.testing.assert_allclose(encoder.encode(ids, mask)[real], expected[real], atol=2e-5)


def test_a_call_is_that_of_transformers(mini):
    encoder = AcceleratedEncoder.from_pretrained(mini, progress=False)
    ids, mask = map(torch.from_numpy, batch(100))
    output = encoder(input_ids=ids, attention_mask=mask)
    assert torch.allclose(output.last_hidden_state, mini.encoder(ids, mask).last_hidden_state, atol=2e-5)
    (alone,) = encoder(ids, mask, return_dict=False, output_hidden_states=False)
    assert torch.equal(alone, output[0]) and encoder.dtype == torch.float32 and encoder.device.type == "cpu"
    assert torch.equal(encoder.as_module()(input_ids=ids, attention_mask=mask)[0], alone)
    with pytest.raises(InputError, match="output_hidden_states is not supported here"):
        encoder(ids, output_hidden_states=True)


def test_bad_inputs_are_refused(mini):
    encoder = AcceleratedEncoder.from_pretrained(mini, progress=False)
    ids, mask = batch(100)
    for given in ((ids + 10**6, mask), (ids, np.zeros_like(mask)), (None, None), ("a", None), ([[5, 6], [7]], None)):
        with pytest.raises(InputError):
            encoder(*given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["safetensors", "shards", "bin"])
def test_files_of_every_form_are_read_one_weight_at_a_time(tmp_path, monkeypatch, form, dtype):
    monkeypatch.setattr(stored, "SMALL", 500)  # so that matrices stay in their files
    model = random_t5(TINY).to(dtype)
    options = {"shards": dict(max_shard_size="40KB"), "bin": {}}.get(form, {})
    model.save_pretrained(tmp_path / "model", **options)
    if form == "bin":
        torch.save(load_file(tmp_path / "model/model.safetensors"), tmp_path / "model/pytorch_model.bin")
        (tmp_path / "model/model.safetensors").unlink()
    source = EncoderSource.of(tmp_path / "model")
    read = [name for name, array in source.weights.arrays.items() if isinstance(array, stored.StoredArray)]
    assert len(read) > 10 and all(np.asarray(source.weights.arrays[name]).dtype == np.float32 for name in read)
    export_encoder(source, tmp_path / "export")
    ids, mask = batch(300)
    expected = own_states(model.float().encoder, ids, mask)
    np.testing.assert_allclose(AcceleratedEncoder(tmp_path / "export").encode(ids, mask), expected, atol=2e-5)
    in_8_bits = export_encoder(source, tmp_path / "int8", precision="int8")
    assert in_8_bits.graph_bytes < 0.6 * read_manifest(tmp_path / "export").graph_bytes


def test_an_embedding_under_the_decoders_name_alone_is_the_encoders(tmp_path):
    """MADLAD-400's layout, which transformers 5.0 to 5.17 read wrongly."""
    model = random_t5(TINY | GATED)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["decoder.embed_tokens.weight"] = weights.pop("shared.weight")
    weights.pop("encoder.embed_tokens.weight", None)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids, mask = batch(300)
    found = AcceleratedEncoder.from_pretrained(tmp_path, progress=False).encode(ids, mask)
    np.testing.assert_allclose(found, own_states(model.encoder, ids, mask), atol=2e-5)


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        (lambda weights: weights.pop("shared.weight"), ModelUnavailableError, "lacks its embedding"),
        (lambda weights: weights.pop(f"{FIRST}.1.DenseReluDense.wo.weight"), ModelUnavailableError, "lacks"),
        (lambda weights: weights.pop(f"{FIRST}.0.SelfAttention.q.weight"), ModelUnavailableError, "lacks"),
        (lambda weights: weights.update({"shared.weight": torch.ones(290, 32)}), ModelUnavailableError,
         r"shared.weight must be \(300, 32\) by config.json, got \(290, 32\)"),
        (lambda weights: weights.update({BIAS: torch.ones(16, 4)}), ModelUnavailableError, r"must be \(32, 4\) by"),
        (lambda weights: weights.update({"encoder.adapter": torch.ones(3)}), NotT5Error, "encoder.adapter"),
        (lambda weights: weights.update({"shared.weight": torch.ones(300, 32).char()}), ModelUnavailableError,
         "got I8"),
        (lambda weights: weights.update({"encoder.embed_tokens.weight": torch.ones(300, 32)}), ModelUnavailableError,
         "one embedding"),
    ],
)  # fmt: skip
def test_files_that_are_no_whole_encoder_leave_nothing_behind(tmp_path, change, kind, sentence):
    random_t5(TINY).save_pretrained(tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(kind, match=sentence):
        export_encoder(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "value", "kind", "sentence"), [
    ("model_type", "umt5", ModelUnavailableError, "lacks weights of its encoder"),
    ("feed_forward_proj", "gated-gelu", ModelUnavailableError, "lacks weights of its encoder"),
    ("transformers_weights", "other.safetensors", ModelUnavailableError, "transformers_weights must be left out"),
    ("relative_attention_max_distance", "64", InputError, "must be an integer"),
    ("pad_token_id", -1, InputError, "pad_token_id must be"),
])  # fmt: skip
def test_a_configuration_of_another_encoder_is_refused(tmp_path, name, value, kind, sentence):
    random_t5(TINY).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {name: value}
    if name == "feed_forward_proj":
        config = {key: one for key, one in config.items() if key not in ("dense_act_fn", "is_gated_act")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((kind, ModelUnavailableError), match=f"{sentence}|{name}"):
        AcceleratedEncoder.from_pretrained(tmp_path, progress=False)


def test_a_damaged_file_is_reported(tmp_path):
    random_t5(TINY).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ModelUnavailableError, match="cannot be read"):
        EncoderSource.of(tmp_path)


def test_a_hook_is_found(mini, tmp_path):
    changed = copy.deepcopy(mini)
    changed.encoder.block[1].register_forward_hook(lambda module, args, output: (output[0] + 1, *output[1:]))
    with pytest.raises(ExportError, match="other hidden states"):
        AcceleratedEncoder.from_pretrained(changed, progress=False)
    export_encoder(changed, tmp_path / "all the same", check_outputs=False)


@pytest.mark.parametrize("precision", ["int8", "int4", "bf16", "fp16"])
def test_precisions_stay_close_and_do_not_mix_texts(precision, mini):
    exact = AcceleratedEncoder.from_pretrained("mini", progress=False)
    encoder = AcceleratedEncoder.from_pretrained("mini", precision=precision, progress=False)
    own, found = exact.embed(TEXTS, normalize=True), encoder.embed(TEXTS, normalize=True)
    least = {"int8": 0.999, "int4": 0.98, "bf16": 0.999, "fp16": 0.9999}[precision]
    assert (own * found).sum(axis=1).min() > least
    alone = np.concatenate([encoder.embed([text], normalize=True) for text in TEXTS])
    np.testing.assert_allclose(found, alone, atol=1e-5 if precision[:3] == "int" else 0.01)


def test_embeddings_are_pooled_as_asked_and_in_order(mini):
    encoder = AcceleratedEncoder.from_pretrained("mini", progress=False)
    states = encoder.embed(TEXTS, pooling="none")
    for text, vectors in zip(TEXTS, states, strict=True):
        ids = encoder.tokenizer([text], return_tensors="np", padding=True)["input_ids"]
        np.testing.assert_allclose(vectors, encoder.encode(ids)[0], atol=1e-5)
    np.testing.assert_allclose(encoder.embed(TEXTS), [vectors.mean(axis=0) for vectors in states], atol=1e-5)
    np.testing.assert_allclose(
        encoder.embed(TEXTS, pooling="first", batch_tokens=1), [vectors[0] for vectors in states], atol=1e-5
    )
    assert encoder.embed([]).shape == (0, encoder.config.d_model)
    for texts in (np.array(TEXTS), (text for text in TEXTS)):
        np.testing.assert_array_equal(encoder.embed(texts), encoder.embed(TEXTS))
    for wrong in (dict(pooling="max"), dict(batch_tokens=0)):
        with pytest.raises(InputError, match=f"{next(iter(wrong))} must be"):
            encoder.embed(TEXTS, **wrong)
    with pytest.raises(InputError, match="texts must be a list"):
        encoder.embed("one text")


def test_a_long_text_pads_no_others_while_they_are_tokenized(mini, monkeypatch):
    encoder, tokenized = AcceleratedEncoder.from_pretrained("mini", progress=False, max_source_tokens=64), []
    wrapped = encoder.tokenizer
    encoder.tokenizer = lambda texts, **options: tokenized.append(texts) or wrapped(texts, **options)
    expected = encoder.embed(TEXTS, batch_tokens=16)
    assert len(tokenized) == 1
    with pytest.raises(InputError, match="at most max_source_tokens"):
        encoder.embed([*TEXTS, "long " * 30_000])
    assert tokenized[1:] == [["long " * 30_000]]
    monkeypatch.setattr("t5accel.encoder.CHARACTERS", 30)
    np.testing.assert_allclose(encoder.embed(TEXTS, batch_tokens=16), expected, atol=1e-6)
    assert tokenized[2:] == [[TEXTS[3]], [TEXTS[1]], [TEXTS[0], TEXTS[2]]]


def test_what_sentence_transformers_adds_is_not_left_out(mini, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(data_folder() / "mini-t5", folder)
    kinds = ["Transformer", "Pooling", "Dense"]
    entries = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(entries))
    for precision in ("fp32", "bf16"):
        with pytest.raises(InputError, match="Dense embed"):
            AcceleratedEncoder.from_pretrained(folder, precision=precision, progress=False).embed(TEXTS)


def test_an_export_is_cached_opened_alone_and_told_from_a_whole_models(mini, tmp_path, monkeypatch):
    manifest = export_encoder("mini", tmp_path / "int8", precision="int8")
    assert manifest.is_encoder_only and set(manifest.files) > {"encoder_only.onnx", "weights.data", "tokenizer.json"}
    encoder = AcceleratedEncoder.from_pretrained(tmp_path / "int8")
    assert encoder.precision == "int8" and encoder.embed(TEXTS).shape == (4, 256)
    assert AcceleratedEncoder.from_pretrained(tmp_path / "int8", precision="auto").precision == "int8"
    tokenizer = load_model("mini")[1]
    given = AcceleratedEncoder.from_pretrained(tmp_path / "int8", tokenizer=tokenizer)
    tokenizer.padding_side = "left"
    assert given.tokenizer is tokenizer and np.array_equal(given.embed(TEXTS), encoder.embed(TEXTS))
    with pytest.raises(InputError, match="precision must be that of the export"):
        AcceleratedEncoder.from_pretrained(tmp_path / "int8", precision="fp32")
    with pytest.raises(InputError, match="encoder alone"):
        accelerate(tmp_path / "int8")
    export_encoder("mini", tmp_path / "fp32")
    with pytest.raises(InputError, match="encoder alone"):
        Fp32Export.read(tmp_path / "fp32")
    backend = open_backend("mini", progress=False)[0]
    with pytest.raises(InputError, match="whole model"):
        AcceleratedEncoder(backend.folder)
    AcceleratedEncoder.from_pretrained("mini", progress=False)
    monkeypatch.setattr(encoder_export, "export_encoder", None)  # made once
    assert AcceleratedEncoder.from_pretrained("mini", progress=False).precision == "fp32"


def test_recipes_that_would_mix_texts_and_unknown_precisions_are_refused(tmp_path):
    for wrong in ("int8-dynamic", 7, RECIPES["int8"], Recipe("mine", encoder=Scheme("static"))):
        with pytest.raises(InputError, match="precision must"):
            export_encoder("mini", tmp_path / "out", precision=wrong)
    with pytest.raises(InputError, match="device must be"):
        AcceleratedEncoder.from_pretrained("mini", device="tpu")
    with pytest.raises(InputError, match="must have an encoder|model must be"):
        export_encoder(SimpleNamespace(config=load_model("mini")[0].config), tmp_path / "out")


def test_auto_takes_bf16_only_where_it_is_measured_to_be_fast(monkeypatch):
    for rate, expected in ((1.2, "fp32"), (3.0, "bf16")):
        monkeypatch.setattr(
            "t5accel.machine.gemm_flops_per_s", lambda dtype="float32", rate=rate: {"float32": 1}.get(dtype, rate)
        )
        assert AcceleratedEncoder.from_pretrained("mini", precision="auto", progress=False).precision == expected


def test_a_token_of_zeros_and_large_numbers_stay_finite_in_8_bits(tmp_path):
    model = random_t5(TINY)
    with torch.no_grad():
        model.shared.weight[5] = 0
        model.shared.weight[6] = 1e30
    export_encoder(model, tmp_path / "int8", precision="int8", check_outputs=False)
    assert np.isfinite(AcceleratedEncoder(tmp_path / "int8").encode(np.array([[5, 5, 6, 7]]))).all()


def test_a_gate_refuses_what_loses_too_much_and_writes_nothing(tmp_path):
    scores = quantize_encoder("mini", tmp_path / "int8", texts=TEXTS, max_loss={"cosine": 0.1, "retrieval": 0})
    assert 99.9 < scores["cosine"] < 100 and scores["retrieval"] == 100
    assert read_manifest(tmp_path / "int8").recipe["gate"] == {"max_loss": {"cosine": 0.1, "retrieval": 0}}
    again = quantize_encoder("mini", tmp_path / "int8", texts=TEXTS, max_loss={"cosine": 0.1, "retrieval": 0})
    assert again == scores, "of the export that is there"
    with pytest.raises(GateError, match="cosine .* \\(allowed 0.1\\)"):
        quantize_encoder("mini", tmp_path / "int4", "int4", texts=TEXTS, max_loss={"cosine": 0.1})
    assert not (tmp_path / "int4").exists()
    limits = ({"bleu": 1}, {}, {"cosine": "1"}, {"cosine": float("nan")}, 0.5, ["cosine"])
    for wrong in (*(dict(max_loss=each) for each in limits), dict(max_loss={"cosine": 1}, texts=["one"])):
        with pytest.raises(InputError, match="must"):
            quantize_encoder("mini", tmp_path / "out", **dict(texts=TEXTS) | wrong)


def test_a_folder_that_changes_while_it_is_read_leaves_no_export(tmp_path, monkeypatch):
    folder, write = saved(tmp_path / "model", random_t5(TINY), whole=True), encoder_export.write_export

    def disturbed(*given, **options):
        saved(folder, random_t5(TINY, seed=2), whole=True)
        return write(*given, **options)

    monkeypatch.setattr(encoder_export, "write_export", disturbed)
    with pytest.raises(ExportError, match="model changed while it was read"):
        AcceleratedEncoder.from_pretrained(folder, progress=False)
    assert not list_exports()


def test_padding_beyond_the_compared_entries(tmp_path):
    model = random_t5(TINY | dict(vocab_size=1200, pad_token_id=1199))
    encoder = AcceleratedEncoder.from_pretrained(saved(tmp_path, model, whole=True), progress=False)
    ids, mask = batch(300)
    expected = own_states(model.encoder, ids, mask)
    np.testing.assert_allclose(encoder.encode(ids, mask)[mask == 1], expected[mask == 1], atol=2e-5)


def test_a_reach_that_the_encoders_buckets_have(tmp_path):
    """Half as many of them as in the decoder hold one distance each."""
    model = random_t5(TINY | dict(relative_attention_max_distance=12))
    ids, mask = batch(300)
    found = AcceleratedEncoder.from_pretrained(model, progress=False).encode(ids, mask)
    np.testing.assert_allclose(found, own_states(model.encoder, ids, mask), atol=2e-5)
    with pytest.raises(NotT5Error, match="max_distance must be above 16 with 32 buckets, got 12"):
        export_model(model, tmp_path / "x")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"shared.weight": 7}}'])
def test_an_index_without_files_is_damaged(tmp_path, content):
    saved(tmp_path, random_t5(TINY), whole=True)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelUnavailableError, match="index.json is damaged: it has no weight_map"):
        EncoderSource.of(tmp_path)


def test_layers_without_end_are_refused(tmp_path):
    config = json.loads((data_folder() / "mini-t5" / "config.json").read_text())
    shutil.copytree(data_folder() / "mini-t5", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | dict(num_layers=10**9)))
    with pytest.raises(ModelUnavailableError, match="num_layers must be at most 1000"):
        EncoderSource.of(tmp_path / "model")
