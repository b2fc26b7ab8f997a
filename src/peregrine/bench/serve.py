"""`peregrine bench serve`: drives any OpenAI-compatible server and reports what its clients see.

A case is a closed loop (a fixed number of requests at any time) or an open one (requests arrive at a rate, whether or
not the server keeps up). The server's prefix cache is emptied before each case, so that cases do not help each other.
"""

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import accumulate
from typing import Any

from tqdm import tqdm

from peregrine.bench.prompts import Prompt, repeated
from peregrine.bench.serve_client import Client, server_error
from peregrine.bench.serve_counters import Counters, read_counters
from peregrine.bench.serve_metrics import Exchange, Limits, summarise
from peregrine.errors import ConfigError
from peregrine.log import logger

FLUSH_PATHS = ("/flush_cache", "/reset_prefix_cache")  # Peregrine's and SGLang's; vLLM's
FLUSH_TRIES, FLUSH_PAUSE_S = 3, 2.0
NO_SUCH_ROUTE = (404, 405)
NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Case:
    """One load: `concurrency` requests at a time, or `rate` arrivals per second."""

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ConfigError(
                f"rate={self.rate:g}: must be a number of requests per second above 0; to send all at once, pass "
                "--concurrency with as many as --requests"
            )

    def __str__(self) -> str:
        return f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g} per second"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure."""

    cases: tuple[Case, ...]
    prompts: Sequence[Prompt]
    model: str | None = None  # None: the first one the server lists
    requests: int = 64  # per case
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0  # of the arrivals; request i has the seed `seed + i`
    ignore_eos: bool = False
    limits: Limits = NO_LIMITS
    flush: bool = True

    def __post_init__(self) -> None:
        most = max((case.concurrency or 0 for case in self.cases), default=0)
        if most > self.requests:
            raise ConfigError(
                f"concurrency={most}: only {self.requests} requests are sent, so there are never as many; pass "
                f"--requests {most} or more"
            )


def run(plan: Plan, client: Client) -> dict[str, Any]:
    """Measure, and return everything as plain values."""

    async def measured() -> dict[str, Any]:
        async with client:
            return await measure(plan, client)

    return asyncio.run(measured())


async def measure(plan: Plan, client: Client) -> dict[str, Any]:
    """Every case, in order."""
    model = plan.model or await first_model(client)
    await warm_up(plan, client, model)
    cases, flushes = [], plan.flush
    for case in plan.cases:
        if flushes and not await flush(client):
            flushes = False
            logger.warning(
                "the server cannot empty its prefix cache (no %s): later cases may find it warm",
                " or ".join(FLUSH_PATHS),
            )
        cases.append(await measure_case(plan, client, model, case))
    return {
        "benchmark": "serve",
        "url": client.url,
        "model": model,
        "server": await server_facts(client),
        "requests": plan.requests,
        "prompts": len(plan.prompts),
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "ignore_eos": plan.ignore_eos,
        "flushed": flushes,
        "limits": plan.limits.given(),
        "cases": cases,
    }


async def measure_case(plan: Plan, client: Client, model: str, case: Case) -> dict[str, Any]:
    """One load from its first request to its last answer."""
    bar = tqdm(total=plan.requests, desc=str(case), unit="request", leave=False, disable=None)

    async def ask(order: tuple[int, Prompt]) -> Exchange:
        index, prompt = order
        exchange = await client.stream(*body_of(plan, model, prompt, plan.seed + index))
        bar.update()
        return exchange

    orders = list(enumerate(repeated(list(plan.prompts), plan.requests)))
    before = await counters(client)
    begun = client.clock()
    with bar:
        if case.rate is not None:
            exchanges = await open_loop(ask, orders, arrivals(case.rate, len(orders), plan.seed), client)
        else:
            exchanges = await closed_loop(ask, orders, case.concurrency or 1)
    seconds = client.clock() - begun
    after = await counters(client)
    return {
        "concurrency": case.concurrency,
        "rate": case.rate,
        **summarise(exchanges, seconds, plan.limits),
        "acceptance": after.since(before) if before and after else None,
    }


