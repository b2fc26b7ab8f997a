"""Random models in bfloat16, big enough for real kernels and small enough to be quick; all share most weight shapes."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors.torch import load_file, save_file

from peregrine.synthetic.checkpoint import OUTPUT_GAIN, make_random_checkpoint
from spec.expert_models import with_prediction_layer

VOCAB, HIDDEN, LAYERS, CONTEXT = 512, 512, 8, 1024


@cache
def llama() -> Path:
    """Llama: heads of 64, four query heads per KV head."""
    return _checkpoint(num_heads=8, num_kv_heads=2, head_dim=64)


@cache
def qwen3() -> Path:
    """Qwen3: heads of 128 with head norms, two query heads per KV head."""
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
def wide() -> Path:
    """Llama: two layers of the widths of an 8B, so that every linear for many rows takes part."""
    return _checkpoint(
        num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096, intermediate_size=14336, num_layers=2
    )


@cache
def deepseek() -> Path:
    """DeepSeek: MLA of V2-Lite (16 heads, 512 + 64), a dense layer, then 16 experts; a prediction layer."""
    return with_prediction_layer(
        _checkpoint(num_heads=16, head_dim=128, kv_rank=512, q_rank=0, rope_dim=64, num_experts=16, expert_size=128)
    )


@cache
def qwen3_moe() -> Path:
    """Qwen3-MoE: 32 experts in every layer, four per token."""
    experts, inner = 32, 128
    folder, generator = Path(mkdtemp(prefix="peregrine-experts-")), torch.Generator().manual_seed(6)
    for file in qwen3().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = {n: w for n, w in load_file(folder / "model.safetensors").items() if ".mlp." not in n}

    def matrix(rows: int, columns: int, spread: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * spread * columns**-0.5).bfloat16()

    for mlp in (f"model.layers.{layer}.mlp" for layer in range(LAYERS)):
        weights[f"{mlp}.gate.weight"] = matrix(experts, HIDDEN)
        for expert in (f"{mlp}.experts.{number}" for number in range(experts)):
            weights |= {f"{expert}.{name}_proj.weight": matrix(inner, HIDDEN) for name in ("gate", "up")}
            weights[f"{expert}.down_proj.weight"] = matrix(HIDDEN, inner, 2 * OUTPUT_GAIN)  # four are averaged
    save_file(weights, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
    fields |= {"num_experts": experts, "num_experts_per_tok": 4, "moe_intermediate_size": inner}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@cache
def disturbed(model: Path, share: float = 0.03) -> Path:
    """A draft model that is often right and often wrong: the model with some noise in its weights."""
    folder, generator = Path(mkdtemp(prefix="peregrine-draft-")), torch.Generator().manual_seed(5)
    for file in filter(Path.is_file, model.iterdir()):  # not its heads
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() == 2:
            noise = torch.randn(weight.shape, generator=generator) * weight.float().std()
            weights[name] = (weight.float() + share * noise).bfloat16()
    save_file(weights, folder / "model.safetensors")
    return folder


def _checkpoint(**sizes: int) -> Path:
    common = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_layers": LAYERS}
    return make_random_checkpoint(
        mkdtemp(prefix="peregrine-random-"),
        vocab_size=VOCAB,
        max_positions=CONTEXT,
        dtype="bfloat16",
        seed=3,
        **(common | sizes),  # type: ignore[arg-type]
    )
