"""Tensor parallel against one process: every family, chains and trees, the same tokens and log-probabilities.

`test_parallel.py` runs a short form. The long one, with more ranks, requests and tokens:

    PYTHONPATH=src:tests python tests/engine/parallel_cases.py
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from engine.test_against_transformers import FAMILIES, checkpoint
from peregrine.engine import parallel
from peregrine.engine.build import build_engine
from peregrine.engine.output import Output
from peregrine.engine.parallel import Started, possible_sizes, started_ranks
from peregrine.engine.round_costs import RoundCosts
from peregrine.engine.sources import open_source
from peregrine.llm import engine_config
from peregrine.models.parallel import Ranks
from peregrine.sampling import SamplingParams
from peregrine.synthetic.checkpoint import make_random_checkpoint
from spec.block_heads import block_head, calm_model
from spec.expert_models import expert_model, mla_mtp_model
from spec.harness import (
    CONTEXT,
    HEAD_DIM,
    VOCAB,
    Case,
    eagle3_head,
    eagle_head,
    mtp_model,
    noisy_model,
    prompts,
    run,
    tiny_model,
)

TIER = {"max_rows": 1, "host_cache": 0.001}  # and few pages: what is asked for twice comes back from host memory
CHUNKS = {"read", "absorb"}  # calls that read prompts, and what a drafter has missed
Engines = dict[str, dict[str, Any]]  # name -> options


class SteadyCosts(RoundCosts):
    """Costs that say nothing of this machine: plans are the same in every run, and draft for some rows."""

    def __init__(self) -> None:
        super().__init__({1: 1.0, 64: 1.5}, {1: 0.0, 64: 0.1}, {1: 0.2, 8: 0.3}, 8)

    def learn(self, *_: object, **__: object) -> None:
        """They stay as they are."""


def families() -> Engines:
    """Every family of transformers' checkpoints: 6 heads and 2 of keys and values, or 1, or latents; odd sizes."""
    made: Engines = {}
    for name, (family, fields) in FAMILIES.items():
        folder = Path(mkdtemp(prefix="peregrine-family-"))
        checkpoint(family, fields, folder)
        made[name] = {"model": folder, "drafter": "suffix" if name == "qwen2" else "ngram"}
    return made


def drafters() -> Engines:
    """Chains, trees and blocks; heads with and without an output head of their own; few pages, small chunks."""
    tree, mtp = {"tree": (3, 2, 8)}, {"model": mla_mtp_model(), "drafter": "mtp"}
    return {
        "merlin, eagle3, planned": {"model": "merlin", "drafter": "eagle3", "windows": "auto"},
        "merlin, eagle3 tree, bfloat16": {"model": "merlin", "drafter": "eagle3", "dtype": "bfloat16", **tree},
        "a draft model with one head": {"drafter": one_head(), "num_drafts": 4, "prefill_chunk": 8},
        "a draft model's tree, float8": {"drafter": noisy_model(), "kv_dtype": "float8", **tree},
        "eagle tree": {"drafter": eagle_head(), **tree},
        "eagle3, few pages": {"drafter": eagle3_head(), "page_size": 4, "num_pages": 24, "max_rows": 3},
        "eagle3 through host memory": {"drafter": eagle3_head(), "page_size": 4, "num_pages": 11, **TIER},
        "mtp tree": {"model": mtp_model(), "drafter": "mtp", **tree},
        "mtp on latents and experts": mtp,
        "mtp tree on latents and experts": {**mtp, **tree},
        "experts": {"model": expert_model(), "drafter": "none"},
        "block head": {"model": calm_model(), "drafter": block_head()},
    }


def one_head() -> Path:
    """A draft model that ranks cannot share: rank 0 has it whole."""
    folder = mkdtemp(prefix="peregrine-head-")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    return make_random_checkpoint(folder, seed=2, vocab_size=VOCAB, head_dim=HEAD_DIM, max_positions=CONTEXT, **sizes)


