"""Every family: greedy text is that of transformers, and sampled text does not depend on drafts or the batch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from peregrine.sampling import SamplingParams
from spec.harness import Case, build, prompts, run, tiny_model, tokens

SHAPE: dict[str, Any] = {
    "vocab_size": 301,  # a multiple of nothing
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}
MLA_FIELDS = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # of what is rotated
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, untied": ("Llama", {"tie_word_embeddings": False}),
    "llama, tied, one head a group": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "mistral, window 13, eight heads a group": (
        "Mistral",
        {"sliding_window": 13, "num_attention_heads": 8, "num_key_value_heads": 1},
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 24}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "granite": ("Granite", {"residual_multiplier": 0.22, "attention_multiplier": 0.2, "embedding_multiplier": 3.0}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"sliding_window": 13, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "olmo2": ("Olmo2", {}),
    "glm4": ("Glm4", {}),
    "glm4-moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "use_qk_norm": True,
            "head_dim": 16,
        },
    ),
    "glm4-moe-lite": ("Glm4MoeLite", {**MLA_FIELDS, "q_lora_rank": 20}),
    "gemma2": ("Gemma2", {"sliding_window": 13, "query_pre_attn_scalar": 20}),
    "gemma3": ("Gemma3", {"sliding_window": 13, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2}),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 24, "sliding_window": 13, "swiglu_limit": 2.0},
    ),
    "deepseek-v2": ("DeepseekV2", {**MLA_FIELDS, "q_lora_rank": None}),
    "deepseek-v3": ("DeepseekV3", {**MLA_FIELDS, "q_lora_rank": 20, "n_group": 4, "topk_group": 2}),
}


def checkpoint(family: str, fields: dict[str, Any], folder: Path) -> transformers.PreTrainedModel:
    """A random checkpoint of the family, its weights large enough for the text to vary."""
    kind = getattr(transformers, f"{family}ForCausalLM")
    config = kind.config_class(**{**SHAPE, **fields})
    torch.manual_seed(7)
    model = kind(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(10)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_model() / name).read_bytes())
    return model


@torch.inference_mode()
def best_after(model: transformers.PreTrainedModel, prompt: Sequence[int], text: list[int]) -> list[int]:
    """What greedy decoding appends after the prompt and after each token of the text but the last.

    If that is the text itself, `generate` would have made it: each of its tokens follows from those before.
    """
    logits = model(torch.tensor([[*prompt, *text]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model = checkpoint(*FAMILIES[name], tmp_path)
    asked, longest = prompts(8, seed=3, high=40), 64
    params = SamplingParams(temperature=0, max_tokens=longest)
    engine = build(tmp_path, drafter="ngram", num_drafts=3).engine
    made = tokens(run(engine, [Case(prompt, params) for prompt in asked]))
    assert made == [best_after(model, prompt, text) for prompt, text in zip(asked, made, strict=True)]
    eos = SHAPE["eos_token_id"]
    assert all(eos not in text[:-1] and (len(text) == longest or text[-1] == eos) for text in made)
    sampled = [Case(prompt, SamplingParams(temperature=0.9, seed=7, max_tokens=12)) for prompt in asked[:3]]
    alone = [Case(case.prompt, replace(case.params, num_drafts=0)) for case in sampled]
    assert tokens(run(engine, sampled)) == [tokens(run(engine, [case]))[0] for case in alone]
    assert len({tuple(text) for text in made}) > 0.75 * len(asked), (
        "the text must depend on the prompt for this to mean anything"
    )
