"""Chats fitted to templates: every part of a chat is in the text, wherever the template has a place for it."""

import json
from typing import Any

import pytest

from peregrine.text.chat import has_tool_place, render_chat
from peregrine.text.chat_fit import one_call_each
from peregrine.text.tokenizer import Tokenizer

# What a message becomes; the kinds of templates differ in what stands before it.
SAY = "[{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }} ARGUMENTS>{% endfor %}]"
OBJECTS = SAY.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
TEXTS = SAY.replace("ARGUMENTS", "{{ '' + c.function.arguments }}")
ONE_CALL = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
FIRST_CALL = "[{{ m.role }}:{{ m.content }}{% if m.tool_calls %}{% set c = m.tool_calls[0] %}"
FIRST_CALL += "<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endif %}]"
NULL_ONLY = "{% if m.tool_calls and m.content is not none %}[{{ m.content }}]{% else %}"
NINE = "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('ids') }}{% endif %}{% endfor %}"
NAMED = "{% if m.role == 'tool' and not m.name %}{{ raise_exception('no name') }}{% endif %}"
NO_CALLS = "[{{ m.role }}:{{ m.content }}]"
TURNS = "{% if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}{{ raise_exception('turns') }}{% endif %}"
ID, OTHER = "call_0123456789", "call_abcdefghij"
USER, ANSWER = {"role": "user", "content": "Go."}, {"role": "assistant", "content": "Done."}
FLY = '<fly {"to": "Rome"}>'
GENERIC = '[{"name": "fly", "arguments": {"to": "Rome"}}, {"name": "land", "arguments": {}}]'


def made(id: str, name: str, arguments: object) -> dict[str, object]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = [made(ID, "fly", {"to": "Rome"}), made(OTHER, "land", {})]
CHAT: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": ID, "content": "landed"},
    {"role": "tool", "tool_call_id": OTHER, "content": "parked"},
    USER,
]
IN_TURN = f"[user:Go.][assistant:{FLY}][tool:landed][assistant:<land {{}}>][tool:parked][user:Go.]"
AT_ONCE = f"[user:Go.][assistant:{FLY}<land {{}}>][tool:landed][tool:parked][user:Go.]"
TEMPLATES = {
    "as they are": (OBJECTS, AT_ONCE),
    "arguments as text": (TEXTS, AT_ONCE),
    "one call in a message": (ONE_CALL + OBJECTS, IN_TURN),
    "the first call alone": (FIRST_CALL, IN_TURN),
    "null beside calls": (NULL_ONLY + OBJECTS + "{% endif %}", AT_ONCE.replace(":<", ":None<")),
    "ids of nine characters": (NINE + OBJECTS, AT_ONCE),
    "results with names": (NAMED + OBJECTS, AT_ONCE),
    "no calls": (NO_CALLS, f"[user:Go.][assistant:{GENERIC}][tool:landed][tool:parked][user:Go.]"),
    "users and assistants in turns": (
        TURNS + NO_CALLS,
        f"[user:Go.][assistant:{GENERIC}][user:Result of fly: landed\n\nResult of land: parked\n\nGo.]",
    ),
}


def template(body: str) -> str:
    return f"{{% for m in messages %}}{body}{{% endfor %}}"


def read(write: Any, body: str) -> Tokenizer:
    return Tokenizer.read(write({"chat_template": template(body)}))


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_have_the_form_that_the_template_writes(write: Any, name: str) -> None:
    body, expected = TEMPLATES[name]
    tokenizer = read(write, body)
    before = json.dumps(CHAT)
    assert render_chat(tokenizer, CHAT) == expected
    as_text = [made(ID, "fly", '{"to": "Rome"}'), made(OTHER, "land", "")]
    assert render_chat(tokenizer, [CHAT[0], {**CHAT[1], "tool_calls": as_text}, *CHAT[2:]]) == expected
    assert json.dumps(CHAT) == before


def test_calls_of_another_form_are_the_templates_affair(write: Any) -> None:
    tokenizer = read(write, "{{ m.tool_calls | tojson if m.tool_calls }}")
    flat: list[dict[str, object]] = [{"name": "fly", "arguments": "{}"}]
    assert render_chat(tokenizer, [{**CHAT[1], "tool_calls": flat}]) == json.dumps(flat)


