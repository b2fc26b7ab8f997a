"""The operations of which a CPU's decoder, drafters and choice of tokens are made, with inputs for `row_bits.py`.

They are the ones that serve on this machine: the compiled kernels where numba is installed, the torch twins otherwise
and for bfloat16. Widths are odd, and tensors have more than 32,768 elements where torch then splits its work between
threads.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace

import torch
from torch import Tensor

from peregrine.attention import LayerAttention
from peregrine.attention.conformance.paging import attend
from peregrine.attention.conformance.problem import chain, tree
from peregrine.attention.numba_backend import NumbaBackend
from peregrine.attention.torch_backend import TorchBackend
from peregrine.kernels.activation import gelu_mul, sigmoid, silu, silu_mul, soft_cap
from peregrine.kernels.attention import DeferredMLARope, mla_rope
from peregrine.kernels.linear import pack_per_head, pack_weight
from peregrine.kernels.moe import ExpertChoice, RoutingRule, pack_experts, pack_router, route
from peregrine.kernels.norm import add_rms_norm, norm_pair, rms_norm
from peregrine.kernels.residual import Residual, add_to_residual, embed_residual
from peregrine.kernels.rope import DeferredRope, rope, rotate_heads
from peregrine.kernels.round import Ends, Growth, Nodes, commit, find_repeats, grow, select
from peregrine.kernels.sampling import (
    Context,
    Features,
    Masks,
    SamplingTensors,
    choose,
    logprobs,
    pick,
    pick_scores,
    process,
)
from peregrine.models.layers import RMSNorm

EPS = 1e-6
ROWS, WIDTH, VOCAB = 67, 515, 1031  # odd, and each tensor of ROWS has more than 32,768 elements
PARENTS = (-1, 0, 0, 1, 1, 2, 3)  # of the nodes of a tree

Result = Tensor | Iterable[Tensor]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation with the inputs of all its rows: a row is one entry of every input's first dimension."""

    name: str
    rows: tuple[Tensor, ...]
    run: Callable[..., Result]  # of any consecutive rows; every result has one entry per row


class _Draw:
    """Random inputs from one seed."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._random = torch.Generator().manual_seed(7)
        self.dtype = dtype

    def floats(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers."""
        return (torch.randn(shape, generator=self._random) * scale).to(dtype or self.dtype)

    def wholes(self, below: int, *shape: int) -> Tensor:
        """Integers from zero on."""
        return torch.randint(below, shape, generator=self._random)


