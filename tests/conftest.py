"""Shared fixtures: tiny lively models of every kind, a padded batch, the bundled model, a machine without a network."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t5accel.models.load import load_model
from t5accel.models.random_init import random_t5


def pytest_configure() -> None:
    """A worker of pytest-xdist keeps to one core: two that each use all of them wait for each other."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})  # before torch counts them


# Modules of tests/core that no version of transformers changes; `.ci/run` runs them on one of the two lines.
ONCE = """
atomic_write certified_argmax drafting encoder_cache gate ngram_lookup precision sampling scoring timing
""".split()

TINY: dict[str, Any] = dict(
    vocab_size=300,
    d_model=32,
    d_kv=12,  # not d_model // num_heads
    d_ff=64,
    num_heads=4,
    num_layers=2,
    num_decoder_layers=3,
    eos_token_id=1,
    pad_token_id=0,
)
GATED = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deeper-decoder": ("t5", {}),
    "shallower-decoder": ("t5", dict(num_layers=3, num_decoder_layers=1)),
    "gated-untied": ("t5", GATED),
    "mt5": ("mt5", GATED),
    "umt5": ("umt5", GATED),
}

Tiny = Callable[..., Any]


@pytest.fixture
def threads_put_back() -> Iterator[None]:
    """Commands and measurements set torch's threads."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def random_state_put_back() -> Iterator[None]:
    """Training seeds torch; the tests around it keep their own chance."""
    import torch

    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


@pytest.fixture(scope="session")
def tiny_t5() -> Tiny:
    """``tiny_t5(kind, seed=…, **sizes)``: a tiny lively model. Shared between tests: change a deep copy only."""

    @cache
    def build(kind: str = "deeper-decoder", seed: int = 1, **sizes: Any) -> Any:
        model_type, differences = KINDS[kind]
        return random_t5({**TINY, **differences, **sizes}, seed=seed, kind=model_type)

    return build


@pytest.fixture(scope="session")
def exported(tiny_t5: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``exported(kind, seed=…, **sizes)``: the folder with the export of that ``tiny_t5``. Shared: do not write.

    Options of `export_model` may be among the sizes.
    """
    from t5accel.graphs.export import export_model

    @cache
    def export(kind: str = "deeper-decoder", **sizes: Any) -> Path:
        options = {name: sizes.pop(name) for name in ("external_threshold_bytes", "shortlist", "step") if name in sizes}
        folder = tmp_path_factory.mktemp(f"export-{kind}")
        export_model(tiny_t5(kind, **sizes), folder, **options)
        return folder

    return export


