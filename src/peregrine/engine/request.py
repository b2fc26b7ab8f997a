"""A request inside the engine, and the values that it returns to its user."""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from peregrine.cache.host_tier import Transfer
from peregrine.cache.prefix import Match
from peregrine.engine.host_copy import HostCopy
from peregrine.engine.stats import Stats, drafted_flags, rounds_of
from peregrine.grammar import Matcher
from peregrine.kernels.round import HEADER
from peregrine.sampling import SamplingParams
from peregrine.spec.odds import Guess, RequestOdds
from peregrine.text.stream import TextStream
from peregrine.text.tokenizer import Tokenizer

FAULT = "the model's logits held NaN or inf after {count} tokens; check the checkpoint and the dtype"


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

    def without_last(self, count: int) -> "Delta":
        """The delta without its last `count` tokens, or as many of them as it has; its text is left alone."""
        keep = max(0, len(self.token_ids) - count)
        logprobs = None if self.logprobs is None else self.logprobs[:keep]
        return self._replace(token_ids=self.token_ids[:keep], drafted=self.drafted[:keep], logprobs=logprobs)


class Request:
    """One user's generation: what was asked, the pages and the seat it holds, what it has produced."""

    def __init__(self, request_id: int, prompt: list[int], params: SamplingParams, seed: int, limit: int) -> None:
        self.is_watched = self.is_followed = True  # see `wait_for_end`
        self.id, self.prompt, self.params, self.seed, self.limit = request_id, prompt, params, seed, limit
        self.stream: TextStream | None = None  # None: no text was asked for
        self.text_of: Callable[[int], str] | None = None  # a token's text, for log-probabilities
        self.matcher: Matcher | None = None  # None: its text is free
        self.failure: str | None = None  # why it ends with an error
        self.tokens = list(prompt)  # the prompt, then what was generated
        self._prompt_ids = np.array(prompt, dtype=np.int64)  # made once, in the caller's thread
        self.verdicts: list[int] = []  # of its rounds, three each: tokens, right drafts, drafts
        self.logprobs: list[TokenLogprob] = []
        self.scores: list[HostCopy] = []  # log-probabilities of prompt tokens, by chunk
        self.num_scored = 0
        self.text, self.num_worded = "", 0  # and how many generated tokens it is of
        self.cached_tokens = self.preemptions = 0
        self.match: Match | None = None  # the locked prefix while the request holds pages
        self.arriving: Transfer | None = None  # pages after the match that are being copied from the host
        self.pages = array("q")  # in order of place, matched ones first
        self.read_len = 0  # tokens whose KV exists, while the request is in prefill
        self.seat: int | None = None  # while it runs
        self.round_before = 0  # number of the last round that was launched before it took its seat
        self.guesses: list[Guess] = []  # the drafts of its window, for the planner of windows
        self.ranked: list[tuple[list[int], list[float]]] = []  # the likeliest tokens of each of their steps
        self.odds = RequestOdds()
        self.missed: int | None = None  # place of the first token that the drafter has not absorbed
        self.order = 0  # of admission; the last one admitted is preempted first
        self.arrived = time.perf_counter()
        self.started: float | None = None
        self.first_token: float | None = None

    @property
    def num_missed(self) -> int:
        """Tokens before the newest that the drafter has not absorbed."""
        return 0 if self.missed is None else self.num_tokens - 1 - self.missed

    def settle_missed(self, skips: bool) -> None:
        """Before the prompt is read: the drafter skips it, or reads what it missed of a cached prefix as well."""
        if skips:
            self.missed = self.read_len if self.missed is None else self.missed
        elif self.missed is not None and self.arriving is None:
            self.read_len, self.missed = self.missed, None

    @property
    def generated(self) -> list[int]:
        """A copy of the generated tokens."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def num_unread(self) -> int:
        """Tokens to be read before the first round; the newest token is its root and is not read."""
        return len(self.tokens) - 1 - self.read_len

    def ids(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """The tokens [start, end) as an array; of the prompt alone it is no copy."""
        prompt, count = self._prompt_ids[start:end], len(self.prompt)
        return prompt if end <= count else np.concatenate([prompt, np.array(self.tokens[max(start, count) : end])])

    @property
    def stats(self) -> Stats:
        """How speculation went until now."""
        return Stats.of(rounds_of(self.verdicts), self.cached_tokens, self.preemptions)

    @property
    def wants_scores(self) -> bool:
        """Whether log-probabilities of the prompt were asked for and are not complete."""
        return self.params.prompt_logprobs is not None and self.num_scored < len(self.prompt) - 1

    def make_text(self, tokenizer: Tokenizer) -> None:
        """Turn its tokens into text from now on."""
        params, self.text_of = self.params, tokenizer.token_text
        self.stream = TextStream(
            tokenizer, self.prompt, params.stops, skip_special=params.skip_special_tokens, min_tokens=params.min_tokens
        )

    def wait_for_end(self) -> None:
        """Nobody watches its tokens come; each is followed, handled as it comes, only if something depends on it."""
        self.is_watched, self.is_followed = False, bool(self.params.stops) or self.params.logprobs is not None

    def add_text(self, silent: int = 0) -> str:
        """Turn new tokens into text, all but the last `silent`; returns what is final."""
        new = self.tokens[len(self.prompt) + self.num_worded : len(self.tokens) - silent]
        self.num_worded = self.num_generated
        text = "" if self.stream is None else self.stream.push(new)
        self.text += text
        return text

    def begin(self, order: int) -> None:
        """Note that the request was admitted: it has pages and goes into prefill."""
        self.order = order
        if self.started is None:
            self.started = time.perf_counter()
            self.cached_tokens = self.read_len

    def arrive(self, num_tokens: int) -> None:
        """Note that the KV of the next `num_tokens` tokens has arrived from the host."""
        self.arriving = None
        self.read_len += num_tokens
        if not self.preemptions:
            self.cached_tokens = self.read_len

    def take(self, line: list[int]) -> list[int]:
        """Add the tokens of one round, from its line of the verdict. This is done for every row of every round."""
        tokens = line[HEADER : HEADER + line[0]]
        self.tokens += tokens
        self.verdicts += line[:3]
        if self.first_token is None and tokens:
            self.first_token = time.perf_counter()
        return tokens

    def take_logprobs(self, tokens: list[int], lines: list[tuple[float, list[int], list[float]]]) -> None:
        """Add the log-probabilities of one round's tokens: the chosen one's, and the likeliest as far as asked for."""
        count = self.params.logprobs
        if count is not None:
            for token, (chosen, ids, top) in zip(tokens, lines, strict=True):
                self.logprobs.append(self.logprob(token, chosen, ids[:count], top[:count]))

    def trim(self, count: int) -> None:
        """Drop the last `count` tokens, which lie past a stop string."""
        keep = self.num_generated - count
        del self.tokens[len(self.prompt) + keep :], self.logprobs[keep:]

    def add_scores(self, chosen: Tensor, top_ids: Tensor, top: Tensor) -> None:
        """Add log-probabilities of the next prompt tokens, [n], [n, top], [n, top]; the host does not wait for them."""
        self.scores.append(HostCopy.of(chosen, top_ids, top))
        self.num_scored += len(chosen)

    def forget_scores(self) -> None:
        """Drop the prompt's log-probabilities: it will be read from its beginning again."""
        self.scores, self.num_scored = [], 0

    def prompt_logprobs(self) -> list[TokenLogprob] | None:
        """The prompt's log-probabilities computed so far, if asked for; waits only before the first round is read."""
        if self.params.prompt_logprobs is None:
            return None
        parts = [[values.tolist() for values in copy.read()] for copy in self.scores]
        lines = [line for part in parts for line in zip(*part, strict=True)]
        return [self.logprob(token, *line) for token, line in zip(self.prompt[1:], lines, strict=False)]

    def logprob(self, token: int, chosen: float, ids: list[int], top: list[float]) -> TokenLogprob:
        """A token's log-probability and the likeliest tokens, with their texts."""
        pairs = tuple(zip(ids, top, strict=True))
        if self.text_of is None:
            return TokenLogprob(token, chosen, pairs)
        return TokenLogprob(token, chosen, pairs, self.text_of(token), tuple(map(self.text_of, ids)))

    def output(self, reason: str, stop: str | int | None, simulated: bool) -> Output:
        """Everything there is to say at the end."""
        rounds = rounds_of(self.verdicts)
        return Output(
            request_id=self.id,
            prompt_token_ids=self.prompt,
            text=self.text,
            token_ids=self.generated,
            finish_reason=reason,
            stop_reason=stop,
            error=self.failure or FAULT.format(count=self.num_generated) if reason == "error" else None,
            seed=self.seed,
            drafted=drafted_flags(rounds)[: self.num_generated],
            logprobs=list(self.logprobs) if self.params.logprobs is not None else None,
            stats=Stats.of(rounds, self.cached_tokens, self.preemptions),
            timing=self.timing(),
            simulated=simulated,
            prompt_logprobs=self.prompt_logprobs(),
        )

    def timing(self) -> Timing:
        """Where the time went until now."""
        now = time.perf_counter()
        first = self.first_token or now
        more = max(1, self.num_generated - 1)
        started = self.started or now
        return Timing(started - self.arrived, first - self.arrived, now - self.arrived, (now - first) / more)
