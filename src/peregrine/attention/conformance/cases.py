"""The problems that a backend is checked on: every pair of settings occurs together, in every window shape."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peregrine.attention.conformance.problem import Heads, Row, chain, tree
from peregrine.attention.metadata import LayerAttention
from peregrine.attention.traits import Traits

HEADS = ((2, 2), (4, 1), (16, 2), (20, 1), (10, 2))  # groups of 1, 4, 8, 20 (more than a tile) and 5 (odd)
HEAD_DIMS = (128, 64, 80, 96, 256)
# MLA: heads, entries of a key, entries of its value. Real sizes, and small ones that fill no tile and no vector.
MLA_SIZES = ((16, 576, 512), (128, 576, 512))
SMALL_MLA = ((4, 48, 32), (20, 72, 48))
PAGE_SIZES = (16, 32, 64)
WINDOW = 40  # a sliding window that ends inside a page and inside a block of keys
BRANCHED = (-1, 0, 0, 1, 1, 2, 3, 3, 7, 8, 0, 10)  # parents of a tree with siblings, depth 7


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the problems of a case are."""

    pasts: tuple[int, ...]  # of the rows of a batch; windows cross borders of pages and of powers of two
    q_lens: tuple[int, ...]  # of uniform windows
    ragged: tuple[tuple[int, int], ...]  # (past, q_len) of the rows of a ragged one
    nodes: int  # of the largest tree


FULL = Sizes(
    pasts=(0, 1, 63, 120, 700, 2300),
    q_lens=(1, 2, 3, 4, 5, 8, 16, 33, 64),
    ragged=((0, 150), (17, 1), (130, 5), (2050, 70)),
    nodes=64,
)
QUICK = Sizes(pasts=(125, 188), q_lens=(4,), ragged=((0, 5), (130, 2)), nodes=4)


