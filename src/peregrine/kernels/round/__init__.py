"""The bookkeeping of a speculative round: verdict, positions and slots, drafts, trees, n-gram look-up."""

from peregrine.kernels.round.allot import WindowTensors, allot_windows
from peregrine.kernels.round.answers import AnswerPool, add_answer, find_answers
from peregrine.kernels.round.drafts import keep_drafts, move_path
from peregrine.kernels.round.gate import Gate, GateRule, pass_gate
from peregrine.kernels.round.ngram import find_repeats
from peregrine.kernels.round.places import (
    AheadPlaces,
    PathPlaces,
    WindowPlaces,
    ahead_places,
    path_places,
    slots_of,
    window_places,
)
from peregrine.kernels.round.tree import Frontier, Growth, grow, select
from peregrine.kernels.round.verdict import (
    FINISH_FAULT,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    HEADER,
    Ends,
    Nodes,
    Verdict,
    commit,
)

__all__ = [
    "FINISH_FAULT",
    "FINISH_LENGTH",
    "FINISH_NONE",
    "FINISH_STOP",
    "HEADER",
    "AheadPlaces",
    "AnswerPool",
    "Ends",
    "Frontier",
    "Gate",
    "GateRule",
    "Growth",
    "Nodes",
    "PathPlaces",
    "Verdict",
    "WindowPlaces",
    "WindowTensors",
    "add_answer",
    "ahead_places",
    "allot_windows",
    "commit",
    "find_answers",
    "find_repeats",
    "grow",
    "keep_drafts",
    "move_path",
    "pass_gate",
    "path_places",
    "select",
    "slots_of",
    "window_places",
]
