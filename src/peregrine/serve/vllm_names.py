"""The server's metrics once more under vLLM's names, for routers, autoscalers and dashboards that know those."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from peregrine.engine.engine import Engine
from peregrine.serve.metrics import Metrics

# vLLM's name of a histogram: ours. Its time per token has had three names; tools know one or another.
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "peregrine_time_to_first_token_seconds",
    "vllm:request_time_per_output_token_seconds": "peregrine_time_per_output_token_seconds",
    "vllm:time_per_output_token_seconds": "peregrine_time_per_output_token_seconds",
    "vllm:inter_token_latency_seconds": "peregrine_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "peregrine_request_time_seconds",
    "vllm:request_queue_time_seconds": "peregrine_queue_time_seconds",
}


class VllmNames(Collector):
    """Reads the counters of `metrics` and writes them with the label that vLLM's have, the model's name."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Counters, gauges and histograms."""
        metrics, model = self._metrics, (self._metrics.model,)
        for name, text, count in (
            ("prompt_tokens", "Prompt tokens.", metrics.prompt_tokens),
            ("generation_tokens", "Tokens generated.", metrics.generated_tokens),
            ("prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", metrics.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", metrics.cached_tokens),
            ("gpu_prefix_cache_queries", "The older name of prefix_cache_queries.", metrics.prompt_tokens),
            ("gpu_prefix_cache_hits", "The older name of prefix_cache_hits.", metrics.cached_tokens),
            ("num_preemptions", "Preemptions.", metrics.preemptions),
            ("spec_decode_num_drafts", "Rounds with drafts.", metrics.num_drafts),
            ("spec_decode_num_draft_tokens", "Drafts offered to the target.", metrics.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafts that became output.", metrics.correct),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=("model_name",))
            counter.add_metric(model, count)
            yield counter
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        deep = CounterMetricFamily(name, "Drafts that became output, by depth.", labels=("model_name", "position"))
        for position, count in enumerate(metrics.correct_by_position):
            deep.add_metric((*model, str(position)), count)
        ended = CounterMetricFamily(
            "vllm:request_success", "Generations ended.", labels=("model_name", "finished_reason")
        )
        for (reason,), count in sorted(metrics.finished.items()):
            ended.add_metric((*model, reason), count)
        yield from (deep, ended)
        if metrics.engine is not None:
            yield from self._gauges(metrics.engine, model)
        yield from self._histograms(model)

    def _gauges(self, engine: Engine, model: tuple[str, ...]) -> Iterator[Metric]:
        running = len(engine.running) + len(engine.reading)
        usage = cache_usage(engine)
        for name, text, value in (
            ("num_requests_running", "Generations that decode, or whose prompt is being read.", running),
            ("num_requests_waiting", "Generations in the queue.", len(engine.waiting)),
            ("kv_cache_usage_perc", "Share of the KV cache that requests hold: 0 to 1.", usage),
            ("gpu_cache_usage_perc", "The older name of kv_cache_usage_perc.", usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=("model_name",))
            gauge.add_metric(model, value)
            yield gauge

    def _histograms(self, model: tuple[str, ...]) -> Iterator[Metric]:
        ours = {family.name: family for each in self._metrics.histograms for family in each.collect()}
        for theirs, name in HISTOGRAMS.items():
            family = Metric(theirs, ours[name].documentation, "histogram")
            family.samples = [
                Sample(theirs + s.name.removeprefix(name), {"model_name": model[0], **s.labels}, s.value)
                for s in ours[name].samples
                if not s.name.endswith("_created")
            ]
            yield family


def cache_usage(engine: Engine) -> float:
    """Pages that requests hold, of all pages; a page that only the prefix cache holds is as good as free."""
    held = {page for request in (*engine.running, *engine.reading) for page in request.pages}
    return len(held) / (engine.ledger.pool.num_pages - 1)
