"""Tensor parallel: which rows of each weight a rank holds, and how the ranks' results become whole rows.

Every linear layer is split by its outputs, and the ranks' results are gathered. So no sum of floats crosses ranks: each
output is computed by one rank, in the same order as on a single device, and has the same bits. Queries, keys
and values are split by heads and stay on their rank through attention. Experts are split by expert; their outputs are
put together as whole numbers (every rank but one adds zero bits), and each row adds them up in its own order.
`sharded.py` has the weights that do so.

Rank 0 leads. Every rank has the same parts (rounds, seats, drafter, ...), each with its share of the weights, and makes
the same calls on them: rank 0 tells the others which call comes next, through a pipe to each. They are given what only
the host of rank 0 knows; tokens, drafts and verdicts follow from that on every rank, by the same bits.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from peregrine.cache.store import KVShape
from peregrine.config import MAX_RANKS
from peregrine.errors import EngineFault
from peregrine.models.config import ModelConfig

Span = tuple[int, int]  # from the first up to, and not including, the second
Call = tuple[str, str, tuple[Any, ...]]  # a part that every rank has, its method, and what that is given
Method = TypeVar("Method", bound=Callable[..., Any])


class Group(Protocol):
    """The collectives of the ranks, on tensors of their devices; EngineFault if a rank is gone."""

    def gather(self, out: Tensor, own: Tensor) -> None:
        """Every rank's `own` one after the other in `out`."""

    def add(self, x: Tensor) -> None:
        """The sum of all ranks' x, which are whole numbers, in x."""

    def abort(self) -> None:
        """End collectives that wait for a rank which is gone."""


