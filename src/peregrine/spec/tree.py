"""Draft a tree: expand the most probable nodes level by level, keep the best T - 1 of all that were seen."""

from peregrine.kernels.round import Frontier, Growth, grow, select
from peregrine.spec.links import Links
from peregrine.spec.readers import DraftReader
from peregrine.spec.types import Chunk, Drafts, DraftShape, Seen


class TreeDrafter:
    """Drives a reader over a tree that is chosen anew each round, on the device."""

    def __init__(self, reader: DraftReader, depth: int, width: int, nodes: int) -> None:
        self.reader = reader
        self.taps = reader.taps
        self.reads_next_token = reader.reads_next_token
        self.shape = DraftShape(depth, width, nodes, (depth - 1) * width + reader.first_place)

    def absorb(self, chunk: Chunk) -> None:
        self.reader.absorb(chunk)

    def propose(self, seen: Seen) -> Drafts:
        rows, reader, shape = seen.new_past_lens.shape[0], self.reader, self.shape
        ahead = seen.pages.ahead(seen.new_past_lens, reader.first_place, shape.depth, shape.width)
        growth = Growth.begin(rows, shape.depth, shape.width, reader.target_ids, seen.sampling, seen.features)
        hidden = reader.read(seen)  # [R, H]
        frontier: Frontier | None = None
        for level in range(shape.depth):
            positions = ahead.next_positions[level]  # [R, w]
            if frontier is None:
                positions = positions[:, :1]
            else:
                # Every node sees its own ancestors alone.
                where = ahead.positions[level - 1], ahead.base_lens, ahead.slots[level - 1]
                metadata = seen.pages.uniform(*where, frontier.words)
                hidden = hidden.index_select(0, frontier.origins)  # [R * w, H]
                hidden = reader.step(frontier.tokens, hidden, metadata)
            logits = reader.logits(hidden).view(*positions.shape, -1)  # [R, 1 or w, Vd]
            frontier = grow(growth, logits, positions, frontier, level)
        tokens, *links = select(growth, shape.nodes, shape.depth)
        return Drafts(tokens, shape.depth, Links(*links))
