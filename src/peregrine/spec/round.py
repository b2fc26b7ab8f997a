"""One speculative round, start to finish.

verify    the target scores the window [newest token, drafts] in one forward over paged KV
judge     the target's token after every node is chosen
commit    the path of drafts that equal the choices is accepted, and the choice at its end is the bonus; lengths,
          history and done flags are updated on the device; rejected KV lies past the end and is overwritten
propose   the drafter reads the accepted path, then drafts past its newest token

Plain decoding is a round with no drafts. A CPU calls this function; a GPU captures this very call as one CUDA
graph: it never waits for the device, never branches on device data, and its shapes depend on `rows` alone.

A batch with a grammar in it runs the round in two parts, `verify` and the rest: while the device verifies, the host
computes which tokens are legal at each node.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from peregrine.kernels.round import Verdict, WindowPlaces
from peregrine.kernels.sampling import Features, logprobs
from peregrine.spec.bound import BoundModel
from peregrine.spec.judge import Judge
from peregrine.spec.state import Rows, RowState, SeatState
from peregrine.spec.types import Drafter, Drafts, DraftShape, Seen
from peregrine.spec.windows import Layout, Offered, Plan, Windows

Mark = Callable[[str], None]  # called with the name of each stage as it begins; benchmarks time stages with it


def no_mark(stage: str) -> None:
    """Stages are not timed."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the model's own distribution at every accepted token, in rows that asked for them."""

    chosen: Tensor  # [R, K + 1]
    top_ids: Tensor  # [R, K + 1, n]
    top: Tensor  # [R, K + 1, n]


@dataclass(frozen=True, slots=True)
class Verified:
    """What the target computed from the windows."""

    places: WindowPlaces
    logits: Tensor  # [R, T, V]; [N, V] of packed windows
    taps: Tensor | None  # [R * T, taps * H]; [N, taps * H] of packed windows
    layout: Layout | None
    windows: Windows | None  # None: every row has its whole window
    branched: RowState | None = None  # the rows with windows that branch


def run_round(
    target: BoundModel,
    drafter: Drafter,
    judge: Judge,
    seats: SeatState,
    rows: Rows,
    features: Features,
    mark: Mark = no_mark,
    plan: Plan | Offered | None = None,
) -> tuple[Verdict, Logprobs | None]:
    """Advance every row by 1 to K + 1 tokens; `seats` is read and written in place.

    A plan is the host's choice for this round: which drafts are read, chains or branched, and which rows get new ones.
    Without one, all rows do, and all drafts are read, or those that are offered.
    """
    mark("verify")
    verified = verify(target, drafter, seats, rows, plan)
    verdict, logprobs = decide(verified, target, judge, seats, rows, features, mark)
    mark("propose")
    propose(verified, verdict, drafter, seats, rows, features, None if isinstance(plan, Offered) else plan)
    return verdict, logprobs


def verify(
    target: BoundModel,
    drafter: Drafter,
    seats: SeatState,
    rows: Rows,
    layout: Layout | None = None,
    even: Tensor | None = None,
) -> Verified:
    """Score every node of the windows; where all rows rest, nothing is kept for the drafter.

    `even` [R * T] are the tokens of even windows, if the caller has them one after the other.
    """
    taps = () if layout is not None and layout.rests else drafter.taps
    state = planned_state(seats, rows, layout)
    branched = None if layout is None or layout.branched is None else state
    windows = None if layout is None or layout.windows.is_uniform else layout.windows
    num_rows, num_nodes = state.window_tokens.shape
    places = state.pages.window(state.past_lens, state.links.depths)
    ancestors = None if state.shape.is_chain else state.links.ancestors
    if windows is not None:
        packed = (windows.pack(x) for x in (state.window_tokens, places.positions, places.slots))
        tokens, positions, slots = packed
        ancestors = None if ancestors is None else windows.pack(ancestors)
        metadata = windows.metadata(state.pages, positions, places.past_lens, slots, ancestors)
        hidden, tapped = target.read(tokens, metadata, taps)  # [N, H]
        return Verified(places, target.decoder.logits(hidden), tapped, layout, windows, branched)
    metadata = state.pages.uniform(places.positions, places.past_lens, places.slots, ancestors)
    tokens = state.window_tokens.flatten() if even is None else even
    hidden, tapped = target.read(tokens, metadata, taps)  # [R * T, H]
    logits = target.decoder.logits(hidden).view(num_rows, num_nodes, -1)
    return Verified(places, logits, tapped, layout, None, branched)


