"""Request bodies, one pydantic model per endpoint. Nothing is ignored in silence:

- a field of the models below is honoured, except those of `WithoutEffect`, which cannot change an output here;
- a field in `REFUSED` would change the output and is not supported: status 400, unless its value asks for nothing;
- any other field is unknown: status 400;
- null asks for nothing, in any field: clients send back what they were sent, with all its null fields.

A wrong body is refused at its first mistake: to list all mistakes of a large one would take seconds.
"""

from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag, model_validator

from peregrine.errors import RequestError
from peregrine.sampling import MAX_BIAS, MAX_CHOICES, SamplingParams
from peregrine.serve.structured import WITHOUT_SPACES, StructuredFields
from peregrine.serve.tools import ToolFields

MAX_LABELS = 16
MAX_PROMPTS = MAX_MESSAGES = 2**13

# field -> (values that ask for nothing, what to do instead)
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "add_generation_prompt": ((True,), "end with the user's message"),
    "annotations": (([],), "leave it out"),
    "audio": ((), "ask for text"),
    "bad_words": (([],), "use logit_bias, or a regex"),
    "best_of": ((1,), "use n and choose among the answers"),
    "continue_final_message": ((False,), "end with the user's message"),
    "function_call": (("none",), "use tool_choice"),
    "functions": (([],), "use tools"),
    "guided_whitespace_pattern": ((), WITHOUT_SPACES),
    "documents": (([],), "put them into the messages"),
    "include_reasoning": ((True,), "leave it out"),
    "include_stop_str_in_output": ((False,), "leave it out: the stop string is never part of the text"),
    "length_penalty": ((1.0,), "it belongs to beam search; leave it out"),
    "modalities": ((["text"],), "only text is generated"),
    "no_stop_trim": ((False,), "leave it out: the stop string is never part of the text"),
    "priority": ((0,), "requests are served in order; leave it out"),
    "return_hidden_states": ((False,), "leave it out"),
    "return_tokens_as_token_ids": ((False,), "set return_speculation to see token ids"),
    "separate_reasoning": ((True,), "leave it out"),
    "spaces_between_special_tokens": ((True,), "leave it out"),
    "stream_reasoning": ((True,), "leave it out"),
    "suffix": (("",), "text is generated after a prompt only; put what matters before it"),
    "use_beam_search": ((False,), "use n and choose among the answers"),
    "verbosity": (("medium",), "ask in the messages"),
    "web_search_options": ((), "put what should be known into the messages"),
}


Item = TypeVar("Item")


class FirstMistake(FailFast):
    """Stop at a list's first wrong item. Hashable, because Python hashes annotations inside a union."""

    __hash__ = object.__hash__


Many = Annotated[list[Item], FirstMistake()]


def at_most(count: int) -> BeforeValidator:
    """Refuse a mapping or a list with too many entries before looking at them."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > count:
            raise ValueError(f"there are {len(value)} entries, at most {count} are taken")
        return value

    return BeforeValidator(check)


def prompt_kind(prompt: Any) -> str:
    """The tag of the kind of prompt this is, by its first element."""
    if not isinstance(prompt, list):
        return "<text>"
    first = prompt[0] if prompt else ""
    return "<lists>" if isinstance(first, list) else "<ids>" if isinstance(first, int) else "<texts>"


Prompts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Many[str], Field(max_length=MAX_PROMPTS), at_most(MAX_PROMPTS), Tag("<texts>")]
    | Annotated[Many[int], Tag("<ids>")]
    | Annotated[Many[Many[int]], Field(max_length=MAX_PROMPTS), at_most(MAX_PROMPTS), Tag("<lists>")],
    Discriminator(prompt_kind),
]


def text_or_list(value: Any) -> str:
    """The tag of a value that may be a text or a list."""
    return "<list>" if isinstance(value, list) else "<text>"


TextOrTexts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[str], Tag("<list>")], Discriminator(text_or_list)
]


class Body(BaseModel):
    """A strict model: a wrong type is refused, not converted, and an unknown field is refused."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": {"type": "null"}},  # null asks for nothing
    )

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported(cls, body: Any) -> Any:
        """Refuse the first field that is unknown or unsupported; drop unsupported ones whose value asks for nothing."""
        if not isinstance(body, dict):
            return body
        for name, value in body.items():
            if name in cls.model_fields or value is None:
                continue
            if name not in REFUSED:
                written = str(name).encode(errors="backslashreplace").decode()  # UTF-8 has no lone surrogates
                raise RequestError(written, value, "is not a field of this endpoint", "leave it out")
            neutral, remedy = REFUSED[name]
            if value not in neutral:
                raise RequestError(name, value, "is not supported", remedy)
        return {name: value for name, value in body.items() if name in cls.model_fields}


class WithoutEffect(Body):
    """Fields of OpenAI's API that are accepted because they cannot change an output of this server."""

    user: str | None = Field(None, description="The end user; not used.")
    metadata: Annotated[dict[str, str], at_most(MAX_LABELS)] | None = Field(
        None, description="Labels for the client's own records; not used."
    )
    store: bool | None = Field(
        None, description="false: the suffix drafter does not learn from the answer. Nothing else is kept."
    )
    service_tier: str | None = Field(None, description="There is one tier.")
    safety_identifier: str | None = Field(None, description="Not used.")
    prompt_cache_key: str | None = Field(None, description="Prefixes are found by their tokens.")
    prompt_cache_retention: str | None = Field(None, description="Cached prefixes stay while there is room.")
    prediction: dict[str, Any] | None = Field(None, description="Drafts come from the engine's drafter.")


