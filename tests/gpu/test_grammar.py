"""Structured output on a GPU: rounds in two recorded parts give the tokens of plain decoding, beside free rows too."""

import json

from peregrine import LLM, SamplingParams
from peregrine.bench.grammar import CALL

ASKED = [
    SamplingParams(json_schema=CALL, temperature=0, max_tokens=120),
    SamplingParams(json_schema={"type": "array", "items": CALL}, temperature=1.0, top_p=0.9, seed=1, max_tokens=120),
    SamplingParams(regex=r"[a-z]{2,6}(-\d{2}){1,3}", temperature=1.0, seed=2, max_tokens=40),
    SamplingParams(temperature=1.0, seed=3, max_tokens=60),
]


def tokens(**options: object) -> list[list[int]]:
    with LLM("merlin", device="cuda", max_rows=4, row_sizes=(4,), **options) as llm:
        outputs = llm.generate([f"Bird {i}:" for i in range(len(ASKED))], ASKED, progress=False)
    for output in outputs[:2]:
        assert output.finish_reason != "stop" or json.loads(output.text)
    return [output.token_ids for output in outputs]


def test_graphs_drafts_and_lag_change_no_token() -> None:
    plain = tokens(drafter="none", graphs=False, lag=0)
    assert tokens(drafter="none") == plain
    assert tokens() == plain
    assert tokens(tree=(4, 3, 14)) == plain
    assert tokens(drafter="ngram", num_drafts=5, lag=2) == plain
