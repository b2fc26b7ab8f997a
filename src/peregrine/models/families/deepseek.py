"""DeepSeek-V2 and V3 (R1 is a V3, Kimi-K2 a V3 with other sizes): MLA, and experts behind the first dense layers.

Fields that implementations fill in differently when a config leaves them out must be there; every published config has
them. kv_b_proj, which would make every head's keys and values out of a latent, is split into W_UK, which queries pass
through, and W_UV, which attention's outputs pass through.
"""

import torch
from torch import Tensor

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.checkpoint.plan import Piece, Plan, Take, linear_plan
from peregrine.models.config import ExpertsConfig, MLAConfig, ModelConfig
from peregrine.models.families.family import Biases, Family, attention_bias, checked_experts, require
from peregrine.models.rope_table import Rope, YarnScaling, yarn_magnitude


class DeepseekV2(Family):
    """DeepSeek-V2 and V2-Lite: softmax routing without a stored bias."""

    model_type = "deepseek_v2"
    architectures: tuple[str, ...] = ("DeepseekV2ForCausalLM",)

    def biases(self, fields: Fields) -> Biases:
        return attention_bias(fields)

    def mla(self, fields: Fields, rope: Rope) -> MLAConfig:
        return read_mla(fields, rope, interleaved=True)

    def experts(self, fields: Fields, num_layers: int) -> ExpertsConfig:
        require(fields, "scoring_func", "softmax", ("softmax",))
        method = require(fields, "topk_method", "greedy", ("greedy", "group_limited_greedy"))
        if fields.flag("norm_topk_prob", False):
            raise fields.refusal(
                "norm_topk_prob",
                "implementations of DeepSeek-V2 disagree about normalised weights, and no published model has them",
                "use a checkpoint with norm_topk_prob=false",
            )
        grouped = method == "group_limited_greedy"
        experts = ExpertsConfig(
            num_experts=fields.whole("n_routed_experts"),
            top_k=fields.whole("num_experts_per_tok"),
            inner_size=fields.whole("moe_intermediate_size"),
            shared_size=shared_size(fields),
            num_groups=fields.whole("n_group") if grouped else 1,
            top_groups=fields.whole("topk_group") if grouped else 1,
            normalise=False,
            scale=fields.number("routed_scaling_factor"),
            layers=expert_layers(fields, num_layers),
        )
        return checked_experts(fields, experts)

    def attention_plan(self, config: ModelConfig, ours: str, stored: str, in_size: int, split: bool) -> Plan:
        mla, hidden, heads = config.mla, config.hidden_size, config.num_heads
        assert mla is not None
        q_order = in_halves(heads, mla.nope_dim, mla.rope_dim) if mla.interleaved else None
        k_order = in_halves(1, mla.kv_rank, mla.rope_dim) if mla.interleaved else None
        kv = {f"{stored}.kv_a_proj_with_mqa": ((mla.key_dim, hidden), k_order)}
        plan: Plan = {f"{ours}.kv_norm.weight": (Piece(f"{stored}.kv_a_layernorm.weight", (mla.kv_rank,)),)}
        if mla.q_rank is None:
            q = {f"{stored}.q_proj": ((heads * mla.q_dim, hidden), q_order)}
        else:
            q = {f"{stored}.q_a_proj": ((mla.q_rank, hidden), None)}
            up = Piece(f"{stored}.q_b_proj.weight", (heads * mla.q_dim, mla.q_rank), q_order)
            plan[f"{ours}.q_norm.weight"] = (Piece(f"{stored}.q_a_layernorm.weight", (mla.q_rank,)),)
            plan[f"{ours}.q_up.weight"] = (up,)
        for name, parts in (("q", q), ("kv", kv)) if split else (("qkv", q | kv),):
            pieces = [(tensor, shape, order) for tensor, (shape, order) in parts.items()]
            plan[f"{ours}.{name}.weight"] = tuple(Piece(f"{t}.weight", shape, order) for t, shape, order in pieces)
            if config.qkv_bias:
                plan[f"{ours}.{name}.bias"] = tuple(Piece(f"{t}.bias", shape[:1], order) for t, shape, order in pieces)
        both = (heads * (mla.nope_dim + mla.value_dim), mla.kv_rank)

        def by_head(weight: Tensor) -> Tensor:
            return weight.view(heads, -1, mla.kv_rank)  # [h, nope + value, rank]

        w_uk = Piece(f"{stored}.kv_b_proj.weight", both, lambda w: by_head(w)[:, : mla.nope_dim].transpose(1, 2))
        w_uv = Piece(f"{stored}.kv_b_proj.weight", both, lambda w: by_head(w)[:, mla.nope_dim :])
        plan |= {f"{ours}.w_uk.weight": (w_uk,), f"{ours}.w_uv.weight": (w_uv,)}
        return plan | linear_plan(f"{ours}.out", {f"{stored}.o_proj": (hidden, heads * mla.value_dim)}, config.out_bias)


