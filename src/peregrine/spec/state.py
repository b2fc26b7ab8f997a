"""What is carried between rounds, in device buffers with one line per seat.

Seats are compact: the rows of a round are always the first R seats, so a round reads and writes plain slices of
these buffers and gathers nothing. An unused seat is a pad: ended, on the scratch page, one token long.

    history  | prompt tokens ............ | committed tokens ... newest |  later: garbage
    places   0                        prompt_len                   past_len
                                                    KV exists below past_len; the newest token has none yet

Of several ranks each has the same seats: what rank 0 writes between rounds, the others write before their next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from peregrine.hardware import upload
from peregrine.kernels.round import Ends, Nodes, Verdict, commit, keep_drafts
from peregrine.kernels.sampling import Context, Masks, SamplingTensors
from peregrine.models.parallel import ALONE, Ranks, on_every_rank
from peregrine.sampling import MAX_BIAS, MAX_STOP_IDS
from peregrine.spec.links import Branched, Links
from peregrine.spec.row_pages import RowPages, even_starts
from peregrine.spec.seat_buffers import TYPES, SeatBuffers
from peregrine.spec.seat_entry import Words
from peregrine.spec.types import Drafts, DraftShape

PLACES_STEP = 64  # widths of history and page table grow in these steps
MAX_VIEWS = 256  # batch shapes whose slices are kept
LINKS = ("parents", "depths", "ancestors")
SAMPLING_LINES = [field.name for field in fields(SamplingTensors) if field.name != "masks"]
repeated = on_every_rank("seats", at_once=False)


@dataclass(frozen=True, slots=True)
class Rows:
    """The batch of one round: its first `count` seats, and a bound on the places any of them may touch."""

    count: int
    places: int
    nodes: int | None = None  # how many nodes of a chain's window are used; None: all


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
    said: Tensor | None  # [R, K] f32 how likely the drafter said each draft is; None: it says nothing
    limits: Tensor  # [R] i64
    done: Tensor  # [R] bool
    links: Links
    chain: Links  # the links of a chain of as many nodes, one row
    sampling: SamplingTensors
    pages: RowPages
    forced: Tensor | None  # [R, T, K + 1] i64: tokens that a grammar leaves no choice about after each node, then -1

    def context(self, past_lens: Tensor) -> Context:
        """What penalties count at each node of the window."""
        return Context(self.history, self.prompt_lens, past_lens + 1, self.window_tokens, self.links.ancestors)

    def nodes(self) -> Nodes:
        """The windows with their links, to be judged."""
        links = self.links
        return Nodes(self.window_tokens, links.parents, links.depths, links.ancestors, self.offered)

    def branch(self, branched: Branched) -> "RowState":
        """The same rows with windows that branch, which are not kept in the seats."""
        nodes = branched.tokens.shape[1]
        shape = DraftShape(branched.depth, nodes, nodes, self.shape.lookahead)
        return replace(self, shape=shape, window_tokens=branched.tokens, links=branched.links)

    def clip_to_masks(self) -> None:
        """Offer no draft that is deeper than its row's masks."""
        if self.sampling.masks is not None:
            deep = self.sampling.masks.rows
            torch.minimum(self.offered, torch.where(deep > 0, deep - 1, self.offered), out=self.offered)

    def commit(self, choices: Tensor) -> Verdict:
        """Judge the windows by the target's choices [R, T] and append what each row accepted."""
        ends = Ends(self.past_lens, self.limits, self.sampling.stop_ids, self.done)
        return commit(choices, self.nodes(), ends, self.history, self.shape.depth)

    def forced_drafts(self, verdict: Verdict) -> Tensor | None:
        """What a grammar forces after each row's newest token: [R, K], -1 where it leaves a choice."""
        if self.forced is None or self.forced.shape[2] == 1:  # no drafts at all
            return None
        last = (verdict.accept_lens - 1).clamp(min=0)[:, None]  # the path's end, where the newest token was chosen
        node = verdict.path.gather(1, last)[:, :, None].expand(-1, -1, self.forced.shape[2])
        run = self.forced.gather(1, node)[:, 0]  # [R, K + 1], the newest token first
        return torch.where(run[:, :1] == self.window_tokens[:, :1], run[:, 1:], -1)

    def offer_forced(self, forced: Tensor) -> None:
        """Put forced tokens [R, K] in place of drafts; a tree gives way to them only if they fill its depth."""
        known, depth = forced >= 0, self.shape.depth
        if not self.shape.is_chain:
            known = known & known.all(dim=1, keepdim=True)
            for links, line in zip(self.links.fields(), self.chain.fields(), strict=True):
                links.copy_(torch.where(known[:, :1], line, links))
        drafts = self.window_tokens[:, 1 : depth + 1]
        drafts.copy_(torch.where(known, forced, drafts))
        deepest = torch.minimum(known.sum(dim=1), self.draft_caps)
        torch.maximum(self.offered, deepest, out=self.offered)

    def keep(self, drafts: Drafts) -> None:
        """Carry the drafts to the next round."""
        if self.shape.depth == 0:
            return
        links = () if drafts.links is None else zip(drafts.links.fields(), self.links.fields(), strict=True)
        keep_drafts(self.window_tokens, self.offered, self.draft_caps, drafts.tokens, drafts.depths, tuple(links))
        if self.said is not None and drafts.said is not None:
            self.said[:, : drafts.said.shape[1]].copy_(drafts.said)


