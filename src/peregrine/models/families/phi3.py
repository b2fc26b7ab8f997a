"""Phi-3 and Phi-4: queries, keys and values stored as one, gate and up as one, longrope, partly rotated heads."""

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.checkpoint.plan import Piece, Plan, Take, linear_plan
from peregrine.models.config import ModelConfig
from peregrine.models.families.family import Family, head_order, same_window


class Phi3(Family):
    """Phi-3, Phi-3.5 (dense), Phi-4 and Phi-4-mini."""

    model_type = "phi3"
    architectures = ("Phi3ForCausalLM",)
    norm_eps = 1e-5
    rotates_part = True

    def windows(self, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        return same_window(
            self, fields, num_layers, fields.whole("sliding_window") if "sliding_window" in fields else None
        )

    def qkv_pieces(self, config: ModelConfig, stored: str, in_size: int) -> dict[str, Piece]:
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        shape, start, pieces = (sum(heads.values()) * config.head_dim, in_size), 0, {}
        for part, count in heads.items():
            order = None if part == "v" else head_order(self, config, count)
            end = start + count * config.head_dim
            pieces[part] = Piece(f"{stored}.qkv_proj", shape, rows(start, end, order))
            start = end
        return pieces

    def mlp_plan(self, config: ModelConfig, ours: str, stored: str) -> Plan:
        return fused_mlp_plan(config, ours, stored)


def rows(start: int, end: int, order: Take | None) -> Take:
    """Takes rows of a stored tensor, and orders them."""
    return lambda tensor: tensor[start:end] if order is None else order(tensor[start:end])


def fused_mlp_plan(config: ModelConfig, ours: str, stored: str) -> Plan:
    """The tensors of a gated MLP whose gate and up are stored as one."""
    inner, hidden = config.intermediate_size, config.hidden_size
    plan = linear_plan(f"{ours}.gate_up", {f"{stored}.gate_up_proj": (2 * inner, hidden)}, config.mlp_bias)
    return plan | linear_plan(f"{ours}.down", {f"{stored}.down_proj": (hidden, inner)}, config.mlp_bias)
