"""Trains a draft head for a target: prompts, samples, training, evaluation. Each stage is kept on disk."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peregrine.engine.folders import find_model
from peregrine.engine.sources import FolderSource
from peregrine.errors import ConfigError
from peregrine.hardware import resolve_device, resolve_dtype
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import BlockHead, DraftHead, Eagle3Head, find_head, load_head, save_head
from peregrine.models.families import read_config
from peregrine.models.loading import load_decoder
from peregrine.train import report
from peregrine.train.block import calibration, fresh_block_head, pick_block_taps
from peregrine.train.documents import MERLIN_SHARES, open_sources
from peregrine.train.head import check_draft_vocab, check_taps, draft_ids, fresh_head, pick_taps
from peregrine.train.head_run import HeadRun
from peregrine.train.head_size import check_size
from peregrine.train.merlin.requests import with_requests
from peregrine.train.options import DSPARK, EAGLE3, FULL, Facts, HeadOrder, SamplingPlan
from peregrine.train.prompts import Prompt, PromptBook
from peregrine.train.rows import SampleRows, fitting_row_len
from peregrine.train.run import check_same
from peregrine.train.samples import Samples, sample, with_texts

FACTS, PROMPTS, TEXTS, UNTRAINED = "options.json", "prompts.json", "texts.npz", "untrained"
DRAFT_ROWS = frozenset({"head.weight", "markov.out.weight"})  # parameters whose rows stand for draft tokens


def make_head(order: HeadOrder) -> Facts | None:
    """Write the head and its report into `order.out`, resuming an earlier call; returns the report.

    None if the order asks to stop before there is a head.
    """
    source, device = FolderSource(find_model(order.target)), resolve_device(order.device)
    folder, config = source.folder, source.config
    dtype = resolve_dtype(order.dtype, device, source.dtype)
    # What cannot be done is refused before hours of sampling.
    check_draft_vocab(order.draft_vocab, config.vocab_size, config.eos_ids)
    if order.taps is not None:
        check_taps(order.taps, config.num_layers)
    if order.start is not None:
        find_head(order.start, config)
    check_batch(order)
    claim(order, {"target": kind_of(config)})
    print(check_size(order, config, dtype, device), flush=True)
    check_context(order.plan, config)

    train, held_out = prepare_prompts(order, source)
    if order.stop_after == "prompts":
        return None
    prompts = [prompt.tokens for prompt in train]
    samples = sample(folder, prompts, order.plan, order.data_folder / "samples", device=order.device, dtype=order.dtype)
    if order.stop_after == "samples":
        return None
    facts = train_head(order, folder, samples, device, dtype)
    if order.evaluate:
        facts |= evaluate(order, folder, held_out)
    report.write_report(order.out, order.stages / "run", facts)
    return facts


def kind_of(config: ModelConfig) -> str:
    """What must not change of a target between the stages of a run; where it lies may."""
    layers = f"{config.num_layers} layers of {config.hidden_size}, {config.num_heads} heads of {config.head_dim}"
    return f"{config.family}, {layers}, {config.vocab_size} tokens"


def claim(order: HeadOrder, target: Facts) -> None:
    """Take the folder for this order; refuse one that holds anything else. An order that made nothing yet goes."""
    noted, facts = order.stages / FACTS, target | order.facts()
    if order.samples_of is not None:
        others = order.data_folder / FACTS
        if not others.exists():
            raise ConfigError(f"samples_of={order.samples_of}: no head was trained there; give another head's --out")
        check_same(json.loads(others.read_text()), target | order.data_facts(), order.samples_of)
    if (order.stages / PROMPTS).exists() or (order.stages / UNTRAINED).exists():
        check_same(json.loads(noted.read_text()), facts, order.out)
        return
    if not noted.exists() and order.out.exists() and any(order.out.iterdir()):
        raise ConfigError(f"out={order.out}: holds files of something else; give an empty or a new folder")
    order.stages.mkdir(parents=True, exist_ok=True)
    noted.write_text(json.dumps(facts, indent=1))


def check_batch(order: HeadOrder) -> None:
    """Refuse a batch of more rows than there can be samples, of which every row has one."""
    batch, plan = order.options.batch_rows, order.plan
    if order.stop_after is None and not order.text_tokens and plan.num_prompts < batch:
        problem = f"at most {plan.num_prompts} samples are taken for {plan.tokens} tokens; lower batch or raise tokens"
        raise ConfigError(f"batch={batch}: {problem}")


def check_context(plan: SamplingPlan, config: ModelConfig) -> None:
    """Refuse samples that are longer than the target's context."""
    if plan.max_len > config.max_positions:
        raise ConfigError(
            f"max_tokens={plan.max_tokens}: with prompts of up to {plan.prompt_tokens} tokens a sample has "
            f"{plan.max_len}, the target's context is {config.max_positions}; lower either"
        )


