"""Model families: one file each, with what differs from the plain decoder and what its tensors are called.

A new family is a subclass of `Family` in a file of its own and an entry in `FAMILIES`. What the decoder
cannot do yet becomes a field of `ModelConfig` that the decoder reads; until then the family refuses it by name.
"""

from pathlib import Path

from peregrine.models.checkpoint.config_file import read_config_file
from peregrine.models.checkpoint.folder import Fields, open_folder
from peregrine.models.checkpoint.fp8 import read_blocks
from peregrine.models.config import ModelConfig
from peregrine.models.families.deepseek import DeepseekV2, DeepseekV3
from peregrine.models.families.family import Family
from peregrine.models.families.gemma import Gemma2, Gemma3
from peregrine.models.families.glm4 import Glm, Glm4
from peregrine.models.families.glm4_moe import Glm4Moe, Glm4MoeLite
from peregrine.models.families.gpt_oss import GptOss
from peregrine.models.families.granite import Granite
from peregrine.models.families.llama import Llama
from peregrine.models.families.mistral import Mistral
from peregrine.models.families.mixtral import Mixtral
from peregrine.models.families.olmo2 import Olmo2
from peregrine.models.families.phi3 import Phi3
from peregrine.models.families.qwen2 import Qwen2
from peregrine.models.families.qwen2_moe import Qwen2MoE
from peregrine.models.families.qwen3 import Qwen3
from peregrine.models.families.qwen3_moe import Qwen3MoE
from peregrine.models.families.smollm3 import SmolLM3
from peregrine.models.rope_table import usable_positions
from peregrine.sampling import MAX_EOS_IDS

FAMILIES: tuple[Family, ...] = (
    *(Llama(), Mistral(), Qwen2(), Qwen3(), Qwen3MoE(), Mixtral(), DeepseekV2(), DeepseekV3()),
    *(Granite(), SmolLM3(), Phi3(), Qwen2MoE(), Olmo2(), Glm(), Glm4(), Glm4Moe(), Glm4MoeLite()),
    *(Gemma2(), Gemma3(), GptOss()),
)
ARCHITECTURES = {architecture: family for family in FAMILIES for architecture in family.architectures}
MAX_LAYERS = 1024
MAX_POSITIONS = 2**24  # float32 counts exactly up to here
MAX_VOCABULARY = 2**23  # a row's probabilities sum to 64 bits
ACTIVATIONS = ("silu", "swish")
_QUANTIZED = ("compression_config", "quantize_config")


def read_config(folder: str | Path) -> ModelConfig:
    """The config of a checkpoint folder or GGUF file; generation_config.json wins for the special token ids."""
    path = open_folder(folder)
    fields, generation = read_config_file(path), path / "generation_config.json"
    return parse_config(fields, Fields.read(generation) if generation.exists() else None)


def parse_config(fields: Fields, generation: Fields | None = None) -> ModelConfig:
    """The config that the fields of a config.json describe; `generation` wins for the special token ids."""
    family = _find_family(fields)
    _refuse_unsupported(fields, family)
    num_layers = fields.whole("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = fields.whole("num_attention_heads")
    num_kv_heads = fields.whole("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.refusal(
            "num_key_value_heads", f"does not divide num_attention_heads={num_heads}", "correct the config"
        )
    hidden_size = fields.whole("hidden_size")
    declared = fields.whole("max_position_embeddings", 2048, maximum=MAX_POSITIONS)
    rope = family.rope(fields, declared)
    positions, vocab_size = usable_positions(rope, declared), fields.whole("vocab_size", maximum=MAX_VOCABULARY)
    if positions > MAX_POSITIONS:
        raise fields.refusal("rope_scaling", f"stretches the context to {positions} positions", "correct the config")
    mla, biases = family.mla(fields, rope), family.biases(fields)
    head_dim = family.head_dim(fields, hidden_size, num_heads) if mla is None else mla.q_dim
    if mla is None and rope.rotated(head_dim) % 2:
        problem = f"rotates {rope.rotated(head_dim)} of {head_dim} entries of a head, and they are rotated in pairs"
        raise fields.refusal("partial_rotary_factor", problem, "correct the config")
    specials = generation if generation is not None else Fields(fields.source, {})
    bos_ids = (specials if "bos_token_id" in specials else fields).wholes("bos_token_id")
    return ModelConfig(
        family=family.model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", family.norm_eps),
        rope=rope,
        max_positions=positions,
        windows=family.windows(fields, num_layers),
        tied=fields.flag("tie_word_embeddings", family.tied),
        qkv_bias=biases.qkv,
        out_bias=biases.out,
        mlp_bias=biases.mlp,
        qk_norm=family.norms_heads(fields),
        mla=mla,
        experts=family.experts(fields, num_layers),
        num_extra_layers=fields.whole("num_nextn_predict_layers", 0, minimum=0, maximum=MAX_LAYERS),
        bos_id=bos_ids[0] if bos_ids else None,
        eos_ids=read_eos_ids(specials if "eos_token_id" in specials else fields, vocab_size),
        scales=family.scales(fields),
        layer_ropes=family.layer_ropes(fields, rope, num_layers),
        activation=family.activation,
        input_norms="input_norm" in family.norms,
        output_norms="mlp_out_norm" in family.norms,
        whole_qk_norm=family.whole_qk_norm,
        sinks=family.sinks,
    )


def read_eos_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """The `eos_token_id` field: tokens of the vocabulary, as many as a request has room for beside its own."""
    ids = tuple(dict.fromkeys(fields.wholes("eos_token_id")))
    if max(ids, default=0) >= vocab_size:
        raise fields.refusal("eos_token_id", f"ids run from 0 to {vocab_size - 1}", "name tokens of the vocabulary")
    if len(ids) > MAX_EOS_IDS:
        raise fields.refusal("eos_token_id", f"{len(ids)} ids are more than {MAX_EOS_IDS}", "name fewer")
    return ids


def family_of(config: ModelConfig) -> Family:
    """The family that a config was read by."""
    return next(family for family in FAMILIES if family.model_type == config.family)


def _find_family(fields: Fields) -> Family:
    supported = f"supported are {', '.join(ARCHITECTURES)}"
    architectures, model_type = fields.texts("architectures"), fields.text("model_type", "")
    if not architectures:
        for family in FAMILIES:
            if family.model_type == model_type:
                return family
        raise fields.refusal("architectures", f"the config names no architecture; {supported}", "add the field")
    for architecture in architectures:
        if architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture]
    raise fields.refusal("architectures", f"not supported; {supported}", "choose a checkpoint of one of those")


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    for name in _QUANTIZED:
        if name in fields:
            raise fields.refusal(
                name, "quantized weights are not supported", "use the float32, float16 or bfloat16 checkpoint"
            )
    read_blocks(fields)
    if family.activation == "silu" and fields.text("hidden_act", "silu") not in ACTIVATIONS:
        supported = ", ".join(ACTIVATIONS)
        raise fields.refusal("hidden_act", f"not supported; supported are {supported}", "choose another checkpoint")
