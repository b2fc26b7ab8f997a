"""Merlin and its draft head from a folder of text. Each stage is skipped if its output exists."""

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from peregrine.hardware import resolve_device
from peregrine.log import logger
from peregrine.models.checkpoint.plan import Plan
from peregrine.models.families import read_config
from peregrine.models.loading import decoder_plan
from peregrine.train.documents import MERLIN_SHARES, Source, find_sources, sample_texts
from peregrine.train.make_head import make_head
from peregrine.train.merlin.pretrain import Pretraining, PretrainOptions
from peregrine.train.merlin.requests import with_requests
from peregrine.train.merlin.token_rows import HELD_OUT, TRAIN, encode_source, load_shard
from peregrine.train.merlin.tokenizer import STOP_IDS, save_tokenizer, train_tokenizer
from peregrine.train.options import HeadOptions, HeadOrder, SamplingPlan
from peregrine.train.report import REPORT

TOKENIZER_BYTES = 60_000_000
SHARD_BYTES = 14 * 1024 * 1024
INDEX = "model.safetensors.index.json"
GPU_ROWS, CPU_ROWS = 512, 32


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama with tied embeddings, named as in config.json. Merlin is deep so that speculation pays."""

    vocab_size: int = 8192
    hidden_size: int = 320
    intermediate_size: int = 768
    num_hidden_layers: int = 10
    num_attention_heads: int = 5
    num_key_value_heads: int = 1
    head_dim: int = 64
    max_position_embeddings: int = 2048


@dataclass(frozen=True, slots=True)
class MerlinOrder:
    """What is asked for; the defaults are the recipe."""

    data: Path  # a folder of text shards
    out: Path
    work: Path  # for what is kept between stages
    options: PretrainOptions = field(default_factory=PretrainOptions)
    shape: Shape = field(default_factory=Shape)
    device: str = "auto"
    head_tokens: int = 24_000_000
    head_steps: int = 16_000
    head_rows: int = 64  # of one of its updates
    draft_vocab: str = "2048"  # of more, drafts take longer than they win on a CPU
    mlp: int = 2048  # inner size of the head's MLP
    max_tokens: int = 224
    prompt_tokens: int = 192
    text_tokens: int = 45_000_000
    eval_prompts: int = 64
    eval_tokens: int = 128


def make_merlin(order: MerlinOrder) -> None:
    """Write the target into `order.out` and its head into the folder `eagle3` in it."""
    if not (order.out / INDEX).exists():
        make_target(order)
    made, published = order.work / "head", order.out / "eagle3"
    rows = CPU_ROWS if resolve_device(order.device).type == "cpu" else GPU_ROWS
    make_head(
        HeadOrder(
            target=str(order.out),
            data=(order.data,),
            out=made,
            plan=SamplingPlan(order.head_tokens, order.max_tokens, order.prompt_tokens, rows),
            options=HeadOptions(steps=order.head_steps, batch_rows=order.head_rows),
            draft_vocab=order.draft_vocab,
            mlp=order.mlp,
            device=order.device,
            eval_prompts=order.eval_prompts,
            eval_tokens=order.eval_tokens,
            text_tokens=order.text_tokens,
        )
    )
    published.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", REPORT):
        shutil.copyfile(made / name, published / name)


def make_target(order: MerlinOrder) -> None:
    """Write a trained target in Hugging Face format into `order.out`."""
    sources = find_sources(order.data, MERLIN_SHARES)
    write_configs(order.shape, order.out)
    tokenizer = make_tokenizer(sources, order.out, order.shape)
    sources = with_requests(sources)
    for source in sources:
        encode_source(source, tokenizer, order.work / "tokens")
    train, held_out = (
        [load_shard(source, order.work / "tokens", split) for source in sources] for split in (TRAIN, HELD_OUT)
    )
    config, device = read_config(order.out), resolve_device(order.device)
    run = Pretraining(config, order.options, order.work / "target", device, train, held_out)
    run.train()
    write_sharded(stored_tensors(run.decoder, decoder_plan(config)), order.out)
    logger.info("the target is in %s", order.out)


def make_tokenizer(sources: list[Source], folder: Path, shape: Shape) -> Tokenizer:
    """The folder's tokenizer, trained on a sample of the sources unless it exists."""
    path = folder / "tokenizer.json"
    if not path.exists():
        texts = (text for s in sources for text in sample_texts(s, int(s.share * TOKENIZER_BYTES)))
        save_tokenizer(train_tokenizer(texts, shape.vocab_size), folder, shape.max_position_embeddings)
    return Tokenizer.from_file(str(path))


def write_configs(shape: Shape, folder: Path) -> None:
    """Write config.json and generation_config.json."""
    generation = {"eos_token_id": list(STOP_IDS), "pad_token_id": STOP_IDS[0]}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        **generation,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n")


def stored_tensors(module: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """The module's weights under the names of its loading plan, fused matrices split."""
    tensors: dict[str, Tensor] = {}
    for name, pieces in plan.items():
        parts = torch.split(module.get_parameter(name).detach(), [piece.shape[0] for piece in pieces])
        tensors |= {piece.name: part for piece, part in zip(pieces, parts, strict=True)}
    return tensors


def write_sharded(tensors: dict[str, Tensor], folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the tensors in bfloat16 as safetensors files of at most `shard_bytes`, with their index."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = total = 0
    for name, tensor in tensors.items():
        kept = tensor.to("cpu", torch.bfloat16).contiguous()
        if shards[-1] and filled + kept.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = kept
        filled, total = filled + kept.nbytes, total + kept.nbytes
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
