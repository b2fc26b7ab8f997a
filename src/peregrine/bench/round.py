"""`peregrine bench round`: the time of a round on a GPU against its roofline.

Everything is measured in one run: the device's copy bandwidth and its peak of operations, then rounds at each number of
rows and context. The roofline is what a round must read over the bandwidth (`memory_ms`), and what it must compute over
the peak (`compute_ms`); see roofline.py. The peak is that of a device which has rested; what a product keeps up at the
power limit is told beside it. Acceptance is simulated, so that random weights will do: drafts and verify are real,
agreement is drawn.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from peregrine.bench.device import Peaks, measure_peaks, new_event
from peregrine.bench.roofline import Work, experts_read, mixtures_of, round_work
from peregrine.bench.seating import mean_tokens, seat, step, unseat
from peregrine.config import EngineConfig
from peregrine.engine.build import build_engine
from peregrine.engine.choices import pick_page_size
from peregrine.engine.engine import Engine
from peregrine.engine.request import Request
from peregrine.engine.sources import open_source
from peregrine.errors import ConfigError
from peregrine.hardware import resolve_device, resolve_dtype
from peregrine.llm import engine_config as parse_options
from peregrine.spec.round import no_mark

WARMUP_ROUNDS = 20
HOST_ROUNDS = 40  # in which the host is timed
COUNTED_EVERY = 4  # one round in this many has the experts counted that it reads
REST = WARMUP_ROUNDS + HOST_ROUNDS + 4  # rounds that are not measured
COLUMNS = (  # title, field, width, format
    ("rows", "rows", 5, ""),
    ("context", "context", 8, ""),
    ("ms/round", "ms_per_round", 9, ".3f"),
    ("memory", "memory_ms", 7, ".3f"),
    ("ratio", "ratio", 6, ".3f"),
    ("compute", "compute_ms", 8, ".3f"),
    ("of max", "roofline_ratio", 7, ".3f"),
    ("accept", "accept_length", 7, ".2f"),
    ("tok/s", "tokens_per_s", 8, ".0f"),
    ("host us", "host_us_per_round", 8, ".0f"),
    ("idle", "device_idle_share", 6, ".1%"),
    ("experts", "experts_read", 8, ".1f"),
)
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """How many requests run, and how long each one is."""

    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one case; times are means over the measured rounds."""

    rows: int
    context: int
    ms_per_round: float
    accept_length: float
    tokens_per_s: float
    memory_ms: float  # bytes over bandwidth
    ratio: float  # ms_per_round over memory_ms
    compute_ms: float  # operations over peak
    roofline_ratio: float  # ms_per_round over the larger of memory_ms and compute_ms
    gb_per_round: float
    experts_read: float  # by one round's tokens in one layer, counted; 0: there are none
    host_us_per_round: float
    device_idle_share: float


def run(asked: EngineConfig, cases: Sequence[Case], rounds: int) -> Facts:
    """Measure every case on one engine."""
    if not torch.cuda.is_available():
        raise ConfigError("bench round: measures CUDA devices, and torch sees none here")
    source = open_source(asked.model)
    check_cases(asked, cases, source.config.max_positions)
    dtype = resolve_dtype(asked.dtype, resolve_device(asked.device), source.dtype)
    peaks = measure_peaks(dtype)
    began = time.perf_counter()
    built = build_engine(asked)
    ready_s = time.perf_counter() - began
    with torch.inference_mode():
        figures = [measure(built.engine, case, rounds, peaks) for case in cases]
    return {
        "benchmark": "round",
        "asked": {name: value for name, value in asdict(asked).items() if value is not None},
        "decisions": {d.field: [str(d.value), d.because] for d in built.decisions},
        "copy_tb_per_s": peaks.bytes_per_s / 1e12,
        "matrix_tflop_per_s": peaks.operations_per_s / 1e12,
        "kept_matrix_tflop_per_s": peaks.kept_operations_per_s / 1e12,
        "start_s": ready_s,
        "rounds": rounds,
        "simulated_accept": asked.simulate_accept,
        "cases": [asdict(figure) for figure in figures],
    }


