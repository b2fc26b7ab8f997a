"""Time to first token of a long prefix: read anew, from host memory, and from the device's own prefix cache.

The device has pages for little more than one request, so another prompt of the same length moves the first one's pages
to the host. Run from the repository, on a machine with a GPU (or on a CPU with a small model):

    python benchmarks/host_cache.py [--model shape:llama-3.1-8b] [--tokens 8192] [--repeats 5] [--json FILE]
"""

import argparse
import json
from pathlib import Path
from statistics import median

from peregrine import LLM, SamplingParams
from peregrine.hardware import read_cpu, read_gpus

GIB = 2**30
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)


def first_token_ms(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Milliseconds to the first token, and how many prompt tokens were cached."""
    output = llm.generate(prompt, PARAMS)[0]
    return 1000 * output.timing.first_token_s, output.stats.cached_tokens


def measure(model: str, tokens: int, repeats: int, page_size: int) -> dict[str, object]:
    """The medians of all three with their ranges, and what was copied."""
    pages = -(-tokens // page_size) + 32
    with LLM(
        model,
        drafter="none",
        num_drafts=0,
        max_len=tokens + 64,
        max_rows=1,
        page_size=page_size,
        prefill_chunk=min(4096, tokens),
        num_pages=pages,
        host_cache=4 * tokens / 8192 if model.startswith("shape:") else 1,  # both prompts of an 8B model, twice
    ) as llm:
        vocab = llm.config.vocab_size - 2
        prompts = [[1 + (place * place * 31 + 7 * place + seed) % vocab for place in range(tokens)] for seed in (1, 5)]
        times: dict[str, list[float]] = {"read anew": [], "from the host": [], "from the device": []}
        for _ in range(repeats + 1):  # the first time kernels are compiled
            llm.drop_cached()
            took, cached = first_token_ms(llm, prompts[0])
            assert cached == 0, f"{cached} of {tokens} tokens were cached"
            times["read anew"].append(took)
            first_token_ms(llm, prompts[1])  # takes the pages
            for name in ("from the host", "from the device"):
                took, cached = first_token_ms(llm, prompts[0])
                assert cached > 0.9 * tokens, f"{name}: {cached} of {tokens} tokens were cached"
                times[name].append(took)
        tier = llm.engine.ledger.tier
        assert tier is not None
        assert tier.pages_in > 0
        return {
            "model": model,
            "tokens": tokens,
            "page_size": page_size,
            "gib_copied": round(tokens / page_size * tier.copies.page_bytes / GIB, 3),
            "first_token_ms": {name: round(median(found[1:]), 3) for name, found in times.items()},
            "from_to_ms": {name: [round(min(found[1:]), 3), round(max(found[1:]), 3)] for name, found in times.items()},
            "hardware": [gpu.name for gpu in read_gpus()] or [read_cpu().name],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:llama-3.1-8b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    result = measure(args.model, args.tokens, args.repeats, args.page_size)
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
