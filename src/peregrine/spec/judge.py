"""The target's token after every node of the window; drafts that equal it are accepted."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from peregrine.kernels.round import WindowPlaces
from peregrine.kernels.runtime.gpu import triton_ready
from peregrine.kernels.sampling import Context, Features, Masks, choose
from peregrine.spec.state import RowState
from peregrine.spec.windows import Windows

Judge = Callable[[Tensor, WindowPlaces, RowState, Features, Windows | None], Tensor]


def judge(
    logits: Tensor, places: WindowPlaces, state: RowState, features: Features, windows: Windows | None = None
) -> Tensor:
    """The target's token after every node, -1 where its logits are not finite. logits [R, T, V] -> [R, T]

    Of packed windows, logits are [N, V], and -1 also stands where no window reaches.
    """
    context = state.context(places.past_lens) if features.penalised else None
    if windows is None:
        return choose(logits, places.next_positions, state.sampling, features, context)
    if features.adjusted and triton_ready(logits):  # a row's history is counted once, for all its nodes
        return choose(windows.spread(logits, empty=0), places.next_positions, state.sampling, features, context)
    # Every node is a row of its own: a token depends on its own row alone.
    rows, sampling = windows.row_of, state.sampling.only(windows.row_of, features)
    if features.masked and state.sampling.masks is not None:
        masks = state.sampling.masks
        words = masks.words.flatten(0, 1).index_select(0, windows.at)[:, None]
        sampling = replace(sampling, masks=Masks(masks.rows.index_select(0, rows), words))
    if context is not None:
        words = windows.pack(context.ancestors)[:, None]
        before = context

        def of_nodes(lines: Tensor) -> Tensor:
            return lines.index_select(0, rows)

        context = Context(
            history=of_nodes(before.history),
            prompt_lens=of_nodes(before.prompt_lens),
            lens=of_nodes(before.lens),
            window_tokens=of_nodes(before.window_tokens),
            ancestors=words,
        )
    positions = windows.pack(places.next_positions)[:, None]
    return windows.spread(choose(logits[:, None], positions, sampling, features, context)[:, 0], empty=-1)
