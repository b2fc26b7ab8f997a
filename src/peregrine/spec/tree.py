"""Guess a tree: expand the most probable nodes level by level, keep the best T - 1 of all that were seen.

level 1    w children of the newest token
level l    each of the w best nodes of level l - 1 is read, and brings w children of its own
window     the root and the T - 1 candidates of highest joint probability; a child is never more probable than
           its parent, so every kept node's ancestors are kept too
"""

import torch
from torch import Tensor

from peregrine.kernels.choose import pick_scores
from peregrine.spec.readers import DraftReader
from peregrine.spec.row_pages import RowPages
from peregrine.spec.types import Chunk, Drafts, DraftShape, Links, Seen

# Joint log-probabilities are made to fall strictly with depth, so that a certain child never ties its parent.
STEP_COST = 1e-3


class TreeDrafter:
    """Drives a reader over a tree that is chosen anew each round, on the device."""

    def __init__(self, reader: DraftReader, depth: int, width: int, nodes: int) -> None:
        self.reader, self.width = reader, width
        self.taps = reader.taps
        self.reads_next_token = reader.reads_next_token
        self.shape = DraftShape(depth, width, nodes, (depth - 1) * width + reader.first_place)

    def absorb(self, chunk: Chunk) -> None:
        self.reader.absorb(chunk)

    def propose(self, seen: Seen) -> Drafts:
        width, rows = self.width, seen.live.shape[0]
        base = seen.new_past_lens + self.reader.first_place  # [R] where look-ahead entries begin
        hidden = self.reader.read(seen)[:, None]  # [R, 1, H]
        zero = torch.zeros(rows, 1, device=hidden.device)
        scores, tokens = self._children(seen, hidden, zero, level=0)  # [R, 1, w]
        parents = torch.zeros(rows, width, dtype=torch.int64, device=hidden.device)  # candidate 0 is the root
        levels = [(scores.flatten(1), tokens.flatten(1), parents)]
        frontier = torch.arange(width, device=hidden.device).expand(
            rows, width
        )  # [R, w] within the last level
        frontier_hidden = hidden.expand(-1, width, -1)
        words = torch.zeros(
            rows, width, dtype=torch.int64, device=hidden.device
        )  # expanded ancestors of the frontier
        offset = 1  # candidate index of the last level's first node
        for level in range(1, self.shape.depth):
            scores, tokens, _ = levels[-1]
            best, picked = scores.gather(1, frontier), tokens.gather(1, frontier)
            bits = torch.arange((level - 1) * width, level * width, device=hidden.device)
            words = words | (torch.ones_like(bits) << bits)
            read = self._read(
                seen.pages, picked, frontier_hidden, base, words, level, seen.max_len
            )  # [R, w, H]
            scores, tokens = self._children(seen, read, best, level)  # [R, w, w]
            parents = (offset + frontier)[:, :, None].expand(-1, -1, width).flatten(1)
            levels.append((scores.flatten(1), tokens.flatten(1), parents))
            offset += levels[-2][0].shape[1]
            frontier = scores.flatten(1).topk(width, dim=1).indices  # [R, w] of this level's w * w
            origin = frontier.div(width, rounding_mode="floor")
            frontier_hidden = read.gather(1, origin[:, :, None].expand_as(read))
            words = words.gather(1, origin)
        return self._select(*(torch.cat(part, dim=1) for part in zip(*levels, strict=True)))

    def _read(
        self,
        pages: RowPages,
        tokens: Tensor,
        hidden: Tensor,
        base: Tensor,
        words: Tensor,
        level: int,
        max_len: int,
    ) -> Tensor:
        """Read one level's frontier, each node seeing its own ancestors. [R, w] -> [R, w, H]"""
        first = (level - 1) * self.width
        order = torch.arange(first, first + self.width, device=tokens.device)
        slots = pages.slots(base[:, None] + order)
        positions = (base + level - 1).clamp(max=max_len - 1)[:, None].expand_as(tokens)
        metadata = pages.uniform(positions, base, slots, words)
        return self.reader.step(tokens.flatten(), hidden.flatten(0, 1), metadata).view(*tokens.shape, -1)

    def _children(self, seen: Seen, hidden: Tensor, joint: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """The w likeliest children of each node: joint scores and target ids. [R, n, H], [R, n] -> [R, n, w] each"""
        logits = self.reader.logits(hidden.flatten(0, 1)).view(*joint.shape, -1)  # [R, n, Vd]
        positions = (seen.new_past_lens + 1 + level)[:, None].expand_as(joint)
        scores = pick_scores(logits, positions, self.reader.target_ids, seen.law, seen.features)
        best, ids = scores.log_softmax(dim=-1).topk(self.width, dim=-1)
        ids = ids if self.reader.target_ids is None else self.reader.target_ids[ids]
        return joint[:, :, None] + best - STEP_COST, ids

    def _select(self, scores: Tensor, tokens: Tensor, parents: Tensor) -> Drafts:
        """The window of the best T - 1 candidates. [R, C] each; candidate i has index i + 1, the root 0."""
        rows, count = scores.shape
        nodes = torch.arange(self.shape.nodes, device=scores.device)
        kept = scores.topk(nodes.numel() - 1, dim=1).indices.sort(dim=1).values  # parents before children
        place = torch.zeros(rows, count + 1, dtype=torch.int64, device=scores.device)  # candidate -> node
        place.scatter_(1, kept + 1, nodes[1:].expand(rows, -1))
        links_to = torch.zeros(rows, nodes.numel(), dtype=torch.int64, device=scores.device)
        links_to[:, 1:] = place.gather(1, parents.gather(1, kept))
        depths = torch.zeros_like(links_to)
        # The first w candidates are level 1, then w * w a level.
        depths[:, 1:] = (kept - self.width).div(self.width**2, rounding_mode="floor") + 2
        own = torch.ones_like(nodes) << nodes
        words = own.expand_as(links_to)
        for _ in range(self.shape.depth):
            words = own | words.gather(1, links_to)
        links = Links(links_to, depths, words)
        return Drafts(tokens.gather(1, kept), torch.full_like(depths[:, 0], self.shape.depth), links)
