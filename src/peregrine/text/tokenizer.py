"""Text to token ids and back, by the tokenizer files of a checkpoint folder.

tokenizer.json holds the vocabulary; tokenizer_config.json adds names (bos_token, eos_token, ...) and chat templates.
Encoding and decoding agree with transformers on the same folder, with three deliberate differences:
- `add_bos_token: true` is honoured if the post-processor of tokenizer.json adds no bos (DeepSeek's files);
- a special token that is named but not in the vocabulary gets no id, since the model has no row for it;
- decoded text is never "cleaned up", which would change what the model wrote.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from peregrine.errors import CheckpointError, PeregrineError, RequestError
from peregrine.files import MAX_TOKENIZER_BYTES, REMEDY, parse_object, read_object, read_text
from peregrine.text.template_files import chat_templates

_TOKEN_ID = re.compile(r"[0-9]{1,9}")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Decoders whose text for an id depends at most on the id before it, which incremental detokenisation needs.
_LOCAL_DECODERS = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece", "BPEDecoder"})
_BYTE_DECODERS = frozenset({"ByteLevel", "Fuse"})
_TOKEN_FLAGS = frozenset({"content", "single_word", "lstrip", "rstrip", "normalized", "special"})
_MANY_IDS = 4096
_OTHER_VOCABULARIES = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json", "tiktoken.model")


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte in byte-level vocabularies, which write each byte as one printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """A checkpoint's vocabulary, its special tokens and its chat templates."""

    backend: Backend = field(repr=False)
    vocab_size: int  # largest id + 1; a model may have more rows
    bos_id: int | None
    eos_id: int | None
    special_ids: frozenset[int] = field(repr=False)
    byte_ids: Mapping[int, int] = field(repr=False)  # byte-fallback id -> byte; empty without byte fallback
    byte_level: bool  # every id stands for bytes (GPT-2, Llama 3, Qwen, ...)
    prepends_bos: bool  # `encode` must add bos itself, because the post-processor does not
    named_tokens: Mapping[str, str]  # bos_token, eos_token, ...: variables of chat templates
    chat_templates: Mapping[str, str] = field(repr=False)  # by name; a single template is "default"
    missing: str | None = None  # why there is no tokenizer: then only token ids are served
    _texts: dict[int, str] = field(default_factory=dict, init=False, repr=False)  # of tokens that were asked for
    _bytes: dict[int, bytes] = field(default_factory=dict, init=False, repr=False)
    # Texts of ids that streams have met: those that are whole characters and no special ids.
    whole_texts: dict[int, str] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def read(cls, folder: Path | str) -> "Tokenizer":
        """Read a checkpoint folder; CheckpointError names the file that is missing or wrong."""
        folder = Path(folder)
        backend, decoders = _read_backend(folder)
        config = _read_config(folder)
        return cls.of(f"{folder}/tokenizer_config.json", backend, decoders, config, chat_templates(folder, config))

    @classmethod
    def absent(cls, reason: str) -> "Tokenizer":
        """No tokenizer: every text is refused with the reason."""
        nothing: dict[str, str] = {}
        empty = Backend(models.WordLevel({}, unk_token=""))
        return cls(empty, 0, None, None, frozenset(), {}, False, False, nothing, nothing, missing=reason)

    @classmethod
    def of(
        cls,
        source: str,
        backend: Backend,
        decoders: set[str],
        config: Mapping[str, object],
        chat_templates: Mapping[str, str],
    ) -> "Tokenizer":
        """A tokenizer of its parts; config has the fields of tokenizer_config.json, and `source` names its file."""
        named_tokens, extra_tokens = _special_tokens(config)
        _register(backend, config, [*named_tokens.values(), *extra_tokens])
        vocabulary = backend.get_vocab(with_added_tokens=True)
        byte_ids = {
            id: int(found[1], 16) for token, id in vocabulary.items() if (found := _BYTE_TOKEN.fullmatch(token))
        }
        bos_id = _named_id(source, backend, named_tokens, "bos_token")
        return cls(
            backend=backend,
            vocab_size=max(vocabulary.values(), default=-1) + 1,
            bos_id=bos_id,
            eos_id=_named_id(source, backend, named_tokens, "eos_token"),
            special_ids=frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special),
            byte_ids=byte_ids if "ByteFallback" in decoders else {},
            byte_level="ByteLevel" in decoders,
            prepends_bos=config.get("add_bos_token") is True
            and bos_id is not None
            and backend.encode("", add_special_tokens=True).ids[:1] != [bos_id],
            named_tokens=named_tokens,
            chat_templates=chat_templates,
        )

    @property
    def chat_template(self) -> str | None:
        """The template for ordinary chats, or None for a model without one."""
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text. Special tokens in the text are parsed; `add_special` adds bos etc.

        For chats use `chat.encode_chat`: a rendered chat already contains its special tokens.
        """
        if self.missing is not None:
            raise RequestError("text", text, f"there is no tokenizer: {self.missing}", "or send token ids")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"is not valid Unicode (lone surrogate at character {error.start})"
            raise RequestError("text", text, problem, "send text that can be written as UTF-8") from error
        try:
            # A batch of one: unlike `encode` it releases the GIL, so a long text stops no other thread.
            ids = self.backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        except BaseException as error:
            refusal = RequestError("text", text, f"the model's tokenizer fails on it: {error}", "send other text")
            raise _unless_ended(error, refusal) from error
        return [self.bos_id, *ids] if add_special and self.prepends_bos and self.bos_id is not None else ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD; ids without a token are skipped."""
        if len(ids) > _MANY_IDS:
            return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]  # releases the GIL
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def token(self, id: int) -> str:
        """The vocabulary entry of an id (such as 'Ġhello'); '' for an id without a token."""
        return self.backend.id_to_token(id) or ""

    def spelling(self, id: int) -> bytes:
        """The bytes an id stands for, which may be a part of a character."""
        if self.byte_level:
            return self.token_bytes(id)
        return bytes([self.byte_ids[id]]) if id in self.byte_ids else self.token(id).replace("▁", " ").encode()

    def token_text(self, id: int) -> str:
        """An id as text; one whose bytes are no text by themselves is written as bytes:\\xe2\\x82."""
        if id not in self._texts:
            spelled = self.spelling(id)
            try:
                self._texts[id] = spelled.decode()
            except UnicodeDecodeError:
                self._texts[id] = "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
        return self._texts[id]

    def token_bytes(self, id: int) -> bytes:
        """The bytes of an id of a byte-level tokenizer; they may be a part of a character."""
        if id not in self._bytes:
            token = self.token(id)
            # An added token may contain characters outside the byte alphabet: then it is plain text.
            plain = not all(c in _BYTE_OF for c in token)
            self._bytes[id] = token.encode() if plain else bytes(_BYTE_OF[c] for c in token)
        return self._bytes[id]


