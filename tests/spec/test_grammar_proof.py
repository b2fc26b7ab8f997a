"""The short form of grammar_proof.py: some schemas on the embedded model; and every schema compiles."""

import json

from peregrine import LLM
from peregrine.sampling import SamplingParams
from spec.grammar_proof import prove
from spec.json_schemas import SCHEMAS


def test_every_schema_compiles_and_some_are_written_validly() -> None:
    with LLM("merlin", num_pages=200) as llm:
        for schema in SCHEMAS:
            llm.engine.compile(SamplingParams(json_schema=schema))
        ends = prove(llm, SCHEMAS[::26], seeds=1)
    assert ends["stop"] >= 0.8 * ends.total()


def test_the_schemas_differ() -> None:
    assert len({json.dumps(schema) for schema in SCHEMAS}) == len(SCHEMAS) >= 200
