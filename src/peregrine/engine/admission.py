"""Checks a request before it is queued; each refusal names the field, the value and the remedy."""

import secrets
from collections.abc import Collection
from dataclasses import dataclass

from peregrine.engine.request import Request
from peregrine.errors import RequestError
from peregrine.grammar import GrammarCompiler, Matcher, MatcherLimits
from peregrine.kernels.sampling import Features
from peregrine.sampling import DRAWN_BITS, SamplingParams
from peregrine.spec.seat_entry import SeatEntry
from peregrine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Limits:
    """What this engine can hold for one request."""

    vocab_size: int
    max_len: int
    num_drafts: int
    nodes: int  # most of a round's window
    tree: tuple[str, str]  # auto, chain, or the shape of every round's tree; and why
    eos_ids: tuple[int, ...]

    def check_ids(self, field: str, ids: Collection[int]) -> None:
        """Refuse ids the model does not have."""
        if {int}.issuperset(map(type, ids)) and (not ids or (min(ids) >= 0 and max(ids) < self.vocab_size)):
            return  # most of them, several times faster than one by one
        bad = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < self.vocab_size]
        if bad:
            raise RequestError(field, bad[0], "is not a token id", f"ids run from 0 to {self.vocab_size - 1}")


def admit(request_id: int, prompt: list[int], params: SamplingParams, limits: Limits) -> Request:
    """A request that fits into the engine when it runs alone; RequestError if it cannot."""
    if not prompt:
        raise RequestError("prompt", prompt, "is empty", "pass at least one token")
    if len(prompt) >= limits.max_len:
        problem = f"{len(prompt)} tokens leave no room in the context of {limits.max_len}"
        raise RequestError("prompt", f"{len(prompt)} tokens", problem, f"shorten it to {limits.max_len - 1} or fewer")
    limits.check_ids("prompt", prompt)
    limits.check_ids("logit_bias", params.logit_bias)
    limits.check_ids("stop_token_ids", params.stop_token_ids)
    if params.num_drafts is not None and params.num_drafts > limits.num_drafts:
        remedy = f"use 0 to {limits.num_drafts}, or start the engine with more"
        raise RequestError("num_drafts", params.num_drafts, f"the engine drafts {limits.num_drafts} deep", remedy)
    shape, because = limits.tree
    if params.tree == "tree" and shape == "chain":
        raise RequestError("tree", "tree", f"this engine drafts chains: {because}", "use auto or chain")
    if params.tree == "chain" and shape not in ("auto", "chain"):
        remedy = "use auto or tree, or start the engine without a tree"
        raise RequestError("tree", "chain", f"this engine drafts a tree of {shape} in every round", remedy)
    if params.n != 1:
        raise RequestError("n", params.n, "a stream or a request is one generation", "use LLM.generate, or n=1")
    room = limits.max_len - len(prompt)
    if params.min_tokens > room:
        problem = f"the prompt's {len(prompt)} tokens leave room for {room} in the context of {limits.max_len}"
        raise RequestError("min_tokens", params.min_tokens, problem, f"use at most {room}")
    if params.max_tokens is not None and params.max_tokens > room:
        problem = f"the prompt's {len(prompt)} tokens and max_tokens exceed the context of {limits.max_len}"
        raise RequestError("max_tokens", params.max_tokens, problem, f"use at most {room}")
    limit = len(prompt) + (room if params.max_tokens is None else params.max_tokens)
    seed = secrets.randbits(DRAWN_BITS) if params.seed is None else params.seed
    return Request(request_id, prompt, params, seed, limit)


def seat_entry(request: Request, limits: Limits) -> SeatEntry:
    """The seat buffers' values for the request, whether it is new or was preempted."""
    params = request.params
    stop_ids = list(dict.fromkeys([*params.stop_token_ids, *(() if params.ignore_eos else limits.eos_ids)]))
    return SeatEntry(
        tokens=request.ids(0, request.num_tokens),
        prompt_len=len(request.prompt),
        limit=request.limit,
        draft_cap=limits.num_drafts if params.num_drafts is None else params.num_drafts,
        stop_ids=stop_ids,
        # A grammar's masks hold stop tokens back themselves: only they know where a text is complete.
        min_len=len(request.prompt) + params.min_tokens if params.min_tokens and request.matcher is None else 0,
        seed=request.seed,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        bias=dict(params.logit_bias),
        logprobs=params.logprobs,
    )


def matcher_of(
    params: SamplingParams, limits: Limits, grammars: GrammarCompiler | None, tokenizer: Tokenizer | None
) -> Matcher | None:
    """The beginning of the grammar that was asked for, if any."""
    constraint = params.constraint
    if constraint is None:
        return None
    if grammars is None or tokenizer is None or tokenizer.missing:
        problem = "this engine's tokens are made up for a benchmark, or it has no tokenizer"
        raise RequestError(constraint.kind, constraint.text, problem, "leave it out")
    return grammars.matcher(constraint, matcher_limits(params, limits, tokenizer.special_ids))


def matcher_limits(params: SamplingParams, limits: Limits, special_ids: frozenset[int]) -> MatcherLimits:
    """What ends a request with a grammar: the model's end tokens, and special tokens that it names itself."""
    if params.grammar_after is not None:
        limits.check_ids("grammar_after", [params.grammar_after])
    asked = frozenset(params.stop_token_ids)
    eos_ids = frozenset(limits.eos_ids)
    return MatcherLimits(eos_ids | (asked & special_ids), eos_ids | asked, params.min_tokens, params.grammar_after)


def features_of(requests: list[Request]) -> Features:
    """The union of what the requests use; a row that does not use a feature gets the same bits with it on."""
    params = [request.params for request in requests]
    asked = [p.logprobs for p in params if p.logprobs is not None]
    sampled = [p for p in params if p.temperature > 0]
    return Features(
        sampled=bool(sampled),
        filtered=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in sampled),
        penalised=any(p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty for p in params),
        biased=any(p.logit_bias for p in params),
        min_len=any(p.min_tokens for p in params),
        masked=any(request.matcher is not None for request in requests),
        logprobs=max(asked) if asked else None,
    )
