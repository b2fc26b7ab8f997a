"""Options of `peregrine train head`. The command line is made from these classes, so nothing heavy is imported."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peregrine.config import MAX_DRAFTS, option
from peregrine.errors import ConfigError

AUTO, FULL = "auto", "full"
EAGLE3, DFLASH, DSPARK = KINDS = "eagle3", "dflash", "dspark"
BLOCK_LAYERS, MARKOV_RANK = 2, 128
STAGES = "prompts", "samples"  # what is made before a head is trained
STAGES_FOLDER = "stages"  # in the folder of a head
Facts = dict[str, Any]


def check_least(least: float, **values: float | None) -> None:
    """Refuse numbers below `least`, and what is no finite number; None is left out."""
    for name, value in values.items():
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"{name}={value}: must be at least {least:g}")


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How much text the target samples for training, and how."""

    tokens: int = option(2_000_000, "to sample, without prompts", "N")
    max_tokens: int = option(224, "of one sample", "N")
    prompt_tokens: int = option(192, "of a prompt at most", "N")
    rows: int = option(32, "requests sampled together; on a GPU the default is 512", "N")
    sample_minutes: float | None = option(None, "stop sampling after this long", "M")
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(1, tokens=self.tokens, max_tokens=self.max_tokens, prompt_tokens=self.prompt_tokens, rows=self.rows)
        check_least(0, sample_minutes=self.sample_minutes)

    @property
    def num_prompts(self) -> int:
        """Number of prompts to prepare: enough unless answers are very short."""
        return max(1, -(-2 * self.tokens // self.max_tokens))

    @property
    def max_len(self) -> int:
        """Tokens of the longest possible sample, prompt included."""
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of every training run; a resumed run must be given the same ones."""

    steps: int | None = option(3000, "updates; none: as many as --minutes allows", "N")
    minutes: float = option(0.0, "train this long instead of --steps", "M")
    batch_rows: int = option(32, "rows per update", "ROWS", "batch")
    rate: float = option(2e-3, "peak learning rate", "X")
    warmup_steps: int = 50
    decay_share: float = 0.8  # of all steps, at the end: the rate falls linearly to zero
    weight_decay: float = 0.05
    seed: int = option(0, "of weights, prompts and order", "N")
    save_every: int = option(500, "updates", "N")

    def __post_init__(self) -> None:
        check_least(1, steps=self.steps, batch=self.batch_rows, save_every=self.save_every)
        check_least(0, minutes=self.minutes, rate=self.rate, warmup_steps=self.warmup_steps)
        if self.steps is not None and self.minutes:
            raise ConfigError(f"minutes={self.minutes:g}: steps={self.steps} was given, too; keep one of them")
        if self.steps is None and self.minutes <= 0:
            raise ConfigError("steps=None: the run would have no end; give a number of steps, or minutes")


@dataclass(frozen=True, slots=True)
class HeadOptions(RunOptions):
    """Options of a head's training run."""

    unroll: int = option(5, "drafts ahead to train for", "K")
    blocks: int = option(64, "blocks per row and update (dflash, dspark)", "N")
    step_decay: float = 0.9  # weight of a draft relative to the draft before

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)  # a dataclass with slots has no super() without arguments
        check_least(1, blocks=self.blocks)
        if not 1 <= self.unroll <= MAX_DRAFTS:
            raise ConfigError(f"unroll={self.unroll}: a round has 1 to {MAX_DRAFTS} drafts")


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """All options of one head: its target, data, training and evaluation."""

    target: str
    data: tuple[Path, ...]
    out: Path
    plan: SamplingPlan = field(default_factory=SamplingPlan)
    options: HeadOptions = field(default_factory=HeadOptions)
    shares: tuple[float, ...] | None = None
    draft_vocab: str = option(
        AUTO, "tokens the head can draft: a number, full, or auto: the fewest that cover the samples", "N"
    )
    taps: tuple[int, ...] | None = None
    kind: str = option(EAGLE3, "eagle3 (token by token), dflash or dspark (a block at once)", "KIND")
    layers: int = option(BLOCK_LAYERS, "of a dflash or dspark head", "N")
    mlp: int | None = option(None, "inner size of the head's MLPs (default: the target's)", "N")
    markov_rank: int = option(MARKOV_RANK, "of a dspark head's correction by the token before", "N")
    device: str = option("auto", "auto, cpu, cuda or cuda:INDEX", "DEVICE")
    dtype: str = option("auto", "of the target", "DTYPE")
    eval_prompts: int = option(64, "held-out prompts to evaluate on", "N")
    eval_tokens: int = option(128, "of each", "N")
    evaluate: bool = True
    text_tokens: int = option(0, "of whole documents, trained on in addition to the samples", "N")
    start: Path | None = None  # a head whose weights to start from
    samples_of: Path | None = None  # another head's folder: its prompts, samples and texts are used
    stop_after: str | None = None  # a stage after which to stop

    @property
    def stages(self) -> Path:
        """The folder for files that stages leave for later ones."""
        return self.out / STAGES_FOLDER

    @property
    def data_folder(self) -> Path:
        """The folder of prompts, samples and texts: that of this head's stages, or another head's."""
        return (self.samples_of or self.out) / STAGES_FOLDER

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind={self.kind!r}: no such head; choose {', '.join(KINDS)}")
        check_least(1, mlp=self.mlp, layers=self.layers, eval_prompts=self.eval_prompts, eval_tokens=self.eval_tokens)
        check_least(0, text_tokens=self.text_tokens)
        if self.kind == DSPARK:
            check_least(1, markov_rank=self.markov_rank)
            if self.options.unroll < 2:
                raise ConfigError(f"unroll={self.options.unroll}: blocks of a dspark head have 2 tokens at least")
        for name, given, usual, of in (
            ("layers", self.layers, BLOCK_LAYERS, (DFLASH, DSPARK)),
            ("markov_rank", self.markov_rank, MARKOV_RANK, (DSPARK,)),
        ):
            if self.kind not in of and given != usual:
                raise ConfigError(f"{name}={given}: is for heads of {' or '.join(of)}; leave it out")
        if self.stop_after is not None and self.stop_after not in STAGES:
            raise ConfigError(f"stop_after={self.stop_after!r}: no such stage; choose {' or '.join(STAGES)}")

    def facts(self) -> Facts:
        """The options that a resumed run must repeat: those that decide the data and the head's shape."""
        return {
            **self.data_facts(),
            "draft_vocab": self.draft_vocab,
            "taps": None if self.taps is None else list(self.taps),
            "unroll": self.options.unroll,
            "kind": self.kind,
            **({} if self.kind == EAGLE3 else {"layers": self.layers, "markov_rank": self.markov_rank}),
            **({} if self.mlp is None else {"mlp": self.mlp}),
        }

    def data_facts(self) -> Facts:
        """The options that decide prompts, samples and texts."""
        plan = asdict(self.plan)
        return {
            "data": [path.name for path in self.data],
            "shares": None if self.shares is None else list(self.shares),
            **{name: plan[name] for name in ("tokens", "max_tokens", "prompt_tokens", "seed")},
            "eval_prompts": self.eval_prompts,
            "text_tokens": self.text_tokens,
        }
