"""What a body may hold, one model per endpoint. Nothing is ignored in silence:

- a field of the models below is honoured, except those of `WithoutEffect`, which cannot change an output here;
- a field in `REFUSED` would change the output and is not supported: 400, unless it holds a value that asks for nothing;
- any other field is unknown: 400.

A wrong body is refused at its first mistake: listing all mistakes of a large one would take seconds.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag, model_validator

from peregrine.errors import RequestError
from peregrine.sampling import MAX_BIAS

MAX_CHOICES = 128
MAX_LABELS = 16

# field -> (values that ask for nothing, what to do instead)
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "audio": ((), "ask for text"),
    "best_of": ((1,), "use n and choose among the answers"),
    "function_call": (("none",), "write the functions into the messages"),
    "functions": (([],), "write the functions into the messages"),
    "guided_choice": ((), "constrained output is not supported; describe the format in the prompt"),
    "guided_json": ((), "constrained output is not supported; describe the format in the prompt"),
    "guided_regex": ((), "constrained output is not supported; describe the format in the prompt"),
    "modalities": ((["text"],), "only text is generated"),
    "reasoning_effort": (("none",), "the model has no such switch; ask in the messages"),
    "response_format": (({"type": "text"},), "constrained output is not supported; describe the format in the prompt"),
    "suffix": (("",), "text is generated after a prompt only; put what matters before it"),
    "tool_choice": (("none",), "write the tools into the messages"),
    "tools": (([],), "write the tools into the messages"),
    "verbosity": (("medium",), "ask in the messages"),
    "web_search_options": ((), "put what should be known into the messages"),
}


Item = TypeVar("Item")


class FirstMistake(FailFast):
    """End at a list's first wrong item; hashable, since Python hashes what is annotated inside a union."""

    __hash__ = object.__hash__


Many = Annotated[list[Item], FirstMistake()]


def at_most(count: int) -> BeforeValidator:
    """Refuse a mapping with too many entries before looking at them."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"there are {len(value)} entries, at most {count} are taken")
        return value

    return BeforeValidator(check)


def prompt_kind(prompt: Any) -> str:
    """Which of the four kinds of prompt this is meant to be, by its first element."""
    if not isinstance(prompt, list):
        return "<text>"
    first = prompt[0] if prompt else ""
    return "<lists>" if isinstance(first, list) else "<ids>" if isinstance(first, int) else "<texts>"


Prompts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Many[str], Tag("<texts>")]
    | Annotated[Many[int], Tag("<ids>")]
    | Annotated[Many[Many[int]], Tag("<lists>")],
    Discriminator(prompt_kind),
]


def text_or_list(value: Any) -> str:
    """Whether this is meant to be a text or a list."""
    return "<list>" if isinstance(value, list) else "<text>"


TextOrTexts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[str], Tag("<list>")], Discriminator(text_or_list)
]


class Body(BaseModel):
    """Strict: a wrong type is refused, not converted, and so is an unknown field."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported(cls, body: Any) -> Any:
        """Name the first field that is unknown or asks for something we do not do; drop those that ask for nothing."""
        if not isinstance(body, dict):
            return body
        for name, value in body.items():
            if name in cls.model_fields:
                continue
            if name not in REFUSED:
                written = str(name).encode(errors="backslashreplace").decode()  # a lone surrogate is no text
                raise RequestError(written, value, "is not a field of this endpoint", "leave it out")
            neutral, remedy = REFUSED[name]
            if value is not None and value not in neutral:
                raise RequestError(name, value, "is not supported", remedy)
        return {name: value for name, value in body.items() if name in cls.model_fields}


class WithoutEffect(Body):
    """Fields of OpenAI's API that are accepted because they cannot change an output of this server."""

    user: str | None = Field(None, description="Who asks; not used.")
    metadata: Annotated[dict[str, str], at_most(MAX_LABELS)] | None = Field(
        None, description="Labels for the caller's own books; not used."
    )
    store: bool | None = Field(None, description="Nothing is stored.")
    service_tier: str | None = Field(None, description="There is one tier.")
    safety_identifier: str | None = Field(None, description="Not used.")
    prompt_cache_key: str | None = Field(None, description="Prefixes are found by their tokens.")
    prompt_cache_retention: str | None = Field(None, description="Cached prefixes stay while there is room.")
    parallel_tool_calls: bool | None = Field(None, description="There are no tools to call.")
    prediction: dict[str, Any] | None = Field(None, description="Drafts come from the engine's drafter.")


