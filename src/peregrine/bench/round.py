"""One round on a GPU against the bytes it must read: ms per round, the floor, and their ratio.

Everything is measured in one run: the copy bandwidth, then rounds at each number of rows and context. The floor is what
a round must read, weights and keys and values (floor.py), over that bandwidth. Acceptance is simulated, so that random
weights will do: real drafts, real verify, drawn agreement.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from peregrine.bench.floor import experts_read, has_experts, round_bytes
from peregrine.bench.machine import machine_facts
from peregrine.bench.seating import mean_tokens, seat, step, unseat
from peregrine.config import EngineConfig
from peregrine.engine.build import build_engine
from peregrine.engine.engine import Engine
from peregrine.engine.runner import RowResult
from peregrine.engine.sources import open_source
from peregrine.errors import ConfigError
from peregrine.llm import engine_config as parse_options

COPY_BYTES, COPY_REPEATS = 2**31, 10
WARMUP_ROUNDS = 20
HOST_ROUNDS = 40  # in which the host is timed
COUNTED_EVERY = 4  # rounds until the experts that one reads are counted again
REST = WARMUP_ROUNDS + HOST_ROUNDS + 4  # rounds that are not measured
Facts = dict[str, object]


@dataclass(frozen=True, slots=True)
class Case:
    """So many requests of such a length."""

    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What one case gave; times are medians or means over the measured rounds."""

    rows: int
    context: int
    ms_per_round: float
    accept_length: float
    tokens_per_s: float
    floor_ms: float
    ratio: float
    gb_per_round: float
    experts_read: float  # of a layer, by the tokens of one round, counted; 0: there are none
    host_us_per_round: float
    device_idle_share: float


def run(asked: EngineConfig, cases: Sequence[Case], rounds: int) -> Facts:
    """Measure every case on one engine."""
    if not torch.cuda.is_available():
        raise ConfigError("bench round: measures CUDA devices, and torch sees none here")
    check_cases(asked, cases, open_source(asked.model).config.max_positions)
    bandwidth = copy_bandwidth()
    began = time.perf_counter()
    built = build_engine(asked)
    ready_s = time.perf_counter() - began
    with torch.inference_mode():
        figures = [measure(built.engine, case, rounds, bandwidth) for case in cases]
    return {
        "benchmark": "round",
        "machine": machine_facts(),
        "asked": {name: value for name, value in asdict(asked).items() if value is not None},
        "decisions": {d.field: [str(d.value), d.because] for d in built.decisions},
        "copy_tb_per_s": bandwidth / 1e12,
        "start_s": ready_s,
        "rounds": rounds,
        "simulated_accept": asked.simulate_accept,
        "cases": [asdict(figure) for figure in figures],
    }


