"""Copies of matrices, as a recorded step needs them."""

from peregrine.kernels.copy.reference import copy_into, join_columns

__all__ = ["copy_into", "join_columns"]
