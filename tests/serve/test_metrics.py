"""Counters: they add up to what was generated, and the dashboard asks for names that exist."""

import json
import re
from pathlib import Path

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families

from peregrine import SamplingParams
from peregrine.serve.metrics import Metrics
from serve.conftest import Served
from spec.harness import build

DEPLOY = Path(__file__).parents[2] / "deploy"


def scrape(http: httpx.Client) -> dict[str, float]:
    """Samples by name and labels, as Prometheus reads them."""
    text = http.get("/metrics").text
    return {
        sample.name + "".join(f" {k}={v}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counts_are_those_of_the_outputs(server: Served, http: httpx.Client) -> None:
    server.wait_idle()
    before = scrape(http)
    prompts = [f"Once upon a time there were {i}" for i in range(4)]
    http.post("/v1/completions", json={"prompt": prompts, "temperature": 0, "max_tokens": 30, "ignore_eos": True})
    http.post("/v1/completions", json={"prompt": prompts, "colour": "red"})
    after = scrape(http)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    asked = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outputs = server.llm.generate(prompts, asked, progress=False)
    stats = [output.stats for output in outputs]
    assert grown("peregrine_generated_tokens_total") == 120
    assert grown("peregrine_prompt_tokens_total") == sum(len(o.prompt_token_ids) for o in outputs)
    assert grown("peregrine_rounds_total") == sum(s.rounds for s in stats)
    assert grown("peregrine_generations_total finish_reason=length") == 4
    for ours, theirs in (("draft_tokens", "draft_tokens"), ("correct_draft_tokens", "accepted_tokens")):
        count = grown(f"vllm:spec_decode_num_{theirs}_total model_name=merlin")
        assert count == grown(f"peregrine_{ours}_total")
    assert grown("peregrine_draft_tokens_total") == sum(s.drafted for s in stats)
    assert grown("peregrine_correct_draft_tokens_total") == sum(s.correct for s in stats) > 0
    # A request's first round has no drafts.
    assert grown("vllm:spec_decode_num_drafts_total model_name=merlin") == sum(s.rounds - 1 for s in stats)
    for position in range(3):
        deep = sum(count for s in stats for depth, count in enumerate(s.accept_histogram) if depth > position)
        name = f"vllm:spec_decode_num_accepted_tokens_per_pos_total model_name=merlin position={position}"
        assert grown(name) == deep
    assert grown("peregrine_http_responses_total path=/v1/completions status=200") == 1
    assert grown("peregrine_http_responses_total path=/v1/completions status=400") == 1
    for name in ("queue_time", "time_to_first_token", "time_per_output_token", "request_time"):
        assert grown(f"peregrine_{name}_seconds_count") == 4
        assert grown(f"peregrine_{name}_seconds_sum") >= 0


def test_gauges_show_the_engine(server: Served, http: httpx.Client) -> None:
    body = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        busy = scrape(http)
    server.wait_idle()
    idle = scrape(http)
    assert (busy["peregrine_running"], idle["peregrine_running"]) == (1, 0)
    assert idle["peregrine_pages_free"] + idle["peregrine_pages_cached"] == idle["peregrine_pages"] == 399


def test_vllms_names_say_the_same(server: Served, http: httpx.Client) -> None:
    """Routers, autoscalers and dashboards read these."""
    http.post("/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True})
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        busy = scrape(http)
    server.wait_idle()
    idle = scrape(http)
    label = " model_name=merlin"
    assert (busy[f"vllm:num_requests_running{label}"], idle[f"vllm:num_requests_running{label}"]) == (1, 0)
    assert idle[f"vllm:num_requests_waiting{label}"] == 0
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
        assert 0 < busy[f"vllm:{name}{label}"] < 1
        assert idle[f"vllm:{name}{label}"] == 0
    for theirs, ours in {
        "vllm:prompt_tokens_total": "peregrine_prompt_tokens_total",
        "vllm:generation_tokens_total": "peregrine_generated_tokens_total",
        "vllm:prefix_cache_hits_total": "peregrine_cached_prompt_tokens_total",
        "vllm:time_to_first_token_seconds_count": "peregrine_time_to_first_token_seconds_count",
        "vllm:time_to_first_token_seconds_sum": "peregrine_time_to_first_token_seconds_sum",
        "vllm:inter_token_latency_seconds_count": "peregrine_time_per_output_token_seconds_count",
        "vllm:request_time_per_output_token_seconds_sum": "peregrine_time_per_output_token_seconds_sum",
        "vllm:time_per_output_token_seconds_count": "peregrine_time_per_output_token_seconds_count",
        "vllm:e2e_request_latency_seconds_sum": "peregrine_request_time_seconds_sum",
    }.items():
        assert idle[theirs + label] == idle[ours], theirs
        assert idle[ours] > 0 or "cached" in ours, ours
    buckets = [value for name, value in idle.items() if name.startswith("vllm:e2e_request_latency_seconds_bucket")]
    assert max(buckets) == idle["peregrine_request_time_seconds_count"]
    reasons = {name: value for name, value in idle.items() if name.startswith("vllm:request_success_total")}
    assert reasons["vllm:request_success_total finished_reason=length" + label] > 0


def test_unknown_paths_do_not_multiply_the_series(http: httpx.Client) -> None:
    for index in range(3):
        http.get(f"/random/{index}")
    assert not [name for name in scrape(http) if "/random" in name]


def test_the_dashboard_asks_for_names_that_exist(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0})
    known = {name.split(" ")[0] for name in scrape(http)}
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "peregrine.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) >= 10
    for query in queries:
        names = re.findall(r"(?:peregrine_|vllm:)\w+", query)
        assert names, query
        assert not set(names) - known, query


def test_the_host_cache_is_counted_in_tokens_and_bytes() -> None:
    engine = build(page_size=4, max_rows=1, num_pages=20, host_cache=0.001).engine
    texts = [tuple(range(first, first + 40)) for first in (1, 100, 1)]
    with torch.inference_mode():
        for text in texts:
            engine.enqueue(engine.prepare(list(text), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)))
            while engine.has_work:
                engine.step()
    metrics = Metrics()
    metrics.watch(engine, "tiny")
    families = text_string_to_metric_families(metrics.text().decode())
    values = {sample.name: sample.value for family in families for sample in family.samples}
    tier = engine.ledger.tier
    assert tier is not None
    size, hits = tier.copies.page_bytes, values["peregrine_host_cache_hit_tokens_total"]
    assert 0 < hits <= 36
    assert values["peregrine_host_cache_in_bytes_total"] == hits / 4 * size
    assert values["peregrine_host_cache_out_bytes_total"] == tier.pages_out * size > 0
    assert values["peregrine_host_cache_used_bytes"] == tier.num_pages * size
    assert values["peregrine_host_cache_size_bytes"] == tier.copies.num_slots * size <= 0.001 * 2**30
