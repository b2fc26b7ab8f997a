"""Heads as they are shipped: their files, and of merlin's its public names and shapes and how often it is right."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import peregrine
from peregrine import LLM, SamplingParams

ASSETS = Path(peregrine.__file__).parent / "assets"
HEAD = ASSETS / "merlin" / "eagle3"
FILES = {  # name: (bytes, sha256)
    "merlin/eagle3/config.json": (799, "6e92e47894d76c7b8805430da0e167ccd0ef6fe3f17a55ca1f26be69b4b9f598"),
    "merlin/eagle3/model.safetensors": (6_664_080, "11f67e6f93201948c7d3b71e1bf69d8cf95cc30c8541d8cddd02199326f6aa14"),
    "smollm2/eagle3/config.json": (805, "a42b8d53e2e5a7fb70578f5249fe40928af1baa0463443ed21f71897f97d6924"),
    "smollm2/eagle3/model.safetensors": (
        19_732_408,
        "1af77fd425c08d419fa8ba0e15651be82e9ecf343ea11353ae5f7955a108d530",
    ),
}
VOCAB, DRAFT_VOCAB, HIDDEN, INNER, HEAD_DIM, HEADS = 8192, 2048, 320, 2048, 64, 5
SHAPES = {  # what SafeAILab's EAGLE, SGLang and vLLM look for in a head of one Llama layer
    "fc.weight": (HIDDEN, 3 * HIDDEN),
    "midlayer.input_layernorm.weight": (HIDDEN,),
    "midlayer.hidden_norm.weight": (HIDDEN,),
    "midlayer.self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * HIDDEN),
    "midlayer.self_attn.k_proj.weight": (HEAD_DIM, 2 * HIDDEN),
    "midlayer.self_attn.v_proj.weight": (HEAD_DIM, 2 * HIDDEN),
    "midlayer.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    "midlayer.post_attention_layernorm.weight": (HIDDEN,),
    "midlayer.mlp.gate_proj.weight": (INNER, HIDDEN),
    "midlayer.mlp.up_proj.weight": (INNER, HIDDEN),
    "midlayer.mlp.down_proj.weight": (HIDDEN, INNER),
    "norm.weight": (HIDDEN,),
    "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
    "d2t": (DRAFT_VOCAB,),
    "t2d": (VOCAB,),
}
PROMPTS = (  # (text, is a chat)
    ("Once upon a time, there was a little robot", False),
    ("One day, a girl named Lily found a", False),
    ("Tell me a story about a dragon who loves soup.", True),
    ("Tell me a story about a duck and a boat.", True),
    ("def is_even(n):", False),
)
# Tokens per round with a chain of 3, bonus included; kernels with other rounding move it a little.
GREEDY_BAND, SAMPLED_BAND = (3.0, 3.2), (2.85, 3.05)


@pytest.mark.parametrize("name", FILES)
def test_files_are_the_ones_that_were_trained(name: str) -> None:
    content = (ASSETS / name).read_bytes()
    assert (len(content), sha256(content).hexdigest()) == FILES[name]


def test_tensors_have_the_public_names_and_shapes() -> None:
    tensors = load_file(HEAD / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SHAPES
    assert {tensor.dtype for name, tensor in tensors.items() if name.endswith("weight")} == {torch.bfloat16}
    # d2t holds offsets, t2d marks the tokens they lead to.
    ids = tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    config = json.loads((HEAD / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCAB, DRAFT_VOCAB)
    # SafeAILab's code would take this key to mean that the head has its own embedding.
    assert "target_hidden_size" not in config


@pytest.mark.parametrize(("temperature", "band"), [(0.0, GREEDY_BAND), (1.0, SAMPLED_BAND)])
def test_acceptance_lies_in_its_band(temperature: float, band: tuple[float, float]) -> None:
    options = {"drafter": "eagle3", "num_drafts": 3, "windows": "fixed", "device": "cpu", "dtype": "float32"}
    with LLM("merlin", max_rows=5, **options) as llm:
        prompts = [
            llm.encode_chat([{"role": "user", "content": text}]) if chat else llm.encode(text) for text, chat in PROMPTS
        ]
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=96) for i in range(len(prompts))]
        outputs = llm.generate(prompts, params, progress=False)
    rounds, accepted = sum(o.stats.rounds for o in outputs), sum(o.stats.accepted for o in outputs)
    low, high = band
    assert low <= accepted / rounds <= high
