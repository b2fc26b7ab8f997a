"""The objective of an EAGLE-3 head: "training-time test", unrolled steps on the head's own hidden states.

Step 0 reads the target's taps at index p and the token at p + 1, and predicts the token at p + 2. Step j reads the
hidden state of step j - 1 at p and the token at p + 1 + j, at position p + j. That is what the chain drafter computes,
except that the tokens are the sample's, not drafts. The engine's own head module is used, with another `attend`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from peregrine.errors import ConfigError
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import DraftHead, Eagle3Config, Eagle3Head, default_taps, dense_layers
from peregrine.models.layers import draw_weights
from peregrine.train.attend import UnrolledAttend, packed_attend
from peregrine.train.options import AUTO, FULL
from peregrine.train.rows import PAD, Rows
from peregrine.train.samples import Samples

COVERAGE = 0.998  # share of the sampled tokens that an automatic draft vocabulary must contain


@dataclass(frozen=True, slots=True)
class Labels:
    """The target's outputs for a batch of rows."""

    tapped: Tensor  # [B * S, taps * H]
    probabilities: Tensor  # [B, S, Vd] of the draft tokens, normalised over the whole vocabulary
    best: Tensor  # [B, S] i64 the target's likeliest token


@dataclass(frozen=True, slots=True)
class Outcome:
    """The loss of a batch, and its parts by unrolled step."""

    loss: Tensor  # []
    losses: Tensor  # [steps] mean cross-entropy
    agreement: Tensor  # [steps] how often the head's likeliest token is the target's


