"""`peregrine bench fleet`: replicas behind a router, simulated, so that a fleet can be sized before it is bought.

A replica works in steps, as the engine does: a chunk of the prompts that wait, oldest first, then a round over all rows
that decode. What a step takes comes from measurements (`fleet_costs.py`). Requests arrive as a Poisson process; a
request's prompt begins with one of a number of shared prefixes, which a replica keeps in its prefix cache while there
is room, the least recently used one leaving first. Times are the client's: TTFT and TPOT as in `bench serve`.
"""

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate
from typing import Any

from peregrine.bench.fleet_costs import Costs
from peregrine.bench.serve_metrics import figures
from peregrine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A load and a fleet."""

    rate: float  # requests per second, of the whole fleet
    replicas: int = 2
    policy: str = "prefix"
    requests: int = 2000
    rows: int = 32  # of each replica
    chunk: int = 2048  # prompt tokens read in one step
    prefix_tokens: int = 0  # at the beginning of every prompt
    num_prefixes: int = 1  # different ones, all equally likely
    prompt_tokens: int = 512  # after the prefix; the mean, drawn from half to one and a half of it
    output_tokens: int = 128  # likewise
    cache_tokens: int = 200_000  # of prefixes that a replica keeps
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"rate={self.rate}: must be above 0 requests per second")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy={self.policy!r}: is not one of {', '.join(POLICIES)}")


@dataclass(slots=True)
class Job:
    """One request on its way."""

    arrived: float
    prefix: int
    unread: int  # prompt tokens
    output_tokens: int
    context: int = 0
    made: int = 0
    first: float = 0.0
    ended: float = 0.0


@dataclass(slots=True)
class Replica:
    """One engine: its queue, what it reads, what it decodes, and its prefix cache."""

    plan: Plan
    costs: Costs
    draw: random.Random
    waiting: deque[Job] = field(default_factory=deque)
    reading: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    busy_s: float = 0.0
    row_s: float = 0.0  # seconds times rows that decoded
    hits: int = 0

    @property
    def num_open(self) -> int:
        return len(self.waiting) + len(self.reading) + len(self.running)

    def begin_step(self) -> float:
        """Admit what there are rows for; returns the seconds of the step, 0 if there is nothing to do."""
        while self.waiting and len(self.reading) + len(self.running) < self.plan.rows:
            self.reading.append(self._admit(self.waiting.popleft()))
        room = chunk = min(self.plan.chunk, sum(job.unread for job in self.reading))
        for job in self.reading:
            share = min(job.unread, room)
            job.unread -= share
            room -= share
        self.running += [job for job in self.reading if not job.unread]
        self.reading = [job for job in self.reading if job.unread]
        seconds = chunk * self.costs.prompt_s
        if self.running:
            seconds += self.costs.round_s(len(self.running), sum(job.context for job in self.running))
        self.busy_s += seconds
        self.row_s += seconds * len(self.running)
        return seconds

    def end_step(self, now: float) -> list[Job]:
        """Every row has its tokens; returns those that are complete."""
        least, more = divmod(self.costs.accept_length, 1)
        for job in self.running:
            made = min(int(least) + (self.draw.random() < more), job.output_tokens - job.made)
            if not job.made:
                job.first = now
            job.made += made
            job.context += made
        done = [job for job in self.running if job.made >= job.output_tokens]
        self.running = [job for job in self.running if job.made < job.output_tokens]
        for job in done:
            job.ended = now
        return done

    def _admit(self, job: Job) -> Job:
        """Take its prefix from the cache if it is there; afterwards it is."""
        job.context = job.unread
        if job.prefix in self.cached:
            job.unread = max(1, job.unread - self.plan.prefix_tokens)
            self.hits += 1
        self.cached[job.prefix] = None
        self.cached.move_to_end(job.prefix)
        while len(self.cached) * self.plan.prefix_tokens > self.plan.cache_tokens:
            self.cached.popitem(last=False)
        return job


Route = Callable[[Job, Sequence[Replica]], Replica]


def random_choice(plan: Plan, draw: random.Random) -> Route:
    """Any replica."""
    return lambda job, replicas: draw.choice(replicas)


def round_robin(plan: Plan, draw: random.Random) -> Route:
    """One after the other."""
    turn = iter(range(10**12))
    return lambda job, replicas: replicas[next(turn) % len(replicas)]


def least_requests(plan: Plan, draw: random.Random) -> Route:
    """The one with the fewest open requests."""
    return lambda job, replicas: min(replicas, key=lambda replica: replica.num_open)


def power_of_two(plan: Plan, draw: random.Random) -> Route:
    """The emptier of two drawn ones."""
    return lambda job, replicas: min(draw.sample(replicas, min(2, len(replicas))), key=lambda replica: replica.num_open)


def prefix_hash(plan: Plan, draw: random.Random) -> Route:
    """The home of its prefix; while that has twice its rows open, the next on the ring (as `serve.replicas` routes)."""

    def route(job: Job, replicas: Sequence[Replica]) -> Replica:
        def place(index: int) -> bytes:
            return sha256(f"{job.prefix} {index}".encode()).digest()

        ring = [replicas[index] for index in sorted(range(len(replicas)), key=place)]
        return next((replica for replica in ring if replica.num_open < 2 * plan.rows), ring[0])

    return route


POLICIES: dict[str, Callable[[Plan, random.Random], Route]] = {
    "random": random_choice,
    "round-robin": round_robin,
    "least-requests": least_requests,
    "power-of-two": power_of_two,
    "prefix": prefix_hash,
}


def arrivals(plan: Plan) -> list[Job]:
    """The requests, in order of time."""
    draw = random.Random(plan.seed)

    def around(mean: int) -> int:
        return max(1, round(draw.uniform(0.5, 1.5) * mean))

    times = accumulate(draw.expovariate(plan.rate) for _ in range(plan.requests))
    return [
        Job(
            time,
            draw.randrange(plan.num_prefixes),
            plan.prefix_tokens + around(plan.prompt_tokens),
            around(plan.output_tokens),
        )
        for time in times
    ]


def simulate(plan: Plan, costs: Costs, jobs: Sequence[Job]) -> dict[str, Any]:
    """Run the fleet until every request is answered."""
    draw = random.Random(plan.seed + 1)
    replicas = [Replica(plan, costs, draw) for _ in range(plan.replicas)]
    route = POLICIES[plan.policy](plan, draw)
    # What happens next: (time, order, replica whose step ends, or the request that arrives). Order breaks ties.
    events: list[tuple[float, int, Replica | Job]] = [(job.arrived, n, job) for n, job in enumerate(jobs)]
    idle, order, now = {id(replica) for replica in replicas}, len(jobs), 0.0

    def start(replica: Replica) -> None:
        nonlocal order
        idle.discard(id(replica))
        seconds = replica.begin_step()
        if seconds:
            heapq.heappush(events, (now + seconds, order, replica))
            order += 1
        else:
            idle.add(id(replica))

    heapq.heapify(events)
    done: list[Job] = []
    while events:
        now, _, what = heapq.heappop(events)
        if isinstance(what, Job):
            replica = route(what, replicas)
            replica.waiting.append(what)
            if id(replica) in idle:
                start(replica)
        else:
            done += what.end_step(now)
            start(what)
    return summary(plan, costs, replicas, done, now)


def summary(
    plan: Plan, costs: Costs, replicas: Sequence[Replica], done: Sequence[Job], seconds: float
) -> dict[str, Any]:
    """What clients saw, and how busy the replicas were."""
    output_tokens = sum(job.output_tokens for job in done)
    overhead = costs.overhead_s
    return {
        "policy": plan.policy,
        "replicas": plan.replicas,
        "rate": plan.rate,
        "completed": len(done),
        "seconds": seconds,
        "requests_per_s": len(done) / seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "busy_share": [replica.busy_s / seconds for replica in replicas],
        "mean_rows": sum(replica.row_s for replica in replicas) / seconds / len(replicas),
        "prefix_hit_share": sum(replica.hits for replica in replicas) / len(done) if plan.prefix_tokens else None,
        "ttft_ms": figures([job.first - job.arrived + overhead for job in done]),
        "tpot_ms": figures([(j.ended - j.first) / (j.output_tokens - 1) for j in done if j.output_tokens > 1]),
        "e2e_ms": figures([job.ended - job.arrived + overhead for job in done]),
    }
