"""A model with the store and the backend it runs on: what a round needs to read a window."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from peregrine.attention import Attend, AttentionBackend, AttentionMetadata, Deferred, LayerAttention
from peregrine.cache.store import KVStore
from peregrine.kernels.round import Verdict, move_path
from peregrine.models.decoder import Decoder


def last_layer(body: Attend, last: Attend, num_layers: int) -> Attend:
    """One attend for all layers but the last, another for the last."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Deferred | None = None) -> Tensor:
        return (last if layer == num_layers - 1 else body)(layer, q, k, v, rope)

    return attend


@dataclass(frozen=True, slots=True)
class BoundModel:
    """A decoder, its KV store and its attention backend."""

    decoder: Decoder
    layers: Sequence[LayerAttention]
    store: KVStore
    backend: AttentionBackend

    def bind(self, metadata: AttentionMetadata) -> Attend:
        return self.backend.bind(self.store, self.layers, metadata)

    def read(self, tokens: Tensor, metadata: AttentionMetadata, taps: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Read a window: hidden [N, H] after the final norm, taps [N, len(taps) * H]."""
        return self.decoder.forward(tokens, metadata.positions, self.bind(metadata), taps)

    def fill(self, tokens: Tensor, metadata: AttentionMetadata, taps: Sequence[int]) -> Tensor | None:
        """Read a window for its keys, values and taps alone: the last layer's output is computed only if tapped."""
        no_rows = tokens[:0]
        return self.decoder.forward(tokens, metadata.positions, self.bind(metadata), taps, no_rows)[1]

    def move_path(self, past_lens: Tensor, verdict: Verdict, table: Tensor, page_size: int) -> None:
        """Move the accepted path's cache entries to the front of a tree's window."""
        move_path(self.store.parts, past_lens, verdict, table, page_size)
