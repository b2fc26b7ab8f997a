"""A draft head for a target, start to finish: prompts, samples, training, measuring. Each stage is kept on disk."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from peregrine.engine.folders import find_model
from peregrine.errors import ConfigError
from peregrine.hardware import resolve_device, resolve_dtype
from peregrine.models.config import ModelConfig
from peregrine.models.draft_heads import DraftHead, Eagle3Head, load_head, save_head
from peregrine.models.families import read_config
from peregrine.models.loading import load_decoder, stored_dtype
from peregrine.text.tokenizer import Tokenizer
from peregrine.train import acceptance
from peregrine.train.checkpoint import Facts, same_options
from peregrine.train.data import MERLIN_SHARES, Source
from peregrine.train.head import AUTO, FULL, draft_ids, fresh_head, pick_taps
from peregrine.train.head_report import write_report
from peregrine.train.head_run import HeadOptions, HeadRun, train_head
from peregrine.train.head_size import estimate, refuse_oversize
from peregrine.train.prompts import Prompt, PromptBook, open_sources
from peregrine.train.sample_rows import SampleRows, fitting_row_len
from peregrine.train.sampling import Samples, SamplingPlan, engine_options, load_shard, sample, write_shard
from peregrine.train.texts import gather_texts, join

WORK, FACTS, PROMPTS, TEXTS = "work", "options.json", "prompts.json", "texts.npz"


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Everything that is asked for when a head is made."""

    target: str
    data: tuple[Path, ...]
    out: Path
    plan: SamplingPlan
    options: HeadOptions
    shares: tuple[float, ...] | None = None
    draft_vocab: str = AUTO
    taps: tuple[int, ...] | None = None
    device: str = "auto"
    dtype: str = "auto"
    eval_prompts: int = 64
    eval_tokens: int = 128
    evaluate: bool = True
    sources: tuple[Source, ...] | None = None  # instead of what is found at `data`
    text_tokens: int = 0  # of the documents themselves, to train on beside the samples
    start: Path | None = None  # a head to go on from

    @property
    def work(self) -> Path:
        return self.out / WORK

    def facts(self) -> Facts:
        """What another run in the same folder must agree on; how fast and where is free."""
        plan = asdict(self.plan)
        return {
            "data": [path.name for path in self.data],
            "shares": None if self.shares is None else list(self.shares),
            **{name: plan[name] for name in ("tokens", "max_tokens", "longest_prompt", "seed")},
            "draft_vocab": self.draft_vocab,
            "taps": None if self.taps is None else list(self.taps),
            "unroll": self.options.unroll,
            "eval_prompts": self.eval_prompts,
            "text_tokens": self.text_tokens,
        }


def make_head(order: HeadOrder) -> Facts:
    """Makes the head and its report in `order.out`, going on where an earlier call stopped; returns the report."""
    folder = find_model(order.target)
    config, device = read_config(folder), resolve_device(order.device)
    dtype = resolve_dtype(order.dtype, device, stored_dtype(folder))
    claim(order)
    draft_vocab = int(order.draft_vocab) if order.draft_vocab.isdigit() else config.vocab_size
    size = estimate(config, order.plan, order.options, draft_vocab, dtype)
    print("\n".join(size.lines()), flush=True)
    refuse_oversize(size, device, order.out)
    check_context(order.plan, config)

    train, held_out = prepare_prompts(order, folder)
    samples = sample(
        folder, train, order.plan, order.work / "samples", engine_options(order.plan, order.device, order.dtype)
    )
    facts = learn(order, folder, samples, device, dtype)
    if order.evaluate:
        facts |= evaluate(order, folder, held_out)
    write_report(order.out, order.work / "run", facts)
    return facts


def claim(order: HeadOrder) -> None:
    """Takes the folder for this order; one that holds something else is left alone."""
    noted, facts = order.work / FACTS, order.facts()
    if noted.exists():
        same_options(json.loads(noted.read_text()), facts, order.out)
        return
    if order.out.exists() and any(order.out.iterdir()):
        raise ConfigError(f"out={order.out}: holds files of something else; give an empty or a new folder")
    order.work.mkdir(parents=True, exist_ok=True)
    noted.write_text(json.dumps(facts, indent=1))


def check_context(plan: SamplingPlan, config: ModelConfig) -> None:
    """Refuses samples that are longer than the target's context."""
    longest = plan.longest_prompt + plan.max_tokens
    if longest > config.max_positions:
        raise ConfigError(
            f"max_tokens={plan.max_tokens}: with prompts of up to {plan.longest_prompt} tokens a sample has "
            f"{longest}, the target's context is {config.max_positions}; lower either"
        )


