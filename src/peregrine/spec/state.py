"""What is carried between rounds, in device buffers with one line per seat.

Seats are compact: the rows of a round are always the first R seats, so a round reads and writes plain slices of
these buffers and gathers nothing. An unused seat is a pad: ended, on the scratch page, one token long.

    history  | prompt tokens ............ | committed tokens ... newest |  later: garbage
    places   0                        prompt_len                   past_len
                                                    KV exists below past_len; the newest token has none yet
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from peregrine.hardware import upload
from peregrine.kernels.round import Ends, Nodes, Verdict, commit, keep_drafts
from peregrine.kernels.sampling import Context, Masks, SamplingTensors
from peregrine.sampling import MAX_BIAS, MAX_STOP_IDS
from peregrine.spec.row_pages import RowPages, even_starts
from peregrine.spec.types import Drafts, DraftShape, Links

PLACES_STEP = 64  # widths of history and page table grow in these steps
MAX_VIEWS = 256  # batch shapes whose slices are kept
LINKS = ("parents", "depths", "ancestors")
SAMPLING_LINES = [field.name for field in fields(SamplingTensors) if field.name != "masks"]
TYPES = {bool: torch.bool, int: torch.int64, float: torch.float32}


@dataclass(frozen=True, slots=True)
class Rows:
    """The batch of one round: its first `count` seats, and a bound on the places any of them may touch."""

    count: int
    places: int
    nodes: int | None = None  # how many nodes of a chain's window are used; None: all


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
    logprobs: int | None


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

    def __init__(self, seats: int, shape: DraftShape, max_len: int, page_size: int, device: torch.device) -> None:
        self.count, self.shape, self.max_len, self.page_size, self.device = seats, shape, max_len, page_size, device
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

    def hold_masks(self, vocab_size: int) -> None:
        """Make room for the masks of grammars, and for the tokens they force."""
        seats, nodes, words = len(self._buffers["done"]), self.shape.nodes, -(-vocab_size // 32)
        self.masks = Masks(
            rows=torch.zeros(seats, dtype=torch.int32, device=self.device),
            words=torch.zeros(seats, nodes, words, dtype=torch.int32, device=self.device),
        )
        self.forced = torch.full((seats, nodes, self.shape.depth + 1), -1, device=self.device)
        self._views.clear()

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
        table = lines.pop("page_table")[:, : -(-rows.places // self.page_size)]
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
            pages=RowPages(table, self.page_size, self.max_len, self._starts[:, : rows.count + 1]),
            **lines,
        )

    def join(self, seat: int, entry: SeatEntry) -> None:
        """Seat a request; its first round has no drafts yet."""
        self.clear(seat)
        numbers = {
            "past_lens": len(entry.tokens) - 1,
            "prompt_lens": entry.prompt_len,
            "limits": entry.limit,
            "draft_caps": entry.draft_cap,
            "done": False,
            "temperature": entry.temperature,
            "top_k": entry.top_k,
            "top_p": entry.top_p,
            "log_min_p": entry.min_p,
            "repetition": entry.repetition,
            "presence": entry.presence,
            "frequency": entry.frequency,
            "seeds": entry.seed,
            "min_lens": entry.min_len,
            "logprobs": -1 if entry.logprobs is None else entry.logprobs,
            "offered": 0,
        }
        for kind, names in self._names.items():
            self._lines[kind][seat].copy_(self._upload([numbers[name] for name in names]))
        self._buffers["log_min_p"][seat].log_()
        lists: dict[str, list[int] | list[float]] = {
            "history": entry.tokens,
            "window_tokens": entry.tokens[-1:],
            "stop_ids": entry.stop_ids,
            "bias_ids": list(entry.bias),
            "bias_values": list(entry.bias.values()),
        }
        for name, values in lists.items():
            if values:
                self._buffers[name][seat, : len(values)].copy_(self._upload(values))

    def set_pages(self, entries: Sequence[tuple[int, int, list[int]]]) -> None:
        """Write seats' page-table entries, (seat, first column, pages) each, by one copy for all."""
        if not entries:
            return
        table = self._buffers["page_table"]
        width = table.shape[1]
        places: list[int] = []
        pages: list[int] = []
        for seat, first, more in entries:
            start = seat * width + first
            places += range(start, start + len(more))
            pages += more
        both = self._upload(places + pages)
        table.view(-1).index_copy_(0, both[: len(pages)], both[len(pages) :])

    def pretend(self, rows: int, context: int, num_pages: int) -> None:
        """Give pads a context on any pages there are, so that rounds can be timed; `clear` makes them pads again."""
        table = self._buffers["page_table"][:rows]
        table.copy_((torch.arange(table.numel(), device=self.device) % max(1, num_pages - 1) + 1).view(table.shape))
        self._buffers["past_lens"][:rows].fill_(context)

    def clear(self, seat: int) -> None:
        """Make the seat a pad."""
        for name, lines in self._lines.items():
            lines[seat].copy_(self._pads[name])

    def move(self, source: int, target: int) -> None:
        """Give a request another seat and leave a pad behind."""
        for lines in self._lines.values():
            lines[target].copy_(lines[source])
        self.clear(source)

    def _upload(self, values: list[int] | list[float]) -> Tensor:
        return upload(values, self.device)


def pad_line(pad: float, size: tuple[int, ...], device: torch.device) -> Tensor:
    """A seat's line filled with one value; a bool, int or float makes it bool, int64 or float32."""
    return torch.full(size, pad, dtype=TYPES[type(pad)], device=device)
