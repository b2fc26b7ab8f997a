"""Arguments of a tool call as JSON text, passed on piece by piece while they are generated."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

STRUCTURE, IN_STRING = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
LONGEST_KEY = 512
JSON_TYPES: tuple[tuple[str, type | tuple[type, ...]], ...] = (
    *(("boolean", bool), ("integer", int), ("number", float), ("string", str)),
    *(("array", list), ("object", dict), ("null", object)),
)


class Arguments(Protocol):
    """Reads the text from where a call's arguments begin."""

    done: bool  # the call is complete

    def find(self, mark: str, text: str) -> int:
        """Where `mark` first stands in the text that is fed next and is no part of a value; -1: nowhere."""

    def feed(self, text: str, ended: bool) -> tuple[str, str]:
        """(JSON that this text adds, text after the call). `ended`: no more text belongs to the call."""


class JsonArguments:
    """An object, passed on as it is written, inside `outer` further braces."""

    def __init__(self, outer: int) -> None:
        self.done = False
        self._outer = self._depth = outer
        self._inside = True  # in the arguments, not behind them
        self._quoted = self._escaped = False

    def find(self, mark: str, text: str) -> int:
        """Where `mark` first stands outside of the arguments' strings."""
        depth, quoted, done, place = self._depth, self._quoted, self.done, int(self._escaped)
        outside = re.compile(f"{re.escape(mark)}|{STRUCTURE.pattern}")
        while not done:
            found = (IN_STRING if quoted else outside).search(text, place)
            if found is None:
                return -1
            if not quoted and found[0] == mark:
                return found.start()
            place = found.end()
            if found[0] == "\\":
                place += 1
            elif found[0] == '"':
                quoted = not quoted
            else:
                depth += 1 if found[0] in "{[" else -1
                done = depth <= 0
        return text.find(mark, place)

    def feed(self, text: str, ended: bool) -> tuple[str, str]:
        place = len(text) and int(self._escaped)
        self._escaped = self._escaped and not text
        own = len(text) if self._inside else 0
        while not self.done and (found := (IN_STRING if self._quoted else STRUCTURE).search(text, place)):
            place = found.end()
            if found[0] == "\\":
                self._escaped = place == len(text)
                place += 1
            elif found[0] == '"':
                self._quoted = not self._quoted
            else:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth == self._outer and self._inside:
                    own, self._inside = place, False
                self.done = self._depth <= 0
        return text[:own], text[place:] if self.done else ""


@dataclass(frozen=True, slots=True)
class Tags:
    """How keys and values are marked where arguments are no JSON."""

    key: re.Pattern[str]  # stands before a value, group 1 is its key; without a group: the arguments end
    end: re.Pattern[str]  # stands behind a value
    longest: int  # characters of the longest mark of `end`; a match of `key` has LONGEST_KEY at most
    broken: bool  # a line break before a value, and one behind it, are not the value's


PARAMETER_TAGS = Tags(  # <parameter=key>value</parameter>... </function>
    re.compile(r"<parameter=([^<>\n]{1,256})>|</function>"),
    re.compile(r"</parameter>|(?=<parameter=|</function>)"),
    len("</parameter>"),
    broken=True,
)
KEY_TAGS = Tags(  # <arg_key>key</arg_key><arg_value>value</arg_value>...
    re.compile(r"<arg_key>([^<]{1,256})</arg_key>\s{0,64}<arg_value>"),
    re.compile(r"</arg_value>|(?=<arg_key>)"),
    len("</arg_value>"),
    broken=False,
)


