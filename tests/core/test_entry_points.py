"""Arguments are checked at the doors, once: what is wrong never reaches a backend, and what does keeps the protocol."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from programs import Strict, StrictChooser, junk
from transformers import T5Config

import t5accel
from t5accel import decoding
from t5accel.backends.hf_generate import AcceleratedT5
from t5accel.decoding.beam import beam_search
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.decoding.sampling import sample
from t5accel.decoding.speculation import speculative
from t5accel.decoding.streaming import stream
from t5accel.errors import InputError

often = settings(max_examples=60, deadline=None)


def streamed(backend: Any, *arguments: Any, **options: Any) -> list[Any]:
    return list(stream(backend, *arguments, **options))


def speculating(backend: Any, *arguments: Any, **options: Any) -> Any:
    return speculative(backend, Strict(), *arguments, **options)


ALGORITHMS: dict[str, Callable[..., Any]] = {
    "greedy": greedy, "beam_search": beam_search, "sample": sample, "prompt_lookup": prompt_lookup,
    "speculative": speculating, "stream": streamed,
}  # fmt: skip
OPTIONS = {"beam_search": dict(num_beams=3), "sample": dict(num_return_sequences=2)}


@pytest.fixture(params=ALGORITHMS)
def algorithm(request: pytest.FixtureRequest) -> Callable[..., Any]:
    options = OPTIONS.get(request.param, {})
    return lambda *arguments, **more: ALGORITHMS[request.param](*arguments, **{**options, **more})


def behind(backend: Any) -> AcceleratedT5:
    names = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")
    return AcceleratedT5(backend, T5Config(**{name: getattr(backend, name) for name in names}))


# The public names


def test_the_public_names_are_functions_even_after_their_modules_were_imported() -> None:
    for name in t5accel.__all__:
        assert callable(getattr(t5accel, name)) or name == "__version__"
    assert dir(t5accel) == t5accel.__all__
    assert t5accel.load_t5 is t5accel.load_model and t5accel.greedy is decoding.greedy is greedy
    with pytest.raises(AttributeError, match="no_such_name"):
        t5accel.no_such_name  # noqa: B018
    with pytest.raises(AttributeError, match="no_such_name"):
        decoding.no_such_name  # noqa: B018


def test_decoding_needs_neither_torch_nor_a_runtime() -> None:
    heavy = "{'torch', 'transformers', 'onnxruntime'}"
    names = "beam_search, greedy, prompt_lookup, sample, speculative, stream"
    program = f"from t5accel.decoding import {names}; import sys; print({heavy} & {{*sys.modules}})"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "set()\n"


# The decoding functions


ONES = torch.ones(1, 2, dtype=torch.long)
BAD_BATCHES: dict[str, tuple[Any, Any]] = {
    "empty": ([], None), "no tokens": ([[]], None), "one dimension": ([3, 4], None), "three": ([[[3]]], None),
    "ragged": ([[3, 4], [5]], None), "floats": ([[3.0]], None), "nan": ([[float("nan")]], None),
    "text": ("hello", None), "texts": (["hello"], None), "none": (None, None), "none inside": ([[3, None]], None),
    "negative": ([[3, -1]], None), "beyond 64 bits": ([[2**70]], None), "beyond 63 bits": ([[2**63]], None),
    "time": (np.array([[3]], dtype="m8[s]"), None), "mapping": ({"input_ids": [[3]]}, None),
    "bfloat16": (ONES.bfloat16(), None), "sparse": (ONES.to_sparse(), None), "meta": (ONES.to("meta"), None),
    "only padding": ([[0, 0]], None), "mask of another shape": ([[3, 4]], [[1]]),
    "mask of other values": ([[3, 4]], [[1, 2]]), "mask of floats": ([[3, 4]], [[1.0, 1.0]]),
    "mask all zero in a row": ([[3], [4]], [[1], [0]]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_no_batch(algorithm, case: str) -> None:
    backend = Strict()
    with pytest.raises(InputError, match="input_ids|attention_mask"):
        algorithm(backend, *BAD_BATCHES[case])
    assert not backend.worked


PREFIXES = [[[12]], [[-1]], [[]], [[1], [2]], [1], [[[1]]], [[0.5]], [[1, 2], [3]], "start", [[None]], [[2**70]]]
WRONG = [
    *(dict(input_ids=ids) for ids in ([[12]], [[3, -1]], [[3, 2**62]])),
    *(dict(decoder_input_ids=prefix) for prefix in PREFIXES),
    *(dict(max_new_tokens=length) for length in (0, 2.0, True, None)),
    *(dict(min_new_tokens=length) for length in (-1, "2")),
    dict(min_new_tokens=9, max_new_tokens=8),
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_wrong_arguments_never_reach_a_backend(algorithm, options: dict[str, Any]) -> None:
    backend = Strict()
    with pytest.raises(InputError, match=next(iter(options))):
        algorithm(backend, **{"input_ids": [[3]], **options})
    assert not backend.worked


@pytest.mark.parametrize("thing", [None, "mini", 5, torch.nn.Linear(1, 1)])
def test_no_backend(algorithm, thing: Any) -> None:
    with pytest.raises(InputError, match="backend"):
        algorithm(thing, [[3]])


@pytest.mark.parametrize("name", ["pad_token_id", "eos_token_id", "decoder_start_token_id"])
@pytest.mark.parametrize("value", [-1, 12, None, 1.0])
def test_a_special_token_that_is_no_token(algorithm, name: str, value: Any) -> None:
    backend = Strict()
    setattr(backend, name, value)
    with pytest.raises(InputError, match=f"{name} .*{value}"):
        algorithm(backend, [[3]])
    with pytest.raises(InputError, match=f"{name} .*{value}"):
        AcceleratedT5(backend, T5Config())
    assert not backend.worked


@often
@given(data=st.data())
def test_what_reaches_a_backend_keeps_the_protocol(data: st.DataObject) -> None:
    name, kind = data.draw(st.sampled_from(sorted(ALGORITHMS))), data.draw(st.sampled_from([Strict, StrictChooser]))
    batch, length = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    longest = data.draw(st.integers(1, 12))
    options: dict[str, Any] = dict(max_new_tokens=longest, min_new_tokens=data.draw(st.integers(0, longest)))
    if data.draw(st.booleans(), "prefix"):
        prefix = options["decoder_input_ids"] = rng.integers(0, 12, (batch, 2)).astype(np.int32)
        prefix[:, 0] = prefix[0, 0]  # the start token in all rows or in none
    if name == "beam_search":
        options["num_beams"] = data.draw(st.integers(1, 5))
    if name == "sample":
        options["num_return_sequences"] = data.draw(st.integers(1, 3))
    if name in ("prompt_lookup", "speculative"):
        options["max_draft"] = data.draw(st.integers(1, 5))
    backend, ids = kind(), rng.integers(1, 12, (batch, length))[:, ::-1]
    ids.setflags(write=False)
    assert ALGORITHMS[name](backend, ids, **options) is not None
    assert backend.worked > 1


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
nested = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=8,
)
arrays = hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))
nearly = st.lists(st.lists(st.integers(-1, 11) | st.sampled_from([0.5, None, "3"]), max_size=3), max_size=3)
valid = hnp.arrays(np.int64, st.tuples(st.integers(1, 3), st.integers(1, 3)), elements=st.integers(0, 9))
anything = nested | arrays | nearly | valid
bounds = st.integers(-2, 30) | st.none() | st.floats() | st.text(max_size=2)
# What each takes beside a batch, a prefix and bounds.
OWN = {
    "beam_search": ("num_beams", "num_return_sequences", "length_penalty", "early_stopping"),
    "sample": ("seed", "temperature", "num_return_sequences"),
    "prompt_lookup": ("max_ngram", "max_draft"),
    "speculative": ("max_draft", "seed", "sampling"),
}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(ALGORITHMS)), valid | anything, st.none() | anything, bounds, bounds, st.none() | junk,
       st.data())  # fmt: skip
def test_junk_raises_input_error_at_most(name: str, ids: Any, mask: Any, most: Any, least, prefix: Any, data) -> None:
    """`Strict` fails the test if anything else than a proper call reaches it."""
    longest = min(most, 40) if isinstance(most, int) else most
    options = dict(max_new_tokens=longest, min_new_tokens=least, decoder_input_ids=prefix)
    for own in OWN.get(name, ()):
        options |= {own: data.draw(st.integers(-1, 9) | anything, own)} if data.draw(st.booleans()) else {}
    try:
        result = ALGORITHMS[name](Strict(), ids, mask, **options)
    except InputError as error:
        assert len(str(error)) > 15, f"an error should say what was given and what to do: {error!r}"
    else:
        assert name == "stream" or (result.sequences.dtype == np.int64 and 1 <= result.decoder_calls <= longest + 1)


def test_who_writes_to_the_arguments_changes_nothing() -> None:
    """A stream goes on while its caller does other things."""
    ids, prefix = np.full((2, 3), 5), np.zeros((2, 1), dtype=np.int64)
    mask, backend = np.ones_like(ids), Strict()
    expected = streamed(Strict(), ids, mask, decoder_input_ids=prefix, max_new_tokens=6, min_new_tokens=6)
    chunks = stream(backend, ids, mask, decoder_input_ids=prefix, max_new_tokens=6, min_new_tokens=6)
    first = next(chunks)
    ids[:], mask[:], prefix[:] = -7, 99, -7
    assert str([first, *chunks]) == str(expected) and (backend.masks[0] == 1).all()


# transformers' generate() and forward()


BAD_SOURCES: dict[str, tuple[Any, Any]] = {
    "beyond the vocabulary": (torch.tensor([[12]]), None),
    "negative": (torch.tensor([[-1]]), None),
    "floats": (torch.tensor([[0.5]]), None),
    "three dimensions": (torch.tensor([[[3]]]), None),
    "no tokens": (torch.zeros((1, 0), dtype=torch.long), None),
    "mask of other values": (torch.tensor([[3]]), torch.tensor([[2]])),
    "mask of other floats": (torch.tensor([[3]]), torch.tensor([[0.5]])),
    "mask of another shape": (torch.tensor([[3]]), torch.tensor([[1, 1]])),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_no_source_for_the_encoder(case: str) -> None:
    backend, (ids, mask) = Strict(), BAD_SOURCES[case]
    model = behind(backend)
    for call in (model.encoder, lambda *given: model(*given, decoder_input_ids=torch.zeros((1, 1), dtype=torch.long))):
        with pytest.raises(InputError, match="input_ids|attention_mask"):
            call(ids, mask)
    assert not backend.worked


@pytest.mark.parametrize("new", [[[12]], [[-1]], [[0.5]], [[[1]]], [[1], [2]], [[]], [1]])
def test_no_tokens_for_the_decoder(new: Any) -> None:
    backend = Strict()
    model = behind(backend)
    encoded = model.encoder(torch.tensor([[3, 4]]))
    cache = model(encoder_outputs=encoded, decoder_input_ids=torch.zeros((1, 1), dtype=torch.long)).past_key_values
    worked = backend.worked
    for past in (dict(encoder_outputs=encoded), dict(past_key_values=cache)):
        with pytest.raises(InputError, match="decoder_input_ids"):
            model(decoder_input_ids=torch.tensor(new, dtype=None if new != [[]] else torch.long), **past)
    assert backend.worked == worked and cache.length == 1


MODES = [dict(), dict(num_beams=3), dict(num_beams=2, num_return_sequences=2), dict(do_sample=True),
         dict(prompt_lookup_num_tokens=3), dict(do_sample=True, num_beams=2)]  # fmt: skip


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_what_generate_hands_a_backend_keeps_the_protocol(mode: dict[str, Any], seed: int) -> None:
    rng, backend = np.random.default_rng(seed), Strict()
    ids = torch.as_tensor(rng.integers(1, 12, (1 if "prompt_lookup_num_tokens" in mode else 3, 6)))
    torch.manual_seed(seed)
    answers = behind(backend).generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, **mode)
    assert answers.shape[1] <= 10 and backend.worked > 1
