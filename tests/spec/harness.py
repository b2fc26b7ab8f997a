"""Engines for tests: tiny random models, drafters of every kind, and requests run by a given schedule."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peregrine.engine.build import Built, build_engine
from peregrine.engine.engine import Engine
from peregrine.engine.output import Output
from peregrine.llm import engine_config
from peregrine.sampling import SamplingParams
from peregrine.synthetic.checkpoint import make_random_checkpoint

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, CONTEXT = 300, 48, 96, 6, 2, 16, 4, 768
COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@cache
def tiny_model(seed: int = 3) -> Path:
    """A checkpoint whose text varies, small enough to run thousands of rounds."""
    return make_random_checkpoint(
        mkdtemp(prefix="peregrine-tiny-"),
        seed=seed,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_positions=CONTEXT,
    )


@cache
def mla_model() -> Path:
    """A small DeepSeek-V3: MLA with four heads and rank 32, a dense layer, then eight experts."""
    return make_random_checkpoint(
        mkdtemp(prefix="peregrine-mla-"),
        seed=5,
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        max_positions=CONTEXT,
        kv_rank=32,
        q_rank=24,
        rope_dim=8,
        num_experts=8,
    )


def copy_model(name: str, change: dict[str, Tensor], config: dict[str, object] | None = None) -> Path:
    """The tiny model with some tensors replaced or added, and some config fields."""
    weights = load_file(tiny_model() / "model.safetensors") | change
    return write_model(name, tiny_model(), weights, config or {})


def write_model(name: str, source: Path, weights: dict[str, Tensor], config: dict[str, object]) -> Path:
    """A checkpoint with these weights, and some config fields other than its source's."""
    folder = Path(mkdtemp(prefix=f"peregrine-{name}-"))
    for file in COPIED:
        (folder / file).write_bytes((source / file).read_bytes())
    fields = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors")
    return folder


def disturbed(model: Path, share: float) -> Path:
    """The model with noise in its weights: a draft model that is often right and often wrong."""
    generator = torch.Generator().manual_seed(1)
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() == 2:
            weights[name] = weight + share * weight.std() * torch.randn(weight.shape, generator=generator)
    return write_model("disturbed", model, weights, {})


@cache
def noisy_model(share: float = 0.1) -> Path:
    """The tiny model with its weights disturbed."""
    return disturbed(tiny_model(), share)


def layer_tensors(prefix: str, in_size: int, new: "Draw") -> dict[str, Tensor]:
    """One decoder layer of a draft head."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        f"{prefix}.self_attn.q_proj.weight": new(q, in_size),
        f"{prefix}.self_attn.k_proj.weight": new(kv, in_size),
        f"{prefix}.self_attn.v_proj.weight": new(kv, in_size),
        f"{prefix}.self_attn.o_proj.weight": new(HIDDEN, q),
        f"{prefix}.mlp.gate_proj.weight": new(INNER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": new(INNER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": new(HIDDEN, INNER),
        f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


class Draw:
    """Seeded random matrices."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator) * shape[-1] ** -0.5