@dataclass(frozen=True, slots=True)
class Case:
    """One setting of all that a kernel is compiled for or that a layer has."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    heads: Heads
    page_size: int
    window: int | None
    has_sinks: bool
    is_tree: bool
    sizes: Sizes

    @property
    def name(self) -> str:
        """The setting in words."""
        num_heads, num_kv_heads, head_dim, *value_dim = self.heads
        parts = [
            _short(self.dtype),
            f"kv {_short(self.kv_dtype)}" if self.kv_dtype != self.dtype else "",
            f"{num_heads}/{num_kv_heads} heads of {head_dim}",
            f"values in their first {value_dim[0]}" if value_dim else "",
            f"pages of {self.page_size}",
            f"window {self.window}" if self.window else "",
            "sinks" if self.has_sinks else "",
            "tree" if self.is_tree else "",
        ]
        return ", ".join(part for part in parts if part)

    def layer(self, device: torch.device) -> LayerAttention:
        """The layer whose attention the rows compute."""
        num_heads, head_dim = self.heads[0], self.heads[2]
        sinks = torch.linspace(-1, 2, num_heads, device=device) if self.has_sinks else None
        return LayerAttention(head_dim**-0.5, self.window, sinks)

    def batches(self) -> Iterator[tuple[str, list[Row]]]:
        """Each window shape by name, and the rows of its forward."""
        if self.is_tree:
            yield from self._tree_batches()
            return
        for q_len in self.sizes.q_lens:
            yield f"window of {q_len}", [chain(past, q_len, self.heads) for past in self.sizes.pasts]
        yield "ragged", [chain(past, q_len, self.heads) for past, q_len in self.sizes.ragged]
        # A drafter stores a whole path and has a query for its live token only.
        late = [chain(past, 5, self.heads).at(i % 5) for i, past in enumerate(self.sizes.pasts[1:])]
        yield "look-ahead after absorb", late

    def _tree_batches(self) -> Iterator[tuple[str, list[Row]]]:
        branched = BRANCHED[: self.sizes.nodes]
        yield "branched tree", [tree(past, branched, self.heads) for past in self.sizes.pasts]
        if self.sizes.nodes > len(BRANCHED):
            rng = torch.Generator().manual_seed(3)
            parents = [-1] + [int(torch.randint(i, (), generator=rng)) for i in range(1, self.sizes.nodes)]
            yield "random tree", [tree(past, parents, self.heads) for past in self.sizes.pasts]
            # A node sees all its ancestors, so a path longer than the sliding window equals no chain.
            line = range(-1, min(self.sizes.nodes, self.window or self.sizes.nodes) - 1)
            yield "tree that is a chain", [tree(past, line, self.heads) for past in self.sizes.pasts[-2:]]


def conformance_cases(traits: Traits, dtypes: Sequence[torch.dtype], quick: bool = False) -> list[Case]:
    """Cases within the traits: each pair of settings occurs in one. Quick: small cases; each setting occurs in one."""
    settings: list[Sequence[object]] = [
        [dim for dim in HEAD_DIMS if traits.head_dims is None or dim in traits.head_dims],
        HEADS,
        [(d, kv) for d in dtypes for kv in (d, torch.float8_e4m3fn) if kv in traits.kv_dtypes],
        [size for size in PAGE_SIZES if traits.page_sizes is None or size in traits.page_sizes],
        [None, WINDOW] if traits.windows else [None],
        [False, True] if traits.sinks else [False],
        [False, True] if traits.tree_masks else [False],
    ]
    choices = _firsts(_pairs(settings)) if quick else _pairs(settings)
    cases = [_case(choice, QUICK if quick else FULL) for choice in choices]
    return cases + _mla_cases(traits, dtypes, quick)


def _mla_cases(traits: Traits, dtypes: Sequence[torch.dtype], quick: bool) -> list[Case]:
    """Cases whose keys hold their values; only small ones if quick."""
    shapes = SMALL_MLA if quick else (*MLA_SIZES, *SMALL_MLA)
    sizes = [shape for shape in shapes if traits.mla_dims is None or shape[1] in traits.mla_dims]
    if not sizes:
        return []
    settings: list[Sequence[object]] = [
        sizes,
        dtypes,
        [size for size in PAGE_SIZES if traits.page_sizes is None or size in traits.page_sizes],
        [False, True] if traits.tree_masks else [False],
    ]
    choices = _firsts(_pairs(settings)) if quick else _pairs(settings)
    return [
        Case(dtype, dtype, (num_heads, 1, *dims), page_size, None, False, is_tree, QUICK if quick else FULL)
        for (num_heads, *dims), dtype, page_size, is_tree in choices
    ]


def _case(choice: tuple[Any, ...], sizes: Sizes) -> Case:
    head_dim, heads, (dtype, kv_dtype), page_size, window, has_sinks, is_tree = choice
    return Case(dtype, kv_dtype, (*heads, head_dim), page_size, window, has_sinks, is_tree, sizes)


def _firsts(choices: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The choices in which some value of some setting occurs for the first time."""
    known: set[tuple[int, object]] = set()
    kept = []
    for choice in choices:
        if not known.issuperset(enumerate(choice)):
            kept.append(choice)
            known.update(enumerate(choice))
    return kept


def _pairs(settings: list[Sequence[object]]) -> list[tuple[Any, ...]]:
    """Choices in which every pair of values of two settings occurs; found greedily, so not the fewest possible."""
    missing = {
        (i, a, j, b)
        for (i, one), (j, other) in itertools.combinations(enumerate(settings), 2)
        for a, b in itertools.product(one, other)
    }
    everything = list(itertools.product(*settings))
    choices = []
    while missing:
        gains = [len(_pairs_of(choice) & missing) for choice in everything]
        best = everything[gains.index(max(gains))]
        missing -= _pairs_of(best)
        choices.append(best)
    return choices


def _pairs_of(choice: Sequence[object]) -> set[tuple[int, object, int, object]]:
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(choice), 2)}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