def decide(
    verified: Verified,
    target: BoundModel,
    judge: Judge,
    seats: SeatState,
    rows: Rows,
    features: Features,
    mark: Mark = no_mark,
) -> tuple[Verdict, Logprobs | None]:
    """Judge and commit."""
    places, logits, windows = verified.places, verified.logits, verified.windows
    layout = verified.layout
    state = verified.branched or seats.view(planned_rows(rows, layout))
    if features.masked:
        state.clip_to_masks()

    mark("judge")
    choices = judge(logits, places, state, features, windows)  # [R, T]

    mark("commit")
    verdict = state.commit(choices)
    if layout is not None and layout.branched is not None:
        seats.view(planned_rows(rows, layout)).window_tokens[:, :1].copy_(state.window_tokens[:, :1])
    if not state.shape.is_chain:
        target.move_path(places.past_lens, verdict, state.pages.table, state.pages.page_size)
    if windows is not None and features.logprobs is not None:
        logits = windows.spread(logits, empty=0)
    return verdict, logprobs_of_path(logits, verdict, state, features)


def propose(
    verified: Verified,
    verdict: Verdict,
    drafter: Drafter,
    seats: SeatState,
    rows: Rows,
    features: Features,
    plan: Plan | None = None,
) -> None:
    """Draft for the next round; without a drafter, and where all rows rest, they have no drafts, as before."""
    if not drafter.shape.depth or (plan is not None and plan.rests and not features.masked):
        return
    whole, state = seats.view(rows), verified.branched or seats.view(planned_rows(rows, verified.layout))
    taps, windows = verified.taps, verified.windows
    if taps is not None and windows is None:
        taps = on_path(taps.view(*state.window_tokens.shape, -1), verdict, state.shape)
    elif taps is not None and windows is not None and not state.shape.is_chain:
        taps = on_path(windows.spread(taps, empty=0), verdict, state.shape)
    forced = state.forced_drafts(verdict) if features.masked else None
    if forced is not None:
        forced = forced[:, : whole.shape.depth]
    if plan is not None and plan.rests:
        whole.offered.zero_()
    else:
        lens, depth, asked = verified.places.past_lens, whole.shape.depth, plan
        if plan is not None and plan.drafts is not None:
            depth, asked = plan.drafts, None
        seen = seen_by(state, lens, taps, features, depth, forced, verified.layout, asked)
        drafts = drafter.propose(seen)
        if whole.shape.is_chain and drafts.tokens.shape[1] > depth:  # a block is drafted as a whole
            drafts = Drafts(drafts.tokens[:, :depth], depth, None)
        some = whole if asked is plan else seats.view(Rows(rows.count, rows.places, 1 + depth))
        some.keep(drafts)
    if forced is not None:
        whole.offer_forced(forced)
        if plan is not None:
            plan.force(forced)


def seen_by(
    state: RowState,
    past_lens: Tensor,
    taps: Tensor | None,
    features: Features,
    depth: int,
    forced: Tensor | None = None,
    layout: Layout | None = None,
    plan: Plan | None = None,
) -> Seen:
    """What a drafter is given after a commit; `past_lens` are those before it."""
    return Seen(
        width=state.shape.depth + 1,
        depth=depth,
        taps=taps,
        past_lens=past_lens,
        new_past_lens=state.past_lens,
        history=state.history,
        pages=state.pages,
        sampling=state.sampling,
        features=features,
        forced=forced,
        layout=layout,
        plan=plan,
    )


def planned_rows(rows: Rows, layout: Layout | None) -> Rows:
    """The rows with windows as wide as the layout's longest path."""
    return rows if layout is None else Rows(rows.count, rows.places, layout.paths.width)


def planned_state(seats: SeatState, rows: Rows, layout: Layout | None) -> RowState:
    """The rows with the windows that the layout reads."""
    state = seats.view(planned_rows(rows, layout))
    return state if layout is None or layout.branched is None else state.branch(layout.branched)


def logprobs_of_path(logits: Tensor, verdict: Verdict, state: RowState, features: Features) -> Logprobs | None:
    """Log-probabilities along the path, for the rows that asked for them."""
    if features.logprobs is None:
        return None
    path = None if state.shape.is_chain else verdict.path
    return Logprobs(*logprobs(logits, verdict.tokens, path, state.sampling.logprobs, features.logprobs))


def on_path(values: Tensor, verdict: Verdict, shape: DraftShape) -> Tensor:
    """Values of the path's nodes: [R, T, X] -> [R, W, X]; a chain's path is the window as it is."""
    if shape.is_chain:
        return values
    return values.gather(1, verdict.path[:, :, None].expand(-1, -1, values.shape[2]))
