"""Rates, knees and the program that records them: at toy size, and of two real servers for a moment."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.results import checked
from bench.serving import rates
from bench.serving.rates import BASELINE, OURS, STATIC, is_met, keeps_up, knee, swept, targets
from bench.serving.servers import Server, other, ours
from t5accel.errors import InputError
from t5accel.models.load import BUNDLED, data_folder
from t5accel.parity import ParityError
from t5accel.tokenization import tokenizer_of


def point(rate: float, p99_s: float, **more: Any) -> dict[str, Any]:
    return {"rate_per_s": rate, "p99_s": p99_s, "limit_s": 1.0, "answered": 100, "unanswered": 0, **more}


def test_one_request_in_ten_wants_a_long_answer() -> None:
    seen: list[int] = []
    bodies = rates.mixed_bodies(lambda rng, tokens: seen.append(tokens) or "a", 200)
    lengths = [body["max_new_tokens"] for body in bodies]
    assert lengths.count(128) == 20 and {*lengths} == {4, 5, 6, 7, 8, 128} and min(seen) == 8 and max(seen) == 40
    assert all(body["min_new_tokens"] == body["max_new_tokens"] for body in bodies)


def test_who_refuses_does_not_keep_up() -> None:
    assert keeps_up(point(1.0, 0.5)) and not keeps_up(point(1.0, 1.5)) and not keeps_up(point(1.0, 0.5, unanswered=2))
    assert not keeps_up({"rate_per_s": 1.0, "limit_s": 1.0, "answered": 0, "unanswered": 0})
    assert knee([point(2.0, 0.5), point(1.0, 0.2)]) == 2.0 and knee([]) == 0.0
    open_loop = {**point(3.0, 0.1), "measured": "open loop", "model": "m", "system": "s"}
    rows = [open_loop | {"cell": cell} for cell in ("curve", "x")]
    assert rates.knees(rows, "m") == {"s": 3.0} and rates.knees(rows, "n") == {}


@pytest.mark.parametrize(("capacity", "start"), [(50.0, 10.0), (50.0, 200.0), (50.0, 50.0)])
def test_a_sweep_ends_just_beyond_the_knee(capacity: float, start: float) -> None:
    rows = [*swept(lambda rate: point(rate, 0.1 if rate <= capacity else 9.0), start, most=30)]
    found = knee(rows)
    assert capacity / 1.25 < found <= capacity and len(rows) < 12
    assert min(row["rate_per_s"] for row in rows if not keeps_up(row)) <= 1.26 * found
    assert len([*swept(lambda rate: point(rate, 9.0), 8.0, most=4)]) == 2 * 4, "where nothing is enough each twice"


def test_aims_are_held_against_what_was_measured() -> None:
    """Static batches of 10 requests/s and 900 ms for short answers; ours with 20 and 200."""
    about = dict(model="m", measured="open loop")
    rows = [
        {**point(rate, 0.5), **about, "cell": "curve", "system": name}
        for name, rate in ((BASELINE, 1.0), (STATIC, 10.0), (OURS, 20.0))
    ]
    assert targets(rows, "m") == [], "no knee was reached"
    rows += [{**row, "rate_per_s": 2 * row["rate_per_s"], "p99_s": 9.0} for row in rows]
    beside = {**about, "cell": "short beside long"}
    rows += [{**beside, "system": STATIC, "short_p99_s": 0.9}, {**beside, "system": OURS, "short_p99_s": 0.2}]
    rows += [dict(model="m", system=OURS, measured="sequential", source_tokens=n, p99_s=n / 100) for n in (32, 512)]
    found = {what.split()[0] + wanted: (value, is_met(wanted, value)) for what, wanted, value in targets(rows, "m")}
    assert found == {"knee>= 10": (20.0, True), "knee>= 1.5": (2.0, True), "p99>= 3": (pytest.approx(4.5), True),
                     "p99<= 3": (16.0, False)}  # fmt: skip
    assert targets(rows, "n") == []


def test_sources_have_exactly_as_many_tokens() -> None:
    script = import_module("bench.record.serving")
    model, rng = script.bundled(), np.random.default_rng(0)
    tokenizer = tokenizer_of(data_folder() / BUNDLED["mini"])
    for length in script.LENGTHS:
        assert tokenizer([model.text(rng, length)])["input_ids"].shape == (1, length)


@pytest.mark.long
def test_the_program_records_servers_and_goes_on_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = import_module("bench.record.serving")
    servers = [other("static", "mini", name=script.STATIC, threads=1), ours("mini", threads=1, encoder_cache_mb=0)]
    monkeypatch.setattr(script, "QUICK", script.Plan(0.3, 2, 0, (32,), 3, 0.5, 1, 1, 0.3, 1, 1))
    monkeypatch.setattr(script, "servers_for", lambda model, build, threads: [*servers, Server("none", ["false"])])
    file = tmp_path / "serving.json"
    monkeypatch.setattr("sys.argv", ["serving.py", "--quick", "--json", str(file), "--minutes", "0"])
    script.main()
    assert not file.exists(), "there was no time for anything"
    monkeypatch.setattr("sys.argv", ["serving.py", "--quick", "--json", str(file)])
    script.main()
    rows = [checked(row) for row in json.loads(file.read_text())["rows"]]
    kinds = {(row["cell"], row["measured"], row["system"]) for row in rows}
    for kind in ("start", "equality", "closed loop", "open loop", "sequential"):
        assert {("curve", kind, system) for system in (script.STATIC, script.OURS)} <= kinds
    assert ("streaming", "streaming", script.OURS) in kinds and ("restart", "restart", script.OURS) in kinds
    hostile = next(row for row in rows if row["measured"] == "hostile")
    assert hostile["answered"] + hostile["unanswered"] == 200 and hostile["equal"] == 24 and hostile["seconds"] < 20
    assert ("curve", "failure", "none") in kinds and all(row["model"] == "mini" for row in rows)
    equal = [row for row in rows if row["measured"] == "equality" and row["cell"] == "curve"]
    assert len(equal) == 2 and all(row["equal"] == row["of"] == 24 and row["distinct"] > 8 for row in equal)
    beside = [row for row in rows if row["cell"] == "neighbours"]
    assert beside and all(row["equal"] == row["of"] for row in beside if row["precision"] == "fp32")
    streamed = next(row for row in rows if row["cell"] == "streaming" and row["measured"] == "open loop")
    assert 0 < streamed["first_p50_s"] <= streamed["p99_s"] and "static" in rates.table(rows, "mini")
    monkeypatch.setattr(script.Measuring, "running", lambda *_, **__: pytest.fail("it is measured already"))
    before = file.read_text()
    script.main()
    assert file.read_text() == before


def test_other_answers_and_none_are_failures() -> None:
    script = import_module("bench.record.serving")

    class Wrong:
        url, server = "", Server("wrong", [])

    script.ask = lambda url, body: ("no", 1)
    with pytest.raises(ParityError, match="4 of 4"):
        script.compared(Wrong(), [{}, {}], [("yes", 1), ("yes", 2)])
    Wrong.server = Server("int8", [], precision="int8")
    assert script.compared(Wrong(), [{}, {}], [("no", 1), ("yes", 2)])["equal"] == 2

    class Dead:
        url, server = "http://127.0.0.1:9", Server("dead", [])

    with pytest.raises(InputError, match="answered nothing"):
        list(rates.curve(Dead(), [{"text": "a", "max_new_tokens": 4}], limit_s=1.0, seconds=0.1, clients=1))
