"""A request on its way through the engine, and what comes back of it."""

import time
from dataclasses import dataclass, field

from torch import Tensor

from peregrine.cache.prefix import Match
from peregrine.engine.host_copy import HostCopy
from peregrine.sampling import SamplingParams
from peregrine.text.stream import TextStream


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token under the model's own distribution, and the likeliest tokens there."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first


@dataclass(slots=True)
class Stats:
    """How speculation went. A round's acceptance counts its bonus token; correct drafts do not count it."""

    rounds: int = 0
    drafted: int = 0  # guesses offered to the target (tree nodes counted)
    correct: int = 0  # guesses that became output
    accepted: int = 0  # tokens that came out of rounds, bonus included
    accept_histogram: list[int] = field(default_factory=list)  # rounds by number of correct drafts
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    preemptions: int = 0

    @property
    def accept_length(self) -> float:
        """Tokens per round, bonus included."""
        return self.accepted / self.rounds if self.rounds else 0.0

    def count(self, drafted: int, correct: int, accepted: int) -> None:
        """Add one round that produced something."""
        self.rounds += 1
        self.drafted += drafted
        self.correct += correct
        self.accepted += accepted
        if correct >= len(self.accept_histogram):
            self.accept_histogram.extend([0] * (correct + 1 - len(self.accept_histogram)))
        self.accept_histogram[correct] += 1


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one request."""

    queue_s: float  # from arrival to the first prompt chunk
    first_token_s: float  # from arrival to the first token
    total_s: float  # from arrival to the end
    per_token_s: float  # after the first token, per further token


@dataclass(frozen=True, slots=True)
class Output:
    """Everything a finished request has to show."""

    request_id: int
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]  # the stop token included, if one ended it
    finish_reason: str  # stop, length, abort or error
    stop_reason: str | int | None  # the stop string or token id that ended it
    error: str | None
    seed: int
    drafted: list[bool]  # per token: guessed by the drafter and correct
    logprobs: list[TokenLogprob] | None
    stats: Stats
    timing: Timing
    simulated: bool  # acceptance was drawn, not earned: the text means nothing
    prompt_logprobs: list[TokenLogprob] | None = None  # of the prompt's tokens from the second on

    def to_json(self) -> dict[str, object]:
        """The same fields as plain values."""
        stats, timing = self.stats, self.timing
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_token_ids": self.prompt_token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "error": self.error,
            "seed": self.seed,
            "drafted": self.drafted,
            "logprobs": _plain(self.logprobs),
            "prompt_logprobs": _plain(self.prompt_logprobs),
            "stats": {
                "rounds": stats.rounds,
                "drafted": stats.drafted,
                "correct": stats.correct,
                "accept_length": stats.accept_length,
                "accept_histogram": stats.accept_histogram,
                "cached_tokens": stats.cached_tokens,
                "preemptions": stats.preemptions,
            },
            "timing": {
                "queue_s": timing.queue_s,
                "first_token_s": timing.first_token_s,
                "total_s": timing.total_s,
                "per_token_s": timing.per_token_s,
            },
            "simulated": self.simulated,
        }


def _plain(logprobs: list[TokenLogprob] | None) -> list[dict[str, object]] | None:
    if logprobs is None:
        return None
    return [{"token_id": t.token_id, "logprob": t.logprob, "top": dict(t.top)} for t in logprobs]


@dataclass(frozen=True, slots=True)
class RoundDrafts:
    """Every draft of one round, for a request that asked to see them; node 0 is the round's newest token."""

    tokens: list[int]  # of nodes 1, 2, ...
    parents: list[int]  # the node each of them hangs from
    correct: list[int]  # the nodes that became output


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one request; the last one carries the whole output."""

    request_id: int
    text: str
    token_ids: list[int]
    drafted: list[bool]
    finish_reason: str | None
    output: Output | None
    offered: int = 0  # drafts the round offered to the target
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # with the first delta
    drafts: RoundDrafts | None = None


class Request:
    """One user's generation: what was asked, what it holds, what it has produced."""

    def __init__(self, request_id: int, prompt: list[int], params: SamplingParams, seed: int, limit: int) -> None:
        self.id, self.prompt, self.params, self.seed, self.limit = request_id, prompt, params, seed, limit
        self.stream: TextStream | None = None  # without a tokenizer there is no text
        self.generated: list[int] = []  # as the device has them
        self.drafted: list[bool] = []
        self.logprobs: list[TokenLogprob] = []
        self.scores: list[HostCopy] = []  # of prompt tokens, in stretches as read
        self.num_scored = 0
        self.text = ""
        self.stats = Stats()
        self.match: Match | None = None  # locked prefix, while it is being held
        self.pages: list[int] = []  # in order of place, matched ones first
        self.read_len = 0  # prompt (or replayed) tokens whose KV exists
        self.rounds_in_flight = 0
        self.seat: int | None = None  # while it runs
        self.turn = 0  # order of admission; the youngest is put back first
        self.arrived = time.perf_counter()
        self.started: float | None = None
        self.first_token: float | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def wants_scores(self) -> bool:
        """Log-probabilities of the prompt were asked for and are not complete."""
        return self.params.prompt_logprobs is not None and self.num_scored < len(self.prompt) - 1

    def begin(self, turn: int) -> None:
        """The request has pages and is being read."""
        self.turn = turn
        if self.started is None:
            self.started = time.perf_counter()
            self.stats.cached_tokens = self.read_len

    def take(self, tokens: list[int], correct: int, drafted: int) -> None:
        """Add what one round brought."""
        if tokens and self.first_token is None:
            self.first_token = time.perf_counter()
        self.generated.extend(tokens)
        self.drafted += [True] * min(correct, len(tokens)) + [False] * (len(tokens) - correct)
        self.stats.count(drafted, correct, len(tokens))

    def add_scores(self, chosen: Tensor, top_ids: Tensor, top: Tensor) -> None:
        """Log-probabilities of the next prompt tokens, [n], [n, top], [n, top]; the host does not wait for them."""
        self.scores.append(HostCopy.of(chosen, top_ids, top))
        self.num_scored += len(chosen)

    def forget_scores(self) -> None:
        """The prompt is read from its beginning again."""
        self.scores, self.num_scored = [], 0

    def prompt_logprobs(self) -> list[TokenLogprob] | None:
        """What was asked for of the prompt's tokens and has been computed; after a round has been read, no wait."""
        if self.params.prompt_logprobs is None:
            return None
        parts = [[values.tolist() for values in copies.read()] for copies in self.scores]
        lines = [line for part in parts for line in zip(*part, strict=True)]
        return [
            TokenLogprob(token, chosen, tuple(zip(ids, top, strict=True)))
            for token, (chosen, ids, top) in zip(self.prompt[1:], lines, strict=False)
        ]

    def trim(self, count: int) -> None:
        """Forget the last `count` tokens: they lie past a stop string."""
        keep = len(self.generated) - count
        del self.generated[keep:], self.drafted[keep:], self.logprobs[keep:]

    def timing(self) -> Timing:
        """Where the time went until now."""
        now = time.perf_counter()
        first = self.first_token or now
        more = max(1, len(self.generated) - 1)
        started = self.started or now
        return Timing(started - self.arrived, first - self.arrived, now - self.arrived, (now - first) / more)
