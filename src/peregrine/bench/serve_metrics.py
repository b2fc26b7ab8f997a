"""The arithmetic of a serving benchmark, with the definitions of `vllm bench serve`.

send          first chunk       chunk        last chunk
 |---- TTFT ------|---- ITL ------|---- ITL ------|
 |------------------- latency --------------------|        TPOT = (latency - TTFT) / (output tokens - 1)
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 99)
Figures = dict[str, float] | None


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request as its client saw it; times are seconds of the client's clock."""

    sent: float
    times: tuple[float, ...]  # when each chunk came
    output_tokens: int
    prompt_tokens: int | None
    from_usage: bool  # output_tokens is the server's own count; else chunks were counted
    connect_s: float
    error: str | None = None

    @staticmethod
    def failed(sent: float, error: str) -> "Exchange":
        """A request that was not answered completely."""
        return Exchange(sent, (), 0, None, False, 0.0, error)

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent

    @property
    def latency_s(self) -> float:
        return self.times[-1] - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds for a good request, in milliseconds; None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def given(self) -> dict[str, float]:
        """The limits that are set."""
        limits = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def kept_by(self, exchange: Exchange) -> bool:
        """Whether a completed request was good; a single token has no TPOT and keeps any limit on it."""
        seen = {"ttft_ms": exchange.ttft_s * 1e3, "tpot_ms": (exchange.tpot_s or 0.0) * 1e3}
        return all(seen[name] <= limit for name, limit in self.given().items())


def summarise(exchanges: Sequence[Exchange], seconds: float, limits: Limits) -> dict[str, object]:
    """All figures of one case; rates are per second of the whole case, and no rate or latency includes failures."""
    done = [exchange for exchange in exchanges if exchange.error is None]
    errors = Counter(exchange.error for exchange in exchanges if exchange.error is not None)
    output_tokens = sum(exchange.output_tokens for exchange in done)
    prompt_tokens = [e.prompt_tokens for e in done if e.prompt_tokens is not None]
    good = sum(limits.kept_by(exchange) for exchange in done)
    return {
        "completed": len(done),
        "failed": len(exchanges) - len(done),
        "errors": dict(errors.most_common()),
        "seconds": seconds,
        "prompt_tokens": sum(prompt_tokens) if prompt_tokens else None,
        "output_tokens": output_tokens,
        "tokens_from": "usage" if all(exchange.from_usage for exchange in done) else "chunks",
        "requests_per_s": len(done) / seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "good_requests_per_s": good / seconds if limits.given() else None,
        "good_share": good / len(exchanges) if limits.given() and exchanges else None,
        "ttft_ms": figures([exchange.ttft_s for exchange in done]),
        "tpot_ms": figures([exchange.tpot_s for exchange in done if exchange.tpot_s is not None]),
        "itl_ms": figures([gap for exchange in done for gap in exchange.gaps_s]),
        "e2e_ms": figures([exchange.latency_s for exchange in done]),
        "connect_ms": figures([exchange.connect_s for exchange in done]),
    }


def figures(seconds: Sequence[float]) -> Figures:
    """Mean and percentiles in milliseconds, interpolated linearly; None if there are no values."""
    if not seconds:
        return None
    places = np.percentile(seconds, PERCENTILES)
    named = {f"p{place}": float(value) * 1e3 for place, value in zip(PERCENTILES, places, strict=True)}
    return {"mean": float(np.mean(seconds)) * 1e3, **named}
