"""One layer of a decoder, made of its parts."""

from torch import Tensor, nn

from peregrine.kernels.residual import Residual
from peregrine.models.config import ModelConfig
from peregrine.models.experts import Experts
from peregrine.models.layers import MLP, Attention, RMSNorm
from peregrine.models.mla import MLAAttention


class Layer(nn.Module):
    """One decoder layer: attention and MLP or experts, each behind a norm and beside the residual stream.

    The input norm belongs to whoever adds to the stream before this layer; None: it is read as it is.
    """

    def __init__(self, config: ModelConfig, layer: int, split: bool, normed_input: bool = True) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps) if normed_input else None
        self.attention: Attention | MLAAttention
        if config.mla is None:
            self.attention = Attention(config, layer, config.hidden_size, split)
        else:
            self.attention = MLAAttention(config, config.mla, layer, split)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp: MLP | Experts = Experts(config) if config.has_experts(layer) else MLP(config)

    def after_attention(self, attended: Tensor, stream: Residual, next_norm: RMSNorm | None) -> Residual:
        """The second half of the layer, after attention has answered [N, Hq, D]."""
        stream = self.attention.out.join(self.attention.merge_heads(attended), stream, self.post_norm)
        return self.mlp.forward(stream, next_norm)
