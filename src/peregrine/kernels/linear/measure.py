"""How fast this CPU reads a weight that lies in memory, held in float32 or in bfloat16."""

import time

import torch

from peregrine.kernels.linear.reference import pack_weight

WEIGHTS = 1 << 25  # 128 MiB in float32 and 64 MiB in bfloat16: more than caches hold, as in a model
REPEATS = 5  # the fastest counts: whatever else runs can only slow one down


def linear_seconds(held: torch.dtype, num_rows: int, num_inputs: int) -> float:
    """Seconds of one linear layer of this many rows over WEIGHTS weights."""
    weight = pack_weight(torch.ones(max(1, WEIGHTS // num_inputs), num_inputs), held=held)
    x, seconds = torch.ones(num_rows, num_inputs), []
    for _ in range(1 + REPEATS):  # the first run compiles
        start = time.perf_counter()
        weight.linear(x)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
