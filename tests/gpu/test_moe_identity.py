"""Identity on a GPU for models with experts, with and without MLA: in bfloat16 nothing changes a token.

The checks of test_identity.py and test_round.py for dense models, and with such checkpoints' own drafter: a prediction
layer (MTP), in chains and trees.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu.random_models import VOCAB, deepseek, disturbed, qwen3_moe
from gpu.test_identity import TREE, build, cases, count_equal, preempted, read_on, right_drafts, runs_of
from gpu.test_round import cases_of, facts, no_waits
from gpu.traffic import Traffic
from peregrine.engine import engine as engine_module
from peregrine.engine.engine import Engine
from peregrine.engine.runner import VARIANTS
from spec.harness import check_pages, run, tokens

__all__ = ["no_waits"]  # a fixture

Model = Callable[[], Path]
either_model = pytest.mark.parametrize("model", [deepseek, qwen3_moe], ids=["deepseek", "qwen3-moe"])
GUESSES: dict[str, dict[str, object]] = {"chain": {"num_drafts": 3}, "tree": {"tree": (3, 3, 10)}}
either_guess = pytest.mark.parametrize("guess", GUESSES)
MTP: dict[str, object] = {"drafter": "mtp"}
# Additional runs for checkpoints with a prediction layer.
MTP_RUNS = [
    *((f"mtp, chain of {k}, 16 rows", MTP | {"num_drafts": k, "page_size": 64}) for k in (1, 2, 3)),
    ("mtp, chain of 3, alone", MTP | {"num_drafts": 3, "max_rows": 1}),
    ("mtp, tree, 16 rows", MTP | {"tree": TREE}),
    ("mtp, tree, 16 rows, eager", MTP | {"tree": TREE, "graphs": False, "row_sizes": None}),
]


def drafter_of(model: Model) -> str:
    """The checkpoint's own layer, or a draft model where it has none."""
    return "mtp" if model is deepseek else str(disturbed(model()))


def small_build(model: Model, **options: object) -> Engine:
    """An engine of eight rows with a drafter."""
    wanted: dict[str, object] = {"drafter": drafter_of(model), "max_rows": 8, "row_sizes": (8,)}
    return build(str(model()), **wanted | {"max_len": 512, "num_pages": 400} | options).engine


@either_model
def test_50_000_tokens_are_the_same(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    """Recorded and eager rounds, 16 rows and one, chains and trees, against plain decoding of one request at a time."""
    folder, some = str(model()), cases(VOCAB)
    expected = tokens(run(build(folder, max_rows=1).engine, some))
    assert len({tuple(row[-50:]) for row in expected}) == len(some), (
        "rows have the same text: the test would prove nothing"
    )
    compared = 0
    for name, options in runs_of(str(disturbed(model()))) + (MTP_RUNS if model is deepseek else []):
        count = 4 if options.get("max_rows") == 1 else len(some)
        outputs = run(build(folder, **options).engine, some[:count])
        compared += count_equal(name, tokens(outputs), expected[:count])
        assert "drafter" not in options or right_drafts(outputs) > 0, f"{name}: no draft was ever right"
    compared += count_equal("preempted", *preempted(folder, some, expected))
    compared += count_equal("read on", *read_on(folder, some, expected, prefix_cache=True))
    compared += count_equal("read anew", *read_on(folder, some, expected, prefix_cache=False))
    with capsys.disabled():
        print(f"\nidentity, {model.__name__}: {compared} tokens compared, no difference")
    assert compared >= 50_000


@either_model
@either_guess
def test_a_recorded_round_is_the_eager_one(model: Model, guess: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant gives the same tokens, log-probabilities and acceptance, and the same keys in all layers."""
    options = GUESSES[guess] | {"prefix_cache": False}
    recorded = small_build(model, graphs=True, **options)
    eager = small_build(model, graphs=False, row_sizes=None, **options)
    for variant in VARIANTS:
        monkeypatch.setattr(engine_module, "features_of", lambda requests, variant=variant: variant)
        results = [facts(run(engine, cases_of(variant))) for engine in (recorded, eager)]
        assert results[0] == results[1], variant
        for one, other in zip(*(held(engine) for engine in (recorded, eager)), strict=True):
            assert torch.equal(one, other), variant


def held(engine: Engine) -> list[torch.Tensor]:
    """The bytes of all pages of the target but the scratch page."""
    store = engine.runner.target.store
    return [part[:, store.page_size :].clone().view(torch.uint8) for part in store.parts]


@either_model
@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "eager"])
@torch.inference_mode()
def test_the_host_never_waits(model: Model, graphs: bool, request: pytest.FixtureRequest) -> None:
    """Requests join, leave and are aborted, with prompts in between and every sampling parameter."""
    sizes = (1, 4, 8) if graphs else None
    engine = small_build(model, graphs=graphs, row_sizes=sizes, num_pages=90, num_drafts=3)
    traffic = Traffic(engine, VOCAB, longest=200)
    for _ in traffic.rounds_of(300):  # kernels are compiled, and buffers made, at their first use
        pass
    request.getfixturevalue("no_waits")
    for _ in traffic.rounds_of(400):
        pass
    torch.cuda.set_sync_debug_mode("default")
    traffic.drain()
    assert {output.finish_reason for output in traffic.finished} == {"length", "stop", "abort"}
    check_pages(engine)


@either_model
@either_guess
@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "eager"])
def test_pages_outside_the_tables_change_nothing(model: Model, guess: str, graphs: bool) -> None:
    """NaN on the scratch page and on every unwritten page, of the target and of its drafter."""
    engine = small_build(model, graphs=graphs, prefix_cache=False, **GUESSES[guess])
    some = cases_of(VARIANTS[2])
    expected = facts(run(engine, some))
    reader = engine.runner.drafter.reader  # type: ignore[attr-defined]
    own = reader.store if model is deepseek else reader.model.store
    for store in (engine.runner.target.store, own):
        for part in store.parts:
            part.fill_(torch.nan)
    assert facts(run(engine, some)) == expected