def requests(count: int, longest: int) -> list[Case]:
    """Greedy, sampled, filtered, penalised and scored requests."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0.9, "seed": 5, "top_p": 0.9, "logprobs": 1},
        {"temperature": 1.2, "seed": 6, "frequency_penalty": 0.4, "prompt_logprobs": 2, "min_tokens": 4},
    ]
    asked = prompts(count, seed=11, high=30)
    return [
        Case(prompt, SamplingParams(max_tokens=longest, ignore_eos=True, detokenize=False, **settings[i % 3]))
        for i, prompt in enumerate(asked)
    ]


def outputs(options: dict[str, Any], started: Started, cases: Sequence[Case]) -> list[Output]:
    """What an engine led by this process generates."""
    given = {"model": tiny_model(), "num_pages": 200, "max_len": 160, "windows": "fixed", **options}
    config = engine_config(str(given.pop("model")), {**given, "tensor_parallel": started.ranks.size})
    engine = build_engine(config, started).engine
    tier, planner = engine.ledger.tier, engine.runner.planner
    if planner is not None:
        planner.measured = SteadyCosts()
        cases = [Case(case.prompt, replace(case.params, tree="tree", max_tokens=14)) for case in cases]
    if tier is not None:
        longer = [Case((*case.prompt, *range(2, 26))[:24], replace(case.params, max_tokens=4)) for case in cases[:3]]
        cases = [*longer, *longer]
    if config.model == "merlin":
        json = SamplingParams(temperature=0.7, seed=4, max_tokens=6, regex="[0-9]{9}", detokenize=False)
        cases = [*cases, Case(cases[0].prompt, json)]
    with counted_messages() as told:
        made = run(engine, cases)
    assert tier is None or tier.pages_in
    assert planner is None or (len(planner.record.windows) > 2 and planner.record.rounds["tree"])
    if started.processes:  # a round is one message; one with a grammar is two, since masks are computed in between
        assert told["run"] + told["verify"] == engine.runner.launched
        assert told["settle"] == told["verify"]
        assert not set(told) - {"run", "verify", "settle", *CHUNKS}
    return made


@contextmanager
def counted_messages() -> Iterator[Counter[str]]:
    """What rank 0 tells the others meanwhile, by method."""
    told: Counter[str] = Counter()
    tell = Ranks.tell

    def counted(self: Ranks, part: str, method: str, *given: object) -> None:
        told[method] += 1
        tell(self, part, method, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "tell", counted)
        yield told


def differences(engines: Engines, sizes: dict[int, Sequence[str]], cases: Sequence[Case]) -> Iterator[str]:
    """Names of engines whose tokens or log-probabilities are not those of one process, with the number of ranks.

    `sizes` says which engines are run with how many ranks.
    """
    alone = {name: told(outputs(options, Started(), cases)) for name, options in engines.items()}
    for size, names in sizes.items():
        with started_ranks([torch.device("cpu")] * size) as started:
            for name in names:
                differs = told(outputs(engines[name], started, cases)) != alone[name]
                print(f"{name}, {size} ranks: {'other bits' if differs else 'the same bits'}", flush=True)
                if differs:
                    yield f"{name}, {size} ranks"


def able(engines: Engines, size: int) -> list[str]:
    """The engines whose model so many ranks can share."""
    models = {name: str(options.get("model", tiny_model())) for name, options in engines.items()}
    return [name for name, model in models.items() if size in possible_sizes(open_source(model).config)]


def told(made: list[Output]) -> list[object]:
    """Everything a user sees of the outputs; floats are compared by every digit."""
    assert all(output.finish_reason == "length" for output in made)
    return [(output.token_ids, output.drafted, repr(output.logprobs), repr(output.prompt_logprobs)) for output in made]


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "usable_cores", lambda: 64)
        engines = families() | drafters()
        found = list(differences(engines, {size: able(engines, size) for size in (2, 3, 4)}, requests(9, 40)))
    print("\n".join(found) or "no difference")
    raise SystemExit(bool(found))
