"""A checkpoint folder with random weights and a small tokenizer, for demonstrations, benchmarks and tests.

A Llama, or a DeepSeek-V3 if `kv_rank` is set (MLA), with experts if `num_experts` is. The folder has the files of a
published checkpoint. The text makes no sense, but it varies: weights are scaled so that the greedy token depends on the
text before it. Equal seeds write equal bytes.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from peregrine.errors import ConfigError
from peregrine.hardware import DTYPES

END_OF_TEXT = "<|endoftext|>"
# 256 bytes and the end-of-text token.
MIN_VOCAB = 257
LOGIT_SPREAD = 3.0
# Bytes and the end of text are chosen seldom, so that the output reads as pieces of words.
BYTE_GAIN = 0.3
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
# The tokenizer's merges come from here.
LINES = [
    "The falcon sees the whole valley before it folds its wings and falls.",
    "Once upon a time there was a small bird who wanted to be faster than the wind.",
    "A guess costs little when the one who checks it is already on the way.",
    "Every morning the children ran to the river to see whether the boats had come home.",
    "If the first word is right, the second may be right as well, and then the third.",
    "What is the answer? The answer is that the question was asked too early.",
    "User: Tell me a story about a bird. Assistant: Here is a story about a bird that learned to wait.",
    "def falls(height, gravity=9.81): return (2 * height / gravity) ** 0.5",
    "In the evening the wind was gone, the valley was quiet, and the bird was home.",
]
# Layers add more to the residual than the embedding holds; otherwise the model repeats its last token for ever.
QUERY_GAIN, OUTPUT_GAIN = 1.5, 4.0
LATENT_GAIN = 2.0  # of w_uk and w_uv, whose input is a normed latent
FEWEST_EXPERTS = 4


class Matrix(Protocol):
    """Draws the next matrix of a checkpoint."""

    def __call__(self, rows: int, columns: int, spread: float = 1.0) -> Tensor:
        """Inputs of unit size give outputs of size `spread`."""


@dataclass(frozen=True, slots=True)
class RandomShape:
    """Sizes of the checkpoint; the defaults load within milliseconds."""

    vocab_size: int = 384
    hidden_size: int = 64
    intermediate_size: int = 160
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2  # unused with kv_rank
    head_dim: int = 16
    max_positions: int = 2048
    tied: bool = False
    dtype: str = "float32"  # what the file holds: float32, bfloat16 or float16
    seed: int = 0
    kv_rank: int = 0  # MLA with latents of this size; 0: keys and values of heads
    q_rank: int = 0  # MLA: rank of the query projection; 0: a full one
    rope_dim: int = 16  # MLA: rotated part of a head, beside head_dim
    num_experts: int = 0  # in every layer but the first, 2 for each token; 0: every layer has an MLP
    expert_size: int = 32


def make_random_checkpoint(folder: str | Path, **shape: int | bool | str) -> Path:
    """Write the checkpoint into `folder`, made if missing, and return it; RandomShape has the keywords."""
    sizes = RandomShape(**shape)  # type: ignore[arg-type]
    if sizes.vocab_size < MIN_VOCAB:
        raise ConfigError(f"vocab_size={sizes.vocab_size}: bytes alone need {MIN_VOCAB}; use at least that")
    if sizes.dtype not in DTYPES:
        raise ConfigError(f"dtype={sizes.dtype!r}: no such dtype; choose one of {', '.join(DTYPES)}")
    if sizes.num_experts and (not sizes.kv_rank or sizes.num_experts < FEWEST_EXPERTS):
        raise ConfigError(
            f"num_experts={sizes.num_experts}: only with kv_rank, and at least {FEWEST_EXPERTS}; correct it"
        )
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(sizes.vocab_size)
    tokenizer.save(str(path / "tokenizer.json"))
    end_id = tokenizer.get_vocab()[END_OF_TEXT]
    write_json(path / "config.json", config_fields(sizes, end_id))
    write_json(path / "generation_config.json", {"eos_token_id": end_id})
    write_json(path / "tokenizer_config.json", tokenizer_fields(sizes))
    save_file(random_weights(sizes), path / "model.safetensors", metadata={"format": "pt"})
    return path


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens; ids it does not reach stay without text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def random_weights(sizes: RandomShape) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, under the names Hugging Face gives them."""
    generator = torch.Generator().manual_seed(sizes.seed)
    dtype = DTYPES[sizes.dtype]

    def matrix(rows: int, columns: int, spread: float = 1.0) -> Tensor:
        # Inputs of unit size give outputs of size `spread`.
        weight: Tensor = torch.randn(rows, columns, generator=generator) * (spread * columns**-0.5)
        return weight.to(dtype)

    hidden = sizes.hidden_size
    ones = torch.ones(hidden, dtype=dtype)
    head = matrix(sizes.vocab_size, hidden, LOGIT_SPREAD)
    head[:MIN_VOCAB] *= BYTE_GAIN
    embedding = head if sizes.tied else matrix(sizes.vocab_size, hidden, LOGIT_SPREAD)
    weights = {"model.embed_tokens.weight": embedding}
    for layer in range(sizes.num_layers):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.input_layernorm.weight"] = ones.clone()
        attention = deepseek_attention if sizes.kv_rank else heads_attention
        weights |= attention(sizes, f"{prefix}.self_attn", matrix)
        weights[f"{prefix}.post_attention_layernorm.weight"] = ones.clone()
        if sizes.num_experts and layer > 0:
            weights |= deepseek_experts(sizes, f"{prefix}.mlp", matrix)
        else:
            weights |= {
                f"{prefix}.mlp.gate_proj.weight": matrix(sizes.intermediate_size, hidden),
                f"{prefix}.mlp.up_proj.weight": matrix(sizes.intermediate_size, hidden),
                f"{prefix}.mlp.down_proj.weight": matrix(hidden, sizes.intermediate_size, OUTPUT_GAIN),
            }
    weights["model.norm.weight"] = ones.clone()
    if not sizes.tied:
        weights["lm_head.weight"] = head
    return weights


