"""Several streams side by side: who goes next, what is counted, and how it ends."""

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from bench.demo.race import difference, generate_stream, interleave, load_system, ways_of
from t5accel.errors import InputError
from t5accel.models.random_init import random_t5

SIZES = dict(vocab_size=300, d_model=32, d_kv=12, d_ff=64, num_heads=4, num_layers=2, num_decoder_layers=2)


class Clock:
    """Time that passes only where a stream says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def stream(self, name: str, log: list[str], seconds: float, steps: int) -> Iterator[list[int]]:
        for token in range(steps):
            self.now += seconds
            log.append(name)
            yield [token]


def test_who_has_computed_least_goes_next() -> None:
    clock, log = Clock(), []
    streams = {"slow": clock.stream("slow", log, 3.0, 4), "fast": clock.stream("fast", log, 1.0, 6)}
    *_, lanes = interleave(streams, clock=clock)
    assert log == ["slow", *["fast"] * 3, "slow", *["fast"] * 3, "slow", "slow"]
    assert (lanes["slow"].tokens, lanes["slow"].seconds, lanes["slow"].first_s) == ([0, 1, 2, 3], 12.0, 3.0)
    assert (lanes["fast"].tokens_per_s, lanes["fast"].has_ended) == (1.0, True)


def test_a_race_that_is_given_up_closes_its_streams() -> None:
    closed = []

    def endless(name: str) -> Iterator[list[int]]:
        try:
            for token in count():
                yield [token]
        finally:
            closed.append(name)

    running = interleave({"a": endless("a"), "b": endless("b")})
    for _ in range(5):
        next(running)
    running.close()
    assert sorted(closed) == ["a", "b"]


@pytest.mark.parametrize(
    ("tokens", "said"),
    [([5, 6, 1], "the same tokens"), ([7, 6, 1], "other tokens from number 1 on"),
     ([5, 6], "other tokens from number 3 on"), ([5, 6, 1, 4], "other tokens from number 4 on")],
)  # fmt: skip
def test_answers_are_compared_in_words(tokens: list[int], said: str) -> None:
    assert difference([5, 6, 1], tokens) == said


def test_transformers_generate_is_a_stream_of_the_same_tokens(threads_put_back) -> None:
    import torch

    model = random_t5(SIZES)
    ids = np.random.default_rng(0).integers(3, 300, (1, 12))
    whole = model.generate(input_ids=torch.from_numpy(ids), do_sample=False, max_new_tokens=20)[0, 1:].tolist()
    chunks = list(generate_stream(model, ids, np.ones_like(ids), 20))
    assert [token for chunk in chunks for token in chunk] == whole and len({*whole}) > 3
    assert len(chunks) == len(whole) and all(len(chunk) == 1 for chunk in chunks)


def test_transformers_computes_nothing_that_nobody_asks_for_and_its_error_reaches_who_asked(
    threads_put_back, monkeypatch
) -> None:
    model, steps = random_t5(SIZES), []
    forward = model.decoder.forward
    monkeypatch.setattr(model.decoder, "forward", lambda *args, **named: steps.append(1) or forward(*args, **named))
    ids = np.full((1, 6), 7)
    stream = generate_stream(model, ids, np.ones_like(ids), 50)
    next(stream), next(stream)
    assert len(steps) == 2
    stream.close()
    assert len(steps) == 2
    ids = np.full((1, 6), 9999)  # beyond the vocabulary
    with pytest.raises(IndexError):
        next(generate_stream(random_t5(SIZES), ids, np.ones_like(ids), 5))


def test_every_way_of_the_bundled_model_answers(cache_of_its_own, threads_put_back) -> None:
    """And the two in fp32 with the same tokens."""
    load_system.cache_clear()
    answers, sizes = {}, {}
    for label, (model, precision) in ways_of("mini").items():
        loaded = load_system(model, precision)
        batch = loaded.tokenizer(["translate English to French: We leave at once."], return_tensors="np", padding=True)
        stream = loaded.stream(batch["input_ids"], batch["attention_mask"], 20)
        answers[label], sizes[label] = [token for chunk in stream for token in chunk], loaded.size_bytes
    first, second, *_ = answers
    assert answers[first] == answers[second] and len({*answers[first]}) > 3
    assert sizes["student, int8"] < sizes["ours, int8"] < sizes["ours, fp32"]
    load_system.cache_clear()


def test_a_model_without_a_tokenizer_is_refused(cache_of_its_own, tmp_path) -> None:
    random_t5(SIZES).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has no tokenizer"):
        load_system(str(tmp_path), "fp32")
    assert "ours, int4" in ways_of(str(tmp_path)) and "student, int8" not in ways_of(str(tmp_path))
