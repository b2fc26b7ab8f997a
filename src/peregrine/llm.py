"""The offline front door: prompts in, outputs out, whole or as they come."""

import asyncio
import contextlib
import queue
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import fields
from types import TracebackType

from tqdm import tqdm

from peregrine.config import Decision, EngineConfig, TreeShape
from peregrine.engine.build import build_engine
from peregrine.engine.loop import EngineLoop, Sink
from peregrine.engine.request import Delta, Output, Request, Stats, Timing
from peregrine.errors import ConfigError, EngineFault, RequestError
from peregrine.sampling import SamplingParams
from peregrine.text.chat import encode_chat

Prompt = str | Sequence[int]


class LLM:
    """A model ready to generate.

    >>> llm = LLM(model="merlin", drafter="eagle3", num_drafts=3)
    >>> llm.generate("Once upon a time", SamplingParams(temperature=0.8, seed=7, max_tokens=64)).text

    Options are those of EngineConfig; `decisions` says what was chosen for the ones left open, and why.
    """

    def __init__(self, model: str = "merlin", **options: object) -> None:
        built = build_engine(engine_config(model, options))
        self.tokenizer, self.config = built.tokenizer, built.model
        self.decisions: tuple[Decision, ...] = built.decisions
        self.engine = built.engine
        self.loop = EngineLoop(built.engine)
        # At exit, too: a thread that is inside a kernel when the interpreter goes takes the process down with it.
        self._close = weakref.finalize(self, self.loop.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Output]:
        """One output per prompt, in order. A prompt is text or token ids.

        A request that is refused among several comes back as an output with finish_reason "error" and costs the
        others nothing; a single refused prompt raises.
        """
        many = as_prompts(prompts)
        each = as_params(params, len(many))
        results: queue.SimpleQueue[tuple[int, Delta | EngineFault]] = queue.SimpleQueue()
        outputs: dict[int, Output] = {}
        requests: dict[int, Request] = {}
        for index, (prompt, wish) in enumerate(zip(many, each, strict=True)):
            try:
                ids = self.encode(prompt)
                requests[index] = self.loop.submit(ids, wish, numbered(results, index))
            except RequestError as error:
                if len(many) == 1:
                    raise
                outputs[index] = refused(error)
        bar = tqdm(total=len(many), initial=len(outputs), unit="prompt", disable=not progress or len(many) == 1)
        with bar, self._abort_on_exit(requests, outputs):
            while len(outputs) < len(many):
                index, delta = results.get()
                if isinstance(delta, EngineFault):
                    raise delta
                if delta.output is not None:
                    outputs[index] = delta.output
                    bar.update()
        return [outputs[index] for index in range(len(many))]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Deltas as they come; the last one carries the output. Closing the iterator aborts the request."""
        results: queue.SimpleQueue[Delta | EngineFault] = queue.SimpleQueue()
        request = self.loop.submit(self.encode(prompt), params or SamplingParams(), results.put)
        try:
            while True:
                delta = results.get()
                if isinstance(delta, EngineFault):
                    raise delta
                yield delta
                if delta.output is not None:
                    return
        finally:
            self.loop.abort(request)

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """The same for asyncio; many may run side by side and share rounds."""
        results: asyncio.Queue[Delta | EngineFault] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def sink(delta: Delta | EngineFault) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has gone; nobody listens
                loop.call_soon_threadsafe(results.put_nowait, delta)

        request = self.loop.submit(self.encode(prompt), params or SamplingParams(), sink)
        try:
            while True:
                delta = await results.get()
                if isinstance(delta, EngineFault):
                    raise delta
                yield delta
                if delta.output is not None:
                    return
        finally:
            self.loop.abort(request)

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids; text gets the special tokens its tokenizer adds."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Chat messages through the model's template, ready for the assistant's turn."""
        return encode_chat(self.tokenizer, messages)

    def drop_cached(self) -> int | None:
        """Empty the prefix cache: how many pages that freed, or None, and nothing done, while requests run."""
        return self.loop.call(self.engine.drop_cached)

    def close(self) -> None:
        """Stop the engine's thread and free what it holds."""
        self._close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _abort_on_exit(self, requests: dict[int, Request], outputs: dict[int, Output]) -> Iterator[None]:
        """Leave nothing running behind an interrupted call."""
        try:
            yield
        finally:
            for index, request in requests.items():
                if index not in outputs:
                    self.loop.abort(request)


def engine_config(model: str, options: dict[str, object]) -> EngineConfig:
    """EngineConfig from loose options; unknown names are refused by name."""
    known = [entry.name for entry in fields(EngineConfig)]
    for name in options:
        if name not in known:
            raise ConfigError(f"{name}={options[name]!r}: no such option; known are {', '.join(known)}")
    tree = options.get("tree")
    if isinstance(tree, list | tuple):
        if len(tree) != 3:
            raise ConfigError(f"tree={tree!r}: is not (depth, width, nodes)")
        options = {**options, "tree": TreeShape(*tree)}
    return EngineConfig(model=model, **options)  # type: ignore[arg-type]


def numbered(results: "queue.SimpleQueue[tuple[int, Delta | EngineFault]]", index: int) -> Sink:
    """A sink that says whose delta it is."""
    return lambda delta: results.put((index, delta))


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one or several: text is one prompt, and so is a list of ids."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One set of parameters per prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            "params", f"{len(params)} sets", f"there are {count} prompts", "pass one set, or one per prompt"
        )
    return list(params)


def refused(error: RequestError) -> Output:
    """The output of a request that was never admitted."""
    return Output(
        request_id=-1,
        prompt_token_ids=[],
        text="",
        token_ids=[],
        finish_reason="error",
        stop_reason=None,
        error=str(error),
        seed=0,
        drafted=[],
        logprobs=None,
        stats=Stats(),
        timing=Timing(0.0, 0.0, 0.0, 0.0),
        simulated=False,
    )
