"""The envelope of an answer: ids, names and choices, whole or as the chunks of a stream."""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from peregrine import __version__
from peregrine.engine.request import Delta, Output
from peregrine.errors import EngineFault
from peregrine.serve.choices import ChatTeller, CompletionTeller, Json, Teller, usage_fields
from peregrine.serve.errors import ApiError
from peregrine.serve.job import Job
from peregrine.serve.protocol import ChatBody
from peregrine.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


def encode(value: object) -> bytes:
    """JSON in ASCII: any text survives it, a lone surrogate in an error message too."""
    return json.dumps(value, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """Writes the response of one job."""

    job: Job
    tellers: list[Teller]
    envelope: Json  # id, created, model, system_fingerprint

    @staticmethod
    def to(job: Job, name: str, tokenizer: Tokenizer) -> "Answer":
        """The answer to a job of the model that is served as `name`."""
        chat = isinstance(job.body, ChatBody)
        kind = ChatTeller if chat else CompletionTeller
        envelope: Json = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": f"peregrine-{__version__}",
        }
        return Answer(job, [kind(job, index, tokenizer) for index in range(job.size)], envelope)

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> Json:
        """The body of a response that is not streamed; deltas are those of each generation, from first to last."""
        outputs = [output_of(each) for each in deltas]
        return {
            **self.envelope,
            "object": "chat.completion" if isinstance(self.job.body, ChatBody) else "text_completion",
            "choices": [teller.piece(each, whole=True) for teller, each in zip(self.tellers, deltas, strict=True)],
            "usage": usage_fields(self.job, outputs),
        }

    def event(self, index: int, deltas: Sequence[Delta]) -> bytes:
        """The event of a stream that tells what has come for one generation."""
        return self._event([self.tellers[index].piece(deltas, whole=False)], None)

    def last_events(self, outputs: Sequence[Output]) -> bytes:
        """What ends a stream."""
        if not self._tells_usage:
            return DONE
        return self._event([], usage_fields(self.job, outputs)) + DONE

    @property
    def _tells_usage(self) -> bool:
        options = self.job.body.stream_options
        return options is not None and options.include_usage is True

    def _event(self, choices: list[Json], usage: Json | None) -> bytes:
        kind = "chat.completion.chunk" if isinstance(self.job.body, ChatBody) else "text_completion"
        chunk: Json = {**self.envelope, "object": kind, "choices": choices}
        if self._tells_usage:
            chunk["usage"] = usage
        return b"data: " + encode(chunk) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """How a stream that has begun says that it cannot go on."""
    return b"data: " + encode(error.body()) + b"\n\n"


def output_of(deltas: Sequence[Delta]) -> Output:
    """The output that the last delta of a finished generation carries; raises if it did not end by itself."""
    output = deltas[-1].output
    assert output is not None
    if output.finish_reason == "error":
        raise EngineFault(str(output.error))
    if output.finish_reason == "abort":
        raise ApiError(503, "the server is shutting down; send the request again", code="shutting_down")
    return output
