"""From a request body to the engine's requests: prompts as token ids, and one set of sampling parameters per choice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from peregrine.errors import RequestError
from peregrine.grammar import GRAMMARS_PRESENT, lark_definition
from peregrine.llm import LLM
from peregrine.sampling import SamplingParams
from peregrine.serve.protocol import ChatBody, CompletionBody, Generation, Message
from peregrine.serve.structured import StructuredFields, answer_schema, asked_constraint
from peregrine.serve.tools import (
    ToolPlan,
    plain_calls,
    sampling_of_harmony,
    sampling_of_tools,
    template_variables,
    told_messages,
    tool_plan,
)
from peregrine.text.chat import template_of, write_chat
from peregrine.text.chat_parts import takes_tools, writes_tools
from peregrine.text.harmony import ENDS_ANSWER
from peregrine.text.reasoning import ReasoningStream
from peregrine.text.tool_formats import HARMONY, format_of

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
# A longer text is refused before it is tokenized: no text has so many characters for each token of the context.
MAX_CHARACTERS_PER_TOKEN = 64
MAX_DETAILS = 2**20  # of one response, see Job.num_details: 120 MB, and as much once more as JSON
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
    num_details: int  # log-probabilities and drafts that the response may have
    max_len: int  # the context
    default_length: bool  # the body sets no max_tokens, so a long prompt may leave less room than the default
    tools: ToolPlan | None = None
    thinks: bool = False  # the model writes its thoughts before its answer
    opened: bool = False  # and the prompt has begun them
    harmony: bool = False  # its thoughts, calls and answer are messages in channels

    @property
    def size(self) -> int:
        """Number of generations."""
        return len(self.prompts) * len(self.params)

    def generation(self, index: int) -> tuple[list[int], SamplingParams]:
        """Prompt and parameters of one generation."""
        prompt, params = self.prompts[index // len(self.params)], self.params[index % len(self.params)]
        room = self.max_len - len(prompt)
        if self.default_length and 0 < room < COMPLETION_MAX_TOKENS:
            params = replace(params, max_tokens=room)
        return prompt, params

    def compile(self, llm: LLM) -> None:
        """Compile the grammars of all generations, if they have one; RequestError names the tool that is to blame."""
        try:
            list(map(llm.engine.compile, [self.params[0]] * self.size))  # they are used at the same time, too
        except RequestError:
            for place, tool in enumerate(self.tools.described if self.tools is not None else ()):
                function: Any = tool["function"]
                if self.tools is not None and function["name"] in self.tools.held:
                    try:
                        llm.engine.compile(SamplingParams(json_schema=self.tools.schemas[function["name"]]))
                    except RequestError as error:
                        field = f"tools[{place}].function.parameters"
                        raise RequestError(field, function.get("parameters"), error.problem, error.remedy) from None
            raise


@contextmanager
def named_as_in(body: CompletionBody | ChatBody) -> Iterator[None]:
    """A RequestError raised inside names the field as the body does: max_completion_tokens, not max_tokens."""
    names = {"num_drafts": "speculation.num_drafts", "tree": "speculation.tree", "text": "prompt"}
    if isinstance(body, ChatBody):
        used = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
        names |= {"max_tokens": used, "logprobs": "top_logprobs", "prompt": "messages", "text": "messages"}
        names |= {"json_schema": "tools", "grammar": "tools"} if body.tools else {}
    constraint = asked_constraint(body)
    if constraint is not None:
        names[constraint.option] = constraint.field
        tools = "tools, " if names.get("grammar") == "tools" else ""  # both are in it
        names["grammar"] = f"{tools}{constraint.field}"
    try:
        yield
    except RequestError as error:
        field = names.get(error.field, error.field)
        raise RequestError(field, error.value, error.problem, error.remedy) from error


def num_generations(body: CompletionBody | ChatBody) -> int:
    """How many generations a body asks for; known before anything is made for them."""
    return (len(prompt_list(body)) if isinstance(body, CompletionBody) else 1) * (body.n or 1)


def make_job(
    prompts: list[list[int]],
    params: list[SamplingParams],
    echoes: list[str] | None,
    body: CompletionBody | ChatBody,
    llm: LLM,
) -> Job:
    """A job whose response is not larger than one may be."""
    one, limits = params[0], llm.engine.limits
    drafts = limits.nodes if one.report_drafts else 0
    per_token = (0 if one.logprobs is None else one.logprobs + 1) + drafts
    per_prompt_token = 0 if one.prompt_logprobs is None else one.prompt_logprobs + 1
    most = limits.max_len if one.max_tokens is None else one.max_tokens
    details = len(params) * sum(
        per_prompt_token * len(prompt) + per_token * max(0, min(most, limits.max_len - len(prompt)))
        for prompt in prompts
    )
    if details > MAX_DETAILS:
        name, value = ("return_speculation", True) if drafts else ("logprobs", one.logprobs)
        problem = f"the response may have {details} log-probabilities and drafts, more than {MAX_DETAILS}"
        raise RequestError(name, value, problem, "lower max_tokens, n, or the number of log-probabilities")
    completes = isinstance(body, CompletionBody)
    scores_only, default_length = completes and body.max_tokens == 0, completes and body.max_tokens is None
    return Job(prompts, params, echoes, body, scores_only, details, limits.max_len, default_length)


def check_length(field: str, characters: int, llm: LLM) -> None:
    """Refuse a text that cannot fit the context, before it is tokenized."""
    most = MAX_CHARACTERS_PER_TOKEN * llm.engine.limits.max_len
    if characters > most:
        problem = f"does not fit the context of {llm.engine.limits.max_len} tokens"
        raise RequestError(field, f"{characters} characters", problem, f"send {most} characters at most")


def completion_job(body: CompletionBody, llm: LLM) -> Job:
    """The job of a body of POST /v1/completions."""
    prompts = prompt_list(body)
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    scores_only = max_tokens == 0 and body.echo is True
    if max_tokens < 1 and not scores_only:
        remedy = f"use at least 1 (default: {COMPLETION_MAX_TOKENS}), or 0 with echo to score the prompt"
        raise RequestError("max_tokens", max_tokens, "generates nothing", remedy)
    more = {
        "max_tokens": 1 if scores_only else max_tokens,
        "logprobs": body.logprobs,
        "prompt_logprobs": body.logprobs if body.echo else None,
    }
    with named_as_in(body):
        params = sampling_of(body, more, llm.sampling)
        for prompt in prompts:
            if isinstance(prompt, str):
                check_length("prompt", len(prompt), llm)
            else:
                llm.engine.limits.check_ids("prompt", prompt)  # before they are decoded
        ids = [llm.encode(prompt) for prompt in prompts]
        echoes = None
        if body.echo:
            skip = params[0].skip_special_tokens
            echoes = [p if isinstance(p, str) else llm.tokenizer.decode(p, skip) for p in prompts]
        return make_job(ids, params, echoes, body, llm)


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
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs", body.top_logprobs, "needs logprobs", "set logprobs to true")
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    more: dict[str, Any] = {"max_tokens": max_tokens}
    more["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    with named_as_in(body):
        messages = plain_messages(body.messages)
        template = template_of(llm.tokenizer, messages, with_tools=bool(body.tools) and body.tool_choice != "none")
        plan = tool_plan(body, template)
        harmony = format_of(template, body.tool_parser or "auto") == HARMONY
        described = plan is not None and writes_tools(llm.tokenizer, template)
        variables = template_variables(body, plan, template)
        if plan is not None and not described and not takes_tools(llm.tokenizer, template):
            del variables["tools"]
        text = write_chat(llm.tokenizer, told_messages(messages, plan, described), template, variables)
        thinks = harmony or ReasoningStream.end in (template or "")
        opened = thinks and text.rstrip().endswith(ReasoningStream.begin)
        more |= in_channels(body, plan, llm) if harmony else constraint_of_tools(body, plan, opened, llm)
        if thinks or (plan is not None and plan.schema is None):
            more["skip_special_tokens"] = False  # marks of thoughts and calls may be special tokens
        params = sampling_of(body, more, llm.sampling)
        check_length("messages", len(text), llm)
        job = make_job([llm.tokenizer.encode(text, add_special=False)], params, None, body, llm)
        return replace(job, tools=plan, thinks=thinks, opened=opened, harmony=harmony)


def constraint_of_tools(body: ChatBody, plan: ToolPlan | None, opened: bool, llm: LLM) -> dict[str, Any]:
    """Sampling parameters that follow from tools and thinking."""
    more: dict[str, Any] = {}
    asked = asked_constraint(body)
    if plan is not None:
        more = sampling_of_tools(plan, None if asked is None else answer_schema(asked), llm.tokenizer)
    if opened and (asked is not None or more):
        mark = llm.tokenizer.backend.token_to_id(ReasoningStream.end)
        if mark is None:
            problem = "the model thinks first, and the end of its thoughts is no token"
            raise RequestError("chat_template_kwargs", body.chat_template_kwargs, problem, "turn thinking off there")
        more["grammar_after"] = mark
    return more


def in_channels(body: ChatBody, plan: ToolPlan | None, llm: LLM) -> dict[str, Any]:
    """Sampling parameters of a chat in channels: a constraint is on the final message, or on a call."""
    more: dict[str, Any] = {}
    if not body.ignore_eos:
        known = llm.tokenizer.special_ids - set(llm.engine.limits.eos_ids)
        ends = known & {llm.tokenizer.backend.token_to_id(mark) for mark in ENDS_ANSWER}
        more["stop_token_ids"] = [*(body.stop_token_ids or ()), *sorted(ends)]
    asked, answer = asked_constraint(body), None
    if asked is not None and GRAMMARS_PRESENT:
        if plan is not None:
            answer_schema(asked)  # refuses what can be no answer beside calls
        constraint = SamplingParams(**{asked.option: asked.value}).constraint  # type: ignore[arg-type]
        answer = None if constraint is None else lark_definition(constraint)
        if answer is None:
            problem = "is a grammar of the whole text, and this model writes messages in channels"
            raise RequestError(asked.field, asked.value, problem, "use a JSON schema, a regex or a choice")
    return more | sampling_of_harmony(plan, answer, llm.tokenizer)


def plain_messages(messages: list[Message]) -> list[dict[str, object]]:
    """Messages as chat templates read them."""
    plain = []
    for place, message in enumerate(messages):
        entry: dict[str, object] = {"role": message.role, "content": message.text}
        if message.tool_calls:
            entry["tool_calls"] = plain_calls(message.tool_calls, f"messages[{place}]")
        for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
            if vars(message)[name] is not None:
                entry[name] = vars(message)[name]
        plain.append(entry)
    return plain


def sampling_of(
    body: Generation, more: dict[str, Any], complete: Callable[[dict[str, object]], SamplingParams]
) -> list[SamplingParams]:
    """One set of parameters per choice; `complete` adds the model's defaults for what the body does not say."""
    asked: dict[str, Any] = body.model_dump(include=SAME_NAME, exclude_none=True)
    if body.logit_bias is not None:
        asked["logit_bias"] = {token_id(key): bias for key, bias in body.logit_bias.items()}
    if body.speculation is not None:
        asked |= body.speculation.model_dump(exclude_none=True)
    constraint = asked_constraint(body)
    if constraint is not None and not more.keys() & {"json_schema", "grammar"}:  # which have it in them
        asked[constraint.option] = constraint.value
    return complete({**asked, **more, "report_drafts": body.return_speculation is True}).generations()


def token_id(key: str) -> int:
    """A key of logit_bias; JSON has no integers there."""
    if not key.isascii() or not key.isdigit() or len(key) > 9:
        raise RequestError("logit_bias", key, "has a key that is not a token id", 'use keys such as "42"')
    return int(key)
