"""Attention while another thread allocates memory, in a process whose threads share one heap.

Prints how many of its results differ from the one that was computed alone. Run with MALLOC_ARENA_MAX=1.
"""

import random
import threading

import torch

from peregrine.attention import LayerAttention
from peregrine.attention.conformance.paging import PLAIN, lay_out
from peregrine.attention.conformance.problem import Row
from peregrine.attention.numba_backend import NumbaBackend


def allocate(ended: threading.Event) -> None:
    """Take and drop pieces of memory of the sizes that attention takes, all bits set."""
    draw = random.Random(0)
    while not ended.is_set():
        held = [b"\xff" * draw.randrange(2_000, 60_000) for _ in range(20)]
        del held


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    length, queries = 900, 6
    q, k, v = (torch.randn(n, h, 64, generator=generator) for n, h in ((queries, 6), (length, 1), (length, 1)))
    past = length - queries
    row = Row(past, list(range(past, length)), None, q, k, v)
    forward, backend, layer = lay_out([row], PLAIN), NumbaBackend(), LayerAttention(0.125, None, None)
    alone = forward.run(backend, layer)[0].clone()
    ended = threading.Event()
    thread = threading.Thread(target=allocate, args=(ended,))
    thread.start()
    differ = sum(not torch.equal(forward.run(backend, layer)[0], alone) for _ in range(1500))
    ended.set()
    thread.join()
    print(differ)


if __name__ == "__main__":
    main()
