"""The models on the GPU path, on CPU tensors in Triton's interpreter: fused linears, split norms, deferred rotation."""

import pytest
import torch
from torch import Tensor

from kernels.interpreted import needs_interpreter, send_models_to_triton, send_to_triton
from peregrine.attention import AttentionMetadata, Window
from peregrine.attention.routing import BACKENDS
from peregrine.cache.store import KVStore
from peregrine.models.checkpoint.folder import Fields
from peregrine.models.decoder import Decoder
from peregrine.models.families import parse_config
from peregrine.models.layers import draw_weights
from peregrine.sampling import SamplingParams
from peregrine.spec.bound import BoundModel
from spec.harness import Case, build, eagle3_head, run, tokens

pytestmark = [needs_interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

LENGTH, PAGE_SIZE = 21, 4
PAGES = -(-LENGTH // PAGE_SIZE)
FIELDS: dict[str, object] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
DEEPSEEK_FIELDS: dict[str, object] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
MODELS: dict[str, dict[str, object]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {},  # with biases
    "Qwen3ForCausalLM": {},  # with head norms
    "Qwen3MoeForCausalLM": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    "Qwen2MoeForCausalLM": {  # with a gate beside the router
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "Olmo2ForCausalLM": {},  # norms behind layers alone, and over all heads
    "Glm4ForCausalLM": {},  # norms around layers, half of a head rotated
    "Gemma3ForCausalLM": {"sliding_window": 7, "sliding_window_pattern": 2},  # gelu, two rotary tables
    "DeepseekV2ForCausalLM": {**DEEPSEEK_FIELDS, "q_lora_rank": None, "norm_topk_prob": False},
    "DeepseekV3ForCausalLM": DEEPSEEK_FIELDS,
}
BACKEND = {backend.name: backend for backend in BACKENDS}


def bound(architecture: str, backend: str) -> BoundModel:
    config = parse_config(Fields("config.json", FIELDS | MODELS[architecture] | {"architectures": [architecture]}))
    decoder = Decoder(config)
    draw_weights(decoder, torch.Generator().manual_seed(2), scale=0.2)
    with torch.no_grad():  # norms other than one and biases other than zero
        for i, (name, parameter) in enumerate(decoder.named_parameters()):
            if parameter.dim() == 1:
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.3
                parameter.copy_(drawn + (0.0 if name.endswith("bias") else 1.0))
    store = KVStore(config.num_layers, 1 + PAGES, PAGE_SIZE, config.kv_shape, torch.float32, "cpu")
    return BoundModel(decoder.pack(), decoder.layer_attention(), store, BACKEND[backend])


def window(start: int, end: int) -> tuple[Tensor, AttentionMetadata]:
    """The tokens [start, end) of one text, and where they go."""
    text = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(1))
    places = torch.arange(start, end)
    return text[start:end], AttentionMetadata(
        window=Window.uniform(1, end - start),
        positions=places,
        q_starts=torch.tensor([0, end - start]),
        past_lens=torch.tensor([start]),
        page_table=1 + torch.arange(PAGES)[None],
        page_size=PAGE_SIZE,
        slots=places + PAGE_SIZE,
        ancestors=None,
    )


@torch.inference_mode()
def read(model: BoundModel) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two windows; logits of the second, taps of both, keys and values."""
    first = model.fill(*window(0, 13), (1,))
    hidden, second = model.read(*window(13, LENGTH), (1,))
    assert first is not None
    assert second is not None
    taps = torch.cat((first, second))
    return model.decoder.logits(hidden), taps, model.store.keys, model.store.values


@pytest.mark.parametrize("architecture", MODELS)
def test_the_gpu_path_agrees_with_the_twins(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = read(bound(architecture, "torch"))
    send_models_to_triton(monkeypatch)
    for value, twin in zip(read(bound(architecture, "triton")), expected, strict=True):
        torch.testing.assert_close(value, twin, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize("backend", [b for b in BACKEND if not BACKEND[b].missing()])
def test_a_window_without_queries_stores_the_same_keys(
    backend: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fill`, which computes no outputs, stores the keys and values that `read` stores."""
    if backend == "triton":
        send_models_to_triton(monkeypatch)
    filled, whole = (bound(architecture, backend) for _ in range(2))
    tokens, metadata = window(0, LENGTH)
    with torch.inference_mode():
        filled.fill(tokens, metadata, ())
        whole.read(tokens, metadata, ())
        assert torch.equal(filled.store.keys, whole.store.keys)
        assert torch.equal(filled.store.values, whole.store.values)


def test_rounds_on_gpu_kernels_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rounds of prefill, drafting and verification, with a head that computes live rows only."""
    case = Case((5, 6, 7), SamplingParams(temperature=0.0, max_tokens=3))
    expected = tokens(run(build().engine, [case]))
    send_models_to_triton(monkeypatch)
    send_to_triton(monkeypatch)
    engine = build(attention="triton", drafter=str(eagle3_head()), num_drafts=2).engine
    packed = engine.runner.target.decoder.head.packed
    assert packed is not None
    assert not packed.is_recordable, "this is the CPU's format"
    assert tokens(run(engine, [case])) == expected
