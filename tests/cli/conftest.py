"""A fake peregrine.llm that records its calls and answers at once."""

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType

import pytest

from peregrine.config import Decision
from peregrine.engine.output import Delta, Output, Timing, TokenLogprob
from peregrine.engine.stats import Stats
from peregrine.errors import CheckpointError, ConfigError
from peregrine.sampling import SamplingParams, sampling_params

TOKENS = [b"A", b" bird", b" fell", b" \xc3", b"\xa9"]  # the last two make an é
TEXTS = ["A", " bird", " fell", "", " é"]  # as streamed: the space waits for its character


class Terminal(io.StringIO):
    """A stream whose isatty is true."""

    def isatty(self) -> bool:
        return True


class Letters:
    """A byte-level tokenizer of five tokens."""

    byte_level = True
    special_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.whole_texts: dict[int, str] = {}

    def token_bytes(self, token: int) -> bytes:
        return TOKENS[token]

    def decode(self, ids: list[int]) -> str:
        return b"".join(TOKENS[i] for i in ids).decode(errors="replace")


def make_logprobs(tokens: list[int], top: int | None) -> list[TokenLogprob] | None:
    """Token i has -(i + 1) / 4, and the likeliest ones are 0, 1, ..."""
    if top is None:
        return None
    likeliest = tuple((i, -(i + 1) / 4) for i in range(top))
    return [TokenLogprob(token, -(token + 1) / 4, likeliest) for token in tokens]


def make_output(tokens: list[int], drafted: list[bool], reason: str, prompt: object, params: SamplingParams) -> Output:
    stats = Stats()
    stats.count(drafted=3, correct=sum(drafted), accepted=len(tokens))
    return Output(
        request_id=0,
        prompt_token_ids=list(prompt) if isinstance(prompt, list) else [7],
        text=Letters().decode(tokens),
        token_ids=tokens,
        finish_reason=reason,
        stop_reason=None,
        error="the weather" if reason == "error" else None,
        seed=params.seed or 12,
        drafted=drafted,
        logprobs=make_logprobs(tokens, params.logprobs),
        prompt_logprobs=make_logprobs([0], params.prompt_logprobs),
        stats=stats,
        timing=Timing(queue_s=0.0, first_token_s=0.125, total_s=0.5, per_token_s=0.1),
        simulated=False,
    )


@dataclass
class Calls:
    """Calls that the command line made to the fake, and how the fake shall behave."""

    options: list[dict[str, object]] = field(default_factory=list)
    prompts: list[object] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    closed: int = 0
    reason: str = "length"
    tokens_with_drafter: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replace peregrine.llm by the fake."""
    record = Calls()

    class LLM:
        tokenizer = Letters()

        def __init__(self, **options: object) -> None:
            record.options.append(options)
            self.plain = options.get("drafter", "none") == "none"
            self.decisions = (Decision("drafter", options.get("drafter", "none"), "asked for"),)
            if options.get("model") == "broken":
                raise CheckpointError("no config.json in 'broken'; give another folder")
            if options.get("device") == "toaster":
                raise ConfigError("device='toaster': is unknown\nchoose cpu")

        def __enter__(self) -> "LLM":
            return self

        def __exit__(self, *error: object) -> None:
            record.closed += 1

        def sampling(self, params: dict[str, object]) -> SamplingParams:
            return sampling_params(**params)

        def encode(self, prompt: str) -> list[int]:
            return [0]

        def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
            assert [message["role"] for message in messages] == ["user"]
            return [len(messages[0]["content"]), 99]

        def generate(self, prompts: list[object], params: SamplingParams, progress: bool = True) -> list[Output]:
            assert progress is False
            return [delta.output for delta in self.stream(prompts[0], params) if delta.output]

        def stream(self, prompt: object, params: SamplingParams) -> Iterator[Delta]:
            record.prompts.append(prompt)
            record.params.append(params)
            plain = self.plain
            tokens = [0, 1, 2, 3, 4] if plain else record.tokens_with_drafter
            drafted = [not plain and 0 < i < 3 for i in range(len(tokens))]
            output = make_output(tokens, drafted, record.reason, prompt, params)
            for i, token in enumerate(tokens):
                last = i == len(tokens) - 1
                yield Delta(
                    request_id=0,
                    text=TEXTS[token],
                    token_ids=[token],
                    drafted=[drafted[i]],
                    finish_reason=record.reason if last else None,
                    output=output if last else None,
                )

    module = ModuleType("peregrine.llm")
    module.LLM = LLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peregrine.llm", module)
    return record
