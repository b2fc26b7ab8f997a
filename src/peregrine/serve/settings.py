"""How a server behaves, apart from its engine."""

import math
from dataclasses import dataclass

from peregrine.config import check_integer
from peregrine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Limits, names and keys of one server."""

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None  # the model's name in the API; None: the name it was loaded by
    api_keys: tuple[str, ...] = ()  # none: everybody may ask
    max_body_bytes: int = 2 * 2**20
    max_prompt: int | None = None  # tokens; None: what the context holds
    max_queue: int = 256  # generations that may wait beside those that run
    drain_seconds: float = 30.0  # how long requests may go on after SIGTERM

    def __post_init__(self) -> None:
        check_integer("port", self.port, 0, 65535)
        check_integer("max_body_bytes", self.max_body_bytes, 1024, None)
        check_integer("max_prompt", self.max_prompt, 1, None)
        check_integer("max_queue", self.max_queue, 0, None)
        if not math.isfinite(self.drain_seconds) or self.drain_seconds < 0:
            raise ConfigError(f"drain_seconds={self.drain_seconds}: must be 0 or more seconds")
        if not all(key.isascii() and key.strip() == key and key for key in self.api_keys):
            raise ConfigError("api_keys: a key is one or more ASCII characters without spaces around it")
