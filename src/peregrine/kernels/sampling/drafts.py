"""What a drafter takes from its logits: the tokens that the target will probably choose, and how likely each is.

A draft is the maximum of logits and the very noise that the target will add at its position, so that a drafter whose
logits are the target's is always right.
"""

from torch import Tensor

from peregrine.kernels.runtime.cpu import numba_ready
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready
from peregrine.kernels.sampling.filters import divisors
from peregrine.kernels.sampling.noise import add_noise
from peregrine.kernels.sampling.params import Features, SamplingTensors

_cpu = DeviceFile("peregrine.kernels.sampling.cpu")
_shares = DeviceFile("peregrine.kernels.sampling.shares_cpu")
_triton = DeviceFile("peregrine.kernels.sampling.triton")


def pick_scores(
    draft_logits: Tensor, positions: Tensor, target_ids: Tensor | None, sampling: SamplingTensors, features: Features
) -> Tensor:
    """Scores whose maximum predicts the target's choice: [R, n, Vd], [R, n] -> [R, n, Vd] f32.

    Logits over temperature, plus the noise that the target will add, keyed by target ids [Vd] (None: draft ids are
    target ids). Penalties and filters are not applied; a wrong draft costs time, not tokens.
    """
    if not features.sampled:
        return draft_logits.float()
    if numba_ready(draft_logits):
        scores: Tensor = _cpu.pick_scores(draft_logits, positions, target_ids, sampling)
        return scores
    return pick_scores_torch(draft_logits, positions, target_ids, sampling)


def pick_scores_torch(
    draft_logits: Tensor, positions: Tensor, target_ids: Tensor | None, sampling: SamplingTensors
) -> Tensor:
    """The torch twin of `pick_scores`, where some row is sampled."""
    return add_noise(draft_logits.float() / divisors(sampling), positions, target_ids, sampling)


def pick(
    draft_logits: Tensor,
    positions: Tensor,
    target_ids: Tensor | None,
    sampling: SamplingTensors,
    features: Features,
    out: Tensor,
) -> None:
    """The target id of the largest pick score, lowest draft id on ties: [R, n, Vd], [R, n] -> `out`, a dense [R, n]."""
    if triton_ready(draft_logits):
        _triton.best_tokens(draft_logits, positions, sampling, features.sampled, target_ids, None, False, out)
    elif numba_ready(draft_logits):
        _cpu.choose(draft_logits, positions, target_ids, sampling, Features(sampled=features.sampled), False, out)
    else:
        pick_torch(draft_logits, positions, target_ids, sampling, features, out)


def pick_torch(
    draft_logits: Tensor,
    positions: Tensor,
    target_ids: Tensor | None,
    sampling: SamplingTensors,
    features: Features,
    out: Tensor,
) -> None:
    """The torch twin of `pick`."""
    ids = pick_scores(draft_logits, positions, target_ids, sampling, features).max(dim=2).indices
    out.copy_(ids if target_ids is None else target_ids[ids])


def top_chances(scores: Tensor) -> Tensor:
    """The largest probability of each line of scores: [n, V] -> [n] f32; 0 where scores are not numbers."""
    if numba_ready(scores):
        chances: Tensor = _shares.top_chances(scores)
        return chances
    return top_chances_torch(scores)


def top_chances_torch(scores: Tensor) -> Tensor:
    """The torch twin of `top_chances`."""
    return scores.float().softmax(dim=1).amax(dim=1).nan_to_num(0.0)


def ranked(
    draft_logits: Tensor,
    positions: Tensor,
    target_ids: Tensor | None,
    sampling: SamplingTensors,
    features: Features,
    count: int,
) -> tuple[Tensor, Tensor]:
    """The target ids of the largest pick scores, falling, lowest draft id on ties, and the share of each in all.

    [R, 1, Vd], [R, 1] -> [R, count] i64 and f32; shares are 0 where scores are not numbers.
    """
    scores = pick_scores(draft_logits, positions, target_ids, sampling, features)[:, 0]
    if numba_ready(scores):
        ids, shares = _shares.ranked(scores, target_ids, count)
        return ids, shares
    return ranked_torch(scores, target_ids, count)


def ranked_torch(scores: Tensor, target_ids: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """The torch twin of `ranked`, from pick scores [R, Vd]."""
    ids = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    shares = scores.softmax(dim=1).gather(1, ids).nan_to_num(0.0)
    return ids if target_ids is None else target_ids[ids], shares
