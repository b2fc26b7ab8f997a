"""`peregrine demo`: the same text decoded plainly and with speculation, drafted tokens marked."""

import argparse
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from peregrine.cli.flags import Commands, add_generation_flags, add_parser, engine_options, open_llm, sampling_options
from peregrine.cli.printing import DraftMarks, acceptance, check_output, print_stream
from peregrine.config import EngineConfig
from peregrine.log import is_terminal, style
from peregrine.sampling import SamplingParams, sampling_params

if TYPE_CHECKING:
    from peregrine.engine.request import Output

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
Options = dict[str, Any]


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
    with tempfile.TemporaryDirectory(prefix="peregrine-demo-") as folder:
        options = complete_options(engine_options(args), folder)
        text = args.prompt or (QUESTION if args.chat else PROMPT)
        print(f"prompt: {text}")
        prompt = [{"role": "user", "content": text}] if args.chat else text
        plain = decode("plain decoding", prompt, params, options | {"drafter": "none"})
        fast = decode("with speculation", prompt, params, options)
    identical = plain.token_ids == fast.token_ids
    print_comparison(plain, fast, identical)
    return 0 if identical else 1


def complete_options(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """The options with a model and a drafter; a random model is made in `folder` if none is embedded."""
    from peregrine.engine.folders import embedded_models, find_model

    model = str(options.get("model", MODEL))
    if "model" not in options and MODEL not in embedded_models():
        from peregrine.synthetic.checkpoint import make_random_checkpoint

        print("This build has no embedded model: a small one with random weights stands in; it writes nonsense.")
        model = str(make_random_checkpoint(folder, **STAND_IN))
    # Without a draft head the drafts come from look-up in the text.
    head = (find_model(model) / "eagle3" / "config.json").exists()
    return {"model": model, "drafter": "auto" if head else "ngram"} | options


def decode(
    title: str, asked: "str | list[dict[str, str]]", params: SamplingParams, options: dict[str, Any]
) -> "Output":
    """Load, warm up, stream the text under a title with drafted tokens marked, and return the output."""
    from peregrine.text.stream import Detokenizer

    with open_llm(options) as llm:
        prompt = llm.encode(asked) if isinstance(asked, str) else llm.encode_chat(asked)
        # The first rounds compile kernels and touch cold memory; they are not part of the figures.
        llm.generate([prompt], sampling_params(temperature=0.0, max_tokens=WARM_UP_TOKENS), progress=False)
        chosen = {made.field: made.value for made in llm.decisions}
        print(f"\n{style(title, 'bold')} (drafter: {chosen['drafter']})")
        marks = DraftMarks(Detokenizer(llm.tokenizer, prompt, params.skip_special_tokens))
        output = print_stream(llm.stream(prompt, params), marks)
    check_output(output)
    return output


def print_comparison(plain: "Output", fast: "Output", identical: bool) -> None:
    """Speed both ways, acceptance, and whether the tokens are the same."""
    speeds = [len(output.token_ids) / max(output.timing.total_s, 1e-9) for output in (plain, fast)]
    if is_terminal(sys.stdout):
        mark = style("underlined", "green", "underline")
        print(f"\n{mark}: guessed by the drafter and correct; the rest is the target's own")
    ratio = speeds[1] / speeds[0]
    print(f"\ntokens/s:   plain {speeds[0]:.1f}, with speculation {speeds[1]:.1f} ({ratio:.2f} x)")
    print(f"acceptance: {', '.join(acceptance(fast.stats))}")
    print(f"identical:  {style('yes', 'green') if identical else style('no', 'red')}")
