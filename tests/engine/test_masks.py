"""Masks of a window equal those of a matcher that takes its tokens one by one, along forced drafts and beside them."""

from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers.models import WordLevel

from peregrine.engine.folders import ASSETS
from peregrine.engine.masks import MaskWriter, Walk
from peregrine.errors import RequestError
from peregrine.grammar import GrammarCompiler, Matcher, MatcherLimits, Window
from peregrine.kernels.sampling import Masks
from peregrine.models.parallel import ALONE
from peregrine.sampling import Constraint
from peregrine.text.tokenizer import Tokenizer

NODES = 4
CALL = Constraint("json_schema", '{"enum": ["forced from here on: a long way to go", "forced too"]}')


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = Tokenizer.read(ASSETS / "merlin")
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, (int(tokenizer.eos_id or 0),))


@pytest.mark.parametrize("min_tokens", [0, 9])
def test_masks_and_forced_tokens_of_every_window(compiler: GrammarCompiler, min_tokens: int) -> None:
    eos, size = compiler._eos_ids[0], compiler._vocab_size
    ends = frozenset({eos})

    def matcher_after(tokens: list[int]) -> Matcher:
        made = compiler.matcher(CALL, MatcherLimits(ends, ends | stops, min_tokens, None))
        assert made.advance(tokens) == len(tokens)
        return made

    stops: frozenset[int] = frozenset()
    text = compiler._tokenizer.encode('"forced from here on: a long way to go"', add_special=False)
    stops = frozenset(text[4:7])  # stop tokens that are text: not legal before min_tokens, unless they are forced
    seats = SimpleNamespace(
        device=torch.device("cpu"),
        ranks=ALONE,
        masks=Masks(torch.zeros(1, dtype=torch.int32), torch.zeros(1, NODES, size // 32, dtype=torch.int32)),
        forced=torch.zeros(1, NODES, NODES, dtype=torch.int64),
    )
    writer, num_forced = MaskWriter(seats, size), 0  # type: ignore[arg-type]
    for begin in range(len(text) - NODES + 1):
        matcher = matcher_after(text[:begin])
        for wrong in (NODES, 2):  # the node that is not what the text goes on with
            drafts = [token if node < wrong else eos for node, token in enumerate(text[begin : begin + 3], start=1)]
            window = Window([0, *drafts], [0, 0, 1, 2], [0, 1, 1, 1])
            writer.write([matcher], [window])
            for node in range(min(NODES, wrong)):
                alone = matcher_after(text[: begin + node])
                mask = np.frombuffer(alone.state.compute_bitmask(), np.uint32)[None, : size // 32].copy()
                alone.finish(0, mask)
                assert seats.masks.words[0, node].numpy().view(np.uint32).tolist() == mask[0].tolist()
                forced = [token for token in seats.forced[0, node].tolist() if token >= 0]
                assert forced == alone.forced(NODES)
                num_forced += len(forced)
    assert num_forced > len(text)
    # What follows from a draft is not forced once another token was taken instead.
    matcher, other = matcher_after(text[:4]), compiler._tokenizer.encode('"forced too"', add_special=False)
    writer.write([matcher], [Window([0, *text[4:7]], [0, 0, 1, 2], [0, 1, 1, 1])])
    assert (text[:4], matcher.advance(other[4:5])) == (other[:4], 1)
    assert matcher.forced(NODES) == other[5:] != text[5:6]


@pytest.mark.parametrize(
    ("seconds", "deep"),
    [
        ((0.001, 0.001, 0.001, 0.001), NODES),  # all of them within the time of verifying
        ((0.006, 0.0, 0.0, 0.0), 1),  # the next depth would take as long, and the device would wait for it
        ((0.001, 0.006, 0.0, 0.0), 2),
        ((0.001, 0.0015, 0.002, 0.0), 3),
        ((0.001, 0.001, 0.001, 0.009), NODES),  # nothing is behind the last one
    ],
)
def test_masks_are_as_deep_as_time_allows(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], deep: int
) -> None:
    """Rounds take 10 ms by a clock that the masks of each depth move on."""
    size, ends = compiler._vocab_size, frozenset(compiler._eos_ids)
    seats = SimpleNamespace(
        device=torch.device("cpu"),
        ranks=ALONE,
        masks=Masks(torch.zeros(2, dtype=torch.int32), torch.zeros(2, NODES, size // 32, dtype=torch.int32)),
        forced=torch.zeros(2, NODES, NODES, dtype=torch.int64),
    )
    writer, now, calls = MaskWriter(seats, size), [0.0], iter(())  # type: ignore[arg-type]
    writer.bounded, compute = True, MaskWriter._mask

    def mask(writer: MaskWriter, walks: list[Walk]) -> None:
        compute(writer, walks)
        now[0] += next(calls, 0.0)

    monkeypatch.setattr(MaskWriter, "_mask", mask)
    monkeypatch.setattr("peregrine.engine.masks.time.perf_counter", lambda: now[0])
    matcher = compiler.matcher(Constraint("regex", "[a-z]{40}"), MatcherLimits(ends, ends, 0, None))
    drafts = [compiler._tokenizer.encode(letter, add_special=False)[-1] for letter in "abc"]
    window = Window([0, *drafts], [0, 0, 1, 2], [0, 1, 1, 1])
    for _ in range(3):
        now[0] += 0.01
        writer.write([matcher, None], [window, window])
        assert seats.masks.rows.tolist() == [NODES, 0]
    now[0] += 0.01
    calls = iter(seconds)
    writer.write([matcher, None], [window, window])
    assert seats.masks.rows.tolist() == [deep, 0]


def test_requests_at_the_same_time_have_grammars_of_their_own(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library computes one mask at a time with copies of one grammar; those that are free are used again."""
    constraint, ends = Constraint("regex", "[a-z]{7}"), frozenset(compiler._eos_ids)

    def matcher() -> Matcher:
        return compiler.matcher(constraint, MatcherLimits(ends, ends, 0, None))

    def users() -> list[int]:
        return [len(compiled.users) for compiled in compiler._kept[constraint]]

    monkeypatch.setattr(compiler, "_most_alike", 3)
    running = [matcher() for _ in range(4)]
    assert users() == [2, 1, 1]
    del running[1]
    running.append(matcher())
    assert users() == [2, 1, 1]
    running[:] = [matcher()]
    assert sorted(users()) == [0, 0, 1]


def test_a_tokenizer_that_the_library_cannot_use_is_a_reason_to_refuse() -> None:
    words = SimpleNamespace(backend=tokenizers.Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
    compiler, ends = GrammarCompiler(words, 2, (1,)), frozenset({1})  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^regex='a': llguidance cannot use this model's tokenizer \("):
            compiler.matcher(Constraint("regex", "a"), MatcherLimits(ends, ends, 0, None))
