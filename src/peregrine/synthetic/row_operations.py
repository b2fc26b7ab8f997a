"""Every operation of the CPU's hot path as a function of rows, with random inputs; see `row_bits.py`.

In float32 numba's kernels run where numba is installed; in bfloat16, and without numba, the torch twins do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from peregrine.attention.backend import LayerAttention
from peregrine.attention.conformance.paging import attend
from peregrine.attention.conformance.problem import Heads, Row, chain
from peregrine.attention.numba_backend import NumbaBackend
from peregrine.attention.torch_backend import TorchBackend
from peregrine.kernels.activation import sigmoid, silu, silu_mul
from peregrine.kernels.linear import linear, pack_per_head, pack_weight, per_head_linear
from peregrine.kernels.moe import ExpertChoice, RoutingRule, join_experts, pack_experts, pack_router, route
from peregrine.kernels.norm import add_rms_norm, rms_norm
from peregrine.kernels.residual import Residual
from peregrine.kernels.rope import DeferredRope, rope, rotate_heads
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.kernels.sampling import Context, Features, SamplingTensors, choose, logprobs, pick_scores

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
NUM_ROWS = 40
EPS = 1e-6

Outputs = tuple[Tensor, ...]  # of one row
# (rows, elements between the start of an input's memory and its first value) -> outputs of each row
Run = Callable[[Sequence[int], int], list[Outputs]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: `build(size, dtype)` draws NUM_ROWS rows of its inputs, and weights."""

    name: str
    build: Callable[[int, torch.dtype], Run]
    sizes: tuple[int, ...]  # that `check_machine` takes; what a size is depends on the operation
    dtypes: tuple[torch.dtype, ...] = (FLOAT32, BFLOAT16)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal noise."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def by_rows(operation: Callable[..., Tensor | Outputs], *inputs: Tensor) -> Run:
    """An operation of tensors whose first dimension is rows."""

    def run(rows: Sequence[int], offset: int) -> list[Outputs]:
        chosen = torch.tensor(rows)
        out = operation(*(moved(x.index_select(0, chosen), offset) for x in inputs))
        outs = out if isinstance(out, tuple) else (out,)
        return [tuple(each[i] for each in outs) for i in range(len(rows))]

    return run


def moved(x: Tensor, offset: int) -> Tensor:
    """A copy that begins `offset` elements into its memory."""
    return x.new_empty(x.numel() + offset)[offset:].view(x.shape).copy_(x)


# How each operation is built. Sizes are the inner dimension unless said otherwise.


def build_linear(size: int, dtype: torch.dtype) -> Run:
    packed = pack_weight(draw(size + 3, size).to(dtype), draw(size + 3).to(dtype))
    return by_rows(lambda x: linear(x, packed), draw(NUM_ROWS, size).to(dtype))


def build_per_head_linear(size: int, dtype: torch.dtype) -> Run:
    packed = pack_per_head(draw(3, size + 3, size).to(dtype))
    return by_rows(lambda x: per_head_linear(x, packed), draw(NUM_ROWS, 3, size).to(dtype))


def build_rms_norm(size: int, dtype: torch.dtype) -> Run:
    weight = draw(size).to(dtype)
    return by_rows(lambda x: rms_norm(x, weight, EPS), draw(NUM_ROWS, size).to(dtype))


def build_head_norm(size: int, dtype: torch.dtype) -> Run:
    weight = draw(size).to(dtype)
    return by_rows(lambda x: rms_norm(x, weight, EPS), draw(NUM_ROWS, 3, size).to(dtype))


def build_add_rms_norm(size: int, dtype: torch.dtype) -> Run:
    weight, (x, residual) = draw(size).to(dtype), draw(2, NUM_ROWS, size).to(dtype)
    return by_rows(lambda x, residual: add_rms_norm(x, residual, weight, EPS), x, residual)


def build_silu_mul(size: int, dtype: torch.dtype) -> Run:
    return by_rows(silu_mul, draw(NUM_ROWS, 2 * size).to(dtype))


def build_silu(size: int, dtype: torch.dtype) -> Run:
    return by_rows(silu, draw(NUM_ROWS, size).to(dtype))


