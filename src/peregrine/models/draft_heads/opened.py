"""A head's folder, opened: its fields and tensors under canonical names, and what is needed to build the head."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peregrine.errors import CheckpointError
from peregrine.models.checkpoint.folder import Fields
from peregrine.models.checkpoint.plan import Plan
from peregrine.models.checkpoint.weights import Weights
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads.formats import HeadFields
from peregrine.models.draft_heads.parts import DraftHead

_INTEGERS = ("I64", "I32")
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
    """What to read into a head, which tensors to ignore, and how to make the module for a target."""

    plan: Plan
    ignorable: Callable[[str], bool]
    build: Callable[[Decoder, torch.device | str, torch.dtype], DraftHead]
    max_drafts: int | None = None  # of one forward; None: as many as are asked for
    says: bool = False  # whether it has a confidence head


def require_same(fields: Fields, name: str, head: int, target: int, what: str) -> None:
    """Refuse a head whose size differs from the target's."""
    if head != target:
        raise fields.refusal(
            name, f"the head's {what} is {head}, the target's {target}", "use the head made for this target"
        )


def is_ignorable(name: str) -> bool:
    """Whether a stored tensor repeats what the config or another tensor says."""
    return _IGNORABLE.search(name) is not None


def read_draft_to_target(source: OpenedHead, size: int, vocab_size: int) -> Tensor | None:
    """The target id of each of `size` draft ids; None where the vocabularies are the same. [Vd] i64"""
    weights = source.weights
    place = f"d2t in {str(weights.folder)!r}"
    if "d2t" not in source.stored:
        if size != vocab_size:
            raise CheckpointError(
                f"no {place}: the head guesses {size} of the target's {vocab_size} tokens and "
                "must say which; use the files the config belongs to"
            )
        return None
    name = source.stored["d2t"]
    if weights.shape(name) != (size,) or weights.stored_dtype(name) not in _INTEGERS:
        found = f"{weights.stored_dtype(name)} {list(weights.shape(name))}"
        raise CheckpointError(f"{place} is {found}, not whole numbers [{size}]; use the files the config belongs to")
    own = torch.arange(size)
    ids = weights.tensor(name).long() + own
    if not torch.equal(ids.clamp(0, vocab_size - 1), ids):
        raise CheckpointError(
            f"{place} maps outside the target's {vocab_size} tokens; it must hold offsets, target id minus draft id"
        )
    return None if size == vocab_size and torch.equal(ids, own) else ids
