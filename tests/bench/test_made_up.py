"""On a made-up machine the engine is real and nothing is noisy: planned windows lose little, with any table."""

from dataclasses import replace

import pytest

from peregrine import LLM, SamplingParams
from peregrine.bench.made_up import MACHINES, TEXTS, TOKEN, Lab

ROWS, LEARN, TURNS = 4, 12, 6


def seconds_of(lab: Lab, learn: int, **shape: object) -> float:
    """Of some answers of four requests each, after those that the planner learns from."""
    lab.is_timing = True
    with LLM("merlin", max_rows=8, num_pages=400, **shape) as llm:  # type: ignore[arg-type]
        lab.is_timing = False
        for turn in range(learn + TURNS):
            if turn == learn:
                began = lab.seconds
            lab.forget()
            params = SamplingParams(temperature=0.0, seed=turn, max_tokens=128, ignore_eos=True, detokenize=False)
            outputs = llm.generate([[TOKEN] * 20] * ROWS, params, progress=False)
            assert all(len(output.token_ids) == 128 for output in outputs)
    return lab.seconds - began


@pytest.mark.parametrize("off", [-0.1, 0.25])
def test_planned_windows_find_the_best_number_of_drafts(off: float) -> None:
    """One draft for each of four rows if drafts are cheaper than the table says, and none if 25 % dearer."""
    with Lab(replace(MACHINES["sapphire-rapids"], off=off), TEXTS["story"]).opened() as lab:
        fixed = [seconds_of(lab, 1, num_drafts=drafts, windows="fixed") for drafts in range(3)]
        assert fixed.index(min(fixed)) == (1 if off < 0 else 0)
        assert min(fixed) / seconds_of(lab, LEARN) > 0.97


def test_turns_are_the_same_each_time() -> None:
    """Whatever the real clock says meanwhile: texts are made from seeds, and only rounds take time."""

    def once() -> float:
        with Lab(MACHINES["cascade-lake"], TEXTS["chat"]).opened() as lab:
            return seconds_of(lab, 0)

    assert once() == pytest.approx(once(), rel=1e-9)
