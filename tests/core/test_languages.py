"""Languages by name: the sources, tokens and answers of transformers with the same ``src_lang`` and target language.

Tokenizers are made on the spot, of transformers' own classes; models are tiny and seeded.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from refused import refused
from test_encoder_cache import in_threads
from typer.testing import CliRunner

from t5accel.api import open_backend
from t5accel.backends.model_defaults import by_defaults
from t5accel.backends.torch_eager import TorchEager
from t5accel.cli import app
from t5accel.decoding.beam import beam_search
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.decoding.sampling import sample
from t5accel.decoding.speculation import speculative
from t5accel.decoding.streaming import stream_text
from t5accel.errors import InputError
from t5accel.graphs.export import export_model
from t5accel.models.families import BEYOND_T5
from t5accel.models.load import data_folder
from t5accel.models.prefixes import Languages, prefixes_of
from t5accel.models.random_init import random_model
from t5accel.precision.gate import text_score
from t5accel.serve.app import make_app
from t5accel.serve.batch.job import JobSettings, ModelSource, run
from t5accel.serve.request import GenerationRequest
from t5accel.serve.scheduler import Scheduler
from t5accel.serve.service import Service
from t5accel.serve.settings import Settings as ServerSettings
from t5accel.tokenization import TokenizerFile, decode, text_to_text, tokenizer_of

WORDS = ["▁", "▁the", "▁house", "▁is", "▁green", *(f"▁{letter}" for letter in "abcd"), *"thouseisgrnabcd"]
PIECES = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
PIECES += [(word, -float(place)) for place, word in enumerate(dict.fromkeys(WORDS), 1)]
# The class, its family, what it is told of languages, and one language more.
KINDS: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "nllb": ("NllbTokenizer", "m2m_100", dict(src_lang="eng_Latn"), "fra_Latn", "eng_Latn"),
    "nllb, legacy": (
        "NllbTokenizer", "m2m_100", dict(src_lang="eng_Latn", legacy_behaviour=True), "fra_Latn", "eng_Latn"),
    "mbart": ("MBartTokenizer", "mbart", dict(src_lang="en_XX"), "fr_XX", "en_XX"),
    "mbart-50": ("MBart50Tokenizer", "mbart", dict(src_lang="en_XX"), "fr_XX", "en_XX"),
    "m2m100": ("M2M100Tokenizer", "m2m_100", dict(src_lang="en"), "fr", "en"),
}  # fmt: skip
TEXTS = ["the house", "the house is green and the door is as well", "a", "is the green house a house"]
LONGEST = 9


@dataclass(frozen=True, eq=False)
class Made:
    """A tokenizer of transformers, a model of its vocabulary, and the folder with both."""

    kind: str
    tokenizer: Any
    model: Any
    folder: Path
    other: str
    own: str

    def token(self, name: str) -> int:
        return self.tokenizer.convert_tokens_to_ids(f"__{name}__" if self.kind == "m2m100" else name)

    def first(self, name: str) -> dict[str, int]:
        return {"decoder_start_token_id" if self.kind == "mbart" else "forced_bos_token_id": self.token(name)}

    def source(self, texts: list[str], language: str) -> dict[str, torch.Tensor]:
        """As transformers encodes it, by a tokenizer of its own."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        tokenizer.src_lang = language
        return tokenizer(texts, return_tensors="pt", padding=True)

    def answers(self, language: str, **options: Any) -> tuple[list[list[int]], Any]:
        """transformers' tokens up to their end, to `TEXTS` in the other language."""
        batch = self.source(TEXTS, self.other)
        found = self.model.generate(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=False,
            max_new_tokens=LONGEST, return_dict_in_generate=True, output_scores=True,
            **{"num_beams": 1, **self.first(language), **options},
        )  # fmt: skip
        return ended(found.sequences[:, 1:], self.model), getattr(found, "sequences_scores", None)


