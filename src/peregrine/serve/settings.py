"""Settings of a server, apart from its engine's."""

import math
from dataclasses import dataclass

from peregrine.config import check_integer, option
from peregrine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Address, names, keys and limits of one server."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: every interface", "HOST")
    port: int = option(8000, "port to listen on; 0: any free one", "PORT")
    name: str | None = option(None, "the model's name in the API; by default its folder's name", "NAME")
    api_keys: tuple[str, ...] = option((), "require this key from clients; repeatable", "KEY", flag="api_key")
    max_queue: int = option(256, "generations that may wait for a free row; one more is refused with status 429", "N")
    max_prompt: int | None = option(None, "tokens a prompt may have; by default what the context holds", "TOKENS")
    max_body_bytes: int = option(2 * 2**20, "bytes a request's body may have", "BYTES")
    drain_seconds: float = option(30.0, "how long running requests may go on after SIGTERM", "S")

    def __post_init__(self) -> None:
        check_integer("port", self.port, 0, 65535)
        check_integer("max_body_bytes", self.max_body_bytes, 1024, None)
        check_integer("max_prompt", self.max_prompt, 1, None)
        check_integer("max_queue", self.max_queue, 0, None)
        if not math.isfinite(self.drain_seconds) or self.drain_seconds < 0:
            raise ConfigError(f"drain_seconds={self.drain_seconds}: must be 0 or more seconds")
        if not all(key.isascii() and key.strip() == key and key for key in self.api_keys):
            raise ConfigError("api_keys: a key is one or more ASCII characters without spaces around it")
