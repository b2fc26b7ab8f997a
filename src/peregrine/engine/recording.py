"""Records what an engine runs over and over on a GPU: rounds of every batch size, and forwards of prompt chunks."""

import time
from itertools import chain

import torch
from tqdm import tqdm

from peregrine.config import Decision
from peregrine.engine.engine import Engine
from peregrine.engine.first_round import FirstRound
from peregrine.engine.graphs import Graphs
from peregrine.engine.memory import explain_memory
from peregrine.engine.prompt_graphs import PromptGraphs
from peregrine.engine.runner import VARIANTS
from peregrine.grammar import GRAMMARS_PRESENT


def record_graphs(engine: Engine, device: torch.device) -> Decision:
    """Record every round the engine may run and the usual prompt chunks, with a progress bar."""
    began, taken = time.perf_counter(), 0
    sizes = engine.policy.row_sizes
    assert sizes is not None
    engine.runner.graphs = Graphs(device, engine.runner.target.ranks)
    variants = len(VARIANTS)
    if GRAMMARS_PRESENT:
        engine.runner.seats.hold_masks(engine.limits.vocab_size)
        variants += 2  # the two parts of a round with a grammar
    runner, seats = engine.runner, engine.runner.seats
    pages = -(-seats.max_places // seats.page_size)
    chunk = engine.policy.prefill_chunk
    if 1 in sizes and seats.shape.is_chain and runner.target.ranks.size == 1:
        ahead = None if runner.ahead is None else runner.ahead[1]
        own = runner.target, runner.drafter, runner.judge, seats, engine.runner.graphs
        runner.first = FirstRound(*own, VARIANTS, ahead)
    prompts = PromptGraphs(runner.rounds, engine.runner.graphs, chunk, pages, runner.first)
    runner.rounds.ranks.note("follower", "make_prompts", chunk, pages)
    count = len(sizes) * variants + len(prompts.shapes) + (0 if runner.first is None else len(VARIANTS))
    total = count if runner.ahead is None else None  # planned rounds are recorded in parts, as many as it takes
    bar = tqdm(total=total, desc="recording rounds", unit="graph", delay=1, leave=False)
    with bar, explain_memory(device, "the graphs of rounds", "lower max_rows or num_pages"):
        first = () if runner.first is None else runner.first.record()
        for num_bytes in chain(prompts.record(), first, runner.record(sizes)):
            taken += num_bytes
            bar.update()
    engine.replay_chunks = prompts.replay
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    parts = f"in {variants} variants" if runner.ahead is None else "in parts, by their tokens and drafts"
    return Decision(
        "recorded",
        len(engine.runner.graphs),
        f"rounds of {', '.join(map(str, sizes))} rows {parts}; prompt chunks of {len(prompts.sizes)} sizes, "
        f"{prompts.sizes[0]} to {prompts.sizes[-1]} tokens; {taken / 2**20:.0f} MiB, {seconds:.1f} s",
    )
