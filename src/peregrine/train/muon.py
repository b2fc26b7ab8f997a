"""Muon: momentum updates, each matrix made orthogonal by a Newton-Schulz iteration.

`torch.optim.Muon` iterates in bfloat16 on every device, which takes ten times as long or more on CPUs without bfloat16
arithmetic, and one matrix at a time. Here a CPU iterates in float32, and matrices of one shape are one batch.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a quintic that is steep at zero, so that five rounds suffice
ROUNDS = 5
MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """Orthogonal Nesterov updates for matrices [O, I], scaled to the RMS of AdamW's, with decoupled weight decay."""

    def __init__(self, matrices: Iterable[nn.Parameter], weight_decay: float) -> None:
        super().__init__(matrices, {"lr": 0.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape.setdefault(matrix.shape, []).append(matrix)
            for shape, matrices in by_shape.items():
                updates = orthogonal(torch.stack([self._direction(matrix) for matrix in matrices]))
                torch._foreach_mul_(matrices, 1.0 - group["lr"] * group["weight_decay"])
                # An orthogonal matrix has an RMS of 1 / sqrt(longer side), AdamW's updates one of about 0.2.
                scale = 0.2 * max(shape) ** 0.5
                torch._foreach_add_(matrices, list(updates.unbind()), alpha=-group["lr"] * scale)

    def _direction(self, matrix: Tensor) -> Tensor:
        state, gradient = self.state[matrix], matrix.grad
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        momentum: Tensor = state["momentum"].lerp_(gradient, 1.0 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices [n, O, I] with the same singular vectors and singular values near one, in the same dtype."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if tall else x).to(matrices.dtype)
    return result
