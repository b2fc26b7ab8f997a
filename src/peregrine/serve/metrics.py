"""What Prometheus may scrape. Counts are plain integers, added to as deltas pass by and read when somebody looks."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from peregrine.engine.request import Delta, Output
from peregrine.llm import LLM

QUICK = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LONG = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)


class Metrics(Collector):
    """The server's counters. Acceptance lengths count the bonus token, correct drafts do not."""

    def __init__(self, paths: frozenset[str]) -> None:
        self.registry = CollectorRegistry()
        self._paths = paths  # others are counted as one
        self._llm: LLM | None = None
        self._model = ""
        self.http: dict[tuple[str, int], int] = {}
        self.finished: dict[str, int] = {}
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.preemptions = 0
        self.rounds = 0
        self.num_drafts = self.num_draft_tokens = 0  # rounds with drafts, and the drafts in them
        self.correct_by_position: list[int] = []

        def timed(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"peregrine_{name}_seconds", text, buckets=buckets, registry=self.registry)

        self._queue = timed("queue_time", "From arrival to the first prompt chunk.", LONG)
        self._first = timed("time_to_first_token", "From arrival to the first token.", LONG)
        self._token = timed("time_per_output_token", "Per token after the first.", QUICK)
        self._total = timed("request_time", "From arrival to the end.", LONG)
        self.registry.register(self)

    def watch(self, llm: LLM, model: str) -> None:
        """The engine whose pages and queues are shown from now on."""
        self._llm, self._model = llm, model

    def count_http(self, path: str, status: int) -> None:
        """One answer was begun."""
        key = (path if path in self._paths else "other", status)
        self.http[key] = self.http.get(key, 0) + 1

    def observe(self, delta: Delta) -> None:
        """Count what one round did for one request."""
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
        self.finished[output.finish_reason] = self.finished.get(output.finish_reason, 0) + 1
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
        http = CounterMetricFamily("peregrine_http_responses", "Answers.", labels=("path", "status"))
        for (path, status), count in sorted(self.http.items()):
            http.add_metric((path, str(status)), count)
        yield http
        ends = CounterMetricFamily("peregrine_generations", "Generations ended.", labels=("finish_reason",))
        for reason, count in sorted(self.finished.items()):
            ends.add_metric((reason,), count)
        yield ends
        for name, text, count in (
            ("prompt_tokens", "Prompt tokens of ended generations.", self.prompt_tokens),
            ("cached_prompt_tokens", "Of these, found in the prefix cache.", self.cached_tokens),
            ("generated_tokens", "Tokens generated.", self.generated_tokens),
            ("rounds", "Rounds, counted per generation.", self.rounds),
            ("preemptions", "Generations put back for want of pages.", self.preemptions),
            ("draft_tokens", "Drafts offered to the target.", self.num_draft_tokens),
            ("correct_draft_tokens", "Drafts that became output.", self.correct),
        ):
            yield CounterMetricFamily(f"peregrine_{name}", text, value=count)
        yield GaugeMetricFamily("peregrine_accept_length", "Tokens per round so far.", value=self.accept_length)
        yield from self._speculation()
        yield from self._engine()

    def _speculation(self) -> Iterator[CounterMetricFamily]:
        """The same under vLLM's names, for tools that know those."""
        for name, text, count in (
            ("num_drafts", "Rounds with drafts.", self.num_drafts),
            ("num_draft_tokens", "Drafts offered to the target.", self.num_draft_tokens),
            ("num_accepted_tokens", "Drafts that became output.", self.correct),
        ):
            family = CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=("model_name",))
            family.add_metric((self._model,), count)
            yield family
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that became output, by depth.",
            labels=("model_name", "position"),
        )
        for position, count in enumerate(self.correct_by_position):
            family.add_metric((self._model, str(position)), count)
        yield family

    def _engine(self) -> Iterator[GaugeMetricFamily]:
        """Queues and pages as they are now; none while the model loads."""
        if self._llm is None:
            return
        engine = self._llm.engine
        pool, tree = engine.ledger.pool, engine.ledger.tree
        for name, text, count in (
            ("running", "Generations in rounds.", len(engine.running)),
            ("reading", "Generations whose prompt is being read.", len(engine.reading)),
            ("waiting", "Generations in the queue.", len(engine.waiting)),
            ("pages", "Pages of the KV cache.", pool.num_pages - 1),
            ("pages_free", "Pages nobody uses.", pool.num_free),
            ("pages_cached", "Pages in the prefix cache, held ones included.", tree.num_cached if tree else 0),
        ):
            yield GaugeMetricFamily(f"peregrine_{name}", text, value=count)
