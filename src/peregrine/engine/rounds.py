"""Rounds and prompt chunks as calls that every rank makes on its own parts, from what the host of rank 0 knows.

A call is told with plain values: the rows of a round, which features of the sampling law are in use, what was planned,
the tokens and pages of a chunk. Everything else is on every rank already or follows there: seats, drafts, verdicts. So
a round is one message, whatever the drafter does in it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peregrine.attention.backend import AttentionBackend
from peregrine.attention.metadata import AttentionMetadata
from peregrine.attention.window import Window
from peregrine.cache.store import KVStore
from peregrine.config import EngineConfig, TreeShape
from peregrine.hardware import upload
from peregrine.kernels.round import Verdict
from peregrine.kernels.sampling import Features
from peregrine.models.decoder import Decoder
from peregrine.models.parallel import on_every_rank
from peregrine.spec.bound import BoundModel
from peregrine.spec.judge import Judge, judge
from peregrine.spec.registry import DraftSource, make_drafter
from peregrine.spec.replayed import ReplayedRounds
from peregrine.spec.round import Logprobs, Mark, Verified, decide, no_mark, propose, run_round, verify
from peregrine.spec.state import Rows, SeatState
from peregrine.spec.suffix import SuffixDrafter
from peregrine.spec.types import Chunk, Drafter
from peregrine.spec.windows import Offered, Plan
from peregrine.synthetic.judge import SimulatedJudge

IntArray = npt.NDArray[np.int64]
SCORED_AT_ONCE = 64  # prompt tokens whose logits exist at a time
led = on_every_rank("rounds")

TakeScores = Callable[[int, Tensor, Tensor], None]  # chunk, logits [n, V] of some of its tokens, their next tokens [n]


@dataclass(frozen=True, slots=True)
class RoundOptions:
    """What rounds are like for the life of an engine."""

    depth: int
    tree: TreeShape | None
    num_seats: int
    max_len: int
    simulate_accept: float | None
    threshold: float | None  # of confidence; None: what heads say of drafts is not asked for

    @staticmethod
    def of(asked: EngineConfig, num_seats: int, max_len: int) -> "RoundOptions":
        threshold = asked.confidence_threshold if asked.ragged else None
        return RoundOptions(asked.depth, asked.tree, num_seats, max_len, asked.simulate_accept, threshold)


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """What a forward over parts of several prompts reads, on the host: one entry per token, prompt after prompt."""

    tokens: IntArray  # [N]
    following: IntArray  # [N] the token after each
    positions: IntArray  # [N]
    slots: IntArray  # [N]
    lens: IntArray  # [R] tokens of each prompt
    starts: IntArray  # [R] the place of its first
    table: IntArray  # [R, P] its pages up to the end, then the scratch page
    page_size: int

    def upload(self, device: torch.device) -> Chunk:
        """On the device, without taps."""
        metadata = AttentionMetadata(
            window=Window.ragged(self.lens.tolist()),
            positions=upload(self.positions, device),
            q_starts=upload(np.concatenate([[0], self.lens.cumsum()]), device),
            past_lens=upload(self.starts, device),
            page_table=upload(self.table, device),
            page_size=self.page_size,
            slots=upload(self.slots, device),
            ancestors=None,
        )
        return Chunk(upload(self.tokens, device), upload(self.following, device), None, metadata)


class Rounds:
    """The target, the drafter, the judge and the seats, and the calls that run them on every rank."""

    def __init__(
        self, target: BoundModel, drafter: Drafter, judge: Judge, seats: SeatState, trims: bool = False
    ) -> None:
        self.target, self.drafter, self.judge, self.seats = target, drafter, judge, seats
        self.trims = trims  # without a plan, windows end with the drafts that are offered, which the host can see
        self.ranks, self.device = target.ranks, seats.device
        self.replayed = ReplayedRounds.of(target, drafter, judge, seats)
        self.begun: tuple[Verified, Plan | None] | None = None  # a round in two parts, of which the first is done

    @staticmethod
    def make(
        model: Decoder, draft: DraftSource, stores: list[KVStore], backend: AttentionBackend, options: RoundOptions
    ) -> "Rounds":
        """The parts of this rank on its stores, the target's first."""
        target, ranks = BoundModel(model, model.layer_attention(), stores[0], backend), model.ranks
        drafter = make_drafter(draft, options.depth, options.tree, stores[-1], backend, options.threshold)
        device, page_size = stores[0].keys.device, stores[0].page_size
        seats = SeatState(options.num_seats, drafter.shape, options.max_len, page_size, device, ranks)
        accept = options.simulate_accept
        verdicts: Judge = judge if accept is None else SimulatedJudge(accept, drafter.shape.depth, device)
        return Rounds(target, drafter, verdicts, seats, trims=bool(options.threshold) and device.type == "cpu")

    @led
    def run(
        self, rows: Rows, features: Features, plan: Plan | None = None, *, mark: Mark = no_mark
    ) -> tuple[Verdict, Logprobs | None]:
        """One round; see `run_round`."""
        parts, read = (self.target, self.drafter, self.judge, self.seats), plan or self._offered(rows)
        if self.replayed is not None and self.replayed.serves(rows, read):
            return self.replayed.run(rows, features, mark, read)
        return run_round(*parts, rows, self._own(features), mark, read)

    @led
    def verify(self, rows: Rows, plan: Plan | None = None) -> Verified:
        """The first part of a round."""
        read = plan or self._offered(rows)
        if self.replayed is not None and self.replayed.serves(rows, read):
            verified = self.replayed.verify(rows, read)
        else:
            verified = verify(self.target, self.drafter, self.seats, rows, read)
        self.begun = verified, plan
        return verified

    @led
    def settle(self, rows: Rows, features: Features, *, mark: Mark = no_mark) -> tuple[Verdict, Logprobs | None]:
        """The rest of the round that was begun."""
        assert self.begun is not None
        (verified, plan), features = self.begun, self._own(features)
        verdict, logprobs = decide(verified, self.target, self.judge, self.seats, rows, features, mark)
        mark("propose")
        propose(verified, verdict, self.drafter, self.seats, rows, features, plan)
        return verdict, logprobs

    @led
    def read(self, inputs: ChunkInputs, scored: bool, absorbs: bool, *, take: TakeScores | None = None) -> None:
        """One ragged forward of the target; `take` gets logits for scores. If it `absorbs`, so does the drafter."""
        target, chunk, wanted = self.target, inputs.upload(self.device), self.drafter.taps if absorbs else ()
        if scored:
            hidden, taps = target.read(chunk.tokens, chunk.metadata, wanted)  # [N, H]
            start = 0
            for number, length in enumerate(inputs.lens.tolist()):
                for low in range(start, start + length, SCORED_AT_ONCE):
                    places = slice(low, min(low + SCORED_AT_ONCE, start + length))
                    logits = target.decoder.logits(hidden[places])
                    if take is not None:
                        take(number, logits, chunk.next_tokens[places])
                start += length
        else:
            taps = target.fill(chunk.tokens, chunk.metadata, wanted)
        if absorbs:
            self.drafter.absorb(replace(chunk, taps=taps))

    @led
    def absorb(self, inputs: ChunkInputs) -> None:
        """Let a drafter that needs no taps absorb what the target has read before."""
        self.drafter.absorb(inputs.upload(self.device))

    @property
    def looks_up(self) -> bool:
        """Whether the drafter looks finished answers up."""
        return isinstance(self.drafter, SuffixDrafter)

    @on_every_rank("rounds", at_once=False)
    def learn(self, answer: list[int]) -> None:
        """Let the drafter, which looks answers up, know a finished one."""
        assert isinstance(self.drafter, SuffixDrafter)
        self.drafter.learn(answer)

    @on_every_rank("rounds", at_once=False)
    def forget(self) -> None:
        """Let the drafter, which looks answers up, forget them all."""
        assert isinstance(self.drafter, SuffixDrafter)
        self.drafter.forget()

    def _offered(self, rows: Rows) -> Offered | None:
        """Windows of the drafts that are offered, if they are read so; every rank sees the same."""
        if not self.trims:
            return None
        return Offered(tuple(1 + drafts for drafts in self.seats.view(rows).offered.tolist()))

    def _own(self, features: Features) -> Features:
        """What this rank computes: log-probabilities are rank 0's alone."""
        return replace(features, logprobs=None) if self.ranks.rank else features
