"""One training run: optimizers, learning rate, loop, and its state on disk.

A run is a function of (data, options): batches come by number and the learning rate by step, so a run that was
stopped and resumed ends with the weights of a run that was not.
"""

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from peregrine.errors import ConfigError
from peregrine.log import logger
from peregrine.train.muon import Muon
from peregrine.train.options import Facts, RunOptions

STATE, LOG = "state.pt", "log.jsonl"
MAX_GRAD_NORM = 1.0
LOG_EVERY = 10
# With a time limit, the speed of the measured steps decides how many steps there will be; the first steps compile.
WARM_STEPS, MEASURED_STEPS = 10, 40
Batch = TypeVar("Batch")
Result = TypeVar("Result")


class Run(ABC, Generic[Batch]):
    """A model in training, and the folder with the run's state and log."""

    def __init__(self, model: nn.Module, options: RunOptions, folder: Path, tables: frozenset[str]) -> None:
        """Resume the run in the folder, or start one there. `tables` names matrices whose rows stand for tokens."""
        self.model, self.options, self.folder = model, options, folder
        self.device = next(model.parameters()).device
        self.optimizers = build_optimizers(model, options.weight_decay, tables)
        self.step, self.total_steps = 0, options.steps
        state = load_state(folder)
        if state is not None:
            check_same(state["options"], asdict(options), folder)
            self.step, self.total_steps = state["step"], state["total_steps"]
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(state["model"][name])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            logger.info("resumed %s at step %d of %s", folder, self.step, self.total_steps or "an unknown number")

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """Endless batches, from number `self.step` on."""

    @abstractmethod
    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and more tensors for the log."""

    @property
    @abstractmethod
    def tokens_per_step(self) -> int:
        """Tokens in one batch."""

    def after_step(self, last: bool) -> None:
        """Called after each step, before the state is saved."""

    def save(self) -> None:
        """Replace the state on disk; a kill at any moment leaves the old or the new one whole."""
        state = {
            "options": asdict(self.options),
            "step": self.step,
            "total_steps": self.total_steps,
            "model": {name: parameter.detach() for name, parameter in self.model.named_parameters()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / f"{STATE}.new"
        torch.save(state, new)
        os.replace(new, self.folder / STATE)

    def train(self) -> None:
        """Train until the last step; the log and the state are in the run's folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        mark = (self.step, began)
        batches, per_step = self.batches(), self.tokens_per_step
        if self.step == self.total_steps:
            self.save()  # a run that was killed while it ended has its state, and perhaps nothing else
        with tqdm(desc="train", initial=self.step * per_step, unit=" tokens", unit_scale=True, mininterval=1.0) as bar:
            while self.total_steps is None or self.step < self.total_steps:
                rate = learning_rate(self.options, self.step, self.total_steps)
                loss, details, norm = self._update(next(batches), rate)
                if self.total_steps is None and self.step in (WARM_STEPS, WARM_STEPS + MEASURED_STEPS):
                    mark = self._fix_total_steps(began, mark)
                bar.total = None if self.total_steps is None else self.total_steps * per_step
                bar.update(per_step)
                last = self.step == self.total_steps
                if self.step % LOG_EVERY == 0 or last:
                    facts = {"loss": loss.item(), "grad_norm": norm.item(), "rate": rate, "step": self.step}
                    facts |= {"tokens": self.step * per_step, "seconds": time.monotonic() - began}
                    self.log("train", facts | {name: tensor.tolist() for name, tensor in details.items()})
                    bar.set_postfix(loss=f"{facts['loss']:.3f}", step=self.step, refresh=False)
                self.after_step(last)
                if self.step % self.options.save_every == 0 or last:
                    self.save()

    def log(self, kind: str, facts: Mapping[str, object]) -> None:
        """Append one JSON object to the log."""
        with (self.folder / LOG).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"kind": kind, **facts}) + "\n")

    def _update(self, batch: Batch, rate: float) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """(loss, details, gradient norm before clipping) of one step."""
        loss, details = self.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach(), details, norm

    def _fix_total_steps(self, began: float, mark: tuple[int, float]) -> tuple[int, float]:
        """Turn the time limit into a number of steps, from the speed since `mark`; returns the next mark."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.monotonic()
        if self.step > WARM_STEPS:
            left = began + 60.0 * self.options.minutes - now
            self.total_steps = self.step + max(1, int(left * (self.step - mark[0]) / (now - mark[1])))
        return self.step, now


class Compiled(Generic[Result]):
    """A function of tensors, compiled on a GPU; if that fails, it goes on as it is."""

    def __init__(self, function: Callable[..., Result], device: torch.device) -> None:
        self._plain = function
        self._function = torch.compile(function, dynamic=False) if device.type == "cuda" else function

    @property
    def is_compiled(self) -> bool:
        """Whether it is, or will be at its first call."""
        return self._function is not self._plain

    def __call__(self, *tensors: Tensor) -> Result:
        if self.is_compiled:
            try:
                return self._function(*tensors)
            except Exception as error:
                logger.warning("torch.compile failed, training goes on uncompiled: %s", error)
                self._function = self._plain
        return self._plain(*tensors)


def learning_rate(options: RunOptions, step: int, total_steps: int | None) -> float:
    """The rate of a step, counted from 0: linear warm-up, constant, linear decay to zero."""
    rising = (step + 1) / (options.warmup_steps + 1)
    falling = 1.0 if total_steps is None else (total_steps - step) / max(1.0, options.decay_share * total_steps)
    return options.rate * max(0.0, min(1.0, rising, falling))


def build_optimizers(
    model: nn.Module, weight_decay: float, tables: frozenset[str] = frozenset()
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """(Muon, AdamW): Muon for matrices; AdamW for vectors and for `tables`, matrices whose rows stand for tokens."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if missing := tables - named.keys():
        raise ConfigError(f"tables={sorted(missing)}: no such parameter")
    matrices = [p for name, p in named.items() if p.dim() == 2 and name not in tables]
    vectors = [p for p in named.values() if p.dim() != 2]
    on_gpu = any(parameter.is_cuda for parameter in named.values())
    groups = [
        {"params": [named[name] for name in sorted(tables)], "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return Muon(matrices, weight_decay), torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, fused=on_gpu)


def load_state(folder: Path) -> Facts | None:
    """The state that `Run.save` wrote, on the CPU; None if there is none."""
    path = folder / STATE
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def check_same(saved: Facts, asked: Mapping[str, object], folder: Path) -> None:
    """Refuse to resume with options other than the saved ones."""
    for name, value in asked.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"{name}={value}: the run in {folder} was started with {name}={saved.get(name)}; "
                f"ask for that, or give another folder"
            )


def read_log(folder: Path, kind: str) -> list[Facts]:
    """The log's lines of one kind; if a step was repeated after a stop, only its last line."""
    path = folder / LOG
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return list({line["step"]: line for line in lines if line["kind"] == kind}.values())
