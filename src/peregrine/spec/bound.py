"""Networks with the store and the backend they run on: what a round needs to read a window.

Of several ranks, each has its share of the network and of the store, and makes the same calls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from peregrine.attention import Attend, AttentionBackend, AttentionMetadata, Deferred, LayerAttention
from peregrine.cache.store import KVStore
from peregrine.kernels.round import Verdict, move_path
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import BlockHead, DraftHead, StepHead
from peregrine.models.parallel import Ranks

Network = TypeVar("Network", bound=Decoder | DraftHead)


def last_layer(body: Attend, last: Attend, num_layers: int) -> Attend:
    """One attend for all layers but the last, another for the last."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Deferred | None = None) -> Tensor:
        return (last if layer == num_layers - 1 else body)(layer, q, k, v, rope)

    return attend


@dataclass(frozen=True, slots=True)
class Bound(Generic[Network]):
    """A network, its KV store and its attention backend."""

    network: Network
    layers: Sequence[LayerAttention]
    store: KVStore
    backend: AttentionBackend

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the network."""
        return self.network.ranks

    def bind(self, metadata: AttentionMetadata) -> Attend:
        return self.backend.bind(self.store, self.layers, metadata)


class BoundModel(Bound[Decoder]):
    """A decoder."""

    __slots__ = ()

    @property
    def decoder(self) -> Decoder:
        return self.network

    def read(self, tokens: Tensor, metadata: AttentionMetadata, taps: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Read a window: hidden [N, H] after the final norm, taps [N, len(taps) * H]."""
        return self.decoder.forward(tokens, metadata.positions, self.bind(metadata), taps)

    def read_live(
        self, tokens: Tensor, body: AttentionMetadata, last: AttentionMetadata, live: Tensor, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Read a window, of which the last layer has queries of the live places [n] alone: hidden [n, H], taps."""
        num_layers = self.decoder.config.num_layers
        attend = self.bind(body)
        if num_layers not in taps:  # else the last layer, too, is computed for all tokens
            attend = last_layer(attend, self.bind(last), num_layers)
        return self.decoder.forward(tokens, body.positions, attend, taps, live)

    def fill(self, tokens: Tensor, metadata: AttentionMetadata, taps: Sequence[int]) -> Tensor | None:
        """Read a window for its keys, values and taps alone: the last layer's output is computed only if tapped."""
        no_rows = tokens[:0]
        return self.decoder.forward(tokens, metadata.positions, self.bind(metadata), taps, no_rows)[1]

    def move_path(self, past_lens: Tensor, verdict: Verdict, table: Tensor, page_size: int) -> None:
        """Move the accepted path's cache entries to the front of a tree's window."""
        move_path(self.store.parts, past_lens, verdict, table, page_size)


class BoundHead(Bound[StepHead]):
    """A head that drafts token by token."""

    __slots__ = ()

    def read(
        self, tokens: Tensor, hidden: Tensor, body: AttentionMetadata, last: AttentionMetadata, live: Tensor | None
    ) -> Tensor:
        """Read tokens [N] with hidden states [N, H]: the next ones [N, H], or [n, H] of the live places [n].

        `last` describes the queries of the last layer, `body` those of the others.
        """
        attend, count = self.bind(last), self.network.num_layers
        if count > 1 and last is not body:
            attend = last_layer(self.bind(body), attend, count)
        return self.network.forward(tokens, hidden, body.positions, attend, live)


class BoundBlock(Bound[BlockHead]):
    """A head that drafts a block at once."""

    __slots__ = ()

    def remember(self, fused: Tensor, metadata: AttentionMetadata) -> None:
        """Take in tokens that the target has read: fused taps [N, H]."""
        self.network.remember(fused, metadata.positions, self.bind(metadata))

    def read(self, tokens: Tensor, forms: Mapping[bool, AttentionMetadata]) -> Tensor:
        """Read the tokens of blocks: [N] -> [N, H]. forms[True] is for causal layers, forms[False] for others."""
        binds = {causal: self.bind(form) for causal, form in forms.items()}
        causal = self.network.config.causal

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Deferred | None = None) -> Tensor:
            return binds[causal[layer]](layer, q, k, v, rope)

        positions = next(iter(forms.values())).positions
        return self.network.forward(tokens, positions, attend)
