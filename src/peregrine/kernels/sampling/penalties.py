"""Penalties for tokens that came before a node: in the prompt, in the output so far, among its own ancestors.

- repetition (Hugging Face's formula): the logit of a token seen in prompt or output is divided by the penalty
  if positive, else multiplied by it;
- presence and frequency (OpenAI's): a token seen in the output loses `presence` once, and `frequency` for
  each time it was seen there.

The window's root is committed, hence part of the history; another node counts for itself and its descendants.
"""

import torch
from torch import Tensor

from peregrine.kernels.sampling.params import Context, SamplingTensors


def penalise(logits: Tensor, law: SamplingTensors, context: Context) -> Tensor:
    """Penalised logits [R, T, V] f32; a row with neutral penalties keeps its bits."""
    in_prompt, counts = count_tokens(context, logits.shape[2])
    in_output = counts > 0  # [R, T, V]
    factors = torch.where(in_output | in_prompt, law.repetition[:, None, None], 1.0)  # [R, T, V]
    logits = torch.where(logits > 0, logits / factors, logits * factors)
    # Products and differences apart: fused, they may round differently in a vector's body and its tail.
    logits = logits - counts.mul_(law.frequency[:, None, None])
    return logits - in_output * law.presence[:, None, None]


def count_tokens(context: Context, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Whether a token is in the prompt [R, 1, V] bool, and how often in each node's output [R, T, V] f32."""
    history, window = context.history, context.window_tokens
    num_rows, num_nodes = window.shape
    places = torch.arange(history.shape[1], device=history.device)
    committed = places < context.lens[:, None]  # [R, C]
    of_prompt = committed & (places < context.prompt_lens[:, None])
    ids = history.clamp(0, vocab_size - 1)  # garbage past the end must still be an index
    none = torch.zeros(num_rows, vocab_size, device=history.device)
    in_prompt = none.scatter_add(1, ids, of_prompt.float()) > 0
    counts = none.scatter_add_(1, ids, (committed ^ of_prompt).float())[:, None]  # [R, 1, V]

    nodes = torch.arange(1, num_nodes, device=window.device)  # the root is in the history
    counted = (context.ancestors[:, :, None] >> nodes) & 1  # [R, T, T - 1]
    drafts = window[:, None, 1:].clamp(0, vocab_size - 1).expand_as(counted)
    # Sums of ones are exact in float32 up to 2^24, whatever their order.
    counts = counts.expand(-1, num_nodes, -1).scatter_add(2, drafts, counted.float())
    return in_prompt[:, None], counts
