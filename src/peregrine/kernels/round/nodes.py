"""What is judged and what comes of it: windows of nodes, where rows must end, verdicts. Values only."""

from dataclasses import dataclass

from torch import Tensor

FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_FAULT = range(4)
HEADER = 4  # accept, correct, drafted, finish stand before a row's tokens and path


@dataclass(frozen=True, slots=True)
class Nodes:
    """The windows that are judged: node 0 is the root, parents come before children."""

    tokens: Tensor  # [R, T] i64; a commit puts the newest token at the root
    parents: Tensor  # [R, T] i64, the root's is itself
    depths: Tensor  # [R, T] i64
    ancestors: Tensor  # [R, T] i64 words: own bit and every ancestor's
    offered: Tensor  # [R] i64: deeper nodes are void


@dataclass(frozen=True, slots=True)
class Ends:
    """How far each row has come and where it must end; a commit moves the first and the last."""

    past_lens: Tensor  # [R] i64
    limits: Tensor  # [R] i64 most tokens in all
    stop_ids: Tensor  # [R, S] i64; -1: empty
    done: Tensor  # [R] bool: the row has ended already and takes nothing


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of the drafts, in one table for one copy to the host.

    `accept` counts the bonus token, `correct` does not.
    """

    table: Tensor  # [R, HEADER + 2 W] i64, W = K + 1

    @property
    def width(self) -> int:
        return (self.table.shape[1] - HEADER) // 2

    @property
    def accept_lens(self) -> Tensor:
        """[R]; 0 only for a row that had ended already or met a fault at its root."""
        return self.table[:, 0]

    @property
    def correct_lens(self) -> Tensor:
        """[R]: how many of the accepted tokens were drafted."""
        return self.table[:, 1]

    @property
    def drafted_lens(self) -> Tensor:
        """[R]: guesses offered (nodes, not depth)."""
        return self.table[:, 2]

    @property
    def finish(self) -> Tensor:
        """[R]: one of FINISH_*."""
        return self.table[:, 3]

    @property
    def tokens(self) -> Tensor:
        """[R, W]: the accepted tokens in order, then meaningless valid ids."""
        return self.table[:, HEADER : HEADER + self.width]

    @property
    def path(self) -> Tensor:
        """[R, W]: the window nodes that lead to them."""
        return self.table[:, HEADER + self.width :]
