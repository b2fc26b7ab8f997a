"""The target chooses at every node of the window, and the path of drafts that agrees with it is accepted."""

from collections.abc import Callable

from torch import Tensor

from peregrine.kernels.choose import Features, choose
from peregrine.kernels.verdict import Verdict, judge_nodes
from peregrine.spec.state import RowState

Judge = Callable[[Tensor, Tensor, RowState, Features], Verdict]


def judge(logits: Tensor, past_lens: Tensor, state: RowState, features: Features) -> Verdict:
    """The verdict on every row's window. logits [R, T, V]; past_lens [R] as they were before the round."""
    return judge_nodes(
        choices(logits, past_lens, state, features), state.nodes(), state.ends(past_lens), state.shape.depth
    )


def choices(logits: Tensor, past_lens: Tensor, state: RowState, features: Features) -> Tensor:
    """What the target would say after every node; -1 where its logits are not finite. [R, T]"""
    positions = past_lens[:, None] + (state.links.depths + 1)  # of the token to be chosen at each node
    return choose(logits, positions, state.law, features, state.context(past_lens))
