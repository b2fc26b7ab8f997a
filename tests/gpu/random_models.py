"""Random models in bfloat16, big enough for real kernels and small enough to be quick; all share most weight shapes."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors.torch import load_file, save_file

from peregrine.models.random_checkpoint import make_random_checkpoint

VOCAB, HIDDEN, LAYERS, CONTEXT = 512, 512, 8, 1024


@cache
def llama() -> Path:
    """Heads of 64, four queries to a key."""
    return _checkpoint(num_heads=8, num_kv_heads=2, head_dim=64)


@cache
def qwen3() -> Path:
    """Heads of 128 with norms of their own, two queries to a key."""
    folder = _checkpoint(num_heads=4, num_kv_heads=2, head_dim=128)
    generator = torch.Generator().manual_seed(4)
    weights = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        for name in ("q_norm", "k_norm"):
            drawn = 1 + 0.2 * torch.randn(128, generator=generator)
            weights[f"model.layers.{layer}.self_attn.{name}.weight"] = drawn.bfloat16()
    save_file(weights, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@cache
def disturbed(model: Path, share: float = 0.03) -> Path:
    """A draft model that is often right and often wrong: the model with some noise in its weights."""
    folder, generator = Path(mkdtemp(prefix="peregrine-draft-")), torch.Generator().manual_seed(5)
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() == 2:
            noise = torch.randn(weight.shape, generator=generator) * weight.float().std()
            weights[name] = (weight.float() + share * noise).bfloat16()
    save_file(weights, folder / "model.safetensors")
    return folder


def _checkpoint(**heads: int) -> Path:
    return make_random_checkpoint(
        mkdtemp(prefix="peregrine-random-"),
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_layers=LAYERS,
        max_positions=CONTEXT,
        dtype="bfloat16",
        seed=3,
        **heads,
    )
