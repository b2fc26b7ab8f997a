"""The optimizer of a run: Muon for the matrices, AdamW for everything else, and one learning-rate curve.

Muon's step is scaled to the size of an AdamW step, so one learning rate and one weight decay serve both.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from peregrine.errors import ConfigError
from peregrine.train.muon import Muon

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Curve:
    """Learning rate by step: up in a straight line, level, and down to zero in a straight line."""

    peak: float
    warmup_steps: int
    total_steps: int
    decay_share: float  # of all steps, spent going down

    def at(self, step: int) -> float:
        """The rate of step `step`, counted from 0."""
        rising = (step + 1) / (self.warmup_steps + 1)
        falling = (self.total_steps - step) / max(1.0, self.decay_share * self.total_steps)
        return self.peak * max(0.0, min(1.0, rising, falling))


class Optimizers:
    """Muon and AdamW over one model's parameters, stepped together."""

    def __init__(self, model: nn.Module, weight_decay: float, not_matrices: frozenset[str] = frozenset()) -> None:
        """Matrices named in `not_matrices` go to AdamW: embeddings and heads, whose rows stand for tokens."""
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        missing = not_matrices - {name for name, _ in named}
        if missing:
            raise ConfigError(f"not_matrices={sorted(missing)}: no such parameter")
        matrices = [p for name, p in named if p.dim() == 2 and name not in not_matrices]
        tables = [p for name, p in named if p.dim() == 2 and name in not_matrices]
        vectors = [p for _, p in named if p.dim() != 2]
        on_gpu = bool(named) and named[0][1].is_cuda
        self.muon = Muon(matrices, weight_decay)
        groups = [{"params": tables, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, fused=on_gpu)

    def step(self, rate: float) -> None:
        """One update at this learning rate; gradients are cleared."""
        for optimizer in (self.muon, self.adamw):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> Tensors:
        """Everything that has to be kept for the next step."""
        return {
            f"{kind}.{index}.{name}": value
            for kind, optimizer in (("muon", self.muon), ("adamw", self.adamw))
            for index, entry in optimizer.state_dict()["state"].items()
            for name, value in entry.items()
        }

    def restore(self, tensors: Tensors) -> None:
        """Takes over what `tensors` gave."""
        for kind, optimizer in (("muon", self.muon), ("adamw", self.adamw)):
            state: dict[int, Tensors] = {}
            for key, value in tensors.items():
                owner, index, name = key.split(".", 2)
                if owner == kind:
                    state.setdefault(int(index), {})[name] = value
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
