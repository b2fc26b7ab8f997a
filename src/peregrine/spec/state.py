"""What is carried between rounds, in device buffers with one line per seat.

Seats are compact: the rows of a round are always the first R seats, so a round reads and writes plain slices of
these buffers and gathers nothing. A seat that nobody holds is a pad: ended, on the scratch page, one token long.

    history  | prompt tokens ............ | committed tokens ... newest |  later: garbage
    places   0                        prompt_len                   past_len
                                                    KV exists below past_len; the newest token has none yet
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.hardware import upload
from peregrine.kernels.round import Ends, Nodes, Verdict, commit, keep_drafts
from peregrine.kernels.sampling import Context, SamplingTensors
from peregrine.sampling import MAX_BIAS, MAX_STOP_IDS
from peregrine.spec.row_pages import RowPages, even_starts
from peregrine.spec.types import Drafts, DraftShape, Links

PLACES_STEP = 64  # widths of history and page table grow in these steps


@dataclass(frozen=True, slots=True)
class Rows:
    """The batch of one round: its first `count` seats, and a bound on the places any of them may touch."""

    count: int
    places: int


@dataclass(frozen=True, slots=True)
class SeatEntry:
    """Everything the device must know of a request that takes a seat."""

    tokens: list[int]  # prompt and what was generated before; the last one has no KV yet
    prompt_len: int
    limit: int  # most tokens in all, prompt included
    draft_cap: int
    stop_ids: list[int]
    min_len: int  # a stop id may not be chosen for a position below this
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition: float
    presence: float
    frequency: float
    bias: dict[int, float]


@dataclass(frozen=True, slots=True)
class RowState:
    """Views of the first R seats; writing them writes the seats."""

    shape: DraftShape
    history: Tensor  # [R, C] i64
    past_lens: Tensor  # [R] i64
    prompt_lens: Tensor  # [R] i64
    window_tokens: Tensor  # [R, T] i64: the newest token, then the drafts
    offered: Tensor  # [R] i64 how deep its drafts may be accepted
    draft_caps: Tensor  # [R] i64 the most that is ever offered
    limits: Tensor  # [R] i64
    done: Tensor  # [R] bool
    links: Links
    law: SamplingTensors
    pages: RowPages

    def context(self, past_lens: Tensor) -> Context:
        """What penalties count at each node of the window."""
        return Context(self.history, self.prompt_lens, past_lens + 1, self.window_tokens, self.links.ancestors)

    def nodes(self) -> Nodes:
        """The windows as the judge sees them."""
        links = self.links
        return Nodes(self.window_tokens, links.parents, links.depths, links.ancestors, self.offered)

    def commit(self, choices: Tensor) -> Verdict:
        """Judge the windows by the target's choices [R, T] and move every row past what it accepted."""
        ends = Ends(self.past_lens, self.limits, self.law.stop_ids, self.done)
        return commit(choices, self.nodes(), ends, self.history, self.shape.depth)

    def keep(self, drafts: Drafts) -> None:
        """Carry the drafts to the next round."""
        if self.shape.depth == 0:
            return
        links = () if drafts.links is None else zip(drafts.links.fields(), self.links.fields(), strict=True)
        keep_drafts(self.window_tokens, self.offered, self.draft_caps, drafts.tokens, drafts.depths, tuple(links))


