"""The shape of one forward: how many query tokens each row has. Kernels are chosen by it, not by phase."""

from collections.abc import Sequence
from dataclasses import dataclass

from peregrine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Window:
    """How many query tokens each row has in one forward; known to the host, so shapes never wait for the device."""

    num_rows: int
    num_tokens: int
    max_q_len: int
    q_len: int | None  # the length all rows share; None when rows differ

    @classmethod
    def uniform(cls, rows: int, q_len: int) -> "Window":
        """A window of `rows` rows with `q_len` tokens each."""
        if rows < 1 or q_len < 1:
            raise ConfigError(f"window of {rows} rows x {q_len} tokens: both must be at least 1")
        return cls(num_rows=rows, num_tokens=rows * q_len, max_q_len=q_len, q_len=q_len)

    @classmethod
    def ragged(cls, lens: Sequence[int]) -> "Window":
        """A window whose row r has `lens[r]` tokens; equal lengths make it a uniform one."""
        if not lens or min(lens) < 1:
            raise ConfigError(f"window lengths {list(lens)}: at least one row, each with at least 1 token")
        shared = lens[0] if min(lens) == max(lens) else None
        return cls(num_rows=len(lens), num_tokens=sum(lens), max_q_len=max(lens), q_len=shared)
