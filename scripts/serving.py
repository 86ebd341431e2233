"""Put load on our server and on others, one after the other, on this machine: `make serving` calls this.

For the bundled model, and for random weights at t5-small's size with a made-up vocabulary. Each server is a process of
its own, whose answers are compared with our engine's before it is timed. Load generator and server share the cores.

    python scripts/serving.py --minutes 40

What was measured is kept after each server, so that an interrupted run goes on where it stopped;
``data/results/serving.json`` is a recorded run. Triton and Ray run from build/servers/, where `make serving` installs
what stands in requirements/servers/; without that they are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from t5accel import machine
from t5accel.api import open_backend
from t5accel.checkpoints import BUNDLED, data_folder, load_t5
from t5accel.errors import MissingPackageError
from t5accel.graphs.export.cache import cached_export
from t5accel.lab.abuse import abuse
from t5accel.lab.load import Load, ask, offer
from t5accel.lab.rates import (
    FEWEST_ANSWERS,
    MOST_POINTS,
    Text,
    curve,
    knee,
    load_row,
    mixed_bodies,
    one_by_one,
    table,
)
from t5accel.lab.rows import Row, chosen, here, rows_so_far, write_rows
from t5accel.lab.servers import Running, Server, free_port, other, ours
from t5accel.lab.static_batch import Asked, together
from t5accel.lab.triton import triton_server, write_repository
from t5accel.parity import ParityError, assert_varied

ROOT = Path(__file__).resolve().parents[1]
SHAPE = "random:t5-small"
LIMIT_S = {"mini": 1.0, SHAPE: 4.0}
LENGTHS = (32, 64, 128, 256, 512)
SEQUENTIAL, NEW_TOKENS = 50, 8  # the seeds' protocol: so many requests, one after the other, for each source length
CLIENTS = 16
STATIC, OURS = "FastAPI, static batches", "t5accel serve"
COMPARED = 12  # answers


@dataclass(frozen=True)
class Model:
    """What is served.

    Attributes:
        name: as rows have it.
        where: what servers are given: a name, or the folder of a checkpoint with a tokenizer.
        text: random sources of a given number of tokens.
    """

    name: str
    where: str
    text: Text


def bundled() -> Model:
    """The bundled model, asked with random words of its vocabulary that are one token each."""
    from t5accel.text.text_to_text import tokenizer_of

    tokenizer = tokenizer_of(data_folder() / BUNDLED["mini"])
    pieces = [piece[1:] for piece in tokenizer.tokenizer.get_vocab() if piece[0] == "▁" and piece[1:].isalpha()]
    rows = tokenizer(sorted(pieces))["attention_mask"].sum(axis=1)
    words = [word for word, count in zip(sorted(pieces), rows, strict=True) if count == 2]  # itself and the end
    return Model("mini", "mini", lambda rng, tokens: " ".join(rng.choice(words, tokens - 1)))


def of_t5_small_size(folder: Path) -> Model:
    """Random weights, and a tokenizer whose words are the numbers of the tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").exists():
        model, _ = load_t5(SHAPE)
        model.save_pretrained(folder)
        special = ["<pad>", "</s>", "<unk>"]
        names = special + [f"t{number}" for number in range(len(special), model.config.vocab_size)]
        tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
        ).save_pretrained(folder)

    def text(rng: np.random.Generator, tokens: int) -> str:
        return " ".join(f"t{number}" for number in rng.integers(3, 32_000, tokens - 1))

    return Model(SHAPE, str(folder), text)


def servers_for(model: Model, build: Path, threads: int) -> list[Server]:
    """All of them; without Triton or Ray where they are not installed."""
    found = [
        other("transformers", model.where, name="FastAPI, transformers", threads=threads),
        other("one-by-one", model.where, name="FastAPI, our engine", threads=threads),
        other("static", model.where, name=STATIC, threads=threads),
        ours(model.where, threads=threads, encoder_cache_mb=0),
        ours(model.where, precision="int8", name=f"{OURS}, int8", threads=threads, encoder_cache_mb=0),
    ]
    try:
        repository, name = build / "repository", Path(model.where).name
        write_repository(repository, model.where, threads=threads)
        found += [triton_server(build / "triton", repository, name, in_flight=each) for each in (False, True)]
    except MissingPackageError as error:
        print(error)
    if (python := build / "ray/bin/python").exists():
        script, export = str(ROOT / "scripts/ray_server.py"), str(cached_export(model.where))
        command = [str(python), script, export, "--port={port}", f"--threads={threads}"]
        found.append(Server("Ray Serve, static batches", command, ready="/ready"))
    else:
        print(f"{build / 'ray'} is missing: `make serving` makes it.")
    return found


def of_others() -> dict[str, str]:
    """The versions of the servers that have an environment of their own."""
    lists = [path.read_text(encoding="utf-8") for path in (ROOT / "requirements/servers").glob("*.txt")]
    pins = (line.split("==") for text in lists for line in text.splitlines() if "==" in line)
    return {name: version for name, version in pins if name.startswith(("ray", "nvidia"))}


