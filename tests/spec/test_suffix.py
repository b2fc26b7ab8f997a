"""The suffix drafter: answers given before make the next ones faster, and change no token."""

from dataclasses import replace

from peregrine.sampling import SamplingParams
from spec.harness import Case, accept_length, build, cases, run, tokens

SUFFIX = {"drafter": "suffix", "num_drafts": 6}


def test_no_token_changes_and_repeated_requests_are_accepted() -> None:
    some = cases(10, max_tokens=40, seed=31)
    plain = tokens(run(build().engine, some))
    engine = build(max_rows=4, prefix_cache=False, **SUFFIX).engine
    first = run(engine, some)
    again = run(engine, some)
    assert tokens(first) == plain
    assert tokens(again) == plain
    assert accept_length(again) > max(3.0, 1.5 * accept_length(first))


def test_an_answer_that_must_not_be_stored_is_not_learnt() -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, store=False)
    private = [Case((7, 8, 9), params)]
    engine = build(**SUFFIX).engine
    lengths = [accept_length(run(engine, private)) for _ in range(2)]
    assert lengths[0] == lengths[1]
    shared = [Case((7, 8, 9), replace(params, store=True))]
    run(engine, shared)
    assert accept_length(run(engine, private)) > 2 * lengths[0]


def test_the_pool_is_bounded() -> None:
    engine = build(**SUFFIX).engine
    pool = engine.runner.drafter.pool  # type: ignore[attr-defined]
    size = pool.tokens.shape[0]
    for number in range(9):
        engine.runner.drafter.learn([number + 1] * 40_000)  # type: ignore[attr-defined]
    assert pool.tokens.shape[0] == size
    assert engine.runner.drafter._next <= size  # type: ignore[attr-defined]
