"""Tensors that llama.cpp's converter cut, transposed or renamed, put together again under Hugging Face's names."""

from collections.abc import Callable

import torch
from torch import Tensor

Join = tuple[tuple[str, ...], Callable[..., Tensor] | None]  # names in a layer, and what is made of those tensors


def _kv_b(keys: Tensor, values: Tensor) -> Tensor:
    """Keys [heads, rank, nope] and values [heads, value, rank] of every head: [heads * (nope + value), rank]."""
    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


def _gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Two stacks [E, inner, in] as one [E, in, 2 * inner], whose outputs alternate."""
    return _alternate(gate, up).transpose(1, 2)


def _alternate(gate: Tensor, up: Tensor) -> Tensor:
    """[E, inner, ...] twice -> [E, 2 * inner, ...]."""
    return torch.stack((gate, up), dim=2).flatten(1, 2)


DEEPSEEK_JOINS: dict[str, Join] = {
    "self_attn.kv_b_proj.weight": (("attn_k_b.weight", "attn_v_b.weight"), _kv_b),
    "mlp.gate.e_score_correction_bias": (("exp_probs_b.bias",), None),
}
GPT_OSS_JOINS: dict[str, Join] = {
    "self_attn.sinks": (("attn_sinks.weight",), None),
    "mlp.experts.gate_up_proj": (("ffn_gate_exps.weight", "ffn_up_exps.weight"), _gate_up),
    "mlp.experts.gate_up_proj_bias": (("ffn_gate_exps.bias", "ffn_up_exps.bias"), _alternate),
    "mlp.experts.down_proj": (("ffn_down_exps.weight",), lambda down: down.transpose(1, 2)),
    "mlp.experts.down_proj_bias": (("ffn_down_exps.bias",), None),
}