def prepare_prompts(order: HeadOrder, source: FolderSource) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held-out) prompts, made from the data once and kept."""
    kept, plan = order.data_folder / PROMPTS, order.plan
    if not kept.exists():
        sources = with_requests(open_sources(order.data, order.shares, MERLIN_SHARES))  # in merlin's own folder
        book = PromptBook(sources, order.eval_prompts)
        book.check(plan.num_prompts, plan.tokens)
        tokenizer = source.tokenizer()
        train = book.prompts(tokenizer, plan.num_prompts, plan.prompt_tokens, plan.seed, train=True)
        held_out = book.prompts(tokenizer, order.eval_prompts, plan.prompt_tokens, plan.seed, train=False)
        if order.text_tokens:
            book.texts(tokenizer, order.text_tokens, plan.max_len, plan.seed).save(order.data_folder / TEXTS)
        new = kept.with_suffix(".new")
        new.write_text(json.dumps([[[p.source, p.tokens] for p in group] for group in (train, held_out)]))
        os.replace(new, kept)
    first, second = ([Prompt(*entry) for entry in group] for group in json.loads(kept.read_text()))
    return first, second


def train_head(order: HeadOrder, folder: Path, samples: Samples, device: torch.device, dtype: torch.dtype) -> Facts:
    """Train the head on the samples; returns its part of the report."""
    target = load_decoder(folder, device, dtype, pack=False)
    target.requires_grad_(False)
    config = target.config
    ids = draft_ids(samples, order.draft_vocab, config.vocab_size, config.eos_ids)
    start = None if order.start is None else load_head(order.start, target, device, torch.float32, pack=False)
    head = new_head(order, target, samples, ids, start)
    if not (order.stages / UNTRAINED).exists():
        save_head(head, order.stages / UNTRAINED, torch.bfloat16)
    if start is not None and order.start is not None:
        copy_weights(head, start, order.start)
    texts = Samples.load(order.data_folder / TEXTS) if order.text_tokens else None
    epoch = with_texts(samples, texts)
    rows = SampleRows(epoch, fitting_row_len(epoch))
    run = HeadRun(head, target, order.options, rows, order.stages / "run", order.out)
    run.train()
    written = samples.written()
    return {
        "target": str(order.target),
        "samples": len(samples.prompt_lens),
        "sampled_tokens": len(written),
        "text_tokens": 0 if texts is None else len(texts.tokens),
        "rows": len(rows.bins),
        "row_len": rows.row_len,
        "steps": run.step,
        "options": asdict(order.options),
        "kind": order.kind,
        "taps": list(head.taps),
        "draft_vocab": FULL if ids is None else len(ids),
        "draft_vocab_coverage": 1.0 if ids is None else float(np.isin(written, ids).mean()),
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
    }


def new_head(
    order: HeadOrder, target: Decoder, samples: Samples, ids: NDArray[np.int64] | None, start: DraftHead | None = None
) -> Eagle3Head | BlockHead:
    """An untrained head of the kind that is asked for, with the mask token of the head it will start from."""
    num_layers = target.config.num_layers
    if order.kind == EAGLE3:
        return fresh_head(target, order.taps or pick_taps(num_layers), ids, order.options.seed, order.mlp)
    # The mask token is the one that occurs least in what the target writes.
    rarest = int(np.bincount(samples.written(), minlength=target.config.vocab_size).argmin())
    mask_token = start.config.mask_token if isinstance(start, BlockHead) else rarest
    return fresh_block_head(target, order.taps or pick_block_taps(num_layers), ids, order, mask_token)


def copy_weights(head: Eagle3Head | BlockHead, start: DraftHead, folder: Path) -> None:
    """Give the head the weights of another one with layers of the same sizes.

    Rows that stand for a draft token are given where both can draft it; the others stay as they are.
    """
    shapes, wanted = ({n: p.shape for n, p in h.named_parameters() if n not in DRAFT_ROWS} for h in (start, head))
    if type(start) is not type(head) or start.taps != head.taps or shapes != wanted:
        raise ConfigError(f"start={folder}: has other sizes or taps than the head to be trained; ask for the same ones")
    theirs_says, ours_says = variant(start), variant(head)
    if differs := [name for name in ours_says if theirs_says[name] != ours_says[name]]:
        name = differs[0]
        problem = f"has {name}={theirs_says[name]}, and new heads have {ours_says[name]}"
        raise ConfigError(f"start={folder}: {problem}; its weights would mean something else: leave it out")
    theirs, ours = draft_targets(start), draft_targets(head)
    place = {token: row for row, token in enumerate(theirs.tolist())}
    shared = [(row, place[token]) for row, token in enumerate(ours.tolist()) if token in place]
    given, parameters = dict(start.named_parameters()), dict(head.named_parameters())
    with torch.no_grad():
        for name in wanted:
            parameters[name].copy_(given[name])
        rows, others = torch.tensor(shared, dtype=torch.int64, device=ours.device).view(-1, 2).T
        for name in parameters.keys() & given.keys() & DRAFT_ROWS:  # a head may borrow the target's output head
            parameters[name][rows] = given[name][others]


def variant(head: Eagle3Head | BlockHead) -> Facts:
    """What a head's weights mean, apart from the tokens that it drafts, their number, and where its tables are."""
    free = {"layer", "taps", "draft_vocab_size", "mask_token", "block_size", "own_embedding", "own_head"}
    layer, said = head.config.layer, {name: value for name, value in asdict(head.config).items() if name not in free}
    return said | {"rope": layer.rope, "rms_norm_eps": layer.norm_eps, "windows": layer.windows}