def build_sigmoid(size: int, dtype: torch.dtype) -> Run:
    return by_rows(sigmoid, draw(NUM_ROWS, size).to(dtype))


def build_rope(size: int, dtype: torch.dtype) -> Run:
    table, positions = draw(NUM_ROWS, size), torch.arange(NUM_ROWS).flip(0)
    return by_rows(lambda x, where: rope(x, where, table), draw(NUM_ROWS, 3, size).to(dtype), positions)


def build_rotate_heads(size: int, dtype: torch.dtype) -> Run:
    """Head norms and rotation as a backend does them that takes them over."""
    table, positions = draw(NUM_ROWS, size), torch.arange(NUM_ROWS).flip(0)
    norms = draw(2, size).to(dtype)

    def operation(q: Tensor, k: Tensor, where: Tensor) -> Outputs:
        return rotate_heads(q, k, DeferredRope(where, where, table, norms[0], norms[1], EPS))

    return by_rows(operation, draw(NUM_ROWS, 4, size).to(dtype), draw(NUM_ROWS, 2, size).to(dtype), positions)


def build_attention(size: int, dtype: torch.dtype, heads: Heads, compiled: bool) -> Run:
    """Rows of 1 to 5 queries over up to `size` keys; pages of 16."""
    past = [(7 * i) % size for i in range(NUM_ROWS)]
    drawn = [chain(past[i], 1 + i % 5, heads, seed=i).to("cpu", dtype) for i in range(NUM_ROWS)]
    layer = LayerAttention(heads[2] ** -0.5, None, None)
    backend = NumbaBackend() if compiled else TorchBackend()

    def run(rows: Sequence[int], offset: int) -> list[Outputs]:
        given = [Row(r.past, r.positions, r.words, moved(r.q, offset), r.k, r.v) for r in (drawn[i] for i in rows)]
        return [(out,) for out in attend(backend, given, layer)]

    return run


def routing_rule(size: int, by_sigmoid: bool) -> RoutingRule:
    groups = 4 if by_sigmoid and size % 4 == 0 else 1
    return RoutingRule(
        num_experts=size,
        top_k=3,
        num_shared=1,
        sigmoid=by_sigmoid,
        num_groups=groups,
        top_groups=max(1, groups - 1),
        best_two=True,
        normalise=True,
        scale=2.5,
    )


def build_route(size: int, dtype: torch.dtype, by_sigmoid: bool) -> Run:
    """`size` experts."""
    packed, bias, rule = pack_router(draw(size, 64).to(dtype)), draw(size), routing_rule(size, by_sigmoid)

    def operation(x: Tensor) -> Outputs:
        choice = route(Residual(x, x), packed, rule, bias if by_sigmoid else None)
        return choice.experts, choice.weights

    return by_rows(operation, draw(NUM_ROWS, 64).to(dtype))


def build_experts(size: int, dtype: torch.dtype) -> Run:
    """Four experts of which every row takes two."""
    gate_up = pack_experts(draw(4 * 2 * 24, size).to(dtype), 4)
    down, norm = pack_experts(draw(4 * size, 24).to(dtype), 4), draw(size).to(dtype)
    chosen = draw(NUM_ROWS, 4).argsort(dim=1)[:, :2].int()

    def operation(x: Tensor, experts: Tensor, weights: Tensor) -> Outputs:
        after = join_experts(Residual(x, x), ExpertChoice(experts, weights), gate_up, down, norm, EPS)
        return after.values, after.ready

    return by_rows(operation, draw(NUM_ROWS, size).to(dtype), chosen, draw(NUM_ROWS, 2).abs())


def sampling_rows(size: int) -> dict[str, Tensor]:
    """Fields of SamplingTensors with parameters of all kinds; every fourth row is greedy."""
    numbers = torch.arange(NUM_ROWS)
    return {
        "temperature": (numbers % 4) * 0.4,
        "top_k": numbers % 7,
        "top_p": 1 - (numbers % 3) * 0.1,
        "min_p": (numbers % 5) * 0.01,
        "repetition": 1 + (numbers % 2) * 0.3,
        "presence": (numbers % 3) * 0.2,
        "frequency": (numbers % 4) * 0.1,
        "seeds": numbers * 7919,
        "bias_ids": torch.stack([numbers % size, torch.full_like(numbers, -1)], dim=1),
        "bias_values": draw(NUM_ROWS, 2),
        "stop_ids": (numbers % size)[:, None],
        "min_lens": numbers,
    }


