"""Servers to compare ours with: static batches, FastAPI around them, a repository for Triton, and processes."""

import asyncio
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from test_bench_commands import call, refused
from test_scheduler import Joining
from test_server import Letters

from bench.peers import GRIDS
from bench.serving.load import ask
from bench.serving.servers import Asked, Batches, Running, Server, free_port, make_app, other, ours, together
from bench.serving.triton import triton_server, write_repository
from bench.serving.triton_model import TritonPythonModel
from t5accel.errors import InputError, MissingPackageError, PeerError

TEXT = "translate English to French: I am tired."

# Static batches


def test_a_batch_answers_each_text_as_it_would_be_answered_alone() -> None:
    asked = [Asked("hello", 20), Asked("a", 3, 3), Asked("good morning", 40, 30), Asked("bye", 1)]
    found = together(Joining(), Letters(), asked)
    assert found == [together(Joining(), Letters(), [one])[0] for one in asked]
    assert len({text for text, _ in found}) == 4 and found[1][1] == 3 and 30 <= found[2][1] <= 40


def test_who_comes_while_a_batch_runs_waits_until_all_of_it_is_done() -> None:
    batches: list[list[str]] = []

    def answer(asked: Any) -> list[tuple[str, int]]:
        batches.append([one.text for one in asked])
        time.sleep(0.1)
        return [(one.text, 1) for one in asked]

    async def ask_them() -> list[tuple[str, int]]:
        waiting = Batches(answer, most=3, window_s=0.05)
        work = asyncio.create_task(waiting.work())
        first = [asyncio.create_task(waiting(Asked(text))) for text in "ab"]
        await asyncio.sleep(0.08)  # the window is over
        rest = [asyncio.create_task(waiting(Asked(text))) for text in "cdef"]
        found = await asyncio.gather(*first, *rest)
        work.cancel()
        return found

    found = asyncio.run(ask_them())
    assert found == [(text, 1) for text in "abcdef"]
    assert batches == [["a", "b"], ["c", "d", "e"], ["f"]]


def test_the_application_around_them() -> None:
    async def answers() -> list[httpx.Response]:
        def answer(asked: Any) -> list[tuple[str, int]]:
            if asked[0].text == "fail":
                raise ValueError("no")
            return together(Joining(), Letters(), asked)

        app = make_app(Batches(answer))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://t") as to:
            bodies = [dict(text="hello", max_new_tokens=9), dict(text="fail"), dict(words="hello"), dict(text="bye")]
            return [await to.get("/health/ready"), *[await to.post("/generate", json=body) for body in bodies]]

    ready, *found = asyncio.run(answers())
    assert [one.status_code for one in (ready, *found)] == [200, 200, 500, 422, 200]
    ((text, tokens),) = together(Joining(), Letters(), [Asked("hello", 9)])
    assert found[0].json() == {"answers": [{"texts": [text], "tokens": [tokens]}]}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    options = "--precision int8 --max-batch-rows 8 --window-ms 5 --instances 2 --threads 1"
    result = call("triton", "--out", folder, *options.split())
    assert result.exit_code == 0 and "mini-in-flight: POST /v2/models/mini-in-flight/generate_stream" in result.stdout
    return folder


def test_a_repository_has_two_models_and_keeps_other_versions(repository: Path, tmp_path: Path) -> None:
    batched, flying = ((repository / name / "config.pbtxt").read_text() for name in ("mini", "mini-in-flight"))
    assert "max_queue_delay_microseconds: 5000" in batched and "count: 2" in batched and "sequence" not in batched
    assert "max_candidate_sequences: 8" in flying and "iterative_sequence: true" in flying
    assert (repository / "mini/1/export/encoder.onnx").is_file()
    assert not (repository / "mini-in-flight/1/export").exists()
    assert batched.count("{") == batched.count("}") and flying.count("{") == flying.count("}")
    write_repository(repository, "mini", precision="int8", version=3, rows=8)
    assert sorted(path.name for path in (repository / "mini").iterdir()) == ["1", "3", "config.pbtxt"]
    assert "--version" in refused("triton", "--out", tmp_path, "--version", 0)
    with pytest.raises(InputError, match="letters, digits"):
        write_repository(tmp_path, "mini", name="a model")
    with pytest.raises(MissingPackageError, match="has no Triton"):
        triton_server(tmp_path, tmp_path, "mini")


def tensor(name: str, values: np.ndarray) -> Any:
    made = SimpleNamespace(name=name, values=values)
    made.as_numpy = lambda: made.values
    return made


def request(number: int = 0, **fields: Any) -> Any:
    """As Triton's Python backend hands one over; ``sent`` has what it is answered with."""
    kinds = {str: object, int: np.int32, bool: bool}
    made = SimpleNamespace(inputs={}, cancelled=False, again=False, sent=[], correlation_id=lambda: number)
    for name, value in fields.items():
        values = np.array([[value.encode() if isinstance(value, str) else value]], kinds[type(value)])
        made.inputs[name] = tensor(name, values)
    made.is_cancelled, made.get_response_sender = lambda: made.cancelled, lambda: made
    made.set_release_flags = lambda flags: setattr(made, "again", True)
    made.send = lambda response, flags=0: made.sent.append((response, flags))
    return made