def _read_backend(folder: Path) -> tuple[Backend, set[str]]:
    """tokenizer.json as a `tokenizers.Tokenizer`, and the types of decoder it chains."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(missing_reason(folder))
    text = read_text(path, MAX_TOKENIZER_BYTES)
    spec = parse_object(path, text)
    try:
        backend = Backend.from_str(text)
    except BaseException as error:
        raise _unless_ended(error, CheckpointError(f"{path} is JSON but not a tokenizer: {error}; {REMEDY}")) from error
    # Settings for training batches; prompts are never truncated or padded.
    backend.no_truncation()
    backend.no_padding()
    decoders = _decoder_kinds(spec.get("decoder"))
    allowed = _BYTE_DECODERS if "ByteLevel" in decoders else _LOCAL_DECODERS
    if refused := sorted(decoders - allowed):
        raise CheckpointError(
            f"{path}: decoder chain {sorted(decoders)} cannot be streamed because of {refused}; "
            f"supported are chains of {sorted(_LOCAL_DECODERS)}, or ByteLevel"
        )
    return backend, decoders


def _unless_ended(error: BaseException, refusal: PeregrineError) -> BaseException:
    """What to raise for an error of the library: it raises bare Exceptions, and panics, which are not Exceptions."""
    return error if isinstance(error, KeyboardInterrupt | SystemExit) else refusal


def missing_reason(folder: Path) -> str:
    """Why a folder without tokenizer.json has no tokenizer, and what to do."""
    if not folder.is_dir():
        return f"{folder} is not a folder; name a checkpoint folder that holds tokenizer.json"
    found = [name for name in _OTHER_VOCABULARIES if (folder / name).is_file()]
    if not found:
        return f"{folder} has no tokenizer.json; copy it from the model's repository"
    return (
        f"{folder} has {', '.join(found)} but no tokenizer.json; convert it once with "
        "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )


def _decoder_kinds(spec: object) -> set[str]:
    if not isinstance(spec, dict):
        return set()
    if spec.get("type") == "Sequence":
        return {kind for member in spec["decoders"] for kind in _decoder_kinds(member)}
    return {str(spec.get("type"))}


def _read_config(folder: Path) -> dict[str, object]:
    """tokenizer_config.json, with special_tokens_map.json over it where the config lists no added tokens."""
    config, special = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    values = read_object(config) if config.exists() else {}
    if special.exists() and "added_tokens_decoder" not in values:
        values |= read_object(special)
    return values


def _content(token: object) -> str | None:
    """A token written as a string or as {"content": ...}; None for anything else."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _special_tokens(config: Mapping[str, object]) -> tuple[dict[str, str], list[str]]:
    """Special tokens that have a name (bos_token, ...), and those that have none."""
    named = {key: text for key, token in config.items() if key.endswith("_token") and (text := _content(token))}
    unnamed: list[object] = []
    for key in ("extra_special_tokens", "additional_special_tokens"):
        tokens = config.get(key)
        if isinstance(tokens, dict):
            named |= {name: text for name, token in tokens.items() if (text := _content(token))}
        elif isinstance(tokens, list):
            unnamed += tokens
    return named, [text for token in unnamed if (text := _content(token))]


