"""Elementwise functions whose bits do not depend on where an element stands in its tensor.

On a CPU torch computes `sigmoid` and `silu` with one exponential in the vector part of a tensor and with another one
in the rest, so an element's bits follow from the tensor's size, and above 32,768 elements from the number of threads.
`exp` alone uses the vector code for every element, and additions and divisions round correctly everywhere.
"""

import torch
from torch import Tensor
from torch.nn import functional


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e**-x), computed in float32, in the dtype of x."""
    if not x.is_cpu or _needs_gradient(x):
        return x.sigmoid()
    return (1 / (1 + (-x.float()).exp_())).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x / (1 + e**-x), computed in float32, in the dtype of x."""
    if not x.is_cpu or _needs_gradient(x):
        return functional.silu(x)
    return (x.float() / (1 + (-x.float()).exp_())).to(x.dtype)


def _needs_gradient(x: Tensor) -> bool:
    """In training nothing is promised about bits, and torch's own functions keep less for the gradient."""
    return torch.is_grad_enabled() and x.requires_grad
