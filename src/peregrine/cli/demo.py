"""`peregrine demo`: the same text decoded plainly and with speculation, drafted tokens marked."""

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from peregrine.cli.flags import Commands, add_generation_flags, add_parser, engine_options, open_llm, sampling_options
from peregrine.cli.printing import DraftMarks, acceptance, check_output, print_stream
from peregrine.config import EngineConfig, plain_options
from peregrine.log import is_terminal, style
from peregrine.sampling import SamplingParams, sampling_params
from peregrine.threads import usable_cores

if TYPE_CHECKING:
    from peregrine.engine.output import Output
    from peregrine.llm import LLM

EPILOG = """examples:
  peregrine demo
  peregrine demo "The little bird" --temperature 0.8 --seed 7
  peregrine demo --model /models/llama --drafter ngram --num-drafts 5
  peregrine demo --model smollm2 --chat "Why is the sky blue?"
"""
QUESTION = "Name three animals that live in the sea, and say one sentence about each of them."
PROMPT = "One day, a little fox found a key in the snow."
MODEL = EngineConfig().model
STAND_IN = {"num_layers": 4, "hidden_size": 256, "intermediate_size": 688, "head_dim": 64, "seed": 1}
WARM_UP_TOKENS = 8
RUNS, MOST_S = 7, 20.0
FASTER = 1.05  # below this, runs of the same engine differ as much
BUSY_LOAD = 0.5  # of a core, by other processes


def add_command(commands: Commands) -> None:
    """Add the command and its flags."""
    description = "Decode one prompt plainly, then with speculation, and compare tokens and speed."
    parser = add_parser(commands, "demo", run, "see speculation at work", description, EPILOG)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=f"default: {PROMPT!r}")
    parser.add_argument("--chat", action="store_true", help="the prompt is a message; the model answers it")
    add_generation_flags(parser, temperature=0.0, max_tokens=96)


def run(args: argparse.Namespace) -> int:
    """Decode both ways and compare; returns 1 if the tokens differ, which would be a defect."""
    params = sampling_params(**sampling_options(args))
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="peregrine-demo-") as folder, ExitStack() as opened:
        options = complete_options(engine_options(args), folder)
        text = args.prompt or (QUESTION if args.chat else PROMPT)
        print(f"prompt: {text}")
        prompt = [{"role": "user", "content": text}] if args.chat else text
        fast = opened.enter_context(open_llm(options))  # first, so that wrong options are refused before any text
        slow = opened.enter_context(open_llm(plain_options(options)))
        plain = decode("plain decoding", slow, prompt, params)
        params = replace(params, seed=plain.seed)
        speculative = decode("with speculation", fast, prompt, params)
        runs = measure(slow, fast, plain.prompt_token_ids, params)
    outputs = [plain, speculative, *(output for pair in runs for output in pair)]
    identical = all(output.token_ids == plain.token_ids for output in outputs)
    print_comparison(runs, load, identical)
    return 0 if identical else 1


def complete_options(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """The options with a model and a drafter; a random model is made in `folder` if none is embedded."""
    from peregrine.engine.folders import embedded_models, find_model, own_head

    model = str(options.get("model", MODEL))
    if "model" not in options and MODEL not in embedded_models():
        from peregrine.synthetic.checkpoint import make_random_checkpoint

        print("This build has no embedded model: a small one with random weights stands in; it writes nonsense.")
        model = str(make_random_checkpoint(folder, **STAND_IN))
    # Without a draft head the drafts come from look-up in the text.
    head = own_head(find_model(model))
    return {"model": model, "drafter": "ngram" if head is None else "auto"} | options


def decode(title: str, llm: "LLM", asked: "str | list[dict[str, str]]", params: SamplingParams) -> "Output":
    """Warm up, stream the text under a title with drafted tokens marked, and return the output."""
    from peregrine.text.stream import Detokenizer

    prompt = llm.encode(asked) if isinstance(asked, str) else llm.encode_chat(asked)
    # The first rounds compile kernels and touch cold memory.
    llm.generate([prompt], sampling_params(temperature=0.0, max_tokens=WARM_UP_TOKENS), progress=False)
    chosen = {made.field: made.value for made in llm.decisions}
    print(f"\n{style(title, 'bold')} (drafter: {chosen['drafter']})")
    marks = DraftMarks(Detokenizer(llm.tokenizer, prompt, params.skip_special_tokens))
    output = print_stream(llm.stream(prompt, params), marks)
    check_output(output)
    return output


def measure(slow: "LLM", fast: "LLM", prompt: list[int], params: SamplingParams) -> "list[tuple[Output, Output]]":
    """The same generation in turns, plain and with speculation: RUNS times, fewer if that takes longer than MOST_S."""
    began = time.perf_counter()
    runs: list[tuple[Output, Output]] = []
    while len(runs) < RUNS and (not runs or time.perf_counter() - began < MOST_S):
        pair = [llm.generate([prompt], params, progress=False)[0] for llm in (slow, fast)]
        runs.append((pair[0], pair[1]))
    return runs


def print_comparison(runs: "list[tuple[Output, Output]]", load: float, identical: bool) -> None:
    """Speed both ways, acceptance, whether the tokens are the same, and why it is not faster if it is not."""
    speeds = [[len(output.token_ids) / max(output.timing.total_s, 1e-9) for output in pair] for pair in runs]
    if is_terminal(sys.stdout):
        mark = style("underlined", "green", "underline")
        print(f"\n{mark}: guessed by the drafter and correct; the rest is the target's own")
    plain, fast = (median(way) for way in zip(*speeds, strict=True))
    ratios = sorted(fast / plain for plain, fast in speeds)
    cores = usable_cores()
    print(f"\ntokens/s:   plain {plain:.1f}, with speculation {fast:.1f} ({median(ratios):.2f} x)")
    print(
        f"measured:   medians of {len(runs)} runs in turns, {ratios[0]:.2f} to {ratios[-1]:.2f} x; "
        f"load average {load:.1f} on {cores} core{'s' if cores > 1 else ''} before"
    )
    print(f"acceptance: {', '.join(acceptance(runs[-1][1].stats))}")
    if median(ratios) < FASTER:
        print(f"not faster: {'; '.join(reasons(runs, ratios, load / cores))}")
    print(f"identical:  {style('yes', 'green') if identical else style('no', 'red')}")


def reasons(runs: "list[tuple[Output, Output]]", ratios: list[float], load: float) -> list[str]:
    """Why speculation did not pay: what a round costs and gives, and what else disturbed the measurement."""
    plain, fast = (median(o.timing.total_s / max(1, o.stats.rounds) for o in way) for way in zip(*runs, strict=True))
    gives, costs = median(pair[1].stats.accept_length for pair in runs), fast / max(plain, 1e-9)
    found = [f"a round gave {gives:.2f} tokens and took {costs:.2f} x as long as a plain one"]
    if load > BUSY_LOAD:
        found.append("other processes used the cores that checking drafts needs; run it on a quiet machine")
    if ratios[-1] >= FASTER:
        found.append("some runs were faster, so it may be noise")
    elif load <= BUSY_LOAD:
        found.append("try another --num-drafts (peregrine bench sweep compares them)")
    return found
