"""From deltas to the choices of a response. A chunk tells what has come since the last one; a whole answer is one
chunk that tells everything, so both are written by the same code."""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from peregrine.engine.request import Delta, Output, Stats, TokenLogprob
from peregrine.serve.job import Job
from peregrine.serve.logprobs import CompletionLogprobs, chat_logprobs, token_text
from peregrine.text.tokenizer import Tokenizer

Json = dict[str, object]


class Teller(Protocol):
    """Writes the choices of one generation."""

    def piece(self, deltas: Sequence[Delta], whole: bool) -> Json:
        """The choice that tells these deltas: a chunk of a stream, or the whole of an answer."""
        ...


class CompletionTeller:
    """Choices of /v1/completions."""

    def __init__(self, job: Job, index: int, tokenizer: Tokenizer) -> None:
        prompt, params = job.generation(index)
        self._index, self._job, self._tokenizer = index, job, tokenizer
        self._echo = job.echoes[index // len(job.params)] if job.echoes is not None else ""
        self._logprobs = None
        if params.logprobs is not None:
            echoed = job.echoes is not None
            self._logprobs = CompletionLogprobs(tokenizer, prompt, echoed, params.skip_special_tokens)

    def piece(self, deltas: Sequence[Delta], whole: bool) -> Json:
        echo, self._echo = self._echo, ""
        text = "" if self._job.scores_only else "".join(delta.text for delta in deltas)
        told: Json = {"index": self._index, "text": echo + text, "logprobs": None}
        if self._logprobs is not None:
            tokens = [] if self._job.scores_only else joined_logprobs(deltas)
            told["logprobs"] = self._logprobs.tell(tokens, deltas[0].prompt_logprobs if deltas else None)
        return told | common_fields(self._job, deltas, self._tokenizer)


class ChatTeller:
    """Choices of /v1/chat/completions."""

    def __init__(self, job: Job, index: int, tokenizer: Tokenizer) -> None:
        self._index, self._job, self._tokenizer = index, job, tokenizer
        self._begun = False

    def piece(self, deltas: Sequence[Delta], whole: bool) -> Json:
        message: Json = {"content": "".join(delta.text for delta in deltas)}
        if not self._begun:
            message = {"role": "assistant", **message}
        self._begun = True
        told: Json = {"index": self._index, "message" if whole else "delta": message, "logprobs": None}
        if self._job.body.logprobs:
            told["logprobs"] = chat_logprobs(self._tokenizer, joined_logprobs(deltas))
        return told | common_fields(self._job, deltas, self._tokenizer)


def joined_logprobs(deltas: Sequence[Delta]) -> list[TokenLogprob]:
    return list(chain.from_iterable(delta.logprobs or () for delta in deltas))


def common_fields(job: Job, deltas: Sequence[Delta], tokenizer: Tokenizer) -> Json:
    """How it ended, with which seed, and how speculation went if that was asked for."""
    output = deltas[-1].output if deltas else None
    told: Json = {"finish_reason": None}
    if output is not None:
        reason = "length" if job.scores_only else output.finish_reason
        told = {"finish_reason": reason, "stop_reason": output.stop_reason, "seed": output.seed}
    if job.body.return_speculation:
        told["speculation"] = speculation_fields(deltas, output, tokenizer)
    return told


def speculation_fields(deltas: Sequence[Delta], output: Output | None, tokenizer: Tokenizer) -> Json:
    """Each token's provenance, each round's drafts, and at the end the acceptance of the whole request."""
    told: Json = {
        "tokens": [
            {"id": token, "text": token_text(tokenizer, token), "drafted": drafted}
            for delta in deltas
            for token, drafted in zip(delta.token_ids, delta.drafted, strict=True)
        ],
        "rounds": [round_fields(delta, tokenizer) for delta in deltas if delta.token_ids],
    }
    return told if output is None else {**told, "acceptance": acceptance_fields(output.stats)}


def round_fields(delta: Delta, tokenizer: Tokenizer) -> Json:
    """One round: how many tokens it brought, and its drafts as the nodes of a tree whose node 0 came before."""
    drafts: list[Json] = []
    if delta.drafts is not None:
        drafts = [
            {
                "id": token,
                "text": token_text(tokenizer, token),
                "parent": parent,
                "correct": node in delta.drafts.correct,
            }
            for node, (token, parent) in enumerate(zip(delta.drafts.tokens, delta.drafts.parents, strict=True), start=1)
        ]
    return {"num_tokens": len(delta.token_ids), "offered": delta.offered, "drafts": drafts}


def acceptance_fields(stats: Stats) -> Json:
    """How speculation went; accept_length counts the bonus token."""
    return {
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "correct": stats.correct,
        "accept_length": stats.accept_length,
        "accept_histogram": stats.accept_histogram,
    }


def usage_fields(job: Job, outputs: Sequence[Output]) -> Json:
    """Tokens read and generated; a prompt counts once, however many choices it got."""
    firsts = outputs[:: len(job.params)]
    prompt = sum(len(output.prompt_token_ids) for output in firsts)
    completion = 0 if job.scores_only else sum(len(output.token_ids) for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.stats.cached_tokens for output in firsts)},
    }
