"""`peregrine bench tiles`: which tile of the linear kernel is fastest for each weight of a model, on this GPU.

A tile is timed in a CUDA graph over copies of the weight that are together larger than the device's cache. Any tile
gives the same bits, so the fastest may be used; another split would not, so it is not tried.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from peregrine.bench.device import COLD_BYTES, graph_ms
from peregrine.engine.sources import open_source
from peregrine.errors import ConfigError
from peregrine.hardware import resolve_device, resolve_dtype
from peregrine.kernels.linear.cuda_tiles import hopper_plan
from peregrine.kernels.linear.tiles import HEIGHTS, Tile, kind_of, pick_split, pick_tile
from peregrine.kernels.runtime.gpu import TRITON_PRESENT, multiprocessors
from peregrine.models.layers import MLP, Linear

COLS, DEPTHS, WARPS, STAGES = (64, 128), (64, 128), (4, 8), (3, 4, 5, 6)
HOPPER_COLS, HOPPER_STAGES = ((64, 4), (128, 8), (256, 8)), (3, 4, 5, 6, 8)  # cols with their warps
SHARED_BYTES = 227 * 1024  # the most shared memory that a program has on any device
Entry = tuple[int, int, int, int]  # cols, depth, warps, stages: an entry of the tables in kernels/linear/tiles.py


@dataclass(frozen=True, slots=True, order=True)
class WeightShape:
    """A linear's outputs and inputs; a gated one has twice as many weights as outputs."""

    outputs: int
    inputs: int
    gate: bool
    on_hopper: bool = False  # Hopper's own kernel serves it, which has tiles of its own


@dataclass(frozen=True, slots=True)
class Line:
    """The times of one shape and number of rows, in microseconds."""

    shape: WeightShape
    rows: int
    chosen: Entry  # by `pick_tile`
    times: dict[Entry, float]

    @property
    def kind(self) -> str:
        """The table that `pick_tile` looks into."""
        outputs, gate = self.shape.outputs, self.shape.gate
        return kind_of(outputs, gate, pick_split(outputs, self.shape.inputs, gate))

    @property
    def fastest(self) -> Entry:
        return min(self.times, key=lambda entry: self.times[entry])

    def facts(self) -> dict[str, Any]:
        """Everything as plain values; times are fastest first."""
        fastest_us, chosen_us = self.times[self.fastest], self.times[self.chosen]
        return asdict(self.shape) | {
            "rows": self.rows,
            "kind": self.kind,
            "fastest": self.fastest,
            "fastest_us": fastest_us,
            "chosen": self.chosen,
            "chosen_us": chosen_us,
            "ratio": chosen_us / fastest_us,
            "times": [{"tile": list(entry), "us": us} for entry, us in sorted(self.times.items(), key=itemgetter(1))],
        }


def run(model: str, drafter: str, rows: Sequence[int], dtype: str) -> dict[str, Any]:
    """Measure every weight of the model and its drafter, and return everything as plain values."""
    check_rows(rows)
    if not (torch.cuda.is_available() and TRITON_PRESENT):
        raise ConfigError("bench tiles: measures CUDA devices with Triton, and there is none here")
    source, device = open_source(model), resolve_device("cuda")
    number = resolve_dtype(dtype, device, source.dtype)
    target = source.target(device, number)
    name = source.automatic_drafter()[0] if drafter == "auto" else drafter
    network = source.drafter(name)(target).network
    shapes = shapes_of([target, network] if isinstance(network, nn.Module) else [target])
    shapes = [replace(shape, on_hopper=takes_hopper(shape, number, device)) for shape in shapes]
    del target, network  # room for the copies
    num_sms = multiprocessors(device, 0)
    plan = [cell for cell in itertools.product(shapes, rows) if has_tile(*cell, num_sms)]
    bar = tqdm(plan, "measuring tiles", unit="shape", leave=False)
    lines = [measure(shape, count, lambda s, t: time_tile(s, t, number, device)) for shape, count in bar]
    return {
        "benchmark": "tiles",
        "model": model,
        "drafter": name,
        "dtype": str(number).removeprefix("torch."),
        "lines": [line.facts() for line in lines],
        "tables": best_entries(lines),
    }


def check_rows(rows: Iterable[int]) -> None:
    """Refuse a number of rows that is no tile's height."""
    for count in rows:
        if count not in HEIGHTS:
            raise ConfigError(f"rows={count}: tiles are {', '.join(map(str, HEIGHTS))} rows high; choose among those")


