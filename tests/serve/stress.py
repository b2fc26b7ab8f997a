"""Stress test of the server: good requests, bad ones, clients that disconnect and slow readers, all at once.

Every good response must equal what the engine gives offline for its seed. As a script it runs the full test against a
server process of its own, and prints what it found:

    python tests/serve/stress.py --requests 2000 --concurrency 64
"""

import argparse
import asyncio
import contextlib
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from peregrine import LLM, SamplingParams

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


def main() -> None:
    """The full test in four parts, with a look at memory and pages after each."""
    from peregrine.bench.http import running_server

    parser = argparse.ArgumentParser(description="Run the full stress test against a server process.")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with LLM("merlin") as llm:
        good_requests = make_good_requests(llm, 60, args.seed)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    with running_server([]) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        for part in range(4):
            made = asyncio.run(
                stress(str(http.base_url), good_requests, args.requests // 4, args.concurrency, args.seed + part)
            )
            outcomes += made.outcomes
            wrong += made.wrong
            load = wait_idle(http)
            pid = http.get("/server_info").json()["pid"]
            accounted = load["pages_free"] + load["pages_cached"] == load["pages"]
            print(f"part {part}: {memory_mib(pid):.0f} MiB, pages accounted for: {accounted}", flush=True)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:6} {outcome}")
    print("\n".join(wrong) or "nothing wrong")


if __name__ == "__main__":
    main()
