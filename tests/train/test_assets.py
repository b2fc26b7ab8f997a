"""Merlin as it is shipped: its files, its logits against transformers, and the text it writes."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import peregrine
from peregrine import LLM, SamplingParams
from peregrine.models.loading import load_decoder
from peregrine.text.tokenizer import Tokenizer
from peregrine.train.attend import dense_attend

MERLIN = Path(peregrine.__file__).parent / "assets" / "merlin"
FILES = {  # name: (bytes, sha256)
    "config.json": (550, "2f3a340d1567a3d1419920a5cfdf09cdc0180b598d60d89ac43dce71feafee84"),
    "generation_config.json": (62, "865fc8373fc2feabfeedb777f50469c763c204925e902cd473de92baebe6d4cd"),
    "model-00001-of-00002.safetensors": (
        14_593_800,
        "348c0c08594190a14b9e737c0645f7d8e5f802b745b28319d9a8982b159ff623",
    ),
    "model-00002-of-00002.safetensors": (
        10_333_296,
        "32a6a267b69985af5eb9cf5b950f78f9a9854f76b87d7b490834c45e8d66ff93",
    ),
    "model.safetensors.index.json": (7_543, "1481314b4a97f5b8b9d1fb9fe09ab782015180b3ed874f8d0e3d4e16c8cfe1d8"),
    "tokenizer.json": (547_946, "6601aa14224f51ba60c4c9947978bc1104924bdb681f22c43ed270b7b6d3c1bd"),
    "tokenizer_config.json": (701, "82bd012cac7267416e33f8bf2024e53202925d835162a4002b974d136a97ebeb"),
}
PROMPTS = ("Once upon a time", "<|user|>\nWhat is 7 + 5?\n<|assistant|>\n", "def is_even(n):\n    return n")
GOLDEN = {  # (prompt, is a chat, most tokens): (greedy text, how it ends)
    ("Once upon a time, there was a little robot", False, 96): (
        " named Max. Max loved to play with his friends in the park. One day, Max saw a big"
        ' ball and wanted to play with it. He asked his friend, "Can I play with the ball?" His'
        ' friend said, "Yes, but be careful. It\'s very big and you might hurt yourself."'
        "\n\nMax was very happy and started to play with the ball. He kicked it and it went"
        " very far. Max was having so much fun that he didn't notice",
        "length",
    ),
    ("Tell me a story about a dragon who loves soup.", True, 256): (
        "Once upon a time, there was a dragon who had a brown soup. The dragon loved his soup"
        " very much. He would eat it every day. One day, a little girl saw the dragon's soup"
        ' and wanted to eat it. The dragon said, "No, no, no! This is my soup!"\n\nThe little'
        ' girl was sad and went away. Later, the dragon saw the little girl and asked her, "Why'
        ' are you sad?" The little girl said, "I want to eat my soup, but I don\'t have any."'
        ' The dragon said, "I can help you. I will give you some soup."\n\nThe dragon gave the'
        ' little girl some soup and she was very happy. She said, "Thank you, Mr. dragon. You'
        ' are very kind." The dragon smiled and said, "You\'re welcome. I am happy to help."'
        " From that day on, the dragon and the little girl became good friends and they shared"
        " soup together.",
        "stop",
    ),
    ("def is_even(n):", False, 40): (
        '\n    """Return True if n is even."""\n    return n % 2 == 0\n\n\ndef is_even(num):'
        '\n    """Return True if num is even."""\n   ',
        "length",
    ),
    ("What is 12 + 30?", True, 32): ("12 + 30 = 42.\n", "stop"),
    ("Hello! Who are you?", True, 32): ("Hello! How can I help you today?\n", "stop"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_are_the_ones_that_were_trained(name: str) -> None:
    content = (MERLIN / name).read_bytes()
    assert (len(content), sha256(content).hexdigest()) == FILES[name]


def test_the_whole_folder_stays_small() -> None:
    assert sum(path.stat().st_size for path in MERLIN.rglob("*") if path.is_file()) < 34_000_000


def test_a_turn_ends_with_the_text_or_with_the_next_user() -> None:
    assert json.loads((MERLIN / "generation_config.json").read_text())["eos_token_id"] == [0, 1]
    tokenizer = Tokenizer.read(MERLIN)
    assert [tokenizer.token(id) for id in (0, 1)] == ["<|endoftext|>", "<|user|>"]


@torch.no_grad()
def test_transformers_gives_the_same_logits() -> None:
    reference = AutoModelForCausalLM.from_pretrained(MERLIN, dtype=torch.float32)
    decoder, tokenizer = load_decoder(MERLIN), Tokenizer.read(MERLIN)
    for prompt in PROMPTS:
        ids = torch.tensor(tokenizer.encode(prompt))  # [N]
        hidden, _ = decoder(ids, torch.arange(len(ids)), dense_attend(decoder.layer_attention(), 1))
        expected = reference(ids[None]).logits[0]
        torch.testing.assert_close(decoder.logits(hidden), expected, atol=1e-3, rtol=0)


def test_greedy_text_is_the_golden_text() -> None:
    # At every token the first choice leads the second by 0.009 or more in logits, hundreds of times what
    # float32 kernels differ by, so the text is the same on every CPU.
    with LLM("merlin", drafter="none", device="cpu", dtype="float32") as llm:
        prompts, params = [], []
        for prompt, chat, most in GOLDEN:
            prompts.append(llm.encode_chat([{"role": "user", "content": prompt}]) if chat else llm.encode(prompt))
            params.append(SamplingParams(temperature=0, max_tokens=most))
        outputs = llm.generate(prompts, params, progress=False)
    assert [(output.text, output.finish_reason) for output in outputs] == list(GOLDEN.values())
