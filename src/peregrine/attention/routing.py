"""Which attention backend serves a model, and why."""

from dataclasses import dataclass

from peregrine.attention.backend import AttentionBackend
from peregrine.attention.numba_backend import NumbaBackend
from peregrine.attention.torch_backend import TorchBackend
from peregrine.attention.traits import Needs, refusals
from peregrine.attention.triton_backend import TritonBackend
from peregrine.errors import ConfigError

# In order of preference for "auto": the torch backend serves what no other one can.
BACKENDS: tuple[AttentionBackend, ...] = (TritonBackend(), NumbaBackend(), TorchBackend())


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend that will run, and why it was chosen and others were not."""

    backend: AttentionBackend
    reasons: tuple[str, ...]


def choose_backend(name: str, needs: Needs) -> BackendChoice:
    """The named backend, or for "auto" the first that fits; ConfigError with every reason when none does."""
    known = [backend.name for backend in BACKENDS]
    if name != "auto" and name not in known:
        raise ConfigError(f"attention={name!r}: no such backend; choose auto, {', '.join(known[:-1])} or {known[-1]}")
    reasons = []
    for backend in BACKENDS:
        if name not in ("auto", backend.name):
            continue
        refused = backend.missing() + refusals(needs, backend.traits)
        if name == "auto" and not backend.traits.automatic:
            refused.append("is interpreted, which is for tests; ask for it by name")
        if not refused:
            reasons.append(f"{backend.name}: {'asked for' if name != 'auto' else 'the first that fits'}")
            return BackendChoice(backend, tuple(reasons))
        reasons.extend(f"{backend.name}: {reason}" for reason in refused)
    raise ConfigError(f"attention={name!r} cannot serve this model here; " + "; ".join(reasons))
