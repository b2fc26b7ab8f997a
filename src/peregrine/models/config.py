"""What a decoder looks like, read from a checkpoint's config.json.

Llama, Mistral, Qwen2, Qwen3, Mixtral and DeepSeek are one architecture with switches; the switches are fields here, so
that no other file asks for a family by name. What a field asks for and the decoder cannot do is refused.
"""

from dataclasses import dataclass
from pathlib import Path

from peregrine.attention import LayerAttention
from peregrine.cache.store import KVShape
from peregrine.models.checkpoint.folder import Fields, open_folder
from peregrine.models.checkpoint.fp8 import read_blocks
from peregrine.models.experts_config import ExpertsConfig, read_experts
from peregrine.models.mla_config import MLAConfig, read_latent
from peregrine.models.rope_table import Rope, read_rope, usable_positions

# architecture -> family whose rules it follows. MiMo is a Qwen2 body with prediction layers beside it; DeepSeek-R1 is
# V3, and so is Kimi-K2 with other numbers.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MiMoForCausalLM": "qwen2",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "KimiK2ForCausalLM": "deepseek_v3",
}
# Families whose projections have a bias if the config says so; Qwen2's have one whatever it says.
_BIASED = ("llama", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")
ACTIVATIONS = ("silu", "swish")
_QUANTIZED = ("compression_config", "quantize_config")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and switches of a decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_positions: int
    windows: tuple[int | None, ...]  # per layer: keys a query sees at most, itself included
    tied: bool  # the head shares the embedding's weight
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    latent: MLAConfig | None  # attention over latents; None: over keys and values of heads
    experts: ExpertsConfig | None  # mixtures in the place of some MLPs; None: every layer has an MLP
    num_extra_layers: int  # prediction layers stored beside the decoder; a draft head loads them
    bos_id: int | None
    eos_ids: tuple[int, ...]

    @classmethod
    def read(cls, folder: str | Path) -> "ModelConfig":
        """The config of a checkpoint folder, end-of-text ids included."""
        path = open_folder(folder)
        fields = Fields.read(path / "config.json")
        generation = path / "generation_config.json"
        defaults = Fields.read(generation) if generation.exists() else Fields(str(generation), {})
        return cls.from_fields(fields, defaults)

    @classmethod
    def from_fields(cls, fields: Fields, generation: Fields | None = None) -> "ModelConfig":
        """The config that a config.json's fields describe; `generation` wins for the special ids."""
        family = _family(fields)
        _refuse_foreign(fields)
        num_layers = fields.whole("num_hidden_layers")
        num_heads = fields.whole("num_attention_heads")
        num_kv_heads = fields.whole("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise fields.refusal(
                "num_key_value_heads", f"does not divide num_attention_heads={num_heads}", "correct the config"
            )
        hidden_size = fields.whole("hidden_size")
        declared = fields.whole("max_position_embeddings", 2048)
        rope = read_rope(fields, declared)
        latent = read_latent(fields, family, rope)
        head_dim = _head_dim(fields, family, hidden_size, num_heads) if latent is None else latent.q_dim
        specials = generation if generation is not None else Fields(fields.source, {})
        bos_ids = (specials if "bos_token_id" in specials else fields).wholes("bos_token_id")
        return cls(
            family=family,
            vocab_size=fields.whole("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.whole("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            max_positions=usable_positions(rope, declared),
            windows=_windows(fields, family, num_layers),
            tied=fields.flag("tie_word_embeddings", False),
            qkv_bias=family == "qwen2" or (family in _BIASED and fields.flag("attention_bias", False)),
            out_bias=family in _BIASED and fields.flag("attention_bias", False),
            mlp_bias=family == "llama" and fields.flag("mlp_bias", False),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            latent=latent,
            experts=read_experts(fields, family, num_layers),
            num_extra_layers=fields.whole("num_nextn_predict_layers", 0, minimum=0),
            bos_id=bos_ids[0] if bos_ids else None,
            eos_ids=(specials if "eos_token_id" in specials else fields).wholes("eos_token_id"),
        )

    @property
    def kv_shape(self) -> KVShape:
        """What a token leaves in each layer's store: of latent attention one key, whose first part is its value."""
        if self.latent is not None:
            return KVShape(1, self.latent.key_dim, self.latent.kv_rank, shared=True)
        return KVShape.of_heads(self.num_kv_heads, self.head_dim)

    @property
    def rope_dim(self) -> int:
        """How much of a head is rotated."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in the place of its MLP."""
        return self.experts is not None and self.experts.layers[layer]

    def layer_attention(self) -> list[LayerAttention]:
        """How each layer attends: scale and window, in the order of the layers."""
        scale = self.head_dim**-0.5 if self.latent is None else self.latent.scale
        return [LayerAttention(scale=scale, window=window, sinks=None) for window in self.windows]


def _family(fields: Fields) -> str:
    supported = f"supported are {', '.join(ARCHITECTURES)}"
    architectures = fields.texts("architectures")
    if not architectures:
        if fields.text("model_type", "") in ARCHITECTURES.values():
            return fields.text("model_type", "")
        raise fields.refusal("architectures", f"the config names no architecture; {supported}", "add the field")
    for architecture in architectures:
        if architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture]
    raise fields.refusal("architectures", f"not supported; {supported}", "choose a checkpoint of one of those")


def _refuse_foreign(fields: Fields) -> None:
    for name in _QUANTIZED:
        if name in fields:
            raise fields.refusal(
                name, "quantized weights are not supported", "use the float32, float16 or bfloat16 checkpoint"
            )
    read_blocks(fields)
    if fields.text("hidden_act", "silu") not in ACTIVATIONS:
        raise fields.refusal(
            "hidden_act", f"not supported; supported are {', '.join(ACTIVATIONS)}", "choose another checkpoint"
        )


def _head_dim(fields: Fields, family: str, hidden_size: int, num_heads: int) -> int:
    # Qwen3's heads are 128 wide unless it says otherwise.
    head_dim = fields.whole("head_dim", 128 if family == "qwen3" else hidden_size // num_heads)
    if head_dim % 2:
        raise fields.refusal("head_dim", f"{head_dim} is odd; a head is rotated in pairs", "correct the config")
    if "head_dim" not in fields and family != "qwen3" and hidden_size % num_heads:
        raise fields.refusal(
            "num_attention_heads", f"does not divide hidden_size={hidden_size} and no head_dim is given", "give it"
        )
    return head_dim


def _windows(fields: Fields, family: str, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window: none for Llama, one for all for Mistral, by layer for Qwen."""
    kinds = fields.texts("layer_types")
    if kinds and len(kinds) != num_layers:
        raise fields.refusal("layer_types", f"not one for each of {num_layers} layers", "correct the config")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.refusal(
                "layer_types", f"layers of kind {kind!r} are not supported", "choose another checkpoint"
            )
    match family:
        case "mistral" | "mixtral" | "qwen3_moe":
            window = _window_of_all(fields, family)
            wanted = "full_attention" if window is None else "sliding_attention"
            if any(kind != wanted for kind in kinds):
                raise fields.refusal("layer_types", f"{family} layers all have one window", "choose another checkpoint")
            return (window,) * num_layers
        case "qwen2" | "qwen3":
            first = fields.whole("max_window_layers", 28, minimum=0)
            window = _declared_window(fields) if fields.flag("use_sliding_window", False) else None
            if "sliding_attention" in kinds and window is None:
                raise fields.refusal("layer_types", "sliding layers without use_sliding_window", "correct the config")
            slides = [kind == "sliding_attention" for kind in kinds] or [i >= first for i in range(num_layers)]
            return tuple(window if slide else None for slide in slides)
        case _:
            if "sliding_attention" in kinds:
                raise fields.refusal("layer_types", f"{family} layers have no window", "choose another checkpoint")
            return (None,) * num_layers


def _window_of_all(fields: Fields, family: str) -> int | None:
    """The window that all layers of such a family share."""
    match family:
        case "mixtral":
            return fields.whole("sliding_window") if "sliding_window" in fields else None
        case "qwen3_moe":
            return _declared_window(fields) if fields.flag("use_sliding_window", False) else None
        case _:
            return _declared_window(fields)


def _declared_window(fields: Fields) -> int | None:
    # A config that leaves the field out means 4096; null means no window.
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    return fields.whole("sliding_window", 4096)
