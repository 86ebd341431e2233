"""Weights as integers: how far off they may be, how they are packed, and that ONNX Runtime reads them as we do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from test_rewriting import operators, run

from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.errors import InputError
from t5accel.graphs.builder import GraphBuilder
from t5accel.precision import integers
from t5accel.precision.integers import SHRUNK, IntegerRewriter, QuantizedBlocks, quantize_blocks, quantize_channels
from t5accel.precision.recipes import Recipe, Scheme

BITS, SIZES = [4, 8], [16, 32, 64]


def gaussian(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def zeros(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


def some_zero(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return gaussian(rng, *shape) * (rng.random(shape) < 0.3)


def tiny(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Down to what 32 bits hold no more, the numbers below the normal ones included."""
    return gaussian(rng, *shape) * np.float32(10.0 ** rng.integers(-45, -30))


def huge(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Up to the end of 32 bits: squares of these have none."""
    return (gaussian(rng, *shape) * 10.0 ** rng.integers(19, 38)).astype(np.float32)


def one_outlier(rng: np.random.Generator, *shape: int) -> np.ndarray:
    array = gaussian(rng, *shape)
    array[tuple(rng.integers(size) for size in shape)] = rng.choice([-1, 1]) * 10.0 ** rng.integers(1, 6)
    return array


def any_scale(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return gaussian(rng, *shape) * np.float32(10) ** rng.integers(-20, 15, shape).astype(np.float32)


def few_values(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Opposites of equal size: the level of the one has no opposite."""
    return rng.integers(-1, 2, shape).astype(np.float32)


MAKERS = [gaussian, zeros, some_zero, tiny, huge, one_outlier, any_scale, few_values]
weights = st.builds(
    lambda maker, seed, shape: maker(np.random.default_rng(seed), *shape),
    st.sampled_from(MAKERS), st.integers(0, 2**32 - 1), st.tuples(st.integers(1, 5), st.integers(1, 150)),
)  # fmt: skip


def padded(weight: np.ndarray, size: int) -> np.ndarray:
    """(N, K) -> (N, blocks, size) float64, the last block filled up with zeros."""
    count = -(-weight.shape[1] // size)
    wide = np.zeros((len(weight), count * size))
    wide[:, : weight.shape[1]] = weight
    return wide.reshape(len(weight), count, size)


def codes(blocks: QuantizedBlocks) -> np.ndarray:
    """(N, blocks, size) integers as they are stored."""
    packed = blocks.integers.astype(np.int64)
    if blocks.bits == 8:
        return packed
    return np.stack([packed % 16, packed // 16], axis=-1).reshape(*packed.shape[:2], -1)


# How far off


@settings(deadline=None, max_examples=80)
@given(weight=weights, bits=st.sampled_from(BITS), size=st.sampled_from(SIZES))
def test_no_weight_is_further_off_than_its_level(weight: np.ndarray, bits: int, size: int) -> None:
    blocks = quantize_blocks(weight, bits, size)
    given_, count, half = padded(weight, size), -(-weight.shape[1] // size), 2 ** (bits - 1)
    assert blocks.integers.shape == (len(weight), count, size * bits // 8) and blocks.integers.dtype == np.uint8
    assert blocks.scales.shape == (len(weight), count) and blocks.scales.dtype == np.float32
    assert (blocks.bits, blocks.block_size) == (bits, size) and blocks.floats().dtype == np.float32
    near, levels = blocks.floats().reshape(given_.shape), codes(blocks) - half
    assert levels.min() >= -half and levels.max() <= half - 1 and np.isfinite(near).all()
    scale, largest = np.abs(blocks.scales[:, :, None].astype(np.float64)), np.abs(given_).max(axis=2, keepdims=True)
    off, smallest = np.abs(near - given_), 2.0**-149  # the smallest number of 32 bits: a scale may be off by half of it
    clipped = (levels == -half) | (levels == half - 1)
    within = scale / 2 * (1 + 1e-4) + smallest * half
    assert (off[~clipped] <= np.broadcast_to(within, off.shape)[~clipped]).all()
    # At the ends, what a smaller scale does not reach; and the opposite of the largest weight, which has no level.
    reach = largest * (1 - (SHRUNK.min() if bits == 4 else 1)) + scale
    assert (off <= reach * (1 + 1e-4) + smallest * half).all()
    if bits == 8:
        assert np.allclose(scale, largest / half, rtol=1e-6, atol=smallest)
    assert (near[given_ == 0] == 0).all(), "zeros stay zeros, those that fill up a block too"
    event(f"zeros: {not weight.any()}, a remainder: {weight.shape[1] % size != 0}")


@settings(deadline=None, max_examples=100)
@given(weight=weights, size=st.sampled_from(SIZES))
def test_of_all_scales_that_which_loses_least(weight: np.ndarray, size: int) -> None:
    given_ = padded(weight, size)
    if not 1e-15 < np.abs(given_).max() < 1e15:
        return  # where squares are no numbers any more, it is the scale that reaches the largest weight
    lost = np.square(quantize_blocks(weight, 4, size).floats().reshape(given_.shape) - given_).sum(axis=2)
    first = np.abs(given_).argmax(axis=2)[:, :, None]
    full = np.take_along_axis(given_, first, axis=2) / -8
    tried = []
    for share in SHRUNK.astype(np.float64):
        scale = np.where(full == 0, 1, full * share)
        tried.append(np.square(np.rint(given_ / scale).clip(-8, 7) * scale - given_).sum(axis=2))
    assert (lost <= np.min(tried, axis=0) * 1.001 + 1e-12 * np.square(given_).sum(axis=2)).all()


# How they are packed


def test_the_first_of_two_lies_low() -> None:
    row = np.zeros((1, 16), dtype=np.float32)
    row[0, :4] = -8, 7, 3, -1  # a scale of 1 is exact
    blocks = quantize_blocks(row, 4, 16)
    assert blocks.scales.tolist() == [[1.0]] and blocks.floats()[0, :4].tolist() == [-8, 7, 3, -1]
    assert blocks.integers.tolist() == [[[0x0 | 0xF << 4, 0xB | 0x7 << 4, *[0x88] * 6]]]
    row[0, :4] = -128, 127, 3, -1
    blocks = quantize_blocks(row, 8, 16)
    assert blocks.scales.tolist() == [[1.0]] and blocks.integers.tolist() == [[[0, 255, 131, 127, *[128] * 12]]]


@pytest.mark.parametrize("bits", BITS)
def test_many_rows_are_rounded_a_few_at_a_time(monkeypatch, bits: int) -> None:
    weight = gaussian(np.random.default_rng(1), 10, 70)
    at_once = quantize_blocks(weight, bits, 32)
    monkeypatch.setattr(integers, "ROWS_AT_ONCE", 4)
    in_parts = quantize_blocks(weight, bits, 32)
    np.testing.assert_array_equal(in_parts.integers, at_once.integers)
    np.testing.assert_array_equal(in_parts.scales, at_once.scales)
    for view in (np.asfortranarray(weight), np.ascontiguousarray(weight.T).T):
        np.testing.assert_array_equal(quantize_blocks(view, bits, 32).integers, at_once.integers)


# A scale for each output


@settings(deadline=None, max_examples=60)
@given(weight=weights, per_channel=st.booleans(), reduce_range=st.booleans())
def test_no_weight_is_further_off_than_half_a_level(weight: np.ndarray, per_channel: bool, reduce_range: bool) -> None:
    channels = quantize_channels(weight, per_channel=per_channel, reduce_range=reduce_range)
    levels = 64 if reduce_range else 127
    assert channels.integers.dtype == np.int8 and channels.integers.shape == weight.shape
    assert channels.scales.dtype == np.float32 and channels.scales.shape == (weight.shape[1:] if per_channel else ())
    assert np.abs(channels.integers.astype(int)).max() <= levels and (channels.scales > 0).all()
    near = channels.integers * channels.scales.astype(np.float64)
    largest = np.abs(weight).max(axis=0 if per_channel else None)
    assert (np.abs(near - weight) <= channels.scales / 2 * (1 + 1e-4) + 2.0**-149 * levels).all() or (
        largest < 1e-40
    ).any()
    normal = np.broadcast_to(largest > 1e-35, near.shape)
    assert (np.abs(near - weight)[normal] <= np.broadcast_to(largest / levels / 2 * 1.001, near.shape)[normal]).all()
    assert (near[weight == 0] == 0).all()


# What cannot be rounded


@pytest.mark.parametrize(
    "junk", [np.ones(4), np.ones((0, 4)), np.array([[1.0, np.nan]]), np.array([[np.inf]])], ids=str
)
def test_what_cannot_be_rounded(junk: np.ndarray) -> None:
    with pytest.raises(InputError, match="finite numbers"):
        quantize_blocks(junk.astype(np.float32), 8, 16)
    with pytest.raises(InputError, match="finite numbers"):
        quantize_channels(junk.astype(np.float32))


# As ONNX Runtime reads them


def product(rows: np.ndarray, scheme: Scheme) -> GraphBuilder:
    """``z`` is minus ``x`` (N, K) times rows (outputs, K), which are rounded."""
    graph = GraphBuilder("decoder")
    x = graph.input("x", "float32", ["N", rows.shape[1]])
    y = graph.op("MatMul", x, graph.weight("lm_head.weight.T", rows.T))
    graph.output(graph.op("Neg", y, output="z"), "float32", ["N", len(rows)])
    assert IntegerRewriter(Recipe("head", head=scheme)).rewrite(graph, "decoder") == {"lm_head.weight.T": "lm_head"}
    return graph


@pytest.mark.parametrize("maker", [some_zero, any_scale], ids=lambda maker: maker.__name__)
@pytest.mark.parametrize("width", [40, 64])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_onnxruntime_reads_the_blocks_as_we_do(maker: Any, width: int, size: int, bits: int) -> None:
    """Each weight for itself: the product with the unit vectors, in fp32."""
    rows = maker(np.random.default_rng(2), 7, width)
    graph = product(rows, Scheme(bits=bits, block_size=size, accuracy_level=1))
    assert operators(graph) == ["MatMulNBits", "Neg"]
    (z,) = run(graph, x=np.eye(width, dtype=np.float32))
    blocks = quantize_blocks(rows, bits, size)
    np.testing.assert_allclose(-z.T, blocks.floats()[:, :width], rtol=1e-6, atol=0)
    wrong = QuantizedBlocks(np.roll(blocks.integers, 1, axis=2), blocks.scales, bits, size)
    assert not rows.any() or not np.allclose(-z.T, wrong.floats()[:, :width], rtol=1e-3)


@pytest.mark.parametrize("level", range(5))
@pytest.mark.parametrize("bits", BITS)
def test_every_accuracy_level_multiplies(bits: int, level: int) -> None:
    rng = np.random.default_rng(4)
    rows, x = gaussian(rng, 24, 96), gaussian(rng, 9, 96)
    (z,) = run(product(rows, Scheme(bits=bits, block_size=32, accuracy_level=level)), x=x)
    exact = -(x.astype(np.float64) @ quantize_blocks(rows, bits, 32).floats().T.astype(np.float64))
    off = np.abs(z - exact).max() / exact.std()
    assert off < (0.05 if level == 4 else 0.01 if level in (2, 3) else 1e-5), "of 8 bits where that is asked for"


@pytest.mark.parametrize("options", [{}, dict(per_channel=False), dict(reduce_range=True)], ids=str)
@pytest.mark.parametrize("method", ["dynamic", "static"])
@pytest.mark.parametrize("shift", [0.7, 6, -6], ids=["both signs", "all above 0", "all below 0"])
def test_products_of_integers(method: str, options: dict[str, bool], shift: float) -> None:
    rng = np.random.default_rng(5)
    rows, x = gaussian(rng, 24, 96), gaussian(rng, 9, 96) + np.float32(shift)
    graph = GraphBuilder("decoder")
    y = graph.op("MatMul", graph.input("x", "float32", ["N", 96]), graph.weight("lm_head.weight.T", rows.T))
    graph.output(graph.op("Neg", y, output="z"), "float32", ["N", 24])
    ranges = {"decoder": {"x": (float(x.min()), float(x.max()))}}
    IntegerRewriter(Recipe("head", head=Scheme(method, **options)), ranges).rewrite(graph, "decoder")
    integer = {"dynamic": "MatMulInteger", "static": "QuantizeLinear"}[method]
    assert integer in operators(graph) and graph.opsets == {"": 20}, "the standard has them all"
    (z,) = run(graph, x=x)
    channels = quantize_channels(rows.T, **options)
    scale = max(x.max(), 0) - min(x.min(), 0)
    zero = np.rint(-min(x.min(), 0) / (scale / 255))
    near_x = (np.rint(x / (scale / 255)) + zero).clip(0, 255) - zero
    exact = -(near_x * (scale / 255)).astype(np.float64) @ (channels.integers * channels.scales.astype(np.float64))
    assert np.abs(z - exact).max() / exact.std() < 0.01, "but for a level here and there"
    assert np.abs(z + x @ rows.T).max() > 1e-3, "and not what it is in floats"


@pytest.mark.parametrize("rows", [1, 9, 200])  # kernels differ by the number of rows
def test_sums_of_large_products_do_not_saturate(rows: int, tmp_path: Path) -> None:
    """As two of them in 16 bits do on x86 without VNNI; below level "extended" ONNX Runtime can do nothing about it."""
    graph = product(np.ones((24, 96), np.float32), Scheme("dynamic"))
    (tmp_path / "graph.onnx").write_bytes(graph.proto().SerializeToString())
    (z,) = open_session(tmp_path / "graph.onnx", SessionSettings(threads=1)).run(None, {"x": np.ones((rows, 96), "f")})
    np.testing.assert_allclose(z, -96, rtol=0.01)


@pytest.mark.parametrize(
    ("flags", "as_uint8"), [(None, "1"), (["avx2", "avx512f"], "1"), (["avx_vnni"], "0"), (["avx512_vnni"], "0")]
)
def test_weights_become_uint8_where_int8_could_saturate_alone(flags, as_uint8, tmp_path: Path, monkeypatch) -> None:
    """With VNNI that would take twice the time for the same sums."""
    graph = product(np.ones((24, 96), "f"), Scheme("dynamic"))
    (tmp_path / "graph.onnx").write_bytes(graph.proto().SerializeToString())
    monkeypatch.setattr("t5accel.machine.facts", lambda **_: {"cpu_flags": flags})
    options = open_session(tmp_path / "graph.onnx", SessionSettings(threads=1)).get_session_options()
    assert options.get_session_config_entry("session.x64quantprecision") == as_uint8


def test_a_weight_of_two_graphs_by_two_schemes() -> None:
    """One set of arrays for an export, in which a name means one."""
    name, x = "decoder.block.0.layer.1.EncDecAttention.k.weight", np.eye(32, dtype=np.float32)
    weight = gaussian(np.random.default_rng(9), 32, 8)
    both = [Scheme("dynamic", reduce_range=True), Scheme("dynamic"), Scheme(bits=4, block_size=16), Scheme()]
    for encoder in both:
        for decoder in both:
            rewriting, found = IntegerRewriter(Recipe("two", encoder=encoder, decoder=decoder)), []
            for stack in ("encoder", "decoder"):
                graph = GraphBuilder(stack)
                y = graph.op("MatMul", graph.input("x", "float32", ["N", 32]), graph.weight(f"{name}.T", weight))
                graph.output(graph.op("Neg", y), "float32", ["N", 8])
                assert rewriting.rewrite(graph, stack) == {f"{name}.T": "decoder.0.attention"}
                found.append((set(graph.weights), run(graph, x=x)[0]))
            shared = {weight for weight in found[0][0] & found[1][0] if weight.startswith(name)}
            assert bool(shared) == (encoder == decoder) == np.array_equal(found[0][1], found[1][1])


# Rows that are looked up


def look_up(table: np.ndarray, scheme: Scheme, tied: bool = False) -> GraphBuilder:
    graph = GraphBuilder("decoder")
    ids = graph.input("ids", "int64", ["B", "T"])
    hidden = graph.op("Gather", graph.weight("shared.weight", table), ids)
    hidden = graph.op("Neg", hidden, output="hidden")
    graph.output(hidden, "float32", ["B", "T", table.shape[1]])
    if tied:
        logits = graph.op("MatMul", hidden, graph.op("Transpose", "shared.weight", perm=[1, 0]), output="logits")
        graph.output(logits, "float32", ["B", "T", len(table)])
    recipe = Recipe("rows", head=scheme if tied else None, embedding=scheme)
    assert IntegerRewriter(recipe).rewrite(graph, "decoder") == {"shared.weight": "lm_head" if tied else "embedding"}
    return graph


@pytest.mark.parametrize("width", [40, 64])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_rows_are_looked_up_as_they_are_stored(width: int, size: int, bits: int) -> None:
    table = gaussian(np.random.default_rng(6), 50, width)
    graph = look_up(table, Scheme(bits=bits, block_size=size))
    assert "GatherBlockQuantized" in operators(graph) and "shared.weight" not in graph.weights
    ids = np.array([[0, 49, 7], [7, 8, 31]])
    np.testing.assert_allclose(
        -run(graph, ids=ids)[0], quantize_blocks(table, bits, size).floats()[ids][..., :width], rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("bits", BITS)
def test_of_tied_weights_one_copy_serves_twice(bits: int) -> None:
    table = gaussian(np.random.default_rng(7), 50, 64)
    graph = look_up(table, Scheme(bits=bits, block_size=32, accuracy_level=1), tied=True)
    large = {name: array for name, array in graph.weights.items() if array.nbytes > 100}
    assert sorted(array.dtype.name for array in large.values()) == ["float32", "uint8"]
    assert sum(array.nbytes for array in large.values()) == 50 * (64 * bits // 8 + 2 * 4)
    ids, near = np.array([[3, 4]]), quantize_blocks(table, bits, 32).floats()
    hidden, logits = run(graph, ids=ids)
    np.testing.assert_allclose(-hidden, near[ids], rtol=1e-6)
    np.testing.assert_allclose(logits, -near[ids] @ near.T, rtol=1e-4, atol=1e-4)


def test_other_tables_are_left_alone() -> None:
    graph = GraphBuilder("decoder")
    table = gaussian(np.random.default_rng(8), 50, 64)
    ids = graph.input("ids", "int64", ["B"])
    for name in ("bias.by_distance", "decoder.embed_tokens.weight"):
        graph.output(graph.op("Gather", graph.weight(name, table), ids, output=f"of {name}"), "float32", ["B", 64])
    changed = IntegerRewriter(Recipe("rows", embedding=Scheme())).rewrite(graph, "decoder")
    assert changed == {"decoder.embed_tokens.weight": "embedding"} and "bias.by_distance" in graph.weights
