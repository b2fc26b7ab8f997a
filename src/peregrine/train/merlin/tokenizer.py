"""Trains merlin's tokenizer: byte-level BPE in Hugging Face format, with a chat template.

Every byte has a token, so any text survives a round trip. Each digit is a token, so that numbers are always split the
same way. A line break is never merged with the text before it, so that a prompt that ends at the end of a line has the
tokens that this line has in a document.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from peregrine.errors import ConfigError
from peregrine.train.documents import ASSISTANT, END_OF_TEXT, USER

SPECIAL_TOKENS = (END_OF_TEXT, USER, ASSISTANT)  # ids 0, 1, 2
STOP_IDS = (0, 1)  # a turn ends at the end of the text, or where the next user turn would begin

PATTERN = "|".join(
    [
        r"'(?:s|t|re|ve|m|ll|d)(?!\p{L})",  # contractions
        r" ?\p{L}+",  # a word, with the space before it
        r"\p{N}",  # one digit
        r" ?[^\s\p{L}\p{N}]+",  # punctuation
        r"\s*[\r\n]+",  # line breaks
        r"\s+(?!\S)|\s+",  # spaces, except one that belongs to the next word
    ]
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('merlin knows the roles user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] | trim }}"
    "{% if not loop.last or message['role'] == 'user' %}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` tokens; special tokens come first, then bytes."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_specials(texts), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ConfigError(
            f"vocab_size={vocab_size}: the text gave only {tokenizer.get_vocab_size()} tokens; "
            f"give more text or ask for fewer"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [USER, ASSISTANT],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _without_specials(texts: Iterable[str]) -> Iterable[str]:
    """The texts split at special tokens, which the BPE must not learn as words."""
    specials = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    for text in texts:
        yield from filter(None, specials.split(text))
