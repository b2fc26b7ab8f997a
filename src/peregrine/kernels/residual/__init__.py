"""The residual stream of a decoder, prepared for its next norm."""

from peregrine.kernels.residual.reference import (
    Norm,
    Residual,
    add_rows,
    add_to_residual,
    embed_residual,
    embed_rows,
    split_residual,
    splits_norm,
    start_residual,
    take_rows,
)

__all__ = [
    "Norm",
    "Residual",
    "add_rows",
    "add_to_residual",
    "embed_residual",
    "embed_rows",
    "split_residual",
    "splits_norm",
    "start_residual",
    "take_rows",
]
