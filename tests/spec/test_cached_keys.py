"""No forward writes a key that it counts as cached: GPU kernels read those while earlier ones are still running."""

import pytest

from spec.block_heads import block_head
from spec.cached_keys import check_cached_keys
from spec.harness import build, cases, eagle3_head, eagle_head, mtp_model, noisy_model, run

DRAFTERS: dict[str, tuple[bool, dict[str, object]]] = {  # whether the last layer has fewer queries, and options
    "none": (False, {}),
    "a model": (True, {"drafter": str(noisy_model()), "num_drafts": 3}),
    "a model, tree": (True, {"drafter": str(noisy_model()), "tree": (4, 3, 14)}),
    "eagle": (True, {"drafter": str(eagle_head())}),
    "eagle3": (True, {"drafter": str(eagle3_head())}),
    "mtp": (True, {"drafter": "mtp", "model": mtp_model()}),
    "dflash": (False, {"drafter": str(block_head())}),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_forward_writes_a_key_that_counts_as_cached(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last layer has queries of some tokens alone, as of the newest one of a drafter."""
    fewer, options = DRAFTERS[name]
    shapes = check_cached_keys(monkeypatch)
    run(build(max_rows=4, prefill_chunk=32, **options).engine, cases(4, max_tokens=40))  # type: ignore[arg-type]
    assert shapes == ({False, True} if fewer else {False})
