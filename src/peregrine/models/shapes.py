"""Public models' shapes with random weights, so that any machine can measure without a download.

What such a model writes is noise, and it never ends by itself; its arithmetic and its memory are the real ones'.
"""

from dataclasses import replace

import torch
from torch import nn

from peregrine.errors import ConfigError
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.folder import Fields
from peregrine.models.head_config import default_taps
from peregrine.models.heads import Eagle3Config, Eagle3Head
from peregrine.models.layers import pack_linears

PREFIX = "shape:"
DRAFT_VOCAB = 32000
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}
_QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "head_dim": 128,
}


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, object]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


SHAPES: dict[str, dict[str, object]] = {
    "llama-3.1-8b": _LLAMA | {"rope_scaling": _LLAMA_ROPE} | _sizes(4096, 14336, 32, 32, 8),
    "llama-3.2-1b": _LLAMA
    | {"rope_scaling": _LLAMA_ROPE | {"factor": 32.0}, "head_dim": 64, "tie_word_embeddings": True}
    | _sizes(2048, 8192, 16, 32, 8),
    "qwen3-8b": _QWEN | _sizes(4096, 12288, 36, 32, 8),
    "qwen3-0.6b": _QWEN | {"tie_word_embeddings": True} | _sizes(1024, 3072, 28, 16, 8),
}


def shape_config(name: str) -> ModelConfig:
    """The config of a shape, such as shape:llama-3.1-8b."""
    fields = SHAPES.get(name.removeprefix(PREFIX))
    if fields is None:
        raise ConfigError(f"model={name!r}: no such shape; known are {', '.join(PREFIX + n for n in SHAPES)}")
    return ModelConfig.from_fields(Fields(name, fields))


def draw_decoder(config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Decoder:
    """A decoder of random weights, made where it will run and packed for it."""
    decoder = Decoder(config, device, dtype)
    draw_here(decoder, seed)
    return decoder.pack()


def draw_head(target: Decoder, seed: int = 1) -> Eagle3Head:
    """An EAGLE-3 head that fits the target as its public heads do: one Llama layer, a draft vocabulary of 32k."""
    config, weight = target.config, target.embedding
    layer = replace(
        config,
        family="llama",
        num_layers=1,
        windows=(None,),
        tied=False,
        qkv_bias=False,
        qk_norm=False,
    )
    size = min(DRAFT_VOCAB, config.vocab_size)
    shape = Eagle3Config(
        layer, default_taps(config.num_layers), config.hidden_size, size, own_embedding=False, own_head=True
    )
    spread = torch.arange(size, device=weight.device) * (config.vocab_size // size)
    head = Eagle3Head(shape, target, weight.device, weight.dtype, spread)
    draw_here(head, seed)
    pack_linears(head)
    return head


@torch.no_grad()
def draw_here(module: nn.Module, seed: int, scale: float = 0.02) -> None:
    """Normal weights, norms of one and no bias, drawn on the module's own device."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            parameter.normal_(0.0, scale, generator=generators[device])
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
