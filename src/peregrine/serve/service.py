"""The state that the routes of one server share: the model once it is loaded, the server's phase, its counters."""

import time
from pathlib import Path
from typing import NamedTuple, NoReturn

from peregrine.llm import LLM
from peregrine.serve.errors import ENGINE_FAILED, ApiError
from peregrine.serve.gateway import Gateway
from peregrine.serve.metrics import Metrics
from peregrine.serve.settings import ServeConfig
from peregrine.serve.vllm_names import VllmNames
from peregrine.serve.workers import Workers


class Status(NamedTuple):
    """Where a server is in its life, and why it cannot serve a request now (None: it can)."""

    phase: str  # loading, ready, draining or faulted
    trouble: str | None


class Service:
    """loading -> ready -> draining; a fault of the engine may come at any time and stays."""

    def __init__(self, model: str, settings: ServeConfig) -> None:
        self.settings = settings
        self.name = settings.name or Path(model).name
        self.metrics, self.workers = Metrics(), Workers()
        self.metrics.registry.register(VllmNames(self.metrics))
        self.started = time.time()
        self.draining = False
        self.hangs = False  # the engine's step does not end
        self._gateway: Gateway | None = None

    def open(self, llm: LLM) -> None:
        """The model is loaded: serve. Called in the event loop that serves."""
        if llm.engine.grammars is not None:
            llm.engine.grammars.load()  # the first request with a grammar would stop all others meanwhile
        self._gateway = Gateway(llm, self.settings, self.metrics.observe)
        self.metrics.watch(llm.engine, self.name)

    @property
    def status(self) -> Status:
        """The server's phase, with the reason if no request can be served in it."""
        if self._gateway is None:
            return Status("loading", f"the model {self.name} is loading; try again soon")
        loop = self._gateway.llm.loop
        if loop.fault is not None or self.hangs or not (loop.alive or self.draining):
            return Status("faulted", ENGINE_FAILED)
        if self.draining:
            return Status("draining", "the server is shutting down; send the request elsewhere")
        return Status("ready", None)

    @property
    def gateway(self) -> Gateway:
        """The way to the engine; ApiError while the model loads."""
        return self._gateway or self._refuse()

    @property
    def open_gateway(self) -> Gateway:
        """The way to the engine for new work; ApiError when none is taken."""
        return self.gateway if self.status.trouble is None else self._refuse()

    def _refuse(self) -> NoReturn:
        raise ApiError(503, self.status.trouble or "", headers={"Retry-After": "5"})

    def check_name(self, model: str | None) -> None:
        """Refuse a body that asks for another model."""
        if model is not None and model != self.name:
            message = f"model={model!r}: is not served here; use {self.name!r}, or leave it out"
            raise ApiError(404, message, "model", "model_not_found")
