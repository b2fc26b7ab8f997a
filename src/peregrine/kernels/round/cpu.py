"""The verdict and the drafts that are kept, compiled for the CPU.

A verdict is one pass over a row, where the torch twin needs some sixty small operations.
"""

import torch
from torch import Tensor

from peregrine.kernels.round.gate import Gate
from peregrine.kernels.round.verdict import FINISH_FAULT, FINISH_LENGTH, FINISH_NONE, FINISH_STOP, HEADER, Ends, Nodes
from peregrine.kernels.runtime.cpu import CLOSED
from peregrine.kernels.runtime.cpu_jit import (
    arguments_of,
    bytes_at,
    claim,
    cpu_kernel,
    doubles_at,
    floats_at,
    longs_at,
    words_of,
)


def commit(choices: Tensor, nodes: Nodes, ends: Ends, history: Tensor, depth: int) -> Tensor:
    """The verdict's table [R, HEADER + 2 W]; history, past lengths, done flags and roots are written in place."""
    num_rows, num_nodes = choices.shape
    table = torch.empty(num_rows, HEADER + 2 * (depth + 1), dtype=torch.int64)
    rows = (choices, nodes.tokens, nodes.parents, nodes.depths, nodes.ancestors, ends.stop_ids, history)
    lines = (nodes.offered, ends.past_lens, ends.limits, ends.done)
    _commit(
        1,
        *(x.data_ptr() for x in rows),
        *(x.stride(0) for x in rows),
        *(x.data_ptr() for x in lines),
        *(table.data_ptr(), num_rows, num_nodes, depth + 1, ends.stop_ids.shape[1]),
    )
    return table


def keep_drafts(window_tokens: Tensor, offered: Tensor, caps: Tensor, tokens: Tensor, depth: int) -> None:
    """See `drafts.py`: drafts of a chain, as many for every row."""
    num_rows, num_drafts = tokens.shape
    if window_tokens.shape != (num_rows, 1 + num_drafts):
        raise ValueError(f"windows have shape {tuple(window_tokens.shape)}, drafts have {tuple(tokens.shape)}")
    pointers = (x.data_ptr() for x in (window_tokens, offered, caps, tokens))
    _keep(1, *pointers, window_tokens.stride(0), *tokens.stride(), num_rows, num_drafts, depth)


@cpu_kernel("q" * 10)
def _keep(block):  # type: ignore[no-untyped-def]
    windows, offered, caps, drafts, pitch, row_pitch, step_pitch, rows, count, depth = arguments_of(block, 10)
    if claim(words_of(block)) != 0:
        return
    for r in range(rows):
        window = longs_at(windows + r * pitch * 8, 1 + count)
        for i in range(count):
            window[1 + i] = longs_at(drafts + (r * row_pitch + i * step_pitch) * 8, 1)[0]
        longs_at(offered, rows)[r] = min(longs_at(caps, rows)[r], depth)


def pass_gate(gate: Gate, depth: int, chance: Tensor, offered: Tensor, caps: Tensor) -> None:
    """See `gate.py`."""
    memory = gate.words, gate.state, gate.passed, chance, offered, caps
    _gate(1, *(x.data_ptr() for x in memory), depth, gate.depth, gate.num_edges, gate.num_levels)


@cpu_kernel("q" * 10)
def _gate(block):  # type: ignore[no-untyped-def]
    words, states, passed, chance, offered, caps, depth, most, edges, levels = arguments_of(block, 10)
    chances, least = edges, edges + levels * (edges + 1)
    spent = least + most
    rule, state, told = doubles_at(words, spent + most + 1), doubles_at(states, 3), doubles_at(passed, 1 + most)
    if depth == 0:
        state[0], state[1], state[2] = 1.0, 0.0, 0.0
        longs_at(offered, 1)[0] = 0
    elif told[0] < depth or state[0] <= rule[least + depth - 1]:
        return  # it was closed before: all calls are being recorded
    said = floats_at(chance, 1)[0]
    place = 0
    while place < edges and rule[place] <= said:
        place += 1
    state[0] *= rule[chances + min(depth, levels - 1) * (edges + 1) + place]
    state[1] += state[0]
    told[0], told[1 + depth] = depth + 1, said
    if state[1] - rule[spent + depth + 1] > state[2]:
        state[2] = state[1] - rule[spent + depth + 1]
        longs_at(offered, 1)[0] = min(longs_at(caps, 1)[0], depth + 1)
    if state[0] <= rule[least + depth]:
        longs_at(words_of(block)[0], 1)[0] = CLOSED


@cpu_kernel("q" * 23)
def _commit(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    offered, past_lens, limits, done = words[16], words[17], words[18], words[19]
    table, rows, num_nodes, width, num_stops = words[20], words[21], words[22], words[23], words[24]
    if claim(words) != 0:
        return
    for r in range(rows):
        choices = longs_at(words[2] + r * words[9] * 8, num_nodes)
        tokens = longs_at(words[3] + r * words[10] * 8, num_nodes)
        parents = longs_at(words[4] + r * words[11] * 8, num_nodes)
        depths = longs_at(words[5] + r * words[12] * 8, num_nodes)
        ancestors = longs_at(words[6] + r * words[13] * 8, num_nodes)
        stops = longs_at(words[7] + r * words[14] * 8, num_stops)
        out = longs_at(table + r * (HEADER + 2 * width) * 8, HEADER + 2 * width)
        deepest = longs_at(offered, rows)[r]
        past = longs_at(past_lens, rows)[r]
        ended = bytes_at(done, rows)[r] != 0
        room = longs_at(limits, rows)[r] - past - 1

        bits, drafted = 1, 0
        for i in range(1, num_nodes):
            if depths[i] <= deepest:
                drafted += 1
                if tokens[i] == choices[parents[i]]:
                    bits |= 1 << i
        length, spare = 0, 0
        for i in range(num_nodes):
            if ancestors[i] & bits == ancestors[i]:
                if length < width:
                    out[HEADER + width + length] = i
                length += 1
        for i in range(num_nodes):  # the rest of the path is the other nodes, in order
            if ancestors[i] & bits != ancestors[i] and length + spare < width:
                out[HEADER + width + length + spare] = i
                spare += 1

        finish, accept = FINISH_NONE, length
        for place in range(width):
            token = choices[out[HEADER + width + place]]
            out[HEADER + place] = max(token, 0)
            if place < length and finish == FINISH_NONE:
                if token < 0:
                    finish, accept = FINISH_FAULT, place  # a fault has no token
                else:
                    for s in range(num_stops):
                        if stops[s] == token:
                            finish, accept = FINISH_STOP, place + 1
        if accept > room or (accept == room and finish != FINISH_STOP):
            finish, accept = FINISH_LENGTH, min(accept, room)
        if ended:
            finish, accept, drafted = FINISH_NONE, 0, 0
        out[0], out[1], out[2], out[3] = accept, min(length - 1, accept), drafted, finish

        text = longs_at(words[8] + r * words[15] * 8, past + 1 + width)
        for place in range(width):
            text[past + 1 + place] = out[HEADER + place]
        tokens[0] = text[past + accept]
        longs_at(past_lens, rows)[r] = past + accept
        if finish != FINISH_NONE:
            bytes_at(done, rows)[r] = 1
