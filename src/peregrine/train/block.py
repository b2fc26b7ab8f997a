"""The objective of DFlash and DSpark heads: blocks that start at random places of the samples.

A block's newest token is the one after a place p where a drafter may start. It sees the target's hidden states up to p
and itself, as in the engine. Draft k is held against the target's distribution of the token k places after the newest.
The tokens before a draft, which a Markov head reads, are the sample's. The engine's own head module is used, with
another `attend`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from peregrine.attention import Attend, Deferred, LayerAttention
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import BlockConfig, BlockHead, dense_layers
from peregrine.models.layers import draw_weights
from peregrine.train.head import Labels, Outcome, check_taps, learnable, pick_taps, read_target
from peregrine.train.options import DSPARK, HeadOrder
from peregrine.train.rows import Rows, SampleRows, fitting_row_len
from peregrine.train.samples import Samples

DSPARK_WEIGHTS = 0.1, 0.9, 1.0  # of cross-entropy, distance of distributions, confidence
MIN_TAPS = 5


def pick_block_taps(num_layers: int) -> tuple[int, ...]:
    """Five layers from early to late, as DFlash has them, if the target is deep enough."""
    first, last = 2, num_layers - 2
    if last - first < MIN_TAPS:
        return pick_taps(num_layers)
    return tuple(first + (last - first) * i // (MIN_TAPS - 1) for i in range(MIN_TAPS))


def fresh_block_head(
    target: Decoder, taps: tuple[int, ...], ids: NDArray[np.int64] | None, order: HeadOrder, mask_token: int
) -> BlockHead:
    """A block head with random weights, but the target's final norm and output head."""
    config, is_dspark = target.config, order.kind == DSPARK
    check_taps(taps, config.num_layers)
    shape = BlockConfig(
        layer=dense_layers(config, "qwen3", order.layers, order.mlp),
        taps=taps,
        target_hidden_size=config.hidden_size,
        draft_vocab_size=config.vocab_size if ids is None else len(ids),
        mask_token=mask_token,
        block_size=order.options.unroll + (not is_dspark),
        drafts_from_newest=is_dspark,
        causal=(False,) * order.layers,
        markov="vanilla" if is_dspark else None,
        markov_rank=order.markov_rank if is_dspark else 0,
        confidence=is_dspark,
        confidence_reads_token=is_dspark,
        own_embedding=False,
        own_head=True,
    )
    chosen = None if ids is None else torch.from_numpy(ids)
    head = BlockHead(shape, target, target.embedding.device, torch.float32, chosen)
    draw_weights(head, torch.Generator().manual_seed(order.options.seed))
    assert head.head is not None
    assert head.head.weight is not None
    assert target.head.weight is not None
    with torch.no_grad():
        head.head.weight.copy_(target.head.weight if ids is None else target.head.weight[head.draft_to_target])
        head.norm.weight.copy_(target.norm.weight)
        if head.markov is not None:  # no correction at first
            assert head.markov.out.weight is not None
            head.markov.out.weight.zero_()
    return head


