"""A head's folder, opened: its fields and tensors under canonical names, and what is needed to build the head."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.checkpoint.plan import Plan
from peregrine.models.checkpoint.weights import Weights
from peregrine.models.draft_heads.formats import HeadFields
from peregrine.models.draft_heads.parts import DraftHead

_IGNORABLE = re.compile(r"(^|\.)(t2d|d2t|rotary_emb\.inv_freq)$")


@dataclass(frozen=True, slots=True)
class OpenedHead:
    """A head's fields, its tensors, and the stored name of each canonical name."""

    fields: HeadFields
    weights: Weights
    stored: dict[str, str]

    def placed(self, plan: Plan) -> Plan:
        """The plan in stored names. A tensor that is not stored keeps its canonical name, which `check` then misses."""
        return {
            parameter: tuple(replace(piece, name=self.stored.get(piece.name, piece.name)) for piece in pieces)
            for parameter, pieces in plan.items()
        }


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What to read into a head, which tensors to ignore, and how to make the module."""

    plan: Plan
    ignorable: Callable[[str], bool]
    build: Callable[[torch.device | str, torch.dtype], DraftHead]


def require_same(fields: Fields, name: str, head: int, target: int, what: str) -> None:
    """Refuse a head whose size differs from the target's."""
    if head != target:
        raise fields.refusal(
            name, f"the head's {what} is {head}, the target's {target}", "use the head made for this target"
        )


def is_ignorable(name: str) -> bool:
    """Whether a stored tensor repeats what the config or another tensor says."""
    return _IGNORABLE.search(name) is not None
