"""Draft heads in every public naming, loaded through files, against a plain re-implementation."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.head_files import LAYERS, SHAPE, VD, H, V, draw, eagle3_tensors, layer_tensors, write
from models.head_reference import Reference, eagle, eagle3, eagle3_fuse, eagle3_logits, nextn, plain_mtp
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import DraftHead, is_head, load_head
from peregrine.models.layers import Linear


def check_chain(
    head: DraftHead,
    expected: Callable[[Tensor, Tensor], Tensor],
    scores: Callable[[Tensor], Tensor],
    seen: tuple[Tensor, Tensor],
    dense_cache: Any,
) -> None:
    """Absorb entries, the last ones with one live row, then take three steps on the head's own hidden state."""
    tokens, hidden = seen
    cache = dense_cache(head.layer_attention())
    first = torch.arange(7)
    out = head(tokens[:7], hidden[:7].float(), first, cache.bind(first), None)
    torch.testing.assert_close(out.double(), expected(tokens[:7], hidden[:7]), atol=2e-4, rtol=1e-3)
    rest, live = torch.arange(7, 11), torch.tensor([2])
    out = head(tokens[7:11], hidden[7:11].float(), rest, cache.bind(rest, live), live)
    reference = expected(tokens[:11], hidden[:11])
    torch.testing.assert_close(out.double(), reference[9:10], atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(head.logits(out).double(), scores(reference[9:10]), atol=2e-3, rtol=1e-3)
    # Entries after the live one are rejected; the chain continues directly after it.
    cache.keys, cache.values = ({n: x[:10] for n, x in held.items()} for held in (cache.keys, cache.values))
    tokens, hidden = tokens[:10], hidden[:10]
    for step in range(3):
        token, at = torch.tensor([5 + step]), torch.tensor([10 + step])
        tokens, hidden = torch.cat((tokens, token)), torch.cat((hidden, expected(tokens, hidden)[-1:]))
        out = head(token, out, at, cache.bind(at), None)
        torch.testing.assert_close(out.double(), expected(tokens, hidden)[-1:], atol=1e-3, rtol=1e-3)


def entries(hidden_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    return torch.randint(0, V, (11,), generator=generator), torch.randn(11, hidden_size, generator=generator).double()


EAGLE3: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name -> (config.json beyond SHAPE, what the tensors need to know)
    "safeailab": ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": VD}, {}),
    "specforge": (
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": VD,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True},
        },
        {"own_embedding": True, "taps": (1, 4, 7)},
    ),
    "whole-vocabulary": ({"architectures": ["LlamaForCausalLMEagle3"], "attention_bias": True}, {}),
    "eagle-3.1": ({"architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "norm_output": True}, {}),
    "one-norm-before-fc": ({"architectures": ["LlamaForCausalLMEagle3"], "norm_before_fc": True}, {}),
    "narrower-than-target": (
        {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 16, "target_hidden_size": H},
        {"own_embedding": True},
    ),
    "two-layers-two-taps": (
        {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "num_hidden_layers": 2,
            "eagle_aux_hidden_state_layer_ids": [0, 7],
        },
        {"first": "layers.0", "taps": (0, 7)},
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", list(EAGLE3))
@pytest.mark.parametrize("prefix", ["", "model."])
def test_eagle3(name: str, prefix: str, target: Decoder, tmp_path: Path, dense_cache: Any) -> None:
    changes, more = EAGLE3[name]
    taps = more.get("taps", (2, 4, 5))
    config = SHAPE | changes
    known = config | {"taps": taps}
    tensors = eagle3_tensors(known, more.get("first", "midlayer"), more.get("own_embedding", False))
    stored = {n if n in ("lm_head.weight", "d2t", "t2d") else prefix + n: t for n, t in tensors.items()}
    folder = write(tmp_path / "head", config, stored)
    assert is_head(folder)
    head = load_head(folder, target, "cpu", torch.float32)
    assert head.taps == taps
    reference = Reference(
        tensors, known, tensors.get("embed_tokens.weight", target.embedding), tensors["lm_head.weight"]
    )
    tapped = torch.randn(5, len(taps) * H)
    torch.testing.assert_close(head.fuse(tapped).double(), eagle3_fuse(reference, tapped), atol=1e-4, rtol=1e-4)
    seen = entries(config["hidden_size"])
    forward = partial(eagle3, reference, first=more.get("first", "midlayer"))
    check_chain(head, forward, partial(eagle3_logits, reference), seen, dense_cache)
    if "d2t" in tensors:
        assert torch.equal(head.draft_to_target, tensors["t2d"].nonzero()[:, 0])
    else:
        assert head.draft_to_target is None


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("before", [True, False])
def test_eagle3_in_speculators_layout(
    family: str, before: bool, target: Decoder, tmp_path: Path, dense_cache: Any
) -> None:
    layer = SHAPE | {"model_type": family}
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        "draft_vocab_size": VD,
        "norm_before_residual": before,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
    }
    known = layer | {"taps": (1, 3, 6), "draft_vocab_size": VD, "norm_before_residual": before}
    tensors = eagle3_tensors(known, "layers.0", own_embedding=True)
    head = load_head(write(tmp_path / "head", config, tensors), target, "cpu", torch.float32)
    assert head.taps == (1, 3, 6)
    reference = Reference(tensors, known, tensors["embed_tokens.weight"], tensors["lm_head.weight"])
    forward = partial(eagle3, reference, first="layers.0")
    check_chain(head, forward, partial(eagle3_logits, reference), entries(H), dense_cache)


@torch.no_grad()
@pytest.mark.parametrize(
    ("changes", "bias"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, True),
        ({"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 2}, False),
        ({"architectures": ["Qwen2ForCausalLMEagle"], "model_type": "qwen2"}, False),
    ],
)
def test_eagle(changes: dict[str, Any], bias: bool, target: Decoder, tmp_path: Path, dense_cache: Any) -> None:
    config, new = SHAPE | changes, draw()
    tensors = {"fc.weight": new(H, 2 * H)} | ({"fc.bias": new(H)} if bias else {})
    for i in range(config["num_hidden_layers"]):
        tensors |= layer_tensors(f"layers.{i}", config, H, new)
    del tensors["layers.0.input_layernorm.weight"]
    if bias:
        tensors["embed_tokens.weight"] = new(V, H)
    folder = write(tmp_path / "head", config, tensors)
    assert is_head(folder)
    head = load_head(folder, target, "cpu", torch.float32)
    assert head.taps == (LAYERS,)
    assert head.draft_to_target is None
    reference = Reference(tensors, config, tensors.get("embed_tokens.weight", target.embedding), torch.empty(0))
    tapped = torch.randn(3, H)
    assert torch.equal(head.fuse(tapped), tapped)

    def scores(hidden: Tensor) -> Tensor:
        return target.logits(hidden.float()).double()

    check_chain(head, partial(eagle, reference), scores, entries(H), dense_cache)


@torch.no_grad()
@pytest.mark.parametrize("naming", ["mimo", "deepseek", "speculators"])
def test_mtp(naming: str, target: Decoder, tmp_path: Path, dense_cache: Any) -> None:
    new, config = draw(), SHAPE | {"num_nextn_predict_layers": 1, "num_hidden_layers": LAYERS}
    if naming == "mimo":
        layer, forward = "model.mtp_layers.0", partial(plain_mtp, hidden_first=True)
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    elif naming == "deepseek":
        layer, forward = f"model.layers.{LAYERS}", nextn
        config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    else:
        layer, forward = "mtp_layers.0", partial(plain_mtp, hidden_first=False)
        inner = config | {"model_type": "qwen3", "num_hidden_layers": 1}
        config = {"speculators_model_type": "mtp", "transformer_layer_config": inner}
    known = config.get("transformer_layer_config", config)
    known = known | {"model_type": "qwen2"} if naming == "mimo" else known
    tensors = layer_tensors(layer, known, H, new)
    if naming == "deepseek":
        names, fc = ("enorm", "hnorm", "shared_head.norm"), "eh_proj"
        same = {"embed_tokens": new(V, H), "shared_head.head": new(V, H)}
        copies = {f"{layer}.{name}.weight": tensor for name, tensor in same.items()}
        copies |= {"model.embed_tokens.weight": same["embed_tokens"].clone()}
        copies |= {"lm_head.weight": same["shared_head.head"].clone()}
    else:
        names, fc = ("token_layernorm", "hidden_layernorm", "final_layernorm"), "input_proj"
        copies = {}
    tensors |= {f"{layer}.{name}.weight": new(H, about=1.0) for name in names}
    tensors[f"{layer}.{fc}.weight"] = new(H, 2 * H)
    # The head may lie in the target's own folder, among the target's tensors.
    whole = {"model.norm.weight": new(H), "model.layers.0.mlp.up_proj.weight": new(40, H)}
    folder = write(tmp_path / "model", config, tensors | copies | (whole if naming != "speculators" else {}))
    assert is_head(folder) == (naming == "speculators")
    head = load_head(folder, target, "cpu", torch.float32)
    assert (head.taps, head.num_layers) == ((LAYERS,), 1)
    reference = Reference(tensors, known, target.embedding, torch.empty(0))

    def scores(hidden: Tensor) -> Tensor:
        return target.logits(hidden.float()).double()

    check_chain(head, partial(forward, reference, layer=layer), scores, entries(H), dense_cache)


@pytest.mark.parametrize("name", ["safeailab", "specforge"])
def test_eagle3_trains_and_leaves_the_target_alone(
    name: str, target: Decoder, tmp_path: Path, dense_cache: Any
) -> None:
    changes, more = EAGLE3[name]
    config = SHAPE | changes | {"taps": more.get("taps", (2, 4, 5))}
    folder = write(tmp_path / "head", config, eagle3_tensors(config, own_embedding="own_embedding" in more))
    head = load_head(folder, target, "cpu", torch.float32, pack=False)
    assert not any(parameter is target.embedding for parameter in head.parameters())
    assert not any(isinstance(part, Linear) and part.packed is not None for part in head.modules())
    tokens, positions = torch.arange(9), torch.arange(9)
    cache = dense_cache(head.layer_attention())
    out = head(tokens, head.fuse(torch.randn(9, 3 * H)), positions, cache.bind(positions))
    head.logits(out).log_softmax(-1)[:, 0].sum().backward()
    for parameter_name, parameter in head.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name
    assert target.embedding.grad is None


def test_the_rope_table_is_as_long_as_the_targets(target: Decoder, tmp_path: Path) -> None:
    config = SHAPE | EAGLE3["safeailab"][0] | {"taps": (2, 4, 5)}
    folder = write(tmp_path / "a", config, eagle3_tensors(config))
    head = load_head(folder, target, "cpu", torch.float32)
    assert len(head.rope_table) == len(target.rope_table) > config["max_position_embeddings"]
    same = config | {"rope_theta": 1e4}
    head = load_head(write(tmp_path / "b", same, eagle3_tensors(same)), target, "cpu", torch.float32)
    assert head.rope_table.data_ptr() == target.rope_table.data_ptr()
