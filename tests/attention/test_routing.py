"""A backend is chosen by its traits; a refusal gives every reason."""

from dataclasses import replace

import pytest
import torch

from peregrine.attention import Needs, Traits, choose_backend, refusals
from peregrine.attention.numba_backend import NumbaBackend
from peregrine.attention.routing import BACKENDS
from peregrine.attention.torch_backend import TorchBackend
from peregrine.errors import ConfigError

TRAITS = Traits(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    kv_dtypes=frozenset({torch.bfloat16, torch.float16}),
    page_sizes=frozenset({16, 64}),
    head_dims=frozenset({64, 128}),
    max_decode_q_len=16,
    tree_masks=False,
    windows=False,
    sinks=False,
    caps=False,
    mla_dims=frozenset(),
    automatic=True,
)
NEEDS = Needs(
    device="cuda",
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    page_size=16,
    head_dim=128,
    tree_masks=False,
    windows=False,
    sinks=False,
    caps=False,
    shared_kv=False,
)
CPU_NEEDS = replace(NEEDS, device="cpu", dtype=torch.float32, kv_dtype=torch.float32, head_dim=64)


def test_a_backend_that_fits_has_no_refusals() -> None:
    assert refusals(NEEDS, TRAITS) == []
    assert refusals(NEEDS, replace(TRAITS, devices=None, page_sizes=None, head_dims=None)) == []


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (replace(NEEDS, device="cpu"), "runs on cuda, not on cpu"),
        (replace(NEEDS, dtype=torch.float32), "computes in bfloat16, float16, not in float32"),
        (replace(NEEDS, kv_dtype=torch.float8_e4m3fn), "reads keys and values in bfloat16, float16, not float8_e4m3fn"),
        (replace(NEEDS, page_size=32), "has page sizes [16, 64], not 32"),
        (replace(NEEDS, head_dim=80), "has head dims [64, 128], not 80"),
        (replace(NEEDS, tree_masks=True), "has no tree masks; choose a chain drafter"),
        (replace(NEEDS, windows=True), "has no sliding windows, and the model has layers with one"),
        (replace(NEEDS, sinks=True), "has no attention sinks, and the model has them"),
        (replace(NEEDS, caps=True), "does not cap scores, and the model does"),
        (
            replace(NEEDS, shared_kv=True, head_dim=576),
            "reads values apart from keys, and the model's values are a part of its keys (MLA)",
        ),
    ],
)
def test_each_need_has_its_refusal(needs: Needs, reason: str) -> None:
    assert refusals(needs, TRAITS) == [reason]


def test_keys_that_hold_their_values_are_of_the_models_dtype() -> None:
    needs = replace(CPU_NEEDS, shared_kv=True, head_dim=576, kv_dtype=torch.float8_e4m3fn)
    assert refusals(needs, TorchBackend().traits) == ["reads keys that hold their values (MLA) in float32 alone"]
    fastest = "torch" if NumbaBackend().missing() else "numba"
    assert choose_backend("auto", replace(needs, kv_dtype=torch.float32)).backend.name == fastest


def test_keys_that_hold_their_values_have_sizes_of_their_own() -> None:
    needs = replace(CPU_NEEDS, shared_kv=True, head_dim=576)
    assert refusals(needs, NumbaBackend().traits) == []
    assert refusals(replace(needs, head_dim=572), NumbaBackend().traits) == ["has head dims 8, 16 .. 1024, not 572"]


def test_all_reasons_come_at_once() -> None:
    assert len(refusals(replace(NEEDS, device="cpu", dtype=torch.float32, sinks=True), TRAITS)) == 3


@pytest.mark.skipif(bool(NumbaBackend().missing()), reason="needs numba")
def test_auto_takes_numba_for_float32_on_the_cpu() -> None:
    choice = choose_backend("auto", CPU_NEEDS)
    assert choice.backend.name == "numba"
    assert choice.reasons[-1] == "numba: the first that fits"
    assert all(reason.startswith("triton: ") for reason in choice.reasons[:-1])


def test_auto_never_takes_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("peregrine.attention.triton_backend.TRITON_PRESENT", True)
    choice = choose_backend("auto", CPU_NEEDS)
    assert choice.backend.name != "triton"
    assert choice.reasons[0] == "triton: is interpreted, which is for tests; ask for it by name"
    assert choose_backend("triton", CPU_NEEDS).backend.name == "triton"


def test_auto_takes_triton_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("peregrine.attention.triton_backend.TRITON_PRESENT", True)
    assert choose_backend("auto", NEEDS).reasons == ("triton: the first that fits",)


def test_auto_without_triton_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("peregrine.attention.triton_backend.TRITON_PRESENT", False)
    choice = choose_backend("auto", NEEDS)
    assert choice.backend.name == "torch"
    assert choice.reasons[0] == "triton: needs triton, which comes with CUDA builds of torch"


def test_auto_says_why_numba_was_passed_over() -> None:
    choice = choose_backend("auto", replace(CPU_NEEDS, dtype=torch.bfloat16, head_dim=20))
    assert choice.backend.name == "torch"
    assert choice.reasons[-1] == "torch: the first that fits"
    assert "numba: computes in float32, not in bfloat16" in choice.reasons
    assert "numba: has head dims 8, 16 .. 1024, not 20" in choice.reasons


def test_auto_without_numba_falls_to_torch_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peregrine.attention.numba_backend.NUMBA_PRESENT", False)
    choice = choose_backend("auto", CPU_NEEDS)
    assert choice.backend.name == "torch"
    assert any("needs numba" in reason for reason in choice.reasons)
    with pytest.raises(ConfigError, match="pip install numba"):
        choose_backend("numba", CPU_NEEDS)


def test_a_named_backend_is_taken_or_refused_but_never_replaced() -> None:
    assert choose_backend("torch", CPU_NEEDS).backend.name == "torch"
    with pytest.raises(ConfigError, match=r"numba: runs on cpu, not on cuda.*numba: computes in float32"):
        choose_backend("numba", NEEDS)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="attention='flash': no such backend; choose auto, triton, numba or torch"):
        choose_backend("flash", CPU_NEEDS)


def test_backends_can_do_all_masks() -> None:
    for backend in BACKENDS:
        assert backend.traits.tree_masks
        assert backend.traits.windows
        assert backend.traits.sinks
