"""`peregrine bench grammar`: every figure is there, and forced tokens are drafted."""

from peregrine.bench import grammar


def test_masks_rounds_and_speeds() -> None:
    plan = grammar.Plan(constrained=(0, 8), drafts=(3,), tokens=24, repeats=1)
    result = grammar.run(plan, {"num_pages": 100})
    assert result["mask_us"] > 0
    assert list(result["round_ms"]) == [0, 8]
    what = [(line["what"], line["drafts"]) for line in result["speeds"]]
    assert what == [("free text", 0), ("function call", 0), ("free text", 3), ("function call", 3)]
    per_round = [line["tokens_per_round"] for line in result["speeds"]]
    assert per_round[:2] == [1, 1]
    assert per_round[3] > 1.3  # the grammar forces most of the call
    assert len(grammar.show(result).splitlines()) == 8
