"""Aimed heads: they look where they should, read what the other head reads, and nothing else changes."""

import copy

import pytest
import torch

from t5accel.errors import InputError
from t5accel.models.load import random_t5
from training.head_init import HeadInit, choose_head_inits, init_heads

SIZES = {"vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


@pytest.fixture
def model():
    made = random_t5(SIZES, seed=3)
    made.set_attn_implementation("eager")  # others do not return what they attend to
    return made


def attended(model, layer: int, head: int) -> torch.Tensor:
    """(S, S) shares of attention in one head of the encoder, for 24 different tokens."""
    with torch.no_grad():
        out = model.encoder(torch.arange(10, 34)[None], output_attentions=True)
    return out.attentions[layer][0, head]


@pytest.mark.parametrize(("first", "last"), [(1, 1), (-1, -1), (2, 4), (-7, -2)])
def test_a_head_looks_at_the_distances_that_it_is_aimed_at(model, first, last):
    init_heads(model, [HeadInit(2, like=0, first=first, last=last)])
    for layer in range(2):
        shares = attended(model, layer, 2)
        places = range(8, 16)
        inside = torch.stack([shares[i, i + first : i + last + 1].sum() for i in places])
        even = (last - first + 1) / 24
        assert inside.min() > 3 * even


def test_it_reads_and_writes_as_the_other_does_and_all_else_stays(model):
    before = copy.deepcopy(model.state_dict())
    init_heads(model, [HeadInit(3, like=1, first=1, last=2)])
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert changed == {bias} | {f"encoder.block.{i}.layer.0.SelfAttention.{m}.weight" for i in (0, 1) for m in "qvo"}
    for block in model.encoder.block:
        attention = block.layer[0].SelfAttention
        assert torch.equal(attention.v.weight[24:32], attention.v.weight[8:16])
        assert torch.equal(attention.o.weight[:, 24:32], attention.o.weight[:, 8:16])
    for name in changed:
        old, new = (tables[name] for tables in (before, model.state_dict()))
        if name == bias:
            assert torch.equal(old[:, :3], new[:, :3])
        else:
            old, new = (old.T, new.T) if name.endswith("o.weight") else (old, new)
            assert torch.equal(old[:24], new[:24])


@pytest.mark.parametrize(
    "aim", [HeadInit(4, 0, 1, 1), HeadInit(-1, 0, 1, 1), HeadInit(0, 4, 1, 1), HeadInit(0, 1, 2, 1)]
)
def test_what_cannot_be_aimed_is_refused_and_nothing_is_changed(model, aim):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match="HeadInit"):
        init_heads(model, [HeadInit(2, like=0, first=1, last=1), aim])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


SIX_HEADS = {**SIZES, "num_heads": 6}
BATCHES = [([[*range(10 + i, 34 + i), 1]] * 2, [[40 + i, 50 + i, 1]] * 2) for i in range(3)]


def planted() -> torch.nn.Module:
    """A model of six heads, of which 2 looks at the token before, and 0, 4 and 5 write next to nothing."""
    made = random_t5(SIX_HEADS, seed=3)
    attentions = [block.layer[0].SelfAttention for block in made.encoder.block]
    with torch.no_grad():
        attentions[0].relative_attention_bias.weight[1, 2] = 20.0  # bucket 1: one token back
        for attention in attentions:
            for head in (0, 4, 5):
                attention.o.weight[:, 8 * head : 8 * head + 8] *= 1e-3
    return made


def test_the_heads_that_matter_least_are_aimed_like_the_one_that_looks_at_the_token_before():
    model = planted()
    before = copy.deepcopy(model.state_dict())
    assert choose_head_inits(model, BATCHES) == (HeadInit(0, 2, 1, 1), HeadInit(4, 2, 2, 7), HeadInit(5, 2, -7, -2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for sizes, message in ((SIX_HEADS, "No head of the encoder"), ({**SIZES, "num_heads": 3}, "4 heads, got 3")):
        with pytest.raises(InputError, match=message):  # it is not ready for aims
            choose_head_inits(random_t5(sizes, seed=3), BATCHES)
