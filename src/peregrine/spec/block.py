"""Draft a whole block in one forward: DFlash and DSpark heads. Trees are grown from the same forward."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from peregrine.attention import AttentionBackend
from peregrine.cache.store import KVStore
from peregrine.config import TreeShape
from peregrine.errors import ConfigError
from peregrine.kernels.residual import add_rows, take_rows
from peregrine.kernels.round import Growth, grow, select
from peregrine.kernels.runtime.cpu import numba_ready
from peregrine.kernels.runtime.cpu_graph import CpuGraphs
from peregrine.kernels.sampling import pick, top_chances
from peregrine.models.draft_heads import BlockHead
from peregrine.spec.bound import BoundBlock
from peregrine.spec.chain import KEPT_TOKENS, MAX_GRAPH_TOKENS
from peregrine.spec.links import Links
from peregrine.spec.types import Chunk, Drafts, DraftShape, Seen


def check_depth(most: int | None, num_drafts: int | None, tree: TreeShape | None) -> None:
    """Refuse more drafts than a head makes in one forward; None: as many as there may be, or as it makes."""
    depth = num_drafts if tree is None else tree.depth
    if most is not None and depth is not None and depth > most:
        asked = f"num_drafts={num_drafts}" if tree is None else f"tree=({tree.depth}, {tree.width}, {tree.nodes})"
        raise ConfigError(f"{asked}: this head drafts a block of {most} at once; ask for no more")


def check_confidence(name: str, says: bool, threshold: float) -> None:
    """Refuse a threshold for the confidence of a drafter that has none."""
    if threshold and not says:
        raise ConfigError(
            f"confidence_threshold={threshold:g}: drafter={name!r} has no confidence head; choose a DSpark head "
            "with one, or leave it out"
        )


class BlockDrafter:
    """Runs a block head after the newest token.

    The draft store holds the keys and values of tokens that the target has read. A block's own entries lie past them
    and are overwritten. An entry depends on the target's hidden state alone, so cached prefixes need no look-ahead.
    """

    reads_next_token = False

    def __init__(
        self,
        head: BlockHead,
        store: KVStore,
        backend: AttentionBackend,
        num_drafts: int,
        tree: TreeShape | None,
        threshold: float | None = None,
    ) -> None:
        config, depth = head.config, num_drafts if tree is None else tree.depth
        check_depth(config.max_drafts, num_drafts, tree)
        self.head, self.store = head, store
        # Drafts are offered while the product of their confidences is no lower; None: confidences are not asked for.
        self.threshold, says = threshold, config.confidence and threshold is not None
        self.bound = BoundBlock(head, head.layer_attention(), store, backend)
        self.taps = head.taps
        self.num_inputs = depth if config.drafts_from_newest else depth + 1
        self.shape, self.depths = DraftShape.chain(depth, self.num_inputs, says), (0, depth)
        if tree is not None:
            self.shape = DraftShape(depth, tree.width, tree.nodes, self.num_inputs)
        device = head.norm.weight.device
        self._depths = torch.arange(depth + 1, device=device)[None]  # [1, W]
        self._masks = torch.full((1, self.num_inputs), config.mask_token, device=device)
        self._constants: dict[tuple[int, int, bool], tuple[Tensor, Tensor]] = {}
        self._graphs = CpuGraphs(MAX_GRAPH_TOKENS, KEPT_TOKENS, copies_inputs=True)

    def absorb(self, chunk: Chunk) -> None:
        assert chunk.taps is not None
        self.bound.remember(self.head.fuse(chunk.taps), chunk.metadata)

    def propose(self, seen: Seen) -> Drafts:
        self.read(seen)
        return self.draft(seen, None, self.shape.depth)

    def draft(self, seen: Seen, hidden: Tensor | None, depth: int) -> Drafts:
        plan, total = seen.plan, len(seen.past_lens)
        if plan is not None and plan.rows is not None and not len(plan.rows):
            return Drafts(seen.past_lens.new_zeros(total, depth), 0, None)
        newest = seen.history.gather(1, seen.new_past_lens[:, None])  # [R, 1]
        if plan is not None and plan.rows is not None:
            newest = newest.index_select(0, plan.rows)
        seen = seen.drafted()
        tokens = torch.cat((newest, self._masks[:, 1:].expand(len(newest), -1)), dim=1).flatten()
        if not self.shape.is_chain:
            return self._grow(self._read_block(seen, depth, tokens, seen.new_past_lens, newest[:, 0]), seen)
        drafts, said = self._chain(seen, depth, tokens, newest[:, 0])
        if plan is None:
            depths = depth if said is None or not self.threshold else (said.cumprod(1) >= self.threshold).sum(1)
            return Drafts(drafts, depths, None, said)
        if plan.rows is not None:
            drafts = drafts.new_zeros(total, depth).index_copy_(0, plan.rows, drafts)
        return Drafts(drafts, plan.depths(), None)

    def _chain(self, seen: Seen, depth: int, tokens: Tensor, newest: Tensor) -> tuple[Tensor, Tensor | None]:
        """Drafts [R, K] and, if the head has confidences, what it says of them [R, K]; one replay on a CPU."""
        pages, plan, inputs = seen.pages, seen.plan, (tokens, seen.new_past_lens, newest)
        if tokens.is_cpu and pages.lasting is not None and numba_ready():
            self._constants_of(len(seen.past_lens), depth, by_row=False)  # not to be recorded
            name = "draft", depth, plan is None, seen.features.sampled, pages.lasting.data_ptr()
            step = partial(self._pick, replace(seen, pages=pages.whole()), depth)
            steps, hidden, *tops = self._graphs.run(name, step, *inputs)
        else:
            steps, hidden, *tops = self._pick(seen, depth, *inputs)
        drafts, said = steps.T, None
        if self.shape.says:
            said = self._said(hidden, newest[:, None], drafts)
            tops = list(said.T)
        if plan is not None:
            for chances in tops:
                plan.add(chances)
        return drafts, said

    def read(self, seen: Seen) -> None:
        """Keys and values of the round's path; on a CPU one replay, if all rows have windows of one length."""
        assert seen.taps is not None
        pages, layout, taps = seen.pages, seen.layout, seen.taps.flatten(0, -2)
        whole = layout is None or layout.paths.is_uniform
        if not whole or pages.lasting is None or not numba_ready(taps):
            self._remember(seen, taps, seen.past_lens)
            return
        name = "read", len(seen.past_lens), seen.width, pages.lasting.data_ptr()
        self._graphs.run(name, partial(self._remember, replace(seen, pages=pages.whole())), taps, seen.past_lens)

    def _remember(self, seen: Seen, taps: Tensor, past_lens: Tensor) -> tuple[()]:
        pages, layout = seen.pages, seen.layout
        path = pages.window(past_lens, self._depths[:, : seen.width].expand(len(past_lens), -1))
        if layout is None or layout.paths.is_uniform:
            metadata = pages.uniform(path.positions, path.past_lens, path.slots)
        else:
            packed = layout.paths.pack(path.positions), path.past_lens, layout.paths.pack(path.slots)
            metadata = layout.paths.metadata(pages, *packed)
        self.bound.remember(self.head.fuse(taps), metadata)
        return ()

    def _read_block(self, seen: Seen, depth: int, tokens: Tensor, new_past_lens: Tensor, newest: Tensor) -> "_Block":
        """One forward over the blocks: tokens [R * inputs]."""
        pages, num_rows, by_row = seen.pages, len(new_past_lens), self._picks_at_once(tokens)
        words, order = self._constants_of(num_rows, depth, by_row)
        block = pages.window(new_past_lens, self._depths[:, : self.num_inputs].expand(num_rows, -1))
        places = block.positions, block.past_lens, block.slots
        causal = set(self.head.config.causal)
        forms = {way: pages.uniform(*places, None if way else words) for way in causal}
        hidden = take_rows(self.bound.read(tokens, forms), order)  # [K * R, H]
        scores, following = self.head.logits(hidden), pages.ahead(new_past_lens, 0, depth, width=1).next_positions
        if by_row:
            hidden, scores = (x.view(num_rows, depth, -1).transpose(0, 1) for x in (hidden, scores))
        else:
            hidden, scores = (x.view(depth, num_rows, -1) for x in (hidden, scores))
        return _Block(hidden, scores, newest, following)

    def _picks_at_once(self, tokens: Tensor) -> bool:
        """Whether all drafts are picked by one call: on a GPU, where none depends on the one before."""
        return self.head.markov is None and self.shape.is_chain and not tokens.is_cpu

    def _constants_of(self, num_rows: int, depth: int, by_row: bool) -> tuple[Tensor, Tensor]:
        """Ancestor words [R, inputs] of tokens that see each other both ways; where drafts lie among them [K * R]."""
        key = num_rows, depth, by_row
        if key not in self._constants:
            count, device = self.num_inputs, self._masks.device
            every, first = (1 << count) - 1, count - self.shape.depth  # is the newest token's prediction a draft?
            with torch.inference_mode(False):  # kept beyond the call
                words = torch.full((num_rows, count), every - (every >> 63 << 64), device=device)
                order = torch.arange(num_rows * count, device=device).view(num_rows, count)[:, first : first + depth]
                self._constants[key] = words, (order if by_row else order.T).flatten()
        return self._constants[key]

    def _pick(
        self, seen: Seen, depth: int, tokens: Tensor, new_past_lens: Tensor, newest: Tensor
    ) -> tuple[Tensor, ...]:
        """(drafts [K, R], hidden [K, R, H]) and, if a plan wants it and no head says more, each step's chances [R]."""
        head, block = self.head, self._read_block(seen, depth, tokens, new_past_lens, newest)
        given, num_rows = (head.draft_to_target, seen.sampling, seen.features), len(new_past_lens)
        if self._picks_at_once(tokens):
            drafts = new_past_lens.new_empty(num_rows, depth)
            pick(block.scores.transpose(0, 1), block.places[:, :, 0].T.contiguous(), *given, out=drafts)
            return drafts.T, block.hidden
        steps, before, state, tops = new_past_lens.new_empty(depth, num_rows), block.newest, None, []
        for step, scores in enumerate(block.scores):
            if head.markov is not None:  # each draft is corrected by the one before
                added, state = head.markov(before, block.hidden[step], state)
                scores = add_rows(added, scores)
            pick(scores[:, None], block.places[step], *given, out=steps[step][:, None])
            if seen.plan is not None and not self.shape.says:
                tops.append(top_chances(scores))
            before = steps[step]
        return steps, block.hidden, *tops

    def _said(self, hidden: Tensor, newest: Tensor, drafts: Tensor) -> Tensor:
        """The confidence head's word on each draft. [R, K]"""
        before = torch.cat((newest, drafts[:, :-1]), dim=1)
        return self.head.confidences(hidden.flatten(0, 1), before.T.flatten()).view(hidden.shape[:2]).T

    def _grow(self, block: "_Block", seen: Seen) -> Drafts:
        """A tree: the block's scores of a level are shared by its nodes, each corrected by its own token."""
        head, shape, (depth, num_rows) = self.head, self.shape, block.scores.shape[:2]
        growth = Growth.begin(num_rows, depth, shape.width, head.draft_to_target, seen.sampling, seen.features)
        frontier, state = None, None
        for level in range(depth):
            count = 1 if frontier is None else shape.width
            scores = block.scores[level][:, None].expand(-1, count, -1)  # [R, 1 or w, Vd]
            if head.markov is not None:
                before = block.newest if frontier is None else frontier.tokens
                if frontier is not None and state is not None:
                    state = state.index_select(0, frontier.origins)
                added, state = head.markov(before, block.hidden[level].repeat_interleave(count, dim=0), state)
                scores = scores + added.view(num_rows, count, -1)
            places = block.places[level].expand(-1, count)
            frontier = grow(growth, scores.contiguous(), places.contiguous(), frontier, level)
        tokens, *links = select(growth, shape.nodes, depth)
        return Drafts(tokens, depth, Links(*links))


@dataclass(frozen=True, slots=True)
class _Block:
    """What one forward says of a block."""

    hidden: Tensor  # [K, R, H]
    scores: Tensor  # [K, R, Vd] before the Markov head
    newest: Tensor  # [R] i64
    places: Tensor  # [K, R, 1] i64 positions of the drafts
