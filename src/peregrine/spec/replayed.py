"""Rounds on a CPU as replays of recorded calls: what the target does, how the drafter reads it, and its drafts.

Where all rows have windows of one length, a round makes the same kernel calls on the same memory every time: seats,
pages and sampling parameters stay where they are, and only their contents change. The Python between those calls takes
a third of a small model's round. As with CUDA graphs, what is replayed is what `verify`, `decide` and the drafter did
when they were recorded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peregrine.kernels.copy import copy_into
from peregrine.kernels.round import Gate, Verdict, WindowPlaces
from peregrine.kernels.runtime.cpu_graph import CpuGraphs, Step
from peregrine.kernels.sampling import Features
from peregrine.models.parallel import ALONE
from peregrine.spec.bound import BoundModel
from peregrine.spec.chain import ChainDrafter
from peregrine.spec.judge import Judge
from peregrine.spec.links import Branched
from peregrine.spec.round import Logprobs, Mark, Verified, decide, logprobs_of_path, propose, seen_by, verify
from peregrine.spec.state import Rows, RowState, SeatState
from peregrine.spec.types import Drafter, Seen
from peregrine.spec.windows import Offered, Plan, Ruled, Windows

FEW = 20  # tokens of rounds that are recorded at once: windows of one or two requests, of every length, come again soon
KEPT = 16  # times the tokens of the largest recorded round: what all that are kept may have; each is a list of calls


@dataclass(slots=True)
class EvenLayout:
    """Windows of one length; see `spec.windows.Layout`."""

    windows: Windows
    rests: bool
    rows: Tensor | None = None
    branched: Branched | None = None

    @property
    def paths(self) -> Windows:
        return self.windows


Key = tuple[int, int, bool, Features]  # rows, tokens of each, whether they rest, how tokens are chosen


@dataclass(frozen=True, slots=True)
class EvenRound:
    """What all rounds with the same key have in common."""

    key: Key
    layout: EvenLayout
    state: RowState
    tokens: Tensor  # [R * T] of the windows, where the steps read them
    score: Step  # what the target does, up to the logits
    judge: Step  # and up to the verdict


class ReplayedRounds:
    """Runs rounds of even windows as `run_round` does; sizes that were not seen before are recorded."""

    def __init__(self, target: BoundModel, drafter: Drafter, judge: Judge, seats: SeatState) -> None:
        self.target, self.drafter, self.judge, self.seats = target, drafter, judge, seats
        max_tokens = target.decoder.graphs.max_rows
        # Of the target, and of the drafter, which reads what the target's has left.
        self._graphs, self._drafts = (
            CpuGraphs(max_tokens, KEPT * max_tokens, shares_outputs=True, few=FEW) for _ in range(2)
        )
        self._rounds: dict[Key, EvenRound] = {}
        self._hidden: dict[int, Tensor] = {}  # [R, H] of the newest entries of so many rows, which drafts begin with
        self._gate: Gate | None = None

    @staticmethod
    def of(target: BoundModel, drafter: Drafter, judge: Judge, seats: SeatState) -> "ReplayedRounds | None":
        """None where a round does more than call compiled kernels."""
        decoder = target.decoder
        can_replay = decoder.is_recordable and decoder.ranks is ALONE and seats.shape.is_chain
        return ReplayedRounds(target, drafter, judge, seats) if can_replay else None

    def serves(self, rows: Rows, plan: Plan | Offered | None) -> bool:
        """Whether all windows have one length, and few tokens in all."""
        if plan is None:
            tokens = rows.count * (rows.nodes or self.seats.shape.nodes)
        elif plan.branched is None and plan.windows.is_uniform:
            tokens = plan.windows.window.num_tokens
        else:
            return False
        return tokens <= self._graphs.max_rows

    def run(
        self, rows: Rows, features: Features, mark: Mark, plan: Plan | Offered | None
    ) -> tuple[Verdict, Logprobs | None]:
        """See `run_round`."""
        mark("verify")
        if features.adjusted:  # by torch: not to be replayed
            verified, even = self.verify(rows, plan), self._even(rows, features, plan)
            verdict, logprobs = decide(verified, self.target, self.judge, self.seats, rows, features, mark)
        else:
            even, logprobs = self._even(rows, features, plan), None
            table, *outputs = self._graphs.run(even.key, even.judge, even.tokens)
            verified = verified_from(outputs, plan)
            verdict = Verdict(table.clone())  # kept until it is read, and the next round writes over it
            if features.logprobs is not None:
                logprobs = logprobs_of_path(verified.logits, verdict, even.state, features)
        mark("propose")
        planned = None if isinstance(plan, Offered) else plan
        if not self._replay_drafter(even, planned, (rows.nodes or self.seats.shape.nodes) - 1, verified):
            propose(verified, verdict, self.drafter, self.seats, rows, features, planned)
        return verdict, logprobs

    def verify(self, rows: Rows, plan: Plan | Offered | None) -> Verified:
        """See `spec.round.verify`. What it returns is overwritten by the next round of this size."""
        even = self._even(rows, Features(), plan)
        return verified_from(self._graphs.run((even.key, "scored"), even.score, even.tokens), plan)

    def _even(self, rows: Rows, features: Features, plan: Plan | Offered | None) -> EvenRound:
        features = features if features.logprobs is None else replace(features, logprobs=None)
        key = (rows.count, rows.nodes or self.seats.shape.nodes, False, features)
        if plan is not None:
            key = (rows.count, plan.windows.width, plan.rests, features)
        return self._rounds.get(key) or self._prepare(key)

    def _prepare(self, key: Key) -> EvenRound:
        """Rounds with this key; rows have their whole lines in the seats, whatever their lengths are."""
        count, width, rests, features = key
        rows, layout = Rows(count, self.seats.max_places, width), EvenLayout(Windows.of((width,) * count), rests)
        state = self.seats.view(rows)

        def verified(tokens: Tensor) -> Verified:
            if gathered is not None:
                copy_into(gathered, state.window_tokens)
            return verify(self.target, self.drafter, self.seats, rows, layout, tokens)

        def score(tokens: Tensor) -> tuple[Tensor, ...]:
            return scored(verified(tokens))

        def judge_window(tokens: Tensor) -> tuple[Tensor, ...]:
            read = verified(tokens)
            verdict, _ = decide(read, self.target, self.judge, self.seats, rows, features)
            return verdict.table, *scored(read)

        with torch.inference_mode(False):  # kept beyond the call
            tokens, gathered = state.window_tokens, None
            if not tokens.is_contiguous():
                tokens = gathered = torch.empty(count, width, dtype=torch.int64)
        self._rounds[key] = EvenRound(key, layout, state, tokens.view(-1), score, judge_window)
        return self._rounds[key]

    def _replay_drafter(self, even: EvenRound, plan: Plan | None, usual: int, verified: Verified) -> bool:
        """Replay how the drafter reads the path and drafts: as many as are usual or planned, or up to a rule.

        False, and nothing is done, where neither is so, or the drafter is none that can be replayed.
        """
        drafter, taps = self.drafter, verified.taps
        if even.layout.rests or not drafter.shape.depth:
            return True
        if not isinstance(drafter, ChainDrafter) or taps is None:
            return False
        drafts = usual if plan is None else plan.drafts if plan.rows is None else None
        if drafts is None and (plan is None or plan.ruled is None):
            return False

        rows = even.key[0]

        def path(taps: Tensor, past_lens: Tensor) -> tuple[Tensor, ...]:
            read = drafter.read(self._seen(even, past_lens, taps))
            if rows not in self._hidden:
                self._hidden[rows] = torch.empty_like(read)
            copy_into(self._hidden[rows], read)
            return ()

        self._drafts.run((even.key, "path"), path, taps, verified.places.past_lens)
        hidden = self._hidden[rows]
        if drafts is not None:
            self._draft(even, drafter, drafts, hidden)
        elif plan is not None and plan.ruled is not None:
            self._draft_ruled(even, drafter, plan, plan.ruled, hidden)
        return True

    def _seen(self, even: EvenRound, past_lens: Tensor, taps: Tensor | None, plan: Plan | None = None) -> Seen:
        return seen_by(even.state, past_lens, taps, even.key[3], self.drafter.shape.depth, None, even.layout, plan)

    def _draft(self, even: EvenRound, drafter: ChainDrafter, drafts: int, hidden: Tensor) -> None:
        """So many drafts for every row, whose newest entries have these hidden states [R, H]."""

        def draft(hidden: Tensor) -> tuple[Tensor, ...]:
            rows = Rows(len(hidden), self.seats.max_places, 1 + drafts)
            made = drafter.draft(self._seen(even, even.state.past_lens, None), hidden, drafts)
            self.seats.view(rows).keep(made)
            return ()

        self._drafts.run((even.key[3], drafts), draft, hidden)

    def _draft_ruled(self, even: EvenRound, drafter: ChainDrafter, plan: Plan, ruled: Ruled, hidden: Tensor) -> None:
        """Drafts for a row alone, while its rule lets them through."""
        if self._gate is None:
            self._gate = Gate(ruled.rule, drafter.shape.depth)
        gate = self._gate
        gate.set(ruled.rule)

        def draft(hidden: Tensor) -> tuple[Tensor, ...]:
            whole = self.seats.view(Rows(1, self.seats.max_places))
            seen = self._seen(even, even.state.past_lens, None, plan)
            drafter.draft_ruled(seen, hidden, gate, whole.window_tokens, whole.offered, whole.draft_caps)
            return ()

        self._drafts.run((even.key[3], "ruled"), draft, hidden)
        ruled.take(gate.seen)


def scored(verified: Verified) -> tuple[Tensor, ...]:
    """The tensors of what was verified, as a graph returns them."""
    places, taps = verified.places, () if verified.taps is None else (verified.taps,)
    return verified.logits, places.past_lens, places.positions, places.next_positions, places.slots, *taps


def verified_from(outputs: Sequence[Tensor], plan: Plan | Offered | None) -> Verified:
    """What was verified, from what a graph returned."""
    logits, past_lens, positions, following, slots, *taps = outputs
    return Verified(WindowPlaces(past_lens, positions, following, slots), logits, taps[0] if taps else None, plan, None)
