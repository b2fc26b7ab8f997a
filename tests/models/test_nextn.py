"""The prediction layer of DeepSeek and GLM checkpoints, against transformers' own layer."""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.deepseek_fields import DEEPSEEK_FIELDS
from models.test_draft_heads import check_chain, entries
from models.test_fp8 import FP8, in_blocks
from peregrine.cache.store import KVShape
from peregrine.errors import CheckpointError
from peregrine.models.draft_heads import MTPHead, has_prediction_layer, is_head, load_head
from peregrine.models.experts import Experts
from peregrine.models.layers import MLP
from peregrine.models.loading import load_decoder

HIDDEN, LAYERS = 48, 3
LAYER = f"model.layers.{LAYERS}"
Tensors = dict[str, Tensor]


class Pair:
    """A random model, DeepSeek-V3 as a rule, and a model of one layer that becomes its prediction layer."""

    def __init__(self, write: Callable[..., Path], family: str = "DeepseekV3", **changes: Any) -> None:
        fields = DEEPSEEK_FIELDS | changes
        self.folder = write(family, seed=0, **fields)
        self.alone = write(family, seed=1, **fields | {"num_hidden_layers": 1} | self.first(fields))
        self.kind = getattr(transformers, f"{family}ForCausalLM")
        self.tensors = self.layer_tensors()

    @staticmethod
    def first(fields: dict[str, Any]) -> dict[str, Any]:
        has_experts = fields["first_k_dense_replace"] <= LAYERS
        return {"first_k_dense_replace": 1 - has_experts, "mlp_layer_types": ["sparse" if has_experts else "dense"]}

    def layer_tensors(self) -> Tensors:
        """The layer under the names it is published with."""
        generator = torch.Generator().manual_seed(2)
        stored = load_file(self.alone / "model.safetensors")
        tensors = {
            name.replace("model.layers.0", LAYER): tensor
            for name, tensor in stored.items()
            if name.startswith("model.layers.0.")
        }
        for name in ("enorm", "hnorm"):
            tensors[f"{LAYER}.{name}.weight"] = 1 + 0.3 * torch.randn(HIDDEN, generator=generator)
        tensors[f"{LAYER}.eh_proj.weight"] = 0.15 * torch.randn(HIDDEN, 2 * HIDDEN, generator=generator)
        tensors[f"{LAYER}.shared_head.norm.weight"] = stored["model.norm.weight"]
        return tensors

    def write(self, more: Tensors | None = None, **fields: Any) -> Path:
        """Write the layer into the model's folder, after the model's layers."""
        tensors = load_file(self.folder / "model.safetensors") | self.tensors | (more or {})
        save_file({name: x.contiguous() for name, x in tensors.items()}, self.folder / "model.safetensors")
        config = json.loads((self.folder / "config.json").read_text())
        config |= {"num_nextn_predict_layers": 1, **fields}
        (self.folder / "config.json").write_text(json.dumps(config))
        return self.folder

    @property
    def target(self) -> Tensors:
        return load_file(self.folder / "model.safetensors")

    @cached_property
    def layer(self) -> Any:
        return self.kind.from_pretrained(self.alone, experts_implementation="eager").double().model

    def expected(self, tokens: Tensor, hidden: Tensor, embedding: Tensor | None = None) -> Tensor:
        """The layer's output for all entries at once, without a cache, in float64."""
        embedding = self.target["model.embed_tokens.weight"] if embedding is None else embedding
        eps = self.layer.config.rms_norm_eps
        halves = [
            torch.nn.functional.rms_norm(x.double(), (HIDDEN,), self.weight(name), eps=eps)
            for x, name in ((embedding[tokens], "enorm"), (hidden, "hnorm"))
        ]
        x = torch.cat(halves, dim=1) @ self.weight("eh_proj").T
        made: Tensor = self.layer(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        return made

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{LAYER}.{name}.weight"].double()


def load(folder: Path) -> MTPHead:
    head = load_head(folder, load_decoder(folder), "cpu", torch.float32)
    assert isinstance(head, MTPHead)
    return head


CASES: dict[str, dict[str, Any]] = {
    "experts": {},
    "an MLP": {"first_k_dense_replace": LAYERS + 1},
    "queries without a rank, stretched": {
        "q_lora_rank": None,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
        },
    },
    "GLM-4.5": {"family": "Glm4Moe", "use_qk_norm": True, "head_dim": 16, "attention_bias": True},
    "GLM-4.7-Flash": {"family": "Glm4MoeLite", "n_group": 1, "topk_group": 1},
}


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_a_layer_agrees_with_transformers(name: str, write_checkpoint: Callable[..., Path], dense_cache: Any) -> None:
    pair = Pair(write_checkpoint, **CASES[name])
    folder = pair.write()
    assert has_prediction_layer(folder)
    assert not is_head(folder)
    head = load(folder)
    shape = KVShape.of_heads(6, 16) if name == "GLM-4.5" else KVShape(1, 40, 32, shared=True)
    assert (head.taps, head.num_layers, head.kv_shape) == ((LAYERS,), 1, shape)
    assert isinstance(head.get_submodule("layers.0.mlp"), MLP if name == "an MLP" else Experts)
    output = pair.target["lm_head.weight"].double()
    check_chain(head, pair.expected, lambda hidden: hidden @ output.T, entries(HIDDEN), dense_cache)


