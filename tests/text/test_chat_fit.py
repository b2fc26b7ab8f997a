"""Chats fitted to templates: every part of a chat is in the text, wherever the template has a place for it."""

import json
from typing import Any

import pytest

from peregrine.text.chat import render_chat
from peregrine.text.chat_calls import turns_of
from peregrine.text.chat_parts import takes_tools, writes_tools
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
NAME_IDS = "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.arguments | tojson }}]{% endfor %}"
NAME_IDS += "{% if m.role == 'tool' %}[{{ m.tool_call_id }} {{ m.content }}]{% endif %}"
EMPTY_TURN = "{% if m.tool_calls and m.content is not none %}[empty]{% endif %}"
NONE_TURN = "{% if m.tool_calls and m.content is none %}[None]{% endif %}"
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
    "null says less": (EMPTY_TURN + OBJECTS.replace("m.content", "(m.content or '')"), AT_ONCE),
    "null says more": (NONE_TURN + OBJECTS, AT_ONCE),
    "names in ids": (
        NAME_IDS,
        '[functions.fly:0 {"to": "Rome"}][functions.land:1 {}][functions.fly:0 landed][functions.land:1 parked]',
    ),
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


@pytest.mark.parametrize("arguments", ["to Rome", '{"to": "Ro', "[1]", "7"])
def test_arguments_that_are_no_object_stand_under_a_name(write: Any, arguments: str) -> None:
    """A call that was cut off, and answered by an error, is a part of the chat from then on."""
    asks = {**CHAT[1], "tool_calls": [made(ID, "fly", arguments)]}
    named = json.dumps({"arguments": arguments})
    assert render_chat(read(write, OBJECTS), [USER, asks]) == f"[user:Go.][assistant:<fly {named}>]"
    assert render_chat(read(write, TEXTS), [USER, asks]) == f"[user:Go.][assistant:<fly {arguments}>]"


@pytest.mark.parametrize("arguments", [["Rome"], 7])
def test_arguments_may_be_anything(write: Any, arguments: object) -> None:
    asks = {**CHAT[1], "tool_calls": [made(ID, "fly", arguments)]}
    assert render_chat(read(write, OBJECTS), [USER, asks]).endswith(json.dumps({"arguments": arguments}) + ">]")


@pytest.mark.parametrize("arguments", [None, "", " ", "null", {}, "{}"])
def test_no_arguments_are_an_empty_object(write: Any, arguments: object) -> None:
    asks = {**CHAT[1], "tool_calls": [made(ID, "fly", arguments)]}
    assert render_chat(read(write, OBJECTS), [USER, asks]) == "[user:Go.][assistant:<fly {}>]"


CALLS_OR_TEXT = "{% if m.tool_calls %}" + OBJECTS.replace("m.content", "''") + "{% else %}" + OBJECTS + "{% endif %}"


def test_text_beside_calls_stands_before_them_where_the_template_drops_it(write: Any) -> None:
    chat = [USER, {**CHAT[1], "content": "Let me see."}, *CHAT[2:4]]
    calls = f"{FLY}<land {{}}>][tool:landed][tool:parked]"
    assert render_chat(read(write, OBJECTS), chat) == f"[user:Go.][assistant:Let me see.{calls}"
    before = f"[user:Go.][assistant:Let me see.][assistant:{calls}"
    assert render_chat(read(write, CALLS_OR_TEXT), chat) == before
    assert render_chat(read(write, NULL_ONLY + OBJECTS + "{% endif %}"), chat) == before.replace(":<", ":None<")


def test_text_that_stands_before_calls_takes_the_thoughts_along(write: Any) -> None:
    tokenizer = read(write, "({{ m.reasoning or '' }})" + CALLS_OR_TEXT)
    asks = {**CHAT[1], "content": "Let me see.", "reasoning": "Hm.", "tool_calls": CALLS[:1]}
    assert render_chat(tokenizer, [USER, asks]) == f"()[user:Go.](Hm.)[assistant:Let me see.]()[assistant:{FLY}]"
    asks["content"] = "\n"
    assert render_chat(tokenizer, [USER, asks]) == f"()[user:Go.](Hm.)[assistant:{FLY}]"


STRICT = "{% set turn = namespace(user=true) %}{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
STRICT += "{% if not m.tool_calls %}{% if (m.role == 'user') != turn.user %}{{ raise_exception('turns') }}{% endif %}"
STRICT += "{% set turn.user = not turn.user %}{% endif %}{% endif %}" + CALLS_OR_TEXT + "{% endfor %}"


def test_text_is_left_out_where_a_message_before_would_break_the_order_of_roles(write: Any) -> None:
    tokenizer = Tokenizer.read(write({"chat_template": STRICT}))
    chat = [USER, {**CHAT[1], "content": "Let me see.", "tool_calls": CALLS[:1]}, CHAT[2], ANSWER, USER]
    assert render_chat(tokenizer, chat) == f"[user:Go.][assistant:{FLY}][tool:landed][assistant:Done.][user:Go.]"


@pytest.mark.parametrize("content", ["\n\n", "", None])
def test_white_space_beside_calls_is_no_text(write: Any, content: str | None) -> None:
    asks = {**CHAT[1], "content": content, "tool_calls": CALLS[:1]}
    for body, said in ((NULL_ONLY + OBJECTS + "{% endif %}", "None"), (CALLS_OR_TEXT, "")):
        assert render_chat(read(write, body), [USER, asks]) == f"[user:Go.][assistant:{said}{FLY}]"


