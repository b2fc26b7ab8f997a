"""How good a head is: the engine drafts with it on held-out prompts, and counts what the target accepts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from peregrine.engine.request import Output
from peregrine.llm import LLM
from peregrine.sampling import SamplingParams
from peregrine.train.prompts import Prompt

# name -> options of the engine
SHAPES: dict[str, dict[str, object]] = {
    "chain of 3": {"num_drafts": 3},
    "chain of 5": {"num_drafts": 5},
    "tree 5, 4, 24": {"tree": (5, 4, 24)},
}
TEMPERATURES = (0.0, 1.0)
ALL = "all"
Facts = dict[str, object]


@dataclass(frozen=True, slots=True)
class Measure:
    """What to measure on."""

    prompts: Sequence[Prompt]
    max_tokens: int
    rows: int
    device: str
    dtype: str


def measure(target: Path, drafter: Path, measure: Measure, shapes: Sequence[str]) -> list[Facts]:
    """Acceptance of the drafter in each shape, greedy and at temperature 1, by source and over all prompts."""
    facts: list[Facts] = []
    bar = tqdm(total=len(shapes) * len(TEMPERATURES) * len(measure.prompts), desc="evaluate", unit=" prompts")
    for shape in shapes:
        options: dict[str, object] = {
            "drafter": str(drafter.resolve()),
            "max_rows": measure.rows,
            "max_len": max(len(prompt.tokens) for prompt in measure.prompts) + measure.max_tokens,
            "device": measure.device,
            "dtype": measure.dtype,
            **SHAPES[shape],
        }
        with LLM(str(target), **options) as llm:
            for temperature in TEMPERATURES:
                params = [
                    SamplingParams(temperature=temperature, seed=seed, max_tokens=measure.max_tokens, detokenize=False)
                    for seed in range(len(measure.prompts))
                ]
                outputs = llm.generate([p.tokens for p in measure.prompts], params, progress=False)
                bar.update(len(outputs))
                facts += summarise(shape, temperature, measure.prompts, outputs)
    bar.close()
    return facts


def summarise(shape: str, temperature: float, prompts: Sequence[Prompt], outputs: Sequence[Output]) -> list[Facts]:
    """One entry for each source and one for all."""
    names = list(dict.fromkeys(prompt.source for prompt in prompts))
    entries = []
    for name in [ALL, *names] if len(names) > 1 else [ALL]:
        chosen = [o for p, o in zip(prompts, outputs, strict=True) if name in (ALL, p.source)]
        rounds, accepted = sum(o.stats.rounds for o in chosen), sum(o.stats.accepted for o in chosen)
        entries.append(
            {
                "shape": shape,
                "temperature": temperature,
                "source": name,
                "prompts": len(chosen),
                "tokens": accepted,
                "accept_length": accepted / max(1, rounds),
                "by_position": by_position([o.stats.accept_histogram for o in chosen]),
            }
        )
    return entries


def by_position(histograms: Sequence[Sequence[int]]) -> list[float]:
    """Of the rounds whose earlier drafts were right, the share whose draft number i was right too."""
    longest = max(map(len, histograms), default=0)
    rounds = [sum(h[i] for h in histograms if i < len(h)) for i in range(longest)]
    reached = [sum(rounds[i:]) for i in range(longest)]  # rounds with at least i correct drafts
    return [reached[i + 1] / reached[i] for i in range(longest - 1)]


def table(facts: Sequence[Facts]) -> str:
    """The figures for all prompts as lines of text."""
    lines = [f"{'drafts':<16}{'T':>4}{'source':>24}{'accept':>9}  by position"]
    for entry in facts:
        positions = " ".join(f"{share:.2f}" for share in entry["by_position"])  # type: ignore[attr-defined]
        lines.append(
            f"{entry['shape']:<16}{entry['temperature']:>4g}{entry['source']:>24}"
            f"{entry['accept_length']:>9.2f}  {positions}"
        )
    return "\n".join(lines)
