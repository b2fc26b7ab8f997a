"""Counters for Prometheus: plain integers, added to as deltas pass by, and written out when they are scraped."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from peregrine.cache.host_tier import HostTier
from peregrine.engine.ahead_planner import AheadPlanner
from peregrine.engine.engine import Engine
from peregrine.engine.output import Delta, Output
from peregrine.engine.planning import WindowPlanner

QUICK = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LONG = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
# Responses on other paths are counted together: a client could invent any number of them.
PATHS = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize"),
        *("/health", "/livez", "/version", "/server_info", "/flush_cache", "/metrics"),
        *("/get_server_info", "/model_info", "/get_model_info", "/get_load"),
    }
)


# Requests and pages of an engine: help text, and how it is counted.
LOAD: dict[str, tuple[str, Callable[[Engine], int]]] = {
    "running": ("Generations in rounds.", lambda engine: len(engine.running)),
    "reading": ("Generations whose prompt is being read.", lambda engine: len(engine.reading)),
    "waiting": ("Generations in the queue.", lambda engine: len(engine.waiting)),
    "pages": ("Pages of the KV cache.", lambda engine: engine.ledger.pool.num_pages - 1),
    "pages_free": ("Pages that are not in use.", lambda engine: engine.ledger.pool.num_free),
    "pages_cached": (
        "Pages in the prefix cache, held ones included.",
        lambda engine: engine.ledger.tree.num_cached if engine.ledger.tree else 0,
    ),
}


class Metrics(Collector):
    """The server's counters. Acceptance lengths count the bonus token, correct drafts do not."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine: Engine | None = None  # once it is loaded
        self.model = ""
        self.http: Counter[tuple[str, ...]] = Counter()  # responses by path and status
        self.finished: Counter[tuple[str, ...]] = Counter()  # generations by finish reason
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.preemptions = 0
        self.rounds = 0
        self.num_drafts = self.num_draft_tokens = 0  # rounds with drafts, and the drafts in them
        self.correct_by_position: list[int] = []

        self.histograms: list[Histogram] = []

        def timed(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"peregrine_{name}_seconds", text, buckets=buckets, registry=self.registry)
            self.histograms.append(made)
            return made

        self._queue = timed("queue_time", "From arrival to the first prompt chunk.", LONG)
        self._first = timed("time_to_first_token", "From arrival to the first token.", LONG)
        self._token = timed("time_per_output_token", "Per token after the first.", QUICK)
        self._total = timed("request_time", "From arrival to the end.", LONG)
        self.registry.register(self)

    def watch(self, engine: Engine, model: str) -> None:
        """The engine whose pages and queues are shown from now on."""
        self.engine, self.model = engine, model

    def count_http(self, path: str, status: int) -> None:
        """A response was begun."""
        self.http[path if path in PATHS else "other", str(status)] += 1

    def observe(self, delta: Delta) -> None:
        """Count what one round did for one generation."""
        self.generated_tokens += len(delta.token_ids)
        if delta.token_ids:
            self.rounds += 1
        if delta.offered:
            self.num_drafts += 1
            self.num_draft_tokens += delta.offered
            correct = sum(delta.drafted)
            self.correct_by_position.extend([0] * (correct - len(self.correct_by_position)))
            for position in range(correct):
                self.correct_by_position[position] += 1
        if delta.output is not None:
            self._observe_end(delta.output)

    def _observe_end(self, output: Output) -> None:
        self.finished[(output.finish_reason,)] += 1
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.stats.cached_tokens
        self.preemptions += output.stats.preemptions
        self._queue.observe(output.timing.queue_s)
        self._total.observe(output.timing.total_s)
        if output.token_ids:
            self._first.observe(output.timing.first_token_s)
        if len(output.token_ids) > 1:
            self._token.observe(output.timing.per_token_s)

    @property
    def correct(self) -> int:
        """Drafts that became output."""
        return sum(self.correct_by_position)

    @property
    def accept_length(self) -> float:
        """Tokens per round so far, bonus included."""
        return self.generated_tokens / self.rounds if self.rounds else 0.0

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Everything but the histograms."""
        yield labelled("peregrine_http_responses", "Responses.", ("path", "status"), self.http)
        yield labelled("peregrine_generations", "Generations ended.", ("finish_reason",), self.finished)
        for name, text, count in (
            ("prompt_tokens", "Prompt tokens of ended generations.", self.prompt_tokens),
            ("cached_prompt_tokens", "Of these, found in the prefix cache.", self.cached_tokens),
            ("generated_tokens", "Tokens generated.", self.generated_tokens),
            ("rounds", "Rounds, counted per generation.", self.rounds),
            ("preemptions", "Preemptions of generations for want of pages.", self.preemptions),
            ("draft_tokens", "Drafts offered to the target.", self.num_draft_tokens),
            ("correct_draft_tokens", "Drafts that became output.", self.correct),
        ):
            yield CounterMetricFamily(f"peregrine_{name}", text, value=count)
        yield GaugeMetricFamily("peregrine_accept_length", "Tokens per round so far.", value=self.accept_length)
        if self.engine is not None:
            for name, (text, count_of) in LOAD.items():
                yield GaugeMetricFamily(f"peregrine_{name}", text, value=count_of(self.engine))
            runner = self.engine.runner
            if (planner := runner.any_planner) is not None:
                yield from plan_metrics(planner)
            if self.engine.ledger.tier is not None:
                yield from host_cache(self.engine.ledger.tier, self.engine.ledger.page_size)


def host_cache(tier: HostTier, page_size: int) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """What went to host memory, what came back, and what is there."""
    size = tier.copies.page_bytes
    for name, text, count in (
        ("hit_tokens", "Prompt tokens whose KV came from host memory.", tier.pages_in * page_size),
        ("in_bytes", "KV copied from host memory to the device.", tier.pages_in * size),
        ("out_bytes", "KV copied from the device to host memory.", tier.pages_out * size),
    ):
        yield CounterMetricFamily(f"peregrine_host_cache_{name}", text, value=count)
    for name, text, count in (
        ("used_bytes", "KV in host memory.", tier.num_pages * size),
        ("size_bytes", "Host memory for KV.", tier.copies.num_slots * size),
    ):
        yield GaugeMetricFamily(f"peregrine_host_cache_{name}", text, value=count)


def plan_metrics(planner: WindowPlanner | AheadPlanner) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """What was planned, and what came of it."""
    record = planner.record
    windows: dict[tuple[str, ...], int] = {(str(tokens),): count for tokens, count in record.windows.items()}
    yield labelled("peregrine_windows", "Windows by number of tokens.", ("tokens",), windows)
    plans: dict[tuple[str, ...], int] = {(plan,): count for plan, count in record.rounds.items()}
    yield labelled("peregrine_planned_rounds", "Rounds by plan: plain, drafts, mixed rows, or tree.", ("plan",), plans)
    for name, text, value in (
        ("planned_tokens", "Tokens that plans expected of their rounds.", record.expected_tokens),
        ("round_tokens", "Tokens that these rounds gave.", record.tokens),
        ("planned_milliseconds", "Processor time that plans expected.", record.expected_ms),
        ("round_milliseconds", "Processor time of these rounds.", record.ms),
    ):
        yield CounterMetricFamily(f"peregrine_{name}", text, value=value)
    error = planner.calibration_error
    yield GaugeMetricFamily("peregrine_odds_error", "Mean distance of drafts' chances from their success.", value=error)


def labelled(
    name: str, text: str, labels: tuple[str, ...], counts: Mapping[tuple[str, ...], int]
) -> CounterMetricFamily:
    """A counter with a value for each combination of labels."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in sorted(counts.items()):
        family.add_metric(values, count)
    return family
