"""The inputs of sampling: which of its parts a batch uses, the rows' parameters, and what came before each node."""

from dataclasses import dataclass, replace

from torch import Tensor

MASS = 2.0**40  # the likeliest token's mass; 2^23 tokens as likely as that still fit in 64 bits
COLDEST = 1e-30  # lower temperatures act like this one: logits divided by it are still finite


@dataclass(frozen=True, slots=True)
class Features:
    """Which parts of sampling any row of the batch uses; known to the host.

    A part may be on for rows that do not use it: a neutral parameter leaves every bit of a row as it was.
    """

    sampled: bool = False  # some temperature is above 0
    filtered: bool = False  # some top_k, top_p or min_p is on
    penalised: bool = False  # some repetition, presence or frequency penalty is on
    biased: bool = False  # some row has a logit bias
    min_len: bool = False  # some row has a least number of tokens (min_tokens)
    logprobs: int | None = None  # None: no log-probabilities; n: the chosen token's and the n largest
    masked: bool = False  # some row has a grammar, whose masks say which tokens are legal

    def covers(self, other: "Features") -> bool:
        """Whether this does all that the other asks for; what it does beyond that changes no bit."""
        mine = (self.sampled, self.filtered, self.penalised, self.biased, self.min_len, self.masked)
        theirs = (other.sampled, other.filtered, other.penalised, other.biased, other.min_len, other.masked)
        counts = [-1 if features.logprobs is None else features.logprobs for features in (self, other)]
        return all(a or not b for a, b in zip(mine, theirs, strict=True)) and counts[0] >= counts[1]

    @property
    def adjusted(self) -> bool:
        """Whether any row's scores are more than its logits before temperature."""
        return self.penalised or self.biased or self.min_len or self.masked

    @property
    def plain(self) -> bool:
        """Whether the largest raw logit is the choice of every row."""
        return not (self.sampled or self.filtered or self.adjusted)


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens are legal at each node of the rows that have a grammar."""

    rows: Tensor  # [R] i32: how deep its window has masks, its root counted; 0: it has none, and they are not read
    words: Tensor  # [R, T, ceil(V / 32)] i32: token v is legal if bit v % 32 of word v // 32 is set


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of R rows, on the device."""

    temperature: Tensor  # [R] f32; 0: greedy
    top_k: Tensor  # [R] i64; 0: off
    top_p: Tensor  # [R] f32; 1: off
    log_min_p: Tensor  # [R] f32, the logarithm of min_p; -inf: off
    repetition: Tensor  # [R] f32; 1: off
    presence: Tensor  # [R] f32; 0: off
    frequency: Tensor  # [R] f32; 0: off
    seeds: Tensor  # [R] i64
    bias_ids: Tensor  # [R, B] i64, each id at most once, used entries first; -1: empty
    bias_values: Tensor  # [R, B] f32
    stop_ids: Tensor  # [R, S] i64; -1: empty
    min_lens: Tensor  # [R] i64; no stop id is chosen for a token whose position is below this
    logprobs: Tensor  # [R] i64 how many of the likeliest tokens are reported with the chosen one; -1: none at all
    masks: Masks | None = None  # None: no row has a grammar

    def only(self, rows: Tensor, features: Features) -> "SamplingTensors":
        """The parameters of some rows [n], as far as these features read them; masks are left out."""
        read = ["temperature", "seeds"]
        if features.filtered:
            read += ["top_k", "top_p", "log_min_p"]
        if features.adjusted:
            read += ["repetition", "presence", "frequency", "bias_ids", "bias_values", "stop_ids", "min_lens"]
        return replace(self, masks=None, **{name: getattr(self, name).index_select(0, rows) for name in read})


@dataclass(frozen=True, slots=True)
class Context:
    """What stands before each node of R windows of T nodes; penalties count it."""

    history: Tensor  # [R, C] i64 committed tokens by position, the window's root token included
    prompt_lens: Tensor  # [R] i64
    lens: Tensor  # [R] i64; history at and past this is garbage
    window_tokens: Tensor  # [R, T] i64
    ancestors: Tensor  # [R, n] i64 words of the nodes asked about: bit 0 (the root), its ancestors' and its own
