"""The offline interface: prompts in, outputs out, whole or as a stream of deltas."""

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
from peregrine.engine.loop import EngineLoop
from peregrine.engine.request import Delta, Output, Request
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
        # Also runs at exit: a thread still inside a kernel when the interpreter ends crashes the process.
        self._close = weakref.finalize(self, self.loop.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Output]:
        """One output per prompt, in order. A prompt is text or token ids.

        Of several prompts, a refused one gives an output with finish_reason "error" and the others run; a refused
        single prompt raises RequestError.
        """
        many = as_prompts(prompts)
        results: queue.SimpleQueue[Delta | EngineFault] = queue.SimpleQueue()
        outputs: dict[int, Output] = {}  # by index of the prompt
        requests: dict[int, tuple[int, Request]] = {}  # by request id: index of the prompt, request
        try:
            for index, (prompt, one) in enumerate(zip(many, as_params(params, len(many)), strict=True)):
                try:
                    request = self.loop.submit(self.encode(prompt), one, results.put)
                    requests[request.id] = index, request
                except RequestError as error:
                    if len(many) == 1:
                        raise
                    outputs[index] = Output(-1, [], "", [], "error", error=str(error))
            hidden = not progress or len(many) == 1
            with tqdm(total=len(many), initial=len(outputs), unit="prompt", disable=hidden) as bar:
                while len(outputs) < len(many):
                    delta = checked(results.get())
                    if delta.output is not None:
                        outputs[requests.pop(delta.request_id)[0]] = delta.output
                        bar.update()
        finally:  # nothing keeps running after an interrupted call
            for _, request in requests.values():
                self.loop.abort(request)
        return [outputs[index] for index in range(len(many))]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Yield deltas as they come; the last one carries the output. Closing the iterator aborts the request."""
        results: queue.SimpleQueue[Delta | EngineFault] = queue.SimpleQueue()
        request = self.loop.submit(self.encode(prompt), params or SamplingParams(), results.put)
        try:
            output = None
            while output is None:
                delta = checked(results.get())
                yield delta
                output = delta.output
        finally:
            self.loop.abort(request)

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """`stream` for asyncio; streams that run side by side share rounds."""
        results: asyncio.Queue[Delta | EngineFault] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def sink(delta: Delta | EngineFault) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(results.put_nowait, delta)

        params = params or SamplingParams()
        if params.constraint is not None:  # compiled elsewhere: the event loop goes on
            await asyncio.to_thread(self.engine.compile, params)
        request = self.loop.submit(self.encode(prompt), params, sink)
        try:
            output = None
            while output is None:
                delta = checked(await results.get())
                yield delta
                output = delta.output
        finally:
            self.loop.abort(request)

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids; text gets the special tokens its tokenizer adds."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Chat messages through the model's template, ready for the assistant's turn."""
        return encode_chat(self.tokenizer, messages)

    def drop_cached(self) -> int | None:
        """Evict every page of the prefix cache; returns how many, or None if requests are running."""
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


def checked(delta: Delta | EngineFault) -> Delta:
    """The delta; raises a fault."""
    if isinstance(delta, EngineFault):
        raise delta
    return delta


def engine_config(model: str, options: dict[str, object]) -> EngineConfig:
    """EngineConfig from keyword options; ConfigError names an unknown one."""
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
