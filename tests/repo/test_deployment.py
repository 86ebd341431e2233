"""Workflows, the image and the example for Kubernetes: what they name exists."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
import yaml
from fastapi import FastAPI

from t5accel.cli import app as command_line
from t5accel.serve.app import add_get_routes
from t5accel.serve.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
DEPLOYMENT, SERVICE = yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text(encoding="utf-8"))
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
ENTRYPOINT = json.loads(re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.M)[1])
(HEALTHCHECK,) = (json.loads(found) for found in re.findall(r"^HEALTHCHECK .* CMD (.*)$", DOCKERFILE, re.M))
IMAGE = dict(re.findall(r"(T5ACCEL_\w+)=(\S+)", re.search("^ENV .*$", DOCKERFILE, re.M)[0]))


def jobs_of(workflow: Path) -> dict[str, Any]:
    return yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_and_its_actions_have_versions(workflow: Path) -> None:
    content = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    assert content["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        assert job.get("permissions", {}) == ({"pages": "write", "id-token": "write"} if name == "deploy" else {})
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            assert "uses" not in step or re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]), step


def test_workflows_run_what_is_there_on_the_pythons_that_are_promised() -> None:
    jobs = {path.stem: jobs_of(path) for path in WORKFLOWS}
    promised = {word.split()[-1] for word in PYPROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", word)}
    matrix = jobs["ci"]["pythons"]["strategy"]["matrix"]
    assert {*matrix["python"], "3.11"} == promised
    assert {"run": ".ci/run"} in jobs["ci"]["everything"]["steps"]
    targets = {*matrix["target"], *re.findall(r"run: make (\w+)$", WORKFLOWS[1].read_text(encoding="utf-8"), re.M)}
    assert {"test", "test-v5", "site"} <= targets and all(f"\n{name}:" in MAKEFILE for name in targets)
    lines = jobs["ci"]["systems"]["strategy"]["matrix"]["line"]
    newest = jobs["weekly"]["newest"]["strategy"]["matrix"]["extras"]
    extras = [re.search(rf"^{name} := (.*)$", MAKEFILE, re.M)[1] for name in ("EXTRAS", "EXTRAS_V5")]
    assert [line["extras"] for line in lines] == newest == extras
    assert all((ROOT / line["constraints"]).is_file() for line in lines)


def test_the_image_is_given_what_the_wheel_is_built_from() -> None:
    build, project = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"], PYPROJECT["project"]
    named = [*build["include"], *project["license-files"], project["readme"]]
    named += ["pyproject.toml", "requirements/constraints.txt"]
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for path in named:
        assert any(Path(path.strip("/")).match(pattern) for pattern in allowed), f".dockerignore leaves {path} outside"
    for extras in re.findall(r"\.whl\)\[([\w,]+)\]", DOCKERFILE):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def options(arguments: list[str]) -> dict[str, Any]:
    """What ``t5accel serve`` makes of these arguments; it raises what the command line refuses."""
    serve = typer.main.get_command(command_line).commands["serve"]
    given = serve.make_context("serve", list(arguments)).params
    return {name: value for name, value in given.items() if value is not None}


def test_image_and_example_give_the_server_flags_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENTRYPOINT == ["t5accel", "serve"] and not re.search("^CMD", DOCKERFILE, re.M), "flags add to ENV"
    for name, value in IMAGE.items():
        monkeypatch.setenv(name, value)
    in_image, on_kubernetes = Settings(), Settings(**options(CONTAINER["args"]))
    ports = {in_image.port, on_kubernetes.port, *map(int, re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.M))}
    assert ports == {port["containerPort"] for port in CONTAINER["ports"]} == {8000}
    asked: list[str] = []
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: asked.append(url))
    monkeypatch.setenv("T5ACCEL_PORT", "9000")
    exec(HEALTHCHECK[-1])
    assert HEALTHCHECK[:2] == ["python", "-c"] and asked == ["http://127.0.0.1:9000/health/live"]
    assert Settings().port == 9000 and Settings(**options(["--max-beams", "4"])).model == in_image.model
    assert in_image.host == on_kubernetes.host == "0.0.0.0" and in_image.model == on_kubernetes.model
    assert f"COPY --from=build {in_image.model} {in_image.model}\n" in DOCKERFILE
    assert all(one["name"].removeprefix(PREFIX).lower() in Settings.model_fields for one in CONTAINER["env"])
    defaults = dict(re.findall(r"^ARG (\w+)=(.+)$", DOCKERFILE, re.M))
    for command in re.findall(r"t5accel (export .*?)(?:;|$)", DOCKERFILE, re.M):
        name, *arguments = shlex.split(re.sub(r"\$(\w+)", lambda found: defaults[found[1]], command))
        typer.main.get_command(command_line).commands[name].make_context(name, arguments)
    with pytest.raises(Exception, match="No such option"):
        options(["--prot", "8000"])


def test_probes_ask_for_routes_that_the_server_has() -> None:
    server = FastAPI()
    server.state.service = SimpleNamespace(scheduler=None, settings=Settings(), started_s=0, metrics=None)
    add_get_routes(server)
    routes = {route.path for route in server.routes}
    probes = {name: CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health/ready", "liveness": "/health/live", "readiness": "/health/ready",
    }  # fmt: skip
    assert {probe["path"] for probe in probes.values()} <= routes
    assert {probe["port"] for probe in probes.values()} == {port["name"] for port in CONTAINER["ports"]}
    assert re.search(r"(/health\S+?)\"", HEALTHCHECK[-1])[1] in routes


def test_kubernetes_gives_the_server_its_time_and_no_more_rights_than_it_needs() -> None:
    _, seconds = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    grace_s = Settings(**options(CONTAINER["args"])).shutdown_grace_s
    # The server waits a second longer than its requests, and uvicorn five for connections: see `serve.server`.
    assert POD["terminationGracePeriodSeconds"] >= int(seconds) + grace_s + 1 + 5
    assert POD["enableServiceLinks"] is False  # else T5ACCEL_PORT is an address
    rights = POD["securityContext"]
    user = re.search(r"^USER (\d+):(\d+)$", DOCKERFILE, re.M).groups()
    assert rights["runAsNonRoot"] and (str(rights["runAsUser"]), str(rights["runAsGroup"])) == user
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert CONTAINER["image"] == f"t5accel:{PYPROJECT['project']['version']}"
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert labels == SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"]
    assert SERVICE["spec"]["ports"][0]["targetPort"] in {port["name"] for port in CONTAINER["ports"]}
