"""What the engine chooses for options left open: on a CPU the dtype by a measurement, where it changes no bit."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from peregrine.config import EngineConfig, TreeShape
from peregrine.engine import choices
from peregrine.engine.choices import pick_cuda_kernels, pick_dtype, pick_long_factors, round_rows
from peregrine.engine.sources import FolderSource, open_source
from peregrine.engine.window_choice import pick_tree
from peregrine.kernels.linear import measure
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.llm import engine_config
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import BlockHead
from peregrine.models.rope_table import LongScaling, Rope
from peregrine.spec.registry import DraftSource

CPU = torch.device("cpu")
BOTH = {torch.float32: 3e-3, torch.bfloat16: 2e-3}


def pick(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[torch.dtype, float], **facts: object
) -> tuple[torch.dtype, str]:
    """The choice for a model of 200 million weights or as many as `facts` say."""
    known = {"is_bfloat16": True, "weights": 2e8, "dtype": "auto", "rows": 4, "device": CPU} | facts
    monkeypatch.setattr(choices, "linear_seconds", lambda dtype, rows, inputs: seconds[dtype])
    monkeypatch.setattr(choices, "num_weights", lambda config: known["weights"])
    monkeypatch.setattr(choices, "NUMBA_PRESENT", True)
    config = SimpleNamespace(hidden_size=64)
    source = SimpleNamespace(is_bfloat16=known["is_bfloat16"], dtype=torch.bfloat16, config=config)
    asked = EngineConfig(dtype=str(known["dtype"]))
    return pick_dtype(asked, known["device"], source, known["rows"])  # type: ignore[arg-type]


def test_the_faster_dtype_is_taken_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    faster = "as stored; 1.50 times as fast as float32 at 4 rows, measured; bits are the same"
    assert pick(monkeypatch, BOTH) == (torch.bfloat16, faster)
    slower = "2.00 times as fast as bfloat16 at 1 row, measured; bits are the same"
    assert pick(monkeypatch, {torch.float32: 1e-3, torch.bfloat16: 2e-3}, rows=1) == (torch.float32, slower)


@pytest.mark.parametrize("facts", [{"is_bfloat16": False}, {"weights": 1e7}])
def test_other_weights_stay_exact_without_a_measurement(
    facts: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded weights would be another model, and which one must not depend on a clock."""
    assert pick(monkeypatch, {}, **facts) == (torch.float32, "exact on any CPU")


def test_what_is_asked_for_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick(monkeypatch, {}, dtype="float32") == (torch.float32, "asked for")
    assert pick(monkeypatch, {}, dtype="bfloat16")[0] is torch.bfloat16
    assert pick(monkeypatch, {}, device=torch.device("cuda")) == (torch.bfloat16, "as stored")


def test_rows_are_those_of_a_round() -> None:
    assert round_rows(EngineConfig(num_drafts=3), "none") == 1
    assert round_rows(EngineConfig(num_drafts=3), "ngram") == 4
    assert round_rows(EngineConfig(tree=TreeShape(4, 3, 17)), "eagle3") == 17


@pytest.mark.parametrize(("norm", "exact"), [(torch.bfloat16, True), (torch.float32, False)])
def test_one_wider_tensor_makes_a_checkpoint_inexact(norm: torch.dtype, exact: bool, tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.ones(4, 2).bfloat16(), "model.norm.weight": torch.ones(2).to(norm)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert FolderSource(tmp_path).is_bfloat16 is exact


@pytest.mark.skipif(not NUMBA_PRESENT, reason="only compiled kernels hold bfloat16")
def test_both_formats_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WEIGHTS", 1 << 12)
    assert all(measure.linear_seconds(dtype, 2, 64) > 0 for dtype in BOTH)


@pytest.mark.parametrize(("max_len", "factors"), [(24, "short factors"), (25, "long factors")])
def test_longrope_says_which_factors_it_uses(max_len: int, factors: str) -> None:
    rope = Rope(1e4, LongScaling((1.0,), (2.0,), 24, 1.0))
    found = pick_long_factors(SimpleNamespace(rope=rope), max_len)  # type: ignore[arg-type]
    assert found is not None
    assert found[0] == factors
    assert f"max_len={max_len}" in found[1]
    same = SimpleNamespace(rope=Rope(1e4, LongScaling((2.0,), (2.0,), 24, 1.0)))
    assert pick_long_factors(same, max_len) is None  # type: ignore[arg-type]


def test_whether_chains_branch() -> None:
    """Where a step ranks tokens and rounds are not recorded; a shape that is asked for is kept."""
    source = open_source("merlin")
    head, block = (DraftSource("head", object.__new__(kind)) for kind in (Decoder, BlockHead))

    def picked(draft: DraftSource, device: str = "cpu", windows: str = "auto", **options: object) -> tuple[str, str]:
        asked = engine_config("merlin", options)
        return pick_tree(asked, source.config, draft, windows, torch.device(device))

    assert picked(head)[0] == "auto"
    assert picked(head, tree=(3, 2, 8))[0] == picked(head, "cuda", "fixed", tree=(3, 2, 8))[0] == "3,2,8"
    for chain, why in (
        (picked(head, windows="fixed"), "windows are fixed"),
        (picked(head, "cuda"), "recorded for chains"),
        (picked(head, attention="triton"), "no trees of different shapes"),
        (picked(block), "block head"),
        (picked(DraftSource("ngram", None)), "looked up"),
        (picked(DraftSource("none", None)), "no drafter"),
    ):
        assert chain[0] == "chain"
        assert why in chain[1]


def test_kernels_in_cuda_follow_from_the_compiler_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "nvrtc_ready", lambda: True)
    monkeypatch.setattr(choices, "compiler_version", lambda: (13, 0))
    assert pick_cuda_kernels() == ("all", "compiled by NVRTC 13.0")
    monkeypatch.setattr(choices, "nvrtc_ready", lambda: False)
    assert pick_cuda_kernels() == (
        "none",
        "others serve, more slowly: NVRTC 12.4 or later is needed; pip install nvidia-cuda-nvrtc",
    )
