"""`peregrine bench grammar`: every figure is there, forced tokens are drafted; idle time is that between parts."""

import itertools
import re

import pytest

from peregrine.bench import grammar
from peregrine.bench import round as rounds
from peregrine.engine.folders import ASSETS
from peregrine.grammar import GrammarCompiler, MatcherLimits
from peregrine.sampling import SamplingParams
from peregrine.synthetic.vocabulary import grown
from peregrine.text.tokenizer import Tokenizer
from spec.harness import Case, build, run


def test_masks_rounds_and_speeds() -> None:
    plan = grammar.Plan(constrained=(0, 8), drafts=(3,), tokens=16, repeats=1)
    result = grammar.run(plan, {"num_pages": 100})
    assert result["mask_us"] > 0
    assert list(result["round_ms"]) == [0, 8, "8 alike"]
    what = [(line["what"], line["drafts"]) for line in result["speeds"]]
    assert what == [("free text", 0), ("function call", 0), ("free text", 3), ("function call", 3)]
    per_round = [line["tokens_per_round"] for line in result["speeds"]]
    assert per_round[:2] == [1, 1]
    assert per_round[3] > 1.3  # the grammar forces most of the call
    assert len(grammar.show(result).splitlines()) == 9


def test_rounds_of_another_drafter_alone() -> None:
    plan = grammar.Plan(constrained=(8,), drafts=(0,), tokens=4, repeats=1)
    result = grammar.run(plan, {"num_pages": 100, "drafter": "ngram", "num_drafts": 3})
    assert (result["drafter"], result["speeds"]) == ("ngram", [])
    assert len(grammar.show(result).splitlines()) == 3


def test_a_vocabulary_grows_to_the_size_of_a_shape() -> None:
    merlin = Tokenizer.read(ASSETS / "merlin")
    large = grown(merlin, 20000)
    assert large.vocab_size == len(large.backend.get_vocab()) == 20000
    assert large.decode(large.encode("a Falcon, über {}")) == "a Falcon, über {}"
    new = [large.token_bytes(token) for token in range(8192, 20000)]
    odd = [
        token for token in new if re.search(rb'["\\\x00-\x1f\x7f]', token) or "\ufffd" in token.decode(errors="replace")
    ]
    assert 0.01 < len(odd) / len(new) < 0.02  # as in a public vocabulary: what a mask in a string costs depends on it
    end = frozenset({large.eos_id or 0})
    constraint = SamplingParams(regex="[a-z]{5}").constraint
    assert constraint is not None
    compiler = GrammarCompiler(large, 20000, ())
    mask = compiler.matcher(constraint, MatcherLimits(end, end, 0, None)).state.compute_bitmask()
    assert any(mask[8192 // 8 :])  # some of the new tokens are legal


class Ticks:
    """Events of a device that is one millisecond further each time."""

    times = itertools.count()

    def record(self) -> None:
        self.at = next(Ticks.times)

    def elapsed_time(self, later: "Ticks") -> float:
        return float(later.at - self.at)


def test_idle_time_is_what_lies_between_the_parts_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round with a grammar has five events: its begin, and those around its two parts."""
    monkeypatch.setattr(rounds, "new_event", Ticks)
    engine = build().engine
    engine.runner.mark = timer = rounds.RoundTimer(events=True)
    run(engine, [Case((1, 2, 3), SamplingParams(max_tokens=5, ignore_eos=True))])
    assert (len(timer.starts), timer.idle_share()) == (5, pytest.approx(4 / 9))
    timer.restart()
    run(engine, [Case((1, 2, 3), SamplingParams(temperature=0, max_tokens=5, regex="[a-z]{9}"))])
    assert (len(timer.starts), timer.idle_share()) == (10, pytest.approx(13 / 23))
