"""Merlin and its head from a folder of text: tokenizer, target, samples, head."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from peregrine.hardware import resolve_device
from peregrine.train.data import MERLIN_SHARES, find_sources
from peregrine.train.head_report import REPORT
from peregrine.train.head_run import HeadOptions
from peregrine.train.make_head import HeadOrder, make_head
from peregrine.train.merlin import Workshop, make_target
from peregrine.train.pretrain import Options
from peregrine.train.requests import with_requests
from peregrine.train.sampling import SamplingPlan
from peregrine.train.shape import Shape

DRAFT_VOCAB = "4096"
GPU_ROWS, CPU_ROWS = 512, 32
HEAD_FILES = ("config.json", "model.safetensors")


@dataclass(frozen=True, slots=True)
class MerlinOrder:
    """What is asked for; the defaults are the recipe."""

    workshop: Workshop
    options: Options
    head_tokens: int
    head_steps: int
    device: str = "auto"
    shape: Shape = field(default_factory=Shape)
    draft_vocab: str = DRAFT_VOCAB
    max_tokens: int = 224
    longest_prompt: int = 192
    text_tokens: int = 11_000_000


def make_merlin(order: MerlinOrder) -> None:
    """Writes the target into the workshop's `out` and the head into `eagle3` inside it."""
    workshop, device = order.workshop, resolve_device(order.device)
    if not (workshop.out / "model.safetensors.index.json").exists():
        make_target(workshop, order.shape, order.options, device)
    made = workshop.work / "head"
    rows = CPU_ROWS if device.type == "cpu" else GPU_ROWS
    make_head(
        HeadOrder(
            target=str(workshop.out),
            data=(workshop.data,),
            out=made,
            plan=SamplingPlan(order.head_tokens, order.max_tokens, order.longest_prompt, rows, 0, None),
            options=HeadOptions(steps=order.head_steps),
            draft_vocab=order.draft_vocab,
            device=order.device,
            text_tokens=order.text_tokens,
            sources=tuple(with_requests(find_sources(workshop.data, MERLIN_SHARES))),
        )
    )
    publish(made, workshop.out / "eagle3")


def publish(made: Path, folder: Path) -> None:
    """Copies the head to where the engine looks for it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*HEAD_FILES, REPORT):
        shutil.copyfile(made / name, folder / name)
