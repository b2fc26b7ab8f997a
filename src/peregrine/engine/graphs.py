"""CUDA graphs of any callable: run once to warm up, captured once, then replayed. The only CUDA-graph code.

A replay repeats the captured launches on the same memory. So a callable must read its inputs from buffers that stay
where they are, and what it returned is overwritten by the next replay. All graphs share one memory pool: they run one
after the other on one stream, and their results are copied away in that stream's order. Where several ranks share a
network, each of the others records the calls that rank 0 tells it to make meanwhile: a replay is one message.
"""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

from peregrine.models.parallel import ALONE, Ranks

Result = TypeVar("Result")


class Graphs(Generic[Result]):
    """One captured graph per key. A key must name everything that changes which kernels are launched."""

    def __init__(self, device: torch.device, ranks: Ranks = ALONE) -> None:
        self.device, self.ranks = device, ranks
        self._pool = torch.cuda.graph_pool_handle()
        # torch's default capture stream belongs to the device that captured first in this process.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._recorded: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._results: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def record(self, key: Hashable, call: Callable[[], Result]) -> int:
        """Warm up and capture `call`; returns the bytes of device memory this took. `call` really runs, once."""
        before = torch.cuda.mem_get_info(self.device)[0]
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        self.ranks.tell("follower", "record", key)
        with torch.cuda.stream(self._stream):
            call()
        self.ranks.tell("follower", "end")
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = call()
        self.ranks.tell("follower", "end")
        self._recorded[key], self._results[key] = graph, result
        return max(0, before - torch.cuda.mem_get_info(self.device)[0])

    def forget(self, key: Hashable) -> None:
        """Drop what the captured call returned: its memory is free for graphs that are recorded from now on.

        A graph that reads the result and was recorded before must run right after this one.
        """
        self._results[key] = None

    def replay(self, key: Hashable) -> Result:
        """Queue the captured launches; the result, unless forgotten, is valid until the next replay of this key."""
        self.ranks.tell("follower", "replay", key)
        self._recorded[key].replay()
        result: Result = self._results[key]
        return result
