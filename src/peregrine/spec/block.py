"""Draft a whole block in one forward: DFlash and DSpark heads. Trees are grown from the same forward."""

from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.attention import AttentionBackend
from peregrine.attention.metadata import AttentionMetadata
from peregrine.cache.store import KVStore
from peregrine.config import TreeShape
from peregrine.errors import ConfigError
from peregrine.kernels.round import Growth, WindowPlaces, grow, select
from peregrine.kernels.sampling import pick
from peregrine.models.draft_heads import BlockHead
from peregrine.spec.bound import BoundBlock
from peregrine.spec.links import Links
from peregrine.spec.row_pages import RowPages
from peregrine.spec.types import Chunk, Drafts, DraftShape, Seen


def check_depth(most: int | None, num_drafts: int | None, tree: TreeShape | None) -> None:
    """Refuse more drafts than a head makes in one forward; None: as many as there may be, or as it makes."""
    depth = num_drafts if tree is None else tree.depth
    if most is not None and depth is not None and depth > most:
        asked = f"num_drafts={num_drafts}" if tree is None else f"tree=({tree.depth}, {tree.width}, {tree.nodes})"
        raise ConfigError(f"{asked}: this head drafts a block of {most} at once; ask for no more")


class BlockDrafter:
    """Runs a block head after the newest token.

    The draft store holds the keys and values of tokens that the target has read. A block's own entries lie past them
    and are overwritten. An entry depends on the target's hidden state alone, so cached prefixes need no look-ahead.
    """

    reads_next_token = False

    def __init__(
        self, head: BlockHead, store: KVStore, backend: AttentionBackend, num_drafts: int, tree: TreeShape | None
    ) -> None:
        config, depth = head.config, num_drafts if tree is None else tree.depth
        check_depth(config.max_drafts, num_drafts, tree)
        self.head, self.store = head, store
        self.bound = BoundBlock(head, head.layer_attention(), store, backend)
        self.taps = head.taps
        self.num_inputs = depth if config.drafts_from_newest else depth + 1
        self.shape, self.depths = DraftShape.chain(depth, self.num_inputs), (0, depth)
        if tree is not None:
            self.shape = DraftShape(depth, tree.width, tree.nodes, self.num_inputs)
        device = head.norm.weight.device
        self._depths = torch.arange(depth + 1, device=device)[None]  # [1, W]
        self._masks = torch.full((1, self.num_inputs), config.mask_token, device=device)
        every = (1 << self.num_inputs) - 1
        self._both_ways = torch.full((1, self.num_inputs), every - (every >> 63 << 64), device=device)

    def absorb(self, chunk: Chunk) -> None:
        assert chunk.taps is not None
        self.bound.remember(self.head.fuse(chunk.taps), chunk.metadata)

    def propose(self, seen: Seen) -> Drafts:
        self.read(seen)
        return self.draft(seen, None, self.shape.depth)

    def draft(self, seen: Seen, hidden: Tensor | None, depth: int) -> Drafts:
        plan = seen.plan
        if plan is not None and plan.rows is not None and not len(plan.rows):
            return Drafts(seen.past_lens.new_zeros(len(seen.past_lens), depth), 0, None)
        newest, total = seen.history.gather(1, seen.new_past_lens[:, None]), len(seen.past_lens)  # [R, 1]
        if plan is not None and plan.rows is not None:
            newest = newest.index_select(0, plan.rows)
        seen = seen.drafted()
        num_rows, pages = len(seen.past_lens), seen.pages
        block = pages.window(seen.new_past_lens, self._depths[:, : self.num_inputs].expand(num_rows, -1))
        tokens = torch.cat((newest, self._masks[:, 1:].expand(num_rows, -1)), dim=1)
        hidden = self.bound.read(tokens.flatten(), self._forms(pages, block))
        first = self.num_inputs - self.shape.depth  # the newest token's own prediction is a draft, or is not
        hidden = hidden.view(num_rows, self.num_inputs, -1)[:, first : first + depth]  # [R, K, H]
        scores = self.head.logits(hidden.flatten(0, 1)).view(num_rows, depth, -1)  # [R, K, Vd]
        places = block.past_lens[:, None] + 1 + self._depths[:, :depth]  # [R, K] of the drafts
        draft = self._pick if self.shape.is_chain else self._grow
        drafts = draft(_Block(hidden, scores, newest[:, 0], places), seen)
        if plan is None:
            return drafts
        tokens = drafts.tokens
        if plan.rows is not None:
            tokens = tokens.new_zeros(total, depth).index_copy_(0, plan.rows, tokens)
        return Drafts(tokens, plan.depths(), None)

    def read(self, seen: Seen) -> None:
        """Keys and values of the round's path."""
        assert seen.taps is not None
        pages, layout, num_rows = seen.pages, seen.layout, len(seen.past_lens)
        depths = self._depths[:, : seen.width]
        path = pages.window(seen.past_lens, depths.expand(num_rows, -1))
        if layout is None or layout.paths.is_uniform:
            metadata = pages.uniform(path.positions, path.past_lens, path.slots)
        else:
            packed = layout.paths.pack(path.positions), path.past_lens, layout.paths.pack(path.slots)
            metadata = layout.paths.metadata(pages, *packed)
        self.bound.remember(self.head.fuse(seen.taps.flatten(0, -2)), metadata)

    def _forms(self, pages: RowPages, block: WindowPlaces) -> dict[bool, AttentionMetadata]:
        """How a block attends: by position in causal layers, both ways in others."""
        words = self._both_ways.expand(len(block.past_lens), -1).contiguous()
        places = block.positions, block.past_lens, block.slots
        return {causal: pages.uniform(*places, None if causal else words) for causal in set(self.head.config.causal)}

    def _pick(self, block: "_Block", seen: Seen) -> Drafts:
        """One draft after the other, each corrected by the one before."""
        head, (num_rows, depth) = self.head, block.places.shape
        given = head.draft_to_target, seen.sampling, seen.features
        if head.markov is None:
            drafts = torch.empty_like(block.places)
            pick(block.scores, block.places, *given, out=drafts)
            for step in range(depth if seen.plan is not None else 0):
                self._report(seen, block, step, block.scores[:, step], block.newest)
            return Drafts(drafts, depth, None)
        steps = block.places.new_empty(depth, num_rows, 1)  # a dense piece for each step
        before, state = block.newest, None
        for step in range(depth):
            added, state = head.markov(before, block.hidden[:, step], state)
            scores = (block.scores[:, step] + added)[:, None]  # [R, 1, Vd]
            pick(scores, block.places[:, step, None].contiguous(), *given, out=steps[step])
            self._report(seen, block, step, scores[:, 0], before)
            before = steps[step, :, 0]
        return Drafts(steps[:, :, 0].T, depth, None)

    def _report(self, seen: Seen, block: "_Block", step: int, scores: Tensor, before: Tensor) -> None:
        """Tell the plan how sure the head is of a step's drafts: its confidence head's word, or the top probability."""
        if seen.plan is not None and self.head.confidence is not None:
            seen.plan.add(self.head.confidences(block.hidden[:, step], before))
        elif seen.plan is not None:
            seen.plan.add(scores.softmax(dim=1).amax(dim=1))

    def _grow(self, block: "_Block", seen: Seen) -> Drafts:
        """A tree: the block's scores of a level are shared by its nodes, each corrected by its own token."""
        head, shape, (num_rows, depth) = self.head, self.shape, block.places.shape
        growth = Growth.begin(num_rows, depth, shape.width, head.draft_to_target, seen.sampling, seen.features)
        frontier, state = None, None
        for level in range(depth):
            count = 1 if frontier is None else shape.width
            scores = block.scores[:, level, None].expand(-1, count, -1)  # [R, 1 or w, Vd]
            if head.markov is not None:
                before = block.newest if frontier is None else frontier.tokens
                if frontier is not None and state is not None:
                    state = state.index_select(0, frontier.origins)
                added, state = head.markov(before, block.hidden[:, level].repeat_interleave(count, dim=0), state)
                scores = scores + added.view(num_rows, count, -1)
            places = block.places[:, level, None].expand(-1, count)
            frontier = grow(growth, scores.contiguous(), places.contiguous(), frontier, level)
        tokens, *links = select(growth, shape.nodes, depth)
        return Drafts(tokens, depth, Links(*links))


@dataclass(frozen=True, slots=True)
class _Block:
    """What one forward says of a block."""

    hidden: Tensor  # [R, K, H]
    scores: Tensor  # [R, K, Vd] before the Markov head
    newest: Tensor  # [R] i64
    places: Tensor  # [R, K] i64 positions of the drafts