class BlockAttend:
    """Attention of blocks: each sees the places of its sample up to its start, and itself."""

    def __init__(
        self, layers: Sequence[LayerAttention], rows: Rows, starts: Tensor, num_inputs: int, causal: Sequence[bool]
    ) -> None:
        self.layers, self.causal, self.num_rows = layers, causal, len(rows.tokens)
        places = torch.arange(rows.tokens.shape[1], device=starts.device)
        same = rows.documents[:, None, :] == rows.documents.gather(1, starts)[:, :, None]  # [B, A, S]
        before = same & (places <= starts[:, :, None])
        number = torch.arange(starts.shape[1] * num_inputs, device=starts.device)  # of a block's token in its row
        own = number[:, None] // num_inputs == number // num_inputs
        self._before = before.repeat_interleave(num_inputs, dim=1)  # [B, A n, S]
        self._own = own.expand(self.num_rows, -1, -1)  # [B, A n, A n]
        newest = rows.positions.gather(1, starts) + 1  # [B, A]
        ahead = torch.arange(num_inputs, device=starts.device)
        self.positions = (newest[:, :, None] + ahead).flatten(1)  # [B, A n]
        self._key_positions = torch.cat((rows.positions, self.positions), dim=1)
        self._context: dict[int, tuple[Tensor, Tensor]] = {}

    def remember(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Deferred | None = None) -> Tensor:
        """Keep the keys and values of the samples' own places."""
        self._context[layer] = k, v
        return q

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Deferred | None = None) -> Tensor:
        """[B * A * n, heads, D] -> [B * A * n, heads, D]"""
        keys, values = (
            torch.cat((self._by_row(context), self._by_row(own)), dim=2)
            for context, own in zip(self._context[layer], (k, v), strict=True)
        )
        queries, spec = self._by_row(q), self.layers[layer]
        seen = torch.cat((self._before, self._own.tril() if self.causal[layer] else self._own), dim=2)
        if spec.window is not None:
            seen = seen & (self._key_positions[:, None, :] > self.positions[:, :, None] - spec.window)
        keys, values = (x.to(q.dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (keys, values))
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen[:, None], scale=spec.scale)
        return out.transpose(1, 2).flatten(0, 1)

    def _by_row(self, heads: Tensor) -> Tensor:
        """[B * n, heads, D] -> [B, heads, n, D]"""
        return heads.reshape(self.num_rows, -1, *heads.shape[1:]).transpose(1, 2)


