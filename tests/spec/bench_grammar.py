"""What structured output costs and saves on this machine: masks, rounds beside free rows, tokens per second.

    PYTHONPATH=src:tests python tests/spec/bench_grammar.py [--model merlin] [--tokens 200]

Free text is generated without drafts; a function call without drafts, and with the drafts that its grammar forces
(drafter ngram: no head). Times of single requests are medians of several runs.
"""

import argparse
import statistics
import time

from peregrine import LLM, SamplingParams
from peregrine.engine.admission import matcher_limits
from spec.json_schemas import SCHEMAS

CALL = SCHEMAS[0]
PROMPT = "The weather in Paris is"
RUNS = 7


def speed(llm: LLM, params: SamplingParams) -> tuple[float, float]:
    """Tokens per second and tokens per round of one request, the first token's time left out."""
    speeds, per_round = [], 0.0
    for _ in range(RUNS):
        output = llm.generate([PROMPT], params, progress=False)[0]
        speeds.append(1 / output.timing.per_token_s)
        per_round = output.stats.accept_length
    return statistics.median(speeds), per_round


def time_masks(llm: LLM) -> float:
    """The median time of one mask along a function call, in microseconds."""
    limits = matcher_limits(SamplingParams(json_schema=CALL), llm.engine.limits, llm.tokenizer.special_ids)
    assert llm.engine.grammars is not None
    constraint = SamplingParams(json_schema=CALL).constraint
    assert constraint is not None
    output = llm.generate([PROMPT], SamplingParams(json_schema=CALL, temperature=0, max_tokens=200), progress=False)[0]
    times = []
    for _ in range(5):
        matcher = llm.engine.grammars.matcher(constraint, limits)
        for token in output.token_ids[:-1]:
            began = time.perf_counter()
            matcher.state.compute_bitmask()
            times.append(time.perf_counter() - began)
            matcher.advance([token])
    return statistics.median(times) * 1e6


def time_rounds(llm: LLM, constrained: int, tokens: int) -> float:
    """Seconds per round of eight requests, of which so many have a grammar; all run to the same length."""
    free = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    asked = SamplingParams(temperature=0, max_tokens=tokens, regex="[a-z ]{4000}")
    params = [asked if index < constrained else free for index in range(8)]
    rounds = []
    for _ in range(3):
        began = time.perf_counter()
        outputs = llm.generate([PROMPT] * 8, params, progress=False)
        rounds.append((time.perf_counter() - began) / max(output.stats.rounds for output in outputs))
    return statistics.median(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="merlin")
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    free = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    call = SamplingParams(temperature=0, max_tokens=args.tokens, json_schema=CALL)
    with LLM(args.model, drafter="none") as llm:
        plain, _ = speed(llm, free)
        print(f"a mask at a vocabulary of {llm.config.vocab_size}: {time_masks(llm):.0f} us")
        print(f"free text, no drafts:              {plain:7.1f} tokens/s")
        constrained, _ = speed(llm, call)
        print(f"function call, no drafts:          {constrained:7.1f} tokens/s, {constrained / plain:.2f}x")
        for count in (0, 1, 8):
            print(f"round of 8 rows, {count} with a grammar: {time_rounds(llm, count, 64) * 1e3:.2f} ms")
    for drafts in (3, 5, 7):
        with LLM(args.model, drafter="ngram", num_drafts=drafts) as llm:
            forced, per_round = speed(llm, call)
            text, _ = speed(llm, free)
            print(
                f"function call, forced drafts, K={drafts}: {forced:7.1f} tokens/s, {forced / plain:.2f}x free text "
                f"without drafts, {per_round:.2f} tokens a round; free text with ngram: {text:.1f}"
            )


if __name__ == "__main__":
    main()
