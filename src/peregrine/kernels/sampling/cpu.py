"""The choice of a token compiled for the CPU, in one call, one node per thread.

Only a token whose score plus the most noise its hash allows reaches the best sum so far has its noise computed, and
only a block of tokens with such a score is hashed at all (`noise_cpu.py`). The choice is that of adding noise
everywhere: sums are compared as the same floats, and rounding keeps their order. Scores below the lowest that filters
keep (`filters_cpu.py`) are passed over.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from peregrine.kernels.runtime.cpu import pieces_for
from peregrine.kernels.runtime.cpu_jit import bytes_at, claim, cpu_kernel, floats_at, longs_at, words_of
from peregrine.kernels.sampling.filters_cpu import (
    FIRST_KEY,
    LEAST,
    MOST,
    REST,
    SCRATCH,
    SERIAL_WORK,
    float_of_key,
    key_of_float,
    limits_of,
    lowest_of,
    scratch_for,
)
from peregrine.kernels.sampling.noise_cpu import MOST_NOISE, add_noise, hash_tokens, key_of, noise_bound, noise_of
from peregrine.kernels.sampling.params import COLDEST, Features, Masks, SamplingTensors

BLOCK = 64  # tokens that are passed over together
ONE, SLACK = np.float32(1), np.float32(2.0**-20)
COLDEST_DIVISOR = np.float32(COLDEST)


def choose(
    scores: Tensor,
    positions: Tensor,
    ids: Tensor | None,
    sampling: SamplingTensors,
    features: Features,
    checked: bool,
    out: Tensor | None = None,
) -> Tensor:
    """The token at each node: scores [R, T, V] f32 on the CPU, positions [R, T] -> [R, T] i64.

    Scores are those of token ids [V] (None: 0, 1, ...). Checked: -1 if a score is not finite; otherwise some scores
    may be -inf, and the token among scores that are not numbers is undefined. Results go to `out`, a dense [R, T],
    if given.
    """
    scores, positions = scores.contiguous(), positions.contiguous()
    num_rows, num_nodes, width = scores.shape
    tokens = torch.empty(num_rows, num_nodes, dtype=torch.int64) if out is None else out
    pieces = pieces_for(num_rows * num_nodes, scores.numel(), SERIAL_WORK)
    # Greedy rows take the best score, which every filter keeps.
    filtered = features.sampled and features.filtered
    if filtered:
        pieces = min(pieces, torch.get_num_threads())  # each has working space of several rows
    room = torch.empty(pieces, -(-width // BLOCK) + BLOCK, dtype=torch.float32)  # maxima of blocks, hashes of one
    of_rows = sampling.temperature.contiguous(), sampling.seeds.contiguous()
    limits = (*limits_of(sampling), scratch_for(pieces, width)) if filtered else (room,) * 4
    ids = None if ids is None else ids.contiguous()
    pointers = (tensor.data_ptr() for tensor in (scores, positions, tokens, room, *of_rows, *limits))
    flags = features.sampled, filtered, checked
    address = 0 if ids is None else ids.data_ptr()
    _choose_nodes(pieces, *pointers, address, num_rows, num_nodes, width, *flags)
    return tokens


def pick_scores(scores: Tensor, positions: Tensor, ids: Tensor | None, sampling: SamplingTensors) -> Tensor:
    """Scores [R, T, V] f32 on the CPU over the temperature, plus the noise of token ids [V] at positions [R, T].

    Rows at temperature 0 keep their scores.
    """
    scores, positions = scores.contiguous(), positions.contiguous()
    num_rows, num_nodes, width = scores.shape
    sums = torch.empty_like(scores)
    pieces = pieces_for(num_rows * num_nodes, scores.numel(), SERIAL_WORK)
    of_rows = sampling.temperature.contiguous(), sampling.seeds.contiguous()
    ids = None if ids is None else ids.contiguous()
    pointers = (tensor.data_ptr() for tensor in (scores, positions, sums, *of_rows))
    _pick_scores(pieces, *pointers, 0 if ids is None else ids.data_ptr(), num_rows, num_nodes, width)
    return sums


def mask(scores: Tensor, masks: Masks) -> Tensor:
    """Scores [R, T, V] f32 on the CPU with illegal tokens at -inf, in rows that have masks."""
    scores, rows, words = scores.contiguous(), masks.rows.contiguous(), masks.words.contiguous()
    num_rows, num_nodes, width = scores.shape
    masked = torch.empty_like(scores)
    pieces = pieces_for(num_rows * num_nodes, scores.numel(), SERIAL_WORK)
    pointers = (tensor.data_ptr() for tensor in (scores, rows, words, masked))
    _mask_nodes(pieces, *pointers, num_rows * num_nodes, num_nodes, width)
    return masked


@njit
def _block(start, number, width):  # type: ignore[no-untyped-def]
    """A block of the scores that start at an address."""
    return floats_at(start + number * BLOCK * 4, min(BLOCK, width - number * BLOCK))


@njit
def _survey(start, width, maxima):  # type: ignore[no-untyped-def]
    """The largest score and the largest magnitude; maxima become those of the blocks."""
    scores, size = floats_at(start, width), np.int32(0)
    for i in range(width):  # apart from the loop below: together they are not vector code
        size = max(size, np.int32(np.float32(scores[i]).view(np.int32) & REST))
    best = FIRST_KEY
    for number in range(len(maxima)):
        block, top = _block(start, number, width), FIRST_KEY
        for i in range(len(block)):
            top = max(top, key_of_float(block[i]))
        maxima[number] = float_of_key(top)
        best = max(best, top)
    return float_of_key(best), float_of_key(size)


@njit
def _find(start, width, maxima, best):  # type: ignore[no-untyped-def]
    """The first place of the best score; 0 if there is none."""
    for number in range(len(maxima)):
        if maxima[number] == best:
            block = _block(start, number, width)
            for i in range(len(block)):
                if block[i] == best:
                    return number * BLOCK + i
    return 0


@njit
def _draw(start, width, maxima, hashes, divisor, lowest, key, ids, first):  # type: ignore[no-untyped-def]
    """The place of the largest sum of score and noise, lowest on ties; `first` is that of the highest score."""
    highest = floats_at(start, width)[first] / divisor
    hash_tokens(key, ids, first, hashes, 1)
    winner, best = first, highest + noise_of(hashes[0])
    # A product stands in for each quotient. Slack covers the rounding of both and of the sums for every score that
    # can win, which is less than two MOST_NOISE below the highest.
    factor, slack = ONE / divisor, (abs(highest) + MOST_NOISE + MOST_NOISE) * SLACK
    for number in range(len(maxima)):
        top = maxima[number] / divisor
        if top < lowest or top + MOST_NOISE < best:
            continue
        block = _block(start, number, width)
        hash_tokens(key, ids, number * BLOCK, hashes, len(block))
        reach = FIRST_KEY
        for i in range(len(block)):
            reach = max(reach, key_of_float(block[i] * factor + noise_bound(hashes[i])))
        if float_of_key(reach) + slack < best:
            continue
        for i in range(len(block)):
            if block[i] * factor + noise_bound(hashes[i]) + slack < best:
                continue
            score, place = block[i] / divisor, number * BLOCK + i
            total = score + noise_of(hashes[i])
            if score >= lowest and (total > best or (total == best and place < winner)):
                winner, best = place, total
    return winner


@cpu_kernel("q" * 17)
def _choose_nodes(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    pieces, scores, ids, scratch = words[1], words[2], words[12], words[11]
    rows, nodes, width = words[13], words[14], words[15]
    sampled, filtered, checked = words[16], words[17], words[18]
    positions, tokens = longs_at(words[3], rows * nodes), longs_at(words[4], rows * nodes)
    temperature, seeds = floats_at(words[6], rows), longs_at(words[7], rows)
    top_k, top_p, log_min_p = longs_at(words[8], rows), floats_at(words[9], rows), floats_at(words[10], rows)
    num_blocks = (width + BLOCK - 1) // BLOCK
    piece = claim(words)
    while piece < pieces:
        room = words[5] + piece * (num_blocks + BLOCK) * 4
        maxima, hashes = floats_at(room, num_blocks), floats_at(room + num_blocks * 4, BLOCK)
        for place in range(piece * rows * nodes // pieces, (piece + 1) * rows * nodes // pieces):
            row, start = place // nodes, scores + place * width * 4
            best, size = _survey(start, width, maxima)
            if checked and not size < MOST:
                tokens[place] = -1
                continue
            token = _find(start, width, maxima, best)
            if sampled and temperature[row] > 0:
                divisor, lowest = max(temperature[row], COLDEST_DIVISOR), LEAST
                if filtered:
                    source, spare = floats_at(start, width), scratch + piece * width * SCRATCH
                    lowest = lowest_of(source, divisor, best / divisor, top_k[row], top_p[row], log_min_p[row], spare)
                key = key_of(seeds[row], positions[place])
                token = _draw(start, width, maxima, hashes, divisor, lowest, key, ids, token)
            tokens[place] = token if ids == 0 else longs_at(ids, width)[token]
        piece = claim(words)


@cpu_kernel("q" * 9)
def _pick_scores(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    pieces, scores, sums, ids = words[1], words[2], words[4], words[7]
    rows, nodes, width = words[8], words[9], words[10]
    positions = longs_at(words[3], rows * nodes)
    temperature, seeds = floats_at(words[5], rows), longs_at(words[6], rows)
    piece = claim(words)
    while piece < pieces:
        for place in range(piece * rows * nodes // pieces, (piece + 1) * rows * nodes // pieces):
            row, start = place // nodes, place * width * 4
            source, target = floats_at(scores + start, width), floats_at(sums + start, width)
            if temperature[row] > 0:
                key = key_of(seeds[row], positions[place])
                hash_tokens(key, ids, 0, target, width)
                add_noise(scores + start, max(temperature[row], COLDEST_DIVISOR), sums + start, width)
            else:
                target[:] = source
        piece = claim(words)


@cpu_kernel("qqqqqqq")
def _mask_nodes(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    pieces, scores, rows, masks, masked = words[1], words[2], words[3], words[4], words[5]
    places, nodes, width = words[6], words[7], words[8]
    mask_bytes = (width + 31) // 32 * 4
    piece = claim(words)
    while piece < pieces:
        for place in range(piece * places // pieces, (piece + 1) * places // pieces):
            source = floats_at(scores + place * width * 4, width)
            target = floats_at(masked + place * width * 4, width)
            bits = bytes_at(masks + place * mask_bytes, mask_bytes)
            if bytes_at(rows + place // nodes * 4, 4)[0] == 0:
                target[:] = source
            else:
                for token in range(width):
                    legal = (bits[token >> 3] >> (token & 7)) & 1
                    target[token] = source[token] if legal else LEAST
        piece = claim(words)
