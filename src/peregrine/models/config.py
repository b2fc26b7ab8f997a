"""Shapes and switches of a decoder: values that the modules read, so that no module asks for a family by name.

`models/families` reads them from a checkpoint's config.json.
"""

from dataclasses import dataclass

from peregrine.attention import LayerAttention
from peregrine.cache.store import KVShape
from peregrine.kernels.moe import RoutingRule
from peregrine.models.rope_table import Rope


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """Sizes of multi-head latent attention: per token a latent of kv_rank and one rotated part for all heads."""

    q_rank: int | None  # rank of the query projection; None: a full one
    kv_rank: int
    nope_dim: int  # of a query head: the part multiplied with the latent, not rotated
    rope_dim: int  # of a query head: the rotated part
    value_dim: int  # of a head's output
    interleaved: bool  # stored rotation pairs are neighbours, not half a head apart
    scale: float  # multiplies q . k

    @property
    def key_dim(self) -> int:
        """Numbers cached per token and layer."""
        return self.kv_rank + self.rope_dim

    @property
    def q_dim(self) -> int:
        """Size of a projected query head."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Mixtures of experts in place of MLPs. Defaults: softmax top-k, no groups, no shared experts."""

    num_experts: int
    top_k: int  # experts per token
    inner_size: int
    shared_size: int = 0  # inner size of the MLP that every token passes through as well; 0: none
    gated_shared: bool = False  # the shared MLP's output is weighted by a gate of its own
    scoring: str = "softmax"  # or "sigmoid"
    has_bias: bool = False  # a stored bias is added to scores for the choice, not for the weights
    biased: bool = False  # the router's and the experts' linears have biases
    swiglu_limit: float | None = None  # the experts' activation is clamped (`clamped_mul`); None: silu
    num_groups: int = 1  # a token chooses among the experts of its best groups
    top_groups: int = 1
    group_score: str = "max"  # a group's score: its "max", or the sum of its "top2"
    normalise: bool  # the weights of a token's experts sum to one
    scale: float = 1.0  # multiplies the weights
    layers: tuple[bool, ...]  # which layers have experts

    @property
    def num_shared(self) -> int:
        """Shared experts, counted in experts of `inner_size`."""
        return self.shared_size // self.inner_size

    @property
    def rule(self) -> RoutingRule:
        """How a token's logits become its experts and their weights."""
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
            gated_shared=self.gated_shared,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Constants that some families multiply by or cap with; the defaults do nothing."""

    embedding: float = 1.0
    rounds_embedding: bool = False  # the one above is rounded to the model's dtype before it multiplies
    residual: float = 1.0  # of what a layer adds to the residual stream
    attention: float | None = None  # multiplies q . k; None: head_dim ** -0.5
    logits: float = 1.0  # divides the logits
    logit_cap: float | None = None  # logits become cap * tanh(logits / cap)
    score_cap: float | None = None  # and so do attention's scores


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and switches of a decoder."""

    family: str  # model_type of its family
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
    windows: tuple[int | None, ...]  # per layer: keys a query sees at most, itself included; None: all
    tied: bool  # the output head shares the embedding's weight
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    mla: MLAConfig | None  # None: keys and values of heads are cached
    experts: ExpertsConfig | None  # None: every layer has an MLP
    num_extra_layers: int  # prediction layers (MTP) stored beside the decoder; a draft head loads them
    bos_id: int | None
    eos_ids: tuple[int, ...]
    # What follows differs from the plain decoder in a few families.
    scales: Scales = Scales()
    layer_ropes: tuple[Rope, ...] = ()  # one for each layer; empty: `rope` for all
    activation: str = "silu"  # or "gelu", by its tanh formula
    input_norms: bool = True  # attention and MLP read a norm of the residual stream
    output_norms: bool = False  # what attention and MLP add to the residual stream is normed
    whole_qk_norm: bool = False  # with qk_norm: over all heads of a token together
    sinks: bool = False  # a stored logit of each head joins the softmax of attention, and nothing else

    @property
    def unfused(self) -> tuple[str, ...]:
        """What keeps a layer from being computed by the kernels that fuse norms and silu into linear layers."""
        reasons = (
            (self.activation != "silu", f"its activation is {self.activation}"),
            (self.output_norms, "what a layer adds is normed"),
            (self.whole_qk_norm, "queries and keys are normed over all heads"),
        )
        return tuple(reason for applies, reason in reasons if applies)

    @property
    def residual_eps(self) -> float:
        """Of norms of the residual stream, which is held divided by `scales.residual`: layers add to it as they are."""
        return self.norm_eps / self.scales.residual**2

    @property
    def shares_embedding(self) -> bool:
        """Whether the output head and the embedding are one tensor: tied, and the embedding is not scaled."""
        return self.tied and self.embedding_factor == 1.0

    @property
    def embedding_factor(self) -> float:
        """What the stored embedding is multiplied by when it is loaded."""
        return self.scales.embedding / self.scales.residual

    @property
    def kv_shape(self) -> KVShape:
        """What a token leaves in each layer's store; with MLA one key, whose first part is its value."""
        if self.mla is not None:
            return KVShape(1, self.mla.key_dim, self.mla.kv_rank, shared=True)
        return KVShape.of_heads(self.num_kv_heads, self.head_dim)

    @property
    def rope_dim(self) -> int:
        """How much of a head is rotated."""
        return self.head_dim if self.mla is None else self.mla.rope_dim

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of its MLP."""
        return self.experts is not None and self.experts.layers[layer]

    def layer_attention(self) -> list[LayerAttention]:
        """Scale and window of each layer's attention; a decoder adds its sinks."""
        scale = self.scales.attention or (self.head_dim**-0.5 if self.mla is None else self.mla.scale)
        return [LayerAttention(scale, window, sinks=None, cap=self.scales.score_cap) for window in self.windows]
