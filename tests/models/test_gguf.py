"""GGUF files: logits equal transformers', every number format equals the gguf package's own, bad files are refused."""

import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from models.conftest import SHAPE
from models.deepseek_fields import DEEPSEEK_FIELDS
from models.gguf_files import close, metadata_of, tensors_of, tokenizer_fields, write_gguf
from peregrine.errors import CheckpointError
from peregrine.models.checkpoint.gguf.header import TYPES, read_header
from peregrine.models.checkpoint.gguf.values import read_tensor
from peregrine.models.checkpoint.weights import Weights
from peregrine.models.families import read_config
from peregrine.models.loading import load_decoder

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 24}
EXPERTS = {"num_experts_per_tok": 3, "num_local_experts": 8}
EXPERT_FIELDS = {"expert_count": 8, "expert_used_count": 3}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3, "logits_scaling": 4.0}
GRANITE_FIELDS = {"embedding_scale": 3.0, "residual_scale": 0.22, "attention.scale": 0.3, "logit_scale": 4.0}
LONG: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
LONG |= {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 5.0], "original_max_position_embeddings": 24}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
STRETCHED = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
MLA = {**DEEPSEEK_FIELDS, "num_key_value_heads": 6, "routed_scaling_factor": 1.5}
OLDER = {"attention.head_count_kv": 6, "attention.key_length": 20, "attention.value_length": 10}  # with kv_b whole
NEWER = {"attention.head_count_kv": 1, "attention.key_length": 40, "attention.value_length": 32}
NEWER |= {"attention.key_length_mla": 20, "attention.value_length_mla": 10}
V2_FIELDS = {"attention.kv_lora_rank": 32, "rope.dimension_count": 8, "leading_dense_block_count": 1}
V2_FIELDS |= {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 24, "expert_shared_count": 1}
V2_FIELDS |= {"expert_weights_scale": 1.5}
# name -> (GGUF's architecture, transformers' family, changes to its config, more metadata, q and k are permuted)
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], bool]] = {
    "llama": ("llama", "Llama", {"tie_word_embeddings": True}, {}, True),
    "llama-biased": ("llama", "Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}, {}, True),
    "llama3": ("llama", "Llama", {"rope_parameters": LLAMA3}, {}, True),
    "mistral": ("llama", "Mistral", {"sliding_window": 7}, {"attention.sliding_window": 7}, True),
    "mixtral": ("llama", "Mixtral", EXPERTS, EXPERT_FIELDS, True),
    "qwen2": ("qwen2", "Qwen2", {}, {}, False),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 16}, {}, False),
    "qwen2moe": (
        "qwen2moe",
        "Qwen2Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 48,
        },
        {**EXPERT_FIELDS, "expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 48},
        False,
    ),
    "granite": ("granite", "Granite", GRANITE, GRANITE_FIELDS, True),
    "smollm3": ("smollm3", "SmolLM3", {"num_hidden_layers": 4}, {}, True),
    "phi3": (
        "phi3",
        "Phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 24, "sliding_window": 9},
        {
            "rope.dimension_count": 6,
            "rope.scaling.original_context_length": 24,
            "rope.scaling.attn_factor": (1 + math.log(4) / math.log(24)) ** 0.5,
            "attention.sliding_window": 9,
        },
        False,
    ),
    "olmo2": ("olmo2", "Olmo2", {}, {}, False),
    "glm4": ("glm4", "Glm4", {"head_dim": 16}, {"rope.dimension_count": 8}, False),
    "gemma2": (
        "gemma2",
        "Gemma2",
        {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 7},
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 7},
        False,
    ),
    "gemma3": (
        "gemma3",
        "Gemma3",
        {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 7, "num_hidden_layers": 6},
        {"attention.sliding_window": 7},
        False,
    ),
    "deepseek-v2, older": ("deepseek2", "DeepseekV2", {**MLA, "q_lora_rank": None}, {**V2_FIELDS, **OLDER}, False),
    "deepseek-v2, groups": (
        "deepseek2",
        "DeepseekV2",
        {**MLA, "q_lora_rank": 20, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        {**V2_FIELDS, **NEWER, "attention.q_lora_rank": 20, "expert_group_count": 4, "expert_group_used_count": 2},
        False,
    ),
    "deepseek-v3": (
        "deepseek2",
        "DeepseekV3",
        {**MLA, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "rope_parameters": STRETCHED},
        {
            **V2_FIELDS,
            **NEWER,
            "attention.q_lora_rank": 20,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 24,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        },
        False,
    ),
    "gpt-oss": (
        "gpt-oss",
        "GptOss",
        {**EXPERTS, "head_dim": 12, "sliding_window": 7, "rope_parameters": {**YARN, "truncate": False}},
        {
            **EXPERT_FIELDS,
            "expert_feed_forward_length": 80,
            "attention.sliding_window": 7,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 24,
        },
        False,
    ),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3Moe",
        {**EXPERTS, "num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 16},
        {**EXPERT_FIELDS, "expert_feed_forward_length": 24},
        False,
    ),
}


