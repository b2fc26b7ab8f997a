"""Draft one token after another: a chain of K drafts."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from peregrine.kernels.round import AheadPlaces, Gate, pass_gate
from peregrine.kernels.runtime.cpu import is_recording, numba_ready
from peregrine.kernels.runtime.cpu_graph import CpuGraphs
from peregrine.kernels.sampling import pick, ranked, top_chances
from peregrine.spec.readers import DraftReader
from peregrine.spec.types import Chunk, Drafts, DraftShape, Seen
from peregrine.spec.windows import Plan

MAX_GRAPH_TOKENS, KEPT_TOKENS = 64, 2048  # of a recorded call, and of all that are kept


class ChainDrafter:
    """Drives a reader: absorb the path, pick, step over the pick, pick again.

    On a CPU the path, and each step with its pick, are recorded as a whole if they are those of all rows: what they
    read besides their inputs then stays where it is.
    """

    def __init__(self, reader: DraftReader, num_drafts: int) -> None:
        self.reader = reader
        self.taps = reader.taps
        self.reads_next_token = reader.reads_next_token
        self.shape = DraftShape.chain(num_drafts, num_drafts - 1 + reader.first_place)
        self.depths = tuple(range(num_drafts + 1))
        self._graphs = CpuGraphs(MAX_GRAPH_TOKENS, KEPT_TOKENS, copies_inputs=True)

    def absorb(self, chunk: Chunk) -> None:
        self.reader.absorb(chunk)

    def propose(self, seen: Seen) -> Drafts:
        if seen.plan is not None:
            return self._propose_planned(seen, seen.plan)
        return self.draft(seen, self.read(seen), seen.depth)

    def read(self, seen: Seen) -> Tensor:
        layout, pages, taps, rows = seen.layout, seen.pages, seen.taps, len(seen.past_lens)
        whole = layout is None or (layout.paths.is_uniform and layout.rows is None)
        if taps is None or pages.lasting is None or not whole or not numba_ready(taps) or is_recording():
            return self.reader.read(seen)

        def step(taps: Tensor, past_lens: Tensor) -> tuple[Tensor, ...]:
            return (self.reader.read(replace(seen, taps=taps, past_lens=past_lens, pages=pages.whole())),)

        name = "read", rows, seen.width, pages.lasting.data_ptr()
        return self._graphs.run(name, step, taps.flatten(0, -2), seen.past_lens)[0].clone()

    def draft(self, seen: Seen, hidden: Tensor | None, depth: int) -> Drafts:
        assert hidden is not None
        ahead = self._ahead(seen, depth)
        tokens = seen.new_past_lens.new_empty(depth, hidden.shape[0])  # [K, R]
        before = None
        for step in range(depth):
            hidden, _ = self._add_draft(seen, ahead, step, before, hidden, tokens[step])
            before = tokens[step]
        return Drafts(tokens.T, depth, None)

    def draft_ruled(
        self, seen: Seen, hidden: Tensor, gate: Gate, window: Tensor, offered: Tensor, caps: Tensor
    ) -> None:
        """Draft for a row alone into its window [1, T], to be recorded: a replay ends where the gate closes."""
        depth, before = self.shape.depth, None
        ahead = self._ahead(seen, depth)
        for step in range(depth):
            picked = window[:, 1 + step]
            hidden, (chance,) = self._add_draft(seen, ahead, step, before, hidden, picked)
            pass_gate(gate, step, chance, offered, caps)
            before = picked

    def _propose_planned(self, seen: Seen, plan: Plan) -> Drafts:
        """As deep as the plan asks for, step by step, for the rows that it drafts for."""
        tokens = seen.new_past_lens.new_zeros(self.shape.depth, len(seen.past_lens))  # [K, R]
        hidden = self.read(seen)  # [n, H]
        if len(hidden):
            some, rows, before = seen.drafted(), plan.rows, None
            ahead = self._ahead(some, self.shape.depth)
            for step in range(self.shape.depth):
                picked = tokens[step] if rows is None else tokens.new_empty(len(hidden))
                hidden, (chances, *more) = self._add_draft(some, ahead, step, before, hidden, picked)
                plan.add(chances, (more[0], more[1]) if more else None)
                if rows is not None:
                    tokens[step].index_copy_(0, rows, picked)
                before = picked
                if not plan.go_on():
                    break
        return Drafts(tokens.T, plan.depths(), None)

    def _ahead(self, seen: Seen, depth: int) -> AheadPlaces:
        return seen.pages.ahead(seen.new_past_lens, self.reader.first_place, depth, width=1)

    def _add_draft(
        self, seen: Seen, ahead: AheadPlaces, step: int, before: Tensor | None, hidden: Tensor, out: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Draft into `out` [R] after the drafts before; returns the hidden state it was read from, and what is said."""
        inputs = [hidden, ahead.next_positions[step]]
        if before is not None:
            inputs += [before, ahead.positions[step - 1], ahead.slots[step - 1]]
        pages = seen.pages
        if hidden.is_cpu and pages.lasting is not None and numba_ready(hidden) and not is_recording():
            ranks = 0 if seen.plan is None else seen.plan.ranks
            name = before is None, ranks, seen.features.sampled, pages.lasting.data_ptr()
            hidden, picked, *said = self._graphs.run(name, partial(self._step, seen, None), *inputs)
            out.copy_(picked)
        else:
            hidden, _, *said = self._step(seen, out, *inputs)
        if seen.forced is not None:  # what a grammar leaves no choice about is taken as given
            out.copy_(torch.where(seen.forced[:, step] >= 0, seen.forced[:, step], out))
        return hidden, said

    def _step(
        self,
        seen: Seen,
        out: Tensor | None,
        hidden: Tensor,
        places: Tensor,
        before: Tensor | None = None,
        positions: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Read the drafts before, if any, each of which sees all before it, and pick the next ones at places [R, 1].

        (hidden [R, H], picks [R], in `out` if given) and, if the drafts are planned, the chance of each pick [R] and
        the tokens and chances of as many ranks as the plan asks for [R, ranks].
        """
        if before is not None and positions is not None and slots is not None:
            pages = seen.pages.whole() if out is None else seen.pages
            hidden = self.reader.step(before, hidden, pages.uniform(positions, positions[:, 0], slots))
        logits = self.reader.logits(hidden)[:, None]  # [R, 1, Vd]
        picked = places.new_empty(len(hidden)) if out is None else out
        pick(logits, places, self.reader.target_ids, seen.sampling, seen.features, out=picked[:, None])
        if seen.plan is None:
            return hidden, picked
        said = hidden, picked, top_chances(logits[:, 0])
        if seen.plan.ranks == 1:
            return said
        return *said, *ranked(
            logits, places, self.reader.target_ids, seen.sampling, seen.features, min(seen.plan.ranks, logits.shape[2])
        )
