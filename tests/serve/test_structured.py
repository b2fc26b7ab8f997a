"""Structured output over HTTP: every client's way to ask for it, the openai client's parse, and refusals by name."""

import json
import re

import httpx
import openai
import pydantic
import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "bird": {"type": "string", "maxLength": 8},
        "wings": {"type": "integer", "minimum": 0, "maximum": 4},
    },
    "required": ["bird", "wings"],
    "additionalProperties": False,
}
OPEN = {key: value for key, value in SCHEMA.items() if key != "additionalProperties"}
GBNF = 'root ::= "<" [a-c]+ ">"'


def is_bird(text: str) -> bool:
    value = json.loads(text)
    return sorted(value) == ["bird", "wings"] and len(value["bird"]) <= 8 and 0 <= value["wings"] <= 4


def is_code(text: str) -> bool:
    return re.fullmatch("[a-z]{2}-[0-9]{2}", text) is not None


CODE = r"[a-z]{2}-\d{2}"
ASKED = {
    "OpenAI": ({"response_format": {"type": "json_schema", "json_schema": {"name": "b", "schema": SCHEMA}}}, is_bird),
    "vLLM json": ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, is_bird),
    "vLLM json, open": ({"structured_outputs": {"json": OPEN}}, is_bird),
    "vLLM json, closed": ({"structured_outputs": {"json": OPEN, "disable_additional_properties": True}}, is_bird),
    "vLLM, an older body": ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar:no-fallback"}, is_bird),
    "vLLM regex": ({"structured_outputs": {"regex": CODE}}, is_code),
    "vLLM choice": ({"structured_outputs": {"choice": ["up", "down"]}}, ["up", "down"].__contains__),
    "guided_json": ({"guided_json": json.dumps(SCHEMA)}, is_bird),
    "guided_choice": ({"guided_choice": ["up", "down"]}, ["up", "down"].__contains__),
    "guided_regex": ({"guided_regex": CODE}, is_code),
    "SGLang json_schema": ({"json_schema": json.dumps(SCHEMA)}, is_bird),
    "SGLang regex": ({"regex": CODE}, is_code),
    "SGLang ebnf": ({"ebnf": GBNF, "max_tokens": 20}, lambda text: re.fullmatch("<[a-c]+>?", text)),
    "text": ({"response_format": {"type": "text"}, "max_tokens": 4}, lambda text: True),
}


@pytest.mark.parametrize("name", ASKED)
def test_every_way_to_ask(http: httpx.Client, name: str) -> None:
    asked, holds = ASKED[name]
    for path, prompt in (
        ("completions", {"prompt": "A bird:"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "A bird?"}]}),
    ):
        body = {**prompt, "temperature": 1.0, "seed": 5, "max_tokens": 60, **asked}
        response = http.post(f"/v1/{path}", json=body)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        text = choice["text"] if path == "completions" else choice["message"]["content"]
        assert holds(text), text


class Bird(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=12)
    colours: list[str] = pydantic.Field(max_length=1)
    flies: bool


def test_the_openai_clients_parse_and_streams(client: openai.OpenAI) -> None:
    asked = {
        "model": "merlin",
        "messages": [{"role": "user", "content": "Describe a bird."}],
        "temperature": 0,
        "max_tokens": 120,
    }
    for n in (1, 2):
        parsed = client.chat.completions.parse(**asked, n=n, response_format=Bird)  # type: ignore[arg-type]
        assert all(isinstance(choice.message.parsed, Bird) for choice in parsed.choices)
    described = {"type": "json_schema", "json_schema": {"name": "bird", "schema": Bird.model_json_schema()}}
    stream = client.chat.completions.create(**asked, stream=True, response_format=described)  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert Bird.model_validate_json(text) == parsed.choices[0].message.parsed


TAG = {"begin": "<f=fly>", "schema": {"type": "object", "properties": {"km": {"type": "integer"}}}, "end": "</f>"}
DEEP = '{"prompt": "x", "guided_json": ' + '{"not": ' * 9000 + "{}" + "}" * 9000 + "}"
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "response_format.type": ({"response_format": {"type": "xml"}}, "use text, json_object, json_schema or"),
    "response_format.json_schema": ({"response_format": {"type": "json_schema"}}, "has no schema"),
    "response_format.json_schema.schema ": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
        "=False: is not a JSON object",
    ),
    "structured_outputs.whitespace_pattern": (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "without white space",
    ),
    "response_format.json_schema.schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        'Unimplemented keys: ["not"]',
    ),
    "response_format.foo": ({"response_format": {"type": "json_object", "foo": 1}}, "use type"),
    "response_format.json_schema.foo": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "foo": 1}}},
        "use name, description, schema, strict",
    ),
    "structured_outputs.regex": ({"structured_outputs": {"regex": "((x{999}){999}){999}"}}, "is too complex"),
    "structured_outputs.structural_tag": ({"structured_outputs": {"structural_tag": "{}"}}, "has no structures"),
    "structured_outputs.structural_tag.format": (
        {"structured_outputs": {"structural_tag": {"format": {}}}},
        "use type",
    ),
    "response_format.structures[1]": (
        {"response_format": {"type": "structural_tag", "structures": [TAG, {"begin": "<f"}], "triggers": ["<f"]}},
        "send begin, schema and end",
    ),
    "response_format.structures[0].begin": (
        {"response_format": {"type": "structural_tag", "structures": [TAG], "triggers": ["<g"]}},
        "has no trigger",
    ),
    "response_format": (
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [TAG | {"schema": {"not": {}}}],
                "triggers": ["<"],
            }
        },
        'Unimplemented keys: ["not"]',
    ),
    "structured_outputs": ({"structured_outputs": {}}, "asks for nothing"),
    "guided_choice": ({"guided_choice": []}, "is empty"),
    "regex": ({"regex": "(a"}, "unclosed group"),
    "ebnf": ({"ebnf": "root ::= missing"}, ""),
    "guided_regex": ({"guided_json": {}, "guided_regex": "a"}, "guided_json was given, too"),
    "guided_regex ": (
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "response_format was given, too",
    ),
    "guided_json": ({"guided_json": {"description": "x" * (1 << 19)}}, "is too large"),
    "ignore_eos": ({"regex": "a", "ignore_eos": True}, "ends by an end token"),
    "guided_whitespace_pattern": ({"guided_whitespace_pattern": "[ ]*"}, "without white space"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_refusals_name_the_field_as_the_body_does(http: httpx.Client, field: str) -> None:
    asked, problem = REFUSED[field]
    response = http.post("/v1/completions", json={"prompt": "x", **asked})
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["param"], problem in error["message"]) == (field.strip(), True), error


def test_a_body_nested_without_end_is_refused(http: httpx.Client) -> None:
    response = http.post("/v1/completions", content=DEEP, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "error" in response.json()
