"""What a mixture of experts looks like, read from a checkpoint's config.json.

DeepSeek V2 and V3 (Kimi K2 is a V3), Qwen3-MoE and Mixtral are one part with switches: how a token's scores become its
choice of experts, and which layers have experts at all. Fields that implementations fill in differently when a config
leaves them out must be there; every published config has them.
"""

from dataclasses import dataclass

from peregrine.kernels.moe import RoutingRule
from peregrine.models.checkpoint.folder import Fields


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What the parts of a mixture are called in checkpoints."""

    mixture: str
    gate: str
    up: str
    down: str


_PROJECTIONS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL = ExpertNames("block_sparse_moe", "w1", "w3", "w2")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Shapes and switches of the layers that have experts in place of an MLP; at first, those of the plainest kind."""

    num_experts: int
    top_k: int  # experts a token chooses
    inner_size: int
    shared_size: int = 0  # inner size of what every token passes through beside its choice; 0: nothing
    scoring: str = "softmax"  # or "sigmoid"
    has_bias: bool = False  # a stored one is added to scores where experts are chosen, not where they are weighted
    num_groups: int = 1  # a token chooses among the experts of its best groups
    top_groups: int = 1
    group_score: str = "max"  # what makes a group good: its "max", or the sum of its "top2"
    normalise: bool  # the weights of a token's experts are made to add up to one
    scale: float = 1.0  # what weights are multiplied by in the end
    layers: tuple[bool, ...]  # which layers have experts
    names: ExpertNames

    @property
    def num_shared(self) -> int:
        """How many experts' worth of inner size every token passes through."""
        return self.shared_size // self.inner_size

    @property
    def rule(self) -> RoutingRule:
        """How a token's scores become its experts and their weights."""
        return RoutingRule(
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_shared=self.num_shared,
            sigmoid=self.scoring == "sigmoid",
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            best_two=self.group_score == "top2",
            normalise=self.normalise,
            scale=self.scale,
        )


def read_experts(fields: Fields, family: str, num_layers: int) -> ExpertsConfig | None:
    """The experts of a family's config; None for families that have none."""
    match family:
        case "deepseek_v2":
            experts = _deepseek_v2(fields, num_layers)
        case "deepseek_v3":
            experts = _deepseek_v3(fields, num_layers)
        case "qwen3_moe":
            experts = _qwen3(fields, num_layers)
        case "mixtral":
            experts = _mixtral(fields, num_layers)
        case _:
            return None
    return _checked(fields, experts)


def _deepseek_v2(fields: Fields, num_layers: int) -> ExpertsConfig:
    _require(fields, "scoring_func", "softmax", ("softmax",))
    method = _require(fields, "topk_method", "greedy", ("greedy", "group_limited_greedy"))
    if fields.flag("norm_topk_prob", False):
        raise fields.refusal(
            "norm_topk_prob",
            "implementations of DeepSeek-V2 disagree about normalised weights, and no published model has them",
            "use a checkpoint with norm_topk_prob=false",
        )
    grouped = method == "group_limited_greedy"
    return ExpertsConfig(
        num_experts=fields.whole("n_routed_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        inner_size=fields.whole("moe_intermediate_size"),
        shared_size=_deepseek_shared(fields),
        scoring="softmax",
        has_bias=False,
        num_groups=fields.whole("n_group") if grouped else 1,
        top_groups=fields.whole("topk_group") if grouped else 1,
        group_score="max",
        normalise=False,
        scale=fields.number("routed_scaling_factor"),
        layers=_deepseek_layers(fields, num_layers),
        names=_PROJECTIONS,
    )


def _deepseek_v3(fields: Fields, num_layers: int) -> ExpertsConfig:
    _require(fields, "scoring_func", "sigmoid", ("sigmoid",))
    _require(fields, "topk_method", "noaux_tc", ("noaux_tc",))
    return ExpertsConfig(
        num_experts=fields.whole("n_routed_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        inner_size=fields.whole("moe_intermediate_size"),
        shared_size=_deepseek_shared(fields),
        scoring="sigmoid",
        has_bias=True,
        num_groups=fields.whole("n_group"),
        top_groups=fields.whole("topk_group"),
        group_score="top2",
        normalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor"),
        layers=_deepseek_layers(fields, num_layers),
        names=_PROJECTIONS,
    )


def _qwen3(fields: Fields, num_layers: int) -> ExpertsConfig:
    step, dense = fields.whole("decoder_sparse_step", 1), fields.wholes("mlp_only_layers")
    return ExpertsConfig(
        num_experts=fields.whole(_qwen3_count(fields)),
        top_k=fields.whole("num_experts_per_tok"),
        inner_size=fields.whole("moe_intermediate_size"),
        normalise=fields.flag("norm_topk_prob", False),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        names=_PROJECTIONS,
    )


def _mixtral(fields: Fields, num_layers: int) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=fields.whole("num_local_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        inner_size=fields.whole("intermediate_size"),
        normalise=True,
        layers=(True,) * num_layers,
        names=_MIXTRAL,
    )


def _qwen3_count(fields: Fields) -> str:
    """The field that counts Qwen3's experts: published configs and newer writers name it differently."""
    return "num_local_experts" if "num_local_experts" in fields else "num_experts"


def _deepseek_shared(fields: Fields) -> int:
    return fields.whole("n_shared_experts", minimum=0) * fields.whole("moe_intermediate_size")


def _deepseek_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Every layer after the first, dense ones."""
    if fields.whole("moe_layer_freq", 1) != 1:
        raise fields.refusal("moe_layer_freq", "only experts in every layer are supported", "choose another checkpoint")
    first = fields.whole("first_k_dense_replace", minimum=0)
    return tuple(i >= first for i in range(num_layers))


def _require(fields: Fields, name: str, default: str, supported: tuple[str, ...]) -> str:
    value = fields.text(name, default)
    if value not in supported:
        raise fields.refusal(
            name, f"not supported; supported here: {', '.join(supported)}", "choose another checkpoint"
        )
    return value


def _checked(fields: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    """The same, if a token can choose as it is told to."""
    remedy = "correct the config"
    count, groups = experts.num_experts, experts.num_groups
    if experts.top_k > count:
        raise fields.refusal("num_experts_per_tok", f"more than there are experts ({count})", remedy)
    if count % groups:
        raise fields.refusal("n_group", f"does not divide the number of experts, {count}", remedy)
    if experts.top_groups > groups:
        raise fields.refusal("topk_group", f"more than there are groups (n_group={groups})", remedy)
    if groups > 1 and experts.group_score == "top2" and count // groups < 2:
        raise fields.refusal("n_group", f"groups of {count} experts have no two best; they need two each", remedy)
    if experts.top_k > experts.top_groups * (count // groups):
        raise fields.refusal(
            "num_experts_per_tok",
            f"more than the {experts.top_groups * (count // groups)} experts of {experts.top_groups} groups",
            remedy,
        )
    return experts
