"""Simulated acceptance for benchmarks: real drafts, real verify, drawn agreement.

The number of accepted tokens of each row and round is drawn from a hash of the request's seed and its length, so
that its mean is the one asked for. The text is meaningless; results must say that they were simulated.
"""

import torch
from torch import Tensor

from peregrine.errors import ConfigError
from peregrine.kernels.round import WindowPlaces
from peregrine.kernels.sampling import Features
from peregrine.spec.judge import judge
from peregrine.spec.state import RowState
from peregrine.spec.windows import Windows
from peregrine.synthetic.accept import bend_choices


class SimulatedJudge:
    """A judge whose acceptance length, bonus included, has a given mean."""

    def __init__(self, accept: float, depth: int, device: torch.device) -> None:
        if not 1.0 <= accept <= depth + 1:
            raise ConfigError(
                f"simulate_accept={accept:g}: a round accepts 1 to {depth + 1} tokens with {depth} drafts, "
                "the bonus counted; choose a value in that range"
            )
        # Of requests with even and with odd seeds. Benchmarks may write other values between rounds.
        self.means = torch.tensor([accept, accept], dtype=torch.float64, device=device)

    def __call__(
        self, logits: Tensor, places: WindowPlaces, state: RowState, features: Features, windows: Windows | None = None
    ) -> Tensor:
        chosen = judge(logits, places, state, features, windows)  # the real work
        seeds = state.sampling.seeds
        return bend_choices(chosen, state.nodes(), places.past_lens, seeds, self.means, logits.shape[-1])
