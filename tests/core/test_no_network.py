"""With a local model nobody is asked: what a user does, in processes that may connect to this machine alone."""

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPORT = ROOT / "tests" / "fixtures" / "exports-0.1.0" / "t5-fp32"

# Refuses look-ups and connections in Python, but to this machine, and writes them down: libraries go on without. What
# ONNX Runtime itself does is seen by tests/serve/test_server.py.
GUARD = """
import os, sys
HERE = (None, "", b"", "localhost", b"localhost", "127.0.0.1", b"127.0.0.1", "::1", b"::1", "0.0.0.0")
def guard(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    elif event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):  # else of a file's
        host = arguments[1][0]
    else:
        return
    if host not in HERE:
        with open(os.environ["ASKED"], "a") as file:
            print(event, host, file=file)
        raise OSError(101, "Network is unreachable")
sys.addaudithook(guard)
"""

IN_PYTHON = """
import sys
import t5accel
from starlette.testclient import TestClient
from t5accel.api import open_backend
from t5accel.cli import app
from t5accel.serve.app import make_app
from t5accel.serve.settings import Settings

def answer(model, text):
    batch = model.tokenizer([text], return_tensors="pt")
    model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=3)
    return model

export, TEXT = sys.argv[1], "translate English to French: I am tired."
answer(t5accel.accelerate("mini", threads=1, progress=False), TEXT).save_pretrained("saved")
answer(t5accel.accelerate(export, runtime="openvino", progress=False), "is sees")
t5accel.quantize(export, "int8", "int8", score=lambda backend: {"bleu": 50.0}, max_loss={"bleu": 1})
for command in (
    ["run", TEXT], ["run", "is sees", "--model", export], ["doctor"], ["cache", "list"],
    ["quantize", "--model", export, "--out", "again", "--eval", "dev.jsonl", "--max-loss", "100"],
    ["export", "--model", "mini-d1p", "--out", "encoder", "--encoder", "--precision", "int8"],
    ["batch", "rows.jsonl", "answers", "--model", export, "--threads", "1"],
):
    app(command, standalone_mode=False)
with TestClient(make_app(*open_backend(export, progress=False)[:2], Settings()), base_url="http://localhost") as client:
    assert client.post("/generate", json={"text": "is sees", "max_new_tokens": 3}).status_code == 200
print("all is done")
"""

ON_A_HUB = """
import t5accel
try:
    t5accel.load_model("nobody/nothing")
except t5accel.errors.ModelUnavailableError:
    print("all is done")
"""


@pytest.fixture
def guarded(tmp_path: Path) -> dict[str, str]:
    """The environment of such a process, where no library is told to stay offline; $ASKED is what it asked for."""
    (tmp_path / "sitecustomize.py").write_text(GUARD)
    told = re.compile(r"(?i)(HF_|TRANSFORMERS_|T5ACCEL_).*|.*_proxy|.*TELEMETRY.*|DO_NOT_TRACK")
    kept = {name: value for name, value in os.environ.items() if not told.fullmatch(name)}
    (tmp_path / "asked").touch()
    return kept | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "ASKED": str(tmp_path / "asked"),
        "HF_HOME": str(tmp_path / "hub"), "T5ACCEL_CACHE": str(tmp_path / "cache"), "ORT_DISABLE_TELEMETRY": "1",
    }  # fmt: skip


def done(program: str, environment: dict[str, str], folder: Path) -> str:
    """Run it to its end, and return what it asked for."""
    for name, row in (("rows", '{"text": "is sees"}'), ("dev", '{"source": "is sees", "target": "no"}')):
        (folder / f"{name}.jsonl").write_text(3 * f"{row}\n")
    command = [sys.executable, "-c", program, str(EXPORT)]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.endswith("all is done\n"), run.stderr
    return Path(environment["ASKED"]).read_text()


def test_a_local_model_is_used_without_a_network(guarded: dict[str, str], tmp_path: Path) -> None:
    assert done(IN_PYTHON, guarded, tmp_path) == ""


def test_a_model_on_a_hub_is_asked_for_there(guarded: dict[str, str], tmp_path: Path) -> None:
    """What shows that the guard sees it."""
    asked = done(ON_A_HUB, guarded, tmp_path)
    assert asked and {*asked.split()} == {"socket.getaddrinfo", "huggingface.co"}


def test_a_server_starts_and_answers_without_a_network(guarded: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "t5accel", "serve", "--model", str(EXPORT), "--threads=1", "--port=0"]
    with subprocess.Popen(command, cwd=tmp_path, env=guarded, stderr=subprocess.PIPE, text=True) as server:
        try:
            line = next(line for line in server.stderr if "listening at" in line)
            url = re.search(r"http://[\d.:]+", line)[0] + "/generate"
            body = b'{"text": "is sees", "max_new_tokens": 3}'
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                assert response.status == 200
        finally:
            server.terminate()
    assert Path(guarded["ASKED"]).read_text() == ""


def test_commands_report_to_no_hub(guarded: dict[str, str], tmp_path: Path) -> None:
    program = "import t5accel.cli; from huggingface_hub import constants; assert constants.HF_HUB_DISABLE_TELEMETRY"
    subprocess.run([sys.executable, "-c", program], env=guarded, check=True)