def engine_config(options: dict[str, object], cases: Sequence[Case], rounds: int) -> EngineConfig:
    """What the engine must be asked for so that every case fits."""
    model = str(options.get("model", EngineConfig().model))
    named = {name: value for name, value in options.items() if name != "model"}
    asked = parse_options(model, named)
    depth = asked.num_drafts if asked.tree is None else asked.tree.depth
    growth = (rounds + REST) * (depth + 1) + 128
    pages = 1 + max(case.rows * (-(-(case.context + growth) // asked.page_size) + 8) for case in cases)
    wanted: dict[str, object] = {
        "max_rows": max(case.rows for case in cases),
        "row_sizes": tuple(sorted({case.rows for case in cases})),
        "max_len": max(case.context for case in cases) + growth,
        "num_pages": pages,
        "prefill_chunk": 2048,
    }
    return parse_options(model, wanted | named)


def check_cases(asked: EngineConfig, cases: Sequence[Case], max_positions: int) -> None:
    """Refuse a case that is longer than the model's context, before any weights are made."""
    longest = max(cases, key=lambda case: case.context)
    growth = (asked.max_len or 0) - longest.context
    most = max_positions - growth
    if longest.context > most:
        remedy = f"ask for at most {most}, or fewer --rounds" if most > 0 else "ask for fewer --rounds"
        raise ConfigError(
            f"--cases {longest.rows}x{longest.context}: with the {growth} tokens that its rounds may add, that is more "
            f"than the model's context of {max_positions}; {remedy}"
        )


def copy_bandwidth() -> float:
    """Bytes per second of a large copy on the device, read and written bytes counted."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(COPY_REPEATS):
        target.copy_(source)
    last.record()
    last.synchronize()
    seconds: float = first.elapsed_time(last) / 1e3
    return 2 * COPY_BYTES * COPY_REPEATS / seconds


class Watch:
    """Times an engine's rounds: on the device by events around each, on the host by what is not waiting.

    Events cost the host as much as a good part of a round's own work: without them it is timed alone.
    """

    def __init__(self, engine: Engine, events: bool) -> None:
        self.spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.waited_s, self.accepted, self.row_rounds = 0.0, 0, 0
        self._runner, self._launch, self._read = engine.runner, engine.runner.launch, engine.runner.read
        if events:
            engine.runner.launch = self._timed_launch  # type: ignore[method-assign, assignment]
        engine.runner.read = self._timed_read  # type: ignore[method-assign]

    def restart(self) -> None:
        """Forget what was seen until now."""
        self.spans, self.waited_s, self.accepted, self.row_rounds = [], 0.0, 0, 0

    def remove(self) -> None:
        """Leave the engine as it was."""
        self._runner.launch = self._launch  # type: ignore[method-assign]
        self._runner.read = self._read  # type: ignore[method-assign]

    def _timed_launch(self, *arguments: object) -> None:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        self._launch(*arguments)  # type: ignore[arg-type]
        last.record()
        self.spans.append((first, last))

    def _timed_read(self) -> list[RowResult]:
        began = time.perf_counter()
        ready = self._runner.in_flight[0].ready
        if ready is not None:
            ready.synchronize()
        self.waited_s += time.perf_counter() - began
        results = self._read()
        self.accepted += sum(len(result.tokens) for result in results)
        self.row_rounds += len(results)
        return results


def measure(engine: Engine, case: Case, rounds: int, bandwidth: float) -> Figures:
    """Fill the rows, let the rounds settle, then time them; with experts once more, to count those they read."""
    requests = seat(engine, case.rows, case.context, most_tokens(engine, rounds))
    watch = Watch(engine, events=True)
    step(engine, WARMUP_ROUNDS)
    watch.restart()
    shorter = mean_tokens(requests)
    step(engine, rounds)
    context = (shorter + mean_tokens(requests)) / 2
    watch.remove()
    host_s = time_host(engine)
    unseat(engine, requests)
    beyond, hits = count_experts(engine, case, rounds) if has_experts(engine) else (0.0, 0.0)
    num_bytes = round_bytes(engine, case.rows, context) + beyond
    return figures(case, watch, host_s, num_bytes, hits, bandwidth)


def count_experts(engine: Engine, case: Case, rounds: int) -> tuple[float, float]:
    """What `experts_read` says of the rounds that were timed, token for token the same, run once more."""
    requests = seat(engine, case.rows, case.context, most_tokens(engine, rounds))
    step(engine, WARMUP_ROUNDS)
    read = experts_read(engine, rounds, COUNTED_EVERY)
    unseat(engine, requests)
    return read


def most_tokens(engine: Engine, rounds: int) -> int:
    """What a request may grow by in all its rounds, if every draft is right."""
    return (rounds + REST) * (engine.runner.drafter.shape.depth + 1)


def time_host(engine: Engine) -> float:
    """Seconds that the host works for a round."""
    watch, began = Watch(engine, events=False), time.perf_counter()
    for _ in range(HOST_ROUNDS):
        engine.step()
    worked = time.perf_counter() - began - watch.waited_s
    watch.remove()
    return worked / HOST_ROUNDS


def figures(case: Case, watch: Watch, host_s: float, num_bytes: float, hits: float, bandwidth: float) -> Figures:
    """The case's figures from what was seen; a round must read `num_bytes`, and `hits` experts of a layer."""
    count = len(watch.spans)
    total_ms = watch.spans[0][0].elapsed_time(watch.spans[-1][1])
    busy_ms = sum(first.elapsed_time(last) for first, last in watch.spans)
    ms, accept = total_ms / count, watch.accepted / max(1, watch.row_rounds)
    floor_ms = num_bytes / bandwidth * 1e3
    return Figures(
        rows=case.rows,
        context=case.context,
        ms_per_round=ms,
        accept_length=accept,
        tokens_per_s=case.rows * accept / ms * 1e3,
        floor_ms=floor_ms,
        ratio=ms / floor_ms,
        gb_per_round=num_bytes / 1e9,
        experts_read=hits,
        host_us_per_round=host_s * 1e6,
        device_idle_share=max(0.0, 1 - busy_ms / total_ms),
    )


def show(facts: Facts) -> str:
    """The figures as a table; with a column of experts where there are any."""
    asked, cases = facts["asked"], facts["cases"]
    assert isinstance(asked, dict)
    assert isinstance(cases, list)
    mixture = any(case["experts_read"] for case in cases)
    lines = [
        f"{asked['model']}, copy {facts['copy_tb_per_s']:.2f} TB/s, ready in {facts['start_s']:.1f} s",
        f"{'rows':>5} {'context':>8} {'ms/round':>9} {'floor':>7} {'ratio':>6} {'accept':>7} {'tok/s':>8} "
        f"{'host us':>8} {'idle':>6}" + (f" {'experts':>8}" if mixture else ""),
    ]
    for c in cases:
        lines.append(
            f"{c['rows']:>5} {c['context']:>8} {c['ms_per_round']:>9.3f} {c['floor_ms']:>7.3f} {c['ratio']:>6.3f} "
            f"{c['accept_length']:>7.2f} {c['tokens_per_s']:>8.0f} {c['host_us_per_round']:>8.0f} "
            f"{c['device_idle_share']:>6.1%}" + (f" {c['experts_read']:>8.1f}" if mixture else "")
        )
    return "\n".join(lines)
