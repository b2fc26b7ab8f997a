"""Compares draft heads of one model on the same prompts: tokens a round and tokens/s, greedy and at temperature 1.

Prompts are `.jsonl` files with a "prompt" or "messages" in every line, or the prompts.json of a training run, of which
the held-out ones are taken. Chains and a tree have a fixed shape; "planned" is what the engine does by itself.

    python benchmarks/heads.py --model merlin --heads FOLDER ... --prompts benchmarks/prompts/other_style.jsonl
    python benchmarks/heads.py --model merlin --heads merlin --prompts OUT/stages/prompts.json --rows 8 --json FILE

With `--rows 1` tokens/s are those of a single request; `plain` is the same without a drafter.
"By position" is the share of rounds in which a draft was accepted, of those that accepted all drafts before it. With
planned windows, rounds that drafted nothing are among them, so it says little there.
"""

import argparse
import json
import time
from pathlib import Path

from peregrine import LLM, SamplingParams
from peregrine.engine.folders import find_model
from peregrine.engine.sources import FolderSource
from peregrine.spec.registry import DRAFTERS
from peregrine.text.chat import encode_chat
from peregrine.train.options import Facts
from peregrine.train.prompts import Prompt
from peregrine.train.report import ALL, SHAPES, TEMPERATURES, summarise

PLANNED, PLAIN = "planned", "plain"
Texts = dict[float, list[list[int]]]  # temperature -> tokens of every answer
OPTIONS: dict[str, dict[str, object]] = {**SHAPES, PLANNED: {}}


def read_prompts(path: Path, source: FolderSource) -> list[Prompt]:
    """Prompts of one file."""
    if path.suffix == ".json":
        return [Prompt(*entry) for entry in json.loads(path.read_text())[1]]
    tokenizer, prompts = source.tokenizer(), []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        chat = fields.get("messages")
        tokens = encode_chat(tokenizer, chat) if chat else tokenizer.encode(fields["prompt"])
        prompts.append(Prompt(path.stem, tokens))
    return prompts


def measure(args: argparse.Namespace, head: str, shape: str, prompts: list[Prompt], texts: Texts) -> list[Facts]:
    """Entries of `summarise` for one head in one shape, with the time that all prompts took.

    Tokens are compared with those of the first run at the same temperature, which are noted in `texts`.
    """
    longest = max(len(prompt.tokens) for prompt in prompts) + args.tokens
    drafter = "auto" if head == args.model else head if head in DRAFTERS else str(Path(head).resolve())
    drafter = "none" if shape == PLAIN else drafter
    options = OPTIONS.get(shape, {}) | {"drafter": drafter, "max_rows": args.rows, "max_len": longest}
    facts: list[Facts] = []
    with LLM(args.model, device=args.device, dtype=args.dtype, **options) as llm:
        llm.generate([prompts[0].tokens], SamplingParams(max_tokens=16, detokenize=False), progress=False)
        for temperature in TEMPERATURES:
            params = [
                SamplingParams(temperature=temperature, seed=seed, max_tokens=args.tokens, detokenize=False)
                for seed in range(len(prompts))
            ]
            began = time.perf_counter()
            outputs = llm.generate([prompt.tokens for prompt in prompts], params, progress=False)
            seconds = time.perf_counter() - began
            speed = sum(len(output.token_ids) for output in outputs) / seconds
            written = [output.token_ids for output in outputs]
            if texts.setdefault(temperature, written) != written:
                raise SystemExit(f"{head}, {shape}, temperature {temperature:g}: the tokens differ, which is a defect")
            entries = summarise(shape, temperature, prompts, outputs)
            facts += [{"head": head, "tokens_per_second": speed, **entry} for entry in entries]
    return facts


def show(entry: Facts) -> None:
    """One line of the table."""
    positions = " ".join(f"{share:.2f}" for share in entry["by_position"])
    speed = f"{entry['tokens_per_second']:>9.1f}" if entry["source"] == ALL else " " * 9
    name = f"{Path(entry['head']).name:<14}{entry['shape']:<16}{entry['temperature']:>3g}{entry['source']:>25}"
    print(f"{name}{entry['accept_length']:>8.2f}{speed}  {positions}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="merlin")
    parser.add_argument("--heads", nargs="+", required=True, help="folders, ngram, suffix, or the model: its own head")
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=list(OPTIONS), choices=[*OPTIONS, PLAIN])
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--rows", type=int, default=8, help="requests at once")
    parser.add_argument("--count", type=int, help="only the first so many prompts of each file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if missing := [str(path) for path in args.prompts if not path.is_file()]:
        parser.error(f"--prompts: no such file: {', '.join(missing)}")
    source = FolderSource(find_model(args.model))
    prompts = [prompt for path in args.prompts for prompt in read_prompts(path, source)[: args.count]]
    print(f"{'head':<14}{'drafts':<16}{'T':>3}{'prompts':>25}{'accept':>8}{'tokens/s':>9}  by position")
    facts: list[Facts] = []
    texts: Texts = {}
    for head in args.heads:
        for shape in args.shapes:
            if shape == PLAIN and head != args.heads[0]:
                continue
            if head in DRAFTERS and "tree" in OPTIONS.get(shape, {}):
                continue
            found = measure(args, head, shape, prompts, texts)
            for entry in found:
                show(entry)
            facts += found
    tokens = sum(entry["tokens"] for entry in facts if entry["source"] == ALL)
    print(f"all {tokens:,} tokens are those of the first run")
    if args.json is not None:
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
