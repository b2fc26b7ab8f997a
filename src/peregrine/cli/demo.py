"""`peregrine demo`: the same text decoded plainly and with speculation, drafted tokens marked."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from peregrine.cli.flags import (
    Commands,
    add_engine_flags,
    add_parser,
    add_sampling_flags,
    engine_options,
    open_llm,
    sampling_options,
)
from peregrine.config import EngineConfig
from peregrine.errors import EngineFault
from peregrine.log import is_terminal, style
from peregrine.sampling import SamplingParams, sampling_params

if TYPE_CHECKING:
    from peregrine.engine.request import Delta, Output

EPILOG = """examples:
  peregrine demo
  peregrine demo "The little bird" --temperature 0.8 --seed 7
  peregrine demo --model /models/llama --drafter ngram --num-drafts 5
"""
PROMPT = "One day, a little fox found a key in the snow."
MODEL = EngineConfig().model
STAND_IN = {"num_layers": 4, "hidden_size": 256, "intermediate_size": 688, "head_dim": 64, "seed": 1}
WARM_UP_TOKENS = 8


def add_command(commands: Commands) -> None:
    """Add the command and its flags."""
    description = "Decode one prompt plainly, then with speculation, and compare tokens and speed."
    parser = add_parser(commands, "demo", run, "see speculation at work", description, EPILOG)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", default=PROMPT, help=f"default: {PROMPT!r}")
    add_sampling_flags(parser, temperature=0.0, max_tokens=96)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run both ways and compare; 1 if the tokens differ, which would be a defect."""
    params = sampling_params(**sampling_options(args))
    with tempfile.TemporaryDirectory(prefix="peregrine-demo-") as folder:
        options = complete_options(engine_options(args), folder)
        print(f"prompt: {args.prompt}")
        plain = decode("plain decoding", args.prompt, params, options | {"drafter": "none"}, marked=False)
        fast = decode("with speculation", args.prompt, params, options, marked=True)
    identical = plain.token_ids == fast.token_ids
    print_comparison(plain, fast, identical)
    return 0 if identical else 1


def complete_options(options: dict[str, object], folder: str) -> dict[str, object]:
    """The options with a model and a drafter; a random model is made in `folder` if none is embedded."""
    from peregrine.engine.folders import embedded_models, find_model

    model = str(options.get("model", MODEL))
    if "model" not in options and MODEL not in embedded_models():
        from peregrine.synthetic.checkpoint import make_random_checkpoint

        print("This build has no embedded model: a small one with random weights stands in; it writes nonsense.")
        model = str(make_random_checkpoint(folder, **STAND_IN))
    # Without a draft head the guesses come from the text itself.
    head = (find_model(model) / "eagle3" / "config.json").exists()
    return {"model": model, "drafter": "auto" if head else "ngram"} | options


def decode(title: str, prompt: str, params: SamplingParams, options: dict[str, object], marked: bool) -> "Output":
    """Load, warm up, stream the text under a title, and return the output."""
    with open_llm(options) as llm:
        # The first steps compile kernels and touch cold memory; they are no part of the figures.
        llm.generate([prompt], sampling_params(temperature=0.0, max_tokens=WARM_UP_TOKENS), progress=False)
        chosen = {made.field: made.value for made in llm.decisions}
        print(f"\n{style(title, 'bold')} (drafter: {chosen['drafter']})")
        output = print_pieces(llm.stream(prompt, params), llm.tokenizer.decode, marked)
    if output.finish_reason == "error":
        raise EngineFault(f"the generation failed: {output.error}")
    return output


def print_pieces(deltas: "Iterable[Delta]", decode_ids: Callable[[list[int]], str], marked: bool) -> "Output":
    """Print the text as it comes; drafted tokens are green and underlined if `marked`. Returns the output."""
    seen: list[int] = []
    shown = ""
    for delta in deltas:
        for text, drafted in pieces(seen, delta, decode_ids, shown):
            shown += text
            print(style(text, "green", "underline") if marked and drafted else text, end="", flush=True)
        if delta.output is not None:
            print()
            return delta.output
    raise EngineFault("the stream ended without an output")


def pieces(
    seen: list[int], delta: "Delta", decode_ids: Callable[[list[int]], str], shown: str
) -> Iterator[tuple[str, bool]]:
    """Each new token's text and whether it was drafted; `seen` grows by the delta's tokens.

    Half a character waits for the token that completes it.
    """
    for token, drafted in zip(delta.token_ids, delta.drafted, strict=True):
        seen.append(token)
        text = decode_ids(seen)
        if text.endswith("\ufffd") or len(text) <= len(shown):
            continue
        yield text[len(shown) :], drafted
        shown = text


def print_comparison(plain: "Output", fast: "Output", identical: bool) -> None:
    """Speed both ways, acceptance, and whether the tokens are the same."""
    speeds = [len(output.token_ids) / max(output.timing.total_s, 1e-9) for output in (plain, fast)]
    stats = fast.stats
    if is_terminal(sys.stdout):
        mark = style("underlined", "green", "underline")
        print(f"\n{mark}: guessed by the drafter and correct; the rest is the target's own")
    ratio = speeds[1] / speeds[0]
    print(f"\ntokens/s:   plain {speeds[0]:.1f}, with speculation {speeds[1]:.1f} ({ratio:.2f} x)")
    print(f"acceptance: {stats.accept_length:.2f} tokens per round (bonus included), ", end="")
    print(f"{stats.correct} of {stats.drafted} drafts right")
    print(f"identical:  {style('yes', 'green') if identical else style('no', 'red')}")
