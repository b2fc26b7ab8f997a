"""Rounds whose parts are separate CUDA graphs, so that every round may have other windows and another draft depth.

    part      one graph for each             what it does
    verify    (R, N)                         the target reads N tokens; a `WindowBuffer` says which rows they belong to
    decide    (R, N, sampling features)      judge and commit
    read      (R, N, drafts next or not)     the drafter reads what was verified
    draft     (R, depth, sampled or greedy)  the drafter drafts for the next round

All graphs share one pool of memory: nothing of a round is needed once its verdict has been copied.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peregrine.engine.ahead_planner import AheadCosts, AheadPlan
from peregrine.engine.graphs import Graphs
from peregrine.kernels.round import Verdict, allot_windows
from peregrine.kernels.sampling import Features
from peregrine.spec.ahead import RowCosts, token_sizes, window_width
from peregrine.spec.bound import BoundModel
from peregrine.spec.judge import Judge
from peregrine.spec.links import Branched
from peregrine.spec.odds import EDGES, Floats
from peregrine.spec.round import Logprobs, Verified, decide, seen_by, verify
from peregrine.spec.state import Rows, SeatState
from peregrine.spec.types import PartedDrafter
from peregrine.spec.windows import WindowBuffer, Windows

CONTEXT = 2048  # cached tokens of each row while parts are timed
REPEATS = 2  # of timed parts; the fastest counts


@dataclass(slots=True)
class DeviceLayout:
    """Windows whose lengths are on the device, and the rows to draft for: all (None) or none (an empty tensor)."""

    windows: Windows
    rows: Tensor | None
    branched: Branched | None = None
    rests: bool = False  # who is not drafted for is read by the drafter all the same

    @property
    def paths(self) -> Windows:
        return self.windows


class AheadRounds:
    """Runs planned rounds, as graphs where these are recorded."""

    def __init__(
        self, target: BoundModel, drafter: PartedDrafter, judge: Judge, seats: SeatState, variants: Sequence[Features]
    ) -> None:
        self.target, self.drafter, self.judge, self.seats, self.variants = target, drafter, judge, seats, variants
        self._nobody = torch.zeros(0, dtype=torch.int64, device=seats.device)
        self._buffers: dict[tuple[int, int], WindowBuffer] = {}
        self._hidden: Tensor | None = None  # [R, H] of each row's last token: `read` writes it, `draft` begins with it
        # Where the drafter says how likely its drafts are, the device chooses the windows, by odds from the host.
        self._edges = torch.tensor(EDGES, dtype=torch.float32, device=seats.device)
        self._odds = torch.zeros(seats.count, seats.shape.depth, len(EDGES) + 1, device=seats.device)
        self._written: object = None  # the odds, or windows, that were written last

    def run(self, plan: AheadPlan, features: Features, graphs: Graphs[Any] | None) -> tuple[Verdict, Logprobs | None]:
        """Queue a round; `graphs` is None where nothing is recorded."""
        rows, tokens = plan.rows, plan.tokens
        self._write(rows, tokens, plan.lens, plan.odds)
        if graphs is None:
            verified = self.verify(rows, tokens)
            result = self.decide(verified, rows, features)
            self.read(verified, rows, plan.depth > 0)
            if plan.depth:
                self.draft(rows, plan.depth, features.sampled)
            return result
        variant = next(v for v in self.variants if v.covers(features))
        graphs.replay(("verify", rows, tokens))
        decided: tuple[Verdict, Logprobs | None] = graphs.replay(("decide", rows, tokens, variant))
        graphs.replay(("read", rows, tokens, plan.depth > 0))
        if plan.depth:
            graphs.replay(("draft", rows, plan.depth, features.sampled))
        return decided

    def clip(self, plan: AheadPlan) -> None:
        """Withdraw drafts that the plan does not verify. The round does this too; call it if they are needed sooner."""
        self._write(plan.rows, plan.tokens, plan.lens, plan.odds)
        self._clip(self.buffer(plan.rows, plan.tokens))

    def _write(self, rows: int, tokens: int, lens: Sequence[int], odds: Floats | None = None) -> None:
        """Set the windows of the rounds queued from now on: their lengths, or the odds by which the device chooses."""
        if not self.seats.shape.says:
            self.buffer(rows, tokens).write(lens)
            return
        given = lens if odds is None else odds
        if self._written is given:
            return
        if odds is None:  # the device takes these windows, if all their drafts are certain and no others are possible
            taken = np.arange(self._odds.shape[1]) < np.array(lens)[:, None] - 1
            odds = np.repeat(taken[:, :, None], self._odds.shape[2], axis=2)
        values = torch.from_numpy(odds.astype(np.float32))
        self._odds[:rows].copy_(values.pin_memory() if self._odds.is_cuda else values, non_blocking=True)
        self._written = given

    def _clip(self, buffer: WindowBuffer) -> None:
        """Choose the windows, where the device does; offer no draft that is in none."""
        state = self.seats.view(self._rows(buffer.rows, buffer.width))
        if state.said is not None:
            allot_windows(state.said, self._odds[: buffer.rows], self._edges, *buffer.tensors)
        torch.minimum(state.offered, buffer.windows.deepest, out=state.offered)

    def buffer(self, rows: int, tokens: int) -> WindowBuffer:
        """The buffer of windows of this size."""
        if (rows, tokens) not in self._buffers:
            width = window_width(rows, tokens, self.seats.shape.depth)
            self._buffers[rows, tokens] = WindowBuffer(rows, tokens, width, self.seats.device)
        return self._buffers[rows, tokens]

    def _rows(self, rows: int, nodes: int | None = None) -> Rows:
        return Rows(rows, self.seats.max_places, nodes)

    def verify(self, rows: int, tokens: int) -> Verified:
        buffer = self.buffer(rows, tokens)
        self._clip(buffer)
        return verify(self.target, self.drafter, self.seats, self._rows(rows), DeviceLayout(buffer.windows, None))

    def decide(self, verified: Verified, rows: int, features: Features) -> tuple[Verdict, Logprobs | None]:
        return decide(verified, self.target, self.judge, self.seats, self._rows(rows), features)

    def read(self, verified: Verified, rows: int, drafts: bool) -> None:
        """The drafter reads the accepted path; if it does not draft next, only to store keys and values."""
        assert verified.layout is not None
        windows = verified.layout.windows
        state, taps = self.seats.view(self._rows(rows, windows.width)), verified.taps
        layout = DeviceLayout(windows, None if drafts else self._nobody)
        hidden = self.drafter.read(seen_by(state, verified.places.past_lens, taps, Features(), 0, layout=layout))
        if not drafts:
            state.offered.zero_()
        elif hidden is not None:
            if self._hidden is None:
                with torch.inference_mode(False):  # kept beyond the call
                    self._hidden = torch.zeros(
                        self.seats.count, hidden.shape[1], dtype=hidden.dtype, device=hidden.device
                    )
            self._hidden[:rows].copy_(hidden)

    def draft(self, rows: int, depth: int, sampled: bool) -> None:
        """Draft for the next round."""
        state = self.seats.view(self._rows(rows, depth + 1))
        hidden = None if self._hidden is None else self._hidden[:rows]
        seen = seen_by(state, state.past_lens, None, Features(sampled=sampled), depth)
        state.keep(self.drafter.draft(seen, hidden, depth))

    def sizes(self, rows: int) -> tuple[int, ...]:
        return token_sizes(rows, self.seats.shape.depth)

    def record(self, row_sizes: Sequence[int], graphs: Graphs[Any]) -> Iterator[int]:
        """Record all parts; yields the bytes each graph took. All seats must be free: every part runs once."""
        for rows in sorted(row_sizes, reverse=True):  # smaller graphs reuse the memory of larger ones
            for tokens in sorted(self.sizes(rows), reverse=True):
                yield from self._record_size(rows, tokens, graphs)
            for depth in self.drafter.depths[1:]:
                for sampled in (False, True):
                    yield graphs.record(("draft", rows, depth, sampled), partial(self.draft, rows, depth, sampled))

    def _record_size(self, rows: int, tokens: int, graphs: Graphs[Any]) -> Iterator[int]:
        """Record verify, decide and read of one size; the tensors between them live until all three are recorded."""
        passed: list[Verified] = []

        def verify() -> None:
            passed[:] = [self.verify(rows, tokens)]

        self._write(rows, tokens, even(rows, tokens))
        yield graphs.record(("verify", rows, tokens), verify)
        graphs.replay(("verify", rows, tokens))  # what follows reads its results
        for variant in self.variants:
            yield graphs.record(("decide", rows, tokens, variant), partial(self.decide, passed[0], rows, variant))
        for drafts in (False, True):
            yield graphs.record(("read", rows, tokens, drafts), partial(self.read, passed[0], rows, drafts))

    def measure(self, row_sizes: Sequence[int], graphs: Graphs[Any] | None) -> AheadCosts:
        """Time all parts on rows that pretend to have cached tokens. All seats must be free; they are afterwards."""
        found = {rows: self._measure_rows(rows, graphs) for rows in sorted(row_sizes, reverse=True)}
        return AheadCosts(dict(sorted(found.items())))

    def _measure_rows(self, rows: int, graphs: Graphs[Any] | None) -> RowCosts:
        sizes, depths, device = self.sizes(rows), self.drafter.depths, self.seats.device
        context = min(CONTEXT, self.seats.max_len // 2)
        clock = partial(milliseconds, device)
        plain = Features()

        def verify_ms(tokens: int) -> tuple[float, float, float]:
            """Milliseconds of one size: (verify and decide, read without drafting, read before drafting)."""
            self._write(rows, tokens, even(rows, tokens))
            if graphs is not None:
                keys = ("verify", rows, tokens), ("decide", rows, tokens, plain)
                judged = clock(lambda: [graphs.replay(key) for key in keys])
                reads = [partial(graphs.replay, ("read", rows, tokens, drafts)) for drafts in (False, True)]
                return judged, clock(reads[0]), clock(reads[1])
            verified = self.verify(rows, tokens)
            judged = clock(lambda: self.decide(self.verify(rows, tokens), rows, plain))
            absorb, read = (clock(partial(self.read, verified, rows, drafts)) for drafts in (False, True))
            return judged, absorb, read

        def draft_ms(depth: int) -> float:
            call = partial(self.draft, rows, depth, False)
            return clock(call if graphs is None else partial(graphs.replay, ("draft", rows, depth, False)))

        short = verify_ms(rows)[0]
        self.seats.pretend(rows, context, self.target.store.num_pages)
        timed = [verify_ms(tokens) for tokens in sizes]
        drafts = [0.0, *(draft_ms(depth) for depth in depths[1:])]
        for seat in range(rows):
            self.seats.clear(seat)
        key_ms = max(0.0, timed[0][0] - short) / (rows * context)
        judged, absorb, read = zip(*timed, strict=True)
        return RowCosts(
            sizes=sizes,
            verify=tuple(ms - key_ms * rows * context for ms in rising(judged)),
            absorb=rising(absorb),
            read=rising(read),
            depths=depths,
            draft=rising(drafts),
            key_ms=key_ms,
        )


def even(rows: int, tokens: int) -> list[int]:
    """Lengths of windows that differ by one token at most."""
    return [tokens // rows + (row < tokens % rows) for row in range(rows)]


def rising(times: Sequence[float]) -> tuple[float, ...]:
    """Times by size, none above that of a larger size: disturbances only add time."""
    return tuple(min(times[place:]) for place in range(len(times)))


def milliseconds(device: torch.device, call: Callable[[], object]) -> float:
    """Time of the fastest of REPEATS calls: on the device, or on a CPU the processor time of this thread."""
    times = []
    for _ in range(1 + REPEATS):
        if device.type != "cuda":
            began = time.thread_time()
            call()
            times.append(1e3 * (time.thread_time() - began))
            continue
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return min(times[1:])
