"""Stress test of the server: good requests, bad ones, clients that disconnect and slow readers, all at once.

Every good response must equal what the engine gives offline for its seed. As a script (`make storm`) it runs the full
test against server processes of its own: the storm, then every attack, then engines that break under load. It prints
what it found, and its exit code is 1 if anything was wrong:

    python tests/serve/stress.py --requests 2000 --concurrency 64
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from peregrine import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script it stands in its own folder
from serve.attacks import ATTACKS, MORE_ATTACKS, hold_connections, run_attack, slowest_health
from serve.processes import FAULT, HANG, PANIC, breaking, process

PROMPTS = ("Once upon a time", "The little falcon", "Tom and his dog", "In the deep forest, é", "<|user|>\nHi")
BAD = (
    b"{",
    b'{"prompt": "x", "temperature": -1}',
    b'{"prompt": "x", "colour": 1}',
    b'{"prompt": [70000]}',
    b'{"prompt": "x", "max_tokens": 100000}',
    b'{"prompt": "x", "tools": [1]}',
)
HEADERS = {"Content-Type": "application/json"}
SLOW_HEALTH_S = 1.0  # clients and server share the machine; alone it is some hundredths


@dataclass
class Report:
    """Counts of what happened."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class GoodRequest:
    """A good request and the texts it must return."""

    body: dict[str, Any]
    texts: tuple[str, ...]


def make_good_requests(llm: LLM, count: int, seed: int) -> list[GoodRequest]:
    """Good requests of every kind, with their texts from LLM.generate."""
    draw = random.Random(seed)
    good_requests = []
    for index in range(count):
        params: dict[str, Any] = {"max_tokens": draw.randint(1, 24), "seed": index, "ignore_eos": True}
        params |= draw.choice(
            [{"temperature": 0}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 20, "presence_penalty": 0.5}, {}]
        )
        params |= draw.choice([{}, {}, {"stop": [" the", "."]}, {"logprobs": 2}])
        prompt, choices = draw.choice(PROMPTS), draw.choice([1, 1, 1, 2])
        expected = tuple(
            output.text
            for output in llm.generate(
                [prompt] * choices,
                [SamplingParams(**{**params, "seed": index + i}) for i in range(choices)],
                progress=False,
            )
        )
        more = draw.choice([{}, {"speculation": {"num_drafts": 0}}, {"return_speculation": True}])
        good_requests.append(GoodRequest({"prompt": prompt, "n": choices, **params, **more}, expected))
    return good_requests


async def stress(url: str, good_requests: list[GoodRequest], requests: int, concurrency: int, seed: int) -> Report:
    """Send the requests, `concurrency` at a time."""
    draw, report = random.Random(seed), Report()
    kinds = draw.choices(
        (whole, streamed, leaving, hasty, slow_reading, bad), weights=(35, 30, 12, 5, 8, 10), k=requests
    )
    jobs = iter([(kind, draw.choice(good_requests), draw.randrange(2**32)) for kind in kinds])
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:

        async def work() -> None:
            for kind, request, own_seed in jobs:
                try:
                    outcome = await kind(http, request, random.Random(own_seed))
                except Exception as error:
                    outcome = f"failed: {type(error).__name__}: {error}"
                report.outcomes[f"{kind.__name__}: {outcome}" if ":" not in outcome else outcome] += 1
                if outcome not in ("right", "left", "refused"):
                    report.wrong.append(f"{kind.__name__} {request.body}: {outcome}")

        await asyncio.gather(*(work() for _ in range(concurrency)))
    return report


async def whole(http: httpx.AsyncClient, request: GoodRequest, draw: random.Random) -> str:
    response = await http.post("/v1/completions", json=request.body)
    if response.status_code != 200:
        return f"status {response.status_code}: {response.text[:200]}"
    texts = tuple(choice["text"] for choice in response.json()["choices"])
    return "right" if texts == request.texts else f"wrong: {texts} is not {request.texts}"


