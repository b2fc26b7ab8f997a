"""From a request body to the engine's requests: prompts as token ids, and one set of sampling parameters per choice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from peregrine.errors import RequestError
from peregrine.llm import LLM
from peregrine.sampling import SamplingParams
from peregrine.serve.protocol import ChatBody, CompletionBody, Generation, Message
from peregrine.serve.structured import StructuredFields, asked_constraint

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
# Fields of a body that SamplingParams has under the same name and with the same kind of value.
SAME_NAME = {entry.name for entry in fields(SamplingParams)} & set(Generation.model_fields) - {
    "logit_bias",
    *StructuredFields.model_fields,
}


@dataclass(frozen=True, slots=True)
class Job:
    """One body as generations for the engine; generation p * n + c is choice c of prompt p."""

    prompts: list[list[int]]
    params: list[SamplingParams]  # one per choice
    echoes: list[str] | None  # the prompts' texts, if the body asks for them in front of the output
    body: CompletionBody | ChatBody
    scores_only: bool  # max_tokens 0: the prompt is scored, and the one token generated with it is dropped

    @property
    def size(self) -> int:
        """Number of generations."""
        return len(self.prompts) * len(self.params)

    def generation(self, index: int) -> tuple[list[int], SamplingParams]:
        """Prompt and parameters of one generation."""
        return self.prompts[index // len(self.params)], self.params[index % len(self.params)]


@contextmanager
def named_as_in(body: CompletionBody | ChatBody) -> Iterator[None]:
    """A RequestError raised inside names the field as the body does: max_completion_tokens, not max_tokens."""
    names = {"num_drafts": "speculation.num_drafts", "text": "prompt"}
    if isinstance(body, ChatBody):
        used = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
        names |= {"max_tokens": used, "logprobs": "top_logprobs", "prompt": "messages", "text": "messages"}
    constraint = asked_constraint(body)
    if constraint is not None:
        names[constraint.option] = constraint.field
    try:
        yield
    except RequestError as error:
        field = names.get(error.field, error.field)
        raise RequestError(field, error.value, error.problem, error.remedy) from error


def completion_job(body: CompletionBody, llm: LLM) -> Job:
    """The job of a body of POST /v1/completions."""
    prompts = prompt_list(body)
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    scores_only = max_tokens == 0 and body.echo is True
    more = {
        "max_tokens": 1 if scores_only else max_tokens,
        "logprobs": body.logprobs,
        "prompt_logprobs": body.logprobs if body.echo else None,
    }
    with named_as_in(body):
        params = sampling_of(body, more, llm.sampling)
        ids = [llm.encode(prompt) for prompt in prompts]
        echoes = None
        if body.echo:
            skip = params[0].skip_special_tokens
            echoes = [p if isinstance(p, str) else llm.tokenizer.decode(p, skip) for p in prompts]
        return Job(ids, params, echoes, body, scores_only)


def prompt_list(body: CompletionBody) -> list[str] | list[list[int]]:
    """The prompts as a list; a body has a text, texts, token ids, or lists of token ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt", prompt, "is empty", "send text or token ids")
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


def chat_job(body: ChatBody, llm: LLM) -> Job:
    """The job of a body of POST /v1/chat/completions."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        problem = "max_completion_tokens was given, too"
        raise RequestError("max_tokens", body.max_tokens, problem, "keep one of them")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs", body.top_logprobs, "needs logprobs", "set logprobs to true")
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    more = {"max_tokens": max_tokens, "logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    with named_as_in(body):
        params = sampling_of(body, more, llm.sampling)
        return Job([llm.encode_chat(plain_messages(body.messages))], params, None, body, False)


def plain_messages(messages: list[Message]) -> list[dict[str, str]]:
    """Messages as chat templates read them."""
    return [
        {"role": message.role, "content": message.text, **({} if message.name is None else {"name": message.name})}
        for message in messages
    ]


def sampling_of(
    body: Generation, more: dict[str, int | None], complete: Callable[[dict[str, object]], SamplingParams]
) -> list[SamplingParams]:
    """One set of parameters per choice; `complete` adds the model's defaults for what the body does not say."""
    asked = body.model_dump(include=SAME_NAME, exclude_none=True)
    if body.logit_bias is not None:
        asked["logit_bias"] = {token_id(key): bias for key, bias in body.logit_bias.items()}
    if body.speculation is not None:
        asked["num_drafts"] = body.speculation.num_drafts
    constraint = asked_constraint(body)
    if constraint is not None:
        asked[constraint.option] = constraint.value
    return complete({**asked, **more, "report_drafts": body.return_speculation is True}).generations()


def token_id(key: str) -> int:
    """A key of logit_bias; JSON has no integers there."""
    if not key.isascii() or not key.isdigit() or len(key) > 9:
        raise RequestError("logit_bias", key, "has a key that is not a token id", 'use keys such as "42"')
    return int(key)
