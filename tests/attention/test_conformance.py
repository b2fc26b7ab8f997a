"""The conformance kit passes correct backends, and names the property that a faulty one breaks."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from peregrine.attention import Attend, AttentionBackend, AttentionMetadata, LayerAttention
from peregrine.attention.conformance import Case, conformance_cases, run_conformance
from peregrine.attention.conformance.cases import HEAD_DIMS, HEADS, MLA_SIZES, PAGE_SIZES, QUICK, SMALL_MLA, WINDOW
from peregrine.attention.conformance.problem import answer, chain
from peregrine.attention.torch_backend import TorchBackend
from peregrine.attention.triton_backend import ON_CUDA
from peregrine.cache.store import KVStore

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
PLAIN = Case(torch.float32, torch.float32, (4, 1, 64), 16, None, False, False, QUICK)
TREE = Case(torch.float32, torch.float32, (4, 1, 64), 16, None, False, True, QUICK)
MLA = Case(torch.float32, torch.float32, (4, 1, 48, 32), 16, None, False, False, QUICK)
MLA_TREE = Case(torch.float32, torch.float32, (4, 1, 48, 32), 16, None, False, True, QUICK)

Spoil = Callable[[KVStore, AttentionMetadata, Tensor, Tensor], Tensor]


class Spoiled(TorchBackend):
    """The torch backend with a fault in its output."""

    def __init__(self, spoil: Spoil) -> None:
        self.spoil = spoil

    def bind(self, store: KVStore, layers: Sequence[LayerAttention], metadata: AttentionMetadata) -> Attend:
        attend = super().bind(store, layers, metadata)

        def spoiled(layer: int, q: Tensor, k: Tensor, v: Tensor, rope: object = None) -> Tensor:
            return self.spoil(store, metadata, q, attend(layer, q, k, v))

        return spoiled


def broken(backend: AttentionBackend, case: Case) -> set[str]:
    """The properties that fail."""
    report = run_conformance(backend, [case], CPU)
    assert report.passed is not any(tally.failures for tally in report.tallies.values())
    return {name for name, tally in report.tallies.items() if tally.failures}


def nudged(out: Tensor, by: Tensor | float) -> Tensor:
    """A difference that a bit-for-bit comparison sees and an error bound allows."""
    return out * (1 + 2e-7 * torch.as_tensor(by))


@pytest.mark.parametrize("case", [PLAIN, TREE, MLA, MLA_TREE], ids=["plain", "tree", "mla", "mla-tree"])
def test_a_correct_backend_breaks_nothing(case: Case) -> None:
    assert broken(TorchBackend(), case) == set()


def test_no_tree_is_deeper_than_a_sliding_window() -> None:
    """A tree's nodes see all their ancestors, a chain's only the window: the two could not be compared."""
    sizes = replace(QUICK, nodes=WINDOW + 8)
    case = Case(torch.float32, torch.float32, (2, 2, 64), 32, WINDOW, True, True, sizes)
    assert "tree that is a chain" in [name for name, _ in case.batches()]
    assert broken(TorchBackend(), case) == set()


FAULTS: dict[str, tuple[Case, Spoil, str]] = {
    "a wrong output": (PLAIN, lambda store, m, q, out: out * 1.001, "near the float64 answer"),
    "a value from another row": (PLAIN, lambda store, m, q, out: out.roll(1, 0), "near the float64 answer"),
    "bits by the number of rows": (
        PLAIN,
        lambda store, m, q, out: nudged(out, m.window.num_rows - 1),
        "rows independent of the batch",
    ),
    "bits by the window's length": (
        PLAIN,
        lambda store, m, q, out: nudged(out, m.window.max_q_len),
        "queries independent of the window",
    ),
    "bits by the kernel": (
        PLAIN,
        lambda store, m, q, out: nudged(out, 0 if m.window.q_len else 1),
        "decode equals context",
    ),
    "bits of trees": (
        TREE,
        lambda store, m, q, out: nudged(out, 0 if m.ancestors is None else 1),
        "a tree path equals its chain",
    ),
    "a read of the scratch page": (
        PLAIN,
        lambda store, m, q, out: out + store.values[1, 8].sum() * 0,
        "poison, pads and spare pages change nothing",
    ),
    "bits by the page size": (
        PLAIN,
        lambda store, m, q, out: nudged(out, store.page_size),
        "page size changes nothing",
    ),
    "poison that spreads": (
        PLAIN,
        lambda store, m, q, out: out + store.values[1][m.slots].sum() * 0,
        "poison in a draft reaches only queries that see it",
    ),
    "poison that is hidden": (
        PLAIN,
        lambda store, m, q, out: out.nan_to_num(),
        "poison in a draft reaches only queries that see it",
    ),
    "a value that is no part of its key": (MLA, lambda store, m, q, out: out.roll(1, 2), "near the float64 answer"),
    "poison in a latent that is hidden": (
        MLA,
        lambda store, m, q, out: out.nan_to_num(),
        "poison in a draft reaches only queries that see it",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_named(fault: str) -> None:
    case, spoil, name = FAULTS[fault]
    assert name in broken(Spoiled(spoil), case)


def dense_cases(cases: list[Case]) -> list[Case]:
    """Cases with separate keys and values."""
    return [case for case in cases if len(case.heads) == 3]


def mla_cases(cases: list[Case]) -> list[Case]:
    """Cases whose values are the first part of their keys (MLA)."""
    return [case for case in cases if len(case.heads) == 4]


def test_every_pair_of_settings_occurs() -> None:
    cases = dense_cases(conformance_cases(ON_CUDA, FLOATS))
    stores = [(d, kv) for d in FLOATS for kv in (d, torch.float8_e4m3fn)]
    assert {(c.heads[:2], c.heads[2]) for c in cases} == {(h, d) for h in HEADS for d in HEAD_DIMS}
    assert {(c.dtype, c.kv_dtype, c.heads[2]) for c in cases} == {(*s, d) for s in stores for d in HEAD_DIMS}
    assert {(c.page_size, c.is_tree) for c in cases} == {(p, t) for p in PAGE_SIZES for t in (False, True)}
    masks = {(c.window is None, c.has_sinks) for c in cases}
    assert masks == {(a, b) for a in (False, True) for b in (False, True)}


def test_quick_cases_have_every_setting_once() -> None:
    cases = dense_cases(conformance_cases(ON_CUDA, FLOATS, quick=True))
    assert {c.heads[2] for c in cases} == set(HEAD_DIMS)
    assert {c.heads[:2] for c in cases} == set(HEADS)
    assert {c.page_size for c in cases} == set(PAGE_SIZES)
    assert {c.kv_dtype for c in cases} == {*FLOATS, torch.float8_e4m3fn}
    for setting in ([c.is_tree for c in cases], [c.has_sinks for c in cases], [c.window for c in cases]):
        assert len(set(setting)) == 2


def test_every_pair_of_settings_of_mla_occurs() -> None:
    cases = mla_cases(conformance_cases(ON_CUDA, FLOATS))
    shapes = {(heads, 1, *dims) for heads, *dims in (*MLA_SIZES, *SMALL_MLA)}
    assert {(c.heads, c.dtype) for c in cases} == {(shape, d) for shape in shapes for d in FLOATS}
    assert {(c.heads, c.page_size) for c in cases} == {(shape, p) for shape in shapes for p in PAGE_SIZES}
    assert {(c.page_size, c.is_tree) for c in cases} == {(p, t) for p in PAGE_SIZES for t in (False, True)}
    assert all(c.kv_dtype == c.dtype and c.window is None and not c.has_sinks for c in cases)
    quick = mla_cases(conformance_cases(ON_CUDA, FLOATS, quick=True))
    assert {c.heads for c in quick} == {(heads, 1, *dims) for heads, *dims in SMALL_MLA}
    assert "heads of 48, values in their first 32" in MLA.name


def test_cases_stay_within_the_traits() -> None:
    from dataclasses import replace

    poor = replace(
        *(ON_CUDA,),
        head_dims=frozenset({64}),
        page_sizes=frozenset({32}),
        kv_dtypes=frozenset({torch.float32}),
        tree_masks=False,
        windows=False,
        sinks=False,
        caps=False,
        mla_dims=frozenset(),
    )
    cases = conformance_cases(poor, [torch.float32])
    assert {(c.heads[2], c.page_size, c.window, c.has_sinks, c.is_tree) for c in cases} == {
        (64, 32, None, False, False)
    }


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bound_allows_a_few_roundings_and_no_more(dtype: torch.dtype) -> None:
    """A float64 output rounded once is within the bound; one that is off by two per cent is not."""
    row, layer = chain(60, 3, (4, 1, 64)), LayerAttention(0.125, None, torch.zeros(4))
    right = answer(row.to("cpu", dtype), layer, dtype)
    assert bool(((right.out.to(dtype).double() - right.out).abs() <= right.bound).all())
    assert not bool(((right.out * 1.02 - right.out).abs() <= right.bound).all())
    typical = (right.bound / right.out.abs().mean()).mean()
    assert typical < 64 * torch.finfo(dtype).eps + 1e-3
