"""The first round of a request that runs alone, without reading its newest token: the prompt's last chunk has read it.

A round for one row takes as long as reading all weights. The last chunk reads them anyway, and what it computes for one
token more is what that round would compute, bit for bit. So the first token comes a round earlier. The chunk leaves the
hidden state and the taps of the newest token here; the rest of the round is as ever: judge, commit, propose.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from peregrine.attention.metadata import AttentionMetadata
from peregrine.attention.window import Window
from peregrine.engine.ahead_planner import AheadPlan
from peregrine.engine.ahead_rounds import AheadRounds, DeviceLayout
from peregrine.engine.graphs import Graphs
from peregrine.engine.request import Request
from peregrine.kernels.round import Verdict
from peregrine.kernels.sampling import Features
from peregrine.spec.bound import BoundModel
from peregrine.spec.judge import Judge
from peregrine.spec.round import Logprobs, Verified, decide, planned_rows, propose
from peregrine.spec.state import Rows, SeatState
from peregrine.spec.types import Drafter
from peregrine.spec.windows import WindowBuffer


class FirstRound:
    """Judges the newest token of the request in seat 0 from what a prompt chunk computed for it."""

    def __init__(
        self,
        target: BoundModel,
        drafter: Drafter,
        judge: Judge,
        seats: SeatState,
        graphs: Graphs[Any],
        variants: Sequence[Features],
        ahead: AheadRounds | None,
    ) -> None:
        self.target, self.drafter, self.judge, self.seats = target, drafter, judge, seats
        self.graphs, self.variants, self.ahead = graphs, variants, ahead
        self.request: Request | None = None  # whose newest token the last chunk has read
        self.rows = Rows(1, seats.max_places)
        buffer = WindowBuffer(1, 1, 1, seats.device)
        buffer.write([1])
        self._layout = DeviceLayout(buffer.windows, None)
        self._one = torch.arange(2, device=seats.device)
        self._kept: tuple[Tensor, Tensor | None] | None = None  # [1, H], [1, taps * H]

    def read_newest(self, tokens: Tensor, metadata: AttentionMetadata) -> Tensor | None:
        """Read a chunk, and keep what is computed for the last token of its first row; returns all taps."""
        live = (metadata.q_starts[1:2] - 1).clamp(min=0)
        position = metadata.positions.index_select(0, live)
        last = AttentionMetadata(
            window=Window.uniform(1, 1),
            positions=position,
            q_starts=self._one,
            past_lens=metadata.past_lens[:1],
            page_table=metadata.page_table[:1],
            page_size=metadata.page_size,
            slots=metadata.slots,
            ancestors=None,
        )
        hidden, taps = self.target.read_live(tokens, metadata, last, live, self.drafter.taps)
        of_newest = None if taps is None else taps.index_select(0, live)
        if self._kept is None:
            with torch.inference_mode(False):  # kept beyond the call
                self._kept = torch.empty_like(hidden), None if of_newest is None else torch.empty_like(of_newest)
        for kept, value in zip(self._kept, (hidden, of_newest), strict=True):
            if kept is not None and value is not None:
                kept.copy_(value)
        return taps

    def serves(self, requests: list[Request], features: Features) -> bool:
        """Whether the next round is this one. A grammar's masks and reports of drafts take a whole round."""
        wanted = not features.masked and len(requests) == 1 and not requests[0].params.report_drafts
        ready, self.request = self.request, None
        return wanted and requests[0] is ready

    def verified(self) -> Verified:
        """What the target computed from a window of the newest token alone."""
        assert self._kept is not None
        hidden, taps = self._kept
        state = self.seats.view(planned_rows(self.rows, self._layout))
        places = state.pages.window(state.past_lens, state.links.depths)
        return Verified(places, self.target.decoder.logits(hidden)[:, None], taps, self._layout, None)

    def decide(self, verified: Verified, features: Features) -> tuple[Verdict, Logprobs | None]:
        return decide(verified, self.target, self.judge, self.seats, self.rows, features)

    def whole(self, features: Features) -> tuple[Verdict, Logprobs | None]:
        """The round, where its parts are not recorded apart."""
        verified = self.verified()
        verdict, logprobs = self.decide(verified, features)
        propose(verified, verdict, self.drafter, self.seats, self.rows, features)
        return verdict, logprobs

    def record(self) -> Iterator[int]:
        """Record the round for each variant; yields the bytes of each graph. Chunks must have been recorded before."""
        graphs, ahead = self.graphs, self.ahead
        if ahead is None:
            for variant in self.variants:
                yield graphs.record(("first", variant), partial(self.whole, variant))
            return
        yield graphs.record("first verify", self.verified)
        verified = graphs.replay("first verify")  # what follows reads its results
        for variant in self.variants:
            yield graphs.record(("first", variant), partial(self.decide, verified, variant))
        for drafts in (False, True):
            yield graphs.record(("first read", drafts), partial(ahead.read, verified, 1, drafts))

    def replay(self, features: Features, plan: AheadPlan | None) -> tuple[Verdict, Logprobs | None]:
        """Queue the round; a plan says how deep it drafts."""
        graphs = self.graphs
        if plan is not None:
            graphs.replay("first verify")
        variant = next(v for v in self.variants if v.covers(features))
        decided: tuple[Verdict, Logprobs | None] = graphs.replay(("first", variant))
        if plan is not None:
            graphs.replay(("first read", plan.depth > 0))
            if plan.depth:
                graphs.replay(("draft", 1, plan.depth, features.sampled))
        return decided