def ended(rows: Any, model: Any) -> list[list[int]]:
    end = model.config.eos_token_id
    rows = [[int(token) for token in row] for row in rows]
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def tokenizer_made(kind: str, folder: Path) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    name, _, options, *_ = KINDS[kind]
    bpe = {piece: number for number, (piece, _) in enumerate(PIECES)}
    if kind == "m2m100":
        import sentencepiece

        (folder / "text.txt").write_text("\n".join(TEXTS * 20))
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "text.txt"), model_prefix=str(folder / "made"), vocab_size=60, minloglevel=2,
            hard_vocab_limit=False,
        )  # fmt: skip
        made = sentencepiece.SentencePieceProcessor(str(folder / "made.model"))
        vocabulary = [*list(bpe)[:4], *(made.id_to_piece(number) for number in range(3, made.get_piece_size()))]
        (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(vocabulary)}))
        return transformers.M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "made.model"), **options)
    if int(transformers.__version__.split(".")[0]) >= 5:
        vocabulary = dict(vocab=bpe, merges=[]) if name.startswith("Nllb") else dict(vocab=PIECES)
        return getattr(transformers, name)(**vocabulary, **options)
    base = models.BPE(bpe, [], unk_token="<unk>") if name.startswith("Nllb") else models.Unigram(PIECES, unk_id=3)
    tokenizer = Tokenizer(base)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.save(str(folder / "base.json"))
    return getattr(transformers, f"{name}Fast")(tokenizer_file=str(folder / "base.json"), **options)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    @cache
    def made(kind: str) -> Made:
        _, family, _, other, own = KINDS[kind]
        tokenizer = tokenizer_made(kind, tmp_path_factory.mktemp("tokenizer"))
        entries = len(tokenizer) + 120 * (kind == "m2m100")  # which does not count its languages
        sizes = dict(
            d_model=24, vocab_size=entries, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=3, encoder_ffn_dim=20, decoder_ffn_dim=24, max_position_embeddings=64,
        )  # fmt: skip
        start = tokenizer.convert_tokens_to_ids(own) if kind == "mbart" else 2
        model = random_model(BEYOND_T5[family], dict(sizes, decoder_start_token_id=start), seed=3)
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return Made(kind, tokenizer, model, folder, other, own)

    return made


@pytest.fixture(params=KINDS)
def made(request, make) -> Made:
    return make(request.param)


def readers(made: Made) -> list[Any]:
    """All that reads the folder: transformers' tokenizer, and ours where there is a file for it."""
    own = [TokenizerFile(made.folder)] if (made.folder / "tokenizer.json").is_file() else []
    return [transformers.AutoTokenizer.from_pretrained(made.folder, local_files_only=True), *own]


# Sources


def test_a_source_is_marked_with_its_language_and_the_tokenizer_is_left_as_it_was(made: Made) -> None:
    expected, plain = made.source(TEXTS, made.other), made.source(TEXTS, made.own)
    assert not torch.equal(expected["input_ids"], plain["input_ids"])
    for tokenizer in readers(made):
        seen: list[np.ndarray] = []

        def echo(ids: np.ndarray, mask: np.ndarray, seen: list[np.ndarray] = seen) -> np.ndarray:
            seen.extend([ids, mask])
            return ids

        text_to_text(tokenizer, echo, src_lang=made.other)(TEXTS)
        np.testing.assert_array_equal(seen[0], expected["input_ids"])
        np.testing.assert_array_equal(seen[1], expected["attention_mask"])
        text_to_text(tokenizer, echo)(TEXTS)
        np.testing.assert_array_equal(seen[2], plain["input_ids"])
        found = Languages(tokenizer)
        assert (
            {made.other, made.own} < set(found.ids)
            and len(found.ids) > 20
            and found.source(made.own) == made.token(made.own)
        )


def test_sources_padded_on_the_left(make) -> None:
    for kind in ("mbart", "mbart-50"):
        made = make(kind)
        made.tokenizer.padding_side = "left"
        batch = made.tokenizer(TEXTS, return_tensors="np", padding=True)
        made.tokenizer.padding_side = "right"
        ids, mask = batch["input_ids"], batch["attention_mask"]
        found = Languages(made.tokenizer).set_language(ids, mask, made.token(made.other))
        for row, real, expected in zip(found, mask == 1, made.source(TEXTS, made.other)["input_ids"], strict=True):
            assert row[real].tolist() == expected[: real.sum()].tolist() and (row[~real] == 1).all()


