"""Where the tokens of a batch of rows live: one page table for every store of a round."""

from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.attention.metadata import AttentionMetadata
from peregrine.attention.window import Window


@dataclass(frozen=True, slots=True)
class RowPages:
    """The page-table rows of a batch; entries past a row's pages are the scratch page."""

    table: Tensor  # [R, P] i64
    page_size: int

    def slots(self, places: Tensor) -> Tensor:
        """The slot of each place of each row: [R, n] -> [R * n]."""
        pages = self.table.gather(1, places.div(self.page_size, rounding_mode="floor"))
        return (pages * self.page_size + places % self.page_size).flatten()

    def uniform(
        self, positions: Tensor, past_lens: Tensor, slots: Tensor, ancestors: Tensor | None = None
    ) -> AttentionMetadata:
        """Metadata for the same number of queries on every row: positions [R, q]."""
        rows, q_len = positions.shape
        return AttentionMetadata(
            window=Window.uniform(rows, q_len),
            positions=positions.flatten(),
            q_starts=torch.arange(0, rows * q_len + 1, q_len, device=positions.device),
            past_lens=past_lens,
            page_table=self.table,
            page_size=self.page_size,
            slots=slots,
            ancestors=ancestors,
        )
