"""Threads for what a body or a response may make long: parsing, templates, tokenizing, writing JSON.

The event loop serves every client, so nothing that a client sends is worked on there for longer than a moment.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

NUM_THREADS = 4
Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


class Workers:
    """A few threads; what does not find a free one waits, and nobody else does."""

    def __init__(self, num_threads: int = NUM_THREADS, name: str = "peregrine-text") -> None:
        self._pool = ThreadPoolExecutor(num_threads, name)

    async def run(self, work: Callable[Arguments, Value], *args: Arguments.args, **options: Arguments.kwargs) -> Value:
        """Call a function in one of the threads, and wait for its result without holding the event loop."""

        def guarded() -> Value:
            try:
                return work(*args, **options)
            except Exception:
                raise
            except BaseException as error:  # a panic in a Rust library; it must end nothing but this request
                raise RuntimeError(f"{type(error).__name__} in a library") from error

        return await asyncio.get_running_loop().run_in_executor(self._pool, guarded)

    def close(self) -> None:
        """Drop what has not begun; does not wait for what has."""
        self._pool.shutdown(wait=False, cancel_futures=True)
