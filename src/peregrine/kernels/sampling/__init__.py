"""Which token a request takes at a position: penalties, filters, noise."""

from peregrine.kernels.sampling.drafts import pick, pick_scores, ranked, top_chances
from peregrine.kernels.sampling.noise import random_bits
from peregrine.kernels.sampling.params import Context, Features, Masks, SamplingTensors
from peregrine.kernels.sampling.reference import choose, logprobs, process

__all__ = [
    "Context",
    "Features",
    "Masks",
    "SamplingTensors",
    "choose",
    "logprobs",
    "pick",
    "pick_scores",
    "process",
    "random_bits",
    "ranked",
    "top_chances",
]
