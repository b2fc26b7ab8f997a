"""`peregrine bench offline`: stage times add up to a round, and tokens are equal with and without speculation."""

import pytest

from peregrine import LLM
from peregrine.bench import offline
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.spec.round import no_mark


def test_stages_add_up_to_rounds_and_tokens_agree() -> None:
    plan = offline.Plan(rows=(2,), tokens=8, repeats=1, peer=False)
    with LLM("merlin", num_pages=100) as fast, LLM("merlin", num_pages=100, drafter="none") as slow:
        line = offline.measure_rows(plan, 2, slow, fast, None)
        assert fast.engine.runner.mark is no_mark  # left as it was
    assert line["identical"] is True
    plain, speculative = (line[name]["stages"] for name in ("plain", "speculative"))  # type: ignore[index]
    assert speculative["propose_ms"] > plain["propose_ms"]
    for stages in (plain, speculative):
        parts = [stages[f"{part}_ms"] for part in ("verify", "judge", "propose", "commit_and_rest")]
        assert sum(parts) == pytest.approx(stages["round_ms"], abs=0.01)
        assert stages["verify_ms"] > 0
        assert stages["judge_ms"] > 0
        assert (0 < stages["outside_kernels"] < 1) if NUMBA_PRESENT else (stages["outside_kernels"] == 1)
    shown = offline.show(
        {"model": "merlin", "drafter": "eagle3", "tokens": 8, "start_up_s": 1.0, "memory": {}, "rows": [line]}
    )
    assert "identical: yes" in shown
