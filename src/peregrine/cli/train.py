"""`peregrine train`: train a draft head for a model, or the embedded model from a folder of text."""

import argparse
from pathlib import Path

from peregrine.cli.flags import Commands, add_flags, add_number, add_parser, at_least, flags_of, given
from peregrine.train.options import STAGES, HeadOptions, HeadOrder, SamplingPlan

HEAD_EPILOG = """examples:
  peregrine train head --target /models/llama --data chats.jsonl --out /models/llama/eagle3
  peregrine train head --target merlin --data stories.txt chats.txt --shares 0.6 0.4 --out head --minutes 4
  peregrine train head --target merlin --data texts.txt --out dspark --kind dspark --unroll 7
  peregrine train head --target merlin --data texts.txt --out toy --tokens 20000 --steps 200 --batch 8

Data are .txt or .txt.xz files, documents separated by lines of <|endoftext|>, or .jsonl files with "prompt" or
"messages" in every line; a folder stands for its text files. The target continues openings of the documents and
chats up to the assistant's turn, and the head learns from what it wrote. The same command resumes a stopped run.
Use the head with --drafter FOLDER; a folder named eagle3, dflash or dspark in the model's is found by itself.
"""
MERLIN_EPILOG = """examples:
  peregrine train merlin corpus --out merlin
  peregrine train merlin corpus --out merlin --device cuda --head-tokens 8000000

The tokenizer, the target and its head are made one after the other; the same command resumes a stopped run.
"""
GPU_ROWS = 512
PLAN_FLAGS = flags_of(SamplingPlan, {"seed"})
RUN_FLAGS = flags_of(HeadOptions, {"warmup_steps", "decay_share", "weight_decay", "step_decay"})
ORDER_FLAGS = flags_of(
    HeadOrder,
    {"target", "data", "out", "plan", "options", "shares", "taps", "evaluate", "start", "samples_of", "stop_after"},
)


def add_command(commands: Commands) -> None:
    """Add the command and its two kinds."""
    parser = commands.add_parser("train", help="train a draft head for a model, or merlin itself", epilog=HEAD_EPILOG)
    kinds = parser.add_subparsers(title="what to train", metavar="WHAT", required=True)
    add_head(kinds)
    add_merlin(kinds)


def add_head(kinds: Commands) -> None:
    """The flags of `train head`."""
    parser = add_parser(
        kinds, "head", run_head, "an EAGLE-3, DFlash or DSpark head for any model the engine loads", epilog=HEAD_EPILOG
    )
    group = parser.add_argument_group("input and output")
    group.add_argument("--target", required=True, metavar="MODEL", help="the model's folder or name")
    group.add_argument("--data", required=True, nargs="+", type=Path, metavar="FILE", help="text to take prompts from")
    group.add_argument("--shares", nargs="+", type=float, metavar="X", help="of each file (default: by size)")
    help = "start from this head's weights; its draft tokens may be others"
    group.add_argument("--start", type=Path, metavar="FOLDER", help=help)
    group.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="for the head and its report")
    help = "take prompts, samples and texts from this head's folder, to compare kinds on the same ones"
    group.add_argument("--samples-of", type=Path, metavar="FOLDER", help=help)
    help = "stop when these are made; the same command without it goes on, here or where the folder is copied to"
    group.add_argument("--stop-after", choices=STAGES, help=help)
    add_flags(parser, "sampling", PLAN_FLAGS)
    add_flags(parser, "training", RUN_FLAGS)
    group = add_flags(parser, "head, evaluation and machine", ORDER_FLAGS)
    help = "target layers the head reads (default: 2, L/2, L-3)"
    group.add_argument("--taps", type=int, nargs="+", metavar="LAYER", help=help)
    group.add_argument("--no-eval", action="store_true", help="skip the evaluation")


def add_merlin(kinds: Commands) -> None:
    """The flags of `train merlin`."""
    help = "the embedded model end to end: tokenizer, target, samples, head"
    parser = add_parser(kinds, "merlin", run_merlin, help, epilog=MERLIN_EPILOG)
    parser.add_argument("data", type=Path, metavar="DATA_FOLDER", help="text shards, .txt or .txt.xz")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="for the model")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="kept between stages (default: OUT.work)")
    parser.add_argument("--steps", type=at_least(1), metavar="N", help="updates of the target (default: 3600)")
    add_number(parser, "--head-tokens", 24_000_000, "to sample for the head")
    add_number(parser, "--head-steps", 16_000, "updates of the head")
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:INDEX")


def run_head(args: argparse.Namespace) -> int:
    """Train the head and say where it is."""
    from peregrine.hardware import resolve_device
    from peregrine.train.make_head import make_head

    plan, run, order = (given(args, flags) for flags in (PLAN_FLAGS, RUN_FLAGS, ORDER_FLAGS))
    if "rows" not in plan and resolve_device(order.get("device", "auto")).type != "cpu":
        plan["rows"] = GPU_ROWS
    if "minutes" in run:
        run.setdefault("steps", None)
    options = HeadOptions(**run)
    make_head(
        HeadOrder(
            target=args.target,
            data=tuple(args.data),
            out=args.out,
            plan=SamplingPlan(**plan, seed=options.seed),
            options=options,
            shares=None if args.shares is None else tuple(args.shares),
            taps=None if args.taps is None else tuple(args.taps),
            evaluate=not args.no_eval,
            start=args.start,
            samples_of=args.samples_of,
            stop_after=args.stop_after,
            **order,
        )
    )
    print(f"the {args.stop_after or 'head and its report'} are in {args.out}")
    return 0


def run_merlin(args: argparse.Namespace) -> int:
    """Train merlin and say where it is."""
    from peregrine.train.merlin.pretrain import PretrainOptions
    from peregrine.train.merlin.recipe import MerlinOrder, make_merlin

    make_merlin(
        MerlinOrder(
            data=args.data,
            out=args.out,
            work=args.work or args.out.with_name(args.out.name + ".work"),
            options=PretrainOptions() if args.steps is None else PretrainOptions(steps=args.steps),
            device=args.device,
            head_tokens=args.head_tokens,
            head_steps=args.head_steps,
        )
    )
    print(f"the model is in {args.out}, its head in {args.out / 'eagle3'}")
    return 0