Order = tuple[int, Prompt]
Ask = Callable[[Order], Awaitable[Exchange]]


async def closed_loop(ask: Ask, orders: Sequence[Order], concurrency: int) -> list[Exchange]:
    """`concurrency` requests at any time: the next one is sent as soon as one is answered."""
    waiting, exchanges = iter(orders), []

    async def worker() -> None:
        for order in waiting:
            exchanges.append(await ask(order))

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return exchanges


async def open_loop(ask: Ask, orders: Sequence[Order], times: Sequence[float], client: Client) -> list[Exchange]:
    """Send each request at its time, however many are still running."""
    begun, sent = client.clock(), []
    for order, time in zip(orders, times, strict=True):
        await client.sleep(max(0.0, begun + time - client.clock()))
        sent.append(asyncio.ensure_future(ask(order)))
    return list(await asyncio.gather(*sent))


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which requests of a Poisson process arrive, the last at count / rate whatever the seed."""
    gaps = random.Random(seed)
    times = list(accumulate(gaps.expovariate(rate) for _ in range(count)))
    return [time * count / rate / times[-1] for time in times]


def body_of(plan: Plan, model: str, prompt: Prompt, seed: int) -> tuple[str, dict[str, object]]:
    """Path and body of a request: a completion for text, a chat for messages."""
    body: dict[str, object] = {
        "model": model,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if plan.ignore_eos else {}),
    }
    if isinstance(prompt, str):
        return "/v1/completions", {"prompt": prompt, **body}
    return "/v1/chat/completions", {"messages": prompt, **body}


async def first_model(client: Client) -> str:
    """The first model the server lists."""
    try:
        status, body = await client.ask("GET", "/v1/models")
    except OSError as error:
        raise ConfigError(f"url={client.url!r}: no server answers ({error}); start it, or check the address") from error
    if status == HTTPStatus.UNAUTHORIZED:
        raise ConfigError(f"url={client.url!r}: {server_error(status, body)}; pass --api-key")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        problem = f"/v1/models names no model ({server_error(status, body)})"
        raise ConfigError(f"url={client.url!r}: {problem}; check the address, or pass --model") from error


async def warm_up(plan: Plan, client: Client, model: str) -> None:
    """Send one request that is not counted; ConfigError if it fails."""
    exchange = await client.stream(*body_of(plan, model, plan.prompts[0], plan.seed))
    if exchange.error is not None:
        raise ConfigError(f"url={client.url!r}: the first request failed ({exchange.error}); nothing was measured")


async def flush(client: Client) -> bool:
    """Empty the server's prefix cache; False if it has no route for that."""
    for path in FLUSH_PATHS:
        if await flush_at(client, path):
            return True
    return False


async def flush_at(client: Client, path: str) -> bool:
    """Flush by one route, with retries because a server may be busy for a moment; False if there is no such route."""
    trouble = ""
    for attempt in range(FLUSH_TRIES):
        if attempt:
            await client.sleep(FLUSH_PAUSE_S)
        try:
            status, body = await client.ask("POST", path)
        except OSError as error:
            trouble = str(error)
            continue
        if status in NO_SUCH_ROUTE:
            return False
        if status < 300:
            return True
        trouble = server_error(status, body)
    raise ConfigError(
        f"POST {path} failed {FLUSH_TRIES} times, the last time with {trouble}; see to it, or pass --no-flush"
    )


async def counters(client: Client) -> Counters | None:
    """The server's counters of speculation; None if it publishes none."""
    try:
        status, body = await client.ask("GET", "/metrics")
    except OSError:
        return None
    return read_counters(body.decode(errors="replace")) if status == 200 else None


async def server_facts(client: Client) -> object:
    """What a Peregrine server says about itself; None for other servers."""
    try:
        facts = json.loads((await client.ask("GET", "/server_info"))[1])
        return {name: facts[name] for name in ("version", "decisions", "limits")}
    except (OSError, ValueError, LookupError, TypeError):
        return None
