"""Draft a whole block in one forward: DFlash and DSpark heads."""

import torch
from torch import Tensor

from peregrine.attention import AttentionBackend
from peregrine.attention.backend import Attend, Deferred
from peregrine.cache.store import KVStore
from peregrine.errors import ConfigError
from peregrine.kernels.sampling import pick
from peregrine.models.draft_heads import BlockHead
from peregrine.spec.row_pages import RowPages
from peregrine.spec.types import Chunk, Drafts, DraftShape, Seen


class BlockDrafter:
    """Runs a block head after the newest token.

    The draft store holds the keys and values of tokens that the target has read. A block's own entries lie past them
    and are overwritten. An entry depends on the target's hidden state alone, so cached prefixes need no look-ahead.
    """

    reads_next_token = False

    def __init__(self, head: BlockHead, store: KVStore, backend: AttentionBackend, num_drafts: int) -> None:
        config = head.config
        if num_drafts > config.max_drafts:
            raise ConfigError(
                f"num_drafts={num_drafts}: this head drafts blocks of {config.block_size}, at most "
                f"{config.max_drafts} drafts; ask for no more"
            )
        self.head, self.store, self.backend = head, store, backend
        self.layers = head.layer_attention()
        self.taps = head.taps
        self.num_inputs = num_drafts if config.drafts_from_newest else num_drafts + 1
        self.shape = DraftShape.chain(num_drafts, self.num_inputs)
        device = head.norm.weight.device
        self._depths = torch.arange(num_drafts + 1, device=device)[None]  # [1, W]
        self._masks = torch.full((1, self.num_inputs), config.mask_token, device=device)
        every = (1 << self.num_inputs) - 1
        self._both_ways = torch.full((1, self.num_inputs), every - (every >> 63 << 64), device=device)

    def absorb(self, chunk: Chunk) -> None:
        assert chunk.taps is not None
        attend = self.backend.bind(self.store, self.layers, chunk.metadata)
        self.head.remember(self.head.fuse(chunk.taps), chunk.metadata.positions, attend)

    def propose(self, seen: Seen) -> Drafts:
        assert seen.taps is not None
        num_rows, depth, pages = len(seen.past_lens), self.shape.depth, seen.pages
        path = pages.window(seen.past_lens, self._depths.expand(num_rows, -1))
        attend = self.backend.bind(self.store, self.layers, pages.uniform(path.positions, path.past_lens, path.slots))
        self.head.remember(self.head.fuse(seen.taps.flatten(0, 1)), path.positions.flatten(), attend)

        newest = seen.history.gather(1, seen.new_past_lens[:, None])  # [R, 1]
        block = pages.window(seen.new_past_lens, self._depths[:, : self.num_inputs].expand(num_rows, -1))
        tokens = torch.cat((newest, self._masks[:, 1:].expand(num_rows, -1)), dim=1)
        attend = self._bind_block(pages, block.positions, block.past_lens, block.slots)
        hidden = self.head.forward(tokens.flatten(), block.positions.flatten(), attend)
        hidden = hidden.view(num_rows, self.num_inputs, -1)[:, self.num_inputs - depth :]  # [R, K, H]
        places = block.past_lens[:, None] + 1 + self._depths[:, :depth]  # [R, K] of the drafts
        return Drafts(self._pick(hidden, newest[:, 0], places, seen), depth, None)

    def _bind_block(self, pages: RowPages, positions: Tensor, past_lens: Tensor, slots: Tensor) -> Attend:
        """Attention of a block: both ways, or by position in causal layers."""
        causal = self.head.config.causal
        words = self._both_ways.expand(len(past_lens), -1).contiguous()
        forms = {
            form: self.backend.bind(
                self.store, self.layers, pages.uniform(positions, past_lens, slots, None if form else words)
            )
            for form in set(causal)
        }

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Deferred | None = None) -> Tensor:
            return forms[causal[layer]](layer, q, k, v, rope)

        return attend

    def _pick(self, hidden: Tensor, newest: Tensor, places: Tensor, seen: Seen) -> Tensor:
        """The drafts of every row: hidden [R, K, H], newest [R], places [R, K] -> [R, K]."""
        head = self.head
        num_rows, depth, _ = hidden.shape
        scores = head.logits(hidden.flatten(0, 1)).view(num_rows, depth, -1)  # [R, K, Vd]
        given = head.draft_to_target, seen.sampling, seen.features
        if head.markov is None:
            drafts = torch.empty_like(places)
            pick(scores, places, *given, out=drafts)
            return drafts
        steps = places.new_empty(depth, num_rows, 1)  # a dense piece for each step
        before, state = newest, None
        for step in range(depth):
            added, state = head.markov(before, hidden[:, step], state)
            pick((scores[:, step] + added)[:, None], places[:, step, None].contiguous(), *given, out=steps[step])
            before = steps[step, :, 0]
        return steps[:, :, 0].T