def test_a_language_that_there_is_not(made: Made, mini) -> None:
    backend = TorchEager(made.model)
    near = {"fr": "fr_XX", "french": "fr_XX", "Fra_latn": "fra_Latn"}
    for tokenizer in readers(made):
        languages = Languages(tokenizer)
        for wrong in ("xx", "", "French", 7, made.own + "x", "</s>"):
            for ask in (languages.source, partial(languages.target, backend)):
                with pytest.raises(InputError, match="must be a language of this model, got .* Give one of"):
                    ask(wrong)
        for wrong, name in near.items():
            if name in languages.ids and wrong not in languages.ids:
                with pytest.raises(InputError, match=name):
                    languages.source(wrong)
        with pytest.raises(InputError, match="give one of them"):
            languages.target(backend, made.other, "<s>")
    bundled = (mini[1], TokenizerFile(data_folder() / "mini-t5"))
    for tokenizer in bundled:
        found = Languages(tokenizer)
        refused(found.source, "src_lang", "fr", "fra_Latn", match="prefix")
        refused(partial(found.target, backend), "tgt_lang", "fr", match="prefix")
        refused(partial(found.target, backend), "forced_bos_token", "▁nosuch", 5, match="must be a token")
        assert Languages(tokenizer).target(backend, None, "▁Le") == dict(
            forced_bos_token_id=mini[1].convert_tokens_to_ids("▁Le")
        )
        assert Languages(tokenizer).target(backend) == {}


# Answers


@pytest.mark.parametrize("kind", ["nllb", "mbart"])  # a first token that is forced, and another start
def test_every_loop_writes_the_language_as_transformers_does(make, kind: str) -> None:
    made = make(kind)
    backend, batch = TorchEager(made.model), made.source(TEXTS, made.other)
    given = (batch["input_ids"], batch["attention_mask"])
    answers = []
    for language in (made.own, made.other):
        first = Languages(made.tokenizer).target(backend, language)
        assert first == made.first(language)
        expected, _ = made.answers(language)
        answers.append(expected)
        guessed = lambda one, *given, **options: speculative(one, backend, *given, **options)  # noqa: E731
        for algorithm in (greedy, prompt_lookup, guessed):
            assert ended(algorithm(backend, *given, max_new_tokens=LONGEST, **first).sequences, made.model) == expected
        assert ended(by_defaults(backend, max_new_tokens=LONGEST, num_beams=1, **first)(*map(np.asarray, given)),
                     made.model) == expected  # fmt: skip
        searched, scores = made.answers(language, num_beams=3)
        found = beam_search(backend, *given, num_beams=3, max_new_tokens=LONGEST, **first)
        assert ended(found.sequences, made.model) == searched
        np.testing.assert_allclose(found.scores, scores, rtol=1e-5)
        # The likeliest token alone may be drawn: what is drawn is what is searched, after the same beginning.
        drawn = sample(backend, *given, max_new_tokens=LONGEST, top_k=1, **first)
        assert ended(drawn.sequences, made.model) == expected
    assert answers[0] != answers[1] and max(map(len, answers[0])) > 2


def test_requests_for_tokens_that_there_are_not(make) -> None:
    backend = TorchEager(make("nllb").model)
    with Scheduler(backend) as scheduler:
        for wrong in (dict(forced_bos_token_id=backend.vocab_size), dict(decoder_start_token_id=-1),
                      dict(decoder_start_token_id=backend.vocab_size), dict(forced_bos_token_id=2)):  # fmt: skip
            with pytest.raises(InputError, match=next(iter(wrong))):
                scheduler.submit(GenerationRequest([5, 2], **wrong))


