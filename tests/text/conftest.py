"""Small tokenizers of every kind, written as checkpoint folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from peregrine.text.tokenizer import Tokenizer as PeregrineTokenizer

LINES = [
    "The peregrine falcon stoops at three hundred kilometres an hour.",
    "Once upon a time there was a small bird, and the small bird was fast.",
    "def draft(tokens): return [guess(token) for token in tokens]\n\n",
    "naïve café, über-fast; 你好世界 你好 世界。 Привет мир. 🦅🦅 flew 👩‍🚀 by",
    "the then they there these; in ing ingle; 1 12 123 1234",
] * 3
SPECIAL = ["<|bos|>", "<|eos|>", "<|user|>"]
CONFIG = {
    "bos_token": "<|bos|>",
    "eos_token": {"__type": "AddedToken", "content": "<|eos|>"},
    "extra_special_tokens": ["<|user|>"],
}

Writer = Callable[..., Path]


def write_folder(folder: Path, backend: Tokenizer, config: dict[str, Any] | None = None) -> Path:
    """A checkpoint folder with this tokenizer and this tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", **(CONFIG if config is None else config)}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def add_tokens(backend: Tokenizer, with_bos: bool = True) -> Tokenizer:
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False), AddedToken("鳥 bird", normalized=False)])
    if with_bos:
        ids = [("<|bos|>", backend.token_to_id("<|bos|>"))]
        backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", pair="$A $B", special_tokens=ids)
    return backend


def byte_level(with_bos: bool = True) -> Tokenizer:
    """Byte-level BPE, as in GPT-2, Llama 3 and Qwen: every id spells bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    return add_tokens(backend, with_bos)


def byte_fallback() -> Tokenizer:
    """Byte fallback, as in Llama 2: pieces with a leading space mark, bytes for what the vocabulary lacks."""
    trained = Tokenizer(models.BPE())
    marked = [line.encode("ascii", "ignore").decode().replace("\n", "") for line in LINES]
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(marked, trainers.BpeTrainer(vocab_size=160))
    spec = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *spec["vocab"]]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in spec["merges"]]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = trained.normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return add_tokens(backend)


def metaspace() -> Tokenizer:
    """A unigram vocabulary whose decoder drops the space before the first word."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        LINES, trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"])
    )
    return add_tokens(backend)


def metaspace_fallback() -> Tokenizer:
    """The Llama 2 vocabulary with the newer decoder chain: bytes first, then space marks."""
    backend = byte_fallback()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return backend


def word_level() -> Tokenizer:
    """Whole words and no decoder: ids are joined with spaces."""
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(LINES, trainers.WordLevelTrainer(special_tokens=["<unk>"]))
    return add_tokens(backend)


def word_piece() -> Tokenizer:
    """Words and ##continuations."""
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(LINES, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["<unk>"]))
    return add_tokens(backend)


BUILDERS = {
    build.__name__: build
    for build in (byte_level, byte_fallback, metaspace, metaspace_fallback, word_level, word_piece)
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder per kind of tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: write_folder(root / name, build()) for name, build in BUILDERS.items()}


@pytest.fixture(scope="session", params=sorted(BUILDERS))
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> PeregrineTokenizer:
    return PeregrineTokenizer.read(folder)


@pytest.fixture(scope="session")
def tokenizers(folders: dict[str, Path]) -> dict[str, PeregrineTokenizer]:
    return {name: PeregrineTokenizer.read(folder) for name, folder in folders.items()}


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Write a byte-level folder with the given config, with or without bos in its post-processor."""

    def write_byte_level(config: dict[str, Any] | None = None, with_bos: bool = True) -> Path:
        return write_folder(tmp_path / "model", byte_level(with_bos), config)

    return write_byte_level