class StreamOptions(Body):
    """What a stream has beside its text."""

    include_usage: bool | None = Field(None, description="Send token counts in a last chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted; chunks are never padded.")


class Speculation(Body):
    """Limits on speculation for this request."""

    num_drafts: int | None = Field(
        None, ge=0, description="Drafts per round at most; 0: no speculation. Changes speed, never the text."
    )
    tree: Literal["auto", "chain", "tree"] | None = Field(
        None,
        description="chain: drafts are chains; tree: they branch in every round; auto: where that pays (the default). "
        "Changes speed, never the text.",
    )


def sampling_field(name: str) -> Any:
    """An optional field that SamplingParams has, too, and describes."""
    entry = next(entry for entry in fields(SamplingParams) if entry.name == name)
    return Field(None, description=f"{entry.metadata['help']} (default: {entry.default})")


class Generation(WithoutEffect, StructuredFields):
    """Fields that completions and chat completions share. Defaults and limits are those of SamplingParams."""

    model: str | None = Field(None, description="The served model's name, as /v1/models lists it.")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        None, description="Choices per prompt; choice i has the seed `seed + i`."
    )
    seed: int | None = Field(None, ge=0, description="The same seed gives the same text; drawn and reported if absent.")
    temperature: float | None = sampling_field("temperature")
    top_p: float | None = sampling_field("top_p")
    top_k: int | None = sampling_field("top_k")
    min_p: float | None = sampling_field("min_p")
    presence_penalty: float | None = sampling_field("presence_penalty")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    repetition_penalty: float | None = sampling_field("repetition_penalty")
    logit_bias: Annotated[dict[str, float], at_most(MAX_BIAS)] | None = Field(
        None, description="Token id (as a string) to a bias in [-100, 100]."
    )
    stop: TextOrTexts | None = Field(None, description="The text ends before any of these.")
    stop_token_ids: Many[int] | None = Field(None, description="The text ends at any of these tokens.")
    min_tokens: int | None = sampling_field("min_tokens")
    ignore_eos: bool | None = sampling_field("ignore_eos")
    skip_special_tokens: bool | None = sampling_field("skip_special_tokens")
    stream: bool | None = Field(None, description="Send the text as server-sent events while it is generated.")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    speculation: Speculation | None = Field(None, description="A cap on this request's drafts.")
    return_speculation: bool | None = Field(
        None, description="Report which tokens were drafted, each round's drafts, and the acceptance."
    )

    @model_validator(mode="after")
    def check_stream_options(self) -> "Generation":
        if self.stream_options is not None and not self.stream:
            given = self.stream_options.model_dump(exclude_unset=True)
            raise RequestError("stream_options", given, "needs stream", "set stream to true, or leave it out")
        return self


class CompletionBody(Generation):
    """The body of POST /v1/completions."""

    prompt: Prompts = Field(description="Text, token ids, or a list of either; each prompt gets n choices.")
    max_tokens: int | None = Field(None, description="Tokens to generate at most; default 16.")
    echo: bool | None = Field(None, description="Put the prompt in front of the text.")
    logprobs: int | None = Field(None, description="Report each token's log-probability and the n largest.")


class TextPart(Body):
    """A part of a message; only text is supported."""

    type: str = Field(pattern="^text$")
    text: str

    @model_validator(mode="before")
    @classmethod
    def refuse_other_kinds(cls, part: Any) -> Any:
        """Refuse a part by its type, before its fields are refused as unknown."""
        if isinstance(part, dict) and part.get("type") != "text":
            raise RequestError("type", part.get("type"), "is not supported", "send parts of the type text")
        return part


class Message(Body):
    """One message of a chat; the model's template decides which roles there are."""

    role: str = Field(min_length=1)
    content: (
        Annotated[Annotated[str, Tag("<text>")] | Annotated[Many[TextPart], Tag("<list>")], Discriminator(text_or_list)]
        | None
    ) = Field(None, description="The text, or its parts; null: none.")
    name: str | None = None
    refusal: None = None
    parsed: Any = Field(None, description="What a client made of the content; not used.")
    tool_calls: Many[dict[str, Any]] | None = Field(None, description="The calls of an assistant's turn.")
    tool_call_id: str | None = Field(None, description="Which call a tool's message answers.")
    reasoning: str | None = Field(None, description="An assistant's thoughts; for templates that show them.")
    reasoning_content: str | None = Field(None, description="The same.")

    @model_validator(mode="after")
    def check_content(self) -> "Message":
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise RequestError("content", None, "is missing", "send text; only a message with tool_calls needs none")
        return self

    @property
    def text(self) -> str:
        """The content, its parts joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


Messages = Annotated[Many[Message], Field(min_length=1, max_length=MAX_MESSAGES), at_most(MAX_MESSAGES)]


class ChatBody(Generation, ToolFields):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(
        None, description="Tokens to generate at most; default: as many as the context holds."
    )
    max_tokens: int | None = Field(None, description="The older name of max_completion_tokens; not both.")
    logprobs: bool | None = Field(None, description="Report each token's log-probability.")
    top_logprobs: int | None = Field(None, description="Report the n largest ones, too; only with `logprobs`.")


class TokenizeBody(Body):
    """The body of POST /tokenize: a text, or a chat, which goes through the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = Field(True, description="Only with `prompt`: add what the tokenizer adds, such as bos.")

    @model_validator(mode="after")
    def check_one_source(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt", self.prompt, "give prompt or messages", "send exactly one of them")
        return self


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Many[int]
    skip_special_tokens: bool = False