def prepare_prompts(order: HeadOrder, folder: Path) -> tuple[list[Prompt], list[Prompt]]:
    """(to train on, held out), read from the data once and kept."""
    kept, plan = order.work / PROMPTS, order.plan
    if not kept.exists():
        sources = order.sources or open_sources(order.data, order.shares, MERLIN_SHARES)
        book = PromptBook(sources, order.eval_prompts)
        book.check(plan.num_prompts, plan.tokens)
        tokenizer = Tokenizer.read(folder)
        train = book.prompts(tokenizer, plan.num_prompts, plan.longest_prompt, plan.seed, train=True)
        held_out = book.prompts(tokenizer, order.eval_prompts, plan.longest_prompt, plan.seed, train=False)
        if order.text_tokens:
            longest = plan.longest_prompt + plan.max_tokens
            texts = gather_texts(book, tokenizer, order.text_tokens, longest, plan.seed)
            write_shard(order.work / TEXTS, texts)
        new = kept.with_suffix(".new")
        new.write_text(json.dumps([[[p.source, p.tokens] for p in group] for group in (train, held_out)]))
        os.replace(new, kept)
    groups = json.loads(kept.read_text())
    first, second = ([Prompt(source, tokens) for source, tokens in group] for group in groups)
    return first, second


def learn(order: HeadOrder, folder: Path, samples: Samples, device: torch.device, dtype: torch.dtype) -> Facts:
    """Trains the head on the samples; what was chosen on the way comes back."""
    target = load_decoder(folder, device, dtype, pack=False)
    target.requires_grad_(False)
    config = target.config
    ids = draft_ids(samples, order.draft_vocab, config.vocab_size, config.eos_ids)
    taps = order.taps if order.taps is not None else pick_taps(config.num_layers)
    head = fresh_head(target, taps, ids, order.options.seed)
    untrained = order.work / "untrained"
    if not untrained.exists():
        save_head(head, untrained, torch.bfloat16)
    if order.start is not None:
        take_over(head, load_head(order.start, target, device, torch.float32, pack=False), order.start)
    run = HeadRun(head, target, order.options, order.work / "run")
    texts = load_shard(order.work / TEXTS) if order.text_tokens else None
    lessons = join(samples, texts)
    rows = SampleRows(lessons, fitting_row_len(lessons))
    train_head(run, rows, order.out)
    written = samples.written()
    covered = 1.0 if ids is None else float(np.isin(written, ids).mean())
    return {
        "target": str(order.target),
        "samples": len(samples.prompt_lens),
        "sampled_tokens": len(written),
        "text_tokens": 0 if texts is None else len(texts.tokens),
        "rows": len(rows.bins),
        "row_len": rows.row_len,
        "steps": run.step,
        "options": asdict(order.options),
        "taps": list(taps),
        "draft_vocab": FULL if ids is None else len(ids),
        "draft_vocab_coverage": covered,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
    }


def take_over(head: Eagle3Head, start: DraftHead, folder: Path) -> None:
    """Gives the head the weights of another of the same shape."""
    shapes, wanted = ({n: p.shape for n, p in h.named_parameters()} for h in (start, head))
    alike = isinstance(start, Eagle3Head) and start.taps == head.taps and shapes == wanted
    if not alike or not torch.equal(draft_targets(start), draft_targets(head)):
        raise ConfigError(
            f"start={folder}: has other sizes, taps or draft tokens than the head to be trained; "
            "ask for the same ones, and give the samples it was trained on"
        )
    head.load_state_dict(start.state_dict())


def draft_targets(head: DraftHead) -> Tensor:
    """The target id of each draft id; none where the vocabularies are the same."""
    return torch.empty(0) if head.draft_to_target is None else head.draft_to_target


def evaluate(order: HeadOrder, folder: Path, held_out: Sequence[Prompt]) -> Facts:
    """Acceptance of the trained head in every shape, and of an untrained one in the first."""
    rows = min(order.plan.rows, len(held_out))
    room = read_config(folder).max_positions - max(len(prompt.tokens) for prompt in held_out)
    what = acceptance.Measure(held_out, min(order.eval_tokens, room), rows, order.device, order.dtype)
    trained = acceptance.measure(folder, order.out, what, list(acceptance.SHAPES))
    untrained = acceptance.measure(folder, order.work / "untrained", what, [next(iter(acceptance.SHAPES))])
    print(acceptance.table(trained))
    print("untrained:\n" + acceptance.table(untrained))
    return {"acceptance": trained, "untrained": untrained, "bonus_counted": True}