async def streamed(http: httpx.AsyncClient, request: GoodRequest, draw: random.Random, pause: float = 0.0) -> str:
    texts = [""] * len(request.texts)
    body = {**request.body, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            return f"status {response.status_code}"
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
                await asyncio.sleep(pause * draw.random())
    return "right" if tuple(texts) == request.texts else f"wrong: {texts} is not {request.texts}"


async def slow_reading(http: httpx.AsyncClient, request: GoodRequest, draw: random.Random) -> str:
    return await streamed(http, request, draw, pause=0.1)


async def leaving(http: httpx.AsyncClient, request: GoodRequest, draw: random.Random) -> str:
    """Read a little of a long stream and disconnect."""
    body = {**request.body, "max_tokens": 500, "stream": True}
    chunks = draw.randint(0, 4)
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            chunks -= 1
            if chunks < 0:
                break
    return "left"


async def hasty(http: httpx.AsyncClient, request: GoodRequest, draw: random.Random) -> str:
    """Disconnect before a response that is not streamed is complete, unless it comes at once."""
    with contextlib.suppress(httpx.TimeoutException):
        await http.post("/v1/completions", json={**request.body, "max_tokens": 500}, timeout=0.2 * draw.random())
    return "left"


async def bad(http: httpx.AsyncClient, request: GoodRequest, draw: random.Random) -> str:
    response = await http.post("/v1/completions", content=draw.choice(BAD), headers=HEADERS)
    return "refused" if response.status_code == 400 else f"status {response.status_code}: {response.text[:200]}"


def memory_mib(pid: int | str) -> float:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def wait_idle(http: httpx.Client) -> dict[str, Any]:
    """The server's load once nothing runs."""
    while True:
        load: dict[str, Any] = http.get("/server_info").json()["load"]
        if not (load["open"] or load["running"] or load["reading"] or load["waiting"]):
            return load


def storm(http: httpx.Client, good_requests: list[GoodRequest], args: argparse.Namespace) -> list[str]:
    """The storm in four parts, with a look at memory and pages after each; returns what went wrong."""
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    for part in range(4):
        made = asyncio.run(
            stress(str(http.base_url), good_requests, args.requests // 4, args.concurrency, args.seed + part)
        )
        outcomes += made.outcomes
        wrong += made.wrong
        load = wait_idle(http)
        pid = http.get("/server_info").json()["pid"]
        accounted = load["pages_free"] + load["pages_cached"] == load["pages"]
        wrong += [] if accounted else [f"part {part}: pages are lost: {load}"]
        print(f"part {part}: {memory_mib(pid):.0f} MiB, pages accounted for: {accounted}", flush=True)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:6} {outcome}")
    return wrong


def attack(http: httpx.Client, good_requests: list[GoodRequest]) -> list[str]:
    """Every attack, one after the other, then a good request; returns what went wrong."""
    address, wrong = (str(http.base_url.host), http.base_url.port or 80), []
    pid = http.get("/server_info").json()["pid"]
    for name, each in (ATTACKS | MORE_ATTACKS).items():
        statuses: list[int] = []
        slowest = slowest_health(address, lambda each=each, got=statuses: got.extend(run_attack(address, each)))
        print(f"{name:28} {statuses}, /health took {slowest:.2f} s at most, {memory_mib(pid):.0f} MiB", flush=True)
        if statuses != [each.status] * each.copies or slowest > SLOW_HEALTH_S:
            wrong.append(f"{name}: {statuses}, /health took {slowest:.2f} s")
    seconds = hold_connections(address, 1200)
    print(f"1200 connections that send nothing: the next one was served after {seconds:.1f} s")
    good = good_requests[0]
    texts = tuple(choice["text"] for choice in http.post("/v1/completions", json=good.body).json()["choices"])
    return wrong + ([] if texts == good.texts and seconds < 60 else [f"after the attacks: {texts}, {seconds:.0f} s"])


def break_under_load(good_requests: list[GoodRequest], name: str, breaks: str) -> list[str]:
    """A server whose engine breaks after 50 rounds: no response is wrong, nobody waits, and it ends with code 1."""
    flags = ("--hang-seconds", "2", "--drain-seconds", "1")
    with process(*flags, script=breaking(breaks, 50)) as (running, http):
        report = asyncio.run(stress(str(http.base_url), good_requests, 200, 32, seed=1))
        code = running.wait(timeout=60)
    said = [outcome for outcome in report.wrong if "wrong:" in outcome]
    print(f"{name}: exit code {code}; {dict(report.outcomes)}", flush=True)
    return said + ([] if code == 1 else [f"{name}: exit code {code}"])


def main() -> int:
    """All of it; returns the exit code."""
    from peregrine.bench.http import running_server

    parser = argparse.ArgumentParser(description="Storm, attacks and faults against server processes.")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with LLM("merlin") as llm:
        good_requests = make_good_requests(llm, 60, args.seed)
    with running_server([]) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        wrong = storm(http, good_requests, args)
        wrong += attack(http, good_requests)
        wait_idle(http)
    for name, breaks in (("fault", FAULT), ("panic", PANIC), ("hang", HANG)):
        wrong += break_under_load(good_requests, name, breaks)
    print("\n".join(wrong) or "nothing wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
