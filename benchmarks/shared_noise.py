"""What drafting with the target's own noise costs against rejection sampling, on the same pairs of distributions.

Here a draft is accepted if the target, choosing with the same noise, chooses the same token. Rejection sampling accepts
a draft with probability sum(min(p, q)), the most that any scheme can reach. For Gumbel noise the chance of an equal
choice is sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i). Both are computed exactly, for merlin and its head
at temperature 1, at every place of texts that merlin wrote. Run from the repository:

    python benchmarks/shared_noise.py [--requests 48] [--tokens 128] [--json FILE]
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from peregrine import LLM, SamplingParams
from peregrine.engine.folders import find_model
from peregrine.models.draft_heads import Eagle3Head, load_head
from peregrine.models.loading import load_decoder
from peregrine.train.head import learnable, read_target, unroll
from peregrine.train.rows import SampleRows, fitting_row_len
from peregrine.train.samples import Samples

PROMPTS = Path(__file__).parents[1] / "src/peregrine/bench/prompts"
DEPTH = 3


def equal_choices(p: Tensor, q: Tensor) -> Tensor:
    """The chance that both choose one token with shared Gumbel noise: [n, V], [n, V] -> [n]."""
    p, q = p.double().clamp(min=1e-300), q.double().clamp(min=1e-300)
    order = (p / q).argsort(dim=1, descending=True)
    p, q = p.gather(1, order), q.gather(1, order)
    likelier = p.cumsum(dim=1) - p  # mass of p on tokens with a larger ratio
    rest = q.flip(1).cumsum(dim=1).flip(1)  # mass of q on the others, the token itself included
    return (1 / (likelier / p + rest / q)).sum(dim=1)


def written(requests: int, tokens: int) -> Samples:
    """Texts that merlin writes at temperature 1 after the prompts of the benchmarks."""
    lines = [line for file in sorted(PROMPTS.glob("*.jsonl")) for line in file.read_text().splitlines()]
    fields = [json.loads(line) for line in lines]
    prompts = [entry.get("prompt") or entry["messages"][-1]["content"] for entry in fields]
    with LLM("merlin") as llm:
        chosen = [prompts[i % len(prompts)][:400] for i in range(requests)]
        params = [SamplingParams(temperature=1.0, seed=i, max_tokens=tokens, ignore_eos=True) for i in range(requests)]
        outputs = llm.generate(chosen, params)
    texts = [output.prompt_token_ids + output.token_ids for output in outputs]
    starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    lens = np.array([len(output.prompt_token_ids) for output in outputs], dtype=np.int64)
    return Samples(np.concatenate(texts).astype(np.int32), starts, lens)


@torch.no_grad()
def measure(samples: Samples) -> list[dict[str, float]]:
    """For each draft of a chain whose earlier drafts were right: both chances, averaged."""
    folder = find_model("merlin")
    target = load_decoder(folder, pack=False)
    head = load_head(folder / "eagle3", target, "cpu", torch.float32, pack=False)
    assert isinstance(head, Eagle3Head)
    packed = SampleRows(samples, fitting_row_len(samples))
    sums = np.zeros((DEPTH, 3))
    for number in range(len(packed.bins)):
        rows = packed.rows(np.array([number]))
        labels = read_target(target, head, rows)
        for step, states in enumerate(unroll(head, rows, labels.tapped, DEPTH)):
            valid = learnable(rows, step + 1)[0].nonzero()[:, 0]
            p = labels.probabilities[0, valid + step + 1]  # of the tokens that can be drafted
            q = head.logits(states[valid]).float().softmax(dim=1)
            missing = (1 - p.sum(dim=1, keepdim=True)).clamp(min=0)
            p, q = torch.cat((p, missing), dim=1), torch.cat((q, torch.zeros_like(missing)), dim=1)
            sums[step] += [len(valid), float(equal_choices(p, q).sum()), float(torch.minimum(p, q).sum())]
    return [
        {"draft": step + 1, "places": int(n), "shared_noise": same / n, "rejection_sampling": most / n}
        for step, (n, same, most) in enumerate(sums)
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    facts = measure(written(args.requests, args.tokens))
    for entry in facts:
        print(
            f"draft {entry['draft']}: shared noise {entry['shared_noise']:.3f}, "
            f"rejection sampling {entry['rejection_sampling']:.3f} ({entry['places']:,} places)"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
