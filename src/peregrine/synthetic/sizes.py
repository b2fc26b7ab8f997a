"""The sizes of a random checkpoint, and how loud its parts are."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

# Layers speak louder than the embedding they are added to: else the model repeats its last token for ever.
QUERY_GAIN, OUTPUT_GAIN = 1.5, 4.0


class Matrix(Protocol):
    """Draws the next matrix of a checkpoint."""

    def __call__(self, rows: int, columns: int, spread: float = 1.0) -> Tensor:
        """Inputs of unit size give outputs of size `spread`."""


@dataclass(frozen=True, slots=True)
class RandomShape:
    """Sizes of the checkpoint; the defaults load in a blink."""

    vocab_size: int = 384
    hidden_size: int = 64
    intermediate_size: int = 160
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2  # of no meaning with kv_rank
    head_dim: int = 16
    max_positions: int = 2048
    tied: bool = False
    dtype: str = "float32"  # what the file holds: float32, bfloat16 or float16
    seed: int = 0
    kv_rank: int = 0  # latent attention with latents of this size; 0: keys and values of heads
    q_rank: int = 0  # of latent attention; 0: queries are projected at once
    rope_dim: int = 16  # of latent attention: how much of a head is rotated, beside head_dim
    num_experts: int = 0  # in every layer but the first, 2 for each token; 0: every layer has an MLP
    expert_size: int = 32
