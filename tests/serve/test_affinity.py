"""Keys by which replicas are chosen: the turns of a chat share one, other prompts have their own."""

import json

import pytest

from peregrine.serve.affinity import PREFIX_CHARS, affinity_key

SYSTEM, FIRST = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
LATER = [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "More"}]


def key(**body: object) -> str | None:
    return affinity_key(json.dumps(body).encode(), None)


def test_turns_of_a_chat_share_a_key_and_other_chats_do_not() -> None:
    first = key(messages=[SYSTEM, FIRST])
    assert first is not None
    assert first == key(messages=[SYSTEM, FIRST, *LATER], temperature=0.5)
    others = [key(messages=[SYSTEM, LATER[1]]), key(messages=[FIRST]), key(messages=[SYSTEM])]
    assert len({first, *others}) == 4


def test_prompts_are_known_by_their_beginning() -> None:
    long = "x" * PREFIX_CHARS
    assert key(prompt=long + "a") == key(prompt=long + "b") == key(prompt=[long + "c", "another"])
    assert key(prompt="a") != key(prompt="b")
    assert key(prompt=[1, 2]) == key(prompt=[[1, 2], [3]]) != key(prompt=[1, 3])


def test_the_clients_word_goes_first() -> None:
    assert affinity_key(b'{"prompt": "a"}', "mine") == "mine"
    assert key(prompt="a", prompt_cache_key="k") == key(prompt="b", prompt_cache_key="k") != key(prompt="a")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'{"messages": [3]}', b'{"prompt": 5}', b"[" * 100000])
def test_what_is_no_request_has_no_key(body: bytes) -> None:
    assert affinity_key(body, None) is None
