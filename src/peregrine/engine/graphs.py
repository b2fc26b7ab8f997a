"""Device graphs of any callable: run once to warm up, recorded once, then replayed. The only CUDA-graph code.

A replay repeats the launches of the recording on the same memory: whatever the callable reads it must read from
buffers that stay where they are, and what it returns is overwritten by the next replay. Graphs share one pool of
memory, which is sound because they run one after the other on one stream and what they return is copied away in that
stream's order.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


class Graphs(Generic[Result]):
    """One recording per key. Keys stand for all that changes which launches are made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, Result]] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def record(self, key: Hashable, call: Callable[[], Result]) -> int:
        """Warm up and record; returns the bytes of device memory it took. The call is run, so it must do no harm."""
        before = torch.cuda.mem_get_info(self.device)[0]
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = call()
        self._recorded[key] = graph, result
        return max(0, before - torch.cuda.mem_get_info(self.device)[0])

    def replay(self, key: Hashable) -> Result:
        """Queue the recorded launches; what comes back is valid until the next replay of this key."""
        graph, result = self._recorded[key]
        graph.replay()
        return result
