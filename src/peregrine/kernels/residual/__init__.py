"""The residual stream of a decoder, kept ready for its next norm."""

from peregrine.kernels.residual.reference import (
    Residual,
    add_to_residual,
    embed_residual,
    join_stream,
    normed,
    start_residual,
    stream_gate,
    stream_linear,
)

__all__ = [
    "Residual",
    "add_to_residual",
    "embed_residual",
    "join_stream",
    "normed",
    "start_residual",
    "stream_gate",
    "stream_linear",
]