def test_arguments_that_are_no_json_stay_as_they_are(write: Any) -> None:
    asks = {**CHAT[1], "tool_calls": [made(ID, "fly", "to Rome")]}
    assert render_chat(read(write, OBJECTS), [USER, asks]) == '[user:Go.][assistant:<fly "to Rome">]'
    assert render_chat(read(write, TEXTS), [USER, asks]) == "[user:Go.][assistant:<fly to Rome>]"


def test_an_id_that_fits_is_kept_and_others_stay_apart(write: Any) -> None:
    body = "{% for c in m.tool_calls or [] %}{{ c.id }} {% endfor %}{{ (m.tool_call_id or '') }} "
    tokenizer = read(write, NINE + OBJECTS + body)
    text = render_chat(tokenizer, [USER, {**CHAT[1], "tool_calls": [made("abcDEF123", "land", {}), CALLS[0]]}, CHAT[2]])
    kept, other, result = [word for word in text.replace("]", " ").split() if len(word) == 9 and word.isalnum()]
    assert (kept, other == result, other.isalnum()) == ("abcDEF123", True, True)


@pytest.mark.parametrize("ids", [("a", "b", "c"), (None, None, None)])
def test_each_of_several_calls_is_a_message_with_its_result_behind_it(ids: tuple[str | None, ...]) -> None:
    calls = [{"id": id, "function": {"name": name}} for id, name in zip(ids, ("fly", "land", "stay"), strict=True)]
    results = [{"role": "tool", "tool_call_id": id, "content": "ok"} for id in ids[:2]]
    asks = {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": calls}
    given = results if ids[0] is None else results[::-1]
    first, flew, second, landed, third, last = one_call_each([asks, *given, USER])
    assert [message["tool_calls"] for message in (first, second, third)] == [[call] for call in calls]
    assert (first["reasoning"], "reasoning" in second, flew, landed, last) == ("Hm.", False, *results, USER)


def test_results_go_to_their_calls_and_those_of_no_call_come_last() -> None:
    calls = [{"id": id, "function": {"name": "fly"}} for id in ("a", "b", "c")]
    results = [
        {"role": "tool", "tool_call_id": id, "content": str(n)} for n, id in enumerate(("x", "b", None, "a", "b"))
    ]
    told = one_call_each([{"role": "assistant", "content": "", "tool_calls": calls}, *results])
    assert "".join(str(message["content"]) or "-" for message in told) == "-2-1-034"


FIRST_ONLY = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('too late') }}{% endif %}" + NO_CALLS
DROPS_LATER = "{% if m.role != 'system' or loop.first %}" + NO_CALLS + "{% endif %}"
KEEPS_LAST = (
    "{% if loop.first %}{% for s in messages if s.role == 'system' %}{% if loop.last %}[system:{{ s.content }}]"
)
KEEPS_LAST += "{% endif %}{% endfor %}{% endif %}{% if m.role != 'system' %}" + NO_CALLS + "{% endif %}"


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


@pytest.mark.parametrize("body", [FIRST_ONLY, DROPS_LATER, KEEPS_LAST])
def test_a_system_message_that_comes_too_late_goes_to_its_neighbour(write: Any, body: str) -> None:
    tokenizer = read(write, body)
    brief, loud = system("Be brief."), system("Shout.")
    assert render_chat(tokenizer, [brief, loud, USER]) == "[system:Be brief.\n\nShout.][user:Go.]"
    text = "[system:Be brief.][user:Go.][assistant:Done.][user:Shout.\n\nGo.]"
    assert render_chat(tokenizer, [brief, USER, ANSWER, loud, USER]) == text
    assert render_chat(tokenizer, [brief, USER, loud]) == "[system:Be brief.][user:Go.\n\nShout.]"
    assert render_chat(tokenizer, [brief, USER, ANSWER, loud]) == text.replace("\n\nGo.", "")


def test_later_system_messages_stay_where_the_template_writes_them(write: Any) -> None:
    text = render_chat(read(write, NO_CALLS), [system("a"), system("b"), USER, system("c"), USER])
    assert text == "[system:a][system:b][user:Go.][system:c][user:Go.]"


def test_a_template_describes_tools_or_does_not(write: Any) -> None:
    assert not has_tool_place(read(write, NO_CALLS))
    assert not has_tool_place(read(write, "{{ m.tool_calls }}" + NO_CALLS))
    assert has_tool_place(read(write, "{{ tools | tojson }}" + NO_CALLS))
