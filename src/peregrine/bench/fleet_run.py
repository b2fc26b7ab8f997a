"""The two uses of `bench fleet`: simulate fleets, and hold the simulation against one real server."""

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from peregrine.bench import serve
from peregrine.bench.fleet import Job, Plan, arrivals, simulate
from peregrine.bench.fleet_costs import SHORT_WORDS, Costs, costs_of_server, made_up_prompts
from peregrine.bench.serve_client import Client
from peregrine.errors import ConfigError

FIGURES = ("ttft_ms", "tpot_ms", "e2e_ms")


def run(plan: Plan, costs: Costs, replicas: Sequence[int], policies: Sequence[str]) -> dict[str, Any]:
    """Every number of replicas with every policy, under the same load."""
    plans = [replace(plan, replicas=count, policy=policy) for count in replicas for policy in policies]
    cases = [simulate(each, costs, arrivals(each)) for each in plans]
    return {"benchmark": "fleet", "asked": asdict(plan), "costs": asdict(costs), "cases": cases}


def compare(plan: Plan, client: Client) -> dict[str, Any]:
    """Measure a server's costs, simulate one replica with them, and send the same load to the server."""

    async def compared() -> dict[str, Any]:
        async with client:
            return await compare_with(plan, client)

    return asyncio.run(compared())


async def compare_with(plan: Plan, client: Client) -> dict[str, Any]:
    """The simulated case and the measured one. Prompts are made up and short, and share no beginning."""
    model = await serve.first_model(client)
    rows = await rows_of(client) or plan.rows
    load = serve.Plan(
        cases=(),
        prompts=made_up_prompts(plan.requests, SHORT_WORDS, plan.seed),
        requests=plan.requests,
        max_tokens=plan.output_tokens,
        ignore_eos=True,
        seed=plan.seed,
    )
    await serve.warm_up(load, client, model)
    costs = await costs_of_server(client, model, rows, plan.output_tokens, plan.seed)
    await serve.flush(client)
    measured = await serve.measure_case(load, client, model, serve.Case(rate=plan.rate))
    if measured["failed"]:
        raise ConfigError(f"url={client.url!r}: {measured['failed']} requests failed; send fewer per second")
    if measured["prompt_tokens"] is None:
        raise ConfigError(f"url={client.url!r}: reports no usage, so its prompts' tokens are unknown; use --rounds")
    prompt_tokens = round(measured["prompt_tokens"] / measured["completed"])
    times = serve.arrivals(plan.rate, plan.requests, plan.seed)
    jobs = [Job(time, number, prompt_tokens, plan.output_tokens) for number, time in enumerate(times)]
    alone = replace(plan, replicas=1, rows=rows, prefix_tokens=0, prompt_tokens=prompt_tokens)
    return {
        "benchmark": "fleet",
        "asked": asdict(alone),
        "costs": asdict(costs),
        "cases": [simulate(alone, costs, jobs)],
        "measured": measured,
    }


async def rows_of(client: Client) -> int | None:
    """How many requests a Peregrine server decodes at a time; None for other servers."""
    try:
        return int(json.loads((await client.ask("GET", "/server_info"))[1])["limits"]["max_rows"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def show(result: dict[str, Any]) -> str:
    """A line for each case; the measured one, if there is one, comes last."""
    costs, asked = result["costs"], result["asked"]
    rounds = ", ".join(f"{1e3 * seconds:.2f} ms at {rows}" for rows, seconds in costs["rounds"])
    lines = [
        f"{asked['requests']} requests, {asked['rate']:g} per second, {asked['prefix_tokens']} + "
        f"{asked['prompt_tokens']} prompt and {asked['output_tokens']} output tokens, {asked['rows']} rows a replica",
        f"rounds take {rounds} rows and bring {costs['accept_length']:.2f} tokens; "
        f"{1 / costs['prompt_s']:.0f} prompt tokens/s",
        "",
        f"{'':24}{'tokens/s':>9}{'rows':>7}{'cached':>8}   {'TTFT p50':>9}{'p99':>9}   {'TPOT p50':>9}{'p99':>9}   ms",
    ]
    for case in result["cases"]:
        title = f"{case['replicas']} x {case['policy']}" if "measured" not in result else "simulated"
        cached = "-" if case["prefix_hit_share"] is None else f"{case['prefix_hit_share']:.0%}"
        lines.append(
            f"{title:24}{case['output_tokens_per_s']:9.0f}{case['mean_rows']:7.1f}{cached:>8}{latencies(case)}"
        )
    if "measured" in result:
        case = result["measured"]
        lines.append(f"{'measured':24}{case['output_tokens_per_s']:9.0f}{'':>15}{latencies(case)}")
        speed, *ratios = (each / real for each, real in zip(shown(result["cases"][0]), shown(case), strict=True))
        columns = "   {:9.2f}{:9.2f}" * 2
        lines.append(f"{'simulated / measured':24}{speed:9.2f}{'':>15}{columns.format(*ratios)}")
    return "\n".join(lines)


def shown(case: dict[str, Any]) -> list[float]:
    """The figures of a case that were simulated and measured; NaN where there are none."""
    points = [case[name][point] if case[name] else math.nan for name in FIGURES[:2] for point in ("p50", "p99")]
    return [case["output_tokens_per_s"], *points]


def latencies(case: dict[str, Any]) -> str:
    """TTFT and TPOT as columns."""
    return "".join(
        f"   {case[name]['p50']:9.1f}{case[name]['p99']:9.1f}" if case[name] else f"   {'none':>18}"
        for name in FIGURES[:2]
    )
