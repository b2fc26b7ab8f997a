"""The tokenizer that a GGUF file's metadata describes.

Two kinds are rebuilt. Byte-level BPE ("gpt2"): vocabulary and merges are in the file, and `tokenizer.ggml.pre` names
how text is split before merging. SentencePiece ("llama"): a merge joins two neighbours into a token of the vocabulary,
the best score first, so the merges follow from the vocabulary and its scores.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from peregrine.errors import CheckpointError
from peregrine.text.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # llama.cpp's kinds of tokens
_REMEDY = "use the model in Hugging Face format"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CONTRACTED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TRIPLES, _QWEN2 = _WORDS % "{1,3}", _WORDS % ""
_DIGITS = (r"\p{N}", _GPT2)  # every digit alone
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> the expressions text is split by, one after another.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "midm-2.0"), (_TRIPLES,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), (_TRIPLES,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), (r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    "tekken": (_CASED % ("", "", ""),),
    **dict.fromkeys(("gpt-4o", "llama4"), (_CASED % (f"{_CONTRACTED}?", f"{_CONTRACTED}?", "{1,3}"),)),
}
# A word that is a token is taken whole, even if merging would not lead to it.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "midm-2.0", "tekken", "glm4")
_BOS_BY_DEFAULT = _WHOLE_WORDS[:-1]


def tokenizer_of(source: str, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer described by a file's metadata; CheckpointError says what is missing or not supported."""
    if metadata.get("tokenizer.ggml.model") in (None, "no_vocab", "none"):
        return Tokenizer.absent(f"{source} has none; {_REMEDY}")
    fields = _Tokens(source, metadata)
    if fields.model == "gpt2":
        backend, kinds = _byte_level(fields), {"ByteLevel"}
    elif fields.model == "llama":
        backend, kinds = _sentencepiece(fields), {"Replace", "ByteFallback", "Fuse", "Strip"}
    else:
        problem = "tokenizers of this kind are not rebuilt; supported are gpt2 and llama"
        raise fields.refusal("model", fields.model, problem, _REMEDY)
    _add_tokens(backend, fields)
    special = {name: fields.token(name) for name in ("bos", "eos", "unknown", "padding")}
    backend.post_processor = _ends(fields, special["bos"], special["eos"])
    words = {"unknown": "unk", "padding": "pad"}
    config = {f"{words.get(name, name)}_token": text for name, text in special.items() if text is not None}
    return Tokenizer.of(source, backend, kinds, config, _templates(metadata))


class _Tokens:
    """The `tokenizer.ggml.*` fields of a file, checked."""

    def __init__(self, source: str, metadata: Mapping[str, Any]) -> None:
        self.source, self.metadata = source, metadata
        self.model = self._of("model", str)
        self.tokens: list[str] = self._list("tokens", str)
        self.kinds: list[int] = self._list("token_type", int) if "tokenizer.ggml.token_type" in metadata else []
        if self.kinds and len(self.kinds) != len(self.tokens):
            problem = f"not one for each of {len(self.tokens)} tokens"
            raise self.refusal("token_type", len(self.kinds), problem, "convert the model again")

    def get(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}", default)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.get(name, default))

    def merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(merge.split(" ")) for merge in self._list("merges", str)]
        if any(len(pair) != 2 for pair in pairs):
            raise self.refusal("merges", "...", "a merge is not two tokens", "convert the model again")
        return pairs

    def scores(self) -> list[float]:
        scores: list[float] = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise self.refusal("scores", len(scores), f"not one for each of {len(self.tokens)} tokens", _REMEDY)
        return scores

    def token(self, name: str) -> str | None:
        """The text of a token that the file names by its id."""
        id = self.get(f"{name}_token_id")
        if id is None:
            return None
        if not isinstance(id, int) or not 0 <= id < len(self.tokens):
            raise self.refusal(
                f"{name}_token_id", id, f"not one of {len(self.tokens)} tokens", "convert the model again"
            )
        return self.tokens[id]

    def of_kind(self, *kinds: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.kinds, strict=False) if kind in kinds]

    def refusal(self, name: str, value: object, problem: str, remedy: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: tokenizer.ggml.{name}={value!r}: {problem}; {remedy}")

    def _of(self, name: str, kind: type) -> Any:
        value = self.get(name)
        if not isinstance(value, kind):
            raise self.refusal(name, None, "the field is missing: the file has no tokenizer", _REMEDY)
        return value

    def _list(self, name: str, kind: type) -> Any:
        values = self._of(name, list)
        if not all(isinstance(value, kind) for value in values):
            raise self.refusal(name, "[...]", f"not a list of {kind.__name__}", "convert the model again")
        return values


def _byte_level(fields: _Tokens) -> Backend:
    """Byte-level BPE with the file's merges; `pre` says how text is split."""
    pre = fields.get("pre")
    if pre not in SPLITS:
        raise fields.refusal("pre", pre, f"how text is split is not known; known are {', '.join(SPLITS)}", _REMEDY)
    vocabulary = {token: id for id, token in enumerate(fields.tokens)}
    merges = fields.merges()
    absent = next((pair for pair in merges if "".join(pair) not in vocabulary), None)
    if absent is not None:
        raise fields.refusal("merges", absent, "makes no token of the vocabulary", "convert the model again")
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(fields: _Tokens) -> Backend:
    """BPE over characters with byte fallback; merges follow from the scores, the lowest id first on ties."""
    # Some files write tokens of spaces alone as spaces.
    tokens = [token.replace(" ", "▁") if not token.strip(" ") else token for token in fields.tokens]
    vocabulary, scores = {token: id for id, token in enumerate(tokens)}, fields.scores()
    plain = {id for id, kind in enumerate(fields.kinds) if kind in (_CONTROL, _BYTE)}
    merges: list[tuple[float, int, str, str]] = []
    for token, id in vocabulary.items():
        if id not in plain:
            halves = ((token[:at], token[at:]) for at in range(1, len(token)))
            merges += [(-scores[id], id, *pair) for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
    pairs = [(left, right) for _, _, left, right in sorted(merges, key=lambda merge: merge[:2])]
    unknown = fields.token("unknown")
    model = models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend, prefixed = Backend(model), fields.flag("add_space_prefix", True)
    spaced = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaced]) if prefixed else spaced
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if prefixed else chain)
    return backend


def _add_tokens(backend: Backend, fields: _Tokens) -> None:
    """Control tokens and those of the user are found in text before it is split."""
    special = [AddedToken(token, special=True, normalized=False) for token in fields.of_kind(_CONTROL)]
    plain = [AddedToken(token, special=False, normalized=False) for token in fields.of_kind(_USER_DEFINED)]
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _ends(fields: _Tokens, bos: str | None, eos: str | None) -> processors.PostProcessor:
    """Adds bos and eos to prompts where the file says so."""
    by_default = fields.model == "llama" or fields.get("pre") in _BOS_BY_DEFAULT
    first = bos if fields.flag("add_bos_token", by_default) else None
    last = eos if fields.flag("add_eos_token", False) else None
    named = {token: fields.tokens.index(token) for token in (first, last) if token is not None}
    pieces = [first] * (first is not None) + ["$A"] + [last] * (last is not None)
    return processors.TemplateProcessing(single=pieces, pair=None, special_tokens=list(named.items()))


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; the file's main one is "default"."""
    start = "tokenizer.chat_template"
    found = {name.removeprefix(f"{start}."): text for name, text in metadata.items() if name.startswith(f"{start}.")}
    return found | ({"default": metadata[start]} if isinstance(metadata.get(start), str) else {})
