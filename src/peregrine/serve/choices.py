"""From deltas to the choices of a response.

A chunk of a stream covers what has come since the last one; a whole response is one chunk that covers everything, so
both are written by the same code.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain

from peregrine.engine.output import Delta, Output, TokenLogprob
from peregrine.engine.stats import Stats
from peregrine.serve.job import Job
from peregrine.serve.logprobs import CompletionLogprobs, chat_logprobs
from peregrine.serve.tools import AnswerStream
from peregrine.text.tokenizer import Tokenizer

Json = dict[str, object]


class ChoiceWriter(ABC):
    """Writes the choices of one generation."""

    def __init__(self, job: Job, index: int, tokenizer: Tokenizer) -> None:
        self.job, self.index, self.tokenizer = job, index, tokenizer

    def write(self, deltas: Sequence[Delta], whole: bool) -> Json:
        """The choice that covers these deltas: of a whole response, or of a chunk."""
        output = deltas[-1].output
        choice: Json = {"index": self.index, **self.content(deltas, whole), "finish_reason": None}
        if output is not None:
            choice["finish_reason"] = self.ending(output)
            choice |= {"stop_reason": output.stop_reason, "seed": output.seed}
        if self.job.body.return_speculation:
            choice["speculation"] = speculation_fields(deltas, output, self.tokenizer)
        return choice

    def ending(self, output: Output) -> str:
        """Why the generation ended, after its last text."""
        return "length" if self.job.scores_only else output.finish_reason

    @abstractmethod
    def content(self, deltas: Sequence[Delta], whole: bool) -> Json:
        """The text of these deltas and its `logprobs`, as this endpoint names them."""


class CompletionWriter(ChoiceWriter):
    """Choices of /v1/completions."""

    def __init__(self, job: Job, index: int, tokenizer: Tokenizer) -> None:
        super().__init__(job, index, tokenizer)
        prompt, params = job.generation(index)
        self._echo = job.echoes[index // len(job.params)] if job.echoes is not None else ""
        self._logprobs = None
        if params.logprobs is not None:
            echoed = job.echoes is not None
            self._logprobs = CompletionLogprobs(tokenizer, prompt, echoed, params.skip_special_tokens)

    def content(self, deltas: Sequence[Delta], whole: bool) -> Json:
        echo, self._echo = self._echo, ""  # the first chunk begins with it
        text, logprobs = "" if self.job.scores_only else joined_text(deltas), None
        if self._logprobs is not None:
            tokens = [] if self.job.scores_only else joined_logprobs(deltas)
            logprobs = self._logprobs.fields(tokens, deltas[0].prompt_logprobs)
        return {"text": echo + text, "logprobs": logprobs}


class ChatWriter(ChoiceWriter):
    """Choices of /v1/chat/completions."""

    def __init__(self, job: Job, index: int, tokenizer: Tokenizer) -> None:
        super().__init__(job, index, tokenizer)
        self._answer = AnswerStream(job.tools, job.thinks, job.opened, job.harmony)
        self._begun = False

    def ending(self, output: Output) -> str:
        calls = self._answer.num_calls and output.finish_reason == "stop"
        return "tool_calls" if calls else super().ending(output)

    def content(self, deltas: Sequence[Delta], whole: bool) -> Json:
        role = {} if self._begun else {"role": "assistant"}  # the first chunk names it
        self._begun = True
        fields = self._answer.fields(joined_text(deltas), deltas[-1].output is not None, whole)
        return {
            "message" if whole else "delta": {**role, **fields},
            "logprobs": chat_logprobs(self.tokenizer, joined_logprobs(deltas)) if self.job.body.logprobs else None,
        }


def joined_text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def joined_logprobs(deltas: Sequence[Delta]) -> list[TokenLogprob]:
    return list(chain.from_iterable(delta.logprobs or () for delta in deltas))


def speculation_fields(deltas: Sequence[Delta], output: Output | None, tokenizer: Tokenizer) -> Json:
    """Which tokens were drafted, each round's drafts, and with the last chunk the acceptance of the whole request."""
    written: Json = {
        "tokens": [
            {**token_fields(token, tokenizer), "drafted": drafted}
            for delta in deltas
            for token, drafted in zip(delta.token_ids, delta.drafted, strict=True)
        ],
        "rounds": [round_fields(delta, tokenizer) for delta in deltas if delta.token_ids],
    }
    return written if output is None else {**written, "acceptance": acceptance_fields(output.stats)}


def token_fields(token: int, tokenizer: Tokenizer) -> Json:
    return {"id": token, "text": tokenizer.token_text(token)}


def round_fields(delta: Delta, tokenizer: Tokenizer) -> Json:
    """One round: its number of tokens, and its drafts as nodes 1, 2, ... of a tree; node 0 is the token before."""
    drafts: list[Json] = []
    if delta.drafts is not None:
        drafts = [
            {**token_fields(token, tokenizer), "parent": parent, "correct": node in delta.drafts.correct}
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
