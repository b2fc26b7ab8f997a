"""Trains merlin's tokenizer: byte-level BPE in Hugging Face format, with a chat template.

Every byte has a token, so any text comes back as it went in. Digits stand alone, so that numbers look the
same wherever they are. A line break never joins the word or the sign before it: a prompt that ends at the end
of a line then has the same tokens as that line in a document.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from peregrine.errors import ConfigError
from peregrine.train.data import END_OF_TEXT

USER, ASSISTANT = "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (END_OF_TEXT, USER, ASSISTANT)  # ids 0, 1, 2
STOP_IDS = (0, 1)  # a turn ends with the text, or where the user's next turn would begin

PATTERN = "|".join(
    [
        r"'(?:s|t|re|ve|m|ll|d)(?!\p{L})",  # contractions
        r" ?\p{L}+",  # a word with the space before it
        r"\p{N}",  # one digit
        r" ?[^\s\p{L}\p{N}]+",  # signs
        r"\s*[\r\n]+",  # line breaks
        r"\s+(?!\S)|\s+",  # indentation, less the space that belongs to the next word
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
    """A byte-level BPE of exactly `vocab_size` tokens, specials and bytes first."""
    tokenizer = empty_tokenizer()
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


def empty_tokenizer() -> Tokenizer:
    """Splitting and decoding as merlin does it, with no merges learnt yet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json as transformers and Peregrine read them."""
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
    """The texts cut at special tokens, which must not be learnt as words."""
    for text in texts:
        for special in SPECIAL_TOKENS:
            text = text.replace(special, "\0")
        yield from (piece for piece in text.split("\0") if piece)