def heads_attention(sizes: RandomShape, prefix: str, matrix: Matrix) -> dict[str, Tensor]:
    """The tensors of one layer's dense attention."""
    hidden = sizes.hidden_size
    q_size, kv_size = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    return {
        f"{prefix}.q_proj.weight": matrix(q_size, hidden, QUERY_GAIN),
        f"{prefix}.k_proj.weight": matrix(kv_size, hidden),
        f"{prefix}.v_proj.weight": matrix(kv_size, hidden),
        f"{prefix}.o_proj.weight": matrix(hidden, q_size, OUTPUT_GAIN),
    }


def config_fields(sizes: RandomShape, end_id: int) -> dict[str, object]:
    """The fields of config.json."""
    fields: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": sizes.max_positions,
        "tie_word_embeddings": sizes.tied,
        "torch_dtype": sizes.dtype,
        "eos_token_id": end_id,
    }
    return fields | (deepseek_fields(sizes) if sizes.kv_rank else {})


def tokenizer_fields(sizes: RandomShape) -> dict[str, object]:
    """The fields of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": sizes.max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def write_json(path: Path, fields: dict[str, object]) -> None:
    """One JSON file, readable by people."""
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def deepseek_attention(sizes: RandomShape, prefix: str, matrix: Matrix) -> dict[str, Tensor]:
    """The tensors of one layer's MLA."""
    hidden, heads, dtype = sizes.hidden_size, sizes.num_heads, DTYPES[sizes.dtype]
    q_size = heads * (sizes.head_dim + sizes.rope_dim)
    weights = {
        f"{prefix}.kv_a_proj_with_mqa.weight": matrix(sizes.kv_rank + sizes.rope_dim, hidden),
        f"{prefix}.kv_a_layernorm.weight": torch.ones(sizes.kv_rank, dtype=dtype),
        f"{prefix}.kv_b_proj.weight": matrix(2 * heads * sizes.head_dim, sizes.kv_rank, LATENT_GAIN),
        f"{prefix}.o_proj.weight": matrix(hidden, heads * sizes.head_dim, OUTPUT_GAIN),
    }
    if not sizes.q_rank:
        return weights | {f"{prefix}.q_proj.weight": matrix(q_size, hidden, QUERY_GAIN)}
    return weights | {
        f"{prefix}.q_a_proj.weight": matrix(sizes.q_rank, hidden),
        f"{prefix}.q_a_layernorm.weight": torch.ones(sizes.q_rank, dtype=dtype),
        f"{prefix}.q_b_proj.weight": matrix(q_size, sizes.q_rank, QUERY_GAIN),
    }


def deepseek_experts(sizes: RandomShape, prefix: str, matrix: Matrix) -> dict[str, Tensor]:
    """The tensors of one layer's experts and its shared expert."""
    hidden, inner, count = sizes.hidden_size, sizes.expert_size, sizes.num_experts
    weights = {
        f"{prefix}.gate.weight": matrix(count, hidden),
        f"{prefix}.gate.e_score_correction_bias": matrix(1, count, 0.2)[0].float(),
    }
    for name in [*(f"experts.{i}" for i in range(count)), "shared_experts"]:
        weights |= {
            f"{prefix}.{name}.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}.{name}.up_proj.weight": matrix(inner, hidden),
            f"{prefix}.{name}.down_proj.weight": matrix(hidden, inner, OUTPUT_GAIN),
        }
    return weights


def deepseek_fields(sizes: RandomShape) -> dict[str, object]:
    """The fields of config.json that differ from a Llama's."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": sizes.num_heads,
        "head_dim": sizes.rope_dim,
        "kv_lora_rank": sizes.kv_rank,
        "q_lora_rank": sizes.q_rank or None,
        "qk_nope_head_dim": sizes.head_dim,
        "qk_rope_head_dim": sizes.rope_dim,
        "v_head_dim": sizes.head_dim,
        "first_k_dense_replace": 1 if sizes.num_experts else sizes.num_layers,
        "n_routed_experts": sizes.num_experts or FEWEST_EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": sizes.expert_size,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }
