"""DSpark's two small heads: one corrects a draft's scores by the token before it, one says how likely it is right."""

import torch
from torch import Tensor, nn

from peregrine.kernels.residual import embed_rows
from peregrine.models.checkpoint.plan import Piece, Plan, linear_plan
from peregrine.models.layers import Linear
from peregrine.models.parallel import ALONE, Ranks

MARKOV_KINDS = ("vanilla", "gated", "rnn")
_INNER = {"vanilla": "", "gated": "gate_proj", "rnn": "joint_proj"}  # stored name of the kind's own linear


class MarkovHead(nn.Module):
    """Adds to the scores of each draft what the token before it says; a walk along the block.

    Of an embedding e of that token, the block's hidden state h and a state s that begins at zero:
        vanilla    e
        gated      e * sigmoid(gate [h, e])
        rnn        s' = g * s + (1 - g) * tanh(c),  tanh(o)    with (g, c, o) = joint [s, e, h] and g a sigmoid
    goes through one linear to the vocabulary.
    """

    def __init__(
        self, kind: str, rank: int, hidden_size: int, vocab_size: int, draft_vocab_size: int, ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.embedding = nn.Parameter(torch.empty(vocab_size, rank))
        self.out = Linear(rank, draft_vocab_size, False, ranks.split(draft_vocab_size))
        self.inner: Linear | None = None
        if kind == "gated":
            self.inner = Linear(hidden_size + rank, rank, bias=True)
        elif kind == "rnn":
            self.inner = Linear(2 * rank + hidden_size, 3 * rank, bias=True)

    def embed(self, tokens: Tensor) -> Tensor:
        """[R] -> [R, rank]."""
        return embed_rows(tokens, self.embedding)

    def forward(self, tokens: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(what is added to the scores [R, Vd], next state) after tokens [R], for the draft of hidden [R, H]."""
        before = self.embed(tokens)
        if self.inner is None:
            return self.out(before), None
        if self.kind == "gated":
            return self.out(before * self.inner(torch.cat((hidden, before), dim=1)).sigmoid()), None
        state = torch.zeros_like(before) if state is None else state
        gate, candidate, output = self.inner(torch.cat((state, before, hidden), dim=1)).chunk(3, dim=1)
        gate = gate.sigmoid()
        return self.out(output.tanh()), gate * state + (1.0 - gate) * candidate.tanh()


class ConfidenceHead(nn.Module):
    """The chance that a draft is right if all before it are, from its hidden state and perhaps the token before it."""

    def __init__(self, in_size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(1, in_size)), nn.Parameter(torch.empty(1))

    def forward(self, features: Tensor) -> Tensor:
        """[n, in] -> [n] f32."""
        scores: Tensor = features.float() @ self.weight.float()[0] + self.bias.float()
        return scores.sigmoid()


def markov_plan(head: MarkovHead) -> Plan:
    """Which stored tensors make up a Markov head."""
    vocab, rank = head.embedding.shape
    plan: Plan = {"markov.embedding": (Piece("markov_head.markov_w1.weight", (vocab, rank)),)}
    plan |= linear_plan("markov.out", {"markov_head.markov_w2": _shape(head.out)}, bias=False)
    if head.inner is not None:
        plan |= linear_plan("markov.inner", {f"markov_head.{_INNER[head.kind]}": _shape(head.inner)}, bias=True)
    return plan


def confidence_plan(head: ConfidenceHead) -> Plan:
    """Which stored tensors make up a confidence head."""
    size = head.weight.shape[1]
    return {
        "confidence.weight": (Piece("confidence_head.proj.weight", (1, size)),),
        "confidence.bias": (Piece("confidence_head.proj.bias", (1,)),),
    }


def _shape(linear: Linear) -> tuple[int, int]:
    assert linear.weight is not None
    rows, columns = linear.weight.shape
    return rows, columns
