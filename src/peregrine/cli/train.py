"""`peregrine train`: make a draft head for a model, or the embedded model from a folder of text."""

import argparse
from pathlib import Path

HEAD_EPILOG = """examples:
  peregrine train head --target /models/llama --data chats.jsonl --out /models/llama/eagle3
  peregrine train head --target merlin --data stories.txt chats.txt --shares 0.6 0.4 --out head --minutes 4
  peregrine train head --target merlin --data texts.txt --out toy --tokens 20000 --steps 200 --batch 8

Data are .txt or .txt.xz files, documents separated by lines of <|endoftext|>, or .jsonl files with "prompt" or
"messages" in every line; a folder stands for its text files. The target continues openings of the documents and
chats up to the assistant's turn, and the head learns from what it wrote. The same command goes on after a stop.
When it is done, --drafter FOLDER uses the head, and a folder named eagle3 inside the model's is found by itself.
"""
MERLIN_EPILOG = """examples:
  peregrine train merlin corpus --out merlin
  peregrine train merlin corpus --out merlin --device cuda --head-tokens 4000000

The tokenizer, the target and its head are made one after the other; the same command goes on after a stop.
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command and what it can train."""
    parser = commands.add_parser(
        "train",
        help="train a draft head for a model, or merlin itself",
        epilog=HEAD_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(title="what to train", metavar="WHAT", required=True)
    add_head(kinds)
    add_merlin(kinds)


def add_head(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The flags of `train head`."""
    parser = kinds.add_parser(
        "head",
        help="an EAGLE-3 head for any model the engine loads",
        epilog=HEAD_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    given = parser.add_argument_group("what from what")
    given.add_argument("--target", required=True, metavar="MODEL", help="the model's folder or name")
    given.add_argument("--data", required=True, nargs="+", type=Path, metavar="FILE", help="text to take prompts from")
    given.add_argument("--shares", nargs="+", type=float, metavar="X", help="of each file (default: by size)")
    given.add_argument("--start", type=Path, metavar="FOLDER", help="go on from this head's weights")
    given.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="for the head and its report")
    add_sampling(parser.add_argument_group("sampling"))
    add_training(parser.add_argument_group("training"))
    add_measuring(parser.add_argument_group("measuring and machine"))
    parser.set_defaults(run=run_head)


def add_sampling(group: "argparse._ArgumentGroup") -> None:
    """How much text the target writes."""
    group.add_argument("--tokens", type=int, default=2_000_000, metavar="N", help="to sample (default: 2000000)")
    group.add_argument("--max-tokens", type=int, default=224, metavar="N", help="of one sample (default: 224)")
    group.add_argument("--prompt-tokens", type=int, default=192, metavar="N", help="of a prompt at most (default: 192)")
    group.add_argument(
        "--text-tokens",
        type=int,
        default=0,
        metavar="N",
        help="of the documents themselves, to train on beside the samples (default: 0)",
    )
    group.add_argument("--rows", type=int, metavar="N", help="sampled together (default: 32, on a GPU 512)")
    group.add_argument(
        "--sample-minutes", type=float, metavar="M", help="stop sampling after this long (default: no limit)"
    )


def add_training(group: "argparse._ArgumentGroup") -> None:
    """How the head learns."""
    group.add_argument("--steps", type=int, metavar="N", help="updates (default: 3000)")
    group.add_argument("--minutes", type=float, metavar="M", help="train this long instead of --steps")
    group.add_argument("--batch", type=int, default=32, metavar="ROWS", help="per update (default: 32)")
    group.add_argument("--unroll", type=int, default=5, metavar="K", help="drafts ahead to train for (default: 5)")
    group.add_argument(
        "--draft-vocab",
        default="auto",
        metavar="N",
        help="tokens the head can guess: a number, full, or auto, the fewest that cover the samples (default: auto)",
    )
    group.add_argument(
        "--taps", type=int, nargs="+", metavar="LAYER", help="target layers it reads (default: 2, L/2, L-3)"
    )
    group.add_argument("--rate", type=float, default=2e-3, metavar="X", help="learning rate (default: 0.002)")
    group.add_argument("--save-every", type=int, default=500, metavar="N", help="updates (default: 500)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")


def add_measuring(group: "argparse._ArgumentGroup") -> None:
    """On what and where."""
    group.add_argument(
        "--eval-prompts", type=int, default=64, metavar="N", help="held-out prompts to measure on (default: 64)"
    )
    group.add_argument("--eval-tokens", type=int, default=128, metavar="N", help="of each (default: 128)")
    group.add_argument("--no-eval", action="store_true", help="leave the measuring out")
    group.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:INDEX")
    group.add_argument("--dtype", default="auto", metavar="DTYPE", help="of the target (default: auto)")


def add_merlin(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The flags of `train merlin`."""
    parser = kinds.add_parser(
        "merlin",
        help="the embedded model end to end: tokenizer, target, samples, head",
        epilog=MERLIN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("data", type=Path, metavar="DATA_FOLDER", help="text shards, .txt or .txt.xz")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="for the model")
    parser.add_argument(
        "--work", type=Path, metavar="FOLDER", help="for what is kept between stages (default: OUT.work)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="updates of the target (default: its recipe's)")
    parser.add_argument(
        "--head-tokens", type=int, default=4_000_000, metavar="N", help="to sample for the head (default: 4000000)"
    )
    parser.add_argument("--head-steps", type=int, default=3000, metavar="N", help="updates of the head (default: 3000)")
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:INDEX")
    parser.set_defaults(run=run_merlin)


def run_head(args: argparse.Namespace) -> int:
    """Make the head and say where it is."""
    from peregrine.hardware import resolve_device
    from peregrine.train.head_run import HeadOptions
    from peregrine.train.make_head import HeadOrder, make_head
    from peregrine.train.sampling import SamplingPlan

    rows = args.rows or (32 if resolve_device(args.device).type == "cpu" else 512)
    steps = args.steps or (None if args.minutes else HeadOptions().steps)
    order = HeadOrder(
        target=args.target,
        data=tuple(args.data),
        out=args.out,
        plan=SamplingPlan(args.tokens, args.max_tokens, args.prompt_tokens, rows, args.seed, args.sample_minutes),
        options=HeadOptions(
            batch_rows=args.batch,
            steps=steps,
            minutes=args.minutes or 0.0,
            unroll=args.unroll,
            rate=args.rate,
            seed=args.seed,
            save_every=args.save_every,
        ),
        shares=None if args.shares is None else tuple(args.shares),
        draft_vocab=args.draft_vocab,
        taps=None if args.taps is None else tuple(args.taps),
        device=args.device,
        dtype=args.dtype,
        eval_prompts=args.eval_prompts,
        eval_tokens=args.eval_tokens,
        evaluate=not args.no_eval,
        text_tokens=args.text_tokens,
        start=args.start,
    )
    make_head(order)
    print(f"the head and its report are in {args.out}")
    return 0


def run_merlin(args: argparse.Namespace) -> int:
    """Make merlin and say where it is."""
    from dataclasses import replace

    from peregrine.train.make_merlin import MerlinOrder, make_merlin
    from peregrine.train.merlin import Workshop
    from peregrine.train.pretrain import Options

    work = args.work or args.out.with_name(args.out.name + ".work")
    options = Options() if args.steps is None else replace(Options(), steps=args.steps)
    make_merlin(
        MerlinOrder(Workshop(args.data, args.out, work), options, args.head_tokens, args.head_steps, args.device)
    )
    print(f"the model is in {args.out}, its head in {args.out / 'eagle3'}")
    return 0
