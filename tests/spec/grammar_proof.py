"""Every schema of `json_schemas.py` with many seeds: each text that ends must parse and validate.

    PYTHONPATH=src:tests python tests/spec/grammar_proof.py --seeds 30

The validator shares no code with the grammar library. A text that max_tokens cut is counted apart. The test suite runs
a short form (test_grammar_proof.py).
"""

import argparse
import json
from collections import Counter

import jsonschema_rs
from tqdm import tqdm

from peregrine import LLM, SamplingParams
from spec.json_schemas import SCHEMAS, Schema


def prove(llm: LLM, schemas: list[Schema], seeds: int, max_tokens: int = 200) -> Counter[str]:
    """How the texts ended; raises AssertionError for the first text that is not what its schema allows."""
    ends: Counter[str] = Counter()
    for schema in tqdm(schemas, "schemas", delay=5):
        params = [
            SamplingParams(json_schema=schema, seed=seed, temperature=1.0, max_tokens=max_tokens)
            for seed in range(seeds)
        ]
        for output in llm.generate([f"JSON number {seed}:" for seed in range(seeds)], params, progress=False):
            ends[output.finish_reason] += 1
            assert output.finish_reason in ("stop", "length"), output.error
            if output.finish_reason == "stop":
                value = json.loads(output.text)
                assert jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(value), (schema, output.text)
                assert not any(c in output.text for c in "\n\t"), output.text
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--model", default="merlin")
    parser.add_argument("--drafter", default="auto")
    args = parser.parse_args()
    with LLM(args.model, drafter=args.drafter) as llm:
        print(f"{len(SCHEMAS)} schemas, {args.seeds} seeds each: {dict(prove(llm, SCHEMAS, args.seeds))}, none invalid")


if __name__ == "__main__":
    main()
