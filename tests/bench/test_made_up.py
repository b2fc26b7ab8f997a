"""On a made-up machine the engine is real and nothing is noisy: planned windows lose little, with any table."""

from dataclasses import replace

import pytest

from peregrine.bench.made_up import MACHINES, TEXTS, TURN, Lab

ROWS, LEARN, TURNS = 4, 12, 6


def seconds_of(lab: Lab, learn: int, rows: int = ROWS, **options: object) -> float:
    """Of some answers of as many requests each, after those that the planner learns from."""
    with lab.build(2 * rows, **options) as llm:
        for turn in range(learn + TURNS):
            if turn == learn:
                began = lab.seconds
            assert all(len(output.token_ids) == TURN for output in lab.turn(llm, rows, turn))
    return lab.seconds - began


@pytest.mark.parametrize("off", [-0.1, 0.25])
def test_planned_windows_find_the_best_number_of_drafts(off: float) -> None:
    """One draft for each of four rows if drafts are cheaper than the table says, and none if 25 % dearer."""
    with Lab(replace(MACHINES["sapphire-rapids"], off=off), TEXTS["story"]).opened() as lab:
        fixed = [seconds_of(lab, 1, num_drafts=drafts, windows="fixed") for drafts in range(3)]
        assert fixed.index(min(fixed)) == (1 if off < 0 else 0)
        assert min(fixed) / seconds_of(lab, LEARN) > 0.97


def test_windows_that_seemed_dear_when_the_engine_started_are_tried_all_the_same() -> None:
    """One request: by the table windows of three tokens take half as long again as those of two, really a tenth."""
    with Lab(replace(MACHINES["sapphire-rapids"], busy=0.6), TEXTS["story"]).opened() as lab:
        best = min(seconds_of(lab, 1, 1, num_drafts=drafts, windows="fixed") for drafts in (2, 3))
        assert best / seconds_of(lab, 4 * LEARN, 1) > 0.97


def test_turns_are_the_same_each_time() -> None:
    """Whatever the real clock says meanwhile: texts are made from seeds, and only rounds take time."""

    def once() -> float:
        with Lab(MACHINES["cascade-lake"], TEXTS["chat"]).opened() as lab:
            return seconds_of(lab, 0)

    assert once() == pytest.approx(once(), rel=1e-9)
