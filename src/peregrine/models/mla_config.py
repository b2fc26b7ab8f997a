"""The shape of latent attention (MLA), read from a checkpoint's config.json: DeepSeek's V2 and V3, and Kimi-K2."""

from dataclasses import dataclass

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.rope_table import Rope, YarnScaling, yarn_magnitude

FAMILIES = ("deepseek_v2", "deepseek_v3")
NORM_EPS = 1e-6  # of the norms inside the attention, whatever rms_norm_eps says


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """Sizes of latent attention: a token leaves a latent of kv_rank and one rotated part for all heads."""

    q_rank: int | None  # queries pass through as few numbers; None: they are projected at once
    kv_rank: int
    nope_dim: int  # of a query head: the part that meets the latent
    rope_dim: int  # of a query head: the part that is rotated
    value_dim: int  # of a head's answer
    interleaved: bool  # stored rotation pairs lie side by side, and not half a head apart
    scale: float  # multiplies q . k

    @property
    def key_dim(self) -> int:
        """Numbers a token leaves in each layer."""
        return self.kv_rank + self.rope_dim

    @property
    def q_dim(self) -> int:
        """Numbers of a query head as it is projected."""
        return self.nope_dim + self.rope_dim


def read_latent(fields: Fields, family: str, rope: Rope) -> MLAConfig | None:
    """What a config says of latent attention; None for families without it."""
    if family not in FAMILIES:
        return None
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
    q_rank = _q_rank(fields)
    if q_rank is None and fields.flag("attention_bias", False):
        raise fields.refusal("attention_bias", "not supported where q_lora_rank is null", "choose another checkpoint")
    return MLAConfig(
        q_rank=q_rank,
        kv_rank=fields.whole("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=fields.whole("v_head_dim", 128),
        interleaved=family == "deepseek_v2" or fields.flag("rope_interleave", True),
        scale=(nope_dim + rope_dim) ** -0.5 * _magnitude(rope) ** 2,
    )


def _q_rank(fields: Fields) -> int | None:
    # A config that leaves the field out means 1536; null means queries that are projected at once.
    if "q_lora_rank" in fields.values and fields.values["q_lora_rank"] is None:
        return None
    return fields.whole("q_lora_rank", 1536)


def _magnitude(rope: Rope) -> float:
    """By how much a stretched rotation lengthens queries and keys, beyond what its table does."""
    if not isinstance(rope.scaling, YarnScaling) or not rope.scaling.mscale_all_dim:
        return 1.0
    return yarn_magnitude(rope.scaling.factor, rope.scaling.mscale_all_dim)