class TaggedArguments:
    """Arguments in tags, passed on as a JSON object.

    A value is bare text: JSON, unless its schema says that it is a string. Strings are passed on before they end.
    """

    def __init__(self, schema: Mapping[str, object], tags: Tags) -> None:
        self.done = False
        self._tags = tags
        kinds = schema.get("properties")
        self._kinds = kinds if isinstance(kinds, Mapping) else {}
        self._text = ""  # not read yet
        self._seen = 0  # characters of it in which nothing begins that is looked for
        self._key: str | None = None  # of the parameter that is being read
        self._begun = False  # its value's first part was passed on
        self._lead = "{"  # stands before the next parameter

    def find(self, mark: str, text: str) -> int:
        return text.find(mark)

    def feed(self, text: str, ended: bool) -> tuple[str, str]:
        self._text += text
        written = ""
        while not self.done and (part := self._value(ended) if self._key is not None else self._tag(ended)) is not None:
            written += part
        rest, self._text = (self._text, "") if self.done else ("", self._text)
        return written, rest

    def _tag(self, ended: bool) -> str | None:
        """Go behind the next tag, or to the end; None: it is not there yet."""
        found = self._search(self._tags.key, LONGEST_KEY)
        if found is None and not ended:
            return None
        self._text = self._text[found.end() :] if found else ""
        self._key = found[1].strip() if found and found[1] else None
        if self._key is not None:
            return ""
        self.done = True
        return "}" if self._lead != "{" else "{}"

    def _value(self, ended: bool) -> str | None:
        """The value, or the part of a string that is settled; None: nothing is."""
        assert self._key is not None
        kinds = kinds_of(self._kinds.get(self._key))
        is_string = kinds == {"string"}
        found = self._search(self._tags.end, self._tags.longest)
        if found is None and not ended:
            return self._part() if is_string else None
        value = self._text[: found.start()] if found else self._text
        self._text = self._text[found.end() :] if found else ""
        if self._tags.broken:
            value = value.removesuffix("\n") if self._begun else value.removeprefix("\n").removesuffix("\n")
        begun, key = self._begun, self._key
        self._key, self._begun = None, False
        if begun:
            return json.dumps(value, ensure_ascii=False)[1:]
        return self._led(key) + json.dumps(value if is_string else typed(value, kinds), ensure_ascii=False)

    def _search(self, pattern: re.Pattern[str], longest: int) -> re.Match[str] | None:
        """The first match, of `longest` characters at most; what was searched before is not searched again."""
        found = pattern.search(self._text, self._seen)
        self._seen = 0 if found else max(0, len(self._text) - longest)
        return found

    def _part(self) -> str | None:
        """The part of a string that cannot be its last line break or the beginning of a tag."""
        tag = self._text.rfind("<", max(0, len(self._text) - self._tags.longest))
        cut = len(self._text) if tag < 0 else tag
        part = self._text[:cut].removesuffix("\n" if self._tags.broken else "")
        if not part:
            return None
        self._text, self._seen = self._text[len(part) :], 0
        lead = "" if self._begun else self._led(str(self._key)) + '"'
        part = part if self._begun or not self._tags.broken else part.removeprefix("\n")
        self._begun = True
        return lead + json.dumps(part, ensure_ascii=False)[1:-1]

    def _led(self, key: str) -> str:
        lead, self._lead = self._lead, ", "
        return f"{lead}{json.dumps(key, ensure_ascii=False)}: "


def typed(value: str, kinds: Collection[str] | None) -> object:
    """A value written as bare text; what is no JSON, or of none of these kinds where a string may be, is a string."""
    try:
        read = json.loads(value, parse_constant=no_number)
    except (ValueError, RecursionError):
        return value
    kind = next(name for name, types in JSON_TYPES if isinstance(read, types))
    fits = kinds is None or kind in kinds or (kind == "integer" and "number" in kinds)
    return read if fits or "string" not in (kinds or ()) else value


def kinds_of(schema: object) -> set[str] | None:
    """The JSON types that a schema allows, as far as it names them; None: any."""
    if not isinstance(schema, Mapping):
        return None
    if isinstance(named := schema.get("type"), str | list):
        return {named} if isinstance(named, str) else set(map(str, named))
    options = schema.get("anyOf", schema.get("oneOf"))
    found = [kinds_of(option) for option in options] if isinstance(options, list) and options else [None]
    return None if None in found else set().union(*filter(None, found))


def no_number(name: str) -> float:
    """For JSON readers: NaN and Infinity, which Python reads, are no JSON."""
    raise ValueError(f"{name} is no JSON")