def test_transformers_own_search_is_told_as_well(make) -> None:
    """Where the model's ``generation_config`` asks for what our loops do not apply."""
    for kind in ("mbart", "nllb"):
        made = make(kind)
        made.model.generation_config.no_repeat_ngram_size = 2
        try:
            backend = TorchEager(made.model)
            batch = made.source(TEXTS, made.other)
            answer = by_defaults(backend, max_new_tokens=LONGEST, num_beams=1, **made.first(made.other))
            found = answer(batch["input_ids"].numpy(), batch["attention_mask"].numpy())
            assert ended(found, made.model) == made.answers(made.other)[0]
        finally:
            made.model.generation_config.no_repeat_ngram_size = None


@pytest.mark.usefixtures("cache_of_its_own", "threads_put_back")
@pytest.mark.parametrize("kind", ["nllb", "mbart", "m2m100"])
def test_run_and_batch_take_the_names(make, kind: str, tmp_path: Path) -> None:
    made = make(kind)
    tokenizer = tokenizer_of(made.folder)
    end = made.model.config.eos_token_id

    def told(language: str, num_beams: int, keep: bool) -> list[str]:
        rows = made.answers(language, num_beams=num_beams)[0]
        return tokenizer.batch_decode([[token for token in row if token != end] for row in rows],
                                      skip_special_tokens=not keep)  # fmt: skip

    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options = ["--model", made.folder, "--src-lang", made.other, "--max-new-tokens", LONGEST]
    for num_beams in (1, 3):
        for keep in (False, True):
            flags = [*options, "--tgt-lang", made.own, *["--keep-special-tokens"] * keep]
            result = call("run", "-", *flags, "--beams", num_beams, text="\n".join(TEXTS))
            assert result.stdout.split("\n")[:-1] == told(made.own, num_beams, keep), result.stderr
    if made.kind != "mbart":
        name = made.tokenizer.convert_ids_to_tokens(made.token(made.own))
        result = call("run", TEXTS[1], *options, "--beams", 1, "--forced-bos", name, "--stream",
                      "--keep-special-tokens")  # fmt: skip
        assert result.stdout == told(made.own, 1, True)[1] + "\n", result.stderr
    out = tmp_path / "out"
    result = call("batch", tmp_path / "in.jsonl", out, *options, "--tgt-lang", made.own, "--beams", 1,
                  "--keep-special-tokens")  # fmt: skip
    rows = [json.loads(line) for line in (out / "part-000000.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows] == told(made.own, 1, True), result.stderr
    for other in (["--tgt-lang", made.other], ["--tgt-lang", made.own]):
        again = call("batch", tmp_path / "in.jsonl", out, *options, *other, "--beams", 1)
        assert again.exit_code == 2 and "another job" in again.stderr, again.stderr
    for command in (["run", "a"], ["batch", tmp_path / "in.jsonl", tmp_path / "new"]):
        result = call(*command, "--model", made.folder, "--tgt-lang", "nosuch")
        assert (
            result.exit_code == 2
            and "--tgt-lang must be" in result.stderr
            and not (tmp_path / "new/_done.jsonl").exists()
        )


def call(*arguments: Any, text: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)


# Special tokens and prefixes


@pytest.fixture(scope="module")
def special(mini, tmp_path_factory) -> tuple[Any, Any, Path, str]:
    """The bundled model with a word of an answer as a special token, where it lies, and what it answers to `ASKED`."""
    model, tokenizer = mini[0], copy.deepcopy(mini[1])
    tokens = model.generate(**tokenizer([ASKED], return_tensors="pt"), max_new_tokens=20)[0].tolist()
    tokenizer.add_special_tokens({"additional_special_tokens": [tokenizer.convert_ids_to_tokens(tokens[2])]})
    folder = tmp_path_factory.mktemp("special")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    wanted = tokenizer.decode([token for token in tokens if token > 1], skip_special_tokens=False)
    assert wanted != tokenizer.decode(tokens, skip_special_tokens=True)
    return model, tokenizer, folder, wanted


ASKED = "translate English to French: Where is my bag?"


@pytest.mark.usefixtures("cache_of_its_own", "threads_put_back")
def test_special_tokens_are_kept_where_that_is_asked(special, tmp_path: Path) -> None:
    model, theirs, folder, wanted = special
    backend, ours, _ = open_backend(folder, progress=False)
    without = theirs.decode(theirs(wanted).input_ids, skip_special_tokens=True)
    for tokenizer in (theirs, ours):

        def generate(ids: Any, mask: Any) -> np.ndarray:
            return greedy(backend, ids, mask, max_new_tokens=20).sequences

        asked = [ASKED, "translate English to French: No."]
        assert text_to_text(tokenizer, generate, skip_special_tokens=False)(asked)[0] == wanted
        assert text_to_text(tokenizer, generate)(asked)[0] != wanted
        tokens = tokenizer([ASKED])["input_ids"][0]
        pieces = [
            *stream_text(tokenizer, ([np.array([token])] for token in tokens), skip_special_tokens=False, ends=(1,))
        ]
        assert "".join(pieces) == decode(tokenizer, [tokens], skip_special_tokens=False)[0]
        assert len(pieces) > 3 and "</s>" not in "".join(pieces)
    for flags in ([], ["--stream"], ["--beams", 1]):
        kept, left_out = (call("run", ASKED, "--model", folder, *flags, *more).stdout.strip()
                          for more in (["--keep-special-tokens"], []))  # fmt: skip
        assert kept == wanted and left_out == without
    (tmp_path / "in.txt").write_text(ASKED + "\n")
    run(tmp_path / "in.txt", tmp_path / "out", ModelSource(str(folder)), JobSettings(skip_special_tokens=False))
    assert json.loads((tmp_path / "out/part-000000.jsonl").read_text())["answer"] == wanted
    with pytest.raises(InputError, match="another job"):
        run(tmp_path / "in.txt", tmp_path / "out", ModelSource(str(folder)), JobSettings())


def test_an_answer_ends_before_its_end_token(mini) -> None:
    for tokenizer in (mini[1], TokenizerFile(data_folder() / "mini-t5")):
        rows = tokenizer(["Oui.", "Il a 12 ans !"], return_tensors="np", padding=True)["input_ids"]
        assert (rows == 0).any() and decode(tokenizer, rows, skip_special_tokens=False) == ["Oui.", "Il a 12 ans !"]
        assert decode(tokenizer, rows, skip_special_tokens=False, ends=()) == tokenizer.batch_decode(rows)
        end = int(rows[0][0])
        assert decode(tokenizer, rows, skip_special_tokens=False, ends=(1, end))[0] == ""
        assert decode(tokenizer, rows) == ["Oui.", "Il a 12 ans !"]


@pytest.mark.usefixtures("cache_of_its_own", "threads_put_back")
def test_a_prefix_stands_in_front_and_its_absence_is_mentioned_once(exported_mini: Path, tmp_path: Path) -> None:
    prefix, text = "translate English to French: ", "I am tired."
    for flags in ([], ["--stream"]):
        plain = call("run", prefix + text, "--model", exported_mini, *flags)
        split = call("run", text, "--model", exported_mini, "--prefix", prefix, *flags)
        assert plain.stdout == split.stdout == "Je suis fatigué.\n" and "expects" not in plain.stderr + split.stderr
    bare = call("run", "-", "--model", exported_mini, text=f"{text}\n\n{text}\n")
    assert bare.exit_code == 0 and bare.stderr.count("expects a prefix") == 1 and len(bare.stdout.splitlines()) == 3
    (tmp_path / "in.txt").write_text(f"{prefix}{text}\n\n{text}\n{text}\n")
    for name, flags, count in (("a", [], 1), ("b", ["--prefix", prefix], 0)):
        result = call("batch", tmp_path / "in.txt", tmp_path / name, "--model", exported_mini, *flags)
        assert result.exit_code == 0 and result.stderr.count("expects a prefix") == count, result.stderr
    answer = text_to_text(TokenizerFile(exported_mini), lambda ids, mask: ids, prefix=prefix)
    assert answer([text, "No."]) == [prefix + text, prefix + "No."]
    refused(partial(text_to_text, TokenizerFile(exported_mini), lambda ids, mask: ids), "prefix", None, 5, ["a"])


@pytest.mark.usefixtures("cache_of_its_own", "threads_put_back")
def test_the_hint_names_the_prefixes_of_the_configuration(mini, tmp_path: Path) -> None:
    model, prefix = copy.deepcopy(mini[0]), "translate English to French: "
    model.config.task_specific_params = {"a": {"prefix": prefix}, "b": {"num_beams": 2}, "c": {"prefix": None}}
    model.save_pretrained(tmp_path)
    mini[1].save_pretrained(tmp_path)
    backend, _, _ = open_backend(tmp_path, progress=False)
    assert prefixes_of(backend, str(tmp_path)) == (prefix,) == prefixes_of(TorchEager(model), "own")
    for text, hinted in (("I am tired.", True), (prefix + "I am tired.", False), ("fix: He go.", False)):
        result = call("run", text, "--model", tmp_path)
        assert result.exit_code == 0 and (f'--prefix "{prefix}".' in result.stderr) is hinted, result.stderr
    assert prefixes_of(TorchEager(mini[0]), "own") == ()


# Requests to the server


def asked(
    backend: Any, tokenizer: Any, bodies: list[dict[str, Any]], path: str = "/generate", **settings: Any
) -> list[Any]:
    """The answers of an application to requests that come at the same time."""
    app = make_app(backend, tokenizer, ServerSettings(model="mini", **settings))

    async def ask() -> list[Any]:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60) as client,
        ):
            return await asyncio.gather(*(client.post(path, json=body) for body in bodies))

    return asyncio.run(ask())


