"""More than 200 JSON schemas of varied kinds, small enough that most texts end within 200 tokens."""

from collections.abc import Iterator

from peregrine.bench.grammar import CALL

Schema = dict[str, object]

# Every kind of value.
LEAVES: list[Schema] = [
    {"type": "null"},
    {"type": "boolean"},
    {"const": 'a "quoted" \\ text\n'},
    {"const": {"deep": [1, {"x": None}], "e": 1.5}},
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, "one", None, True, [1], {"one": 1}]},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 20},
    {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 25},
    {"type": "integer", "minimum": 100000, "maximum": 100999},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "minimum": -273.15, "maximum": -1.5},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 9.99},
    {"type": "string", "maxLength": 6},
    {"type": "string", "minLength": 3, "maxLength": 8},
    {"type": "string", "minLength": 4, "maxLength": 4},
    {"type": "string", "pattern": "^[a-z]{1,5}$"},
    {"type": "string", "pattern": "^(cat|dog)s?$"},
    {"type": "string", "pattern": "^\\+?[0-9]{3}-[0-9]{4}$"},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,5}( [A-Z][a-z]{2,5})?$"},
    {"type": "string", "pattern": "^#[0-9a-f]{6}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": ["integer", "null"], "minimum": 1, "maximum": 9},
    {"type": ["boolean", "string"], "maxLength": 4},
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 3}]},
    {"anyOf": [{"const": "x"}, {"type": "array", "items": {"const": 1}, "maxItems": 2}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 5}]},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 3}, {"type": "string", "maxLength": 2}]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 2},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}], "items": False, "minItems": 2},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False},
]


def around(leaf: Schema) -> Iterator[Schema]:
    """The leaf alone, and in every kind of container."""
    closed = {"type": "object", "additionalProperties": False}
    yield leaf
    yield {**closed, "properties": {"id": {"const": 7}, "value": leaf}, "required": ["id", "value"]}
    yield {**closed, "properties": {"first": leaf, "second": {"type": "boolean"}}, "required": ["second"]}
    yield {"type": "array", "items": leaf, "minItems": 1, "maxItems": 2}
    yield {"$ref": "#/$defs/it", "$defs": {"it": {**closed, "properties": {"in": leaf}, "required": ["in"]}}}
    yield {**closed, "properties": {"either": {"anyOf": [leaf, {"type": "null"}]}}, "required": ["either"]}


OTHERS: list[Schema] = [
    CALL,
    {  # what pydantic writes for nested models with optional fields
        "$defs": {
            "Colour": {"enum": ["black", "white"], "title": "Colour", "type": "string"},
            "Wing": {
                "properties": {"span": {"maximum": 9, "minimum": 1, "title": "Span", "type": "integer"}},
                "required": ["span"],
                "title": "Wing",
                "type": "object",
                "additionalProperties": False,
            },
        },
        "properties": {
            "colour": {"$ref": "#/$defs/Colour"},
            "wings": {
                "items": {"$ref": "#/$defs/Wing"},
                "maxItems": 2,
                "minItems": 2,
                "title": "Wings",
                "type": "array",
            },
            "nick": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}], "default": None, "title": "Nick"},
        },
        "required": ["colour", "wings"],
        "title": "Bird",
        "type": "object",
        "additionalProperties": False,
    },
    {  # recursion
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer", "minimum": 0, "maximum": 9},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
                },
                "required": ["v", "kids"],
                "additionalProperties": False,
            }
        },
    },
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^[a-b]$": {"type": "boolean"}}, "additionalProperties": False},
    {  # a union told apart by a constant
        "anyOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, field: schema},
                "required": ["kind", field],
                "additionalProperties": False,
            }
            for kind, field, schema in (
                ("circle", "radius", {"type": "number", "minimum": 0, "maximum": 10}),
                ("label", "text", {"type": "string", "maxLength": 8}),
            )
        ]
    },
]

SCHEMAS: list[Schema] = [*OTHERS, *(schema for leaf in LEAVES for schema in around(leaf))]
assert len(SCHEMAS) >= 200
