"""What a round did for its requests: from lines of its verdict to tokens, deltas, and what some asked to see."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import TypeVar

import numpy as np
from torch import Tensor

from peregrine.engine.output import Delta, RoundDelta, RoundDrafts, draft_flags
from peregrine.engine.request import Request
from peregrine.engine.round_log import Ints, RoundLog
from peregrine.kernels.round import FINISH_FAULT, FINISH_LENGTH, FINISH_NONE, FINISH_STOP, HEADER
from peregrine.log import logger

FINISH_REASONS = {FINISH_NONE: None, FINISH_STOP: "stop", FINISH_LENGTH: "length", FINISH_FAULT: "error"}
FAILED = "the engine failed on this request, and ended it alone; its log says why"
Value = TypeVar("Value")
Logprobs = tuple[Tensor, Tensor, Tensor]  # chosen [R, W], top ids and top [R, W, n], on the host


@dataclass(frozen=True, slots=True)
class RowExtras:
    """What a request asked to see of a round besides its tokens."""

    logprobs: list[tuple[float, list[int], list[float]]] | None
    drafts: RoundDrafts | None


NO_EXTRAS = RowExtras(None, None)


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What one round did for each of its requests."""

    requests: list[Request]
    table: Ints  # [R, columns] of the verdict: accept, correct, drafted, finish, then tokens and path
    extras: dict[int, RowExtras] = field(default_factory=dict)  # by id of the request

    def by_seat(self, running: list[Request]) -> "RoundResult":
        """The same, of the requests that run now; those that were no part of the round have zeros."""
        seats = np.array([-1 if request.seat is None else request.seat for request in self.requests])
        table = np.zeros((len(running), self.table.shape[1]), dtype=np.int64)
        table[seats[seats >= 0]] = self.table[seats >= 0]
        return RoundResult(running.copy(), table, self.extras)

    def lines(self, rows: list[int]) -> list[list[int]]:
        """The verdict's lines of some rows."""
        table = self.table if len(rows) == len(self.table) else self.table[rows]
        return table.tolist()  # type: ignore[no-any-return]

    def take(self, row: int, line: list[int]) -> tuple[Delta, str | None, str | int | None] | None:
        """What the round gave a request, from its line: (delta, why it ends if it does, what stopped it).

        None: it gave it nothing, or nothing that its user waits for.
        """
        request = self.requests[row]
        if not (line[0] or line[3]):
            return None
        if not (line[3] or request.is_followed):
            request.take(line, time.perf_counter())  # it is one of a few, which are not logged
            return None
        try:
            return take_line(request, line, self.extras.get(request.id, NO_EXTRAS) if self.extras else NO_EXTRAS)
        except BaseException as error:
            give_up(request, error)
            return Delta(request.id), "error", None

    def deltas(self, told: list[int], worded: list[int]) -> dict[int, Delta | None]:
        """By row, of those whose users wait for tokens alone, or for text as well; None: its text failed.

        A line of Python for each that is told tokens would take several times as long.
        """
        made: dict[int, Delta | None] = {}
        if told:
            ids, none = [self.requests[row].id for row in told], repeat(None)
            lines = self.table[:, : (HEADER + self.table.shape[1]) // 2].copy()
            fields = zip(ids, repeat(""), repeat(lines), told, none, none, repeat(0), none, none, none)
            made.update(zip(told, map(partial(tuple.__new__, RoundDelta), fields), strict=True))
        for row, line in zip(worded, self.lines(worded), strict=True) if worded else ():
            request, tokens = self.requests[row], line[HEADER : HEADER + line[0]]
            try:
                text = request.word(tokens)
            except BaseException as error:
                give_up(request, error)
                made[row] = None
            else:
                made[row] = Delta(request.id, text, tokens, draft_flags(line[1], line[0]), None, None, line[2])
        return made


def result_with_extras(
    requests: list[Request], verdict: Ints, windows: Tensor | None, logprobs: Logprobs | None
) -> RoundResult:
    """A round's result with what requests asked to see of it; grammars take their tokens, and may cut their lines."""
    lines, extras = verdict.tolist(), {}
    for row, (request, line) in enumerate(zip(requests, lines, strict=True)):
        drafts = None
        if windows is not None and request.params.report_drafts:
            path = line[(HEADER + len(line)) // 2 :]
            drafts = offered_drafts(windows[row], path[1 : line[1] + 1])
        advance_matcher(request, line)
        shown = None
        if logprobs is not None and request.params.logprobs is not None:
            shown = logprobs_on_host(logprobs, row, line[0])
        extras[request.id] = RowExtras(shown, drafts)
    return RoundResult(requests, np.array(lines), extras)


def advance_matcher(request: Request, line: list[int]) -> None:
    """Let the request's grammar take the tokens of a verdict's line; if it refuses one, the line ends before it."""
    if request.matcher is None or request.seat is None:
        return
    legal = request.matcher.advance(line[HEADER : HEADER + line[0]])
    if legal < line[0]:
        request.failure = f"the grammar ended after {request.num_generated + legal} tokens: {request.matcher.error}"
        line[0], line[1], line[3] = legal, min(line[1], legal), FINISH_FAULT


def attempt(request: Request, work: Callable[[], Value]) -> Value | None:
    """What `work` returns; None if it raises: the request has failed then, to be ended alone."""
    try:
        return work()
    except BaseException as error:
        give_up(request, error)
        return None


def give_up(request: Request, error: BaseException) -> None:
    """Note that the request has failed: by any error, such as a panic of the tokenizer, which is no Exception."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    logger.error("request %d was ended", request.id, exc_info=error)
    request.failure, request.stream = FAILED, None
    request.forget_scores()  # what its output no longer has can fail no more


def log_round(log: RoundLog, table: Ints, running: list[Request]) -> tuple[list[int], list[int], list[int]]:
    """Log a round's verdict for those that are logged. Returns three lists of rows, as `RoundLog.news` does."""
    if not log.members:
        return [], [], list(range(len(table)))
    if log.is_full:
        for request, logged in zip(running, log.take_all(len(running)), strict=True):
            if request.log is not None:
                request.add(logged)
    log.add(table)
    return log.news(table)


def take_line(request: Request, line: list[int], extras: RowExtras) -> tuple[Delta, str | None, str | int | None]:
    """See `RoundResult.take`; what is not in the log is added to the request here."""
    accept, correct, drafted, finish = line[:HEADER]
    if request.log is None:
        request.take(line, time.perf_counter())
    text, reason = "", FINISH_REASONS[finish]
    if request.stream is not None:
        text = request.add_text(silent=int(finish == FINISH_STOP))  # the stop token itself has no text
        reason = reason if request.stream.stopped is None else "stop"
    tokens, start = line[HEADER : HEADER + accept], request.num_generated - accept
    stop: str | int | None = tokens[-1] if finish == FINISH_STOP else None
    delta = Delta(request.id, text, tokens, draft_flags(correct, accept), None, None, drafted)
    if start == 0 or extras is not NO_EXTRAS:
        delta = with_extras(delta, request, extras, start)
    return delta, reason, stop


def with_extras(delta: Delta, request: Request, extras: RowExtras, start: int) -> Delta:
    """The delta with what was asked for besides tokens; the first of them is the `start`-th that was generated."""
    if extras.logprobs is not None:
        request.take_logprobs(list(delta.token_ids), extras.logprobs)
    return delta._replace(
        logprobs=None if request.params.logprobs is None else request.logprobs[start:],
        prompt_logprobs=request.prompt_logprobs() if start == 0 else None,
        drafts=extras.drafts if request.params.report_drafts else None,
    )


def last_delta(request: Request, last: Delta, reason: str, stop: str | int | None, simulated: bool) -> Delta:
    """The last delta of a request, which carries the output."""

    def made(last: Delta, reason: str, stop: str | int | None) -> Delta:
        last, reason, stop = end_text(request, last, reason, stop)
        return last._replace(finish_reason=reason, output=request.output(reason, stop, simulated))

    return attempt(request, partial(made, last, reason, stop)) or made(Delta(request.id), "error", None)


def end_text(request: Request, last: Delta, reason: str, stop: str | int | None) -> tuple[Delta, str, str | int | None]:
    """Complete the text of a request that ends: (last delta, reason, what stopped it)."""
    if request.stream is None:
        return last, reason, stop
    new, rest = request.add_text(), request.stream.finish()
    request.text, last = request.text + rest, last._replace(text=last.text + new + rest)
    if request.stream.stopped is None or reason not in ("stop", "length"):
        return last, reason, stop
    # Tokens of earlier rounds go too if the stop's text was held back since then.
    excess = request.num_generated - request.stream.num_final
    request.trim(excess)
    return last.without_last(excess), "stop", request.stream.stopped


def logprobs_on_host(copied: Logprobs, row: int, accept: int) -> list[tuple[float, list[int], list[float]]]:
    """(chosen, top ids, top values) of each of one row's accepted tokens."""
    chosen, ids, top = (values[row, :accept].tolist() for values in copied)
    return list(zip(chosen, ids, top, strict=True))


def offered_drafts(window: Tensor, correct: list[int]) -> RoundDrafts:
    """The drafts one row offered, from its window [3, T] of tokens, parents and offered flags."""
    tokens, parents, offered = window.tolist()
    count = sum(offered)  # nodes are ordered by depth, so offered ones come first
    return RoundDrafts(tokens[1 : count + 1], parents[1 : count + 1], correct)
