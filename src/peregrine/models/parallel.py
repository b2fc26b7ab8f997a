"""Tensor parallel: which rows of each weight a rank holds, and how the ranks' results become whole rows.

Every linear layer is split by its outputs, and the ranks' results are gathered. So no sum of floats crosses ranks: each
output is computed by one rank, in the same order as on a single device, and has the same bits. Queries, keys
and values are split by heads and stay on their rank through attention. Experts are split by expert; their outputs are
put together as whole numbers (every rank but one adds zero bits), and each row adds them up in its own order.
`sharded.py` has the weights that do so.

Rank 0 leads: it tells the others which call to make, plain values through a pipe to each and tensors by one broadcast.
"""

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from peregrine.cache.store import KVShape
from peregrine.config import MAX_RANKS
from peregrine.errors import EngineFault
from peregrine.models.config import ModelConfig

Span = tuple[int, int]  # from the first up to, and not including, the second
TARGET, DRAFT = "target", "draft"  # networks that ranks share


class Group(Protocol):
    """The collectives of the ranks, on tensors of their devices; EngineFault if a rank is gone."""

    def gather(self, out: Tensor, own: Tensor) -> None:
        """Every rank's `own` one after the other in `out`."""

    def add(self, x: Tensor) -> None:
        """The sum of all ranks' x, which are whole numbers, in x."""

    def send(self, x: Tensor) -> None:
        """Rank 0's x in every rank's x."""

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
    network: str = TARGET  # whose weights these are: what rank 0 tells is for that one

    def for_draft(self, config: ModelConfig) -> "Ranks":
        """The ranks that share a draft network with such layers; rank 0 alone has one whose heads they cannot share."""
        return replace(self, network=DRAFT) if self.size in possible_sizes(config) else ALONE

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

    def tell(self, what: str, *given: object) -> None:
        """Rank 0 tells the others what to do, with these values; `hear` returns it. Other ranks say nothing."""
        if self.size == 1 or self.rank:
            return
        packer = _Packer(packed := io.BytesIO())
        packer.dump((what, given))
        header = pickle.dumps(([(x.shape, x.dtype) for x in packer.tensors], packed.getvalue()))
        try:
            for pipe in self.pipes:
                pipe.send_bytes(header)
        except OSError as error:
            raise EngineFault(LOST) from error
        if packer.tensors:
            # A single value may be contiguous with any stride, and could then not be seen as bytes.
            parts = [x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8) for x in packer.tensors]
            self._group.send(torch.cat([F.pad(part, (0, -len(part) % ALIGNMENT)) for part in parts]))

    def hear(self, device: torch.device) -> tuple[str, tuple[Any, ...]]:
        """What rank 0 told last, and its values; waits for it. EOFError if rank 0 is gone or has closed."""
        shapes, packed = pickle.loads(self.pipes[0].recv_bytes())
        tensors: list[Tensor] = []
        if shapes:
            sizes = [shape.numel() * dtype.itemsize for shape, dtype in shapes]
            starts = [0, *accumulate(size + -size % ALIGNMENT for size in sizes)]
            data = torch.empty(starts[-1], dtype=torch.uint8, device=device)
            self._group.send(data)
            for (shape, dtype), size, start in zip(shapes, sizes, starts, strict=False):
                tensors.append(data[start : start + size].view(dtype).view(shape))
        what, given = _Unpacker(packed, tensors).load()
        return what, given

    @property
    def _group(self) -> Group:
        assert self.group is not None
        return self.group


def share(total: int, rank: int, size: int) -> Span:
    """One of `size` shares of `total` things, which differ by one at most."""
    return rank * total // size, (rank + 1) * total // size


ALIGNMENT = 16  # bytes, of tensors that are sent together: kernels are compiled for pointers so aligned
LOST = "a rank of this tensor-parallel engine is gone; its log says why. Start the engine again"
ALONE = Ranks()


def possible_sizes(config: ModelConfig) -> list[int]:
    """How many ranks can share a model's heads: with more ranks than KV heads, equally many for each."""
    kv_heads = config.num_kv_heads if config.mla is None else 1
    return [n for n in range(1, min(config.num_heads, MAX_RANKS) + 1) if n <= kv_heads or n % kv_heads == 0]


class _Packer(pickle.Pickler):
    """Pickles values and sets aside the tensors in them, each once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: object) -> int | None:
        """Where a tensor is among those set aside; None: it is pickled."""
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._places[id(value)]


class _Unpacker(pickle.Unpickler):
    """Puts tensors back where they were."""

    def __init__(self, packed: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(packed))
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        """The tensor that was set aside."""
        return self._tensors[place]


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