@pytest.fixture(scope="session")
def laid_out(tiny_t5: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``laid_out(layout, kind, …)``: the folder with that older layout of that ``tiny_t5``. Shared: do not write."""
    from bench.baselines.layouts import export_layout

    @cache
    def export(layout: str, kind: str = "deeper-decoder", **sizes: Any) -> Path:
        folder = tmp_path_factory.mktemp(f"{layout}-{kind}")
        export_layout(tiny_t5(kind, **sizes), folder, layout)
        return folder

    return export


@pytest.fixture(scope="session")
def opened(tiny_t5: Tiny, exported: Callable[..., Path], laid_out: Callable[..., Path]) -> Callable[..., Any]:
    """``opened(runtime, kind, settings, …)``: that backend of that ``tiny_t5``. Shared: patch your own."""
    from t5accel.backends.ort_session import SessionSettings
    from t5accel.backends.torch_eager import TorchEager

    @cache
    def open_(runtime: Any, kind: str = "deeper-decoder", settings: Any = None, **given: Any) -> Any:
        if runtime is TorchEager:
            return TorchEager(tiny_t5(kind, **given))
        layout = vars(runtime).get("layout")
        folder = exported(kind, **given) if layout is None else laid_out(layout, kind, **given)
        return runtime(folder, settings=settings or SessionSettings(threads=1))

    return open_


@pytest.fixture(scope="session")
def exported_mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the export of the bundled model and its tokenizer. Shared: do not write there."""
    from t5accel.graphs.export import export_model

    folder = tmp_path_factory.mktemp("export-mini") / "mini"
    export_model("mini", folder)
    return folder


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of tiny model by name."""
    return request.param


@pytest.fixture(scope="session")
def padded_batch() -> tuple[np.ndarray, np.ndarray]:
    """Six sources of 2 to 9 tokens of the tiny vocabulary, padded on the right, and their mask: both (6, 9) int64."""
    lengths = np.array([9, 5, 3, 7, 2, 8])
    mask = (np.arange(9) < lengths[:, None]).astype(np.int64)
    return np.random.default_rng(0).integers(3, 300, mask.shape) * mask, mask


@pytest.fixture(scope="session")
def ending(tiny_t5: Tiny, padded_batch: tuple[np.ndarray, np.ndarray]) -> Callable[..., dict[str, int]]:
    """``ending(kind)``: seed and end token of a ``tiny_t5``, some of whose six answers end below 14 tokens.

    Three or more do, at different lengths, and some do not. The end is a token that the model was seen to emit.
    """
    from programs import own_generate

    @cache
    def find(kind: str = "deeper-decoder") -> dict[str, int]:
        for seed in range(20):
            options = dict(max_new_tokens=14, min_new_tokens=14)
            seen = own_generate(tiny_t5(kind, seed=seed), *padded_batch, **options)[:, 1:].numpy()
            for token in np.unique(seen[:, 2:12])[::-1].tolist():
                sizes = dict(seed=seed, eos_token_id=token)
                if token > 1 and 3 <= (seen == token).any(axis=1).sum() < 6:
                    answers = own_generate(tiny_t5(kind, **sizes), *padded_batch, max_new_tokens=14)[:, 1:].tolist()
                    ends = [answer.index(token) for answer in answers if token in answer]
                    if 3 <= len(ends) < 6 and len(set(ends)) > 1:
                        return sizes
        raise AssertionError("no seed of twenty ends some rows and not others")

    return find


@pytest.fixture(scope="session")
def mini() -> tuple[Any, Any]:
    """The bundled model and its tokenizer. Shared between tests: change a deep copy only."""
    return load_model("mini")


@pytest.fixture(scope="session")
def saved(mini: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``saved(model, name)``: a new folder, so called, with that model and the bundled one's tokenizer."""

    def save(model: Any, name: str = "model") -> Path:
        folder = tmp_path_factory.mktemp("saved") / name
        model.save_pretrained(folder)
        mini[1].save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="module")
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Exports that a module's tests make go to a new folder, not to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("T5ACCEL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name resolves and no proxy is set."""

    def fail(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(socket, "getaddrinfo", fail)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that `.ci/run` needs once; skip those that need a CUDA device where there is none."""
    for item in items:
        if item.path.parent.name != "core" or item.path.stem.removeprefix("test_") in ONCE:
            item.add_marker(pytest.mark.once)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def dev(tmp_path, exported_mini):
    """What the bundled model writes in fp32 to thirty sentences: there it scores 100."""
    from bench.evaluation import rows, source_text
    from t5accel.backends.ort_numpy import OrtNumpy
    from t5accel.decoding.greedy_search import greedy
    from t5accel.tokenization import TokenizerFile, text_to_text

    backend, tokenizer = OrtNumpy(exported_mini), TokenizerFile(exported_mini)
    answer = text_to_text(tokenizer, lambda ids, mask: greedy(backend, ids, mask, max_new_tokens=40).sequences)
    sources = [source_text("translation", row) for row in rows("translation", limit=10)]
    file = tmp_path / "dev.jsonl"
    pairs = zip(sources, answer(sources), strict=True)
    file.write_text("".join(json.dumps({"source": a, "target": b}) + "\n" for a, b in pairs), encoding="utf-8")
    return file
