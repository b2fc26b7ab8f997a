"""Rounds of every kind for compute-sanitizer: joins, leaves, pads, NaN pages, chains, trees, all sampling parameters.

    export PYTHONPATH=src
    compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py
    compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py moe
    compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py block
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py

The model is dense, or has MLA, experts and a prediction layer (`moe`); `block` runs DFlash and DSpark heads for a dense
one. Eager and recorded rounds run.
The last line gives every tensor memory of its own, so that an out-of-bounds read is seen; graphs cannot be recorded
then, and only eager rounds run. Prints the number of rounds of each drafter.
"""

import argparse
import os
import sys
from pathlib import Path
from tempfile import mkdtemp

import torch

from peregrine.engine.build import build_engine
from peregrine.llm import engine_config
from peregrine.models.draft_heads import save_head
from peregrine.models.loading import load_decoder
from peregrine.synthetic.checkpoint import make_random_checkpoint
from peregrine.train.block import fresh_block_head
from peregrine.train.options import HeadOptions, HeadOrder

sys.path.append(str(Path(__file__).parents[1]))

from gpu.random_models import disturbed
from gpu.traffic import Traffic
from spec.expert_models import with_prediction_layer

ROUNDS, VOCAB = 24, 384
Options = dict[str, object]
GUESSES: dict[str, tuple[Options, ...]] = {
    "dense": ({"num_drafts": 3}, {"tree": (3, 2, 8)}, {"drafter": "ngram", "num_drafts": 3, "kv_dtype": "float8"}),
    "block": (
        {"drafter": "dflash", "num_drafts": 4},
        {"drafter": "dspark", "num_drafts": 4},
        {"drafter": "dspark", "tree": (3, 2, 8)},
    ),
    "moe": (
        {"num_drafts": 3},
        {"drafter": "mtp", "num_drafts": 2},
        {"drafter": "mtp", "tree": (3, 2, 8)},
        {"drafter": "ngram", "num_drafts": 3},
    ),
}
# Beyond what is common to all.
DENSE = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 256}
SIZES: dict[str, dict[str, int]] = {
    "dense": DENSE,
    "block": DENSE,
    "moe": DENSE | {"kv_rank": 128, "q_rank": 128, "rope_dim": 64, "num_experts": 8},
}


@torch.inference_mode()
def run_rounds(model: Path, options: dict[str, object]) -> int:
    """Keep an engine of four rows busy on pages that hold NaN; the number of rounds it ran."""
    wanted: dict[str, object] = {"device": "cuda", "max_rows": 4, "row_sizes": (4,), "max_len": 128}
    wanted |= {"num_pages": 40, "drafter": str(disturbed(model)), "prefill_chunk": 32}
    engine = build_engine(engine_config(str(model), wanted | options)).engine
    for held in engine.runner.target.store.parts:
        held.copy_(torch.full_like(held, torch.nan, dtype=torch.float32))
    traffic = Traffic(engine, VOCAB, longest=40)
    for _ in traffic.rounds_of(ROUNDS):
        pass
    traffic.drain()
    torch.cuda.synchronize()
    engine.drop_cached()
    pool = engine.ledger.pool
    assert pool.num_free == pool.num_pages - 1
    assert not [output for output in traffic.finished if output.finish_reason == "error"]
    return traffic.rounds


def make_model(kind: str) -> Path:
    """A small random model of the kind."""
    folder = mkdtemp(prefix="peregrine-sanitize-")
    model = make_random_checkpoint(folder, vocab_size=VOCAB, num_layers=2, dtype="bfloat16", **SIZES[kind])
    if kind == "block":
        target = load_decoder(model, pack=False)
        for head in ("dflash", "dspark"):
            markov = {"markov_rank": 32} if head == "dspark" else {}
            order = HeadOrder("", (), model / head, kind=head, options=HeadOptions(unroll=4), **markov)
            save_head(fresh_block_head(target, (0, 1), None, order, mask_token=1), order.out, torch.bfloat16)
    return with_prediction_layer(model) if kind == "moe" else model


def main() -> None:
    """Every drafter, with eager rounds and, unless memory is uncached, recorded ones."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", choices=list(GUESSES), default="dense")
    kind = parser.parse_args().model
    model = make_model(kind)
    recorded = (False,) if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ else (False, True)
    for guess in GUESSES[kind]:
        for graphs in recorded:
            way = guess | {"graphs": graphs}
            print(f"{run_rounds(model, way)} rounds of {kind}, {way}", flush=True)


if __name__ == "__main__":
    main()