def shapes_of(networks: Iterable[nn.Module]) -> list[WeightShape]:
    """The shapes of all packed linears, each once."""
    parts = [part for network in networks for part in network.modules()]
    gated = {id(part.gate_up) for part in parts if isinstance(part, MLP)}
    shapes = set()
    for part in parts:
        if isinstance(part, Linear):
            gate, (outputs, inputs) = id(part) in gated, part.format.shape
            shapes.add(WeightShape(outputs // (2 if gate else 1), inputs, gate))
    return sorted(shapes)


def takes_hopper(shape: WeightShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether Hopper's own kernel serves weights of this shape."""
    # Imports triton, which is slow and may be absent.
    from peregrine.kernels.linear.triton import hopper_takes

    return hopper_takes(torch.empty(1, shape.inputs, dtype=dtype, device=device))


def has_tile(shape: WeightShape, rows: int, num_sms: int) -> bool:
    """Whether so many rows have a tile of the tables: kernels in CUDA C++ or for many rows may serve them."""
    if not shape.on_hopper:
        return True
    return hopper_plan(rows, shape.outputs, shape.inputs, shape.gate, add=False, num_sms=num_sms) is None


def candidates(shape: WeightShape, rows: int) -> list[Tile]:
    """Tiles that divide the inputs and fit into shared memory, and always the chosen one."""
    split = pick_split(shape.outputs, shape.inputs, shape.gate)
    tried = [pick_tile(rows, shape.outputs, shape.inputs, shape.gate, shape.on_hopper)]
    wide = HOPPER_COLS if shape.on_hopper else tuple(itertools.product(COLS, WARPS))
    ahead = HOPPER_STAGES if shape.on_hopper else STAGES
    for (cols, warps), depth, stages in itertools.product(wide, DEPTHS, ahead):
        num_bytes = 2 * stages * depth * (rows + cols * (2 if shape.gate else 1))
        if shape.inputs % (split * depth) == 0 and num_bytes <= SHARED_BYTES:
            tried.append(Tile(rows, cols, depth, warps, stages, split))
    return list(dict.fromkeys(tried))


def measure(shape: WeightShape, rows: int, time_us: Callable[[WeightShape, Tile], float | None]) -> Line:
    """Time all candidates; `time_us` returns None for a tile that does not fit this device."""
    timed = {entry_of(tile): time_us(shape, tile) for tile in candidates(shape, rows)}
    times = {entry: us for entry, us in timed.items() if us is not None}
    chosen = entry_of(pick_tile(rows, shape.outputs, shape.inputs, shape.gate, shape.on_hopper))
    if chosen not in times:
        raise ConfigError(
            f"bench tiles: the table's tile {chosen} does not fit this device; change kernels/linear/tiles.py"
        )
    return Line(shape, rows, chosen, times)


def entry_of(tile: Tile) -> Entry:
    return tile.cols, tile.depth, tile.warps, tile.stages


def time_tile(shape: WeightShape, tile: Tile, dtype: torch.dtype, device: torch.device) -> float | None:
    """Microseconds of one linear; None if its tile needs more than a multiprocessor has."""
    # Imports triton, which is slow and may be absent.
    from triton.runtime.errors import OutOfResources

    from peregrine.kernels.linear.triton import TritonWeight
    from peregrine.kernels.linear.triton import run as run_linear

    height = shape.outputs * (2 if shape.gate else 1)
    copies = -(-COLD_BYTES // (height * shape.inputs * dtype.itemsize))
    weights = torch.randn(copies, height, shape.inputs, device=device, dtype=dtype)
    x = torch.randn(tile.rows, shape.inputs, device=device, dtype=dtype)
    out = torch.empty(tile.rows, shape.outputs, device=device, dtype=dtype)
    squares = torch.full((tile.rows, 2), shape.inputs << 24, device=device)
    scale = (squares, 1e-5) if shape.gate else None

    def every_copy() -> list[Tensor]:
        for weight in weights:
            run_linear(x, TritonWeight(weight, None), out, scale=scale, gate=shape.gate, tile=tile)
        return [out]

    try:
        with torch.inference_mode():
            return graph_ms(every_copy, device) / copies * 1e3
    except OutOfResources:
        return None


def best_entries(lines: Iterable[Line]) -> dict[str, dict[int, Entry]]:
    """For each kind and number of rows the entry with the least total slowdown over its shapes."""
    groups: dict[tuple[str, int], list[Line]] = defaultdict(list)
    for line in lines:
        groups[line.kind, line.rows].append(line)
    tables: dict[str, dict[int, Entry]] = defaultdict(dict)
    for (kind, rows), group in groups.items():
        shared = set.intersection(*(set(line.times) for line in group)) or {group[0].fastest}
        tables[kind][rows] = min(
            sorted(shared), key=lambda entry: sum(line.times[entry] / line.times[line.fastest] for line in group)
        )
    return dict(tables)


def show(result: dict[str, Any]) -> str:
    """The result as a table, then as entries for kernels/linear/tiles.py."""
    shown = [
        f"{result['model']}, {result['drafter']}, {result['dtype']}; a tile is cols, depth, warps, stages",
        f"{'outputs':>8} {'inputs':>7} {'gate':>5} {'rows':>5} {'fastest':>18} {'us':>8} {'chosen':>18} {'us':>8} "
        f"{'ratio':>6}",
    ]
    for line in result["lines"]:
        gate = "yes" if line["gate"] else ""
        cells = [f"{line['outputs']:>8} {line['inputs']:>7} {gate:>5} {line['rows']:>5}"]
        for name in ("fastest", "chosen"):
            cells.append(f"{', '.join(map(str, line[name])):>18} {line[f'{name}_us']:>8.2f}")
        shown.append(" ".join([*cells, f"{line['ratio']:>6.3f}"]))
    name = "HOPPER_TABLES" if any(line["on_hopper"] for line in result["lines"]) else "TABLES"
    shown.append(f"for {name} in kernels/linear/tiles.py:")
    shown += [f'    "{kind}": {table},' for kind, table in result["tables"].items()]
    return "\n".join(shown)