class DeepseekV3(DeepseekV2):
    """DeepSeek-V3, R1 and Kimi-K2: sigmoid routing with a stored bias, groups scored by their two best experts."""

    model_type = "deepseek_v3"
    architectures: tuple[str, ...] = ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM")

    def mla(self, fields: Fields, rope: Rope) -> MLAConfig:
        return read_mla(fields, rope, interleaved=fields.flag("rope_interleave", True))

    def experts(self, fields: Fields, num_layers: int) -> ExpertsConfig:
        return noaux_experts(fields, expert_layers(fields, num_layers))


def read_mla(fields: Fields, rope: Rope, interleaved: bool) -> MLAConfig:
    """Sizes of MLA; `interleaved`: stored rotation pairs are neighbours, not half a head apart."""
    num_heads = fields.whole("num_attention_heads")
    if fields.whole("num_key_value_heads", num_heads) != num_heads:
        raise fields.refusal(
            "num_key_value_heads",
            f"latent attention makes keys for each of num_attention_heads={num_heads}",
            "correct the config",
        )
    nope_dim, rope_dim = fields.whole("qk_nope_head_dim", 128), fields.whole("qk_rope_head_dim", 64)
    if rope_dim % 2:
        raise fields.refusal("qk_rope_head_dim", f"{rope_dim} is odd; a head is rotated in pairs", "correct the config")
    # An absent q_lora_rank means 1536; null means queries without a low-rank projection.
    plain_q = "q_lora_rank" in fields.values and fields.values["q_lora_rank"] is None
    if plain_q and fields.flag("attention_bias", False):
        raise fields.refusal("attention_bias", "not supported where q_lora_rank is null", "choose another checkpoint")
    scaling = rope.scaling
    magnitude = 1.0
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        magnitude = yarn_magnitude(scaling.factor, scaling.mscale_all_dim)
    return MLAConfig(
        q_rank=None if plain_q else fields.whole("q_lora_rank", 1536),
        kv_rank=fields.whole("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=fields.whole("v_head_dim", 128),
        interleaved=interleaved,
        scale=(nope_dim + rope_dim) ** -0.5 * magnitude**2,
    )


def noaux_experts(fields: Fields, layers: tuple[bool, ...]) -> ExpertsConfig:
    """Experts chosen by sigmoid scores and a stored bias that keeps them equally busy, without an auxiliary loss."""
    require(fields, "scoring_func", "sigmoid", ("sigmoid",))
    require(fields, "topk_method", "noaux_tc", ("noaux_tc",))
    experts = ExpertsConfig(
        num_experts=fields.whole("n_routed_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        inner_size=fields.whole("moe_intermediate_size"),
        shared_size=shared_size(fields),
        scoring="sigmoid",
        has_bias=True,
        num_groups=fields.whole("n_group"),
        top_groups=fields.whole("topk_group"),
        group_score="top2",
        normalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor"),
        layers=layers,
    )
    return checked_experts(fields, experts)


def shared_size(fields: Fields) -> int:
    """Inner size of the MLP that every token passes through beside its experts."""
    return fields.whole("n_shared_experts", minimum=0) * fields.whole("moe_intermediate_size")


def expert_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts: all but the first, dense ones."""
    if fields.whole("moe_layer_freq", 1) != 1:
        raise fields.refusal("moe_layer_freq", "only experts in every layer are supported", "choose another checkpoint")
    first = fields.whole("first_k_dense_replace", minimum=0)
    return tuple(i >= first for i in range(num_layers))


def in_halves(heads: int, kept: int, rotated: int) -> Take:
    """Reorders each head's last `rotated` rows from neighbouring pairs to pairs half the part apart."""

    def reorder(stored: Tensor) -> Tensor:
        pairs = torch.arange(rotated).view(-1, 2).t().flatten()
        order = torch.cat((torch.arange(kept), kept + pairs))  # of one head
        return stored.index_select(0, (torch.arange(heads)[:, None] * (kept + rotated) + order).flatten())

    return reorder