def write_head(name: str, architecture: str, tensors: dict[str, Tensor], **fields: object) -> Path:
    folder = Path(mkdtemp(prefix=f"peregrine-{name}-"))
    config = json.loads((tiny_model() / "config.json").read_text())
    config |= {"architectures": [architecture], "num_hidden_layers": 1, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


@cache
def eagle3_head(draft_vocab: int = 200, taps: tuple[int, int, int] = (1, 2, 3)) -> Path:
    """A random EAGLE-3 head over part of the vocabulary: its drafts are bad and must change no token."""
    new = Draw(5)
    tensors = layer_tensors("midlayer", 2 * HIDDEN, new) | {
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "fc.weight": new(HIDDEN, 3 * HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": 3 * new(draft_vocab, HIDDEN),
    }
    if draft_vocab != VOCAB:
        ids = torch.randperm(VOCAB, generator=new.generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return write_head(
        "eagle3",
        "LlamaForCausalLMEagle3",
        tensors,
        draft_vocab_size=draft_vocab,
        eagle_aux_hidden_state_layer_ids=list(taps),
    )


@cache
def eagle_head() -> Path:
    """A random EAGLE head: one tap, the target's embedding and head."""
    new = Draw(6)
    tensors = layer_tensors("layers.0", HIDDEN, new) | {"fc.weight": new(HIDDEN, 2 * HIDDEN)}
    del tensors["layers.0.input_layernorm.weight"]
    return write_head("eagle", "LlamaForCausalLMEagle", tensors)


@cache
def mtp_model() -> Path:
    """The tiny model with a random prediction layer of its own."""
    new, prefix = Draw(7), f"model.layers.{LAYERS}"
    tensors = layer_tensors(prefix, HIDDEN, new) | {
        f"{prefix}.enorm.weight": torch.ones(HIDDEN),
        f"{prefix}.hnorm.weight": torch.ones(HIDDEN),
        f"{prefix}.eh_proj.weight": new(HIDDEN, 2 * HIDDEN),
        f"{prefix}.shared_head.norm.weight": torch.ones(HIDDEN),
    }
    return copy_model("mtp", tensors, {"num_nextn_predict_layers": 1})


def build(model: Path | None = None, **options: object) -> Built:
    """An engine on the tiny model; windows have a fixed shape unless asked otherwise."""
    defaults = {"num_pages": 600, "drafter": "none", "windows": "fixed"}
    return build_engine(engine_config(str(model or tiny_model()), {**defaults, **options}))


@dataclass(frozen=True)
class Case:
    """One request."""

    prompt: tuple[int, ...]
    params: SamplingParams


@torch.inference_mode()
def run(
    engine: Engine, cases: Sequence[Case], arrivals: Sequence[int] | None = None, aborts: dict[int, int] | None = None
) -> list[Output]:
    """Run every case to its end; case i arrives before step arrivals[i] and is aborted before step aborts[i]."""
    arrivals = arrivals or [0] * len(cases)
    outputs: dict[int, Output] = {}
    requests = {}
    step = 0
    pending = sorted(range(len(cases)), key=lambda i: arrivals[i])
    while pending or engine.has_work:
        while pending and arrivals[pending[0]] <= step:
            index = pending.pop(0)
            requests[index] = engine.prepare(list(cases[index].prompt), cases[index].params)
            engine.enqueue(requests[index])
        for index, when in (aborts or {}).items():
            if when == step and index in requests:
                engine.abort(requests[index])
        of = {request.id: index for index, request in requests.items()}
        for delta in engine.step():
            if delta.output is not None:
                outputs[of[delta.request_id]] = delta.output
        step += 1
    check_pages(engine)
    return [outputs[i] for i in range(len(cases))]


def check_pages(engine: Engine) -> None:
    """No page is held when nothing runs and no copy is under way: free + cached = all."""
    pool, tree, tier = engine.ledger.pool, engine.ledger.tree, engine.ledger.tier
    while tier is not None and tier.moving:
        tier.spare = 0  # copies no more pages out
        engine.ledger.settle([], idle=True)
    assert pool.num_free + (tree.num_cached if tree else 0) == pool.num_pages - 1
    if tree is not None:
        tree.clear()
        assert pool.num_free == pool.num_pages - 1


def tokens(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def accept_length(outputs: Sequence[Output]) -> float:
    return sum(o.stats.accepted for o in outputs) / sum(o.stats.rounds for o in outputs)


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 60, bands: int = 1) -> list[tuple[int, ...]]:
    """Random prompts; every third repeats itself so that look-up finds something.

    With several `bands`, prompts in a row have lengths from ranges that follow each other.
    """
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        length = int(torch.randint(low, high, (1,), generator=generator)) + (high - low) * (index % bands)
        drawn = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        made.append(tuple((drawn[: length // 3 + 1] * 4)[:length] if index % 3 == 0 else drawn))
    return made


# Every sampling parameter, alone and together.
PARAMS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0.7, "logit_bias": {17: 4.0, 260: -8.0, 280: 3.0}, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.5, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1, "frequency_penalty": 0.3},
)


def cases(count: int, max_tokens: int = 256, seed: int = 0, **more: object) -> list[Case]:
    """Requests that cycle through PARAMS."""
    return with_params(prompts(count, seed), max_tokens, seed, **more)


def with_params(asked: Sequence[tuple[int, ...]], max_tokens: int, seed: int = 0, **more: object) -> list[Case]:
    """A request for each prompt; they cycle through PARAMS."""
    return [
        Case(prompt, SamplingParams(**{**PARAMS[i % len(PARAMS)], "seed": seed + i, "max_tokens": max_tokens, **more}))  # type: ignore[arg-type]
        for i, prompt in enumerate(asked)
    ]
