"""Advice from hand-made rows, rule by rule, and from the recorded ones. Nothing is measured, but in the last test."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from t5accel import machine
from t5accel.advice.evidence import GENERATE, OUR_LOOP, Draft, Export, Record, Relative, Scores, Setting, Source, Speed
from t5accel.advice.lines import call, gate, line, program
from t5accel.advice.model_size import PUBLISHED, decoder_weights, weights_per_step
from t5accel.advice.need import Distance, Need, parse_limits
from t5accel.advice.recorded import SYSTEMS as KNOWN_SYSTEMS
from t5accel.advice.recorded import TECHNIQUES as KNOWN_TECHNIQUES
from t5accel.advice.recorded import read_record, read_rows
from t5accel.advice.text import report
from t5accel.advise import RANDOM, SAME, TOO_MUCH, UNKNOWN, WITHIN, advise, beats, recommend
from t5accel.errors import InputError, ModelUnavailableError, NotT5Error, UnknownModelError
from t5accel.graphs.recipes import RECIPES, as_recipe
from t5accel.peers import SYSTEMS, cell_of, pairwise
from t5accel.timing import Ratio

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "data/results"
HERE = {"cpu": "A", "usable_threads": 2, "cpu_flags": ["avx2", "avx512_vnni"]}
SIZES = {"mini": 100, "small": 800, "huge": 6400}
AT_64 = dict(batch=1, beams=1, source_tokens=64, new_tokens=64, threads=2)


# --- by hand ----------------------------------------------------------------------------------------------------------


def ratio(*samples: float) -> Ratio:
    return Ratio(samples, median(samples), min(samples), max(samples))


def source(file: str = "a.json", row: int = 0, cpu: str = "A", fresh: bool = False) -> Source:
    return Source(file, row, {**HERE, "cpu": cpu}, {"onnxruntime": "1.0"}, "2026-01-01", "abc", fresh)


def speed(recipe: str, *samples: float, at: Source | None = None, model: str = "mini", loop: str = OUR_LOOP,
          size: int | None = None, peak: int | None = None, **work: int) -> Speed:  # fmt: skip
    return Speed(at or source(), Setting(model, **{**AT_64, **work}), recipe, loop, ratio(*samples), 100.0, size, peak)


def scores(recipe: str, bleu: float, *, file: str = "a.json", model: str = "mini", em: float = 30.0) -> Scores:
    return Scores(source(file), model, recipe, {"bleu": bleu, "rougeL": 50.0, "exact_match": em})


def advice(*evidence, need: Need | None = None, weights: int | None = 100, here=HERE, **wanted):
    """From evidence; the need is for the translations of mini where nothing else is said."""
    need = need or Need(**{"model": "mini", "task": "translation", **wanted})
    return advise(need, Record(evidence), weights=weights, here=here, size_of=SIZES.get)


def chosen(*evidence, **wanted) -> str | None:
    best = advice(*evidence, **wanted).recommended
    return best and best.speed.recipe


told = partial(report, versions={})  # where nothing is said of versions
WHOLE = scores("fp32", 28.0)
LADDER = (speed("fp32", 4, 4, 4), speed("int8", 8, 8, 8), speed("int4", 9, 9, 9))


# --- the need ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (dict(model=""), "model is ''"), (dict(model=None), "model is None"),
        (dict(task="poems"), "task is 'poems'; give one of translation, summaries, questions"),
        (dict(matters="speed"), "matters is 'speed'"), (dict(device="tpu"), "device is 'tpu'"),
        (dict(batch=0), "batch is 0"), (dict(beams=0), "beams is 0"), (dict(beams=1.5), "beams is 1.5"),
        (dict(source_tokens=-1), "source_tokens is -1"), (dict(new_tokens=True), "new_tokens is True"),
        (dict(threads=0), "threads is 0"), (dict(max_loss={"chrf": 1}), "some of bleu, rougeL, exact_match"),
        (dict(max_loss=0.5), "max_loss is 0.5"), (dict(max_loss={"bleu": -1}), "max_loss['bleu'] is -1"),
        (dict(max_loss={"bleu": float("nan")}), "max_loss['bleu'] is nan"),
        (dict(max_loss={"bleu": "1"}), "max_loss['bleu'] is '1'"),
    ],
)  # fmt: skip
def test_a_need_that_is_none_is_refused(wrong, said):
    with pytest.raises(InputError, match=re.escape(said)):
        Need(**wrong)


def test_limits_are_those_of_the_task_unless_others_are_given():
    assert Need().limits == {"bleu": 1.0, "rougeL": 1.0, "exact_match": 1.0}
    assert Need(task="questions").limits == {"exact_match": 1.0}
    assert Need(task="questions", max_loss={"bleu": 0.5}).limits == {"bleu": 0.5}
    assert Need(task="translation", matters="quality").limits == {"bleu": 0.0}
    assert parse_limits(["bleu = 0.5"]) == {"bleu": 0.5} and parse_limits([]) == {}
    for wrong in ("bleu", "bleu=", "bleu=little", ""):
        with pytest.raises(InputError, match="as in bleu=0.5"):
            parse_limits([wrong])


# --- which run --------------------------------------------------------------------------------------------------------


def test_ratios_are_ranked_within_the_nearest_run_alone():
    near, far = source("near.json"), source("far.json", 7)
    found = advice(
        speed("fp32", 4, at=near), speed("fp32", 30, at=far, batch=4), speed("fp32", 2, at=far, batch=4, loop=GENERATE),
        speed("fp32", 3, at=far, batch=8, loop=GENERATE),
    )  # fmt: skip
    assert [one.speed.ratio.median for one in found.candidates] == [4]
    ((apart, distance),) = found.apart
    assert (apart.speed.loop, apart.speed.ratio.median, distance.batch) == (GENERATE, 2, 4.0)
    assert "generate(), of another run: 2.00x" in told(found) and "30.00x" not in told(found)


def test_the_nearest_run_is_the_one_with_the_fewest_doublings():
    rows = [speed("fp32", 2, at=source("a.json"), batch=8), speed("fp32", 3, at=source("b.json"), batch=32)]
    assert advice(*rows, batch=16).candidates[0].speed.ratio.median == 2  # as far, and first by name
    assert advice(*rows, batch=17).candidates[0].speed.ratio.median == 3
    other_model = speed("fp32", 5, at=source("c.json"), model="small", batch=16)
    assert advice(*rows, other_model, batch=17).candidates[0].speed.ratio.median == 3
    both = [speed("fp32", 2, batch=4, source_tokens=128), speed("fp32", 3, at=source("b.json"), source_tokens=256)]
    assert advice(*both).candidates[0].speed.ratio.median == 3


def test_greedy_search_and_beams_say_nothing_of_each_other():
    greedy, beams = speed("fp32", 4), speed("fp32", 3, at=source("b.json"), beams=4)
    assert advice(greedy, beams, beams=2).candidates[0].speed is beams
    assert advice(greedy, beams).candidates[0].speed is greedy
    assert advice(beams).recommended is None and "nothing is recorded for greedy search" in told(advice(beams))
    assert "beam search cannot stream" in told(advice(beams, beams=4))
    assert "stream" not in told(advice(greedy))


def test_beyond_a_factor_of_eight_there_is_no_advice():
    rows = [speed("fp32", 4, batch=8), speed("fp32", 9, batch=64, at=source("b.json"))]
    assert advice(*rows).recommended.speed.ratio.median == 4
    found = advice(speed("fp32", 4, batch=9), rows[1])
    assert found.recommended is None and found.nearest[0].setting.batch == 9
    assert "batch 9 times yours" in told(found) and "--measure" in told(found)
    for work in (dict(source_tokens=8), dict(new_tokens=4), dict(model="huge")):
        assert advice(speed("fp32", 4, **{**dict(source_tokens=64, new_tokens=64), **work}),
                      source_tokens=66, new_tokens=64).recommended is None  # fmt: skip


def test_how_far_the_run_is_stands_in_the_report():
    assert "far from your case" not in told(advice(speed("fp32", 4, batch=2)))
    found = advice(speed("fp32", 4, batch=3, model="small"), weights=200)
    assert "far from your case (model size 4 times, batch 3 times yours)" in told(found)
    assert Distance(1, 1, 1, 0.25, 1).farthest == 4 and not Distance(1, 1, 1, 0.25, 1).is_near
    assert Distance(1, 8, 1, 1, 1).fits and not Distance(1, 1, 1, 1, 0.12).fits


def test_this_machine_comes_first_among_runs_that_are_near_and_not_before_nearer_ones():
    ours, theirs = source("b.json"), source("a.json", cpu="B")
    near = [speed("fp32", 2, at=ours, batch=2), speed("fp32", 3, at=theirs)]
    assert advice(*near).candidates[0].speed.source is ours
    far = [speed("fp32", 2, at=ours, batch=4), speed("fp32", 3, at=theirs)]
    found = advice(*far)
    assert found.candidates[0].speed.source is theirs and "another machine (B, 2 threads; this one: A" in told(found)
    assert "another machine" not in told(advice(*near))


def test_what_was_measured_now_comes_first_of_all():
    now = speed("fp32", 2, at=source("z.json", fresh=True))
    found = advice(speed("fp32", 4), speed("int8", 8), now)
    assert found.candidates[0].speed is now and "measured now" in told(found) and "--measure" not in told(found)


def test_of_runs_that_are_alike_the_one_with_more_configurations_is_taken():
    found = advice(speed("fp32", 3), speed("fp32", 4, at=source("b.json")), speed("int8", 8, at=source("b.json")))
    assert {one.speed.source.file for one in found.candidates} == {"b.json"}


def test_models_of_unknown_size_say_nothing():
    assert advice(speed("fp32", 4, model="small"), weights=None).recommended is None
    assert "not on this machine" in told(advice(speed("fp32", 4, model="small"), weights=None))
    assert advice(speed("fp32", 4), weights=None).recommended  # of this very model
    assert advice(speed("fp32", 4, model="elsewhere")).recommended is None
    own = Need("me/mine")
    assert advice(speed("fp32", 4, model="me/mine"), need=own).distance.model_size == 1

    def gone(name: str) -> int:
        raise UnknownModelError(name)

    found = advise(Need(), Record((speed("fp32", 4, model="x"),)), weights=9, here=HERE, size_of=gone)
    assert found.recommended is None


def test_nothing_is_said_of_another_device():
    found = advice(*LADDER, device="cuda")
    assert found.recommended is None and not found.candidates and "ran on cuda" in told(found)


# --- which configuration ----------------------------------------------------------------------------------------------


def test_the_fastest_that_loses_no_more_than_allowed():
    measured = (WHOLE, scores("int8", 27.5), scores("int4", 26.9))
    assert chosen(*LADDER, *measured) == "int8"
    assert chosen(*LADDER, *measured, max_loss={"bleu": 1.2}) == "int4"
    assert chosen(*LADDER, *measured, max_loss={"bleu": 0.4}) == "fp32"
    assert chosen(*LADDER, *measured, task="summaries") == "int4"  # which loses nothing there
    found = advice(*LADDER, *measured)
    assert [one.quality for one in found.candidates] == [TOO_MUCH, WITHIN, SAME] and found.if_gated is None


def test_all_scores_count_where_no_task_is_named():
    measured = (WHOLE, scores("int8", 28.0, em=28.5), scores("int4", 26.0))
    assert chosen(*LADDER, *measured, task=None) == "fp32" and chosen(*LADDER, *measured) == "int8"


def test_where_quality_matters_a_gain_is_chance_and_the_same_tokens_are_wanted():
    measured = (WHOLE, scores("int8", 27.99), scores("int4", 28.1))
    assert chosen(*LADDER[:2], *measured, matters="quality") == "fp32"
    assert chosen(*LADDER, *measured, matters="quality") == "fp32"
    assert chosen(*LADDER, *measured, matters="quality", max_loss={"bleu": 0.0}) == "int4"
    inexact = [one for one in LADDER if one.recipe != "fp32"]  # where no run has the same tokens, no score may fall
    assert chosen(*inexact, *measured, matters="quality") == "int4"


def test_what_was_never_scored_on_this_model_waits_for_a_gate():
    others = (scores("fp32", 28.0, model="small"), scores("int8", 28.0, model="small"))
    found = advice(*LADDER, *others)
    assert found.recommended.speed.recipe == "fp32" and found.if_gated.speed.recipe == "int4"
    assert [one.quality for one in found.candidates] == [UNKNOWN, UNKNOWN, SAME]
    text = told(found)
    assert 'quantize(cached_export("mini"), "mini-int4", "int4"' in text and "no other model's loss" in text
    slower = (speed("fp32", 4, 4), speed("int8", 3, 3))
    assert advice(*slower).if_gated is None
    assert advice(speed("int8", 0.9)).if_gated is None


def test_random_weights_have_nothing_to_lose():
    found = advice(*LADDER, need=Need("random:t5-small"))
    assert found.recommended.speed.recipe == "int4" and found.candidates[0].quality == RANDOM


def test_losses_are_formed_within_a_file():
    other = scores("fp32", 40.0, file="other.json"), scores("int8", 39.5, file="other.json")
    found = advice(*LADDER[:2], *other, WHOLE)
    assert found.recommended.losses == {"bleu": 0.5}
    assert advice(*LADDER[:2], scores("int8", 39.5, file="other.json"), WHOLE).if_gated.speed.recipe == "int8"


def test_what_cannot_be_told_apart_goes_by_loss_and_then_by_bytes():
    fast, level = speed("int4", 9, 12, 9, size=7), speed("int8", 8, 13, 8, size=9)
    less = (WHOLE, scores("int4", 27.2), scores("int8", 27.9))
    found = advice(fast, level, *less)
    assert found.recommended.speed is level and [one.speed for one in found.tied] == [fast]
    assert "=: not slower" in told(found)
    equal = (WHOLE, scores("int4", 28.5), scores("int8", 28.0))  # what is gained counts as nothing
    assert chosen(fast, replace(level, bytes_on_disk=6), *equal) == "int8"
    assert chosen(fast, level, *equal) == "int4"
    slower = speed("int8", 8, 11, 8, size=1)
    assert chosen(fast, slower, *less) == "int4" and not advice(fast, slower, *less).tied
    assert beats(fast.ratio, slower.ratio) and not beats(fast.ratio, level.ratio)


def test_what_is_not_faster_than_transformers_is_not_recommended():
    found = advice(speed("fp32", 0.9, 1.0, 1.2))
    assert found.recommended is None and "Stay with that" in told(found)
    assert chosen(speed("fp32", 0.9, 1.01, 1.2)) == "fp32"


def test_where_memory_matters_the_smallest_comes_first_however_fast():
    rows = [speed("fp32", 4, size=40, peak=400), speed("int8", 8, size=10, peak=300)]
    rows.append(speed("int4", 0.5, size=9, peak=200))
    good = (WHOLE, scores("int8", 28.0), scores("int4", 28.0))
    assert chosen(*rows, *good, matters="memory") == "int4" and chosen(*rows, *good) == "int8"
    by_peak = [*rows[:2], replace(rows[2], bytes_on_disk=50)]
    assert chosen(*by_peak, *good, matters="memory") == "int4"
    without_a_peak = [*rows[:2], replace(rows[2], bytes_on_disk=11, peak_memory_bytes=None)]
    assert chosen(*without_a_peak, *good, matters="memory") == "int8"
    found = advice(*rows, WHOLE, matters="memory")
    assert found.recommended.speed.recipe == "fp32" and found.if_gated.speed.recipe == "int4"
    unknown = [speed("fp32", 4), speed("int8", 8, size=10)]
    assert chosen(*unknown, *good, matters="memory") == "int8"


def test_sizes_may_come_from_another_row_of_the_same_model_recipe_and_loop():
    with_size = speed("fp32", 4, at=source("b.json"), batch=8, size=40, peak=400)
    others = [speed("fp32", 4, model="small", at=source("0.json"), size=1), speed("fp32", 4, loop=GENERATE, size=2)]

    def of_our_loop(*more: Speed) -> tuple[int | None, int | None]:
        candidates = advice(speed("fp32", 4), *others, *more).candidates
        (one,) = (one for one in candidates if one.speed.loop == OUR_LOOP)
        return one.bytes_on_disk, one.peak_memory_bytes

    assert of_our_loop(with_size) == (40, None)  # the peak of eight texts is not that of one
    assert of_our_loop(with_size, speed("fp32", 4, at=source("c.json"), peak=300)) == (40, 300)


# --- beside it --------------------------------------------------------------------------------------------------------


def draft(task: str = "translation", recipe: str = "fp32", batch: int = 1, model: str = "mini", at=(1.5, 2.0)) -> Draft:
    return Draft(source("drafts.json"), model, task, recipe, batch, "lookup", ratio(*at), 47, 48)


def test_guessing_is_shown_at_the_nearest_batch_of_the_task_the_model_and_the_recipe():
    eight, one = draft(batch=8), draft()
    for order in ((eight, one), (one, eight)):
        assert advice(speed("fp32", 4), *order).drafts == (one,)
        assert advice(speed("fp32", 4), *order, batch=6).drafts == (eight,)
    others = draft(task="summaries"), draft(recipe="int8"), draft(model="small")
    assert advice(speed("fp32", 4), *others).drafts == ()
    assert advice(speed("fp32", 4), *others, task=None).drafts == (others[0],)
    assert advice(speed("fp32", 4, beams=4), one, beams=4).drafts == ()


def test_whether_guessing_pays_is_said():
    text = told(advice(speed("fp32", 4), draft()))
    assert "lookup on translation, batch 1: 1.75x (1.50–2.00, n=2) greedy search in fp32, 47 of 48 answers" in text
    assert "drafts.json, row 0): it pays" in text
    assert "it does not pay" in told(advice(speed("fp32", 4), draft(at=(0.9, 1.0))))
    assert "not in every round" in told(advice(speed("fp32", 4), draft(at=(0.9, 1.4))))
    assert "copies from its source" in told(advice(speed("fp32", 4)))
    assert "copies from its source" not in text


def test_smaller_models_are_shown_with_what_they_lose():
    def smaller(loss: float, *samples: float, model: str = "one layer", whole: str = "mini", recipe: str = "fp32"):
        losses = {"bleu": loss, "rougeL": 20.0, "exact_match": 20.0}
        return Relative(source("students.json"), model, whole, recipe, 1, ratio(*samples), losses, 30_000_000)

    fp32 = speed("fp32", 4)
    text = told(advice(fp32, smaller(0.5, 1.5, 2)))
    assert "smaller model one layer, fp32, batch 1: 1.75x (1.50–2.00, n=2) mini in fp32, BLEU -0.5, 30 MB" in text
    assert "within the limit; train it" in text
    assert 'take it: accelerate("mini", …)' in told(advice(fp32, smaller(0.5, 1.5, 2, model="mini")))
    assert "loses too much" in told(advice(fp32, smaller(1.5, 1.5, 2)))
    several = told(advice(fp32, *(smaller(loss, 2, model=f"of {loss}") for loss in (9.5, 0.5, 1.5, 2.5, 0.25))))
    assert [several.index(f"model of {loss}") for loss in (0.5, 0.25, 1.5)] == sorted(
        several.index(f"model of {loss}") for loss in (0.5, 0.25, 1.5)
    )
    assert "2 more smaller models lose more than that" in several and "of 9.5" not in several
    assert "not faster in every round" in told(advice(fp32, smaller(0.5, 0.9, 2)))
    assert not advice(fp32, smaller(0, 2, whole="small"), smaller(0, 2, recipe="int8")).relatives


def test_the_time_of_the_export_is_that_of_the_model_itself_or_of_the_one_measured():
    exports = Export(source(), "small", 2.0), Export(source(), "mini", 0.25), Export(source(), "huge", 99.0)
    assert "0.2 s for mini" in told(advice(speed("fp32", 4), *exports[1:]))
    assert "2.0 s for small" in told(advice(speed("fp32", 4, model="small"), exports[0], exports[2]))
    assert "the first call exports" not in told(advice(speed("fp32", 4), exports[2]))


# --- what it says -----------------------------------------------------------------------------------------------------


def test_the_line_makes_the_recipe_that_was_measured():
    from t5accel.api import tuned

    made = {}

    def accelerate(model, *, precision="fp32", tuned_for="latency", threads=None):
        made.update(model=model, recipe=tuned(as_recipe(precision), tuned_for), threads=threads)

    for name in RECIPES:
        (one,) = advice(speed(name, 4)).candidates
        exec(line(one, Need('odd "name"', threads=3)), {"accelerate": accelerate})
        assert made == {"model": 'odd "name"', "recipe": RECIPES[name], "threads": 3}
    assert line(one, Need("mini")).endswith('accelerate("mini", precision="int4")')


def test_the_call_is_that_of_the_loop_that_was_measured():
    ours, theirs = (advice(speed("fp32", 4, loop=loop)).candidates[0] for loop in (OUR_LOOP, GENERATE))
    assert call(ours, Need()).startswith("greedy(model.backend")
    assert re.fullmatch(r"beam_search\(model.backend, .*, num_beams=4\).sequences", call(ours, Need(beams=4)))
    assert call(theirs, Need(beams=4)) == "model.generate(**batch, num_beams=4, do_sample=False)"
    assert any("import beam_search" in text for text in program(ours, Need(beams=4)))
    assert any("tokenizer" in text for text in program(ours, Need()))
    assert not any("tokenizer" in text for text in program(ours, Need("random:t5-small")))
    assert not any("decoding" in text for text in program(theirs, Need()))
    for text in (*program(ours, Need()), *program(theirs, Need()), *gate(ours, Need())):
        if text.startswith("from "):
            exec(text, {})  # such names there are


def test_the_gate_is_the_one_that_the_recipe_can_pass():
    int8, fp16 = (advice(speed(name, 4)).candidates[0] for name in ("int8", "fp16"))
    *_, first, second = gate(int8, Need("random:t5-small", task="questions", max_loss={"exact_match": 0.5}))
    assert first == (
        'quantize(cached_export("random:t5-small"), "random-t5-small-int8", "int8", '
        'score=text_quality(names=["questions"]), max_loss={"exact_match": 0.5})'
    )
    assert second == 'model = accelerate("random-t5-small-int8")'
    assert ["fp32" in text for text in gate(fp16, Need())[-2:]] == [True, False]
    assert not any("quantize" in text for text in gate(fp16, Need()))


def test_a_processor_without_8_bit_products_is_warned_of_integers_alone():
    plain = {**HERE, "cpu_flags": ["avx2"]}
    said = "no instructions for 8-bit products"
    assert said in told(advice(*LADDER, here=plain)) and said not in told(advice(*LADDER))
    assert said not in told(advice(LADDER[0], here=plain))


def test_other_versions_and_threads_are_named():
    found = advice(speed("fp32", 4))
    assert "measured with 2 threads, and you want 5" in told(advice(speed("fp32", 4), threads=5))
    assert ", on cpu, 5 threads" in told(advice(speed("fp32", 4), threads=5))
    assert "measured with onnxruntime 1.0; here is 2.0" in report(found, versions={"onnxruntime": "2.0"})
    assert "measured with" not in report(found, versions={"onnxruntime": "1.0", "transformers": "9"})


# --- the files --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> Record:
    return read_record([RESULTS])


def content(*rows: dict, **more) -> dict:
    return {"machine": {"cpu": "A", "usable_threads": 2}, "versions": {}, "date": "2026-01-01", "commit": "c",
            "model": "random:t5-small", "threads": 2, "rows": list(rows), **more}  # fmt: skip


def read(name: str) -> dict:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def test_every_ratio_stands_in_the_row_that_it_names(recorded):
    files = {name: read(name) for name in {one.source.file for one in recorded.of(Speed)}}
    assert {"scoreboard-mini.json", "scoreboard-t5-small.json", "precision.json", "peers-cpu.json"} <= files.keys()
    for one in recorded.of(Speed):
        rows = files[one.source.file]["rows"]
        row = rows[one.source.row]
        if "agreement" in row:
            here = [other for other in rows if cell_of(other) == cell_of(row)]
            assert one.ratio.median == pairwise(here, row["system"], "transformers 4.57")
        else:
            assert (one.ratio.median, one.setting.model) == (row["ratio"]["median"], row["model"])
            assert RECIPES[one.recipe].hash in (row.get("hash"), row["recipe"])


def test_a_peers_row_counts_if_its_recipe_is_still_that():
    def rows(**of_int4) -> list:
        cell = dict(batch=1, source_tokens=32, beams=1, new_tokens=64, agreement=1.0)
        reference = dict(cell, system="transformers 4.57", precision="fp32", latency_s=[4.0])
        mine = dict(cell, system="t5accel int4", precision="int4", latency_s=[1.0], **of_int4)
        found = read_rows(content(reference, mine) | {"model": "random:t5-small", "threads": 2}, "peers-cpu.json").found
        return [(one.recipe, one.ratio.median) for one in found]

    assert rows(hash=RECIPES["int4"].hash) == [("int4", 4.0)]
    assert rows(hash="0" * 16) == rows() == []


def test_the_names_that_are_read_are_those_that_are_measured():
    from t5accel.techniques import TECHNIQUES, THROUGHPUT

    names = {technique.name: technique.recipe for technique in (*TECHNIQUES, THROUGHPUT)}
    assert KNOWN_TECHNIQUES.keys() <= names.keys()
    ours = {system.name: system.precision for system in SYSTEMS if system.ours}
    assert KNOWN_SYSTEMS.keys() <= ours.keys()
    assert all(ours[name] == recipe.split("-")[0] for name, (recipe, _) in KNOWN_SYSTEMS.items())


def test_rows_of_other_kinds_are_left_alone_and_counted(recorded):
    assert recorded.left_out["course.json"] == len(read("course.json")["rows"])
    assert recorded.left_out["training-mini.json"] == len(read("training-mini.json")["rows"])
    odd = content({"measured": "gears", "technique": "x"}, {"id": "C01"}, 7, {"measured": "floor", "model": "x"})
    assert read_rows(odd, "odd.json").left_out == {"odd.json": 4}


def board(**other) -> dict:
    row = dict(
        technique="ONNX Runtime, our loop, int8", backend="b", model="mini", precision="int8",
        recipe=RECIPES["int8"].hash, batch=1, beams=1, source_tokens=64, new_tokens=64, threads=2, latency_s=[1.0],
        tokens_per_s=64.0, bytes_on_disk=9, peak_memory_bytes=90, quality=None, reference="transformers with cache",
        ratio={"samples": [2.0, 4.0, 9.0]}, equality="", machine="A",
    )  # fmt: skip
    return {**row, **other}


def quality(bleu: float, limit: int | None = None) -> dict:
    return {"limit": limit, "translation": {"bleu": bleu}, "summaries": {"all": {"rougeL": 2.0}},
            "questions": {"all": {"exact_match": 3.0}}}  # fmt: skip


def test_a_row_of_a_scoreboard_counts_if_its_recipe_is_still_that():
    (one,) = read_rows(content(board()), "b.json").found
    assert (one.recipe, one.loop, one.ratio, one.bytes_on_disk) == ("int8", OUR_LOOP, ratio(2.0, 4.0, 9.0), 9)
    assert str(one.source) == "b.json, row 0" and one.setting == Setting("mini", 1, 1, 64, 64, 2)
    for other in (dict(recipe="0" * 16), dict(precision="int9"), dict(technique="magic"), dict(reference="naive")):
        assert not read_rows(content(board(**other)), "b.json").found


def test_scores_of_a_part_of_the_sets_are_no_evidence():
    assert len(read_rows(content(board(quality=quality(1.0))), "b.json").of(Scores)) == 1
    assert not read_rows(content(board(quality=quality(1.0, limit=4))), "b.json").of(Scores)


def test_a_peers_row_in_fp32_has_to_have_the_tokens_of_the_reference():
    cell = dict(precision="fp32", batch=8, source_tokens=32, beams=4, new_tokens=16)
    reference = dict(system="transformers 4.57", latency_s=[2.0, 4.0], agreement=1.0, **cell)
    ours = dict(system="t5accel", latency_s=[1.0, 1.0], agreement=1.0, **cell)
    (one,) = read_rows(content(reference, ours), "p.json").found
    assert (one.ratio.samples, one.setting.beams, one.tokens_per_s) == ((2.0, 4.0), 4, 128.0)
    for other in (dict(agreement=0.99), dict(latency_s=[]), dict(system="OpenVINO"), dict(source_tokens=64)):
        assert not read_rows(content(reference, {**ours, **other}), "p.json").found
    int8 = {**ours, "system": "t5accel int8", "precision": "int8", "agreement": 0.1}
    assert [one.recipe for one in read_rows(content(reference, int8), "p.json").found] == ["int8"]


def test_drafts_count_with_the_encoder_in_their_time():
    row = dict(
        measured="drafts", model="mini", task="summaries", recipe="int8", hash=RECIPES["int8"].hash, batch=8,
        encoder="included", system="lookup", answers=32, equal=31, ratio={"samples": [1.5, 2.5]},
    )  # fmt: skip
    (one,) = read_rows(content(row), "drafts.json").found
    assert (one.ratio.median, one.equal, one.answers, one.task) == (2.0, 31, 32, "summaries")
    assert not read_rows(content({**row, "encoder": "beforehand"}), "drafts.json").found
    assert not read_rows(content({**row, "hash": "0" * 16}), "drafts.json").found


def test_a_smaller_model_is_compared_with_the_whole_one_in_the_same_recipe():
    def row(model: str, recipe: str, bleu: float, samples: list[float] | None) -> dict:
        return dict(model=model, recipe=recipe, hash=RECIPES[recipe].hash, dims={}, batch=1, size_bytes=5,
                    quality=quality(bleu), ratio=samples and {"samples": samples})  # fmt: skip

    rows = [row("mini", "fp32", 28.0, None), row("mini", "int8", 27.5, [2.0, 2.0]),
            row("small", "fp32", 26.0, [1.5, 1.6]), row("small", "int8", 25.0, [3.0, 5.0])]  # fmt: skip
    found = read_rows(content(*rows), "f.json")
    fp32, int8 = found.of(Relative)
    assert (fp32.ratio.samples, int8.ratio.samples) == ((1.5, 1.6), (1.5, 2.5))
    assert (fp32.losses["bleu"], int8.losses["bleu"], int8.whole) == (2.0, 3.0, "mini")
    assert len(found.of(Scores)) == 4
    assert not read_rows(content(*rows[1:]), "f.json").of(Relative)  # begins with int8
    ours = read_rows(content(*rows[:3], {**rows[3], "bundled": "mini-d1"}), "f.json")
    assert [one.model for one in ours.of(Relative)] == ["small", "mini-d1"]
    assert {one.model for one in ours.of(Scores)} == {"mini", "small", "mini-d1"}
    unscored = [{**one, "quality": None} for one in rows]
    assert not read_rows(content(*unscored), "f.json").found


@pytest.mark.parametrize(
    "broken", [dict(ratio={"samples": []}), dict(ratio={"samples": [0.0]}), dict(ratio=None), dict(quality={})]
)
def test_a_broken_row_of_a_known_kind_is_named(broken):
    with pytest.raises(InputError, match="b.json, row 1: not as this version writes it"):
        read_rows(content(board(), board(**broken)), "b.json")


def test_places_that_are_missing_or_damaged_are_named(tmp_path):
    with pytest.raises(InputError, match="No results at .*nowhere"):
        read_record([tmp_path / "nowhere"])
    (tmp_path / "list.json").write_text("[1]")
    assert read_record([tmp_path]).left_out == {"list.json": 0}
    with pytest.raises(InputError, match="list.json holds no rows"):
        read_record([tmp_path / "list.json"])
    (tmp_path / "half.json").write_text('{"rows": [')
    with pytest.raises(InputError, match="half.json cannot be read as JSON"):
        read_record([tmp_path])


def test_files_of_the_same_name_are_runs_apart(tmp_path):
    for folder, samples in (("one", [2.0, 2.0]), ("two", [3.0, 3.0, 3.0])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.json").write_text(json.dumps(content(board(ratio={"samples": samples}))))
    record = read_record([tmp_path / "one", tmp_path / "two"])
    assert [one.source.file for one in record.of(Speed)] == ["mine.json", str(tmp_path / "two" / "mine.json")]


def test_the_bundled_model_gets_advice_that_its_recorded_rows_support():
    found = recommend(Need("mini", task="translation"))
    best = found.recommended
    assert best.losses["bleu"] <= 1 and best.speed.ratio.median > 1 and best is not found.candidates[-1]
    row = read(best.speed.source.file)["rows"][best.speed.source.row]
    text = told(found)
    assert f"{row['ratio']['median']:.2f}x" in text and line(best, found.need) in text and row["model"] == "mini"
    assert "Looked in" in text and "course.json" in text


def test_a_model_of_the_hub_is_not_loaded_and_waits_for_a_gate():
    found = recommend(Need("google-t5/t5-small", task="summaries", beams=4, source_tokens=512))
    assert found.distance.model_size == 1 and found.recommended.speed.recipe == "fp32"
    assert found.if_gated.quality == UNKNOWN and found.recommended.speed.setting.beams == 4


def test_rows_of_ones_own_are_taken_where_they_are_nearer(tmp_path):
    facts = machine.facts(gpu=False)
    own = content(board(batch=5, technique="ONNX Runtime, our loop, numpy feeds", precision="fp32",
                        recipe=RECIPES["fp32"].hash), machine=facts)  # fmt: skip
    (tmp_path / "mine.json").write_text(json.dumps(own))
    found = recommend(Need("mini", batch=5), results=[tmp_path / "mine.json"])
    assert str(found.recommended.speed.source) == "mine.json, row 0" and found.distance.doublings == 0
    assert found.record.looked_in[1] == str(tmp_path / "mine.json")


# --- sizes by name ----------------------------------------------------------------------------------------------------


def test_published_sizes_need_no_hub():
    assert weights_per_step("t5-small") == weights_per_step("google-t5/t5-small") == 38_479_360
    assert PUBLISHED["google/flan-t5-base"] == "flan-t5-base" and weights_per_step("google/flan-t5-base")
    assert weights_per_step("nobody/has-this-one") is None


def test_a_folder_is_known_by_its_configuration(tmp_path):
    config = dict(vocab_size=100, d_model=8, d_kv=4, d_ff=16, num_layers=3, num_heads=2, model_type="t5")
    (tmp_path / "config.json").write_text(json.dumps(config))
    per_layer = 8 * ((4 * 2 + 2 * 2) * 4 + 2 * 16 + 3)
    assert weights_per_step(str(tmp_path)) == 3 * per_layer + 100 * 8 + 8
    assert decoder_weights({**config, "num_decoder_layers": 1}) == per_layer + 808
    assert decoder_weights({**config, "feed_forward_proj": "gated-gelu"}) == 3 * (per_layer + 8 * 16) + 808
    assert decoder_weights({**config, "model_type": "mt5"}) == 3 * (per_layer + 8 * 16) + 808
    widths = dict(decoder_heads=[2, 1, 2], cross_heads=[2, 2, 1], decoder_ff=[16, 16, 4])
    less = 8 * (4 * 4 + 2 * 4 + 2 * 12)
    assert decoder_weights({**config, "layer_widths": widths}) == 3 * per_layer + 808 - less


def test_names_and_folders_that_are_none_are_refused(tmp_path):
    with pytest.raises(UnknownModelError, match="'nope'.*mini"):
        weights_per_step("nope")
    with pytest.raises(UnknownModelError, match="random:t5-small"):
        weights_per_step("random:t5-tiny")
    with pytest.raises(ModelUnavailableError, match="holds no config.json"):
        weights_per_step(str(tmp_path))
    for text, error in (("{", "cannot be read"), ("[]", "is no configuration"), ("{}", "vocab_size is None")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelUnavailableError, match=error):
            weights_per_step(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(NotT5Error, match="'bert'"):
        weights_per_step(str(tmp_path))
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match="is an export"):
        weights_per_step(str(tmp_path))


def test_the_configuration_counts_as_the_weights_do(tiny_t5, kind):
    from t5accel.checkpoints import T5Dims

    model = tiny_t5(kind)
    assert decoder_weights(model.config.to_dict()) == machine.decoder_weights_per_step(T5Dims.of(model))


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cache_of_its_own")
def test_what_is_measured_now_is_evidence():
    import torch

    from t5accel.advice.measure_now import measure_now

    before = torch.get_num_threads()
    try:
        need = Need("mini", source_tokens=5, new_tokens=4, threads=1)
        record = measure_now(need, rounds=2)
    finally:
        torch.set_num_threads(before)
    speeds = record.of(Speed)
    assert {(one.recipe, one.loop) for one in speeds} == {
        ("fp32", GENERATE), ("fp32", OUR_LOOP), ("int8", OUR_LOOP), ("int4", OUR_LOOP), ("int8-dynamic", OUR_LOOP)
    }  # fmt: skip
    assert all(one.source.fresh and one.setting == Setting("mini", 1, 1, 5, 4, 1) for one in speeds)
    found = advise(need, record, weights=1, here=machine.facts(gpu=False))
    assert len(found.candidates) == 5 and "measured now" in told(found)


def test_beams_and_other_devices_are_not_measured():
    from t5accel.advice.measure_now import measure_now

    for need in (Need(beams=2), Need(device="cuda")):
        with pytest.raises(InputError, match="Only greedy search on a CPU"):
            measure_now(need)