def operations() -> Iterator[Operation]:
    """Every operation that the decoder, the drafters and the choice of tokens are made of, in float32 and bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        for part in (_layers, _rotations, _experts, _attention, _choices):
            for operation in part(_Draw(dtype)):
                yield Operation(f"{operation.name} {str(dtype).removeprefix('torch.')}", operation.rows, operation.run)
    yield from _bookkeeping(_Draw())


def _layers(draw: _Draw) -> Iterator[Operation]:
    x, residual = draw.floats(ROWS, WIDTH), draw.floats(ROWS, WIDTH)
    for inputs, outputs in ((WIDTH, ROWS), (33, 17), (64, VOCAB), (256, 256)):
        weight, bias = draw.floats(outputs, inputs, scale=inputs**-0.5), draw.floats(outputs)
        name, rows = f"linear {inputs}x{outputs}", draw.floats(ROWS, inputs)
        yield Operation(name, (rows,), pack_weight(weight, bias).linear)
        if weight.dtype is torch.float32:
            yield Operation(f"{name}, held in bfloat16,", (rows,), pack_weight(weight, bias, torch.bfloat16).linear)
    heads = pack_per_head(draw.floats(3, 33, 65, scale=0.1))
    yield Operation("per_head_linear", (draw.floats(ROWS, 3, 65),), heads.linear)
    weight, head_weight, embedding = draw.floats(WIDTH), draw.floats(65), draw.floats(VOCAB, WIDTH)
    tokens, norm = draw.wholes(VOCAB, ROWS), _norm(weight)
    yield Operation("rms_norm", (x,), lambda x: rms_norm(x, weight, EPS))
    yield Operation("rms_norm of heads", (draw.floats(ROWS, 9, 65),), lambda x: rms_norm(x, head_weight, EPS))
    yield Operation("add_rms_norm", (x, residual), lambda x, residual: add_rms_norm(x, residual, weight, EPS))
    yield Operation("norm_pair", (tokens, x), lambda tokens, x: norm_pair(tokens, embedding, weight, x, weight, EPS))
    gate_up = pack_weight(draw.floats(2 * WIDTH, WIDTH, scale=WIDTH**-0.5))
    yield Operation("silu_mul", (draw.floats(ROWS, 2 * WIDTH, scale=4),), silu_mul)
    yield Operation("gelu_mul", (draw.floats(ROWS, 2 * WIDTH, scale=4),), gelu_mul)
    yield Operation("soft_cap", (20 * x,), lambda x: soft_cap(x, 30.0))
    yield Operation("sigmoid", (4 * x,), sigmoid)
    yield Operation("silu", (4 * x,), silu)
    yield Operation("gate of the residual", (x,), lambda x: gate_up.gated(Residual(x, x)))
    yield Operation("residual", (x, residual), lambda x, y: _parts(add_to_residual(x, Residual(y, y), norm)))
    yield Operation("embedding", (tokens,), lambda tokens: _parts(embed_residual(tokens, embedding, norm)))


def _norm(weight: Tensor) -> RMSNorm:
    norm = RMSNorm(len(weight), EPS).to(weight.dtype).requires_grad_(False)
    norm.weight.copy_(weight)
    return norm


def _parts(result: Residual | ExpertChoice) -> list[Tensor]:
    return [part for part in astuple(result) if isinstance(part, Tensor)]


def _rotations(draw: _Draw) -> Iterator[Operation]:
    table, positions = draw.floats(64, 66, dtype=torch.float32), draw.wholes(64, ROWS)
    q, k, norm, rank = draw.floats(ROWS, 9, 66), draw.floats(ROWS, 3, 66), draw.floats(66), 67
    yield Operation("rope", (q, positions), lambda q, positions: rope(q, positions, table))

    def rotate(q: Tensor, k: Tensor, positions: Tensor) -> Result:
        return rotate_heads(q, k, DeferredRope(positions, positions, table, norm, norm, EPS))

    def rotate_latent(q: Tensor, k: Tensor, q_rope: Tensor, positions: Tensor) -> Result:
        return mla_rope(q, k, DeferredMLARope(q_rope, positions, positions, table, latent_norm, EPS))

    latent_norm, latent = draw.floats(rank), draw.floats(ROWS, 1, rank + 66)
    yield Operation("rotate_heads", (q, k, positions), rotate)
    yield Operation("MLA rotation", (draw.floats(ROWS, 9, rank + 66), latent, q, positions), rotate_latent)


RULES = {  # how real routers choose: softmax (Mixtral, Qwen3), groups (DeepSeek-V2), sigmoid and a bias (DeepSeek-V3)
    "softmax": RoutingRule(128, 8, 0, False, 1, 1, False, True, 1.0),
    "softmax, groups": RoutingRule(60, 6, 2, False, 4, 2, False, False, 16.0),
    "softmax, gated shared": RoutingRule(60, 4, 2, False, 1, 1, False, False, 1.0, True),
    "sigmoid": RoutingRule(127, 8, 1, True, 1, 1, False, True, 2.8),
    "sigmoid, groups": RoutingRule(64, 4, 1, True, 8, 3, True, True, 2.5),
}


def _experts(draw: _Draw) -> Iterator[Operation]:
    x = draw.floats(301, 48)  # 301 rows of 127 scores are more than 32,768
    for name, rule in RULES.items():
        router = pack_router(draw.floats(rule.num_experts + rule.gated_shared, 48))
        bias = draw.floats(rule.num_experts, scale=0.2, dtype=torch.float32) if rule.sigmoid else None

        def choice(x: Tensor, rule: RoutingRule = rule, router=router, bias=bias) -> Result:  # type: ignore[no-untyped-def]
            return _parts(route(Residual(x, x), router, rule, bias))

        yield Operation(f"route, {name}", (x,), choice)
    rule = RoutingRule(5, 2, 1, True, 1, 1, False, True, 1.0)
    router, norm = pack_router(draw.floats(5, 48)), _norm(draw.floats(48))
    for name, limit in (("experts", None), ("experts, biased and clamped", 0.5)):
        gate_up, down = (
            pack_experts(draw.floats(6 * size, inputs, scale=0.2), 6, draw.floats(6 * size) if limit else None, limit)
            for size, inputs in ((70, 48), (48, 35))
        )

        def mixture(x: Tensor, gate_up=gate_up, down=down) -> Result:  # type: ignore[no-untyped-def]
            residual = Residual(x, x)
            return _parts(gate_up.add(down, residual, route(residual, router, rule, None), norm))

        yield Operation(name, (x[:ROWS],), mixture)


def _attention(draw: _Draw) -> Iterator[Operation]:
    pasts, sinks = (0, 13, 64, 130, 200), torch.linspace(-1, 2, 6)
    layers = {
        "dense": ((6, 2, 32), LayerAttention(0.2, None, None)),
        "sliding window": ((6, 2, 32), LayerAttention(0.2, 40, sinks)),
        "narrow heads": ((4, 1, 24), LayerAttention(0.2, None, None)),
        "MLA": ((5, 1, 48, 32), LayerAttention(0.2, None, None)),
        "capped": ((6, 2, 32), LayerAttention(0.2, None, None, 2.0)),
    }
    for backend in (TorchBackend(), NumbaBackend()):
        if backend.missing() or draw.dtype not in backend.traits.dtypes:
            continue
        served = {name: case for name, case in layers.items() if case[1].cap is None or backend.traits.caps}
        for name, (heads, layer) in served.items():
            windows = {"chain": [chain(past, 3, heads) for past in pasts]}
            windows["tree"] = [tree(past, PARENTS, heads) for past in pasts]
            for shape, rows in windows.items():
                rows = [row.to("cpu", draw.dtype) for row in rows]

                def run(index: Tensor, rows=rows, layer=layer, backend=backend) -> Result:  # type: ignore[no-untyped-def]
                    return torch.stack(attend(backend, [rows[i] for i in index.tolist()], layer))

                yield Operation(f"attention, {backend.name}, {name}, {shape}", (torch.arange(len(pasts)),), run)


FEATURES = {
    "greedy": Features(),
    "sampled": Features(sampled=True),
    "filtered": Features(sampled=True, filtered=True),
    "penalised": Features(penalised=True),
    "biased": Features(biased=True),
    "min_len": Features(min_len=True),
    "masked": Features(masked=True),
    "everything": Features(sampled=True, filtered=True, penalised=True, biased=True, min_len=True, masked=True),
}


def _choices(draw: _Draw) -> Iterator[Operation]:
    rows, nodes, width = 23, 3, 3
    logits, positions = draw.floats(rows, nodes, VOCAB, scale=4), draw.wholes(40, rows, nodes)
    sampling = astuple(_sampling(draw, rows))[:-1]
    masks = (draw.wholes(2, rows).int(), draw.wholes(1 << 32, rows, nodes, -(-VOCAB // 32)).int())
    history, lens = draw.wholes(VOCAB, rows, 32), draw.wholes(12, rows)
    words = torch.tensor([[1, 3, 5]]).expand(rows, -1)
    before = (history, lens, lens + 15, draw.wholes(VOCAB, rows, nodes), words)
    for name, features in FEATURES.items():
        for function in (choose, process):

            def run(logits: Tensor, positions: Tensor, *rest: Tensor, function=function, features=features) -> Result:  # type: ignore[no-untyped-def]
                asked = replace(sampling_of(rest), masks=Masks(*rest[18:]))
                return function(logits, positions, asked, features, Context(*rest[13:18]))  # type: ignore[no-any-return]

            yield Operation(f"{function.__name__}, {name}", (logits, positions, *sampling, *before, *masks), run)
    ids, sampled = draw.wholes(4 * VOCAB, VOCAB), FEATURES["sampled"]

    def best(logits: Tensor, positions: Tensor, *rest: Tensor) -> Result:
        out = torch.empty_like(positions)
        pick(logits, positions, ids, sampling_of(rest), sampled, out)
        return out, pick_scores(logits, positions, ids, sampling_of(rest), sampled)

    def grown(logits: Tensor, positions: Tensor, *rest: Tensor) -> Result:
        growth = Growth.begin(len(logits), 2, width, ids, sampling_of(rest), sampled)
        frontier = grow(growth, logits[:, :1], positions[:, :1], None, 0)
        frontier = grow(growth, logits, positions, frontier, 1)
        return growth.scores, growth.tokens, growth.parents, frontier.scores, *select(growth, 7, 2)

    yield Operation("pick", (logits, positions, *sampling), best)
    yield Operation("tree growth", (logits, positions, *sampling), grown)
    yield Operation("logprobs", (logits, positions), lambda logits, chosen: logprobs(logits, chosen, None, None, 5))


def sampling_of(tensors: Sequence[Tensor]) -> SamplingTensors:
    """Sampling parameters from the first of these tensors, in the order of their fields; no masks."""
    names = [entry.name for entry in fields(SamplingTensors) if entry.name != "masks"]
    return SamplingTensors(**dict(zip(names, tensors, strict=False)))  # type: ignore[arg-type]


def _sampling(draw: _Draw, rows: int) -> SamplingTensors:
    """Parameters of which every row has others; some rows leave some of them off."""
    on = draw.wholes(4, 6, rows) > 0  # [6, R]
    near_one = 0.5 + draw.floats(3, rows, dtype=torch.float32).sigmoid() / 2
    penalties = 1 + draw.floats(2, rows, scale=0.2, dtype=torch.float32).abs()
    return SamplingTensors(
        temperature=near_one[0] * on[0],
        top_k=draw.wholes(60, rows) * on[1],
        top_p=torch.where(on[2], near_one[1], 1.0),
        log_min_p=((near_one[2] - 0.5) / 8 * on[3]).log(),
        repetition=torch.where(on[4], penalties[0], 1.0),
        presence=(penalties[1] - 1) * on[5],
        frequency=(penalties[0] - 1) * on[5],
        seeds=draw.wholes(1 << 40, rows),
        bias_ids=torch.stack([draw.wholes(200, rows), 300 + draw.wholes(200, rows)], dim=1),
        bias_values=draw.floats(rows, 2, dtype=torch.float32),
        stop_ids=draw.wholes(VOCAB, rows, 2),
        min_lens=draw.wholes(40, rows),
        logprobs=draw.wholes(6, rows),
    )


def _bookkeeping(draw: _Draw) -> Iterator[Operation]:
    """What computes with integers alone: verdicts and the n-gram look-up."""
    history, newest = draw.wholes(4, ROWS, 501), 100 + draw.wholes(400, ROWS)
    yield Operation("n-gram look-up", (history, newest), lambda history, newest: find_repeats(history, newest, 5))
    words: list[int] = []
    for node, parent in enumerate(PARENTS):
        words.append((words[parent] if node else 0) | 1 << node)
    parents = torch.tensor([max(parent, 0) for parent in PARENTS]).repeat(ROWS, 1)
    depths = torch.tensor([word.bit_count() - 1 for word in words]).repeat(ROWS, 1)
    tokens, choices = draw.wholes(3, ROWS, len(words)), draw.wholes(3, ROWS, len(words))
    nodes = (tokens, parents, depths, torch.tensor(words).repeat(ROWS, 1), draw.wholes(4, ROWS))
    past = draw.wholes(300, ROWS)
    ends = (past, past + 2 + draw.wholes(9, ROWS), draw.wholes(40, ROWS, 2), draw.wholes(5, ROWS) == 0)

    def judge(choices: Tensor, history: Tensor, *rest: Tensor) -> Result:
        history, *parts = (x.clone() for x in (history, *rest))  # a commit writes into them
        verdict = commit(choices, Nodes(*parts[:5]), Ends(*parts[5:]), history, 3)
        return verdict.table, history, *parts

    yield Operation("verdict", (choices, history, *nodes, *ends), judge)
