"""A plain second implementation of draft heads: whole sequences, no cache, public tensor names, float64."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """Tensors of a head and the numbers of its config."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    embedding: Tensor
    output: Tensor  # [Vd, H]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name].double()

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config.get("rms_norm_eps", 1e-6)).rsqrt()
        return x * scale * self[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self[f"{name}.weight"].T
        return out + self[f"{name}.bias"] if f"{name}.bias" in self.tensors else out

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding.double()[tokens]

    def attention(self, x: Tensor, name: str) -> Tensor:
        """Causal attention over the whole sequence, positions 0, 1, 2, ..."""
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q = self.linear(x, f"{name}.q_proj").unflatten(1, (heads, -1))
        k = self.linear(x, f"{name}.k_proj").unflatten(1, (kv_heads, -1))
        v = self.linear(x, f"{name}.v_proj").unflatten(1, (kv_heads, -1))
        if f"{name}.q_norm.weight" in self.tensors:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        q, k = self.rotate(q), self.rotate(k)
        out = torch.empty_like(q)
        for h in range(heads):
            group = h // (heads // kv_heads)
            scores = q[:, h] @ k[:, group].T / q.shape[2] ** 0.5
            scores = scores + torch.full_like(scores, -torch.inf).triu(1)
            out[:, h] = scores.softmax(-1) @ v[:, group]
        return self.linear(out.flatten(1), f"{name}.o_proj")

    def rotate(self, x: Tensor) -> Tensor:
        """Each pair (i, i + D/2) rotated as a complex number."""
        half = x.shape[2] // 2
        speed = self.config.get("rope_theta", 10000.0) ** (-torch.arange(half).double() / half)
        rotation = torch.exp(1j * torch.arange(len(x)).double()[:, None] * speed)[:, None]
        rotated = torch.complex(x[..., :half], x[..., half:]) * rotation
        return torch.cat((rotated.real, rotated.imag), dim=-1)

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate = self.linear(x, f"{name}.gate_proj")
        return self.linear(gate * gate.sigmoid() * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def layer(self, x: Tensor, name: str, normed_input: bool = True) -> Tensor:
        normed = self.norm(x, f"{name}.input_layernorm") if normed_input else x
        x = x + self.attention(normed, f"{name}.self_attn")
        return x + self.mlp(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")


def eagle3(head: Reference, tokens: Tensor, hidden: Tensor, first: str) -> Tensor:
    """EAGLE-3: embedding and hidden state normed separately and concatenated, hidden state as residual."""
    normed = head.norm(hidden, f"{first}.hidden_norm")
    both = torch.cat((head.norm(head.embed(tokens), f"{first}.input_layernorm"), normed), dim=1)
    x = normed if head.config.get("norm_before_residual") else hidden
    x = x + head.attention(both, f"{first}.self_attn")
    x = x + head.mlp(head.norm(x, f"{first}.post_attention_layernorm"), f"{first}.mlp")
    for i in range(1, head.config["num_hidden_layers"]):
        x = head.layer(x, f"layers.{i}")
    return head.norm(x, "norm") if head.config.get("norm_output") else x


def eagle3_fuse(head: Reference, tapped: Tensor) -> Tensor:
    """The taps, normed as the variant says, through one linear."""
    taps = tapped.double().chunk(len(head.config["taps"]), dim=1)
    if head.config.get("fc_norm"):
        taps = tuple(head.norm(tap, f"fc_norm.{i}") for i, tap in enumerate(taps))
    joined = torch.cat(taps, dim=1)
    return head.linear(head.norm(joined, "input_norm") if head.config.get("norm_before_fc") else joined, "fc")


def eagle3_logits(head: Reference, hidden: Tensor) -> Tensor:
    return (hidden if head.config.get("norm_output") else head.norm(hidden, "norm")) @ head.output.double().T


def eagle(head: Reference, tokens: Tensor, hidden: Tensor) -> Tensor:
    """EAGLE: embedding and hidden state through one linear, then layers, the first without its input norm."""
    x = head.linear(torch.cat((head.embed(tokens), hidden), dim=1), "fc")
    for i in range(head.config["num_hidden_layers"]):
        x = head.layer(x, f"layers.{i}", normed_input=i > 0)
    return x


def nextn(head: Reference, tokens: Tensor, hidden: Tensor, layer: str) -> Tensor:
    """DeepSeek's MTP: embedding before hidden state."""
    both = (head.norm(head.embed(tokens), f"{layer}.enorm"), head.norm(hidden, f"{layer}.hnorm"))
    x = head.layer(head.linear(torch.cat(both, dim=1), f"{layer}.eh_proj"), layer)
    return head.norm(x, f"{layer}.shared_head.norm")


def plain_mtp(head: Reference, tokens: Tensor, hidden: Tensor, layer: str, hidden_first: bool) -> Tensor:
    """MiMo's MTP (hidden state before embedding) and the speculators one (embedding before hidden state)."""
    embedded = head.norm(head.embed(tokens), f"{layer}.token_layernorm")
    normed = head.norm(hidden, f"{layer}.hidden_layernorm")
    both = (normed, embedded) if hidden_first else (embedded, normed)
    x = head.layer(head.linear(torch.cat(both, dim=1), f"{layer}.input_proj"), layer)
    return head.norm(x, f"{layer}.final_layernorm")
