"""The offline interface: prompts in, outputs out, whole or as a stream of deltas."""

import asyncio
import contextlib
import queue
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from os import PathLike
from types import TracebackType

from tqdm import tqdm

from peregrine.config import Decision, EngineConfig
from peregrine.engine.ahead_planner import AheadCosts
from peregrine.engine.build import build_engine
from peregrine.engine.loop import EngineLoop
from peregrine.engine.output import Delta, Output
from peregrine.engine.prompts import Message, Prompt, as_conversations, as_prompts, token_ids
from peregrine.engine.request import Request
from peregrine.errors import ConfigError, EngineFault, RequestError, shown
from peregrine.sampling import SamplingParams, sampling_params
from peregrine.spec.planner import Costs
from peregrine.text.chat import encode_chat

Params = SamplingParams | Mapping[str, object] | None
TOGETHER_S = 0.005  # requests of one call that are ready within this time begin together


class LLM:
    """A model ready to generate.

    >>> from peregrine import LLM, SamplingParams
    >>> llm = LLM("merlin", num_drafts=3)
    >>> llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=6))[0].text
    ', there was a little girl'
    >>> story = llm.chat([{"role": "user", "content": "Tell me a story."}], {"temperature": 0.8, "seed": 7})[0]
    >>> story.finish_reason in ("stop", "length")
    True
    >>> outputs = llm.generate(["One day", "The cat"], SamplingParams(n=2, max_tokens=4), progress=False)
    >>> [output.prompt_token_ids == llm.encode("One day") for output in outputs]
    [True, True, False, False]
    >>> llm.close()

    Options are those of EngineConfig; `decisions` says what was chosen for the ones left open, and why. Parameters are
    SamplingParams, which are taken as they are, or a dict or None, where the rest is the model's own defaults
    (`sampling_defaults`, from its generation_config.json). An engine belongs to the process that made it.
    """

    def __init__(self, model: str | PathLike[str] = "merlin", **options: object) -> None:
        built = build_engine(engine_config(model, options))
        self.tokenizer, self.config = built.tokenizer, built.model
        self.sampling_defaults: dict[str, object] = built.sampling_defaults
        self.decisions: tuple[Decision, ...] = built.decisions
        self.engine = built.engine
        self.loop = EngineLoop(built.engine, built.check)
        # Also runs at exit: a thread still inside a kernel when the interpreter ends crashes the process.
        self._close = weakref.finalize(self, close_all, self.loop, built.close)

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: Params | Iterable[Params] = None, *, progress: bool = True
    ) -> list[Output]:
        """Outputs in the order of the prompts, n of each (`SamplingParams.n`). A prompt is text or token ids.

        Of several prompts, a refused one gives outputs with finish_reason "error" and the others run; a refused
        single prompt raises RequestError.
        """
        many = as_prompts(prompts)
        return self._run([partial(self.encode, prompt) for prompt in many], params, progress)

    def chat(
        self,
        messages: Sequence[Message] | Iterable[Sequence[Message]],
        params: Params | Iterable[Params] = None,
        *,
        progress: bool = True,
    ) -> list[Output]:
        """`generate` for one chat or several, which go through the model's template: the assistant's next turn."""
        chats = as_conversations(messages)
        return self._run([partial(self.encode_chat, chat) for chat in chats], params, progress)

    def _run(
        self, encoders: Sequence[Callable[[], list[int]]], params: Params | Iterable[Params], progress: bool
    ) -> list[Output]:
        """Submit what the encoders return, and wait for all outputs."""
        each = self._params_of(params, len(encoders))
        jobs = [(encode, one) for encode, asked in zip(encoders, each, strict=True) for one in asked.generations()]
        results: queue.SimpleQueue[Delta | EngineFault] = queue.SimpleQueue()
        outputs: dict[int, Output] = {}  # by index of the job
        requests: dict[int, tuple[int, Request]] = {}  # by request id: index of the job, request
        prepared: list[Request] = []  # and not started
        began = time.perf_counter()
        try:
            for index, (encode, one) in enumerate(jobs):
                try:
                    prepared.append(self.loop.prepare(encode(), one))
                    prepared[-1].wait_for_end()
                    requests[prepared[-1].id] = index, prepared[-1]
                except RequestError as error:
                    if len(encoders) == 1:
                        raise
                    outputs[index] = Output(-1, [], "", [], "error", error=str(error))
                if time.perf_counter() - began > TOGETHER_S:
                    self.loop.start(results.put, *prepared)
                    prepared, began = [], time.perf_counter()
            self.loop.start(results.put, *prepared)
            hidden = not progress or len(jobs) == 1
            with tqdm(total=len(jobs), initial=len(outputs), unit="prompt", disable=hidden) as bar:
                while len(outputs) < len(jobs):
                    delta = checked(results.get())
                    if delta.output is not None:
                        outputs[requests.pop(delta.request_id)[0]] = delta.output
                        bar.update()
        finally:  # nothing keeps running after an interrupted call
            for _, request in requests.values():
                self.loop.abort(request)
        return [outputs[index] for index in range(len(jobs))]

    def sampling(self, params: Params = None) -> SamplingParams:
        """The parameters of a request: SamplingParams as they are, a dict (or nothing) over the model's defaults."""
        if isinstance(params, SamplingParams):
            return params
        if params is not None and not isinstance(params, Mapping):
            raise RequestError(
                "params", params, f"is of the type {type(params).__name__}", "pass SamplingParams or a dict"
            )
        given = {str(name): value for name, value in (params or {}).items()}
        return sampling_params(**{**self.sampling_defaults, **given})

    def _params_of(self, params: Params | Iterable[Params], count: int) -> list[SamplingParams]:
        """One set of parameters per prompt."""
        if isinstance(params, SamplingParams | Mapping | str | bytes) or not isinstance(params, Iterable):
            return [self.sampling(params)] * count
        each = [self.sampling(one) for one in params]
        if len(each) != count:
            problem, remedy = f"there are {count} prompts", "pass one set, or one per prompt"
            raise RequestError("params", f"{len(each)} sets", problem, remedy)
        return each

    def stream(self, prompt: Prompt, params: Params = None) -> Iterator[Delta]:
        """Yield deltas as they come; the last one carries the output. Closing the iterator aborts the request."""
        results: queue.SimpleQueue[Delta | EngineFault] = queue.SimpleQueue()
        request = self.loop.submit(self.encode(prompt), self.sampling(params), results.put)
        try:
            output = None
            while output is None:
                delta = checked(results.get())
                yield delta
                output = delta.output
        finally:
            self.loop.abort(request)

    async def astream(self, prompt: Prompt, params: Params = None) -> AsyncIterator[Delta]:
        """`stream` for asyncio; streams that run side by side share rounds."""
        results: asyncio.Queue[Delta | EngineFault] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def sink(delta: Delta | EngineFault) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(results.put_nowait, delta)

        asked = self.sampling(params)
        if asked.constraint is not None:  # compiled elsewhere: the event loop goes on
            await asyncio.to_thread(self.engine.compile, asked)
        request = self.loop.submit(self.encode(prompt), asked, sink)
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
        if not isinstance(prompt, str):
            return token_ids(prompt)
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise RequestError("prompt", prompt, "has no tokens", "pass a longer text")
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Chat messages through the model's template, ready for the assistant's turn."""
        return encode_chat(self.tokenizer, messages)

    def drop_cached(self) -> int | None:
        """Empty the prefix cache, and the answers that are looked up; how many pages, or None if requests run."""
        return self.loop.call(self.engine.drop_cached)

    @property
    def costs(self) -> Costs | AheadCosts | None:
        """What the parts of a round cost, as measured; None if windows are fixed."""
        planner = self.engine.runner.any_planner
        return None if planner is None else planner.costs

    @property
    def plans(self) -> dict[str, int]:
        """Rounds until now by what was planned (plain, drafts, mixed, tree); empty if windows are fixed."""
        planner = self.engine.runner.any_planner
        return {} if planner is None else dict(planner.record.rounds)

    def close(self) -> None:
        """Stop the engine's thread and free what it holds."""
        self._close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def close_all(loop: EngineLoop, close_ranks: Callable[[], None]) -> None:
    """Stop the engine's thread, then the other ranks of a tensor-parallel engine."""
    loop.close()
    close_ranks()


def checked(delta: Delta | EngineFault) -> Delta:
    """The delta, read; raises a fault."""
    if isinstance(delta, EngineFault):
        raise delta
    return delta.plain()


def engine_config(model: str | PathLike[str], options: dict[str, object]) -> EngineConfig:
    """EngineConfig from keyword options; ConfigError names an unknown one."""
    known = [entry.name for entry in fields(EngineConfig)]
    for name in options:
        if name not in known:
            meant = get_close_matches(name, known, 1)
            hint = f"did you mean {meant[0]}?" if meant else f"known are {', '.join(known)}"
            raise ConfigError(f"{name}={shown(options[name])}: no such option; {hint}")
    return EngineConfig(model=model, **options)  # type: ignore[arg-type]
