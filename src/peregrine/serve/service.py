"""What the routes of one server share: the model once it is there, the phase the server is in, its counters."""

import time
from pathlib import Path

from peregrine.llm import LLM
from peregrine.serve.desk import Desk
from peregrine.serve.errors import ApiError
from peregrine.serve.metrics import Metrics
from peregrine.serve.settings import ServeConfig

PATHS = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize"),
        *("/health", "/version", "/server_info", "/flush_cache", "/metrics"),
    }
)


class Service:
    """loading -> ready -> draining; a fault of the engine may come at any time and stays."""

    def __init__(self, model: str, settings: ServeConfig) -> None:
        self.settings = settings
        self.name = settings.name or Path(model).name
        self.metrics = Metrics(PATHS)
        self.started = time.time()
        self.draining = False
        self._desk: Desk | None = None

    def open(self, llm: LLM) -> None:
        """The model is loaded: serve. Called in the event loop that serves."""
        self._desk = Desk(llm, self.settings, self.metrics.observe)
        self.metrics.watch(llm, self.name)

    @property
    def desk(self) -> Desk:
        """Where jobs are handed in; ApiError while there is none."""
        if self._desk is None:
            raise ApiError(503, self.trouble or "", headers={"Retry-After": "5"})
        return self._desk

    @property
    def open_desk(self) -> Desk:
        """The same, refused when no new work is taken."""
        desk = self.desk
        if self.trouble is not None:
            raise ApiError(503, self.trouble, headers={"Retry-After": "5"})
        return desk

    @property
    def trouble(self) -> str | None:
        """Why no request can be served now; None when one can."""
        if self._desk is None:
            return f"the model {self.name} is loading; try again soon"
        loop = self._desk.llm.loop
        if loop.fault is not None:
            return f"{loop.fault}; restart the server"
        if self.draining:
            return "the server is shutting down; send the request elsewhere"
        return None if loop.alive else "the engine's thread has ended; restart the server"

    @property
    def phase(self) -> str:
        """One word for it."""
        if self._desk is None:
            return "loading"
        if self._desk.llm.loop.fault is not None or (not self.draining and not self._desk.llm.loop.alive):
            return "faulted"
        return "draining" if self.draining else "ready"

    def check_name(self, model: str | None) -> None:
        """Refuse a body that asks for another model."""
        if model is not None and model != self.name:
            message = f"model={model!r}: is not served here; use {self.name!r}, or leave it out"
            raise ApiError(404, message, "model", "model_not_found")
