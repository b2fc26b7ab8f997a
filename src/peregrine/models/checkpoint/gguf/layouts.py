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
        return self.all.whole(self.key(name), default, minimum=0)

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


@dataclass(frozen=True, slots=True)
class Layout:
    """One architecture: `names` maps GGUF's name of a layer's part to Hugging Face's."""

    model: str  # Hugging Face's name of the class
    names: dict[str, str] = field(default_factory=dict)
    more: MoreFields = lambda metadata: {}
    paired: bool = False  # rows of a query's or key's head are stored as pairs of what is half a head apart
    experts: str = "mlp.experts"  # where a layer's experts are


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


_LLAMA = Layout("LlamaForCausalLM", more=_biases, paired=True)
_MISTRAL = Layout("MistralForCausalLM", more=_mistral, paired=True)
_MIXTRAL = Layout(
    "MixtralForCausalLM",
    names={"ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"},
    more=_mixtral,
    paired=True,
    experts="block_sparse_moe.experts",
)
LAYOUTS = {
    "qwen2": Layout("Qwen2ForCausalLM"),
    "qwen3": Layout("Qwen3ForCausalLM", more=_biases),
    # llama.cpp normalises the weights of Qwen3's experts, whatever a config said; so do all published models.
    "qwen3moe": Layout("Qwen3MoeForCausalLM", more=lambda metadata: _experts(metadata) | {"norm_topk_prob": True}),
}


def layout_of(metadata: Metadata) -> Layout:
    """The layout of a file's architecture; "llama" stands for Llama, Mistral and Mixtral."""
    if metadata.architecture == "llama":
        if metadata.whole("expert_count", 0):
            return _MIXTRAL
        return _MISTRAL if metadata.whole("attention.sliding_window", 0) else _LLAMA
    if metadata.architecture not in LAYOUTS:
        supported = ", ".join(["llama", *LAYOUTS])
        raise metadata.all.refusal(
            "general.architecture", f"not supported in GGUF files; supported are {supported}", "choose another model"
        )
    return LAYOUTS[metadata.architecture]
