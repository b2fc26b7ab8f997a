"""One run of head training and where it stands: a function of (samples, options), so a stop changes nothing."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from peregrine.log import logger
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import Eagle3Head, save_head
from peregrine.train.checkpoint import Saved, load_state, log_line, same_options, save_state
from peregrine.train.head import Outcome, read_target, teach
from peregrine.train.optimizer import Curve, Optimizers
from peregrine.train.pretrain import UNKNOWN_STEPS, Clock
from peregrine.train.sample_rows import Rows, SampleRows

MAX_GRAD_NORM = 1.0
LOG_EVERY = 10


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What a run is started with; a resumed run must be asked for with the same."""

    batch_rows: int = 32
    steps: int | None = 3000  # None: as many as `minutes` allows
    minutes: float = 0.0
    unroll: int = 5
    step_decay: float = 0.9
    rate: float = 2e-3
    warmup_steps: int = 50
    decay_share: float = 0.8
    weight_decay: float = 0.05
    seed: int = 0
    save_every: int = 500


class HeadRun:
    """A head, its optimizers, and the folder their state is kept in."""

    def __init__(self, head: Eagle3Head, target: Decoder, options: HeadOptions, folder: Path) -> None:
        """Takes up the run in the folder where it stopped, or starts it."""
        self.head, self.target, self.options, self.folder = head, target, options, folder
        self.device = target.embedding.device
        self.optimizers = Optimizers(head, options.weight_decay, frozenset({"head.weight"}))
        self.step, self.total_steps = 0, options.steps or UNKNOWN_STEPS
        saved = load_state(folder)
        if saved is not None:
            same_options(saved.facts, asdict(options), folder)
            self.step, self.total_steps = saved.facts["step"], saved.facts["total_steps"]
            head.load_state_dict(saved.model)
            self.optimizers.restore({name: tensor.to(self.device) for name, tensor in saved.optimizer.items()})
            logger.info("resumed %s at step %d of %d", folder, self.step, self.total_steps)

    def save(self, out: Path) -> None:
        """Puts the run's state on disk, and the head as it is now into `out`."""
        facts = {**asdict(self.options), "step": self.step, "total_steps": self.total_steps}
        tensors = {name: tensor.detach() for name, tensor in self.head.named_parameters()}
        save_state(self.folder, Saved(facts, tensors, self.optimizers.tensors()))
        save_head(self.head, out, torch.bfloat16)

    def rate(self) -> float:
        """The learning rate of the next step."""
        options = self.options
        return Curve(options.rate, options.warmup_steps, self.total_steps, options.decay_share).at(self.step)


def train_head(run: HeadRun, rows: SampleRows, out: Path) -> None:
    """Trains until the last step; log and states are in the run's folder, the head in `out`."""
    options, began = run.options, time.monotonic()
    run.folder.mkdir(parents=True, exist_ok=True)
    batches = rows.batches(options.batch_rows, options.seed, skip=run.step)
    tokens_per_step = options.batch_rows * rows.row_len
    bar = tqdm(initial=run.step * tokens_per_step, desc="train", unit=" tokens", unit_scale=True, mininterval=1.0)
    clock = Clock(options.minutes, began)
    with bar:
        while run.step < run.total_steps:
            rate = run.rate()
            outcome, norm = train_step(run, next(batches), rate)
            run.step += 1
            if run.total_steps == UNKNOWN_STEPS:
                run.total_steps = clock.total_steps(run.step, run.device) or UNKNOWN_STEPS
            else:
                bar.total = run.total_steps * tokens_per_step
            bar.update(tokens_per_step)
            last = run.step == run.total_steps
            if run.step % LOG_EVERY == 0 or last:
                facts = outcome_facts(outcome) | {"grad_norm": norm.item(), "rate": rate, "step": run.step}
                facts |= {"tokens": run.step * tokens_per_step, "seconds": time.monotonic() - began}
                log_line(run.folder, {"kind": "train", **facts})
                bar.set_postfix(loss=f"{outcome.loss.item():.3f}", step=run.step, refresh=False)
            if run.step % options.save_every == 0 or last:
                run.save(out)


def train_step(run: HeadRun, rows: Rows, rate: float) -> tuple[Outcome, Tensor]:
    """(outcome, gradient norm before clipping) of one update."""
    outcome = score(run, rows)
    outcome.loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(run.head.parameters(), MAX_GRAD_NORM)
    run.optimizers.step(rate)
    return outcome, norm


def score(run: HeadRun, rows: Rows) -> Outcome:
    """What the head makes of a batch, with bfloat16 products on a GPU."""
    rows, options = rows.to(run.device), run.options
    with torch.autocast(run.device.type, torch.bfloat16, enabled=run.device.type == "cuda"):
        lesson = read_target(run.target, run.head, rows)
        return teach(run.head, rows, lesson, options.unroll, options.step_decay)


def outcome_facts(outcome: Outcome) -> dict[str, object]:
    """An outcome as plain numbers."""
    return {"loss": outcome.loss.item(), "losses": outcome.losses.tolist(), "agreement": outcome.agreement.tolist()}