def text_of(response: Any) -> list[str]:
    """All texts of an answer of either route, streamed or whole."""
    if response.headers["content-type"].startswith("text/event-stream"):
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        return ["".join(event["text"] if "text" in event else event["choices"][0]["text"] for event in events)]
    content = response.json()
    assert response.status_code == 200, content
    return [one["texts"][0] for one in content["answers"]] if "answers" in content else [
        one["text"] for one in content["choices"]]  # fmt: skip


@pytest.mark.parametrize("kind", ["nllb", "mbart"])
def test_each_request_names_its_own_languages(make, kind: str) -> None:
    made = make(kind)
    backend, tokenizer, end = TorchEager(made.model), tokenizer_of(made.folder), made.model.config.eos_token_id
    bodies, expected = [], []
    for language in (made.own, made.other):
        for keep, num_beams in ((False, 1), (True, 1), (True, 3)):
            rows = made.answers(language, num_beams=num_beams)[0]
            bodies.append(dict(num_beams=num_beams, skip_special_tokens=not keep, src_lang=made.other,
                               tgt_lang=language))  # fmt: skip
            expected.append(tokenizer.batch_decode([[token for token in row if token != end] for row in rows],
                                                   skip_special_tokens=not keep))  # fmt: skip
    assert expected[1] != expected[4]
    found = asked(backend, tokenizer, [dict(text=TEXTS, max_new_tokens=LONGEST, **body) for body in bodies])
    assert [*map(text_of, found)] == expected
    found = asked(backend, tokenizer, [dict(prompt=TEXTS, model="mini", max_tokens=LONGEST, **body) for body in bodies],
                  path="/v1/completions")  # fmt: skip
    assert [*map(text_of, found)] == expected
    streams = [(body, texts) for body, texts in zip(bodies, expected, strict=True) if body["num_beams"] == 1]
    for path, names in (("/generate", dict(max_new_tokens=LONGEST)),
                        ("/v1/completions", dict(max_tokens=LONGEST, model="mini"))):  # fmt: skip
        key = "text" if path == "/generate" else "prompt"
        found = asked(backend, tokenizer, [{key: TEXTS[1], "stream": True, **names, **body} for body, _ in streams],
                      path=path)  # fmt: skip
        assert [*map(text_of, found)] == [[texts[1]] for _, texts in streams]
    wrong = [dict(tgt_lang="nosuch"), dict(src_lang="nosuch"), dict(forced_bos_token="nosuch"),
             dict(tgt_lang=made.own, forced_bos_token="<s>"), dict(tgt_lang=5)]  # fmt: skip
    for body, response in zip(
        wrong, asked(backend, tokenizer, [dict(text="a", **body) for body in wrong]), strict=True
    ):
        error = response.json()["error"]
        assert response.status_code == 422 and next(iter(body)) in error["message"], error