@torch.no_grad()
@pytest.mark.parametrize("copied", [True, False])
def test_copies_of_the_targets_tensors_are_shared_and_others_read(
    copied: bool, write_checkpoint: Callable[..., Path], dense_cache: Any
) -> None:
    pair = Pair(write_checkpoint)
    embedding, output = (pair.target[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    if not copied:
        embedding, output = embedding.flip(0), output.flip(0)
    repeated = {f"{LAYER}.embed_tokens.weight": embedding, f"{LAYER}.shared_head.head.weight": output}
    head = load(pair.write(repeated))
    assert (head.embedding is None, head.head is None) == (copied, copied)

    def expected(tokens: Tensor, hidden: Tensor) -> Tensor:
        return pair.expected(tokens, hidden, embedding)

    check_chain(head, expected, lambda hidden: hidden @ output.double().T, entries(HIDDEN), dense_cache)


@torch.no_grad()
def test_a_layer_in_float8_is_dequantized(write_checkpoint: Callable[..., Path]) -> None:
    """Scales are found beside their tensors, and the layer computes with dequantized weights."""
    pair = Pair(write_checkpoint)
    scaled: Tensors = {}
    for name in [n for n, x in pair.tensors.items() if x.dim() == 2 and not n.endswith("mlp.gate.weight")]:
        held, scales, pair.tensors[name] = in_blocks(pair.tensors[name])
        scaled |= {name: held, f"{name}_scale_inv": scales}
    plain = load_head(pair.write(), load_decoder(pair.folder), "cpu", torch.float32, pack=False)
    folder = pair.write(scaled, quantization_config=FP8)
    read = load_head(folder, load_decoder(folder), "cpu", torch.float32, pack=False)
    assert len(scaled) > 20
    for (name, one), other in zip(read.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_any_other_number_of_layers_than_one_is_refused(write_checkpoint: Callable[..., Path]) -> None:
    pair = Pair(write_checkpoint)
    second = {name.replace(LAYER, "model.layers.4"): x.clone() for name, x in pair.tensors.items()}
    folder = pair.write(second, num_nextn_predict_layers=2)
    with pytest.raises(CheckpointError, match=r"2 prediction layers \(model\.layers\.3\., model\.layers\.4"):
        load(folder)


def test_tensors_that_do_not_fit_are_named(write_checkpoint: Callable[..., Path]) -> None:
    pair = Pair(write_checkpoint)
    del pair.tensors[f"{LAYER}.self_attn.kv_a_layernorm.weight"]
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.3\.self_attn\.kv_a_layernorm"):
        load(pair.write())


def test_an_eagle_head_of_mla_layers_is_refused(write_checkpoint: Callable[..., Path]) -> None:
    folder = write_checkpoint("DeepseekV3", **DEEPSEEK_FIELDS)
    target = load_decoder(folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["EagleDeepseekForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="model_type='deepseek_v3': EAGLE heads of deepseek_v3 layers"):
        load_head(folder, target, "cpu", torch.float32)