class SeatState:
    """The buffers of all seats; mutable, and only through the methods below and RowState's."""

    def __init__(
        self, seats: int, shape: DraftShape, max_len: int, page_size: int, device: torch.device, ranks: Ranks = ALONE
    ) -> None:
        self.count, self.shape, self.max_len, self.page_size, self.device = seats, shape, max_len, page_size, device
        self.ranks = ranks
        self.max_places = -(-(max_len + 2 * shape.span + 2) // PLACES_STEP) * PLACES_STEP
        self._starts = even_starts(seats, max(shape.span, shape.depth + 2, shape.width), device)
        self._chain = Links.chain(shape.nodes, device)
        pads = {name: pad_line(pad, size, device) for name, (pad, size) in self._fields().items()}
        if not shape.is_chain:  # a chain's links never change and one row serves all seats; a tree's change each round
            pads |= {name: line[0] for name, line in zip(LINKS, self._chain.fields(), strict=True)}
        self.buffers = SeatBuffers(seats, pads, device)
        self._views: dict[Rows, RowState] = {}
        self.masks: Masks | None = None  # of rows with a grammar, written for each of their rounds
        self.forced: Tensor | None = None

    def _fields(self) -> dict[str, tuple[float, tuple[int, ...]]]:
        """Every buffer but a tree's links: the value of a pad, whose type is the buffer's, and the size of a line."""
        said = {"said": (0.0, (self.shape.depth,))} if self.shape.says else {}
        return said | {
            "history": (0, (self.max_places,)),
            "past_lens": (0, ()),
            "prompt_lens": (0, ()),
            "limits": (0, ()),
            "window_tokens": (0, (self.shape.nodes,)),
            "offered": (0, ()),
            "draft_caps": (0, ()),
            "done": (True, ()),
            "page_table": (0, (-(-self.max_places // self.page_size),)),
            "temperature": (0.0, ()),
            "top_k": (0, ()),
            "top_p": (1.0, ()),
            "log_min_p": (-torch.inf, ()),
            "repetition": (1.0, ()),
            "presence": (0.0, ()),
            "frequency": (0.0, ()),
            "seeds": (0, ()),
            "bias_ids": (-1, (MAX_BIAS,)),
            "bias_values": (0.0, (MAX_BIAS,)),
            "stop_ids": (-1, (MAX_STOP_IDS,)),
            "min_lens": (0, ()),
            "logprobs": (-1, ()),
        }

    @repeated
    def hold_masks(self, vocab_size: int) -> None:
        """Make room for the masks of grammars, and for the tokens they force."""
        seats, nodes, words = self.count, self.shape.nodes, -(-vocab_size // 32)
        self.masks = Masks(
            rows=torch.zeros(seats, dtype=torch.int32, device=self.device),
            words=torch.zeros(seats, nodes, words, dtype=torch.int32, device=self.device),
        )
        self.forced = torch.full((seats, nodes, self.shape.depth + 1), -1, device=self.device)
        self._views.clear()

    def set_masks(self, rows: Words, words: Words, forced: Words) -> None:
        """Write the masks of the first seats, [n], [n, T, words], and the tokens they force, [n, T, K + 1]."""
        assert self.masks is not None
        assert self.forced is not None
        for target, values in ((self.masks.rows, rows), (self.masks.words, words), (self.forced, forced)):
            target[: len(rows)].copy_(upload(values, self.device))

    @repeated
    def offer(self, depths: Sequence[int]) -> None:
        """So many drafts of the first seats are verified."""
        self.buffers.fields["offered"][: len(depths)].copy_(torch.tensor(depths))

    def rows(self, count: int, places: int) -> Rows:
        """A batch of the first `count` seats that touches no place at or past `places`."""
        return Rows(count, min(self.max_places, -(-places // PLACES_STEP) * PLACES_STEP))

    def view(self, rows: Rows) -> RowState:
        """The batch's slices, kept for the next batch of this shape."""
        if rows not in self._views:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            self._views[rows] = self._slice(rows)
        return self._views[rows]

    def _slice(self, rows: Rows) -> RowState:
        lines = {name: buffer[: rows.count] for name, buffer in self.buffers.fields.items()}
        links = self._chain if self.shape.is_chain else Links(*(lines.pop(name) for name in LINKS))
        pages = lines.pop("page_table")
        table = pages[:, : -(-rows.places // self.page_size)]
        masks, shape, nodes = self.masks, self.shape, rows.nodes
        if nodes is not None:
            shape = DraftShape.chain(nodes - 1, shape.lookahead)
            links = Links(*(line[:, :nodes] for line in links.fields()))
            lines["window_tokens"] = lines["window_tokens"][:, :nodes]
        if masks is not None:
            masks = Masks(masks.rows[: rows.count], masks.words[: rows.count, :nodes])
        return RowState(
            shape=shape,
            history=lines.pop("history")[:, : rows.places],
            links=links.rows(rows.count),
            chain=self._chain,
            sampling=SamplingTensors(**{name: lines.pop(name) for name in SAMPLING_LINES}, masks=masks),
            forced=None if self.forced is None else self.forced[: rows.count, :nodes],
            pages=RowPages(table, self.page_size, self.max_len, self._starts[:, : rows.count + 1], pages),
            said=lines.pop("said", None),
            **lines,
        )

    @repeated
    def join(self, first: int, packed: Sequence[dict[str, Words]], pages: Sequence[Sequence[int]]) -> None:
        """Seat requests in `first` and the seats after it, which are pads, by one copy; no drafts are offered yet."""
        entries = []
        for seat, (lines, held) in enumerate(zip(packed, pages, strict=True), first):
            entries += [(seat, name, 0, line) for name, line in lines.items()]
            entries.append((seat, "page_table", 0, np.array(held)))
        self.buffers.write(entries)
        self.buffers.fields["done"][first : first + len(packed)].fill_(False)

    @repeated
    def set_pages(self, entries: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Write seats' page-table entries, (seat, first column, pages) each, by one copy for all."""
        words = [(seat, column, page) for seat, first, pages in entries for column, page in enumerate(pages, first)]
        if words:
            self.buffers.write_words("page_table", np.array(words))

    @repeated
    def pretend(self, rows: int, context: int, num_pages: int) -> None:
        """Give pads a context on any pages there are, so that rounds can be timed; `clear` makes them pads again."""
        self.buffers.settle()
        table = self.buffers.fields["page_table"][:rows]
        table.copy_((torch.arange(table.numel(), device=self.device) % max(1, num_pages - 1) + 1).view(table.shape))
        self.buffers.fields["past_lens"][:rows].fill_(context)

    @repeated
    def clear(self, seat: int) -> None:
        """Make the seat a pad."""
        self.buffers.clear(seat)

    @repeated
    def move(self, source: int, target: int) -> None:
        """Give a request another seat and leave a pad behind."""
        self.buffers.move(source, target)

    def settle(self) -> None:
        """Carry out moves and clears; a batch may be queued after this."""
        if self.buffers.has_moves:
            self._settle()

    @repeated
    def _settle(self) -> None:
        self.buffers.settle()


def pad_line(pad: float, size: tuple[int, ...], device: torch.device) -> Tensor:
    """A seat's line filled with one value; a bool, int or float makes it bool, int64 or float32."""
    return torch.full(size, pad, dtype=TYPES[type(pad)], device=device)
