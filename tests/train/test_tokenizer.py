"""Merlin's tokenizer: any bytes round-trip, digits and line breaks are single tokens, chats look like the corpus."""

import json

import jinja2
import pytest

from peregrine.errors import ConfigError
from peregrine.train.merlin.tokenizer import CHAT_TEMPLATE, PATTERN, save_tokenizer, train_tokenizer

TEXTS = [
    "Once upon a time there was a little dragon who loved soup. It's warm, said the dragon.",
    "def add(a, b):\n    return a + b\n",
    "<|user|>\nWhat is 12 + 34?\n<|assistant|>\n12 + 34 is 46.",
] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 320)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\x00\x01\x7f\t\r\n \n\n  x",
        "caf\u00e9 \u65e5\u672c \U0001f409 \u202e\ufeff",
        "'tis 'the' they're  two  spaces 1234.5",
        "<|user|>\nhello\n<|assistant|>\nhi<|endoftext|>",
        bytes(range(256)).decode("latin-1"),
    ],
)
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_specials_have_the_first_ids_and_are_never_split(tokenizer):
    assert tokenizer.encode("<|endoftext|><|user|><|assistant|>").ids == [0, 1, 2]
    assert tokenizer.get_vocab_size() == 320


def test_digits_are_single_tokens(tokenizer):
    assert tokenizer.encode("12 + 34").tokens[0] == "1"
    assert "12" not in tokenizer.get_vocab()


def test_a_prompt_that_ends_with_its_line_has_the_lines_tokens(tokenizer):
    document = tokenizer.encode("def add(a, b):\n    return a").ids
    for prompt in ("def add(a, b):", "def add(a, b):\n", "def add(a, b):\n    return"):
        ids = tokenizer.encode(prompt).ids
        assert document[: len(ids)] == ids


def test_more_tokens_than_the_text_has_are_refused():
    with pytest.raises(ConfigError, match="vocab_size=5000"):
        train_tokenizer(TEXTS, 5000)


def test_saved_files_hold_the_template_and_the_end(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path, 128)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|endoftext|>"
    assert config["model_max_length"] == 128
    assert config["chat_template"] == CHAT_TEMPLATE
    assert (
        PATTERN
        in json.loads((tmp_path / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"][0]["pattern"][
            "Regex"
        ]
    )


def test_chats_have_the_form_of_the_corpus():
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    turns = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi.\n"},
        {"role": "user", "content": " Tell me a story."},
    ]
    asked = template.render(messages=turns, add_generation_prompt=True)
    assert asked == "<|user|>\nHello!\n<|assistant|>\nHi.\n<|user|>\nTell me a story.\n<|assistant|>\n"
    answered = template.render(messages=[*turns, {"role": "assistant", "content": "Once."}])
    assert answered == asked + "Once."
