"""A request inside the engine."""

import time
from array import array
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from peregrine.cache.host_tier import Transfer
from peregrine.cache.prefix import Match
from peregrine.engine.host_copy import HostCopy
from peregrine.engine.output import Output, Timing, TokenLogprob
from peregrine.engine.round_log import AT_END, COUNTS, MORE, TEXT, TOKENS, Logged, RoundLog
from peregrine.engine.stats import Stats, drafted_flags, rounds_of
from peregrine.grammar import Matcher
from peregrine.kernels.round import HEADER
from peregrine.sampling import SamplingParams
from peregrine.spec.odds import Guess, RequestOdds
from peregrine.text.stream import TextStream
from peregrine.text.tokenizer import Tokenizer

FAULT = "the model's logits held NaN or inf after {count} tokens; check the checkpoint and the dtype"


class Request:
    """One user's generation: what was asked, the pages and the seat it holds, what it has produced."""

    def __init__(self, request_id: int, prompt: list[int], params: SamplingParams, seed: int, limit: int) -> None:
        self.is_watched = self.is_followed = True  # see `wait_for_end`
        self.id, self.prompt, self.params, self.seed, self.limit = request_id, prompt, params, seed, limit
        self.stream: TextStream | None = None  # None: no text was asked for
        self.text_of: Callable[[int], str] | None = None  # a token's text, for log-probabilities
        self.matcher: Matcher | None = None  # None: its text is free
        self.failure: str | None = None  # why it ends with an error
        self._tokens = list(prompt)  # the prompt, then what was generated, as far as it was taken in
        self._prompt_ids = np.array(prompt, dtype=np.int64)  # made once, in the caller's thread
        self._late = array("q")  # tokens after these, while nobody asks for them
        self._verdicts = array("q")  # of its rounds, three each: tokens, right drafts, drafts
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
        self.log: RoundLog | None = None  # while it runs, if rounds are not added to it at once
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
    def tokens(self) -> list[int]:
        """The prompt, then what was generated; for the engine's thread."""
        self.settle()
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: list[int]) -> None:
        self._tokens = tokens

    @property
    def num_tokens(self) -> int:
        """Also for other threads, which may be told of too few or too many."""
        log, seat = self.log, self.seat
        return len(self._tokens) + len(self._late) + (0 if log is None or seat is None else log.held(seat))

    @property
    def num_generated(self) -> int:
        return self.num_tokens - len(self.prompt)

    @property
    def num_unread(self) -> int:
        """Tokens to be read before the first round; the newest token is its root and is not read."""
        return self.num_tokens - 1 - self.read_len

    def ids(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """The tokens [start, end) as an array; of the prompt alone it is no copy."""
        prompt, count = self._prompt_ids[start:end], len(self.prompt)
        return prompt if end <= count else np.concatenate([prompt, np.array(self.tokens[max(start, count) : end])])

    @property
    def stats(self) -> Stats:
        """How speculation went until now."""
        self.settle()
        return Stats.of(rounds_of(self._verdicts), self.cached_tokens, self.preemptions)

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

    @property
    def waits(self) -> int:
        """What its user waits for in every round."""
        params = self.params
        if not self.is_followed:
            return AT_END
        asked = params.report_drafts or params.logprobs is not None or params.prompt_logprobs is not None
        if asked or params.stops:
            return MORE
        return TOKENS if self.stream is None else TEXT

    def add_text(self, silent: int = 0) -> str:
        """Turn new tokens into text, all but the last `silent`; returns what is final."""
        tokens, begin = self.tokens, len(self.prompt)
        new = tokens[begin + self.num_worded : len(tokens) - silent]
        self.num_worded = len(tokens) - begin
        text = "" if self.stream is None else self.stream.push(new)
        self.text += text
        return text

    def word(self, tokens: list[int]) -> str:
        """Turn the tokens of its newest round, which may be in the log alone, into text; returns what is final."""
        assert self.stream is not None
        self.num_worded += len(tokens)
        text = self.stream.push(tokens)
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

    def settle(self) -> None:
        """Take in what rounds gave it until now."""
        if self._late:
            self._tokens += self._late
            self._late = array("q")
        if self.log is not None and self.seat is not None:
            for line, now in self.log.take(self.seat):
                self.take(line, now)

    def add(self, logged: Logged) -> None:
        """Add what the log gives when it is full."""
        self._late.frombytes(logged.tokens)
        self._verdicts.frombytes(logged.verdicts)
        if self.first_token is None and logged.tokens:
            self.first_token = logged.since

    def take(self, line: list[int], now: float) -> None:
        """Add a round, from its line of the verdict."""
        self._tokens += line[HEADER : HEADER + line[0]]
        self._verdicts.extend(line[:COUNTS])
        if self.first_token is None and line[0]:
            self.first_token = now

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
        self.settle()
        rounds = rounds_of(self._verdicts)
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
