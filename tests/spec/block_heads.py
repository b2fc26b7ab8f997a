"""Random DFlash and DSpark heads as files in their public layouts, and what they draft by a plain implementation.

The reference reads the whole text for every round, in float64 and without a cache, from the papers' description.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.head_reference import Reference
from spec.harness import HEAD_DIM, HIDDEN, INNER, LAYERS, VOCAB, Draw, copy_model, layer_tensors, tiny_model

MASK, RANK, BLOCK = VOCAB - 1, 12, 7
LEAVING = (0, 2)  # target layers whose outputs are read


@cache
def calm_model() -> Path:
    """The tiny model with weak layers: its next token is mostly decided by the newest one."""
    weights = load_file(tiny_model() / "model.safetensors")
    weak = {n: w * 0.01 for n, w in weights.items() if n.endswith(("o_proj.weight", "down_proj.weight"))}
    return copy_model("calm", weak)


def block_tensors(markov: str | None, confidence: bool, draft_vocab: int, knows_bigrams: bool) -> dict[str, Tensor]:
    new = Draw(9)
    tensors = {"fc.weight": new(HIDDEN, len(LEAVING) * HIDDEN)}
    tensors |= {name: 1 + 0.2 * new(HIDDEN) for name in ("hidden_norm.weight", "norm.weight")}
    for i in range(2):
        tensors |= layer_tensors(f"layers.{i}", HIDDEN, new)
        tensors |= {f"layers.{i}.self_attn.{part}_norm.weight": 1 + 0.2 * new(HEAD_DIM) for part in "qk"}
    if draft_vocab != VOCAB:
        ids = torch.randperm(VOCAB, generator=new.generator)[:draft_vocab].sort().values
        tensors |= {"d2t": ids - torch.arange(draft_vocab), "lm_head.weight": 3 * new(draft_vocab, HIDDEN)}
    if markov is not None:
        tensors["markov_head.markov_w1.weight"] = new(VOCAB, RANK)
        tensors["markov_head.markov_w2.weight"] = 4 * new(draft_vocab, RANK)
    inner = {"gated": ("gate_proj", RANK, HIDDEN + RANK), "rnn": ("joint_proj", 3 * RANK, 2 * RANK + HIDDEN)}
    if markov in inner:
        name, rows, columns = inner[markov]
        tensors[f"markov_head.{name}.weight"], tensors[f"markov_head.{name}.bias"] = new(rows, columns), new(rows)
    if knows_bigrams:
        own = load_file(tiny_model() / "model.safetensors")
        embedding = own["model.embed_tokens.weight"]
        tensors["markov_head.markov_w1.weight"] = embedding / embedding.pow(2).mean(1, keepdim=True).sqrt()
        tensors["markov_head.markov_w2.weight"] = own["lm_head.weight"]
        tensors["lm_head.weight"] = 0.05 * new(VOCAB, HIDDEN)
    if confidence:
        rank = 0 if markov is None else tensors["markov_head.markov_w1.weight"].shape[1]
        tensors["confidence_head.proj.weight"], tensors["confidence_head.proj.bias"] = new(1, HIDDEN + rank), new(1)
    return tensors


@cache
def block_head(
    layout: str = "z-lab",
    markov: str | None = None,
    confidence: bool = False,
    draft_vocab: int = VOCAB,
    causal: bool = False,
    knows_bigrams: bool = False,
) -> Path:
    """A head's folder. Layouts: z-lab (DFlash), deepspec (DSpark), speculators (either)."""
    tensors = block_tensors(markov, confidence, draft_vocab, knows_bigrams)
    shape = json.loads((tiny_model() / "config.json").read_text())
    shape |= {"model_type": "qwen3", "num_hidden_layers": 2, "intermediate_size": INNER}
    rank = tensors["markov_head.markov_w1.weight"].shape[1] if markov else 0
    said: dict[str, Any] = {"mask_token_id": MASK, "block_size": BLOCK}
    small = {"markov_rank": rank, "markov_head_type": markov or "vanilla", "confidence_head_with_markov": bool(markov)}
    if layout == "speculators":
        config = (
            said
            | small
            | {
                "speculators_model_type": "dspark" if markov else "dflash",
                "aux_hidden_state_layer_ids": [i + 1 for i in LEAVING],
                "draft_vocab_size": draft_vocab,
                "sample_from_anchor": markov is not None,
                "transformer_layer_config": shape,
            }
        )
    elif layout == "deepspec":
        config = shape | said | small | {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": list(LEAVING)}
    else:
        inner = said | {"target_layer_ids": list(LEAVING), "causal": causal}
        config = shape | {"architectures": ["DFlashDraftModel"], "dflash_config": inner}
    folder = Path(mkdtemp(prefix="peregrine-block-"))
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@dataclass(frozen=True)
class BlockReference:
    """A head and its target, from their files."""

    head: Reference
    target: Reference
    markov: str | None
    from_newest: bool
    causal: bool

    @classmethod
    def of(cls, folder: Path, model: Path, markov: str | None, causal: bool = False) -> "BlockReference":
        tensors, own = load_file(folder / "model.safetensors"), load_file(model / "model.safetensors")
        config = json.loads((model / "config.json").read_text())
        embedding = own["model.embed_tokens.weight"]
        head = Reference(tensors, config, embedding, tensors.get("lm_head.weight", own["lm_head.weight"]))
        target = Reference(own, config, embedding, own["lm_head.weight"])
        return cls(head, target, markov, markov is not None, causal)

    def hidden(self, text: list[int], count: int) -> Tensor:
        """The hidden state of each draft after a text whose last token the target has not read. [count, H]"""
        fused, newest = self._fused(text[:-1]), text[-1]
        inputs = count if self.from_newest else count + 1
        x = self.head.embed(torch.tensor([newest] + [MASK] * (inputs - 1)))
        for i in range(2):
            x = self._layer(x, fused, f"layers.{i}")
        return self.head.norm(x, "norm")[inputs - count :]

    def drafts(self, text: list[int], count: int) -> list[int]:
        """The greedy drafts after a text whose last token the target has not read."""
        hidden, newest = self.hidden(text, count), text[-1]
        scores = hidden @ self.head.output.double().T
        ids = torch.arange(len(scores[0])) + self.head.tensors.get("d2t", torch.zeros(1, dtype=torch.int64))
        made, state = [newest], torch.zeros(RANK).double()
        for step in range(count):
            added, state = self._markov(made[-1], hidden[step], state)
            made.append(int(ids[(scores[step] + added).argmax()]))
        return made[1:]

    def _fused(self, read: list[int]) -> Tensor:
        x, states = self.target.embed(torch.tensor(read)), []
        for i in range(LAYERS):
            x = self.target.layer(x, f"model.layers.{i}")
            states.append(x)
        taps = torch.cat([states[i] for i in LEAVING], dim=1)
        return self.head.norm(self.head.linear(taps, "fc"), "hidden_norm")

    def _layer(self, x: Tensor, fused: Tensor, name: str) -> Tensor:
        head, length = self.head, len(fused)
        normed = head.norm(x, f"{name}.input_layernorm")
        parts = {}
        for part in "qkv":
            # Rows of the context come first, so that positions are those of the text; their queries are not used.
            rows = torch.cat((fused, normed))
            parts[part] = head.linear(rows, f"{name}.self_attn.{part}_proj").unflatten(1, (-1, HEAD_DIM))
        q, k = (head.rotate(head.norm(parts[part], f"{name}.self_attn.{part}_norm")) for part in "qk")
        q, k, v = q[length:], *(heads.repeat_interleave(q.shape[1] // k.shape[1], 1) for heads in (k, parts["v"]))
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        if self.causal:
            scores = scores + torch.full(scores.shape[1:], -torch.inf).triu(length + 1)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + head.linear(attended, f"{name}.self_attn.o_proj")
        return x + head.mlp(head.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")

    def _markov(self, before: int, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.markov is None:
            return torch.zeros(1).double(), state
        e, out = self.head["markov_head.markov_w1.weight"][before], self.head["markov_head.markov_w2.weight"]
        if self.markov == "vanilla":
            return out @ e, state
        if self.markov == "gated":
            gate = self.head.linear(torch.cat((hidden, e))[None], "markov_head.gate_proj")[0].sigmoid()
            return out @ (gate * e), state
        joint = self.head.linear(torch.cat((state, e, hidden))[None], "markov_head.joint_proj")[0]
        gate, candidate, output = joint.chunk(3)
        gate = gate.sigmoid()
        return out @ output.tanh(), gate * state + (1 - gate) * candidate.tanh()