def draw_starts(rows: Rows, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(places [B, A], whether each is one where a drafter may start [B, A]): up to `count` different ones per row."""
    possible = learnable(rows, 1)
    order = torch.rand(possible.shape, generator=generator).to(possible.device) + possible
    chosen = order.topk(min(count, order.shape[1]), dim=1).indices
    return chosen, possible.gather(1, chosen)


def block_states(head: BlockHead, rows: Rows, tapped: Tensor, starts: Tensor) -> Tensor:
    """The hidden state of every draft of the blocks that start at places [B, A] -> [B, A, K, H]."""
    config = head.config
    num_inputs, last = config.block_size, len(head.rope_table) - 1
    attend = BlockAttend(head.layer_attention(), rows, starts, num_inputs, config.causal)
    head.remember(head.fuse(tapped), rows.positions.flatten(), attend.remember)
    tokens = torch.full((*starts.shape, num_inputs), config.mask_token, device=starts.device)
    tokens[:, :, 0] = rows.tokens.gather(1, (starts + 1).clamp(max=rows.tokens.shape[1] - 1))
    positions = attend.positions.clamp(max=last).flatten()
    block: Attend = attend
    hidden = head.forward(tokens.flatten(), positions, block).view(*starts.shape, num_inputs, -1)
    return hidden[:, :, num_inputs - config.max_drafts :]


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a head drafts in n blocks of K drafts, and what the target says there."""

    scores: Tensor  # [n, K, Vd]
    wanted: Tensor  # [n, K, Vd] the target's probabilities
    agreed: Tensor  # [n, K] bool: the head's likeliest token is the target's
    mask: Tensor  # [n, K] bool: the draft lies in its sample
    distance: Tensor | None  # [n, K] of the two distributions, 0 to 2; of a head with confidences
    chances: Tensor | None  # [n, K] its confidences


def draft_blocks(head: BlockHead, rows: Rows, labels: Labels, starts: Tensor, allowed: Tensor) -> Drafted:
    """The drafts of the blocks that start at places [B, A], where allowed."""
    hidden = block_states(head, rows, labels.tapped, starts)
    depth, states = hidden.shape[2], hidden.flatten(0, 1)  # [n, K, H]
    ahead = torch.arange(1, depth + 1, device=starts.device)
    places = (starts[:, :, None] + ahead).clamp(max=rows.tokens.shape[1] - 1).flatten(1)  # of the tokens before drafts
    valid = torch.stack([learnable(rows, k).gather(1, starts) & allowed for k in range(1, depth + 1)], dim=2)
    before = rows.tokens.gather(1, places).view(-1, depth)
    scores = head.logits(states.flatten(0, 1)).float().view(len(before), depth, -1)
    if head.markov is not None:
        added, state = head.markov(before.flatten(), states.flatten(0, 1), None)
        assert state is None, "a Markov head with a state is not trained"
        scores = scores + added.float().view_as(scores)
    size = labels.probabilities.shape[2]
    wanted = labels.probabilities.gather(1, places[:, :, None].expand(-1, -1, size)).view(len(before), depth, size)
    with torch.no_grad():
        picks = scores.argmax(dim=2)
        picks = picks if head.draft_to_target is None else head.draft_to_target[picks]
        agreed = picks == labels.best.gather(1, places).view(-1, depth)
    distance = chances = None
    if head.confidence is not None:
        distance = (scores.softmax(dim=2) - wanted).abs().sum(dim=2)  # tokens that cannot be drafted count half
        chances = head.confidences(states.flatten(0, 1), before.flatten()).view(-1, depth)
    return Drafted(scores, wanted, agreed, valid.flatten(0, 1), distance, chances)


def block_loss(
    head: BlockHead, rows: Rows, labels: Labels, starts: Tensor, allowed: Tensor, step_decay: float
) -> Outcome:
    """The loss of the blocks that start at places [B, A], where allowed; draft k has weight step_decay ** (k - 1).

    DFlash: cross-entropy with the target's distribution. DSpark: less of that, the distance of the distributions, and
    how well the confidence head knows the chance that both agree, which is one minus half that distance.
    """
    drafted = draft_blocks(head, rows, labels, starts, allowed)
    depth, mask = drafted.mask.shape[1], drafted.mask
    entropy = F.cross_entropy(drafted.scores.flatten(0, 1), drafted.wanted.flatten(0, 1), reduction="none")
    each = entropy = entropy.view(-1, depth)
    if drafted.distance is not None and drafted.chances is not None:
        alike = (1 - drafted.distance / 2).detach().clamp(0, 1)
        chances = drafted.chances.clamp(1e-6, 1 - 1e-6)
        surprise = -(alike * chances.log() + (1 - alike) * (1 - chances).log())  # the library's refuses autocast
        each = DSPARK_WEIGHTS[0] * each + DSPARK_WEIGHTS[1] * drafted.distance + DSPARK_WEIGHTS[2] * surprise
    total = mask.sum(dim=0).clamp(min=1)
    losses = (each * mask).sum(dim=0) / total
    agreement = (drafted.agreed & mask).sum(dim=0) / total
    weights = step_decay ** torch.arange(depth, device=losses.device)
    shown = ((entropy * mask).sum(dim=0) / total).detach()
    return Outcome((losses * weights).sum() / weights.sum(), shown, agreement)


@torch.no_grad()
def calibration(head: BlockHead, target: Decoder, samples: Samples) -> list[dict[str, float]]:
    """How sure a head with confidences is, in tenths, and how often it is right, over every block of the samples.

    `agrees` is the chance that both distributions give one token, which confidences are trained for; `greedy` is the
    share of drafts whose likeliest token is the target's.
    """
    packed = SampleRows(samples, fitting_row_len(samples))
    found: list[Tensor] = []
    for number in range(len(packed.bins)):
        rows = packed.rows(np.array([number])).to(head.norm.weight.device)
        starts = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)[None]
        drafted = draft_blocks(head, rows, read_target(target, head, rows), starts, learnable(rows, 1))
        assert drafted.distance is not None
        assert drafted.chances is not None
        each = torch.stack((drafted.chances, 1 - drafted.distance / 2, drafted.agreed.float()), dim=2)
        found.append(each[drafted.mask].cpu())
    values = torch.cat(found)
    tenths = (values[:, 0] * 10).long().clamp(max=9)
    bins = [(len(part), *part.mean(dim=0).tolist()) for k in range(10) if len(part := values[tenths == k])]
    return [dict(zip(("drafts", "confidence", "agrees", "greedy"), entry, strict=True)) for entry in bins]
