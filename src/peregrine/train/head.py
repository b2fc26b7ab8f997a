"""An EAGLE-3 head learns to guess as its target would: training-time test, the head's own states fed back.

Step 0 reads the target's taps of index p and the token at p + 1, and guesses the token at p + 2. Step j reads
what step j - 1 left at p and the token at p + 1 + j, at position p + j: as the chain drafter does, except that
the tokens are the target's own. The engine's head runs here, with another `attend`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from peregrine.errors import ConfigError
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import Eagle3Config, Eagle3Head, default_taps
from peregrine.models.layers import draw_weights
from peregrine.train.packed_attend import UnrolledAttend, packed_attend
from peregrine.train.sample_rows import PAD, Rows
from peregrine.train.sampling import Samples

COVERAGE = 0.998  # of the sampled tokens that a draft vocabulary of its own choice must hold
AUTO, FULL = "auto", "full"


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the target makes of a batch of rows."""

    tapped: Tensor  # [B * S, taps * H]
    probabilities: Tensor  # [B, S, Vd] of the draft tokens, under the target's whole distribution
    best: Tensor  # [B, S] i64 the likeliest of all tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """Loss of a batch, and by step: the mean cross-entropy, and how often head and target agree greedily."""

    loss: Tensor  # []
    losses: Tensor  # [steps]
    agreement: Tensor  # [steps]


def pick_taps(num_layers: int) -> tuple[int, ...]:
    """Early, middle and late; EAGLE-3's own choice where the target is deep enough for it."""
    taps = default_taps(num_layers)
    if len(set(taps)) == len(taps) and min(taps) >= 0:
        return taps
    return tuple(sorted({min(1, num_layers // 3), num_layers // 2, num_layers - 1}))


def draft_ids(samples: Samples, wish: str, vocab_size: int, always: tuple[int, ...]) -> NDArray[np.int64] | None:
    """Target ids of the draft vocabulary, ascending; None for all of them.

    The most frequent tokens of the samples: as many as asked for, or ("auto") the smallest of vocab_size / 2,
    / 4, / 8 that holds nearly all of them, and the whole vocabulary if none does.
    """
    counts = np.bincount(samples.written(), minlength=vocab_size)
    if len(counts) > vocab_size:
        raise ConfigError(
            f"samples: token {len(counts) - 1} is not in the target's vocabulary of {vocab_size}; "
            "they were made with another model, give another folder"
        )
    counts[list(always)] = counts.sum() + 1  # an ending must be guessable
    order = np.argsort(-counts, kind="stable")
    if wish == FULL:
        return None
    if wish == AUTO:
        real = np.where(counts > counts.sum(), 0, counts)
        covered = np.cumsum(real[order]) / max(1, real.sum())
        sizes = [vocab_size // 8, vocab_size // 4, vocab_size // 2]
        fitting = [size for size in sizes if size > len(always) and covered[size - 1] >= COVERAGE]
        if not fitting:
            return None
        size = fitting[0]
    else:
        if not wish.isdigit() or not len(always) < int(wish) <= vocab_size:
            raise ConfigError(
                f"draft_vocab={wish}: choose auto, full, or a number above {len(always)} and at most {vocab_size}"
            )
        size = int(wish)
    return None if size == vocab_size else np.sort(order[:size])


def fresh_head(target: Decoder, taps: tuple[int, ...], ids: NDArray[np.int64] | None, seed: int) -> Eagle3Head:
    """A head that has learnt nothing, its output head and norm taken from the target."""
    config = target.config
    if not taps or min(taps) < 0 or max(taps) >= config.num_layers:
        raise ConfigError(f"taps={taps}: each must be one of the target's layers, 0 to {config.num_layers - 1}")
    layer = replace(
        config,
        family="llama",
        num_layers=1,
        windows=(None,),
        tied=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        mla=None,
        experts=None,
        num_extra_layers=0,
    )
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
def read_target(target: Decoder, head: Eagle3Head, rows: Rows) -> Lesson:
    """Taps and next-token probabilities of the frozen target at every place."""
    attend = packed_attend(target.layer_attention(), rows)
    hidden, tapped = target(rows.tokens.flatten(), rows.positions.flatten(), attend, head.taps)
    assert tapped is not None
    logits = target.logits(hidden).float()  # [B * S, V]
    wanted = logits if head.draft_to_target is None else logits[:, head.draft_to_target]
    probabilities = (wanted - logits.logsumexp(dim=1, keepdim=True)).exp()
    shape = rows.tokens.shape
    return Lesson(tapped, probabilities.view(*shape, -1), logits.argmax(dim=1).view(shape))


def unroll(head: Eagle3Head, rows: Rows, tapped: Tensor, steps: int) -> Iterator[Tensor]:
    """The head's hidden state after each step, [B * S, H]; index p of step j guesses the token at p + 2 + j."""
    attends = UnrolledAttend(head.layer_attention(), rows)
    hidden = head.fuse(tapped)
    last = len(head.rope_table) - 1
    for step in range(steps):
        tokens = rows.tokens.roll(-1 - step, dims=1).flatten()  # past the sample's end: void, and not learnt
        positions = (rows.positions + step).clamp(max=last).flatten()
        hidden = head(tokens, hidden, positions, attends.next_step(), None)
        yield hidden


def teach(head: Eagle3Head, rows: Rows, lesson: Lesson, steps: int, step_decay: float) -> Outcome:
    """Soft cross-entropy with the target's distribution after every step; step j counts step_decay ** j."""
    losses, agreements = [], []
    count, length = rows.tokens.shape
    for step, hidden in enumerate(unroll(head, rows, lesson.tapped, steps)):
        ahead = step + 1  # the target's own guess of that token stands here
        places = length - ahead
        logits = head.logits(hidden).view(count, length, -1)[:, :places].flatten(0, 1).float()
        valid = learnable(rows, ahead)[:, :places].flatten()
        total = valid.sum().clamp(min=1)
        wanted = lesson.probabilities[:, ahead:].flatten(0, 1)
        each = F.cross_entropy(logits, wanted, reduction="none")
        losses.append((each * valid).sum() / total)
        with torch.no_grad():
            picks = logits.argmax(dim=1)
            picks = picks if head.draft_to_target is None else head.draft_to_target[picks]
            agreements.append(((picks == lesson.best[:, ahead:].flatten()) & valid).sum() / total)
    each_step = torch.stack(losses)
    weights = step_decay ** torch.arange(steps, device=each_step.device)
    return Outcome((each_step * weights).sum() / weights.sum(), each_step.detach(), torch.stack(agreements))


def learnable(rows: Rows, ahead: int) -> Tensor:
    """Where a drafter may stand and the token it is asked for, ahead + 1 places on, is in the sample. [B, S] bool"""
    later = rows.documents.roll(-ahead - 1, dims=1)
    later[:, -ahead - 1 :] = PAD
    return rows.learn & (rows.documents == later) & (rows.documents != PAD)