def compared(running: Running, bodies: Sequence[Mapping[str, Any]], expected: Sequence[tuple[str, int]]) -> Row:
    """How many answers, asked for one by one and all at once, are those of our engine.

    Raises:
        ParityError: one is not, of a server whose answers have to be.
    """
    url = running.url + running.server.path
    found = [ask(url, body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        found += pool.map(lambda body: ask(url, body), bodies)
    equal = sum(one == other for one, other in zip(found, [*expected] * 2, strict=True))
    if running.server.precision == "fp32" and equal < len(found):
        raise ParityError(f"{running.server.name}: {len(found) - equal} of {len(found)} answers are not our engine's.")
    return {"equal": equal, "of": len(found), "distinct": len({text for text, _ in expected})}


def sequential(running: Running, model: Model, length: int, requests: int) -> Row:
    """The seeds' protocol: random requests one after the other, their mean and deviation."""
    rng = np.random.default_rng(length)
    bodies = [
        {"text": model.text(rng, length), "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        for _ in range(requests)
    ]
    return {**one_by_one(running, bodies), "source_tokens": length, "new_tokens": NEW_TOKENS, "beams": 1}


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    seconds: float = 7.0  # of each point of a curve
    points: int = MOST_POINTS
    fewest: int = FEWEST_ANSWERS  # of a point
    lengths: tuple[int, ...] = LENGTHS
    requests: int = SEQUENTIAL
    beside_s: float = 15.0
    pairs: int = 5  # with streams and without
    stream_s: float = 3.0
    restarts: int = 3


QUICK = Plan(
    seconds=1.0, points=2, fewest=0, lengths=(32,), requests=4, beside_s=1.0, pairs=1, stream_s=1.0, restarts=1
)
Part = Callable[[], Iterator[Row]]


class Measuring:
    """One model's servers, and the parts that are measured of them."""

    def __init__(self, model: Model, servers: Sequence[Server], plan: Plan, logs: Path):
        self.model, self.servers, self.plan, self.logs = model, servers, plan, logs
        self.limit_s = LIMIT_S[model.name]
        self.bodies = mixed_bodies(model.text)
        backend, tokenizer, _ = open_backend(model.where, progress=False)
        asked = [Asked(**body) for body in self.bodies[:COMPARED]]
        self.expected = [together(backend, tokenizer, [one])[0] for one in asked]
        assert_varied(tokenizer([text for text, _ in self.expected])["input_ids"][:1])

    def parts(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Server, Part]]:
        """The name of each part, the server, and what measures it; ``rows`` are those so far."""
        for server in self.servers:
            yield "curve", server, lambda server=server: self.alone(server)
        for server in self.servers:
            yield "short beside long", server, lambda server=server: self.beside(server, rows)
        for server in self.servers:
            if server.streams and server.precision == "fp32":
                yield "streaming", server, lambda server=server: self.streaming(server, rows)
        for server in self.servers:
            if server.name.startswith(OURS):
                yield "restart", server, lambda server=server: self.restarts(server)
        for server in self.servers:
            if server.name == OURS:
                yield "hostile", server, self.hostile

    def running(self, server: Server, **how: Any) -> Running:
        return Running(server, self.logs / f"{server.name.replace(' ', '-')}.log", **how)

    def alone(self, server: Server) -> Iterator[Row]:
        """Equality, the closed loop, the open one up to the knee, and the seeds' protocol."""
        plan = self.plan
        with self.running(server) as running:
            yield {"measured": "start", "seconds": running.started_s}
            yield {"measured": "equality"} | compared(running, self.bodies[:COMPARED], self.expected)
            yield from curve(running, self.bodies, limit_s=self.limit_s, seconds=plan.seconds, most=plan.points,
                             fewest=plan.fewest, clients=CLIENTS)  # fmt: skip
            for length in plan.lengths:
                yield sequential(running, self.model, length, plan.requests)

    def beside(self, server: Server, rows: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
        """Short answers beside long ones, at 70 % of the knee of static batches; of a server that can as much."""
        rate = 0.7 * (self.knee(STATIC, rows) or self.most(STATIC, rows) / 2)
        if self.most(server.name, rows) <= rate:
            return
        with self.running(server) as running:
            compared(running, self.bodies[:COMPARED], self.expected)
            yield self.sent(running, rate_per_s=rate, seconds=self.plan.beside_s, seed=1)

    def streaming(self, server: Server, rows: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
        """The time to the first token at half the knee, and what streams cost where the server has all it can do."""
        bodies = [{**body, "stream": True} for body in self.bodies]
        rate = 0.5 * (self.knee(server.name, rows) or self.most(server.name, rows) / 2)
        with self.running(server) as running:
            compared(running, bodies[:COMPARED], self.expected)
            yield self.sent(running, bodies, rate_per_s=rate, seconds=self.plan.beside_s, seed=2)
            pairs = []
            for number in range(self.plan.pairs):
                both = [self.sent(running, given, clients=CLIENTS, seconds=self.plan.stream_s, seed=number)
                        for given in (self.bodies, bodies)]  # fmt: skip
                pairs.append([row["tokens_per_s"] for row in both])
            ratios = [streamed / whole for whole, streamed in pairs]
            yield {
                "measured": "streaming", "clients": CLIENTS, "ratio": float(np.median(ratios)), "ratio_samples": ratios,
                "tokens_per_s": float(np.median([streamed for _, streamed in pairs])),
            }  # fmt: skip

    def restarts(self, server: Server) -> Iterator[Row]:
        """Killed and started again on its port: seconds until it is ready."""
        port, seconds = free_port(), []
        for _ in range(self.plan.restarts + 1):
            with self.running(server, port=port) as running:
                ask(running.url + server.path, dict(self.bodies[1]))
                seconds.append(running.started_s)
                running.kill()
        yield {"measured": "restart", "latency_s": seconds[1:], "seconds": float(np.median(seconds[1:]))}

    def hostile(self) -> Iterator[Row]:
        """Two hundred hostile requests to ours, and what it answers to a friend afterwards."""
        server = ours(self.model.where, body_s=1, head_s=1, encoder_cache_mb=0)
        with self.running(server) as running:
            survived = abuse(running.port)
            found = compared(running, self.bodies[:COMPARED], self.expected)
            yield {
                "measured": "hostile", "answered": survived.statuses.total(), "unanswered": survived.cut_off,
                "seconds": survived.longest_s, **found,
                "settings": {f"status {status}": count for status, count in sorted(survived.statuses.items())},
            }  # fmt: skip

    def sent(self, running: Running, bodies: Sequence[Mapping[str, Any]] | None = None, **how: Any) -> Row:
        load = Load(running.url, self.bodies if bodies is None else bodies, path=running.server.path, **how)
        kind = "open loop" if load.clients is None else "closed loop"
        return load_row(load, asyncio.run(offer(load)), limit_s=self.limit_s, measured=kind)

    def knee(self, name: str, rows: Sequence[Mapping[str, Any]]) -> float:
        """Of a server's curve."""
        about = dict(model=self.model.name, system=name, cell="curve")
        return knee(chosen(rows, measured="open loop", **about))

    def most(self, name: str, rows: Sequence[Mapping[str, Any]]) -> float:
        """What it answered a second under the closed loop; 0 where it failed."""
        about = dict(model=self.model.name, system=name, cell="curve")
        return max((row["answers_per_s"] for row in chosen(rows, measured="closed loop", **about)), default=0.0)


def measure(of_model: Measuring, rows: list[Row], keep: Callable[[], None], ends_at: float) -> bool:
    """Whatever of a model is not among the rows yet; returns whether there was time for all of it."""
    done = {(row["model"], row["cell"], row["system"]) for row in rows}
    parts = [*of_model.parts(rows)]
    for cell, server, part in tqdm(parts, desc=of_model.model.name, unit="part"):
        about = {"cell": cell, "system": server.name, "model": of_model.model.name}
        if tuple(about[key] for key in ("model", "cell", "system")) in done:
            continue
        if time.perf_counter() > ends_at:
            return False
        try:
            found = [*part()]
        except Exception as error:  # whatever a server does that is not ours
            if server.name.startswith(OURS):
                raise
            found = [{"measured": "failure", "failed": f"{type(error).__name__}: {str(error).splitlines()[0]:.300}"}]
        rows += [{**row, **about, "precision": server.precision, "threads": machine.cpu_threads()} for row in found]
        keep()
    return True


def main() -> None:
    """Measure what is not measured yet, and print a line for each server."""
    parser = argparse.ArgumentParser(description="Put load on our server and on others.")
    parser.add_argument("--json", type=Path, default=ROOT / "build/serving/serving.json", help="where the rows go")
    parser.add_argument("--build", type=Path, default=ROOT / "build/servers", help="where Triton and Ray are installed")
    parser.add_argument("--minutes", type=float, default=60, help="begin no part later than this (60)")
    parser.add_argument(
        "--quick", action="store_true", help="the bundled model alone, and little of it: a minute or two"
    )
    parser.add_argument("--models", nargs="*", default=["mini", SHAPE], choices=["mini", SHAPE])
    args = parser.parse_args()
    ends_at = time.perf_counter() + args.minutes * 60
    threads, folder = machine.cpu_threads(), args.json.parent
    folder.mkdir(parents=True, exist_ok=True)
    conditions = here()
    conditions["versions"] |= {name: metadata.version(name) for name in ("fastapi", "uvicorn", "aiohttp")}
    conditions["versions"] |= of_others()
    rows: list[Row] = rows_so_far(args.json, conditions)
    command = "python scripts/serving.py" + (" --quick" if args.quick else "")
    for name in args.models[:1] if args.quick else args.models:
        model = bundled() if name == "mini" else of_t5_small_size(folder / "t5-small")
        servers = servers_for(model, args.build, threads)
        of_model = Measuring(model, servers, QUICK if args.quick else Plan(), folder)
        if not measure(of_model, rows, lambda: write_rows(args.json, rows, command=command, **conditions), ends_at):
            print(f"{args.minutes:g} minutes are over: the same command measures the other parts.")
            break
    for name in dict.fromkeys(row["model"] for row in rows):
        print(f"{name}\n{table(rows, name)}\n")


if __name__ == "__main__":
    main()
