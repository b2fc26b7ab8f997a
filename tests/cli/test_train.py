"""`peregrine train`: flags reach the training code."""

from collections.abc import Callable
from pathlib import Path

import pytest


def test_flags_become_an_order(monkeypatch: pytest.MonkeyPatch, peregrine: Callable[..., tuple[int, str, str]]) -> None:
    orders = []
    monkeypatch.setattr("peregrine.train.make_head.make_head", orders.append)
    flags = ["--target", "m", "--data", "a.txt", "b.jsonl", "--out", "o", "--device", "cpu", "--taps", "1", "2"]
    flags += ["--shares", "2", "1", "--tokens", "900", "--minutes", "1.5", "--unroll", "3", "--draft-vocab", "full"]
    code, out, _ = peregrine("train", "head", *flags)
    [order] = orders
    assert (code, out) == (0, "the head and its report are in o\n")
    assert (order.target, [path.name for path in order.data]) == ("m", ["a.txt", "b.jsonl"])
    assert (order.shares, order.taps, order.draft_vocab) == ((2.0, 1.0), (1, 2), "full")
    assert (order.plan.tokens, order.plan.rows) == (900, 32)
    assert (order.options.steps, order.options.minutes, order.options.unroll) == (None, 1.5, 3)


def test_steps_have_a_default_and_merlin_its_own_folders(
    monkeypatch: pytest.MonkeyPatch, peregrine: Callable[..., tuple[int, str, str]]
) -> None:
    orders = []
    monkeypatch.setattr("peregrine.train.make_head.make_head", orders.append)
    monkeypatch.setattr("peregrine.train.merlin.recipe.make_merlin", orders.append)
    assert peregrine("train", "head", "--target", "m", "--data", "a", "--out", "o", "--device", "cpu")[0] == 0
    assert peregrine("train", "merlin", "corpus", "--out", "x/merlin", "--steps", "7")[0] == 0
    head, merlin = orders
    assert head.options.steps == 3000
    assert merlin.options.steps == 7
    assert merlin.work == Path("x/merlin.work")