def response(tensors: list[Any], error: Any = None) -> Any:
    return SimpleNamespace(error=error, values={one.name: one.values.ravel().tolist() for one in tensors})


@pytest.fixture
def opened(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of the repository, as Triton opens it."""
    stand_in = ModuleType("triton_python_backend_utils")
    stand_in.Tensor, stand_in.InferenceResponse, stand_in.TritonError = tensor, response, str
    stand_in.get_input_tensor_by_name = lambda asked, name: asked.inputs.get(name)
    stand_in.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, stand_in.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 2, 1
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)

    def open_model(name: str) -> TritonPythonModel:
        config: dict[str, Any] = {"max_batch_size": 8, "parameters": {"threads": {"string_value": "1"}}}
        if "flight" in name:
            config["parameters"]["export_of"] = {"string_value": "mini"}
            config["model_transaction_policy"] = {"decoupled": True}
        model, where = TritonPythonModel(), str(repository / name)
        model.initialize({"model_repository": where, "model_version": "1", "model_config": json.dumps(config)})
        return model

    return open_model


def test_a_batch_of_triton_s(opened: Any) -> None:
    model = opened("mini")
    bad = request(text=TEXT, max_new_tokens=0)
    several = request(text=TEXT)
    several.inputs["text"].values = np.array([[TEXT.encode()], [b"translate English to French: Help me."]], object)
    first, refusal, both = model.execute([request(text=TEXT, max_new_tokens=2), bad, several])
    assert first.values["tokens"] == [2] and "max_new_tokens" in refusal.error
    assert both.values["text"][0].decode() == "Je suis fatigué." and len(both.values["text"]) == 2
    model.finalize()


def test_sequences_of_triton_s_join_and_leave(opened: Any) -> None:
    model = opened("mini-in-flight")
    long, short, bad, gone = (request(1, text=TEXT, max_new_tokens=30, min_new_tokens=30, stream=True),
                              request(2, text=TEXT), request(3, text=TEXT, max_new_tokens=0),
                              request(4, text=TEXT, max_new_tokens=30, min_new_tokens=30))  # fmt: skip
    model.execute([long, gone])
    gone.cancelled = True
    model.execute([long, short, bad, gone])
    assert "max_new_tokens" in bad.sent[0][0].error and bad.sent[0][1] == 1
    assert "cancelled" in gone.sent[-1][0].error and not bad.again
    for _ in range(8):
        if not short.sent:
            model.execute([long, short])
    ((answer, last),) = short.sent
    assert answer.values["text"][0].decode() == "Je suis fatigué." and last == 1
    while long.sent[-1][1] != 1:
        model.execute([long])
    assert [one.values["tokens"][0] for one, _ in long.sent] == [*range(1, 31)] and not model.tickets


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("servers", {"triton", "ray"}),
        ("peers", {one.environment for grid in GRIDS.values() for group in grid.systems() for one in group} - {"ours"}),
    ],
)  # fmt: skip
def test_every_environment_of_others_has_its_list_with_exact_versions(kind: str, wanted: set[str]) -> None:
    root = Path(__file__).resolve().parents[2]
    lists = {path.stem: path.read_text(encoding="utf-8") for path in (root / "requirements" / kind).glob("*.txt")}
    makefile = (root / "Makefile").read_text(encoding="utf-8").splitlines()
    (made,) = [line for line in makefile if line.startswith(f"{kind.upper()} := ")]
    assert {*made.split()[2:]} == lists.keys() == wanted
    for name, text in lists.items():
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        assert lines and all(line.count("==") == 1 for line in lines)
        assert kind == "servers" or name == "llama-cpp" or any(line.startswith("torch==2.13.0") for line in lines)


def test_servers_are_started_asked_killed_started_again_and_quoted_where_they_do_not_start(tmp_path: Path) -> None:
    server = other("one-by-one", "mini", name="one by one", threads=1)
    with Running(server, tmp_path / "log") as running:
        assert ask(running.url + server.path, dict(text=TEXT)) == ("Je suis fatigué.", 5)
        running.kill()
        assert running.process.poll() == -9 and running.started_s > 0
    begun = ours("mini", precision="int8", threads=1, encoder_cache_mb=0)
    with Running(begun, tmp_path / "log", port=free_port()) as running:
        assert ask(running.url + begun.path, dict(text=TEXT, stream=True)) == ("Je suis fatigué.", 5)
    assert running.process.poll() is not None
    broken = Server("broken", [sys.executable, "-c", "raise SystemExit('no port {port}')"])
    with pytest.raises(PeerError, match="broken ended with exit status 1 before it was ready: no port [0-9]+"):
        Running(broken, tmp_path / "log")
