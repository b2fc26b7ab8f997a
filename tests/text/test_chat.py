"""Chats render as in transformers, inside a sandbox, and malformed chats are refused by name."""

import json
import re
from datetime import datetime

import pytest
from transformers import PreTrainedTokenizerFast

from peregrine.errors import CheckpointError, RequestError
from peregrine.text import chat_sandbox
from peregrine.text.chat import encode_chat, has_system_place, render_chat
from peregrine.text.tokenizer import Tokenizer

PLAIN = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant", "tool"] %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {{- "<|user|>" + message["role"] + "\\n" + (message.content or "") | trim + eos_token }}
    {%- if message.tool_calls %}
        {{- message.tool_calls | tojson }}
    {%- endif %}
{% endfor %}
    {% if add_generation_prompt %}
<|user|>assistant
    {% endif %}
"""
RICH = """{% set state = namespace(turns=0) %}
{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{% if documents is defined and not documents %}no documents{% endif %}
{% for message in messages %}
{% if loop.index > 3 %}{% break %}{% endif %}
{% set state.turns = state.turns + 1 %}
{% generation %}{{ message.role }}: {% endgeneration %}
{% if message.role == "assistant" %}{{ message.content or "" }}{{ message.tool_calls | tojson if message.tool_calls }}
{% continue %}{% endif %}
{{ message.content }}{{ pad_token }}{{ "<&'>" | tojson }}
{% endfor %}
{{ state.turns }}{% if enable_thinking %}<think>{% endif %}
"""
MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": 'Grüße <b>你好</b> & "x"'},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And?"},
]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "fly", "arguments": {"é": 1}}}]}
TOOLS = [{"type": "function", "function": {"name": "fly", "parameters": {}}}]


def read_with(write, template: object) -> Tokenizer:
    tokens = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    return Tokenizer.read(write({**tokens, "chat_template": template}))


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("template", [PLAIN, RICH])
@pytest.mark.parametrize(
    ("messages", "extra"),
    [(MESSAGES, {}), ([*MESSAGES[:2], CALL], {"tools": TOOLS}), (MESSAGES[1:2], {"enable_thinking": True})],
)
def test_a_chat_agrees_with_transformers(write, template, messages, extra, add_generation_prompt) -> None:
    folder = write({"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": template})
    tokenizer, oracle = Tokenizer.read(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    asked = {"add_generation_prompt": add_generation_prompt, **extra}
    text = oracle.apply_chat_template(messages, tokenize=False, **asked)
    assert render_chat(tokenizer, messages, **asked) == text
    assert encode_chat(tokenizer, messages, **asked) == oracle.apply_chat_template(messages, **asked)["input_ids"]


def test_encode_chat_has_only_the_bos_of_the_template(write) -> None:
    tokenizer = read_with(write, PLAIN)
    assert encode_chat(tokenizer, MESSAGES).count(tokenizer.bos_id) == 1


def test_strftime_now_is_today(write) -> None:
    tokenizer = read_with(write, "{{ strftime_now('%Y') }}")
    assert render_chat(tokenizer, MESSAGES) == datetime.now().strftime("%Y")


def test_a_list_of_templates_offers_its_default_and_its_tool_template(write) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = read_with(write, named)
    assert tokenizer.chat_template == "plain"
    assert render_chat(tokenizer, MESSAGES) == "plain"
    assert render_chat(tokenizer, MESSAGES, tools=TOOLS) == "tools"


def test_a_template_file_wins_over_the_config(write) -> None:
    folder = write({"chat_template": "config"})
    (folder / "chat_template.jinja").write_text("file")
    (folder / "chat_templates").mkdir()
    (folder / "chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = Tokenizer.read(folder)
    assert render_chat(tokenizer, MESSAGES) == "file"
    assert render_chat(tokenizer, MESSAGES, tools=TOOLS) == "tools"


@pytest.mark.parametrize(
    ("template", "problem"),
    [(None, "the model has no chat template"), ([{"name": "rag", "template": "x"}], r"only .*\['rag'\]")],
)
def test_a_model_without_a_template_says_what_to_do(write, template, problem) -> None:
    tokenizer = read_with(write, template)
    assert tokenizer.chat_template is None
    with pytest.raises(RequestError, match=rf"{problem}; send a plain prompt, or put the template in"):
        render_chat(tokenizer, MESSAGES)


def test_a_malformed_template_entry_is_refused(write) -> None:
    with pytest.raises(CheckpointError, match="chat_template is neither a string nor a list"):
        read_with(write, [{"template": "nameless"}])


def test_a_template_that_does_not_parse_names_the_line(write) -> None:
    tokenizer = read_with(write, "{{ bos_token }}\n{% for %}")
    with pytest.raises(CheckpointError, match="does not parse, line 2"):
        render_chat(tokenizer, MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ ''['__class__'].x }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ (messages | attr('__class__')).x }}",
    ],
)
def test_a_template_cannot_reach_python(write, template: str) -> None:
    tokenizer = read_with(write, template)
    with pytest.raises(CheckpointError, match=r"stopped by its sandbox: .*unsafe"):
        render_chat(tokenizer, MESSAGES)


@pytest.mark.parametrize("template", ["{{ messages.append(1) }}", "{{ messages[0].update(role='x') }}"])
def test_a_template_cannot_change_what_it_is_given(write, template: str) -> None:
    tokenizer = read_with(write, template)
    before = json.dumps(MESSAGES)
    with pytest.raises(CheckpointError, match="stopped by its sandbox"):
        render_chat(tokenizer, MESSAGES)
    assert json.dumps(MESSAGES) == before


def test_an_exception_of_a_template_becomes_the_requests_error(write) -> None:
    tokenizer = read_with(write, PLAIN)
    with pytest.raises(RequestError, match="the model's chat template refuses them: unknown role critic"):
        render_chat(tokenizer, [{"role": "critic", "content": "hm"}])


def test_a_template_that_fails_on_a_chat_becomes_the_requests_error(write) -> None:
    tokenizer = read_with(write, "{{ messages[0].content + 1 }}")
    with pytest.raises(RequestError, match="chat template refuses them"):
        render_chat(tokenizer, MESSAGES)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "messages=[]: is empty"),
        ("hello", "messages='hello': is not a list"),
        ({"role": "user"}, "is not a list"),
        ([MESSAGES[0], "hi"], "messages[1]='hi': is not an object"),
        ([{"content": "x"}], "messages[0].role=None: is not a role"),
        ([MESSAGES[0], {"role": 3, "content": "x"}], "messages[1].role=3: is not a role"),
        ([{"role": "user"}], "messages[0].content=None: is not a string"),
        ([{"role": "user", "content": None, "tool_calls": []}], "messages[0].content=None"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content=['x']: is not a string"),
        ([{"role": "user", "content": "x", "images": [{"data": b"1"}]}], "messages[0].images[0].data=b'1': is a bytes"),
    ],
)
def test_a_wrong_chat_is_refused_by_name(write, messages, problem: str) -> None:
    with pytest.raises(RequestError, match=re.escape(problem)):
        render_chat(read_with(write, PLAIN), messages)


def test_objects_with_methods_never_reach_a_template(write) -> None:
    with pytest.raises(RequestError, match="tools="):
        render_chat(read_with(write, PLAIN), MESSAGES, tools=Tokenizer)


def test_values_that_nest_too_deeply_are_refused(write) -> None:
    deep: object = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RequestError, match=r"messages\[0\].*nests too deeply"):
        render_chat(read_with(write, PLAIN), [{"role": "user", "content": "Hi", "deep": deep}])


def test_a_chat_that_is_not_valid_unicode_is_refused(write) -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        encode_chat(read_with(write, PLAIN), [{"role": "user", "content": "\udc00"}])


REFUSING = """{% for message in messages %}{% if message.role not in ('user', 'assistant') %}
{{- raise_exception('no ' + message.role) }}{% endif %}[{{ message.role }}: {{ message.content }}]{% endfor %}"""
DROPPING = """{% for message in messages %}{% if message.role in ('user', 'assistant') %}
{{- '[' + message.role + ': ' + message.content + ']' }}{% endif %}{% endfor %}"""
TAKING = "{% for message in messages %}[{{ message.role }}: {{ message.content }}]{% endfor %}"


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("template", [REFUSING, DROPPING])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_without_a_place_goes_into_the_next_user_message(write, template: str, role: str) -> None:
    """Neither refused nor dropped in silence."""
    tokenizer = read_with(write, template)
    assert not has_system_place(tokenizer)
    chat = [said(role, "Be brief."), said("user", "Hi"), said("assistant", "Yes?"), said("user", "Go on")]
    assert render_chat(tokenizer, chat) == "[user: Be brief.\n\nHi][assistant: Yes?][user: Go on]"
    assert render_chat(tokenizer, [chat[0], said(role, "In verse.")]) == "[user: Be brief.\n\nIn verse.]"
    later = [said("user", "Hi"), said("assistant", "Yes?"), said(role, "Shout."), said("user", "Go on")]
    assert render_chat(tokenizer, later) == "[user: Hi][assistant: Yes?][user: Shout.\n\nGo on]"


def test_a_system_message_with_a_place_stays_there(write) -> None:
    tokenizer = read_with(write, TAKING)
    assert has_system_place(tokenizer)
    for role in ("system", "developer"):
        assert render_chat(tokenizer, [said(role, "a"), said("user", "b")]) == f"[{role}: a][user: b]"
    only_system = TAKING.replace(
        "[{{", "{% if message.role == 'developer' %}{{ raise_exception('no') }}{% endif %}[{{", 1
    )
    chat = [said("developer", "a"), said("user", "b")]
    assert render_chat(read_with(write, only_system), chat) == "[system: a][user: b]"


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(64) }}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(write, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "MAX_RENDER_SECONDS", 0.05)
    with pytest.raises(RequestError, match=r"it took longer than 0\.05 s"):
        render_chat(read_with(write, template), MESSAGES[1:])


def test_a_template_that_writes_without_end_is_stopped(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "MAX_CHARACTERS", 1000)
    with pytest.raises(RequestError, match="longer than 1000 characters"):
        render_chat(read_with(write, "{% for a in range(2000) %}x{% endfor %}"), MESSAGES[1:])
