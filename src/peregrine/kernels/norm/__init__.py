"""Root-mean-square norms."""

from peregrine.kernels.norm.reference import add_rms_norm, norm_pair, rms_norm, rms_norm_torch

__all__ = ["add_rms_norm", "norm_pair", "rms_norm", "rms_norm_torch"]