def random_model(family: str, **changes: Any) -> Any:
    torch.manual_seed(3)
    kind = getattr(transformers, f"{family}ForCausalLM")
    model = kind._from_config(kind.config_class(**{**SHAPE, **changes}), attn_implementation="eager").float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() == 1 else 0.15
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if "norm" in name else 0.0))
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path, dense_cache: Any) -> None:
    architecture, family, changes, metadata, permute = CASES[case]
    model = random_model(family, **changes)
    tensors = tensors_of(model, permute, architecture, split="older" not in case)
    if case == "phi3":
        tensors |= {f"rope_factors_{kind}.weight": torch.tensor(LONG[f"{kind}_factor"]) for kind in ("short", "long")}
    if case == "llama3":  # llama.cpp stores what each frequency is divided by
        plain = 1.0 / 5000.0 ** (torch.arange(0, 8, 2) / 8)
        tensors["rope_freqs.weight"] = plain / model.model.rotary_emb.inv_freq
    path = write_gguf(tmp_path / "model.gguf", architecture, metadata_of(model) | metadata, tensors)
    decoder, tokens, positions = load_decoder(path), torch.randint(0, 257, (41,)), torch.arange(41)
    hidden, _ = decoder(tokens, positions, dense_cache(decoder.layer_attention()).bind(positions))
    torch.testing.assert_close(decoder.logits(hidden), model(tokens[None]).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [kind for kind, _, _ in TYPES.values()])
def test_numbers_of_every_format_equal_the_packages_own(kind: str, tmp_path: Path) -> None:
    rng, numbers = np.random.default_rng(1), gguf.GGMLQuantizationType[kind]
    weights, size = gguf.GGML_QUANT_SIZES[numbers]
    assert (kind, weights, size) == TYPES[numbers.value]
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for name, rows in (("a", 3), ("b", 5)):  # the second one is found by its offset
        raw = rng.integers(0, 60, (rows, 512 // weights * size), np.uint8)  # small bytes: every scale is finite
        writer.add_tensor(name, raw, raw_dtype=numbers)
    path = close(writer, tmp_path / "x.gguf")
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in "ab":
        ours = read_tensor(read_header(path), name)
        expected = gguf.dequantize(theirs[name].data, numbers).reshape(ours.shape)
        assert ours.shape == (3 if name == "a" else 5, 512)
        np.testing.assert_array_equal(ours.float().numpy(), expected)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole file with a tokenizer."""
    model = random_model("Llama", num_hidden_layers=1, vocab_size=300)
    folder = tmp_path_factory.mktemp("gguf")
    extra = tokenizer_fields() | {"tokenizer__chat_template": "{{ messages[0]['content'] }}"}
    return write_gguf(folder / "small.gguf", "llama", metadata_of(model), tensors_of(model, True), **extra)


def test_truncated_files_are_refused_wherever_they_end(small: Path, tmp_path: Path) -> None:
    whole, cut = small.read_bytes(), tmp_path / "cut.gguf"
    for length in (0, 3, 10, 30, 200, 1000, len(whole) // 2, len(whole) - 33):
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            Weights(cut)


def test_lengths_that_no_file_can_have_are_not_believed(small: Path, tmp_path: Path) -> None:
    whole, bad = small.read_bytes(), tmp_path / "bad.gguf"
    for place in (8, 16, 24):  # number of tensors, number of fields, length of the first name
        bad.write_bytes(whole[:place] + struct.pack("<Q", 2**60) + whole[place + 8 :])
        with pytest.raises(CheckpointError, match=r"do not fit the file"):
            read_header(bad)


def test_other_files_are_refused_by_what_they_are(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + small.read_bytes()[4:])
    with pytest.raises(CheckpointError, match="no GGUF file"):
        Weights(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + small.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="version 1 is not read"):
        Weights(path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="or a GGUF file"):
        Weights(tmp_path / "notes.txt")


@pytest.mark.parametrize(
    ("architecture", "change", "words"),
    [
        ("mamba", {}, ["general.architecture='mamba'", "supported are llama"]),
        ("llama", {"block_count": None}, ["llama.block_count=None", "missing"]),
        ("llama", {"embedding_length": None}, ["llama.embedding_length=None", "missing"]),
        ("llama", {"attention.head_count": None}, ["llama.attention.head_count=None", "missing"]),
        ("llama", {"attention.head_count": 0}, ["llama.attention.head_count=0", "at least 1"]),
        ("llama", {"attention.key_length": 0}, ["llama.attention.key_length=0", "at least 1"]),
        ("llama", {"rope.scaling.type": "wild", "rope.scaling.factor": 2.0}, ["'wild'", "not supported"]),
    ],
)
def test_metadata_that_is_missing_or_not_supported_is_named(
    architecture: str, change: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    model = random_model("Llama", num_hidden_layers=1)
    metadata = {name: value for name, value in (metadata_of(model) | change).items() if value is not None}
    path = write_gguf(tmp_path / "x.gguf", architecture, metadata, tensors_of(model, True))
    with pytest.raises(CheckpointError) as refused:
        read_config(path)
    for word in words:
        assert word in str(refused.value)


def test_number_formats_that_are_not_read_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    kind = gguf.GGMLQuantizationType.IQ4_XS
    writer.add_tensor("token_embd.weight", np.zeros((2, 136), np.uint8), raw_dtype=kind)
    path = close(writer, tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match=r"1 tensors are IQ4_XS, which is not read; read are F32, F16"):
        Weights(path)


def test_quantised_weights_without_the_package_name_the_command(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("a", np.zeros((2, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    path = close(writer, tmp_path / "x.gguf")
    monkeypatch.setattr("peregrine.models.checkpoint.gguf.values._library_present", lambda: False)
    with pytest.raises(CheckpointError, match=r"Q8_0 weights.*run: pip install gguf"):
        Weights(path)
    assert not Weights(small).is_quantised  # plain floats need no package


def test_stop_tokens_are_the_files_own_and_turn_ends(small: Path) -> None:
    header = read_header(small)
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert read_config(small).eos_ids == (len(tokens) - 2, tokens.index("<|im_end|>"))