class SeatState:
    """The buffers of all seats; mutable, and only through the verbs below and RowState's."""

    def __init__(self, seats: int, shape: DraftShape, max_len: int, page_size: int, device: torch.device) -> None:
        self.shape, self.max_len, self.page_size = shape, max_len, page_size
        places = -(-(max_len + 2 * shape.span + 2) // PLACES_STEP) * PLACES_STEP
        self.max_places = places

        def whole(*size: int, fill: int = 0) -> Tensor:
            return torch.full((seats, *size), fill, dtype=torch.int64, device=device)

        def real(*size: int, fill: float = 0.0) -> Tensor:
            return torch.full((seats, *size), fill, dtype=torch.float32, device=device)

        self.history = whole(places)
        self.past_lens, self.prompt_lens, self.limits = whole(), whole(), whole()
        self.window_tokens = whole(shape.nodes)
        self.offered, self.draft_caps = whole(), whole()
        self.done = torch.ones(seats, dtype=torch.bool, device=device)
        self.page_table = whole(-(-places // page_size))
        self.starts = even_starts(seats, max(shape.nodes, shape.depth + 2, shape.width), device)
        self._chain = Links.chain(shape.nodes, device)
        # A chain's links never change: one row serves all seats. A tree's are chosen anew each round.
        self.links = self._chain if shape.is_chain else Links(*(x.repeat(seats, 1) for x in self._chain.fields()))
        self.law = SamplingTensors(
            temperature=real(),
            top_k=whole(),
            top_p=real(fill=1.0),
            min_p=real(),
            repetition=real(fill=1.0),
            presence=real(),
            frequency=real(),
            seeds=whole(),
            bias_ids=whole(MAX_BIAS, fill=-1),
            bias_values=real(MAX_BIAS),
            stop_ids=whole(MAX_STOP_IDS, fill=-1),
            min_lens=whole(),
        )
        self._views: dict[Rows, RowState] = {}

    def buffers(self) -> list[Tensor]:
        """Every tensor with one line per seat."""
        law = self.law
        seated = [self.history, self.past_lens, self.prompt_lens, self.limits, self.window_tokens, self.offered]
        seated += [self.draft_caps, self.done, self.page_table, law.temperature, law.top_k, law.top_p, law.min_p]
        seated += [law.repetition, law.presence, law.frequency, law.seeds, law.bias_ids, law.bias_values]
        seated += [law.stop_ids, law.min_lens]
        return seated if self.shape.is_chain else seated + list(self.links.fields())

    def rows(self, count: int, places: int) -> Rows:
        """A batch of the first `count` seats that touches no place at or past `places`."""
        return Rows(count, min(self.max_places, -(-places // PLACES_STEP) * PLACES_STEP))

    def view(self, rows: Rows) -> RowState:
        """The batch's slices, made once per batch shape."""
        if rows not in self._views:
            self._views[rows] = self._slice(rows)
        return self._views[rows]

    def _slice(self, rows: Rows) -> RowState:
        count = rows.count
        law = self.law
        return RowState(
            shape=self.shape,
            history=self.history[:count, : rows.places],
            past_lens=self.past_lens[:count],
            prompt_lens=self.prompt_lens[:count],
            window_tokens=self.window_tokens[:count],
            offered=self.offered[:count],
            draft_caps=self.draft_caps[:count],
            limits=self.limits[:count],
            done=self.done[:count],
            links=self.links.rows(count),
            law=SamplingTensors(
                temperature=law.temperature[:count],
                top_k=law.top_k[:count],
                top_p=law.top_p[:count],
                min_p=law.min_p[:count],
                repetition=law.repetition[:count],
                presence=law.presence[:count],
                frequency=law.frequency[:count],
                seeds=law.seeds[:count],
                bias_ids=law.bias_ids[:count],
                bias_values=law.bias_values[:count],
                stop_ids=law.stop_ids[:count],
                min_lens=law.min_lens[:count],
            ),
            pages=RowPages(
                self.page_table[:count, : -(-rows.places // self.page_size)],
                self.page_size,
                self.max_len,
                self.starts[:, : count + 1],
            ),
        )

    def join(self, seat: int, entry: SeatEntry) -> None:
        """Seat a request; its first round has no drafts yet."""
        self.clear(seat)
        count, law = len(entry.tokens), self.law
        self.history[seat, :count].copy_(self._put(entry.tokens))
        self.window_tokens[seat, 0].fill_(entry.tokens[-1])
        numbers = [
            (self.past_lens, count - 1),
            (self.prompt_lens, entry.prompt_len),
            (self.limits, entry.limit),
            (self.draft_caps, entry.draft_cap),
            (self.done, False),
            (law.temperature, entry.temperature),
            (law.top_k, entry.top_k),
            (law.top_p, entry.top_p),
            (law.min_p, entry.min_p),
            (law.repetition, entry.repetition),
            (law.presence, entry.presence),
            (law.frequency, entry.frequency),
            (law.seeds, entry.seed),
            (law.min_lens, entry.min_len),
        ]
        for buffer, number in numbers:
            buffer[seat].fill_(number)
        if entry.stop_ids:
            law.stop_ids[seat, : len(entry.stop_ids)].copy_(self._put(entry.stop_ids))
        if entry.bias:
            law.bias_ids[seat, : len(entry.bias)].copy_(self._put(list(entry.bias)))
            law.bias_values[seat, : len(entry.bias)].copy_(self._put(list(entry.bias.values())))

    def set_pages(self, entries: Sequence[tuple[int, int, list[int]]]) -> None:
        """Write seats' page-table entries, (seat, first column, pages) each, by one copy for all."""
        width = self.page_table.shape[1]
        places = [seat * width + first + i for seat, first, pages in entries for i in range(len(pages))]
        if places:
            pages = [page for entry in entries for page in entry[2]]
            where, what = self._put([*places, *pages]).view(2, -1)
            self.page_table.view(-1).index_copy_(0, where, what)

    def clear(self, seat: int) -> None:
        """Make the seat a pad. Filled in place: an assignment of a number would wait for the device."""
        for buffer in self.buffers():
            buffer[seat].zero_()
        law = self.law
        for buffer, number in ((self.done, 1), (law.top_p, 1), (law.repetition, 1)):
            buffer[seat].fill_(number)
        for buffer in (law.bias_ids, law.stop_ids):
            buffer[seat].fill_(-1)
        if not self.shape.is_chain:
            for links, chain in zip(self.links.fields(), self._chain.fields(), strict=True):
                links[seat].copy_(chain[0])

    def move(self, source: int, target: int) -> None:
        """Give a request another seat and leave a pad behind."""
        for buffer in self.buffers():
            buffer[target].copy_(buffer[source])
        self.clear(source)

    def _put(self, values: list[int] | list[float]) -> Tensor:
        return upload(values, self.history.device)
