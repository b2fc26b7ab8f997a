"""What a family may say about itself. The defaults are the plain decoder: Llama without biases.

The first half reads config.json; the second half says which stored tensors make up the parameters of a layer.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.checkpoint.plan import Piece, Plan, Take, linear_plan, take
from peregrine.models.config import ExpertsConfig, MLAConfig, ModelConfig, Scales
from peregrine.models.rope_table import Rope, read_rope

MAX_EXPERTS = 2**16  # in all layers together


@dataclass(frozen=True, slots=True)
class Biases:
    """Which linears of a layer have a bias."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a mixture of experts is called in checkpoints: the module in the MLP's place, and an expert's linears."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"


# Our norms of a layer and what they are called in checkpoints.
PRE_NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}


class Family:
    """The plain decoder; subclasses override what differs."""

    model_type: str
    architectures: tuple[str, ...]
    qk_norm = False  # queries and keys of every head are normed before the rotation
    expert_names = ExpertNames()
    activation = "silu"
    norms = PRE_NORMS  # with attention_out_norm and mlp_out_norm, what a layer adds is normed, too
    norm_offset = 0.0  # is added to a stored norm's weight
    whole_qk_norm = False  # with qk_norm: over all heads of a token together
    sinks = False  # a stored logit of each head joins the softmax of attention
    tied = False  # whether a config without tie_word_embeddings means true
    interleaved = False  # stored rotation pairs are neighbours, not half of the rotated part apart
    norm_eps, rope_theta = 1e-6, 10000.0  # of configs that do not say
    rotates_part = False  # configs may say that only the first part of a head is rotated

    def biases(self, fields: Fields) -> Biases:
        """Which linears have a bias."""
        return Biases()

    def norms_heads(self, fields: Fields) -> bool:
        """Whether queries and keys are normed before the rotation."""
        return self.qk_norm

    def head_dim(self, fields: Fields, hidden_size: int, num_heads: int) -> int:
        """Size of an attention head."""
        if "head_dim" not in fields and hidden_size % num_heads:
            raise fields.refusal(
                "num_attention_heads", f"does not divide hidden_size={hidden_size} and no head_dim is given", "give it"
            )
        return even_head_dim(fields, hidden_size // num_heads)

    def windows(self, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        """The sliding window of each layer; None: it sees every key before it."""
        if "sliding_attention" in layer_types(fields, num_layers):
            raise fields.refusal("layer_types", f"{self.model_type} layers have no window", "choose another checkpoint")
        return (None,) * num_layers

    def scales(self, fields: Fields) -> Scales:
        """Constants that are multiplied by or capped with."""
        return Scales()

    def rope(self, fields: Fields, max_positions: int) -> Rope:
        """Theta, scaling and rotated share of the rotary embedding."""
        return read_rope(fields, max_positions, self.rotates_part, self.rope_theta)

    def layer_ropes(self, fields: Fields, rope: Rope, num_layers: int) -> tuple[Rope, ...]:
        """The rope of each layer; empty: the config's own for all."""
        return ()

    def mla(self, fields: Fields, rope: Rope) -> MLAConfig | None:
        """Sizes of multi-head latent attention; None: keys and values of heads are cached."""
        return None

    def experts(self, fields: Fields, num_layers: int) -> ExpertsConfig | None:
        """The mixtures of experts; None: every layer has an MLP."""
        return None

    def layer_plan(
        self, config: ModelConfig, ours: str, stored: str, in_size: int, split: bool, moe: bool = False
    ) -> Plan:
        """The tensors of one layer, whose parameters begin with `ours` and whose stored names begin with `stored`."""
        plan: Plan = {
            f"{ours}.{norm}.weight": (self.norm_piece(f"{stored}.{name}", config.hidden_size),)
            for norm, name in self.norms.items()
        }
        plan |= self.attention_plan(config, f"{ours}.attention", f"{stored}.self_attn", in_size, split)
        return plan | (self.experts_plan if moe else self.mlp_plan)(config, f"{ours}.mlp", f"{stored}.mlp")

    def norm_piece(self, stored: str, size: int, order: Take | None = None) -> Piece:
        """The weight of a norm."""
        offset = self.norm_offset

        def shifted(weight: Tensor) -> Tensor:
            ordered = weight if order is None else order(weight)
            return ordered.float() + offset if offset else ordered

        return Piece(f"{stored}.weight", (size,), shifted if offset or order else None)

    def mlp_plan(self, config: ModelConfig, ours: str, stored: str) -> Plan:
        """The tensors of one gated MLP."""
        wide = (config.intermediate_size, config.hidden_size)
        gate_up = {f"{stored}.gate_proj": wide, f"{stored}.up_proj": wide}
        plan = linear_plan(f"{ours}.gate_up", gate_up, config.mlp_bias)
        return plan | linear_plan(f"{ours}.down", {f"{stored}.down_proj": wide[::-1]}, config.mlp_bias)

    def attention_plan(self, config: ModelConfig, ours: str, stored: str, in_size: int, split: bool) -> Plan:
        """The tensors of one attention; with `split` queries are projected apart from keys and values."""
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        pieces = self.qkv_pieces(config, stored, in_size)
        plan: Plan = {}
        for name, parts in (("q", "q"), ("kv", "kv")) if split else (("qkv", "qkv"),):
            chosen = [pieces[part] for part in parts]
            plan[f"{ours}.{name}.weight"] = tuple(replace(piece, name=f"{piece.name}.weight") for piece in chosen)
            if config.qkv_bias:
                biases = [replace(piece, name=f"{piece.name}.bias", shape=piece.shape[:1]) for piece in chosen]
                plan[f"{ours}.{name}.bias"] = tuple(biases)
        plan |= linear_plan(f"{ours}.out", {f"{stored}.o_proj": (config.hidden_size, q_size)}, config.out_bias)
        if config.sinks:
            plan[f"{ours}.sinks"] = (Piece(f"{stored}.sinks", (config.num_heads,)),)
        if config.qk_norm:
            whole = config.whole_qk_norm
            for part, size in (("q", q_size), ("k", kv_size)):
                size, order = (size, pieces[part].take) if whole else (config.head_dim, head_order(self, config, 1))
                plan[f"{ours}.{part}_norm.weight"] = (self.norm_piece(f"{stored}.{part}_norm", size, order),)
        return plan

    def qkv_pieces(self, config: ModelConfig, stored: str, in_size: int) -> dict[str, Piece]:
        """The weights of queries, keys and values, without the ending of their names."""
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        return {
            part: Piece(
                f"{stored}.{part}_proj",
                (count * config.head_dim, in_size),
                None if part == "v" else head_order(self, config, count),
            )
            for part, count in heads.items()
        }

    def experts_plan(self, config: ModelConfig, ours: str, stored: str) -> Plan:
        """The tensors of one mixture; `stored` is where the layer's MLP would be, "....mlp".

        Shared experts are stored as one wide MLP and cut into experts of the others' size.
        """
        experts, names = config.experts, self.expert_names
        assert experts is not None
        inner, hidden, wide = experts.inner_size, config.hidden_size, experts.shared_size
        stored = f"{stored.removesuffix('mlp')}{names.module}"
        each = [f"{stored}.experts.{i}" for i in range(experts.num_experts)]
        gate_up = [Piece(f"{name}.{part}.weight", (inner, hidden)) for name in each for part in (names.gate, names.up)]
        down = [Piece(f"{name}.{names.down}.weight", (hidden, inner)) for name in each]
        shared = f"{stored}.{names.shared}"
        for i in range(experts.num_shared):
            span = slice(i * inner, (i + 1) * inner)
            for part in (names.gate, names.up):
                gate_up.append(Piece(f"{shared}.{part}.weight", (wide, hidden), take(span)))
            down.append(Piece(f"{shared}.{names.down}.weight", (hidden, wide), take((slice(None), span))))
        router = [Piece(f"{stored}.gate.weight", (experts.num_experts, hidden))]
        if experts.gated_shared:
            router.append(Piece(f"{shared}_gate.weight", (1, hidden)))
        plan: Plan = {
            f"{ours}.router.weight": tuple(router),
            f"{ours}.gate_up.weight": tuple(gate_up),
            f"{ours}.down.weight": tuple(down),
        }
        if experts.has_bias:
            bias = Piece(f"{stored}.gate.e_score_correction_bias", (experts.num_experts,))
            plan[f"{ours}.router.choice_bias"] = (bias,)
        return plan


def head_order(family: Family, config: ModelConfig, heads: int) -> Take | None:
    """Orders the rows of heads so that rotation pairs lie half a head apart, as kernels rotate; None: they do."""
    rotated, size = config.rope.rotated(config.head_dim), config.head_dim
    if not family.interleaved and rotated in (0, size):
        return None
    pairs = torch.arange(rotated).view(-1, 2).t() if family.interleaved else torch.arange(rotated).view(2, -1)
    rest = torch.arange(rotated, size).view(2, -1)
    order = torch.cat((pairs, rest), dim=1).flatten()  # of one head
    rows = (torch.arange(heads)[:, None] * size + order).flatten()
    return lambda stored: stored.index_select(0, rows)


def attention_bias(fields: Fields) -> Biases:
    """Biases of families whose attention has them where the config says `attention_bias`."""
    biased = fields.flag("attention_bias", False)
    return Biases(qkv=biased, out=biased)


def even_head_dim(fields: Fields, default: int) -> int:
    """The `head_dim` field; refused if it is odd, because a head is rotated in pairs."""
    head_dim = fields.whole("head_dim", default)
    if head_dim % 2:
        raise fields.refusal("head_dim", f"{head_dim} is odd; a head is rotated in pairs", "correct the config")
    return head_dim


def layer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """The `layer_types` field: full_attention or sliding_attention for each layer; empty when absent."""
    kinds = fields.texts("layer_types")
    if kinds and len(kinds) != num_layers:
        raise fields.refusal("layer_types", f"not one for each of {num_layers} layers", "correct the config")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.refusal(
                "layer_types", f"layers of kind {kind!r} are not supported", "choose another checkpoint"
            )
    return kinds


def declared_window(fields: Fields) -> int | None:
    """The `sliding_window` field of families where an absent field means 4096 and null means no window."""
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    return fields.whole("sliding_window", 4096)


def same_window(family: Family, fields: Fields, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """One window for all layers; a config whose `layer_types` say otherwise is refused."""
    wanted = "full_attention" if window is None else "sliding_attention"
    if any(kind != wanted for kind in layer_types(fields, num_layers)):
        raise fields.refusal(
            "layer_types", f"{family.model_type} layers all have one window", "choose another checkpoint"
        )
    return (window,) * num_layers


def window_by_layer(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Qwen's rule: `use_sliding_window` turns windows on, from `max_window_layers` on or as `layer_types` say."""
    kinds, first = layer_types(fields, num_layers), fields.whole("max_window_layers", 28, minimum=0)
    window = declared_window(fields) if fields.flag("use_sliding_window", False) else None
    if "sliding_attention" in kinds and window is None:
        raise fields.refusal("layer_types", "sliding layers without use_sliding_window", "correct the config")
    slides = [kind == "sliding_attention" for kind in kinds] or [i >= first for i in range(num_layers)]
    return tuple(window if slide else None for slide in slides)


def require(fields: Fields, name: str, default: str, supported: tuple[str, ...]) -> str:
    """A text field that must hold one of the supported values."""
    value = fields.text(name, default)
    if value not in supported:
        raise fields.refusal(
            name, f"not supported; supported here: {', '.join(supported)}", "choose another checkpoint"
        )
    return value


def checked_experts(fields: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    """The experts, if a token can choose as many as the config says."""
    remedy, count, groups = "correct the config", experts.num_experts, experts.num_groups
    if (count + experts.num_shared) * sum(experts.layers) > MAX_EXPERTS:
        problem = f"{count} experts in {sum(experts.layers)} layers are more than the {MAX_EXPERTS} supported"
        raise fields.refusal("num_hidden_layers", problem, remedy)
    if experts.top_k > count:
        raise fields.refusal("num_experts_per_tok", f"more than there are experts ({count})", remedy)
    if count % groups:
        raise fields.refusal("n_group", f"does not divide the number of experts, {count}", remedy)
    if experts.top_groups > groups:
        raise fields.refusal("topk_group", f"more than there are groups (n_group={groups})", remedy)
    if groups > 1 and experts.group_score == "top2" and count // groups < 2:
        raise fields.refusal("n_group", f"groups of {count} experts have no two best; they need two each", remedy)
    eligible = experts.top_groups * (count // groups)
    if experts.top_k > eligible:
        problem = f"more than the {eligible} experts of {experts.top_groups} groups"
        raise fields.refusal("num_experts_per_tok", problem, remedy)
    return experts