@dataclass(frozen=True)
class Ranks:
    """The processes that share one model; this one is number `rank` of `size`. One rank alone needs no group."""

    rank: int = 0
    size: int = 1
    group: Group | None = None
    pipes: tuple[Connection, ...] = ()  # rank 0: to each of the others; they: to rank 0
    share_memory: bool = True  # all ranks are on one device
    noted: list[bytes] = field(default_factory=list, compare=False)  # rank 0: calls that the others do not know of yet

    def for_draft(self, config: ModelConfig) -> "Ranks":
        """The ranks that share a draft network with such layers; each has one whole whose heads they cannot share."""
        return self if self.size in possible_sizes(config) else ALONE

    def everyone(self) -> "list[Ranks]":
        """All ranks in order, to ask what they hold."""
        return [Ranks(rank, self.size) for rank in range(self.size)]

    def span(self, total: int) -> Span:
        """This rank's share of `total` things; shares differ by one at most."""
        return share(total, self.rank, self.size)

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Span, Span]:
        """This rank's query heads and the KV heads that they see.

        With as many KV heads as ranks or more, each rank has its own; with fewer, ranks hold the same one and share the
        queries that see it.
        """
        group = num_heads // num_kv_heads
        if num_kv_heads >= self.size:
            low, high = self.span(num_kv_heads)
            return (low * group, high * group), (low, high)
        holders = self.size // num_kv_heads  # of one KV head
        kv_head, place = divmod(self.rank, holders)
        low, high = share(group, place, holders)
        return (kv_head * group + low, kv_head * group + high), (kv_head, kv_head + 1)

    def head_widths(self, num_heads: int, num_kv_heads: int, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Entries of a row of query heads, and of a row of KV heads, that each rank has."""
        spans = [rank.heads(num_heads, num_kv_heads) for rank in self.everyone()]
        q, kv = (tuple((high - low) * dim for low, high in own) for own in zip(*spans, strict=True))
        return q, kv

    def kv_shape(self, config: ModelConfig) -> KVShape:
        """What a token leaves in each layer's store on this rank; latents (MLA) are the same on all."""
        if config.mla is not None:
            return config.kv_shape
        low, high = self.heads(config.num_heads, config.num_kv_heads)[1]
        return KVShape.of_heads(high - low, config.head_dim)

    def kv_shapes(self, config: ModelConfig) -> list[KVShape]:
        """What a token leaves in the memory of one device: of all ranks if they share it, else the largest share."""
        shapes = [rank.kv_shape(config) for rank in self.everyone()]
        return shapes if self.share_memory else [max(shapes, key=lambda shape: shape.num_entries)]

    def split(self, total: int, parts: int = 1) -> "Shard | None":
        """A weight of `parts` blocks of `total` outputs, each block split between ranks; None: one rank has it all."""
        if self.size == 1:
            return None
        low, high = self.span(total)
        widths = tuple(end - start for start, end in (rank.span(total) for rank in self.everyone()))
        return Shard(self, tuple((n * total + low, n * total + high) for n in range(parts)), total * parts, widths)

    def keep(self, total: int, *rows: Span) -> "Shard | None":
        """A weight of `total` rows of which this rank holds some, whose outputs stay here."""
        return None if self.size == 1 else Shard(self, rows, total, widths=None)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Outputs of all ranks side by side, block by block: [N, blocks * own width] -> [N, blocks * all widths]."""
        if self.size == 1:
            return x
        blocks = x.reshape(len(x), x.shape[1] // widths[self.rank], widths[self.rank])
        padded = F.pad(blocks, (0, max(widths) - blocks.shape[2])).contiguous()
        out = padded.new_empty(self.size * len(x), *padded.shape[1:])
        self._group.gather(out, padded)
        parts = out.view(self.size, *padded.shape)
        return torch.cat([own[:, :, :width] for own, width in zip(parts, widths, strict=True)], dim=2).flatten(1)

    def merge(self, x: Tensor) -> Tensor:
        """The values of all ranks, put together in x: each value is set by one rank and is zero bits on the others."""
        self._group.add(x.view(torch.int32))
        return x

    def note(self, part: str, method: str, *given: object) -> None:
        """Have the other ranks make a call on their part before what they are told next; they say nothing themselves.

        What is given is what it is now, whatever becomes of it until then.
        """
        if self.size > 1 and not self.rank:
            self.noted.append(pickle.dumps((part, method, given)))

    def tell(self, part: str, method: str, *given: object) -> None:
        """Have the other ranks make a call on their part now, by one message with all that was noted before."""
        if self.size == 1 or self.rank:
            return
        self.note(part, method, *given)
        message = pickle.dumps(self.noted)
        self.noted.clear()
        try:
            for pipe in self.pipes:
                pipe.send_bytes(message)
        except OSError as error:
            raise EngineFault(LOST) from error

    def hear(self) -> Iterator[Call]:
        """The calls of rank 0's next message; waits for it. EOFError if rank 0 is gone or has closed."""
        yield from map(pickle.loads, pickle.loads(self.pipes[0].recv_bytes()))

    @property
    def _group(self) -> Group:
        assert self.group is not None
        return self.group


def share(total: int, rank: int, size: int) -> Span:
    """One of `size` shares of `total` things, which differ by one at most."""
    return rank * total // size, (rank + 1) * total // size


LOST = "a rank of this tensor-parallel engine is gone; its log says why. Start the engine again"
ALONE = Ranks()


def possible_sizes(config: ModelConfig) -> list[int]:
    """How many ranks can share a model's heads: with more ranks than KV heads, equally many for each."""
    kv_heads = config.num_kv_heads if config.mla is None else 1
    return [n for n in range(1, min(config.num_heads, MAX_RANKS) + 1) if n <= kv_heads or n % kv_heads == 0]


def on_every_rank(part: str, at_once: bool = True) -> Callable[[Method], Method]:
    """A method of a part that every rank has: rank 0 has the others make the same call, now or before their next one.

    Arguments by keyword are a rank's own.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *given: object, **own: object) -> object:
            ranks: Ranks = self.ranks
            if ranks.size > 1:
                (ranks.tell if at_once else ranks.note)(part, method.__name__, *given)
            return method(self, *given, **own)

        return call  # type: ignore[return-value]

    return decorate


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows of one weight that a rank holds."""

    ranks: Ranks
    rows: tuple[Span, ...]  # of the whole weight, ascending
    total: int  # rows of the whole weight
    widths: tuple[int, ...] | None  # each rank's outputs of a block, to be gathered; None: outputs stay on their rank

    @property
    def count(self) -> int:
        """How many rows it holds."""
        return sum(high - low for low, high in self.rows)

    def within(self, start: int, end: int) -> Iterator[Span]:
        """Its rows between `start` and `end`, counted from `start`."""
        for low, high in self.rows:
            if max(low, start) < min(high, end):
                yield max(low, start) - start, min(high, end) - start

    def take(self, whole: Tensor) -> Tensor:
        """Its rows of the whole weight or bias."""
        return torch.cat([whole[low:high] for low, high in self.rows])