def _register(backend: Backend, config: Mapping[str, object], special_tokens: list[str]) -> None:
    """Add the config's tokens to the backend, and mark its special tokens as special."""
    tokens = _added_tokens(config.get("added_tokens_decoder"))
    backend.add_tokens([tokens[id] for id in sorted(tokens)])  # an existing token takes these flags
    for id, token in tokens.items():
        if backend.token_to_id(token.content) != id:
            raise CheckpointError(
                f"tokenizer_config.json gives {token.content!r} the id {id}, but tokenizer.json makes it "
                f"{backend.token_to_id(token.content)}; take both files from the same revision of the model"
            )
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    # A token without an id is left out: a new id would be past the model's rows.
    missing = [text for text in special_tokens if text not in added and backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _added_tokens(listed: object) -> dict[int, AddedToken]:
    """The entries of `added_tokens_decoder` by id, e.g. {"7": {"content": "<tool>", "special": true}}."""
    tokens = {}
    for id, flags in listed.items() if isinstance(listed, dict) else ():
        taken = {name: flags[name] for name in _TOKEN_FLAGS & flags.keys()} if isinstance(flags, dict) else {}
        content = taken.pop("content", None)
        sound = isinstance(content, str) and all(isinstance(flag, bool) for flag in taken.values())
        if not sound or not _TOKEN_ID.fullmatch(id):
            entry = f"{id!r}: {flags!r}"[:80]
            raise CheckpointError(
                f"tokenizer_config.json: added_tokens_decoder holds {{{entry}}}, not an id and its token; {REMEDY}"
            )
        tokens[int(id)] = AddedToken(content, **taken)
    return tokens


def _named_id(source: str, backend: Backend, named_tokens: Mapping[str, str], name: str) -> int | None:
    text = named_tokens.get(name)
    if text is None:
        return None
    id = backend.token_to_id(text)
    if id is None:
        raise CheckpointError(
            f"{source}: {name} is {text!r}, which the vocabulary does not hold; "
            "name a token of the vocabulary, or null for none"
        )
    return id