def pick_taps(num_layers: int) -> tuple[int, ...]:
    """Layers to tap: EAGLE-3's choice if the target is deep enough, else an early, a middle and the last layer."""
    taps = default_taps(num_layers)
    if len(set(taps)) == len(taps) and min(taps) >= 0:
        return taps
    return tuple(sorted({min(1, num_layers // 3), num_layers // 2, num_layers - 1}))


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Refuse taps that the target does not have."""
    if not taps or min(taps) < 0 or max(taps) >= num_layers:
        raise ConfigError(f"taps={taps}: each must be one of the target's layers, 0 to {num_layers - 1}")


def check_draft_vocab(asked: str, vocab_size: int, always: tuple[int, ...]) -> None:
    """Refuse a number of draft tokens that the target does not have, or that leaves no room beside `always`."""
    if asked not in (AUTO, FULL) and not (asked.isdigit() and len(always) < int(asked) <= vocab_size):
        raise ConfigError(
            f"draft_vocab={asked}: choose auto, full, or a number above {len(always)} and at most {vocab_size}"
        )


def draft_ids(samples: Samples, asked: str, vocab_size: int, always: tuple[int, ...]) -> NDArray[np.int64] | None:
    """Target ids of the draft vocabulary, ascending; None for the whole vocabulary.

    They are the most frequent tokens of the samples: a number of them, or ("auto") the smallest of vocab_size / 8,
    / 4, / 2 that covers COVERAGE of the samples, else the whole vocabulary. Ids in `always` are included.
    """
    counts = np.bincount(samples.written(), minlength=vocab_size)
    if len(counts) > vocab_size:
        raise ConfigError(
            f"samples: token {len(counts) - 1} is not in the target's vocabulary of {vocab_size}; "
            "they were made with another model, give another folder"
        )
    ranked = counts.copy()
    ranked[list(always)] = counts.sum() + 1  # end-of-text tokens must be in the draft vocabulary
    order = np.argsort(-ranked, kind="stable")
    if asked == FULL:
        return None
    if asked == AUTO:
        covered = np.cumsum(counts[order]) / max(1, counts.sum())
        sizes = [vocab_size // 8, vocab_size // 4, vocab_size // 2]
        fitting = [size for size in sizes if size > len(always) and covered[size - 1] >= COVERAGE]
        if not fitting:
            return None
        size = fitting[0]
    else:
        check_draft_vocab(asked, vocab_size, always)
        size = int(asked)
    return None if size == vocab_size else np.sort(order[:size])


def fresh_head(
    target: Decoder, taps: tuple[int, ...], ids: NDArray[np.int64] | None, seed: int, mlp: int | None = None
) -> Eagle3Head:
    """A head with random weights, but the target's output head and final norm; `mlp`: inner size of its MLP."""
    config = target.config
    check_taps(taps, config.num_layers)
    layer = dense_layers(config, "llama", 1, mlp)
    size = config.vocab_size if ids is None else len(ids)
    shape = Eagle3Config(layer, taps, config.hidden_size, size, own_embedding=False, own_head=True)
    chosen = None if ids is None else torch.from_numpy(ids)
    head = Eagle3Head(shape, target, target.embedding.device, torch.float32, chosen)
    draw_weights(head, torch.Generator().manual_seed(seed))
    assert head.head is not None
    assert head.head.weight is not None
    assert target.head.weight is not None
    with torch.no_grad():
        rows = target.head.weight if head.draft_to_target is None else target.head.weight[head.draft_to_target]
        head.head.weight.copy_(rows)
        head.norm.weight.copy_(target.norm.weight)
    return head


@torch.no_grad()
def read_target(target: Decoder, head: DraftHead, rows: Rows) -> Labels:
    """Taps and next-token probabilities of the frozen target at every place."""
    attend = packed_attend(target.layer_attention(), rows)
    hidden, tapped = target(rows.tokens.flatten(), rows.positions.flatten(), attend, head.taps)
    assert tapped is not None
    logits = target.logits(hidden).float()  # [B * S, V]
    wanted = logits if head.draft_to_target is None else logits[:, head.draft_to_target]
    probabilities = (wanted - logits.logsumexp(dim=1, keepdim=True)).exp()
    shape = rows.tokens.shape
    return Labels(tapped, probabilities.view(*shape, -1), logits.argmax(dim=1).view(shape))


def unroll(head: Eagle3Head, rows: Rows, tapped: Tensor, steps: int) -> Iterator[Tensor]:
    """The head's hidden states of each step, [B * S, H]; index p of step j predicts the token at p + 2 + j."""
    attends = UnrolledAttend(head.layer_attention(), rows)
    hidden = head.fuse(tapped)
    last = len(head.rope_table) - 1
    for step in range(steps):
        tokens = rows.tokens.roll(-1 - step, dims=1).flatten()  # wrong past the sample's end: not `learnable`
        positions = (rows.positions + step).clamp(max=last).flatten()
        hidden = head(tokens, hidden, positions, attends.next_step(), None)
        yield hidden


def head_loss(head: Eagle3Head, rows: Rows, labels: Labels, steps: int, step_decay: float) -> Outcome:
    """Cross-entropy with the target's distribution at every step; step j has weight step_decay ** j."""
    losses, agreements = [], []
    count, length = rows.tokens.shape
    for step, hidden in enumerate(unroll(head, rows, labels.tapped, steps)):
        ahead = step + 1  # the target predicts the same token at index p + ahead
        places = length - ahead
        logits = head.logits(hidden).view(count, length, -1)[:, :places].flatten(0, 1).float()
        valid = learnable(rows, ahead)[:, :places].flatten()
        total = valid.sum().clamp(min=1)
        wanted = labels.probabilities[:, ahead:].flatten(0, 1)
        each = F.cross_entropy(logits, wanted, reduction="none")
        losses.append((each * valid).sum() / total)
        with torch.no_grad():
            picks = logits.argmax(dim=1)
            picks = picks if head.draft_to_target is None else head.draft_to_target[picks]
            agreements.append(((picks == labels.best[:, ahead:].flatten()) & valid).sum() / total)
    each_step = torch.stack(losses)
    weights = step_decay ** torch.arange(steps, device=each_step.device)
    return Outcome((each_step * weights).sum() / weights.sum(), each_step.detach(), torch.stack(agreements))


def learnable(rows: Rows, ahead: int) -> Tensor:
    """Places where a drafter may start and whose label, ahead + 1 places on, is in the same sample. [B, S] bool"""
    later = rows.documents.roll(-ahead - 1, dims=1)
    later[:, -ahead - 1 :] = PAD
    return rows.learn & (rows.documents == later) & (rows.documents != PAD)
