"""What the device must know of a request that takes a seat."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

Words = npt.NDArray[Any]  # int64 or float64


@dataclass(frozen=True, slots=True)
class SeatEntry:
    """Everything the device must know of a request that takes a seat."""

    tokens: Words  # prompt and what was generated before; the last one has no KV yet
    prompt_len: int
    limit: int  # most tokens in all, prompt included
    draft_cap: int
    stop_ids: list[int]
    min_len: int  # a stop id may not be chosen for a position below this
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition: float
    presence: float
    frequency: float
    bias: dict[int, float]
    logprobs: int | None

    def numbers(self) -> dict[str, float]:
        """What each buffer of single numbers holds for the request."""
        return {
            "past_lens": len(self.tokens) - 1,
            "prompt_lens": self.prompt_len,
            "limits": self.limit,
            "draft_caps": self.draft_cap,
            "done": False,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "log_min_p": math.log(self.min_p) if self.min_p > 0 else -math.inf,
            "repetition": self.repetition,
            "presence": self.presence,
            "frequency": self.frequency,
            "seeds": self.seed,
            "min_lens": self.min_len,
            "logprobs": -1 if self.logprobs is None else self.logprobs,
            "offered": 0,
        }

    def lists(self) -> dict[str, Sequence[float]]:
        """What the buffers with a short line for each seat begin with."""
        return {
            "window_tokens": [int(self.tokens[-1])],
            "stop_ids": self.stop_ids,
            "bias_ids": list(self.bias),
            "bias_values": list(self.bias.values()),
        }
