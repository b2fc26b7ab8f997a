"""What sampling parameters of a few rows cost the whole batch: ms per round for mixes of requests, on a GPU.

    PYTHONPATH=src python tests/gpu/bench_features.py [--model shape:llama-3.1-8b] [--rows 32] [--option num_drafts=3]

Prompts are random tokens, acceptance is simulated, and every mix runs the same number of rounds. Only the engine's
public interface is used, so that older trees can be measured beside this one.
"""

import argparse
import statistics
import time

import torch

from peregrine.engine.build import build_engine
from peregrine.llm import engine_config
from peregrine.sampling import SamplingParams

GREEDY, TOP_P = {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}
LOGPROBS, PENALTY = {"logprobs": 1}, {"repetition_penalty": 1.2}
# name -> parameters of all rows but the last, and of the last
MIXES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "all greedy": (GREEDY, GREEDY),
    "all sampled": ({"temperature": 0.8}, {"temperature": 0.8}),
    "all top-p": (TOP_P, TOP_P),
    "greedy + 1 logprobs": (GREEDY, GREEDY | LOGPROBS),
    "greedy + 1 penalised": (GREEDY, GREEDY | PENALTY),
    "top-p + 1 logprobs": (TOP_P, TOP_P | LOGPROBS),
    "top-p + 1 penalised": (TOP_P, TOP_P | PENALTY),
    "all top-p, penalised": (TOP_P | PENALTY, TOP_P | PENALTY),
    "all greedy, logprobs": (GREEDY | LOGPROBS, GREEDY | LOGPROBS),
}
WARMUP = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:llama-3.1-8b")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--option", action="append", default=[], help="an engine option, name=value")
    asked = parser.parse_args()
    options: dict[str, object] = {"device": "cuda", "drafter": "eagle3", "num_drafts": 3, "simulate_accept": 3.0}
    options |= {"max_rows": asked.rows, "row_sizes": (asked.rows,)}
    for option in asked.option:
        name, _, value = option.partition("=")
        options[name] = float(value) if "." in value else int(value) if value.isdigit() else value
    max_len = asked.prompt + (asked.rounds + WARMUP + 20) * (int(str(options["num_drafts"])) + 1)
    pages = 1 + asked.rows * (max_len // 16 + 8)
    engine = build_engine(engine_config(asked.model, {"max_len": max_len, "num_pages": pages, **options})).engine
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, 8_000, (asked.rows, asked.prompt), generator=generator).tolist()
    print(f"{asked.model}, {asked.rows} rows, {options}")
    for name, (most, last) in MIXES.items():
        with torch.inference_mode():
            times = measure(engine, prompts, most, last, max_len - asked.prompt - 8, asked.rounds)
        quarter = statistics.quantiles(times, n=4)
        print(
            f"{name:24s} {statistics.median(times):8.3f} ms per round (quartiles {quarter[0]:.3f} to {quarter[2]:.3f})"
        )


def measure(engine, prompts, most, last, tokens, rounds) -> list[float]:  # type: ignore[no-untyped-def]
    """Milliseconds of rounds whose requests are all seated."""
    requests = []
    for row, prompt in enumerate(prompts):
        chosen = last if row == len(prompts) - 1 else most
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, seed=row, **chosen)
        requests.append(engine.prepare(prompt, params))
        engine.enqueue(requests[-1])
    while any(request.seat is None or not request.generated for request in requests):
        engine.step()
    for _ in range(WARMUP):
        engine.step()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds // 10):  # the host runs ahead: ten rounds at a time are measured, device waited for
        start = time.perf_counter()
        for _ in range(10):
            engine.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 100)
    for request in requests:
        engine.abort(request)
    while engine.has_work:
        engine.step()
    return times


if __name__ == "__main__":
    main()