def test_a_cut_source_keeps_its_closing_marks(make) -> None:
    for kind in ("mbart", "nllb, legacy", "nllb"):
        made = make(kind)
        service = Service(TorchEager(made.model), tokenizer_of(made.folder), ServerSettings(max_source_tokens=5))
        try:
            cut = service._tokens(TEXTS[1], True, made.token(made.other))
            tokenizer = transformers.AutoTokenizer.from_pretrained(made.folder, local_files_only=True)
            tokenizer.src_lang = made.other
            assert cut == tokenizer(TEXTS[1], truncation=True, max_length=5).input_ids
        finally:
            service.close()


def test_the_server_puts_its_prefix_in_front_unless_the_request_has_its_own(mini) -> None:
    backend, tokenizer = TorchEager(mini[0]), TokenizerFile(data_folder() / "mini-t5")
    prefix, text = "translate English to French: ", "I am tired."
    plain, other, own = asked(backend, tokenizer, [
        dict(text=text), dict(text=prefix + text, prefix=""), dict(text="am tired.", prefix=prefix + "I "),
    ], prefix=prefix)  # fmt: skip
    assert text_of(plain) == text_of(other) == text_of(own) == ["Je suis fatigué."]
    (completion,) = asked(backend, tokenizer, [dict(prompt=text, model="mini")], "/v1/completions", prefix=prefix)
    assert text_of(completion) == ["Je suis fatigué."]
    (refusal,) = asked(backend, tokenizer, [dict(text=text, tgt_lang="fr")])
    assert refusal.status_code == 422 and "prefix" in refusal.json()["error"]["message"]


