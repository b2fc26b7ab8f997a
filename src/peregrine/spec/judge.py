"""The target's token after every node of the window; drafts that equal it are accepted."""

from collections.abc import Callable

from torch import Tensor

from peregrine.kernels.round import WindowPlaces
from peregrine.kernels.sampling import Features, choose
from peregrine.spec.state import RowState

Judge = Callable[[Tensor, WindowPlaces, RowState, Features], Tensor]


def judge(logits: Tensor, places: WindowPlaces, state: RowState, features: Features) -> Tensor:
    """The target's token after every node, -1 where its logits are not finite. logits [R, T, V] -> [R, T]"""
    context = state.context(places.past_lens) if features.penalised else None
    return choose(logits, places.next_positions, state.sampling, features, context)
