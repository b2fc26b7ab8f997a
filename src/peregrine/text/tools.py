"""What tools mean for the text: the JSON schema of calls that must be made, the grammar of those that may be."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from peregrine.text.tool_formats import ARGUMENTS_MARK, FORMATS, SEPARATOR, Tools

LARK = "%llguidance {}"  # the first line of a grammar that is in Lark's syntax for sure


def call_schema(tools: Tools, most: int | None, key: str = "arguments") -> dict[str, object]:
    """The JSON schema of a list of calls, one at least; `key` is where a call's arguments stand."""
    items = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{name}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name in tools
    ]
    limit = {} if most is None else {"maxItems": most}
    schemas = {name: moved(schema, f"#/$defs/{name}") for name, schema in tools.items()}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": items}, "$defs": schemas}


def moved(schema: object, root: str) -> object:
    """The schema with its own references pointing to where it stands now."""
    if isinstance(schema, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value[:1] == "#"
            else moved(value, root)
            for key, value in schema.items()
        }
    return [moved(item, root) for item in schema] if isinstance(schema, list) else schema


OTHERS = ("patternProperties", "propertyNames", "minProperties", "dependentRequired")  # are about any property
APPLIED = ("$ref", "anyOf", "oneOf", "if", "dependentSchemas")  # keywords that add to what stands beside them


# What says nothing about a value: formats of any text, as pydantic and OpenAPI name them, and keywords switched off.
IDLE: dict[str, tuple[object, ...]] = {
    "format": ("password", "binary", "path", "file-path", "directory-path"),
    "uniqueItems": (False,),
    "dependentRequired": ({},),
}


def closed(schema: Mapping[str, object]) -> Mapping[str, object]:
    """The schema without properties that it does not list, where it does not mention them: nobody expects others.

    What it allows then, it allowed before. A schema that combines others is not closed: each part lists only some.
    Keywords that ask for nothing are left out.
    """
    combines = any("allOf" in part or ("properties" in part and part.keys() & APPLIED) for part in parts(schema))
    return tidied(schema, not combines)


def parts(value: object) -> Iterator[Mapping[str, object]]:
    """Every object inside a JSON value."""
    if isinstance(value, Mapping):
        yield value
    if isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from parts(item)


def tidied(schema: Mapping[str, object], close: bool) -> dict[str, object]:
    """The schema and those inside it without idle keywords, and closed."""

    def inside(value: object) -> object:
        return tidied(value, close) if isinstance(value, Mapping) else value

    tidy = {key: value for key, value in schema.items() if value not in IDLE.get(key, ())}
    for key, value in tidy.items():
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
            tidy[key] = {name: inside(part) for name, part in value.items()}
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            tidy[key] = [inside(part) for part in value]
        elif key in ("items", "additionalProperties"):
            tidy[key] = inside(value)
    listed, required = schema.get("properties"), schema.get("required", [])
    lists = (
        isinstance(listed, Mapping)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in listed for name in required)
    )
    if close and lists and not tidy.keys() & OTHERS:
        tidy.setdefault("additionalProperties", False)
    return tidy


COMPACT = {"x-guidance": {"whitespace_flexible": False}}


def auto_grammar(
    format: str,
    tools: Tools,
    strict: Collection[str],
    mark: Callable[[str], str],
    most: int | None = None,
    answer: Mapping[str, object] | None = None,
) -> str:
    """A grammar in Lark's syntax: any text, with calls in this format; arguments of strict tools follow their schemas.

    `mark` writes a mark of the format as Lark does: a special token by its id, other text as a string. `most` is 1, or
    None for any number of calls. With `answer`, the text is either calls alone or JSON that this schema allows.
    """
    schemas = {
        name: {**(schema if name in strict else {"type": "object"}), **COMPACT} for name, schema in tools.items()
    }
    begin, end = FORMATS[format].begin, FORMATS[format].end
    instead = "text" if answer is None else "answer"
    lines = [] if answer is None else [f"answer: %json {json.dumps({**answer, **COMPACT})}"]
    if begin is None:
        key = "parameters" if format == "llama3_json" else "arguments"
        lists = json.dumps({**call_schema(schemas, most, key), **COMPACT})
        lines += [f"start: calls | {instead}", f"calls: %json {lists}"]
        return "\n".join([LARK, *lines, *([r"text: /([^\s\[{](.|\n)*)?/"] if answer is None else [])])
    bodies = []
    for name, schema in schemas.items():
        arguments = f"%json {json.dumps(schema)}"
        if format == "mistral":
            bodies.append(f"{json.dumps(name)} {mark('[ARGS]')} {arguments}")
        elif format == "deepseek":
            bodies.append(f"{json.dumps(name)} {mark(SEPARATOR)} {arguments} {mark(str(end))}")
        elif format == "kimi_k2":
            number = f"{json.dumps(f'functions.{name}:')} /[0-9]+/ {mark(ARGUMENTS_MARK)}"
            bodies.append(f"{number} {arguments} {mark(str(end))}")
        else:
            head = json.dumps(f'\n{{"name": "{name}", "arguments": ')
            bodies.append(f"{head} {arguments} {json.dumps('}' + chr(10))} {mark(str(end))}")
    lines.append("body: " + " | ".join(bodies))
    skipped = " | ".join(mark(text) for text in FORMATS[format].skipped)
    if answer is not None:
        between = f"({skipped})*" if skipped else ""
        lines.append(f"start: ({between} {mark(begin)} body){'+' if most is None else ''} {between} | answer")
        return "\n".join([LARK, *lines])
    free = f"(TEXT ({skipped}))* TEXT" if skipped else "TEXT"
    special = mark(begin).startswith("<[")
    lines += [f"start: call{'*' if most is None else '?'} {free}", "call: trigger body", r"TEXT: /(.|\n)*/"]
    lines.append(f"trigger: {free} {mark(begin)}" if special else f"trigger[lazy]: TEXT {mark(begin)}")
    return "\n".join([LARK, *lines])


def tagged_grammar(tags: Sequence[tuple[str, Mapping[str, object], str]], triggers: Sequence[str]) -> str:
    """A grammar in Lark's syntax: any text, in which a trigger begins one of these tags: (begin, schema, end).

    Each begin starts with a trigger; between begin and end stands JSON.
    """
    bodies: dict[str, list[str]] = {}
    for begin, schema, end in tags:
        trigger = next(trigger for trigger in triggers if begin.startswith(trigger))
        rest, last = (json.dumps(text) if text else "" for text in (begin.removeprefix(trigger), end))
        bodies.setdefault(trigger, []).append(f"{rest} %json {json.dumps({**closed(schema), **COMPACT})} {last}")
    lines = [LARK, f"start: ({' | '.join(f'tag{place}' for place in range(len(bodies)))})* TEXT", r"TEXT: /(.|\n)*/"]
    for place, (trigger, alternatives) in enumerate(bodies.items()):
        lines.append(f"trigger{place}[lazy]: TEXT {json.dumps(trigger)}")
        lines.append(f"tag{place}: trigger{place} ({' | '.join(alternatives)})")
    return "\n".join(lines)
