"""Two decisions: which backend serves a model, and which kernel of it serves a window. Both say why."""

from dataclasses import dataclass
from enum import Enum

from peregrine.attention.backend import AttentionBackend
from peregrine.attention.numba_backend import NumbaBackend
from peregrine.attention.torch_backend import TorchBackend
from peregrine.attention.traits import Needs, Traits, refusals
from peregrine.attention.window import Window
from peregrine.errors import ConfigError

# In order of preference for "auto": the torch backend takes what no other one can.
BACKENDS: tuple[AttentionBackend, ...] = (NumbaBackend(), TorchBackend())


class Kernel(Enum):
    """The two kinds of attention kernel."""

    DECODE = "decode"  # one program handles all query rows of a (row, KV head, split)
    CONTEXT = "context"  # ragged tiles


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that will run, and why it was taken and others were not."""

    backend: AttentionBackend
    reasons: tuple[str, ...]


def kernel_for(window: Window, traits: Traits) -> Kernel:
    """The decode kernel for one short length that every row shares; the context kernel for all else."""
    if window.q_len is not None and window.q_len <= traits.max_decode_q_len:
        return Kernel.DECODE
    return Kernel.CONTEXT


def choose_backend(name: str, needs: Needs) -> Choice:
    """The named backend, or for "auto" the first that fits; ConfigError with every reason when none does."""
    known = [backend.name for backend in BACKENDS]
    if name != "auto" and name not in known:
        raise ConfigError(f"attention={name!r}: no such backend; choose auto, {' or '.join(known)}")
    reasons = []
    for backend in BACKENDS:
        if name not in ("auto", backend.name):
            continue
        refused = backend.missing() + refusals(needs, backend.traits)
        if not refused:
            reasons.append(f"{backend.name}: {'asked for' if name != 'auto' else 'the first that fits'}")
            return Choice(backend, tuple(reasons))
        reasons.extend(f"{backend.name}: {reason}" for reason in refused)
    raise ConfigError(f"attention={name!r} cannot serve this model here; " + "; ".join(reasons))