def build_choose(size: int, dtype: torch.dtype, features: Features) -> Run:
    """A vocabulary of `size`, windows of two."""
    sampling = sampling_rows(size)
    history = draw(NUM_ROWS, 12).mul(size).long().remainder(size)
    ancestors = torch.tensor([1, 3]).expand(NUM_ROWS, 2)

    def operation(logits: Tensor, positions: Tensor, history: Tensor, words: Tensor, *values: Tensor) -> Tensor:
        lens = torch.full((len(logits),), 10)
        context = Context(history, lens - 6, lens, history[:, 9:11].contiguous(), words)
        rows = SamplingTensors(**dict(zip(sampling, values, strict=True)))
        return choose(logits, positions, rows, features, context)

    positions = torch.arange(2 * NUM_ROWS).view(NUM_ROWS, 2)
    logits = 4 * draw(NUM_ROWS, 2, size).to(dtype)
    return by_rows(operation, logits, positions, history, ancestors, *sampling.values())


def build_pick_scores(size: int, dtype: torch.dtype) -> Run:
    """A vocabulary of `size`: logits over temperature, plus noise."""
    sampling = sampling_rows(size)

    def operation(logits: Tensor, positions: Tensor, *values: Tensor) -> Tensor:
        rows = SamplingTensors(**dict(zip(sampling, values, strict=True)))
        return pick_scores(logits, positions, None, rows, Features(sampled=True))

    logits, positions = draw(NUM_ROWS, 1, size).to(dtype), torch.arange(NUM_ROWS)[:, None]
    return by_rows(operation, logits, positions, *sampling.values())


def build_logprobs(size: int, dtype: torch.dtype) -> Run:
    """A vocabulary of `size`."""
    tokens = torch.arange(NUM_ROWS) % size
    return by_rows(lambda logits, chosen: logprobs(logits, chosen, 5), draw(NUM_ROWS, size).to(dtype), tokens)


DENSE, MLA = (4, 2, 32), (4, 1, 40, 32)
ALL_FEATURES = Features(sampled=True, filtered=True, penalised=True, biased=True, min_len=True)
OPERATIONS = (
    Operation("linear", build_linear, (5, 131)),
    Operation("linear per head", build_per_head_linear, (5, 64)),
    Operation("rms norm", build_rms_norm, (5, 64, 1003)),
    Operation("rms norm of heads", build_head_norm, (6, 64)),
    Operation("rms norm of a sum", build_add_rms_norm, (5, 64, 1003)),
    Operation("rope", build_rope, (6, 64)),
    Operation("rope of normed heads", build_rotate_heads, (6, 64)),
    Operation("silu", build_silu, (5, 1003)),
    Operation("sigmoid", build_sigmoid, (5, 1003)),
    Operation("gated activation", build_silu_mul, (5, 1003)),
    Operation("attention in torch", partial(build_attention, heads=DENSE, compiled=False), (60,)),
    Operation("MLA in torch", partial(build_attention, heads=MLA, compiled=False), (60,)),
    *(
        (
            Operation("attention", partial(build_attention, heads=DENSE, compiled=True), (60,), (FLOAT32,)),
            Operation("MLA", partial(build_attention, heads=MLA, compiled=True), (60,), (FLOAT32,)),
        )
        if NUMBA_PRESENT
        else ()
    ),
    Operation("routing by softmax", partial(build_route, by_sigmoid=False), (7, 64)),
    Operation("routing by sigmoid", partial(build_route, by_sigmoid=True), (7, 64)),
    Operation("experts", build_experts, (37, 64)),
    Operation("greedy sampling", partial(build_choose, features=Features()), (37, 1003)),
    Operation("sampling", partial(build_choose, features=Features(sampled=True)), (37, 1003)),
    Operation("sampling with all parameters", partial(build_choose, features=ALL_FEATURES), (37, 1003)),
    Operation("scores of drafts", build_pick_scores, (37, 1003)),
    Operation("log-probabilities", build_logprobs, (37, 1003)),
)
