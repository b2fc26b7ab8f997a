"""One line in the log for each request, and the request's id, which the client may choose."""

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.types import Scope

from peregrine.engine.output import Output
from peregrine.log import logger
from peregrine.serve.job import Job

SCOPE_KEY = "peregrine.record"
CLIENTS_ID = re.compile(rb"[\x21-\x7e]{1,128}")
GONE = 499  # as nginx writes it: the client left before it had a response
# Probes and pages come often and say little.
QUIET_PATHS = {"/", "/docs", "/openapi.json", "/health", "/livez", "/metrics", "/get_load"}
MAX_PROMPT_SHOWN = 2000  # characters


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request; the response fills in what it learns."""

    id: str
    began: float = field(default_factory=time.perf_counter)
    status: int = GONE
    details: dict[str, object] = field(default_factory=dict)

    def note(self, model: str, prompt: str | None) -> None:
        """The request reached the engine. `prompt` is None unless prompts are to be logged."""
        self.details["model"] = model
        if prompt is not None:
            self.details["text"] = ascii(prompt[:MAX_PROMPT_SHOWN])  # one line, whatever is in it

    def note_end(self, job: Job, num_tokens: int, outputs: Sequence[Output | None]) -> None:
        """How its generations went. Those without an output were aborted; their tokens until then count."""
        self.details |= {
            "prompt_tokens": sum(map(len, job.prompts)),  # counted as in a response's usage
            "tokens": 0 if job.scores_only else num_tokens,
            "finish": ",".join(sorted({"abort" if output is None else output.finish_reason for output in outputs})),
        }

    def write(self, method: str, path: str) -> None:
        """Log the request, unless it is a probe that went well."""
        if path in QUIET_PATHS and self.status < 500:
            return
        more = "".join(f" {name}={value}" for name, value in self.details.items())
        seconds = time.perf_counter() - self.began
        shown = ascii(path)[1:-1][:200]
        logger.info("%s %s %d id=%s ms=%.0f%s", method, shown, self.status, self.id, 1000 * seconds, more)


def new_record(headers: dict[bytes, bytes]) -> RequestRecord:
    """A record with the id that the client sent as X-Request-Id, if it is one, else with a new one."""
    sent = headers.get(b"x-request-id", b"")
    return RequestRecord(sent.decode() if CLIENTS_ID.fullmatch(sent) else secrets.token_hex(12))


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request with this scope."""
    record: RequestRecord = scope[SCOPE_KEY]
    return record
