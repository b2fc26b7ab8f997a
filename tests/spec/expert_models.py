"""Small models with experts, and prediction layers (MTP) for any model."""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from spec.harness import HEAD_DIM, HIDDEN, LAYERS, Draw, mla_model, tiny_model, write_model

SOFT = 0.5  # scale of what layers add to the residual


def with_prediction_layer(model: Path) -> Path:
    """A copy of a model with smaller layer outputs and a prediction layer that is sometimes right.

    The prediction layer is the last layer, after a linear that passes on the embedding and a little of the hidden
    state. As the model's layers add little to the embedding, the two sometimes agree.
    """
    weights, new = load_file(model / "model.safetensors"), Draw(8)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight *= SOFT
    count = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    last, extra = f"model.layers.{count - 1}.", f"model.layers.{count}."
    weights |= {extra + n.removeprefix(last): w.clone() for n, w in weights.items() if n.startswith(last)}
    norm, hidden = weights["model.norm.weight"], len(weights["model.norm.weight"])
    weights |= {f"{extra}{name}.weight": norm.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    both = torch.cat((torch.eye(hidden), 0.1 * new(hidden, hidden)), dim=1)
    weights[f"{extra}eh_proj.weight"] = both.to(norm.dtype)
    weights[f"{extra}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{extra}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    return write_model("mtp", model, weights, {"num_nextn_predict_layers": 1})


@cache
def mla_mtp_model() -> Path:
    """The small DeepSeek-V3 with a prediction layer."""
    return with_prediction_layer(mla_model())


def with_experts(name: str, fields: dict[str, object], shared: bool = False) -> Path:
    """The tiny model with normed heads and eight experts, two for each token; the first layer's MLP stays."""
    weights, new, inner = load_file(tiny_model() / "model.safetensors"), Draw(10), 32
    for i in range(LAYERS):
        prefix = f"model.layers.{i}"
        weights |= {f"{prefix}.self_attn.{n}_norm.weight": 1 + 0.2 * new(HEAD_DIM) for n in "qk"}
        if i == 0:
            continue
        for part in ("gate", "up", "down"):
            del weights[f"{prefix}.mlp.{part}_proj.weight"]
        weights[f"{prefix}.mlp.gate.weight"] = new(8, HIDDEN)
        experts = [f"{prefix}.mlp.experts.{e}" for e in range(8)]
        for expert in [*experts, f"{prefix}.mlp.shared_experts"] if shared else experts:
            weights |= {f"{expert}.{part}_proj.weight": new(inner, HIDDEN) for part in ("gate", "up")}
            weights[f"{expert}.down_proj.weight"] = 4 * new(HIDDEN, inner)
        if shared:
            weights[f"{prefix}.mlp.gate.e_score_correction_bias"] = 0.1 * new(8)
    known = {"num_experts_per_tok": 2, "moe_intermediate_size": inner, "norm_topk_prob": True}
    return write_model(name, tiny_model(), weights, known | fields)


@cache
def expert_model() -> Path:
    """The tiny model as a Qwen3-MoE."""
    fields = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8}
    return with_experts("experts", fields | {"mlp_only_layers": [0]})


@cache
def glm_mtp_model() -> Path:
    """The tiny model as a GLM-4.5 with a prediction layer: half of a head is rotated, and an expert is shared."""
    fields = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_routed_experts": 8}
    fields |= {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5}
    fields |= {"first_k_dense_replace": 1, "use_qk_norm": True, "partial_rotary_factor": 0.5}
    return with_prediction_layer(with_experts("glm", fields, shared=True))
