"""Masks of a window equal those of a matcher that takes its tokens one by one, along forced drafts and beside them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from peregrine.engine.folders import ASSETS
from peregrine.engine.masks import MaskWriter
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
        masks=Masks(torch.zeros(1, dtype=torch.bool), torch.zeros(1, NODES, size // 32, dtype=torch.int32)),
        forced=torch.zeros(1, NODES, NODES, dtype=torch.int64),
    )
    writer, walked = MaskWriter(seats, size), 0  # type: ignore[arg-type]
    for begin in range(len(text) - NODES + 1):
        matcher = matcher_after(text[:begin])
        for wrong in (NODES, 2):  # the node that is not what the text goes on with
            drafts = [token if node < wrong else eos for node, token in enumerate(text[begin : begin + 3], start=1)]
            window = Window([0, *drafts], [0, 0, 1, 2], [0, 1, 1, 1])
            walked += sum(
                len(at.drafts) == NODES - 1 for at in matcher.walk(window, np.zeros((NODES, 1), np.uint32), NODES)
            )
            writer.write([matcher], [window])
            for node in range(min(NODES, wrong)):
                alone = matcher_after(text[: begin + node])
                (at,) = alone.walk(Window([0], [0], [0]), np.zeros((1, 1), np.uint32), NODES)
                mask = np.frombuffer(at.state.compute_bitmask(), np.uint32)[None, : size // 32].copy()
                alone.finish(at, mask)
                assert seats.masks.words[0, node].numpy().view(np.uint32).tolist() == mask[0].tolist()
                forced = [token for token in seats.forced[0, node].tolist() if token >= 0]
                assert forced == at.forced
    assert walked > len(text) // 3  # the library walked along these by itself
