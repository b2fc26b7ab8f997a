"""One layer of a decoder, made of its parts."""

from torch import Tensor, nn

from peregrine.kernels.residual import Residual
from peregrine.models.config import ModelConfig
from peregrine.models.experts import Experts
from peregrine.models.layers import MLP, Attention, RMSNorm, add_linear
from peregrine.models.mla import MLAAttention
from peregrine.models.parallel import ALONE, Ranks


class Layer(nn.Module):
    """One decoder layer: attention, then an MLP or experts, each reading a norm of the residual and adding to it.

    The input norm is applied where something is added to the residual before this layer; None: it is read as it is.
    In some families what is added is normed, too.
    """

    def __init__(
        self, config: ModelConfig, layer: int, split: bool, normed_input: bool = True, ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        size, eps, out_eps = config.hidden_size, config.residual_eps, config.norm_eps
        self.input_norm = RMSNorm(size, eps) if normed_input and config.input_norms else None
        self.attention: Attention | MLAAttention
        if config.mla is None:
            self.attention = Attention(config, layer, config.hidden_size, split, ranks)
        else:
            self.attention = MLAAttention(config, config.mla, layer, split, ranks)
        self.attention_out_norm = RMSNorm(size, out_eps) if config.output_norms else None
        self.post_norm = RMSNorm(size, eps) if config.input_norms else None
        self.mlp: MLP | Experts = Experts(config, ranks) if config.has_experts(layer) else MLP(config, ranks)
        self.mlp_out_norm = RMSNorm(size, out_eps) if config.output_norms else None

    def after_attention(self, attended: Tensor, residual: Residual, next_norm: RMSNorm | None) -> Residual:
        """The second half of the layer, from the result of attention [N, Hq, D] on."""
        merged, out = self.attention.merge_heads(attended), self.attention.out
        residual = add_linear(out, merged, residual, self.attention_out_norm, self.post_norm)
        return self.mlp.forward(residual, next_norm, self.mlp_out_norm)