def engine_config(options: dict[str, object], cases: Sequence[Case], rounds: int) -> EngineConfig:
    """The options that were given, and what every case needs to fit."""
    model = str(options.get("model", EngineConfig().model))
    named = {name: value for name, value in options.items() if name != "model"}
    asked = parse_options(model, named)
    growth = (rounds + REST) * (asked.depth + 1) + 128
    page_size, _ = pick_page_size(asked)
    pages = 1 + max(case.rows * (-(-(case.context + growth) // page_size) + 8) for case in cases)
    needed: dict[str, object] = {
        "max_rows": max(case.rows for case in cases),
        "row_sizes": tuple(sorted({case.rows for case in cases})),
        "max_len": max(case.context for case in cases) + growth,
        "num_pages": pages,
        "prefill_chunk": 2048,
        "page_size": page_size,
        "windows": "fixed",  # rounds of one shape are timed
    }
    return parse_options(model, needed | named)


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


class RoundTimer:
    """A runner's `mark` that times rounds: on the device by events around each recorded part, on the host by its waits.

    Recording events takes the host as long as a good part of its own work, so it is timed without them.
    """

    def __init__(self, events: bool) -> None:
        self.events = events
        self.restart()

    def restart(self) -> None:
        """Forget the rounds seen until now."""
        self.starts: list[torch.cuda.Event] = []
        self.ends: list[torch.cuda.Event] = []
        self.waited_s = self._wait_began = 0.0

    def total_ms(self) -> float:
        """From the first part's begin to the last one's end."""
        return float(self.starts[0].elapsed_time(self.ends[-1]))

    def idle_share(self) -> float:
        """The share of the rounds' time in which the device waited for the host; 0 without events."""
        if not self.ends:
            return 0.0
        busy_ms = sum(float(first.elapsed_time(last)) for first, last in zip(self.starts, self.ends, strict=True))
        return max(0.0, 1 - busy_ms / self.total_ms())

    def __call__(self, stage: str) -> None:
        if self.events and stage in ("launch", "windows sent", "masks", "settle", "launched"):
            event = new_event()
            event.record()
            if stage == "windows sent":  # what went before is a few bytes, and the host is slower than the device
                self.starts.pop()
            (self.ends if stage in ("masks", "launched") else self.starts).append(event)
        elif stage == "wait":
            self._wait_began = time.perf_counter()
        elif stage == "read":
            self.waited_s += time.perf_counter() - self._wait_began


def measure(engine: Engine, case: Case, rounds: int, peaks: Peaks) -> Figures:
    """Fill the rows, let the rounds settle, then time them; with experts once more, to count those they read."""
    requests = seat(engine, case.rows, case.context, most_tokens(engine, rounds))
    timer = engine.runner.mark = RoundTimer(events=True)
    step(engine, WARMUP_ROUNDS)
    timer.restart()
    shorter, (accepted, read) = mean_tokens(requests), totals(requests)
    step(engine, rounds)
    context = (shorter + mean_tokens(requests)) / 2
    accepted, read = totals(requests)[0] - accepted, totals(requests)[1] - read
    host_s = time_host(engine)
    unseat(engine, requests)
    above, hits = count_experts(engine, case, rounds) if mixtures_of(engine) else (0.0, 0.0)
    work = round_work(engine, case.rows, context) + Work(above, 0.0)
    ms, accept = timer.total_ms() / len(timer.ends), accepted / max(1, read)
    memory_ms, compute_ms = work.num_bytes / peaks.bytes_per_s * 1e3, work.operations / peaks.operations_per_s * 1e3
    return Figures(
        rows=case.rows,
        context=case.context,
        ms_per_round=ms,
        accept_length=accept,
        tokens_per_s=case.rows * accept / ms * 1e3,
        memory_ms=memory_ms,
        ratio=ms / memory_ms,
        compute_ms=compute_ms,
        roofline_ratio=ms / max(memory_ms, compute_ms),
        gb_per_round=work.num_bytes / 1e9,
        experts_read=hits,
        host_us_per_round=host_s * 1e6,
        device_idle_share=timer.idle_share(),
    )


def totals(requests: Sequence[Request]) -> tuple[int, int]:
    """Tokens accepted and rounds read, of all requests together."""
    return sum(request.stats.accepted for request in requests), sum(request.stats.rounds for request in requests)


def count_experts(engine: Engine, case: Case, rounds: int) -> tuple[float, float]:
    """`experts_read` of the rounds that were timed, run once more with the same tokens."""
    requests = seat(engine, case.rows, case.context, most_tokens(engine, rounds))
    step(engine, WARMUP_ROUNDS)
    read = experts_read(engine, rounds, COUNTED_EVERY)
    unseat(engine, requests)
    return read


def most_tokens(engine: Engine, rounds: int) -> int:
    """What a request may grow by in all its rounds, if every draft is right."""
    return (rounds + REST) * (engine.runner.drafter.shape.depth + 1)


def time_host(engine: Engine) -> float:
    """Seconds that the host works for a round: all but its waits for the device."""
    timer = engine.runner.mark = RoundTimer(events=False)
    began = time.perf_counter()
    for _ in range(HOST_ROUNDS):
        engine.step()
    worked = time.perf_counter() - began - timer.waited_s
    engine.runner.mark = no_mark
    return worked / HOST_ROUNDS


def show(facts: Facts) -> str:
    """The figures as a table; with a column of experts where there are any."""
    columns = COLUMNS if any(case["experts_read"] for case in facts["cases"]) else COLUMNS[:-1]
    lines = [
        f"{facts['asked']['model']}, copy {facts['copy_tb_per_s']:.2f} TB/s, matrix product "
        f"{facts['matrix_tflop_per_s']:.0f} TFLOP/s, {facts['kept_matrix_tflop_per_s']:.0f} at the power limit, "
        f"ready in {facts['start_s']:.1f} s",
        " ".join(f"{title:>{width}}" for title, _, width, _ in columns),
    ]
    for case in facts["cases"]:
        lines.append(" ".join(f"{case[field]:>{width}{form}}" for _, field, width, form in columns))
    return "\n".join(lines)
