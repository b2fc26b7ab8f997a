"""How each architecture of GGUF files is written in Hugging Face's words: its model class, fields and tensor names.

Families read the translation as if it were a config.json and safetensors, and know nothing of GGUF. An architecture is
an entry in `LAYOUTS`: the class, fields beyond the common ones, names beyond the common ones, and whether queries' and
keys' rows are stored pair by pair (llama.cpp rotates neighbours in architectures that came from Llama).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.checkpoint.gguf.header import Header
from peregrine.models.checkpoint.gguf.joins import DEEPSEEK_JOINS, GPT_OSS_JOINS, Join


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata of a file, with the names of its architecture's fields shortened."""

    architecture: str
    all: Fields
    header: Header

    @staticmethod
    def of(header: Header) -> "Metadata":
        fields = Fields(str(header.path), header.metadata)
        if "general.architecture" not in fields:
            raise fields.refusal("general.architecture", "the field is missing", "convert the model again")
        return Metadata(fields.text("general.architecture", ""), fields, header)

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number above zero, unless zero is the default."""
        return self.all.whole(self.key(name), default, minimum=min(1, 1 if default is None else default))

    def number(self, name: str, default: float | None = None) -> float:
        return self.all.number(self.key(name), default)

    def has(self, name: str) -> bool:
        return self.key(name) in self.all

    def renamed(self, names: dict[str, str]) -> dict[str, Any]:
        """The fields that the file has, under their new names."""
        return {new: self.all.values[self.key(old)] for old, new in names.items() if self.has(old)}

    def has_tensor(self, name: str) -> bool:
        return name in self.header.tensors


MoreFields = Callable[[Metadata], dict[str, Any]]
SIGMOID = 2  # llama.cpp's number of the gating function


@dataclass(frozen=True, slots=True)
class Layout:
    """One architecture: `names` maps GGUF's name of a layer's part to Hugging Face's."""

    model: str  # Hugging Face's name of the class
    names: dict[str, str] = field(default_factory=dict)
    more: MoreFields = lambda metadata: {}
    paired: bool = False  # rows of a query's or key's head are stored as pairs of what is half a head apart
    experts: str = "mlp.experts"  # where a layer's experts are
    norm_offset: float = 0.0  # the converter added it to every norm's weight
    joins: dict[str, Join] = field(default_factory=dict)  # whole names in a layer that are made of several tensors


PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}


def _biases(metadata: Metadata) -> dict[str, Any]:
    return {
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_gate.bias"),
    }


def _mixtral(metadata: Metadata) -> dict[str, Any]:
    return metadata.renamed(
        {
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "attention.sliding_window": "sliding_window",
        }
    )


def _experts(metadata: Metadata) -> dict[str, Any]:
    return metadata.renamed(
        {
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        }
    )


def _mistral(metadata: Metadata) -> dict[str, Any]:
    return {"sliding_window": metadata.whole("attention.sliding_window")}


def _shared_experts(metadata: Metadata) -> dict[str, Any]:
    shared = metadata.renamed({"expert_shared_feed_forward_length": "shared_expert_intermediate_size"})
    return _experts(metadata) | shared


