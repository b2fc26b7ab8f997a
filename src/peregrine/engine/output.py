"""The values that a request returns to its user."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from peregrine.engine.stats import Stats
from peregrine.kernels.round import HEADER


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token under the model's own distribution, and the likeliest tokens there."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first
    text: str | None = None  # of the token; None if no text was asked for
    top_texts: tuple[str, ...] = ()  # of the likeliest tokens

    def to_json(self) -> dict[str, object]:
        """The fields as plain values."""
        texts = self.top_texts or (None,) * len(self.top)
        top = [{"token_id": i, "text": t, "logprob": p} for (i, p), t in zip(self.top, texts, strict=True)]
        return {"token_id": self.token_id, "text": self.text, "logprob": self.logprob, "top": top}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one request."""

    queue_s: float = 0.0  # from arrival to the first prompt chunk
    first_token_s: float = 0.0  # from arrival to the first token
    total_s: float = 0.0  # from arrival to the end
    per_token_s: float = 0.0  # after the first token, per further token


@dataclass(frozen=True, slots=True)
class Output:
    """Everything a finished request returns."""

    request_id: int
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]  # the stop token included, if one ended it
    finish_reason: str  # stop, length, abort or error
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    error: str | None = None
    seed: int = 0
    drafted: list[bool] = field(default_factory=list)  # per token: drafted and correct
    logprobs: list[TokenLogprob] | None = None
    stats: Stats = field(default_factory=Stats)
    timing: Timing = Timing()
    simulated: bool = False  # acceptance was drawn for a benchmark: the text means nothing
    prompt_logprobs: list[TokenLogprob] | None = None  # of the prompt's tokens from the second on

    def to_json(self) -> dict[str, object]:
        """The fields as plain values, without the engine's own request id."""
        fields = asdict(replace(self, logprobs=None, prompt_logprobs=None))
        del fields["request_id"]
        fields["stats"]["accept_length"] = self.stats.accept_length
        for name, logprobs in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if logprobs is not None:
                fields[name] = [entry.to_json() for entry in logprobs]
        return fields


@dataclass(frozen=True, slots=True)
class RoundDrafts:
    """Every draft of one round, for a request that asked to see them; node 0 is the round's newest token."""

    tokens: list[int]  # of nodes 1, 2, ...
    parents: list[int]  # parent node of each of them
    correct: list[int]  # the nodes that became output


class Delta(NamedTuple):
    """What one step added to one request; the last one carries the whole output.

    One is made for every row of every round, and a tuple takes a fifth of the time of a frozen dataclass.
    """

    request_id: int
    text: str = ""
    token_ids: Sequence[int] = ()
    drafted: Sequence[bool] = ()
    finish_reason: str | None = None
    output: Output | None = None
    offered: int = 0  # drafts the round offered to the target
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # with the first delta
    drafts: RoundDrafts | None = None

    def plain(self) -> "Delta":
        """The delta as one that holds all of it itself."""
        return self

    def without_last(self, count: int) -> "Delta":
        """The delta without its last `count` tokens, or as many of them as it has; its text is left alone."""
        keep = max(0, len(self.token_ids) - count)
        logprobs = None if self.logprobs is None else self.logprobs[:keep]
        return self._replace(token_ids=self.token_ids[:keep], drafted=self.drafted[:keep], logprobs=logprobs)


@cache
def draft_flags(correct: int, accept: int) -> tuple[bool, ...]:
    """Of the tokens of a round, in order, whether each was a draft."""
    return (True,) * correct + (False,) * (accept - correct)


class RoundDelta(Delta):
    """The delta of a round whose user waits for tokens alone: they are read from the verdict by who asks for them.

    In the places of the tokens and of their flags are the lines of a verdict and which of them it is.
    """

    __slots__ = ()

    def plain(self) -> Delta:
        return Delta(self.request_id, "", self.token_ids, self.drafted, offered=self.offered)

    @property
    def token_ids(self) -> Sequence[int]:
        line = self._line()
        return line[HEADER : HEADER + line[0]]

    @property
    def drafted(self) -> Sequence[bool]:
        accept, correct = self._line()[:2]
        return draft_flags(correct, accept)

    @property
    def offered(self) -> int:
        return self._line()[2]

    def _line(self) -> list[int]:
        kept: tuple[Any, ...] = self[2:4]
        line: list[int] = kept[0][kept[1]].tolist()
        return line
