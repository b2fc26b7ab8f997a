"""Which kernel of a backend serves a window: by the window's shape, and where both may, by what they cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from peregrine.attention.traits import Traits
from peregrine.attention.window import Window


class Kernel(Enum):
    """The two kinds of attention kernel."""

    DECODE = "decode"  # many programs share the keys of a tile of queries
    CONTEXT = "context"  # one program reads all keys of a tile; takes any window


Shape = tuple[int, int]  # rows, queries on each


@dataclass(frozen=True, slots=True)
class KernelCosts:
    """Milliseconds that the kernels took for uniform windows, measured where they run."""

    times: Mapping[Shape, tuple[float, float]]  # shape -> decode, context

    def of(self, window: Window) -> tuple[float, float] | None:
        """(decode, context) for this very window; None if it was not measured."""
        return None if window.q_len is None else self.times.get((window.num_rows, window.q_len))


UNMEASURED = KernelCosts({})


def only(kernel: Kernel, shapes: Sequence[Shape]) -> KernelCosts:
    """Costs under which one kernel serves these shapes, as far as it takes them."""
    cost = (0.0, 1.0) if kernel is Kernel.DECODE else (1.0, 0.0)
    return KernelCosts(dict.fromkeys(shapes, cost))


def admits(kernel: Kernel, window: Window, traits: Traits) -> bool:
    """Whether the kernel can serve this window at all."""
    if kernel is Kernel.CONTEXT:
        return True
    return window.q_len is not None and window.q_len <= traits.max_decode_q_len


def kernel_for(window: Window, traits: Traits, costs: KernelCosts = UNMEASURED) -> Kernel:
    """The decode kernel for one short length that every row shares, unless context is faster; else context."""
    if not admits(Kernel.DECODE, window, traits):
        return Kernel.CONTEXT
    decode_ms, context_ms = costs.of(window) or (0.0, 0.0)
    return Kernel.DECODE if decode_ms <= context_ms else Kernel.CONTEXT


def kernel_reason(window: Window, traits: Traits, costs: KernelCosts = UNMEASURED) -> str:
    """Why `kernel_for` takes what it takes, for people."""
    kernel = kernel_for(window, traits, costs)
    shape = f"{window.num_rows} x {window.q_len or f'up to {window.max_q_len}'}"
    if traits.max_decode_q_len == 0:
        return f"{shape}: {kernel.value}, the only kernel there is"
    if window.q_len is None:
        return f"{shape}: {kernel.value}, rows differ in length"
    if window.q_len > traits.max_decode_q_len:
        return f"{shape}: {kernel.value}, decode takes at most {traits.max_decode_q_len} queries a row"
    times = costs.of(window)
    if times is None:
        return f"{shape}: {kernel.value}, measured when an engine starts"
    return f"{shape}: {kernel.value}, decode took {times[0]:.4f} ms and context {times[1]:.4f} ms"


def measure_costs(shapes: Sequence[Shape], time_ms: Callable[[Kernel, Shape], float]) -> KernelCosts:
    """Time both kernels for each shape, which the caller knows decode to admit."""
    return KernelCosts({s: (time_ms(Kernel.DECODE, s), time_ms(Kernel.CONTEXT, s)) for s in shapes})
