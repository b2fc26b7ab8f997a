"""What people run against OpenAI's API, unchanged: langchain-openai, and the openai client's parsed answers."""

import langchain_openai
import openai
import pydantic
import pytest
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage

from serve.conftest import Served


class Bird(pydantic.BaseModel):
    """A bird."""

    name: str = pydantic.Field(max_length=12)
    wings: int = pydantic.Field(ge=0, le=4)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ASKED = {"model": "merlin", "temperature": 0, "max_tokens": 120}
QUESTION = [{"role": "user", "content": "Describe a bird."}]
TOOLS = [openai.pydantic_function_tool(Bird)]


@pytest.fixture(scope="module")
def model(server: Served) -> langchain_openai.ChatOpenAI:
    where = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    return langchain_openai.ChatOpenAI(**where, **ASKED)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_returns_an_object(model: langchain_openai.ChatOpenAI, method: str) -> None:
    structured = model.with_structured_output(Bird, method=method)  # type: ignore[arg-type]
    answer = structured.invoke("Describe a bird.")
    assert isinstance(answer, Bird)
    assert list(structured.stream("Describe a bird."))[-1] == answer


def test_langchain_calls_a_function_until_it_answers(model: langchain_openai.ChatOpenAI) -> None:
    messages: list[BaseMessage] = [HumanMessage("What is 2 + 3?")]
    caller = model.bind_tools([add], tool_choice="any", parallel_tool_calls=False)
    answer, whole = caller.invoke(messages), None
    for chunk in caller.stream(messages):
        whole = chunk if whole is None else whole + chunk
    (call,) = answer.tool_calls
    assert whole is not None
    assert [(again["name"], again["args"]) for again in whole.tool_calls] == [("add", call["args"])]  # type: ignore[attr-defined]
    messages += [answer, ToolMessage(str(add(**call["args"])), tool_call_id=call["id"])]
    last = model.bind_tools([add], tool_choice="none").invoke(messages)
    assert last.content
    assert not last.tool_calls


@pytest.mark.parametrize("way", ["answer", "call", "either"])
def test_the_openai_client_parses_and_streams(client: openai.OpenAI, way: str) -> None:
    asked: dict[str, object] = {**ASKED, "messages": QUESTION}
    asked |= {} if way == "call" else {"response_format": Bird}
    asked |= {} if way == "answer" else {"tools": TOOLS, "parallel_tool_calls": False}
    asked |= {"tool_choice": "required"} if way == "call" else {}
    whole = client.chat.completions.parse(**asked).choices[0]  # type: ignore[arg-type]
    seen: dict[str, int] = {}
    with client.chat.completions.stream(**asked) as stream:  # type: ignore[arg-type]
        for event in stream:
            seen[event.type] = seen.get(event.type, 0) + 1
        streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        found = [call.function.parsed_arguments for call in choice.message.tool_calls or ()] or [choice.message.parsed]
        assert [type(each) for each in found] == [Bird]
        assert way == "either" or choice.finish_reason == {"answer": "stop", "call": "tool_calls"}[way]
    assert streamed.message.content == whole.message.content
    kind = "tool_calls.function.arguments" if streamed.message.tool_calls else "content"
    assert seen[f"{kind}.delta"] > 2
    assert seen[f"{kind}.done"] == 1