def _granite(metadata: Metadata) -> dict[str, Any]:
    scales = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"}
    scales |= {"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
    return _biases(metadata) | metadata.renamed(scales)


def _phi3(metadata: Metadata) -> dict[str, Any]:
    return {"sliding_window": metadata.whole("attention.sliding_window", 0) or None}


def _no_windows(metadata: Metadata) -> dict[str, Any]:
    if metadata.has("attention.sliding_window"):
        name = metadata.key("attention.sliding_window")
        raise metadata.all.refusal(name, "OLMo with windows (OLMo 3) is not supported", "choose another model")
    return _biases(metadata)


def _gemma(metadata: Metadata) -> dict[str, Any]:
    """What files leave out follows from the size: the 27B models scale queries by their width per head."""
    width = metadata.whole("embedding_length") // metadata.whole("attention.head_count")
    is_27b = metadata.whole("block_count") == {"gemma2": 46, "gemma3": 62}[metadata.architecture]
    capped = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
    capped |= {"attention.sliding_window": "sliding_window"}
    scaling = {"query_pre_attn_scalar": width if is_27b else metadata.whole("attention.key_length")}
    return metadata.renamed(capped) | scaling


def _deepseek(metadata: Metadata) -> dict[str, Any]:
    """What V2 and V3 share; files are written without prediction layers (MTP)."""
    if metadata.whole("nextn_predict_layers", 0):
        name = metadata.key("nextn_predict_layers")
        raise metadata.all.refusal(name, "prediction layers in a GGUF file are not read", "convert the model without")
    rotated = metadata.whole("rope.dimension_count")
    sizes = {part: f"attention.{part}_length_mla" for part in ("key", "value")}  # older files have them without "_mla"
    key, value = (metadata.whole(n if metadata.has(n) else n.removesuffix("_mla")) for n in sizes.values())
    renamed = {
        "attention.kv_lora_rank": "kv_lora_rank",
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "expert_weights_norm": "norm_topk_prob",
        "leading_dense_block_count": "first_k_dense_replace",
    }
    return metadata.renamed(renamed) | {
        "num_key_value_heads": metadata.whole("attention.head_count"),
        "partial_rotary_factor": 1.0,
        "q_lora_rank": metadata.whole("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


def _deepseek_v2(metadata: Metadata) -> dict[str, Any]:
    method = "group_limited_greedy" if metadata.whole("expert_group_count", 1) > 1 else "greedy"
    return {"topk_method": method} | _deepseek(metadata)


def _deepseek_v3(metadata: Metadata) -> dict[str, Any]:
    """Kimi-K2 has one group, which files may leave out."""
    return {"n_group": 1, "topk_group": 1} | _deepseek(metadata)


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    names = {"attention.sliding_window": "sliding_window", "expert_feed_forward_length": "intermediate_size"}
    names |= {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
    return metadata.renamed(names)


_LLAMA = Layout("LlamaForCausalLM", more=_biases, paired=True)
_MISTRAL = Layout("MistralForCausalLM", more=_mistral, paired=True)
_MIXTRAL = Layout(
    "MixtralForCausalLM",
    names={"ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"},
    more=_mixtral,
    paired=True,
    experts="block_sparse_moe.experts",
)
_MLA = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # of older files; newer ones have it in two
} | {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_DEEPSEEK_V2 = Layout("DeepseekV2ForCausalLM", _MLA, more=_deepseek_v2, joins=DEEPSEEK_JOINS)
_DEEPSEEK_V3 = Layout("DeepseekV3ForCausalLM", _MLA, more=_deepseek_v3, joins=DEEPSEEK_JOINS)
_GPT_OSS = {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
_SHARED |= {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_OLMO2 = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GLM4 = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj"}
_GEMMA = _OLMO2 | {"ffn_norm": "pre_feedforward_layernorm"}
LAYOUTS = {
    "qwen2": Layout("Qwen2ForCausalLM"),
    "qwen3": Layout("Qwen3ForCausalLM", more=_biases),
    # llama.cpp normalises the weights of Qwen3's experts, whatever a config said; so do all published models.
    "qwen2moe": Layout("Qwen2MoeForCausalLM", _SHARED, more=_shared_experts),
    "granite": Layout("GraniteForCausalLM", more=_granite, paired=True),
    "smollm3": Layout("SmolLM3ForCausalLM", more=_biases, paired=True),
    "phi3": Layout("Phi3ForCausalLM", {"attn_qkv": "self_attn.qkv_proj", **_FUSED_MLP}, more=_phi3),
    "olmo2": Layout("Olmo2ForCausalLM", _OLMO2, more=_no_windows),
    "glm4": Layout("Glm4ForCausalLM", _GLM4 | _FUSED_MLP, more=_biases),
    "gemma2": Layout("Gemma2ForCausalLM", _GEMMA, more=_gemma, norm_offset=1.0),
    "gemma3": Layout("Gemma3ForCausalLM", _GEMMA, more=_gemma, norm_offset=1.0),
    "gpt-oss": Layout("GptOssForCausalLM", _GPT_OSS, more=_gpt_oss, joins=GPT_OSS_JOINS),
    "qwen3moe": Layout("Qwen3MoeForCausalLM", more=lambda metadata: _experts(metadata) | {"norm_topk_prob": True}),
}


def layout_of(metadata: Metadata) -> Layout:
    """The layout of a file's architecture; "llama" stands for Llama, Mistral and Mixtral, "deepseek2" for V2 and V3."""
    if metadata.architecture == "llama":
        if metadata.whole("expert_count", 0):
            return _MIXTRAL
        return _MISTRAL if metadata.whole("attention.sliding_window", 0) else _LLAMA
    if metadata.architecture == "deepseek2":
        return _DEEPSEEK_V3 if metadata.whole("expert_gating_func", 1) == SIGMOID else _DEEPSEEK_V2
    if metadata.architecture not in LAYOUTS:
        supported = ", ".join(["llama", "deepseek2", *LAYOUTS])
        raise metadata.all.refusal(
            "general.architecture", f"not supported in GGUF files; supported are {supported}", "choose another model"
        )
    return LAYOUTS[metadata.architecture]
