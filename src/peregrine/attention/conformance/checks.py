"""The properties that a backend must have, each a function from one batch of a case to the errors it finds.

All but the first compare bits. An error is given as a share of the allowed one: above 1 is a failure.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf, nan

import torch
from torch import Tensor

from peregrine.attention.backend import AttentionBackend
from peregrine.attention.conformance.cases import Case
from peregrine.attention.conformance.paging import Layout, as_stored, attend, lay_out
from peregrine.attention.conformance.problem import Row, answer, chain
from peregrine.attention.metadata import LayerAttention


@dataclass(frozen=True, slots=True)
class Trial:
    """One batch of a case and what a backend computed for it."""

    backend: AttentionBackend
    case: Case
    layer: LayerAttention
    rows: list[Row]
    outs: list[Tensor]  # outputs of the whole batch in a plain layout

    @property
    def layout(self) -> Layout:
        return Layout(self.case.page_size, kv_dtype=self.case.kv_dtype)

    def run(self, rows: list[Row], layout: Layout | None = None) -> list[Tensor]:
        """The outputs of other rows, or of another layout, in the same layer."""
        return attend(self.backend, rows, self.layer, layout or self.layout)


def start(backend: AttentionBackend, case: Case, layer: LayerAttention, rows: list[Row], device: torch.device) -> Trial:
    """Run the batch once; every check compares with this."""
    rows = [row.to(device, case.dtype) for row in rows]
    layout = Layout(case.page_size, kv_dtype=case.kv_dtype)
    return Trial(backend, case, layer, rows, attend(backend, rows, layer, layout))


def answers(trial: Trial) -> Iterator[float]:
    """Every output lies within the bound around the float64 answer."""
    for row, out in zip(trial.rows, trial.outs, strict=True):
        right = answer(as_stored(row, trial.case.kv_dtype), trial.layer, trial.case.dtype)
        share = ((out.double() - right.out).abs() / right.bound).max()
        yield float(share) if bool(out.isfinite().all()) else inf


def other_rows(trial: Trial) -> Iterator[float]:
    """A row alone gives what it gave among others."""
    for row, out in zip(trial.rows, trial.outs, strict=True):
        yield _differs(trial.run([row])[0], out)


def window_length(trial: Trial) -> Iterator[float]:
    """A query alone, or in a shorter window, gives what it gave in a longer one."""
    row, out = trial.rows[-1], trial.outs[-1]
    count = len(row.positions)
    for some in {(count - 1,), tuple(range((count + 1) // 2))}:
        yield _differs(trial.run([row.at(*some)])[0], out[list(some)])


def both_kernels(trial: Trial) -> Iterator[float]:
    """A row gives the same bits beside one of another length: a ragged batch is read by the context kernel."""
    if trial.case.is_tree:  # a tree's window is uniform
        return
    row, out = trial.rows[-1], trial.outs[-1]
    other = chain(3, len(row.positions) + 1, trial.case.heads, seed=9).to(row.q.device, row.q.dtype)
    yield _differs(trial.run([row, other])[0], out)


def tree_paths(trial: Trial) -> Iterator[float]:
    """A tree's node gives what the chain of its ancestors gives."""
    row, out = trial.rows[-1], trial.outs[-1]
    if row.words is None:
        return
    count = len(row.positions)
    for node in {count // 2, count - 1}:
        yield _differs(trial.run([row.path_to(node)])[0], out[node : node + 1])


def surroundings(trial: Trial) -> Iterator[float]:
    """NaN past every row's end and on foreign pages, spare table entries, pad rows: no bit changes."""
    odd = replace(trial.layout, spare_pages=3, poison=True, pads=1)
    yield from map(_differs, trial.run(trial.rows, odd), trial.outs)


def page_sizes(trial: Trial) -> Iterator[float]:
    """Pages of another size change no bit."""
    sizes = trial.backend.traits.page_sizes
    other = trial.case.page_size * 2
    if not trial.case.has_sinks and (sizes is None or other in sizes):
        layout = replace(trial.layout, page_size=other)
        yield from map(_differs, trial.run(trial.rows[-1:], layout), trial.outs[-1:])


def poisoned_drafts(trial: Trial) -> Iterator[float]:
    """NaN in the window's last key or value reaches the queries that see it, and no other."""
    row, out = trial.rows[-1], trial.outs[-1]
    last = len(row.k) - 1
    hit = torch.tensor([last in row.keys_of(i, trial.layer.window) for i in range(len(row.positions))])
    for part, entry in (("k", 1), ("k", -1) if row.is_shared else ("v", 1)):
        poisoned = replace(row, k=row.k.clone(), v=row.v.clone())
        (poisoned.k if part == "k" else poisoned.v)[last, :, entry] = nan
        new = trial.run([poisoned])[0]
        reached = not bool(new[hit].isfinite().all(dim=2).any())
        yield _differs(new[~hit], out[~hit]) if reached else inf


def captured(trial: Trial) -> Iterator[float]:
    """A captured call, repeated twice, gives what the call gave."""
    if not trial.outs[0].is_cuda:
        return
    forward = lay_out(trial.rows, trial.layout)
    forward.run(trial.backend, trial.layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = forward.run(trial.backend, trial.layer)
    for _ in range(2):
        for out in outs:
            out.fill_(nan)
        graph.replay()
        yield from map(_differs, outs, trial.outs)


PROPERTIES: dict[str, Callable[[Trial], Iterator[float]]] = {
    "near the float64 answer": answers,
    "rows independent of the batch": other_rows,
    "queries independent of the window": window_length,
    "decode equals context": both_kernels,
    "a tree path equals its chain": tree_paths,
    "poison, pads and spare pages change nothing": surroundings,
    "page size changes nothing": page_sizes,
    "poison in a draft reaches only queries that see it": poisoned_drafts,
    "captured equals eager": captured,
}


def _differs(a: Tensor, b: Tensor) -> float:
    """0 if the bits are the same, else infinity."""
    return 0.0 if torch.equal(a, b) else inf