def test_fields_that_say_nothing_are_left_out(write: Any) -> None:
    asks = {"role": "assistant", "tool_calls": CALLS[:1]}
    result = {**CHAT[2], "name": None}
    answer = {**ANSWER, "tool_calls": [], "reasoning": "", "reasoning_content": "Hm."}
    body = "{% if m.tool_calls is defined and not m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}"
    tokenizer = read(write, body + NAMED + "({{ m.reasoning or '' }})" + OBJECTS)
    text = f"()[user:Go.]()[assistant:{FLY}]()[tool:landed](Hm.)[assistant:Done.]"
    assert render_chat(tokenizer, [USER, asks, result, answer]) == text


def test_results_have_the_ids_of_their_calls(write: Any) -> None:
    body = "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('ids') }}{% endif %}"
    without = {"role": "tool", "content": "landed"}
    of_none = {"role": "tool", "tool_call_id": "call_of_nobody", "content": "lost"}
    asks = {**CHAT[1], "tool_calls": CALLS[:1]}
    text = render_chat(read(write, NINE + body + OBJECTS), [USER, asks, without, of_none])
    assert text == f"[user:Go.][assistant:{FLY}][tool:landed][tool:lost]"


def test_results_stand_in_the_order_of_their_calls(write: Any) -> None:
    again = [made(ID, "land", {})]  # an id that was used before
    chat = [*CHAT[:2], CHAT[3], CHAT[2], {**CHAT[1], "tool_calls": again}, {**CHAT[2], "content": "stopped"}]
    expected = f"[user:Go.][assistant:{FLY}<land {{}}>][tool:landed][tool:parked][assistant:<land {{}}>][tool:stopped]"
    assert render_chat(read(write, OBJECTS), chat) == expected
    assert render_chat(read(write, NAMED + OBJECTS), chat) == expected


def test_thoughts_have_both_names(write: Any) -> None:
    for given, read_by in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        tokenizer = read(write, "({{ m." + read_by + " or '' }})" + NO_CALLS)
        assert render_chat(tokenizer, [USER, {**ANSWER, given: "Hm."}]) == "()[user:Go.](Hm.)[assistant:Done.]"


def test_an_id_that_fits_is_kept_and_others_stay_apart(write: Any) -> None:
    body = "{% for c in m.tool_calls or [] %}{{ c.id }} {% endfor %}{{ (m.tool_call_id or '') }} "
    tokenizer = read(write, NINE + OBJECTS + body)
    text = render_chat(tokenizer, [USER, {**CHAT[1], "tool_calls": [made("abcDEF123", "land", {}), CALLS[0]]}, CHAT[2]])
    kept, other, result = [word for word in text.replace("]", " ").split() if len(word) == 9 and word.isalnum()]
    assert (kept, other == result, other.isalnum()) == ("abcDEF123", True, True)


@pytest.mark.parametrize("ids", [("a", "b", "c"), (None, None, None)])
def test_each_call_has_its_result(ids: tuple[str | None, ...]) -> None:
    calls = [{"id": id, "function": {"name": name}} for id, name in zip(ids, ("fly", "land", "stay"), strict=True)]
    results = [{"role": "tool", "tool_call_id": id, "content": "ok"} for id in ids[:2]]
    asks = {"role": "assistant", "content": None, "tool_calls": calls}
    turn, last = turns_of([asks, *(results if ids[0] is None else results[::-1]), USER])
    named = [{**result, "name": name} for result, name in zip(results, ("fly", "land"), strict=True)]
    assert (turn.message, list(turn.results), last.messages) == (asks, [*named, None], [USER])


def test_results_of_no_call_come_last() -> None:
    calls = [{"id": id, "function": {"name": "fly"}} for id in ("a", "b", "c")]
    results = [
        {"role": "tool", "tool_call_id": id, "content": str(n)} for n, id in enumerate(("x", "b", None, "a", "b"))
    ]
    (turn,) = turns_of([{"role": "assistant", "content": "-", "tool_calls": calls}, *results])
    assert "".join(str(message["content"]) for message in turn.messages) == "-21034"


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


def test_leading_instructions_of_both_roles_are_one_where_there_is_one_place(write: Any) -> None:
    first_two = "{% if m.role in ('system', 'developer') and not loop.first %}{% else %}" + NO_CALLS + "{% endif %}"
    text = render_chat(read(write, first_two), [system("a"), {"role": "developer", "content": "b"}, USER])
    assert text == "[system:a\n\nb][user:Go.]"


def test_a_chat_that_is_a_system_message_is_a_users_where_that_is_not_written(write: Any) -> None:
    needs_user = "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no') }}"
    assert render_chat(read(write, needs_user + "{% endif %}" + NO_CALLS), [system("Go.")]) == "[user:Go.]"
    assert render_chat(read(write, NO_CALLS), [system("Go.")]) == "[system:Go.]"


def test_a_template_describes_tools_or_does_not(write: Any) -> None:
    for body, describes, takes in (
        (NO_CALLS, False, True),
        ("{{ m.tool_calls }}" + NO_CALLS, False, True),
        ("{{ tools | tojson }}" + NO_CALLS, True, True),
        ("{{ raise_exception('no tools') if tools }}" + NO_CALLS, False, False),
    ):
        tokenizer = read(write, body)
        assert (writes_tools(tokenizer, template(body)), takes_tools(tokenizer, template(body))) == (describes, takes)


def test_a_template_that_needs_a_list_of_tools_gets_an_empty_one(write: Any) -> None:
    assert render_chat(read(write, "{{ tools | length }}" + NO_CALLS), [USER]) == "0[user:Go.]"


def test_variables_may_have_any_name(write: Any) -> None:
    tokenizer = read(write, "{{ source }}{{ chat }}{{ self_ }}{{ bos_token }}" + NO_CALLS)
    text = render_chat(tokenizer, [USER], source=1, chat=2, self_=3, bos_token="<s>")
    assert text == "123<s>[user:Go.]"
