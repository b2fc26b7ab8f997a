"""gpt-oss: attention sinks, windows in every other layer, and experts with biases and a clamped activation.

Experts are stored as stacks [E, in, out] whose outputs alternate between gate and up; published files hold them in
MXFP4, which is multiplied out as it is read (`checkpoint/mxfp4.py`).
"""

from torch import Tensor

from peregrine.kernels.activation import STEEPNESS
from peregrine.models.checkpoint.folder import Fields
from peregrine.models.checkpoint.plan import Piece, Plan, linear_plan
from peregrine.models.config import ExpertsConfig, ModelConfig
from peregrine.models.families.family import Biases, Family, checked_experts, even_head_dim, layer_types


class GptOss(Family):
    """gpt-oss-20b and gpt-oss-120b."""

    model_type = "gpt_oss"
    architectures = ("GptOssForCausalLM",)
    norm_eps, rope_theta = 1e-5, 150000.0
    sinks = True

    def biases(self, fields: Fields) -> Biases:
        biased = fields.flag("attention_bias", True)
        return Biases(qkv=biased, out=biased)

    def head_dim(self, fields: Fields, hidden_size: int, num_heads: int) -> int:
        return even_head_dim(fields, 64)

    def windows(self, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        window = fields.whole("sliding_window", 128)
        slides = [kind == "sliding_attention" for kind in layer_types(fields, num_layers)]
        return tuple(window if slide else None for slide in slides or [i % 2 == 0 for i in range(num_layers)])

    def experts(self, fields: Fields, num_layers: int) -> ExpertsConfig:
        if fields.number("swiglu_alpha", STEEPNESS) != STEEPNESS:
            raise fields.refusal("swiglu_alpha", f"only {STEEPNESS} is supported", "choose another checkpoint")
        experts = ExpertsConfig(
            num_experts=fields.whole("num_local_experts"),
            top_k=fields.whole("num_experts_per_tok"),
            inner_size=fields.whole("intermediate_size"),
            biased=True,
            swiglu_limit=fields.number("swiglu_limit", 7.0),
            normalise=True,
            layers=(True,) * num_layers,
        )
        return checked_experts(fields, experts)

    def experts_plan(self, config: ModelConfig, ours: str, stored: str) -> Plan:
        experts, hidden = config.experts, config.hidden_size
        assert experts is not None
        count, inner = experts.num_experts, experts.inner_size

        def gates_first(stack: Tensor) -> Tensor:
            """Outputs [E, 2 * inner, ...] that alternate between gate and up, as rows: gates first."""
            return stack.view(count, inner, 2, *stack.shape[2:]).transpose(1, 2).flatten(0, 2)

        gate_up, down = f"{stored}.experts.gate_up_proj", f"{stored}.experts.down_proj"
        plan: Plan = {
            f"{ours}.gate_up.weight": (
                Piece(gate_up, (count, hidden, 2 * inner), lambda stack: gates_first(stack.transpose(1, 2))),
            ),
            f"{ours}.gate_up.bias": (Piece(f"{gate_up}_bias", (count, 2 * inner), gates_first),),
            f"{ours}.down.weight": (
                Piece(down, (count, inner, hidden), lambda stack: stack.transpose(1, 2).flatten(0, 1)),
            ),
            f"{ours}.down.bias": (Piece(f"{down}_bias", (count, hidden), Tensor.flatten),),
        }
        return plan | linear_plan(f"{ours}.router", {f"{stored}.router": (count, hidden)}, bias=True)