def draft_targets(head: DraftHead) -> Tensor:
    """The target id of each draft id."""
    ids, size = head.draft_to_target, head.layer_config.vocab_size
    return torch.arange(size, device=head.rope_table.device) if ids is None else ids


def evaluate(order: HeadOrder, folder: Path, held_out: Sequence[Prompt]) -> Facts:
    """Acceptance of the trained head in every shape, and of the untrained one in the first; how sure it is."""
    rows = min(order.plan.rows, len(held_out))
    room = read_config(folder).max_positions - max(len(prompt.tokens) for prompt in held_out)
    evaluation = report.Evaluation(held_out, min(order.eval_tokens, room), rows, order.device, order.dtype)
    shapes = report.shapes_of(order.kind, order.options.unroll)
    trained, outputs = report.measure(folder, order.out, evaluation, shapes)
    untrained, _ = report.measure(folder, order.stages / UNTRAINED, evaluation, shapes[:1])
    print(f"{report.table(trained)}\nuntrained:\n{report.table(untrained)}")
    facts: Facts = {"acceptance": trained, "untrained": untrained, "bonus_counted": True}
    if order.kind == DSPARK:
        target = load_decoder(folder, resolve_device(order.device), pack=False)
        head = load_head(order.out, target, target.embedding.device, torch.float32, pack=False)
        assert isinstance(head, BlockHead)
        texts = [output.prompt_token_ids + output.token_ids for output in outputs]
        written = Samples.pack(texts, [len(output.prompt_token_ids) for output in outputs])
        facts["calibration"] = calibration(head, target, written)
        print(report.calibration_table(facts["calibration"]))
    return facts
