"""What a checkpoint is, without loading it: its family and shape, its number formats, its tokenizer, its problems."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peregrine.errors import PeregrineError
from peregrine.log import style

Report = dict[str, Any]


def checkpoint_report(name: str) -> Report:
    """The report on a GGUF file or a folder; every part that cannot be read is a problem, and the others are told."""
    from peregrine.engine.sources import FolderSource, open_source
    from peregrine.models.draft_heads import is_head

    report: Report = {"checkpoint": name, "problems": []}
    try:
        source = open_source(name)
    except PeregrineError as error:
        return report | {"problems": [str(error)]}
    if not isinstance(source, FolderSource):
        return report | {"problems": [f"{name!r} is a shape with random weights, not a checkpoint"]}
    if source.folder.is_dir() and is_head(source.folder):
        remedy = f"use it with --model MODEL --drafter {name}"
        return report | {"problems": [f"{name!r} is a draft head, which drafts for a model; {remedy}"]}
    _add(report, lambda: _file(source.folder))
    _add(report, lambda: _shape(source))
    _add(report, lambda: _checked(source))
    _add(report, lambda: _text(source))
    return report


def checkpoint_lines(report: Report) -> list[str]:
    """The report as text."""
    facts = [(name, value) for name, value in report.items() if name not in ("checkpoint", "problems")]
    lines = [style(report["checkpoint"], "bold"), *(f"  {name:<12} {value}" for name, value in facts)]
    if report["problems"]:
        return [*lines, *(f"  {style('no', 'red')}  {problem}" for problem in report["problems"])]
    return [*lines, f"  {style('yes', 'green')} can be served: peregrine chat --model {report['checkpoint']}"]


def _add(report: Report, read: Callable[[], Report]) -> None:
    try:
        report |= read()
    except PeregrineError as error:
        if str(error) not in report["problems"]:  # several parts may need the same field
            report["problems"].append(str(error))


def _file(path: Path) -> Report:
    """What a GGUF file says about itself."""
    from peregrine.models.checkpoint.gguf.file import open_header
    from peregrine.models.checkpoint.gguf.header import is_gguf

    if not is_gguf(path):
        return {"format": "folder in Hugging Face format"}
    header = open_header(path)
    kinds = Counter(stored.kind for stored in header.tensors.values()) + Counter(header.unread.values())
    named = {"name": "general.name", "license": "general.license"}
    report: Report = {"format": f"GGUF file, {path.stat().st_size / 1e6:.0f} MB"}
    report |= {ours: header.metadata[theirs] for ours, theirs in named.items() if theirs in header.metadata}
    return report | {"tensors": ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())}


def _shape(source: Any) -> Report:
    from peregrine.models.loading import num_weights

    config = source.config
    count = num_weights(config)
    heads = f"{config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} of keys and values"
    return {
        "family": config.family,
        "shape": f"{config.num_layers} layers, hidden size {config.hidden_size}, {heads}",
        "context": f"{config.max_positions} tokens",
        "weights": f"{count / 1e6:.0f} M; {4 * count / 1e9:.2f} GB in float32, {2 * count / 1e9:.2f} GB in bfloat16",
        "stop tokens": ", ".join(map(str, config.eos_ids)) or "none",
    }


def _checked(source: Any) -> Report:
    """Whether all tensors are there, in their shapes."""
    from peregrine.models.loading import check_decoder

    check_decoder(source.weights)
    return {}


def _text(source: Any) -> Report:
    tokenizer = source.tokenizer()
    if tokenizer.missing is not None:
        return {"tokenizer": f"none, so token ids alone can be served: {tokenizer.missing}"}
    kind = "byte-level BPE" if tokenizer.byte_level else "BPE over characters"
    template = "yes" if tokenizer.chat_template else "none: send plain prompts"
    return {"tokenizer": f"{kind}, {tokenizer.vocab_size} tokens", "chat": template}
