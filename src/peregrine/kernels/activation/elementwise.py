"""Elementwise functions whose bits do not depend on where an element stands in its tensor.

On a CPU torch computes `sigmoid` and `silu` with one exponential in the vector part of a tensor and with another one
in the rest, so an element's bits follow from the tensor's size, and above 32,768 elements from the number of threads.
`exp` alone uses the vector code for every element, and additions and divisions round correctly everywhere.
"""

import math

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


def gelu(x: Tensor) -> Tensor:
    """The tanh formula of gelu, computed in float32, in the dtype of x. 1 + tanh(u) is 2 / (1 + e**-2u)."""
    if not x.is_cpu or _needs_gradient(x):
        return functional.gelu(x, approximate="tanh")
    wide = x.float()
    doubled = (wide + 0.044715 * (wide * wide * wide)) * (2 * math.sqrt(2 / math.pi))  # 2u
    return (wide / (1 + (-doubled).exp_())).to(x.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), computed in float32, in the dtype of x."""
    if not x.is_cpu or _needs_gradient(x):
        return (cap * (x.float() / cap).tanh()).to(x.dtype)
    decay = (x.float().abs() * (-2 / cap)).exp_()  # e**-2|u|
    return (cap * x.float().sign() * (1 - decay) / (1 + decay)).to(x.dtype)


def _needs_gradient(x: Tensor) -> bool:
    """In training nothing is promised about bits, and torch's own functions keep less for the gradient."""
    return torch.is_grad_enabled() and x.requires_grad
