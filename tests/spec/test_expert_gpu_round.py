"""Rounds of a model with MLA, experts and a prediction layer on GPU kernels, in Triton's interpreter."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from kernels.interpreted import needs_interpreter, send_models_to_triton, send_to_triton
from peregrine.sampling import SamplingParams
from peregrine.synthetic.checkpoint import make_random_checkpoint
from spec.expert_models import with_prediction_layer
from spec.harness import Case, build, run, tokens

pytestmark = [needs_interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

GUESSES: dict[str, dict[str, object]] = {"chain": {"num_drafts": 2}, "tree": {"tree": (2, 2, 4)}}
SOME = [
    Case((5, 6, 7, 8, 9), SamplingParams(temperature=0.0, max_tokens=4)),
    Case((11, 12), SamplingParams(temperature=1.0, seed=3, max_tokens=3)),
]


@cache
def small() -> Path:
    """A small model whose sizes suit matrix instructions."""
    model = make_random_checkpoint(
        mkdtemp(prefix="peregrine-small-mla-"),
        vocab_size=300,
        hidden_size=32,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        max_positions=128,
        kv_rank=16,
        q_rank=16,
        num_experts=4,
        expert_size=16,
    )
    return with_prediction_layer(model)


@pytest.mark.parametrize("guess", GUESSES)
@torch.inference_mode()
def test_a_prediction_layer_changes_no_token(guess: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against plain decoding by the CPU kernels."""
    plain = tokens(run(build(small()).engine, SOME))
    send_models_to_triton(monkeypatch)
    send_to_triton(monkeypatch)
    options: dict[str, object] = {"attention": "triton", "num_pages": 40, "max_rows": 2, "drafter": "mtp"}
    engine = build(small(), **options, **GUESSES[guess]).engine
    assert not engine.runner.target.decoder.head.packed.is_recordable, "the CPU kernels were used"
    assert tokens(run(engine, SOME)) == plain
