"""Peregrine: an LLM inference engine built around speculative decoding.

    from peregrine import LLM, SamplingParams

Both names are imported on first use, so that `import peregrine` and `peregrine --help` never wait for torch.
"""

from typing import TYPE_CHECKING

from peregrine.threads import limit_spinning

if TYPE_CHECKING:
    from peregrine.llm import LLM
    from peregrine.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

limit_spinning()  # OpenMP reads its settings once, when torch is loaded


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name == "LLM":
        from peregrine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from peregrine.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'peregrine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
