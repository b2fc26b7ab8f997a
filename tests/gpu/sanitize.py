"""A few rounds of everything, for compute-sanitizer: joins, leaves, pads, poisoned pages, chains, trees, every law.

    export PYTHONPATH=src
    compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py

The first runs eager and recorded rounds. The second gives every tensor memory of its own, so that a read one past its
end is seen; graphs cannot be recorded then, and only eager rounds run. Prints how many rounds there were.
"""

import os
from pathlib import Path
from tempfile import mkdtemp

import torch
from random_models import disturbed
from traffic import Traffic

from peregrine.engine.build import build_engine
from peregrine.llm import engine_config
from peregrine.models.random_checkpoint import make_random_checkpoint

ROUNDS, VOCAB = 24, 384
GUESSES: tuple[dict[str, object], ...] = (
    {"num_drafts": 3},
    {"tree": (3, 2, 8)},
    {"drafter": "ngram", "num_drafts": 3, "kv_dtype": "float8"},
)


@torch.inference_mode()
def run_rounds(model: Path, options: dict[str, object]) -> int:
    """Keep an engine of four rows busy on pages that hold NaN; the number of rounds it ran."""
    wanted: dict[str, object] = {"device": "cuda", "max_rows": 4, "row_sizes": (4,), "max_len": 128}
    wanted |= {"num_pages": 40, "drafter": str(disturbed(model)), "prefill_chunk": 32}
    engine = build_engine(engine_config(str(model), wanted | options)).engine
    store = engine.runner.target.store
    for held in (store.keys, store.values):
        held.copy_(torch.full_like(held, torch.nan, dtype=torch.float32))
    traffic = Traffic(engine, VOCAB, longest=40)
    for _ in traffic.rounds_of(ROUNDS):
        pass
    traffic.drain()
    torch.cuda.synchronize()
    engine.drop_cached()
    pool = engine.holdings.pool
    assert pool.num_free == pool.num_pages - 1
    assert not [output for output in traffic.finished if output.finish_reason == "error"]
    return traffic.rounds


def main() -> None:
    """Every way to guess, eager and, where memory allows it, recorded."""
    model = make_random_checkpoint(
        mkdtemp(prefix="peregrine-sanitize-"), vocab_size=VOCAB, num_layers=2, head_dim=64, dtype="bfloat16"
    )
    recorded = (False,) if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ else (False, True)
    rounds = sum(run_rounds(model, guess | {"graphs": graphs}) for guess in GUESSES for graphs in recorded)
    print(f"rounds: {rounds}")


if __name__ == "__main__":
    main()
