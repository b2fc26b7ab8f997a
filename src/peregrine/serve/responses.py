"""Response bodies of the two generating endpoints: the envelope with its choices and usage, whole or as events."""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from peregrine import __version__
from peregrine.engine.output import Delta, Output
from peregrine.llm import LLM
from peregrine.serve.choices import ChatWriter, ChoiceWriter, CompletionWriter, Json, usage_fields
from peregrine.serve.errors import ApiError, shutting_down
from peregrine.serve.job import Job, chat_job, completion_job
from peregrine.serve.protocol import ChatBody, CompletionBody

DONE = b"data: [DONE]\n\n"
LEVELS = 4  # of a response, down to its lists of tokens
ITEMS, NUMBERS = 16, 1024  # of such a list, and of a list of numbers or texts, that are written at a time
_to_json = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make an encoder for each call


def encode(value: object) -> bytes:
    """JSON in ASCII, which can hold any text, even a lone surrogate in an error message."""
    return _to_json(value).encode()


def encode_slowly(value: object, levels: int = LEVELS) -> bytes:
    """`encode` for large values, in many small steps: json.dumps lets no other thread run until it is done."""
    return "".join(json_parts(value, levels)).encode()


def json_parts(value: object, levels: int) -> Iterator[str]:
    """A value as JSON: containers are taken apart down to `levels`, and long lists into a few items at a time."""
    if isinstance(value, dict) and value and levels:
        for index, (name, item) in enumerate(value.items()):
            yield f"{',' if index else '{'}{json.dumps(name)}:"
            yield from json_parts(item, levels - 1)
        yield "}"
    elif isinstance(value, list) and value:
        nested = isinstance(value[0], dict | list)
        step = NUMBERS if not nested else 1 if levels else ITEMS
        for start in range(0, len(value), step):
            yield "," if start else "["
            if step == 1:
                yield from json_parts(value[start], levels - 1)
            else:
                yield _to_json(value[start : start + step])[1:-1]
        yield "]"
    else:
        yield _to_json(value)


def event(json: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + json + b"\n\n"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the two generating endpoints differ."""

    body: type[CompletionBody] | type[ChatBody]
    make_job: Callable[[Any, LLM], Job]
    choice_writer: type[ChoiceWriter]
    id_prefix: str
    object: str  # of a whole response
    chunk_object: str


COMPLETIONS = Endpoint(CompletionBody, completion_job, CompletionWriter, "cmpl", "text_completion", "text_completion")
CHAT_COMPLETIONS = Endpoint(ChatBody, chat_job, ChatWriter, "chatcmpl", "chat.completion", "chat.completion.chunk")
ENDPOINTS = {"/v1/completions": COMPLETIONS, "/v1/chat/completions": CHAT_COMPLETIONS}


class ResponseWriter:
    """Writes the response to one body, which it turns into a job for the engine; `name` is the served model's."""

    def __init__(self, endpoint: Endpoint, body: CompletionBody | ChatBody, llm: LLM, name: str) -> None:
        self.job = job = endpoint.make_job(body, llm)
        self._endpoint = endpoint
        self._writers = [endpoint.choice_writer(job, index, llm.tokenizer) for index in range(job.size)]
        drafts = llm.engine.limits.nodes if body.return_speculation else 0
        self._per_token = (job.params[0].logprobs or 0) + drafts
        self._tells_usage = body.stream_options is not None and body.stream_options.include_usage is True
        self._envelope: Json = {
            "id": f"{endpoint.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": f"peregrine-{__version__}",
        }
        # Every event of a stream begins with this; the envelope's closing brace is left out.
        self._event_head = encode({**self._envelope, "object": endpoint.chunk_object})[:-1] + b',"choices":['

    def weight(self, deltas: Sequence[Delta]) -> int:
        """About how many small things the JSON of these deltas holds."""
        prompt = deltas[0].prompt_logprobs
        tokens = sum(len(delta.token_ids) for delta in deltas)
        return tokens * (1 + self._per_token) + (len(prompt) * (1 + self._per_token) if prompt else 0)

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> Json:
        """The body of a response that is not streamed, from all deltas of each generation."""
        outputs = [final_output(each) for each in deltas]
        return {
            **self._envelope,
            "object": self._endpoint.object,
            "choices": [writer.write(each, whole=True) for writer, each in zip(self._writers, deltas, strict=True)],
            "usage": usage_fields(self.job, outputs),
        }

    def event(self, index: int, deltas: Sequence[Delta], slowly: bool = False) -> bytes:
        """The event of a stream that covers what has come for one generation."""
        choice = self._writers[index].write(deltas, whole=False)
        return self._event(encode_slowly(choice, LEVELS - 2) if slowly else encode(choice), None)

    def last_events(self, outputs: Sequence[Output]) -> bytes:
        """What ends a stream."""
        return self._event(b"", usage_fields(self.job, outputs)) + DONE if self._tells_usage else DONE

    def _event(self, choices: bytes, usage: Json | None) -> bytes:
        tail = b'],"usage":' + encode(usage) + b"}" if self._tells_usage else b"]}"
        return event(self._event_head + choices + tail)


def final_output(deltas: Sequence[Delta]) -> Output:
    """The output that the last delta of a finished generation carries; raises if it failed or was aborted."""
    output = deltas[-1].output
    assert output is not None
    if output.finish_reason == "error":
        raise ApiError(500, str(output.error))
    if output.finish_reason == "abort":
        raise shutting_down()
    return output
