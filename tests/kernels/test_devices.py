"""Kernels are launched as the device can run them: with PDL from Hopper on, in tiles that fit its shared memory."""

import json
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from kernels.outside import output_of
from peregrine.kernels.linear.tiles import HEIGHTS, ON_H200, TABLES, Room, pick_tile
from peregrine.kernels.moe.tiles import pick_expert_tiles
from peregrine.kernels.runtime import gpu

# Shared memory per program of an A100, of an RTX 4090, and the least that Triton runs on.
SMALLER = {"a100": 163 * 1024, "rtx-4090": 99 * 1024, "turing": 64 * 1024}
SHAPES = {"plain": (6144, 4096, False), "split": (4096, 14336, False), "gated": (14336, 4096, True)}
SHAPES |= {"wide": (128256, 4096, False)}


@pytest.mark.parametrize(("generation", "interpreted", "pdl"), [(9, False, True), (8, False, False), (9, True, False)])
def test_kernels_are_launched_with_pdl_from_hopper_on(
    generation: int, interpreted: bool, pdl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, object]] = []

    class Kernel:
        def __getitem__(self, grid: object) -> object:
            return lambda *arguments, **options: asked.append(options)

    monkeypatch.setattr(gpu, "generation", lambda: generation)
    monkeypatch.setattr(gpu, "triton_interprets", lambda: interpreted)
    gpu.launch(Kernel(), (1,), pdl=True)
    gpu.launch(Kernel(), (1,))
    assert asked == [{"launch_pdl": True} if pdl else {}, {}]


def test_properties_are_those_of_the_tensors_device_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two unlike GPUs: an A100 as device 0, which is current, and an H200 as device 1."""

    class Properties(NamedTuple):
        shared_memory_per_block_optin: int
        multi_processor_count: int

    known = {0: ((8, 0), Properties(163 * 1024, 108)), 1: ((9, 0), Properties(227 * 1024, 132))}

    def index(device: torch.device | int | None = None) -> int:
        return device if isinstance(device, int) else (device.index or 0) if device is not None else 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(known))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: known[index(device)][0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: known[index(device)][1])
    for number, (capability, properties) in known.items():
        device = torch.device("cuda", number)
        assert gpu.shared_bytes.__wrapped__(device) == properties.shared_memory_per_block_optin
        assert gpu.multiprocessors(device, 1) == properties.multi_processor_count
        tensor = SimpleNamespace(is_cuda=True, device=device)
        assert gpu.is_hopper(tensor) == (capability[0] == gpu.HOPPER)  # type: ignore[arg-type]
    assert gpu.generation.__wrapped__() == 8, "kernels are compiled once per process: for the older of the two"


@pytest.mark.parametrize("device", SMALLER)
@pytest.mark.parametrize("kind", TABLES)
def test_tiles_lose_stages_where_they_do_not_fit(device: str, kind: str) -> None:
    """Only stages: height, width, depth and split stay, and with them every bit."""
    outputs, inputs, gate = SHAPES[kind]
    for rows in HEIGHTS:
        full = pick_tile(rows, outputs, inputs, gate)
        for element_bytes in (2, 4):
            room = Room(SMALLER[device], element_bytes)
            tile = pick_tile(rows, outputs, inputs, gate, room=room)
            numbers = (rows + tile.cols * (2 if gate else 1)) * tile.depth
            assert 1 <= tile.stages <= full.stages
            assert tile.stages == 1 or tile.stages * numbers * element_bytes <= room.shared_bytes
            assert (tile.rows, tile.cols, tile.depth, tile.split) == (full.rows, full.cols, full.depth, full.split)


def test_experts_tiles_fit_too() -> None:
    room = Room(SMALLER["rtx-4090"], 2)
    for pairs in (8, 512, 4096, 32768):
        for tile, each in zip(pick_expert_tiles(pairs, 64, 2048, 1408, room), (2, 1), strict=True):
            assert tile.stages == 1 or 2 * tile.stages * tile.depth * (tile.rows + each * tile.cols) <= 99 * 1024
    assert pick_expert_tiles(8, 64, 2048, 1408) == pick_expert_tiles(8, 64, 2048, 1408, ON_H200)


def test_a_cpu_counts_as_hopper_and_holds_no_hopper_tensor() -> None:
    assert gpu.shared_bytes(torch.device("cpu")) == ON_H200.shared_bytes
    assert not gpu.is_hopper(torch.zeros(1))


@pytest.mark.skipif(not gpu.TRITON_PRESENT, reason="needs triton")
def test_before_hopper_no_kernel_uses_pdl() -> None:
    """The wait instruction does not exist there: a kernel with it would not compile."""
    facts = [json.loads(line) for line in output_of("compile_ampere.py").splitlines()]
    assert len(facts) == 2
    assert all(not fact["waits"] and fact["shared"] <= SMALLER["rtx-4090"] for fact in facts)
