"""Where the forwards of a round read and write: places, positions and slots, for all steps at once.

The place of a token is its index within its request. Its slot is where its keys and values lie: page
table[r, place // page_size], at offset place % page_size. Its position is the one that the model encodes;
drafts past the context's end are void and only need some valid position, so positions are clamped below `max_len`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.kernels.runtime.cpu import numba_ready
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready

_cpu = DeviceFile("peregrine.kernels.round.places_cpu")
_triton = DeviceFile("peregrine.kernels.round.places_triton")


@dataclass(frozen=True, slots=True)
class WindowPlaces:
    """Where the target reads a window: node i of T lies at place past + i, its position is past + its depth."""

    past_lens: Tensor  # [R] i64, a copy: a commit moves the original
    positions: Tensor  # [R, T] i64
    next_positions: Tensor  # [R, T] i64 of the token that follows each node; not cut at max_len
    slots: Tensor  # [R * T] i64


@dataclass(frozen=True, slots=True)
class PathPlaces:
    """Where a drafter reads the W newest entries of every row, of which one is live."""

    tokens: Tensor  # [R * W] i64
    positions: Tensor  # [R, W] i64
    slots: Tensor  # [R * W] i64
    live: Tensor  # [R] i64 flat index of each row's live entry
    live_positions: Tensor  # [R, 1] i64


@dataclass(frozen=True, slots=True)
class AheadPlaces:
    """Where a drafter reads its own drafts: S = K - 1 steps of w nodes on every row."""

    base_lens: Tensor  # [R] i64 where the drafts' entries begin
    positions: Tensor  # [S, R, w] i64
    slots: Tensor  # [S, R * w] i64
    next_positions: Tensor  # [K, R, w] i64 of the tokens to be drafted; not cut at max_len


def slots_of(places: Tensor, table: Tensor, page_size: int) -> Tensor:
    """The slot of each place of each row: [R, n], [R, P] -> [R, n]."""
    pages = table.gather(1, places.div(page_size, rounding_mode="floor"))
    return pages * page_size + places % page_size


def window_places(past_lens: Tensor, depths: Tensor, table: Tensor, page_size: int, max_len: int) -> WindowPlaces:
    """Where nodes of depths [R, T] are read after past_lens [R] tokens."""
    if triton_ready(past_lens):
        return WindowPlaces(*_triton.window_places(past_lens, depths, table, page_size, max_len))
    if table.is_cpu and numba_ready():
        return WindowPlaces(*_cpu.window_places(past_lens, depths, table, page_size, max_len))
    return window_places_torch(past_lens, depths, table, page_size, max_len)


def window_places_torch(past_lens: Tensor, depths: Tensor, table: Tensor, page_size: int, max_len: int) -> WindowPlaces:
    """The torch twin of `window_places`."""
    places = past_lens[:, None] + torch.arange(depths.shape[1], device=depths.device)  # [R, T]
    positions = past_lens[:, None] + depths
    slots = slots_of(places, table, page_size).view(-1)
    return WindowPlaces(past_lens.clone(), positions.clamp(max=max_len - 1), positions + 1, slots)


def path_places(
    past_lens: Tensor,
    new_past_lens: Tensor,
    history: Tensor,
    table: Tensor,
    page_size: int,
    width: int,
    behind: int,
    max_len: int,
) -> PathPlaces:
    """Where `width` entries from past_lens [R] on are read.

    An entry's token is `behind` places after it in history [R, C]. The live entry is that of the newest token, at
    new_past_lens [R]; the first if that is not among them.
    """
    arguments = (past_lens, new_past_lens, history, table, page_size, width, behind, max_len)
    if triton_ready(table):
        return PathPlaces(*_triton.path_places(*arguments))
    if table.is_cpu and numba_ready():
        return PathPlaces(*_cpu.path_places(*arguments))
    return path_places_torch(*arguments)


def path_places_torch(
    past_lens: Tensor,
    new_past_lens: Tensor,
    history: Tensor,
    table: Tensor,
    page_size: int,
    width: int,
    behind: int,
    max_len: int,
) -> PathPlaces:
    """The torch twin of `path_places`."""
    places = past_lens[:, None] + torch.arange(width, device=table.device)  # [R, W]
    live = (new_past_lens - past_lens - behind).clamp(min=0)  # [R]
    firsts = torch.arange(0, live.shape[0] * width, width, device=table.device)
    return PathPlaces(
        tokens=history.gather(1, places + behind if behind else places).view(-1),
        positions=places.clamp(max=max_len - 1),
        slots=slots_of(places, table, page_size).view(-1),
        live=firsts + live,
        live_positions=(past_lens + live).clamp(max=max_len - 1)[:, None],
    )


def ahead_places(
    new_past_lens: Tensor, table: Tensor, page_size: int, first_place: int, depth: int, width: int, max_len: int
) -> AheadPlaces:
    """Where `depth` tokens past new_past_lens [R] are drafted, `width` nodes a step, entries from `first_place` on."""
    arguments = (new_past_lens, table, page_size, first_place, depth, width, max_len)
    if triton_ready(table):
        return AheadPlaces(*_triton.ahead_places(*arguments))
    if table.is_cpu and numba_ready():
        return AheadPlaces(*_cpu.ahead_places(*arguments))
    return ahead_places_torch(*arguments)


def ahead_places_torch(
    new_past_lens: Tensor, table: Tensor, page_size: int, first_place: int, depth: int, width: int, max_len: int
) -> AheadPlaces:
    """The torch twin of `ahead_places`."""
    num_rows, num_steps = new_past_lens.shape[0], depth - 1
    base_lens = new_past_lens + first_place
    order = torch.arange(max(depth, num_steps * width), device=table.device)
    places = base_lens[:, None] + order[: num_steps * width]  # [R, S * w]
    slots = slots_of(places, table, page_size).view(num_rows, num_steps, width).transpose(0, 1)
    steps = order[:depth, None]  # [K, 1]
    positions = (base_lens + steps[:num_steps]).clamp(max=max_len - 1)  # [S, R]
    return AheadPlaces(
        base_lens=base_lens,
        positions=positions[:, :, None].expand(-1, -1, width),
        slots=slots.reshape(num_steps, num_rows * width),
        next_positions=(new_past_lens + 1 + steps)[:, :, None].expand(-1, -1, width),
    )
