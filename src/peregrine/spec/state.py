"""What is carried between rounds, in device buffers with one line per seat.

Seats are compact: the rows of a round are always the first R seats, so a round reads and writes plain slices of
these buffers and gathers nothing. An unused seat is a pad: ended, on the scratch page, one token long.

    history  | prompt tokens ............ | committed tokens ... newest |  later: garbage
    places   0                        prompt_len                   past_len
                                                    KV exists below past_len; the newest token has none yet

Of several ranks each has the same seats: what rank 0 writes between rounds, the others write before their next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from peregrine.hardware import upload
from peregrine.kernels.round import Ends, Nodes, Verdict, commit, keep_drafts
from peregrine.kernels.sampling import Context, Masks, SamplingTensors
from peregrine.models.parallel import ALONE, Ranks, on_every_rank
from peregrine.sampling import MAX_BIAS, MAX_STOP_IDS
from peregrine.spec.row_pages import RowPages, even_starts
from peregrine.spec.seat_entry import SeatEntry, Words
from peregrine.spec.types import Drafts, DraftShape, Links

PLACES_STEP = 64  # widths of history and page table grow in these steps
MAX_VIEWS = 256  # batch shapes whose slices are kept
LINKS = ("parents", "depths", "ancestors")
SAMPLING_LINES = [field.name for field in fields(SamplingTensors) if field.name != "masks"]
TYPES = {bool: torch.bool, int: torch.int64, float: torch.float32}
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


class SeatState:
    """The buffers of all seats; mutable, and only through the methods below and RowState's."""

    def __init__(
        self, seats: int, shape: DraftShape, max_len: int, page_size: int, device: torch.device, ranks: Ranks = ALONE
    ) -> None:
        self.count, self.shape, self.max_len, self.page_size, self.device = seats, shape, max_len, page_size, device
        self.ranks = ranks
        self.max_places = -(-(max_len + 2 * shape.span + 2) // PLACES_STEP) * PLACES_STEP
        self._starts = even_starts(seats, max(shape.nodes, shape.depth + 2, shape.width), device)
        self._chain = Links.chain(shape.nodes, device)
        pads = {name: pad_line(pad, size, device) for name, (pad, size) in self._fields().items()}
        if not shape.is_chain:  # a chain's links never change and one row serves all seats; a tree's change each round
            pads |= {name: line[0] for name, line in zip(LINKS, self._chain.fields(), strict=True)}
        self._buffers = {name: pad.expand(seats, *pad.shape).clone() for name, pad in pads.items() if pad.dim()}
        # What requests take and leave, by seat. Numbers of one type lie together: one copy moves all of them.
        self._lines, self._pads = dict(self._buffers), {name: pads[name] for name in self._buffers}  # of an unused seat
        self._names: dict[str, list[str]] = {}
        for kind in TYPES.values():
            names = self._names[str(kind)] = [n for n, pad in pads.items() if not pad.dim() and pad.dtype == kind]
            self._pads[str(kind)] = torch.stack([pads[name] for name in names])  # [fields]
            columns = self._pads[str(kind)][:, None].repeat(1, -(-seats // 16) * 16)[:, :seats]  # rows are aligned
            self._lines[str(kind)] = columns.T
            self._buffers |= dict(zip(names, columns, strict=True))
        self._views: dict[Rows, RowState] = {}
        self.masks: Masks | None = None  # of rows with a grammar, written for each of their rounds
        self.forced: Tensor | None = None

    def _fields(self) -> dict[str, tuple[float, tuple[int, ...]]]:
        """Every buffer but a tree's links: the value of a pad, whose type is the buffer's, and the size of a line."""
        return {
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
        seats, nodes, words = len(self._buffers["done"]), self.shape.nodes, -(-vocab_size // 32)
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
        self._buffers["offered"][: len(depths)].copy_(torch.tensor(depths))

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
        lines = {name: buffer[: rows.count] for name, buffer in self._buffers.items()}
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
            **lines,
        )

    def pack(self, entry: SeatEntry) -> dict[str, Words]:
        """A request's lines as numbers of 64 bits; a line that is missing is a pad's."""
        numbers, fields = entry.numbers(), self._fields()
        lines: dict[str, Words] = {kind: np.array([numbers[n] for n in names]) for kind, names in self._names.items()}
        for name, values in entry.lists().items():
            if values:
                pad, (size,) = fields[name]
                lines[name] = np.array([*values, *[pad] * (size - len(values))])
        wide = {name: line.astype(np.float64 if line.dtype.kind == "f" else np.int64) for name, line in lines.items()}
        return wide | {"history": entry.tokens}

    @repeated
    def join(self, first: int, packed: Sequence[dict[str, Words]]) -> None:
        """Seat requests in `first` and the seats after it, by one copy to the device; no drafts are offered yet."""
        seats, arrays, targets = slice(first, first + len(packed)), [], []
        for name, lines in self._lines.items():
            some = [line[name] for line in packed if name in line]
            if name == "history":  # whose end is never read
                arrays += some
                targets += [lines[first + row, : len(tokens)] for row, tokens in enumerate(some)]
            elif not some:
                lines[seats].copy_(self._pads[name])
            else:
                pad = some[0] if len(some) == len(packed) else np.full_like(some[0], self._fields()[name][0])
                arrays.append(np.stack([line.get(name, pad) for line in packed]))
                targets.append(lines[seats])
        words = np.concatenate([array.view(np.int64).ravel() for array in arrays])
        parts = torch.split(upload(words, self.device), [array.size for array in arrays])
        for target, part, array in zip(targets, parts, arrays, strict=True):
            target.copy_((part.view(torch.float64) if array.dtype.kind == "f" else part).view(target.shape))

    @repeated
    def set_pages(self, entries: Sequence[tuple[int, int, list[int]]]) -> None:
        """Write seats' page-table entries, (seat, first column, pages) each, by one copy for all."""
        if not entries:
            return
        table = self._buffers["page_table"]
        width = table.shape[1]
        places = [np.arange(len(pages)) + seat * width + first for seat, first, pages in entries]
        both = upload(np.concatenate([*places, *(pages for _, _, pages in entries)]), self.device).view(2, -1)
        table.view(-1).index_copy_(0, both[0], both[1])

    @repeated
    def pretend(self, rows: int, context: int, num_pages: int) -> None:
        """Give pads a context on any pages there are, so that rounds can be timed; `clear` makes them pads again."""
        table = self._buffers["page_table"][:rows]
        table.copy_((torch.arange(table.numel(), device=self.device) % max(1, num_pages - 1) + 1).view(table.shape))
        self._buffers["past_lens"][:rows].fill_(context)

    @repeated
    def clear(self, seat: int) -> None:
        """Make the seat a pad."""
        for name, lines in self._lines.items():
            lines[seat].copy_(self._pads[name])

    @repeated
    def move(self, source: int, target: int) -> None:
        """Give a request another seat and leave a pad behind."""
        for name, lines in self._lines.items():
            lines[target].copy_(lines[source])
            lines[source].copy_(self._pads[name])


def pad_line(pad: float, size: tuple[int, ...], device: torch.device) -> Tensor:
    """A seat's line filled with one value; a bool, int or float makes it bool, int64 or float32."""
    return torch.full(size, pad, dtype=TYPES[type(pad)], device=device)
