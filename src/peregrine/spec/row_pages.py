"""Where the tokens of a batch of rows live: one page table for every store of a round."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peregrine.attention.metadata import AttentionMetadata
from peregrine.attention.window import Window
from peregrine.kernels.round import AheadPlaces, PathPlaces, WindowPlaces, ahead_places, path_places, window_places


def even_starts(num_rows: int, max_q_len: int, device: torch.device | str) -> Tensor:
    """Where rows of equal windows begin, for every length: [max_q_len, R + 1], line q - 1 counts up by q."""
    lengths = torch.arange(1, max_q_len + 1, device=device)
    aligned = num_rows + 2 - num_rows % 2  # lines begin at multiples of 16 bytes: kernels are compiled for that
    return (lengths[:, None] * torch.arange(aligned, device=device))[:, : num_rows + 1]


@dataclass(frozen=True, slots=True)
class RowPages:
    """The page-table rows of a batch; entries past a row's pages are the scratch page."""

    table: Tensor  # [R, P] i64
    page_size: int
    max_len: int  # positions stop below this
    starts: Tensor  # [max_q_len, R + 1] i64, from `even_starts`
    lasting: Tensor | None = (
        None  # the table in all its width, at one address in every round; None: of these rows alone
    )

    def whole(self) -> "RowPages":
        """The same rows with the table in all its width."""
        return self if self.lasting is None else replace(self, table=self.lasting)

    def only(self, rows: Tensor) -> "RowPages":
        """Some of the rows [n]."""
        return RowPages(self.table.index_select(0, rows), self.page_size, self.max_len, self.starts[:, : len(rows) + 1])

    def window(self, past_lens: Tensor, depths: Tensor) -> WindowPlaces:
        """Where the target reads nodes of these depths [R, T]."""
        return window_places(past_lens, depths, self.table, self.page_size, self.max_len)

    def path(self, past_lens: Tensor, new_past_lens: Tensor, history: Tensor, width: int, behind: int) -> PathPlaces:
        """Where a drafter reads `width` entries whose tokens stand `behind` places after them."""
        where = self.table, self.page_size, width, behind, self.max_len
        return path_places(past_lens, new_past_lens, history, *where)

    def ahead(self, new_past_lens: Tensor, first_place: int, depth: int, width: int) -> AheadPlaces:
        """Where a drafter reads its own drafts, `width` a step, from `first_place` past the newest cached token."""
        where = self.table, self.page_size, first_place, depth, width, self.max_len
        return ahead_places(new_past_lens, *where)

    def uniform(
        self, positions: Tensor, past_lens: Tensor, slots: Tensor, ancestors: Tensor | None = None
    ) -> AttentionMetadata:
        """Metadata for the same number of queries on every row: positions [R, q]."""
        rows, q_len = positions.shape
        return AttentionMetadata(
            window=Window.uniform(rows, q_len),
            positions=positions.flatten(),
            q_starts=self.starts[q_len - 1],
            past_lens=past_lens,
            page_table=self.table,
            page_size=self.page_size,
            slots=slots,
            ancestors=ancestors,
        )
