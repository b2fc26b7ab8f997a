"""The config.json that a GGUF file's metadata amounts to."""

from typing import Any

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.checkpoint.gguf.header import Header
from peregrine.models.checkpoint.gguf.layouts import Metadata, layout_of
from peregrine.models.checkpoint.gguf.values import read_tensor

_COMMON = {
    "context_length": "max_position_embeddings",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
# Control tokens that end an assistant's turn in public chat formats; files name one of them as eos and often no other.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
_CONTROL = 3


def config_fields(header: Header) -> Fields:
    """The fields of the config.json that the file's metadata amounts to."""
    metadata = Metadata.of(header)
    layout = layout_of(metadata)
    if metadata.all.whole("split.count", 1) > 1:
        raise metadata.all.refusal("split.count", "the model is split over several files", "join them first")
    for name in ("token_embd.weight", "output_norm.weight"):
        if name not in header.tensors and name not in header.unread:
            raise metadata.all.refusal(
                "general.type", f"no tensor {name}: this file holds no language model", "choose another"
            )
    vocabulary = header.tensors.get("token_embd.weight")
    values: dict[str, Any] = {
        "architectures": [layout.model],
        "num_hidden_layers": metadata.whole("block_count"),
        "hidden_size": metadata.whole("embedding_length"),
        "vocab_size": vocabulary.shape[0] if vocabulary is not None else None,
        "tie_word_embeddings": "output.weight" not in header.tensors and "output.weight" not in header.unread,
        "bos_token_id": metadata.all.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": stop_ids(metadata.all),
    }
    values["num_key_value_heads"] = metadata.whole("attention.head_count")
    values |= metadata.renamed(_COMMON) | _rope(metadata) | layout.more(metadata)
    return Fields(str(header.path), values)


def stop_ids(fields: Fields) -> list[int]:
    """The tokens that end a text: those the file names, and control tokens that end a turn in any chat format."""
    named = [fields.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = (fields.values.get(f"tokenizer.ggml.{name}") or [] for name in ("tokens", "token_type"))
    ends = [tokens.index(text) for text in _TURN_ENDS if text in tokens]
    found = [id for id in named if id is not None] + [id for id in ends if id < len(kinds) and kinds[id] == _CONTROL]
    return list(dict.fromkeys(found))


def _rope(metadata: Metadata) -> dict[str, Any]:
    """Rotated part of a head, and the scaling of its frequencies."""
    heads, size = metadata.whole("attention.head_count"), metadata.whole("embedding_length")
    head_dim = metadata.whole("attention.key_length", max(size // heads, 1))
    rotated = metadata.whole("rope.dimension_count", head_dim)
    values: dict[str, Any] = {"partial_rotary_factor": rotated / head_dim} if rotated != head_dim else {}
    scaling = _scaling(metadata)
    return values | ({"rope_scaling": scaling} if scaling else {})


def _scaling(metadata: Metadata) -> dict[str, Any] | None:
    kind = metadata.all.text(metadata.key("rope.scaling.type"), "none")
    original = metadata.whole("rope.scaling.original_context_length", metadata.whole("context_length"))
    factors = {
        which: [float(factor) for factor in read_tensor(metadata.header, f"{name}.weight").numpy()]
        for name, which in (("rope_freqs", "all"), ("rope_factors_short", "short"), ("rope_factors_long", "long"))
        if metadata.has_tensor(f"{name}.weight")
    }
    if factors:  # each frequency is divided by a number of its own
        return {
            "rope_type": "longrope",
            "short_factor": factors.get("short", factors.get("all")),
            "long_factor": factors.get("long", factors.get("all")),
            "original_max_position_embeddings": original,
            "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
        }
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        if metadata.architecture == "gpt-oss":  # which files do not say
            scaling["truncate"] = False
        if metadata.has("rope.scaling.yarn_log_multiplier"):  # DeepSeek's two magnitudes are equal in all its models
            magnitude = round(10 * metadata.number("rope.scaling.yarn_log_multiplier"), 6)
            scaling |= {"mscale": magnitude, "mscale_all_dim": magnitude}
        scaling |= metadata.renamed(
            {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
        )
    return scaling
