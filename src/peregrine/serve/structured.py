"""Structured output as clients ask for it: OpenAI's response_format, vLLM's and SGLang's fields, as one constraint."""

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Discriminator, Field, Tag

from peregrine.errors import RequestError
from peregrine.sampling import check_schema
from peregrine.text.tools import closed, tagged_grammar

FORMATS = "text, json_object, json_schema or structural_tag"
WITHOUT_SPACES = "JSON is written without white space; leave it out"
# Fields of a body -> the sampling parameter they are.
SAME = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
}
# Fields of vLLM's structured_outputs -> the sampling parameter they are; None: they ask for no text of their own.
OUTPUTS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
    "structural_tag": "grammar",
    "disable_additional_properties": None,  # as ever
    "disable_any_whitespace": None,
    "disable_fallback": None,
}


def object_or_text(value: Any) -> str:
    """The tag of a value that may be an object or a text."""
    return "<object>" if isinstance(value, dict) else "<string>"


ObjectOrText = Annotated[
    Annotated[dict[str, Any], Tag("<object>")] | Annotated[str, Tag("<string>")], Discriminator(object_or_text)
]


class StructuredFields(BaseModel):
    """Fields of which at most one constrains the text; JSON is written without white space."""

    response_format: dict[str, Any] | None = Field(
        None, description='OpenAI: {"type": "json_schema", "json_schema": {"schema": {...}}}, json_object or text.'
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="vLLM: an object with one of json, regex, choice, grammar, json_object."
    )
    guided_json: ObjectOrText | None = Field(None, description="vLLM: a JSON schema.")
    guided_regex: str | None = Field(None, description="vLLM: a regular expression for the whole text.")
    guided_choice: list[str] | None = Field(None, description="vLLM: the texts to choose from.")
    guided_grammar: str | None = Field(None, description="vLLM: a grammar in Lark's or GBNF's syntax.")
    guided_decoding_backend: str | None = Field(None, description="vLLM: accepted without effect; there is one.")
    json_schema: ObjectOrText | None = Field(None, description="SGLang: a JSON schema.")
    regex: str | None = Field(None, description="SGLang: a regular expression for the whole text.")
    ebnf: str | None = Field(None, description="SGLang: a grammar in GBNF's or Lark's syntax.")


@dataclass(frozen=True, slots=True)
class Asked:
    """A constraint: the body's field it came from, and the sampling parameter that it is."""

    field: str
    option: str
    value: object


def asked_constraint(body: StructuredFields) -> Asked | None:
    """What the body asks of the text; RequestError if that is contradictory."""
    asked = [] if body.response_format is None else response_format(body.response_format)
    if body.structured_outputs is not None:
        asked += structured_outputs(body.structured_outputs)
    asked += [Asked(name, option, vars(body)[name]) for name, option in SAME.items() if vars(body)[name] is not None]
    if len(asked) > 1:
        raise RequestError(asked[1].field, asked[1].value, f"{asked[0].field} was given, too", "keep one of them")
    if asked and asked[0].option == "choice" and not asked[0].value:
        raise RequestError(asked[0].field, asked[0].value, "is empty", "pass one text or more")
    return asked[0] if asked else None


def answer_schema(asked: Asked) -> dict[str, Any]:
    """The schema of an answer that may also be calls of tools; RequestError if it is not JSON that was asked for."""
    if asked.option == "json_object":
        return {"type": "object"}
    if asked.option != "json_schema":
        problem = "the text cannot be both this and a call"
        raise RequestError(asked.field, asked.value, problem, "set tool_choice to none, or ask for JSON by a schema")
    check_schema(asked.field, asked.value)
    schema: Any = asked.value
    return dict(closed(json.loads(schema) if isinstance(schema, str) else schema))


def response_format(given: dict[str, Any]) -> list[Asked]:
    """OpenAI's field; a schema is honoured whether or not it is called strict."""
    kind = given.get("type")
    if kind == "structural_tag":
        return [structural_tag("response_format", given)]
    if kind not in ("text", "json_object", "json_schema"):
        raise RequestError("response_format.type", kind, "is not supported", f"use {FORMATS}")
    known = ("type", "json_schema") if kind == "json_schema" else ("type",)
    refuse_unknown("response_format", given, known)
    if kind == "text":
        return []
    if kind == "json_object":
        return [Asked("response_format", "json_object", True)]
    described = given.get("json_schema")
    if not isinstance(described, dict) or described.get("schema") is None:
        remedy = 'send {"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'
        raise RequestError("response_format.json_schema", described, "has no schema", remedy)
    refuse_unknown("response_format.json_schema", described, ("name", "description", "schema", "strict"))
    return [Asked("response_format.json_schema.schema", "json_schema", described["schema"])]


def structural_tag(field: str, given: Any) -> Asked:
    """vLLM's and SGLang's tags in free text: what stands between a begin and its end is JSON."""
    check_schema(field, given)  # that it is an object in JSON, and how large and deep
    tag = json.loads(given) if isinstance(given, str) else given
    refuse_unknown(field, tag, ("type", "structures", "triggers"))
    tags, triggers = tag.get("structures"), tag.get("triggers")
    are_lists = isinstance(tags, list) and isinstance(triggers, list) and tags and triggers
    if not are_lists or not all(isinstance(text, str) and text for text in triggers):
        remedy = 'send {"structures": [{"begin": "...", "schema": {...}, "end": "..."}], "triggers": ["..."]}'
        raise RequestError(field, given, "has no structures or no triggers", remedy)
    read = []
    for place, one in enumerate(tags):
        begin, schema, end = map((one if isinstance(one, dict) else {}).get, ("begin", "schema", "end"))
        if not (isinstance(begin, str) and isinstance(schema, dict) and isinstance(end, str)):
            raise RequestError(f"{field}.structures[{place}]", one, "is not a tag", "send begin, schema and end")
        if not begin.startswith(tuple(triggers)):
            raise RequestError(f"{field}.structures[{place}].begin", begin, "has no trigger", "begin it with one")
        read.append((begin, schema, end))
    return Asked(field, "grammar", tagged_grammar(read, triggers))


def refuse_unknown(field: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    """Refuse keys that would be ignored."""
    for name, value in given.items():
        if name not in known and value is not None:
            raise RequestError(f"{field}.{name}", value, "is not known here", f"use {', '.join(known)}")


def structured_outputs(given: dict[str, Any]) -> list[Asked]:
    """vLLM's field."""
    asked = []
    for name, value in given.items():
        field = f"structured_outputs.{name}"
        if value is None or value is False:
            continue
        if name not in OUTPUTS:
            remedy = WITHOUT_SPACES if name == "whitespace_pattern" else f"use one of {', '.join(OUTPUTS)}"
            raise RequestError(field, value, "is not supported", remedy)
        option = OUTPUTS[name]
        if name == "structural_tag":
            asked.append(structural_tag(field, value))
        elif option is not None:
            asked.append(Asked(field, option, value))
    if not asked:
        raise RequestError("structured_outputs", given, "asks for nothing", "use json, regex, choice or grammar")
    return asked
