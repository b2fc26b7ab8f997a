"""Settings of a server, apart from its engine's."""

import math
import re
from dataclasses import dataclass

from peregrine.config import check_integer, option
from peregrine.errors import ConfigError

ORIGIN = re.compile(r"\*|https?://[^/\s?#@]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Address, names, keys and limits of one server."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: every interface", "HOST")
    port: int = option(8000, "port to listen on; 0: any free one", "PORT")
    name: str | None = option(None, "the model's name in the API; by default its folder's name", "NAME")
    api_keys: tuple[str, ...] = option(
        (), "require this key from clients; repeatable; other users of the machine can see it", "KEY", flag="api_key"
    )
    allow_origins: tuple[str, ...] = option(
        (),
        "let pages of this origin, such as https://example.org, use the API; repeatable; *: any",
        "ORIGIN",
        flag="allow_origin",
    )
    allow_hosts: tuple[str, ...] = option(
        (),
        "also answer to this name, such as a proxy's, while listening on this machine only; repeatable; *: any",
        "NAME",
        flag="allow_host",
    )
    max_queue: int = option(256, "generations that may wait for a free row; one more is refused with status 429", "N")
    max_prompt: int | None = option(None, "tokens a prompt may have; by default what the context holds", "TOKENS")
    max_body_bytes: int = option(2 * 2**20, "bytes a request's body may have", "BYTES")
    max_connections: int = option(1000, "connections that may be open at once; one more is refused", "N")
    stream_interval: int = option(
        1, "tokens that wait for each other before they are streamed; the first and the last do not wait", "TOKENS"
    )
    drain_seconds: float = option(30.0, "how long requests that have arrived may go on after SIGTERM", "S")
    hang_seconds: float = option(
        180.0, "a step of the engine that takes longer is a hang: requests fail and the server ends with code 1", "S"
    )
    log_prompts: bool = option(False, "write the beginning of each prompt to the log")

    def __post_init__(self) -> None:
        check_integer("port", self.port, 0, 65535)
        check_integer("max_body_bytes", self.max_body_bytes, 1024, None)
        check_integer("max_prompt", self.max_prompt, 1, None)
        check_integer("max_queue", self.max_queue, 0, None)
        check_integer("max_connections", self.max_connections, 1, None)
        check_integer("stream_interval", self.stream_interval, 1, None)
        if not math.isfinite(self.drain_seconds) or self.drain_seconds < 0:
            raise ConfigError(f"drain_seconds={self.drain_seconds}: must be 0 or more seconds")
        if not math.isfinite(self.hang_seconds) or self.hang_seconds <= 0:
            raise ConfigError(f"hang_seconds={self.hang_seconds}: must be more than 0 seconds")
        if not all(key.isascii() and key.strip() == key and key for key in self.api_keys):
            raise ConfigError("api_keys: a key is one or more ASCII characters without spaces around it")
        for origin in self.allow_origins:
            if not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allow_origin={origin!r}: is not an origin; use one such as https://example.org, or *"
                )