def test_requests_keep_special_tokens(special) -> None:
    model, tokenizer, _, wanted = special
    bodies = [dict(text=ASKED, skip_special_tokens=False, stream=stream) for stream in (False, True)]
    without, *kept = asked(TorchEager(model), tokenizer, [dict(text=ASKED), *bodies])
    assert text_of(without) != [wanted] and [*map(text_of, kept)] == [[wanted]] * 2
    word = tokenizer.additional_special_tokens[-1] if hasattr(tokenizer, "additional_special_tokens") else (
        tokenizer.extra_special_tokens[-1])  # fmt: skip
    stopped = asked(TorchEager(model), tokenizer, [dict(body, stop=word.strip("▁")) for body in bodies])
    assert [text_of(one)[0].strip() for one in stopped] == [wanted.partition(word.strip("▁"))[0].strip()] * 2


def test_threads_ask_for_different_languages(make) -> None:
    made = make("nllb")
    tokenizer, begin = TokenizerFile(made.folder), threading.Barrier(2)

    def work(language: str) -> None:
        expected = made.source(TEXTS, language)["input_ids"].numpy()
        begin.wait(timeout=30)
        for _ in range(20):
            text_to_text(tokenizer, lambda ids, mask: np.testing.assert_array_equal(ids, expected) or ids,
                         src_lang=language)(TEXTS)  # fmt: skip

    in_threads(lambda: work("fra_Latn"), lambda: work("deu_Latn"))


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_of_a_language_that_is_known(make, tmp_path: Path, kind: str) -> None:
    made = make(kind)
    model, score = copy.deepcopy(made.model), text_score([{"source": "a", "target": "b"}], "exact_match", threads=1)
    if kind != "mbart":  # which starts its outputs with it
        export_model(model, tmp_path / "unknown", tokenizer=made.tokenizer)
        with pytest.raises(InputError, match="must name its outputs' language"):
            score(tmp_path / "unknown")
        model.generation_config.forced_bos_token_id = made.token(made.other)
    export_model(model, tmp_path / "known", tokenizer=made.tokenizer)
    assert score(tmp_path / "known").keys() == {"exact_match"}
