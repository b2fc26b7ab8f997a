"""The engine: continuous batching of speculative rounds, with prompt chunks read between them."""

import itertools
from collections import deque
from functools import partial

import numpy as np

from peregrine.engine.admission import Limits, admit, features_of, matcher_of, seat_entry
from peregrine.engine.chunk_size import ChunkSize
from peregrine.engine.output import Delta
from peregrine.engine.page_ledger import PageLedger
from peregrine.engine.policy import BatchPolicy, next_admitted
from peregrine.engine.prefill import Replay, next_chunks, read_chunks
from peregrine.engine.request import Request
from peregrine.engine.round_log import RoundLog
from peregrine.engine.round_result import RoundResult, attempt, last_delta, log_round
from peregrine.engine.runner import Runner
from peregrine.errors import RequestError
from peregrine.grammar import GrammarCompiler, Matcher
from peregrine.hardware import current_device
from peregrine.kernels.sampling import Features
from peregrine.sampling import SamplingParams
from peregrine.spec.seat_entry import Words
from peregrine.text.tokenizer import Tokenizer


class Engine:
    """Owns every request from admission to its last delta. One thread steps it; `prepare` may be called from any."""

    def __init__(
        self,
        runner: Runner,
        ledger: PageLedger,
        limits: Limits,
        tokenizer: Tokenizer | None,
        policy: BatchPolicy,
        simulated: bool,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.runner, self.ledger, self.limits, self.tokenizer = runner, ledger, limits, tokenizer
        self.policy, self.simulated, self.grammars = policy, simulated, grammars
        self.chunk_size = ChunkSize(policy.prefill_chunk, policy.max_stall_s, runner.device)
        self.replay_chunks: Replay = lambda *_: False  # by recorded forwards
        self.waiting: deque[Request] = deque()
        self.reading: list[Request] = []  # in prefill, in order of admission
        self.running: list[Request] = []  # index = seat
        self._ids, self._admissions = itertools.count(), itertools.count()
        self._most_accepted, self._span = runner.drafter.shape.depth + 1, runner.drafter.shape.span  # of one round
        self._blocked: tuple[int, int] | None = None  # request that found too few pages, ledger's version then
        self._ended: list[Delta] = []  # last deltas of requests that ended outside a round
        self._results: list[RoundResult] = []  # read while a round was being queued, not taken yet
        self._log = RoundLog(policy.max_rows, self._most_accepted)
        # Places that each seat's pages have beyond what it can reach, at least; below 0: to be counted again.
        self._spare = np.full(policy.max_rows, -1)
        self._features: Features | None = None  # of the running requests; None: to be computed again

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.reading or self.running or self._ended or self.runner.in_flight)

    @property
    def num_requests(self) -> int:
        """Requests that wait, are in prefill, or run."""
        return len(self.waiting) + len(self.reading) + len(self.running)

    def prepare(self, prompt: list[int], params: SamplingParams) -> Request:
        """A checked request, not yet in the queue; RequestError if it cannot be served as asked."""
        if self.tokenizer is not None and self.tokenizer.missing is not None and params.detokenize:
            problem = f"there is no tokenizer: {self.tokenizer.missing}"
            raise RequestError("detokenize", True, problem, "or pass detokenize=False for token ids alone")
        request = admit(next(self._ids), prompt, params, self.limits)
        request.matcher = self.compile(params)
        if self.tokenizer is not None and params.detokenize:
            request.make_text(self.tokenizer)
        return request

    def compile(self, params: SamplingParams) -> Matcher | None:
        """The beginning of the request's grammar, if any; compiled in the caller's thread, and kept for `prepare`."""
        return matcher_of(params, self.limits, None if self.simulated else self.grammars, self.tokenizer)

    def enqueue(self, request: Request) -> None:
        """Put a prepared request at the end of the queue."""
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request now, wherever it is, and free its pages; does nothing if it has finished."""
        if request.seat is not None or request in self.reading or request in self.waiting:
            self._ended.append(self._finish(request, Delta(request.id), "abort"))

    def drop_cached(self) -> int | None:
        """Empty the prefix cache, and the answers that are looked up; how many pages, or None if the engine is busy."""
        if self.num_requests:
            return None
        if self.runner.rounds.looks_up:
            self.runner.rounds.forget()
        return self.ledger.drop_cached()

    def step(self) -> list[Delta]:
        """Admit requests, prefill one chunk, queue the next round, then read the oldest rounds in flight."""
        with current_device(self.runner.device):
            deltas, self._ended = self._ended, []
            self._admit_waiting()
            if prompts_first := self._prefill():
                self.chunk_size.wait()
            deltas += [] if prompts_first else self._make_room()
            launched = not prompts_first and self._launch()
            deltas += self._take_results()
            while len(self.runner.in_flight) > (self.policy.lag if launched else 0):
                deltas += self._collect()
            return deltas

    # Prompts.

    def _admit_waiting(self) -> None:
        """Move requests from the queue into prefill while there are rows and pages for them."""
        while (request := next_admitted(self.waiting, self.reading, len(self.running), self.policy)) is not None:
            if self._blocked == (request.id, self.ledger.version):
                return
            if not self.ledger.admit(request, self._reach(request)):
                self._blocked = request.id, self.ledger.version
                return
            rows = min(self.num_requests, self.policy.max_rows)
            request.settle_missed(skips=self.runner.skips_prompts(rows))
            self.waiting.remove(request)
            request.begin(next(self._admissions))
            self.reading.append(request)

    def _prefill(self) -> bool:
        """Read the next chunk of prompts, and seat the requests whose prompts are read.

        True: more prompts come before the next round, since nobody reads the tokens of running requests as they come.
        """
        self.ledger.settle(self.reading, idle=not self.running)
        unread = {r: count for r in self.reading if (count := r.num_unread) and r.arriving is None}
        watched = bool(unread) and any(request.is_watched for request in self.running)
        if unread:
            chunks = next_chunks(unread, self.chunk_size.tokens(watched))
            with self.chunk_size.timed(sum(chunk.num_tokens for chunk in chunks)):
                alone = not self.running
                read_chunks(self.runner.rounds, chunks, self.ledger.page_size, self.replay_chunks, alone)
        self._seat_read(share=True)
        return not watched and any(request.num_unread for request in unread)

    def seat_unread(self) -> None:
        """Benchmark hook: admit and seat waiting requests without prefill."""
        self._admit_waiting()
        for request in self.reading:
            request.read_len = request.num_tokens - 1
        self._seat_read(share=False)

    def _seat_read(self, share: bool) -> None:
        """Seat requests whose prompts are read, oldest first, while there are seats; their pages may be shared."""
        read = [request for request in self.reading if not request.num_unread]
        taken = {}
        for request in read[: self.policy.max_rows - len(self.running)]:
            if (words := attempt(request, partial(self._packed, request))) is None:
                self._ended.append(self._finish(request, Delta(request.id), "error"))
            else:
                taken[request] = words
        if taken:
            self._take_seats(taken)
        for request in taken if share else ():
            self.ledger.share(request)

    # Seats.

    def _packed(self, request: Request) -> dict[str, Words]:
        return self.runner.seats.buffers.pack(seat_entry(request, self.limits))

    def _take_seats(self, packed: dict[Request, dict[str, Words]]) -> None:
        first, self._features = len(self.running), None
        for seat, request in enumerate(packed, first):
            self.reading.remove(request)
            request.seat, request.round_before, self._spare[seat] = seat, self.runner.launched, -1
            request.log = self._log.join(seat, request.waits)
        self.running += packed
        self.runner.seats.join(first, list(packed.values()), [request.pages for request in packed])

    def _free_seat(self, request: Request) -> None:
        """Free the request's seat; the request in the last seat moves into it, so that seats stay compact."""
        seat, last = request.seat, len(self.running) - 1
        assert seat is not None
        request.settle()
        if seat == last:
            self.runner.seats.clear(seat)
        else:
            self.runner.seats.move(last, seat)
            self.running[seat] = self.running[last]
            self.running[seat].seat = seat
            self._spare[seat] = self._spare[last]
            self._log.move(last, seat)
        self.running.pop()
        self._features = None
        if request.log is not None:
            self._log.leave()
        request.seat = request.log = None

    # Rounds.

    def _reach(self, request: Request) -> int:
        """Places the request may touch in its next round, whatever the rounds in flight accept."""
        newest = request.num_tokens - 1
        if request.seat is not None:
            newest += self.runner.in_flight_for(request) * self._most_accepted
        return min(newest, request.limit - 1) + self._span

    def _make_room(self) -> list[Delta]:
        """Reserve pages for the next round of every running request; if they run out, preempt the youngest."""
        deltas: list[Delta] = []
        reaches: list[int] = []
        short = [(self.running[row], len(self.running[row].pages)) for row in self._short_rows()]
        for request, _ in short:
            reach = self._reach(request)
            while request.seat is not None and not self.ledger.reserve(request, reach):
                if self.runner.in_flight:
                    deltas += self._collect()  # may end a request; and a preempted one must have no round in flight
                else:
                    self._preempt(max(self.running + self.reading, key=lambda r: r.order))
                reach = self._reach(request)
            reaches.append(reach)
        grown = []
        for (request, held), reach in zip(short, reaches, strict=True):
            if request.seat is not None:
                self._spare[request.seat] = len(request.pages) * self.ledger.page_size - reach
                if len(request.pages) > held:
                    grown.append((request.seat, held, request.pages[held:]))
        if grown:
            self.runner.seats.set_pages(grown)
        return deltas

    def _short_rows(self) -> list[int]:
        """Rows whose pages may not hold what they can reach: since they were counted, each round took the most."""
        spare = self._spare[: len(self.running)]
        spare -= self._most_accepted
        return (spare < 0).nonzero()[0].tolist()

    def _preempt(self, request: Request) -> None:
        """Free the request's pages and queue it first; its tokens are read again later and do not change."""
        request.preemptions += 1
        if request.seat is not None:
            request.read_len = request.num_tokens - 1
            self._free_seat(request)
        else:
            self.reading.remove(request)
        self.ledger.release(request)
        self.waiting.appendleft(request)

    def _launch(self) -> bool:
        if not self.running:
            return False
        count = self.policy.padded(len(self.running))
        rows = self.runner.rows(count, lambda: max(map(self._reach, self.running)) + 2)
        self._features = self._features or features_of(self.running)
        self.runner.launch(self.running, rows, self._features, self._catch_up)
        return True

    def _catch_up(self) -> None:
        """Read every round in flight. What it ends keeps its seat until the round being queued no longer needs it."""
        while self.runner.in_flight:
            self._results.append(self.runner.read())

    def _collect(self) -> list[Delta]:
        self._results.append(self.runner.read())
        return self._take_results()

    def _take_results(self) -> list[Delta]:
        """Take what was read. Results of requests that already finished are dropped."""
        results, self._results = self._results, []
        return [delta for result in results for delta in self._take(result)]

    def _take(self, result: RoundResult) -> list[Delta]:
        """Log what a round did for all rows; look at those that end, and those whose users wait for its tokens."""
        if self.running[: len(result.table)] == result.requests:  # else `_spare` stays a lower bound
            self._spare[: len(result.table)] += self._most_accepted - result.table[:, 0]
        else:
            result = result.by_seat(self.running)
        told, worded, whole = log_round(self._log, result.table, self.running)
        deltas = result.deltas(told, worded)
        for row, line in zip(whole, result.lines(whole), strict=True) if whole else ():
            if taken := result.take(row, line):
                delta, reason, stop = taken
                deltas[row] = delta if reason is None else self._finish(result.requests[row], delta, reason, stop)
        made = ((result.requests[row], deltas[row]) for row in sorted(deltas))
        return [delta or self._finish(request, Delta(request.id), "error") for request, delta in made]

    def _finish(self, request: Request, last: Delta, reason: str, stop: str | int | None = None) -> Delta:
        """Free the request's seat and pages; returns its last delta, which carries the output."""
        last = last_delta(request, last, reason, stop, self.simulated)
        reason = last.finish_reason or reason
        if request.seat is not None:
            # After a fault, none of its KV is known to be sound: nothing may be shared.
            request.read_len = 0 if reason == "error" else request.num_tokens - 1
            self._free_seat(request)
        else:
            (self.reading if request in self.reading else self.waiting).remove(request)
        self.ledger.release(request)
        if self.runner.rounds.looks_up and request.params.store and reason in ("stop", "length"):
            self.runner.rounds.learn(request.generated)
        return last
