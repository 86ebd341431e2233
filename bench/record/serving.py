"""Put load on our server and on others, one after the other: `make serving` calls this.

Each server is a separate process, whose answers are compared before it is timed; load generator and server share the
cores. An interrupted run goes on where it stopped. Triton and Ray are left out where `make serving` has not installed
them. A run: ``data/results/serving.json``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.evaluation import rows as eval_rows
from bench.evaluation import source_text
from bench.harness import error_line
from bench.results import Row, environment, file_path, filter_rows, rows_so_far, write_rows
from bench.serving.fuzz import fuzz_server
from bench.serving.load import ask
from bench.serving.rates import (
    BASELINE,
    FEWEST_ANSWERS,
    LONG,
    MOST_POINTS,
    OURS,
    STATIC,
    Text,
    curve,
    is_met,
    knee,
    mixed_bodies,
    offered,
    one_by_one,
    table,
    targets,
)
from bench.serving.servers import Asked, Running, Server, free_port, kind_command, other, ours, together
from bench.serving.triton import triton_server, write_repository
from t5accel import machine
from t5accel.api import open_backend
from t5accel.decoding.backend import Backend
from t5accel.errors import MissingPackageError
from t5accel.graphs.export_cache import cached_export
from t5accel.models.load import BUNDLED, data_folder, load_model
from t5accel.parity import ParityError, assert_varied
from t5accel.precision.recipes import RECIPES
from t5accel.serve.limits import SchedulerLimits
from t5accel.serve.request import GenerationRequest
from t5accel.serve.scheduler import Scheduler

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "random:t5-small"
LIMIT_S = {"mini": 1.0, SHAPE: 4.0}
LENGTHS = (32, 64, 128, 256, 512)
SEQUENTIAL, NEW_TOKENS = 50, 8  # the posts' protocol: so many requests, one after the other, for each source length
CLIENTS = 16
IN_TURN, RAY = "Triton, iterative sequences", "Ray Serve, static batches"
LAST = (IN_TURN, RAY)  # those that come when all others are measured
COMPARED = 12  # answers


@dataclass(frozen=True)
class Model:
    """What is served."""

    name: str  # as rows have it
    where: str  # what servers are given: a name, or the folder of a checkpoint with a tokenizer
    text: Text  # random sources of a given number of tokens


def bundled() -> Model:
    """The bundled model, asked with random words of its vocabulary that are one token each."""
    from t5accel.tokenization import tokenizer_of

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
        model, _ = load_model(SHAPE)
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
        other("transformers", model.where, name=BASELINE, threads=threads),
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
        command = kind_command("ray", str(cached_export(model.where)), threads=threads, python=str(python))
        found.append(Server(RAY, command, ready="/ready"))
    else:
        print(f"{build / 'ray'} is missing: `make serving` makes it.")
    return found


def of_others() -> dict[str, str]:
    """The versions of the servers that have a separate environment."""
    lists = [path.read_text(encoding="utf-8") for path in (ROOT / "requirements/servers").glob("*.txt")]
    pins = (line.split("==") for text in lists for line in text.splitlines() if "==" in line)
    return {name: version for name, version in pins if name.startswith(("ray", "nvidia"))}


def compared(running: Running, bodies: Sequence[Mapping[str, Any]], expected: Sequence[tuple[str, int]]) -> Row:
    """How many answers, asked for one by one and all at once, are those of our engine in the same precision, alone."""
    url = running.url + running.server.path
    found = [ask(url, body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        found += pool.map(lambda body: ask(url, body), bodies)
    equal = sum(one == other for one, other in zip(found, [*expected] * 2, strict=True))
    if running.server.precision == "fp32" and equal < len(found):
        raise ParityError(f"{running.server.name}: {len(found) - equal} of {len(found)} answers are not our engine's.")
    return {"equal": equal, "of": len(found), "distinct": len({text for text, _ in expected})}


def one_after_another(backend: Backend, jobs: Sequence[GenerationRequest]) -> list[list[int]]:
    """The tokens of each, where a job joins every three steps."""
    scheduler = Scheduler(backend, SchedulerLimits(rows=len(jobs), encoder_cache_bytes=0), thread=False)
    tickets = []
    for job in jobs:
        tickets.append(scheduler.submit(job))
        for _ in range(3):
            scheduler.step()
    while scheduler.step():
        pass
    return [ticket.result(0)[0].tokens for ticket in tickets]


def lead(backend: Backend, job: GenerationRequest, alone: Sequence[int], other: Sequence[int]) -> float:
    """Where two answers part, by how much that of the job alone led, in standard deviations of the logits."""
    until = next(place for place, (one, two) in enumerate(zip(alone, other, strict=False)) if one != two)
    ids = job.input_ids[None]
    state = backend.new_state(backend.encode(ids, np.ones_like(ids)))
    for token in [backend.decoder_start_token_id, *alone[:until]]:
        logits = backend.step(state, np.full((1, 1, 1), token))[0, 0, 0]
    return float((logits[alone[until]] - logits[other[until]]) / logits.std())


def sequential(running: Running, model: Model, length: int, requests: int) -> Row:
    """The posts' protocol: random requests one after the other, their mean and deviation."""
    rng = np.random.default_rng(length)
    bodies = [
        {"text": model.text(rng, length), "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        for _ in range(requests)
    ]
    return {**one_by_one(running, bodies), "source_tokens": length, "new_tokens": NEW_TOKENS, "beams": 1}


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    seconds: float = 4.0  # of each point of a curve
    points: int = MOST_POINTS
    fewest: int = FEWEST_ANSWERS  # of a point
    lengths: tuple[int, ...] = LENGTHS
    requests: int = SEQUENTIAL
    beside_s: float = 4.0
    besides: int = 5
    pairs: int = 7  # with streams and without
    stream_s: float = 2.0
    restarts: int = 3
    sentences: int = 10  # of each kind, that are answered beside each other


# Of the larger model. Answers may take 4 s, so a rate that is too high shows only after some time.
SLOWER = Plan(seconds=10.0, fewest=50, lengths=(LENGTHS[0], LENGTHS[-1]), beside_s=8.0, besides=3, pairs=3)
QUICK = Plan(
    seconds=1.0, points=2, fewest=0, lengths=(32,), requests=4, beside_s=1.0, besides=1, pairs=1, stream_s=1.0,
    restarts=1, sentences=3,
)  # fmt: skip
Part = Callable[[], Iterator[Row]]


class Measuring:
    """One model's servers, and the parts that are measured of them."""

    def __init__(self, model: Model, servers: Sequence[Server], plan: Plan, logs: Path):
        self.model, self.servers, self.plan, self.logs = model, servers, plan, logs
        self.limit_s = LIMIT_S[model.name]
        self.bodies = mixed_bodies(model.text)
        self.expected = {server.precision: self.written_alone(server.precision) for server in servers}

    def written_alone(self, precision: str) -> list[tuple[str, int]]:
        """What our engine answers in this precision, source by source."""
        backend, tokenizer, _ = open_backend(self.model.where, precision=precision, progress=False)
        asked = [Asked(**body) for body in self.bodies[:COMPARED]]
        found = [together(backend, tokenizer, [one])[0] for one in asked]
        assert_varied(tokenizer([text for text, _ in found])["input_ids"][:1])
        return found

    def parts(self, rows: Sequence[Mapping[str, Any]], *, last: bool) -> Iterator[tuple[str, str, Part]]:
        """The name of each part, the system by which one sees that it is done, and what measures it.

        ``rows`` are those so far. What is ``last`` comes when all else is measured, of all models.
        """
        if last:
            if self.model.name == "mini":
                yield "neighbours", OURS, self.neighbours
            for server in self.servers:
                if server.name in LAST:
                    yield "curve", server.name, lambda server=server: in_turn([server], self.alone)
            return
        first = [server for server in self.servers if server.name not in LAST]
        (ours,) = (server for server in self.servers if server.name == OURS)
        yield "curve", OURS, lambda: in_turn(first, self.alone)
        yield "short beside long", OURS, lambda: self.beside(first, rows)
        yield "streaming", OURS, lambda: self.streaming(ours, rows)
        yield "restart", OURS, lambda: self.restarts(ours)
        if self.model.name == "mini":
            yield "hostile", OURS, self.hostile

    def running(self, server: Server, **how: Any) -> Running:
        return Running(server, self.logs / f"{server.name.replace(' ', '-')}.log", **how)

    def alone(self, server: Server) -> Iterator[Row]:
        """Equality, the closed loop, the open one up to the knee, and the posts' protocol."""
        plan = self.plan
        with self.running(server) as running:
            yield {"measured": "start", "seconds": running.started_s}
            yield {"measured": "equality"} | compared(running, self.bodies[:COMPARED], self.expected[server.precision])
            yield from curve(running, self.bodies, limit_s=self.limit_s, seconds=plan.seconds, most=plan.points,
                             fewest=plan.fewest, clients=CLIENTS)  # fmt: skip
            for length in plan.lengths:
                yield sequential(running, self.model, length, plan.requests)

    def beside(self, servers: Sequence[Server], rows: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
        """Short answers beside long ones at 70 % of the knee of static batches, of all that can as much, in turn."""
        rate = 0.7 * (self.knee(STATIC, rows) or self.most(STATIC, rows))

        def times(server: Server) -> Iterator[Row]:
            with self.running(server) as running:
                compared(running, self.bodies[:COMPARED], self.expected[server.precision])
                for seed in range(self.plan.besides):
                    yield self.sent(running, rate_per_s=rate, seconds=self.plan.beside_s, seed=seed)

        return in_turn([server for server in servers if self.most(server.name, rows) >= rate], times)

    def streaming(self, server: Server, rows: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
        """The time to the first token at half the knee, and what streams cost where the server has all it can do."""
        bodies = [{**body, "stream": True} for body in self.bodies]
        rate = 0.5 * (self.knee(server.name, rows) or self.most(server.name, rows) / 2)
        with self.running(server) as running:
            compared(running, bodies[:COMPARED], self.expected[server.precision])
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
        server = ours(self.model.where, body_timeout_s=1, header_timeout_s=1, encoder_cache_mb=0)
        with self.running(server) as running:
            survived = fuzz_server(running.port)
            found = compared(running, self.bodies[:COMPARED], self.expected[server.precision])
            yield {
                "measured": "hostile", "answered": survived.statuses.total(), "unanswered": survived.cut_off,
                "seconds": survived.longest_s, **found,
                "settings": {f"status {status}": count for status, count in sorted(survived.statuses.items())},
            }  # fmt: skip

    def neighbours(self) -> Iterator[Row]:
        """How many sentences are answered as alone where they join one after another, at natural and forced length."""
        int8 = RECIPES["int8"]
        exact = replace(int8, name="int8-fp32-products", decoder=replace(int8.decoder, accuracy_level=1),
                        head=replace(int8.head, accuracy_level=1))  # fmt: skip
        texts = [source_text("translation", row) for row in eval_rows("translation", limit=self.plan.sentences)]
        for recipe in (RECIPES["fp32"], int8, RECIPES["int4"], exact):
            backend, tokenizer, _ = open_backend(self.model.where, precision=recipe, progress=False)
            sources = [ids for text in texts for ids in tokenizer([text])["input_ids"]]
            for least, most in ((0, LONG), (LONG, LONG)):
                jobs = [GenerationRequest(ids, max_new_tokens=most, min_new_tokens=least) for ids in sources]
                alone = [tokens for job in jobs for tokens in one_after_another(backend, [job])]
                found = one_after_another(backend, jobs)
                pairs = [(job, *both) for job, *both in zip(jobs, alone, found, strict=True) if both[0] != both[1]]
                yield {
                    "precision": recipe.name, "forced": bool(least), "new_tokens": most, "of": len(jobs),
                    "measured": "equality", "equal": len(jobs) - len(pairs), "distinct": len({*map(tuple, alone)}),
                    "largest_difference": max((lead(backend, *pair) for pair in pairs), default=0.0),
                }  # fmt: skip

    def sent(self, running: Running, bodies: Sequence[Mapping[str, Any]] | None = None, **how: Any) -> Row:
        return offered(running, self.bodies if bodies is None else bodies, limit_s=self.limit_s, **how)

    def knee(self, name: str, rows: Sequence[Mapping[str, Any]]) -> float:
        """Of a server's curve."""
        about = dict(model=self.model.name, system=name, cell="curve")
        return knee(filter_rows(rows, measured="open loop", **about))

    def most(self, name: str, rows: Sequence[Mapping[str, Any]]) -> float:
        """The most that it answered a second; 0 where it failed."""
        found = filter_rows(rows, model=self.model.name, system=name, cell="curve")
        return max((row["answers_per_s"] for row in found if "answers_per_s" in row), default=0.0)


def in_turn(servers: Sequence[Server], measured: Callable[[Server], Iterator[Row]]) -> Iterator[Row]:
    """The rows of several servers that all run, one row of each in turn: slow moments of a machine meet them alike."""
    about = {server.name: {"system": server.name, "precision": server.precision} for server in servers}
    running = {server.name: measured(server) for server in servers}
    with ExitStack() as stack:
        for rows in running.values():
            stack.enter_context(closing(rows))
        while running:
            for name, rows in list(running.items()):
                try:
                    yield {**next(rows), **about[name]}
                except StopIteration:
                    del running[name]
                except Exception as error:  # whatever a server does that is not ours
                    if name.startswith(OURS):
                        raise
                    yield {"measured": "failure", "failed": error_line(error), **about[name]}
                    del running[name]


def measure(of_model: Measuring, rows: list[Row], keep: Callable[[], None], ends_at: float, *, last: bool) -> bool:
    """Whatever of a model is not among the rows yet; returns whether there was time for all of it."""
    model, threads = of_model.model.name, machine.cpu_threads()
    for cell, system, part in tqdm([*of_model.parts(rows, last=last)], desc=model, unit="part"):
        if next(filter_rows(rows, model=model, cell=cell, system=system), None):
            continue
        if time.perf_counter() > ends_at:
            return False
        about = {"cell": cell, "model": model, "threads": threads}
        rows += [{"system": system, "precision": "fp32", **row, **about} for row in part()]
        keep()
    return True


def main() -> None:
    """Measure what is not measured yet, and print a line for each server."""
    parser = argparse.ArgumentParser(description="Put load on our server and on others.")
    parser.add_argument("--json", type=file_path, default=ROOT / "build/serving/serving.json", help="where the rows go")
    parser.add_argument("--build", type=Path, default=ROOT / "build/servers", help="where Triton and Ray are installed")
    parser.add_argument("--minutes", type=float, default=60, help="begin no part later than this (60)")
    parser.add_argument("--quick", action="store_true", help="the bundled model alone: a minute or two")
    args = parser.parse_args()
    ends_at = time.perf_counter() + args.minutes * 60
    threads, folder = machine.cpu_threads(), args.json.parent
    folder.mkdir(parents=True, exist_ok=True)
    conditions = environment()
    conditions["versions"] |= {name: metadata.version(name) for name in ("fastapi", "uvicorn", "aiohttp")}
    conditions["versions"] |= of_others()
    rows: list[Row] = rows_so_far(args.json, conditions)
    command = "python -m bench.record.serving" + (" --quick" if args.quick else "")
    models = []
    for name in ("mini",) if args.quick else ("mini", SHAPE):
        model = bundled() if name == "mini" else of_t5_small_size(folder / "t5-small")
        plan = QUICK if args.quick else SLOWER if name == SHAPE else Plan()
        models.append(Measuring(model, servers_for(model, args.build, threads), plan, folder))

    def keep() -> None:
        write_rows(args.json, rows, command=command, **conditions)

    if not all(measure(one, rows, keep, ends_at, last=last) for last in (False, True) for one in models):
        print(f"{args.minutes:g} minutes are over: the same command measures the other parts.")
    for name in dict.fromkeys(row["model"] for row in rows):
        print(f"{name}\n{table(rows, name)}\n")
        for what, wanted, value in targets(rows, name):
            print(f"{what}: {value:.2f}, wanted {wanted}" + "; missed" * (not is_met(wanted, value)))


if __name__ == "__main__":
    main()