class StreamOptions(Body):
    """What a stream tells beside its text."""

    include_usage: bool | None = Field(None, description="Send token counts in a last chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted; chunks are never padded.")


class Speculation(Body):
    """How far the drafter may guess for this request."""

    num_drafts: int = Field(ge=0, description="Drafts per round; 0: no speculation. Changes speed, never the text.")


class Generation(WithoutEffect):
    """What both ways of generating have in common. Defaults and limits are those of SamplingParams."""

    model: str | None = Field(None, description="The served model's name, as /v1/models lists it.")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        None, description="Choices per prompt; choice i has the seed `seed + i`."
    )
    seed: int | None = Field(None, ge=0, description="The same seed gives the same text; drawn and reported if absent.")
    temperature: float | None = Field(None, description="0 takes the likeliest token; default 1.")
    top_p: float | None = Field(None, description="Choose among the likeliest tokens that hold this share of the mass.")
    top_k: int | None = Field(None, description="Choose among the k likeliest tokens; 0: all.")
    min_p: float | None = Field(None, description="Drop tokens below this share of the largest probability.")
    presence_penalty: float | None = Field(None, description="Subtracted once from tokens generated before.")
    frequency_penalty: float | None = Field(None, description="Subtracted for each time a token was generated.")
    repetition_penalty: float | None = Field(None, description="Divides the logits of tokens seen before; 1: off.")
    logit_bias: Annotated[dict[str, float], at_most(MAX_BIAS)] | None = Field(
        None, description="Token id (as a string) to a bias in [-100, 100]."
    )
    stop: TextOrTexts | None = Field(None, description="The text ends before any of these.")
    stop_token_ids: Many[int] | None = Field(None, description="The text ends at any of these tokens.")
    min_tokens: int | None = Field(None, description="Tokens before the text may end.")
    ignore_eos: bool | None = Field(None, description="Do not end at the model's end-of-text token.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text; default true.")
    stream: bool | None = Field(None, description="Send the text as server-sent events while it is generated.")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    speculation: Speculation | None = Field(None, description="A cap on this request's drafts.")
    return_speculation: bool | None = Field(
        None, description="Add each token's provenance and the acceptance to choices and chunks."
    )

    @model_validator(mode="after")
    def check_stream_options(self) -> "Generation":
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", True, "needs stream", "set stream to true, or leave it out")
        return self


class CompletionBody(Generation):
    """POST /v1/completions"""

    prompt: Prompts = Field(description="Text, token ids, or a list of either; each prompt gets n choices.")
    max_tokens: int | None = Field(None, description="Tokens to generate at most; default 16.")
    echo: bool | None = Field(None, description="Put the prompt in front of the text.")
    logprobs: int | None = Field(None, description="Report each token's log-probability and the n largest.")


class TextPart(Body):
    """A part of a message; text is the only kind there is."""

    type: str = Field(pattern="^text$")
    text: str

    @model_validator(mode="before")
    @classmethod
    def refuse_other_kinds(cls, part: Any) -> Any:
        """Before its fields are looked at: those of an image would be unknown, which is not the point."""
        if isinstance(part, dict) and part.get("type") != "text":
            raise RequestError("type", part.get("type"), "is not supported", "send parts of the type text")
        return part


class Message(Body):
    """One turn of a chat; what roles exist is for the model's template to say."""

    role: str = Field(min_length=1)
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[Many[TextPart], Tag("<list>")], Discriminator(text_or_list)
    ]
    name: str | None = None
    refusal: None = None

    @property
    def text(self) -> str:
        """The content, its parts joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Generation):
    """POST /v1/chat/completions"""

    messages: Many[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        None, description="Tokens to generate at most; default: as many as the context holds."
    )
    max_tokens: int | None = Field(None, description="The older name of max_completion_tokens; not both.")
    logprobs: bool | None = Field(None, description="Report each token's log-probability.")
    top_logprobs: int | None = Field(None, description="And the n largest; only with `logprobs`.")


class TokenizeBody(Body):
    """POST /tokenize: a text, or a chat as the model's template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = Field(True, description="Only with `prompt`: add what the tokenizer adds, such as bos.")

    @model_validator(mode="after")
    def check_one_source(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt", self.prompt, "give either prompt or messages", "keep one of them")
        return self


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Many[int]
    skip_special_tokens: bool = False


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """How every refusal looks."""

    error: ErrorDetail
