"""Requests of all kinds that arrive and leave, for engines that are stepped by hand."""

from collections.abc import Iterator
from itertools import count

import torch

from peregrine.engine.engine import Engine
from peregrine.engine.output import Output
from peregrine.sampling import SamplingParams

# Every sampling feature, and everything that can be reported.
PARAMS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "report_drafts": True},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"temperature": 0.0, "logit_bias": {7: 3.0, 11: -2.0}, "min_tokens": 4},
    {"temperature": 0.8, "prompt_logprobs": 2},
    {"temperature": 0.9, "stop_token_ids": list(range(300, 316)), "num_drafts": 1},
)


class Traffic:
    """Keeps an engine busy: requests of different lengths arrive while others run, and some are aborted."""

    def __init__(self, engine: Engine, vocab_size: int, longest: int, seed: int = 0) -> None:
        self.engine, self.vocab_size, self.longest = engine, vocab_size, longest
        self.generator = torch.Generator().manual_seed(seed)
        self.finished: list[Output] = []
        self.rounds, self._arrivals = 0, count()

    def rounds_of(self, number: int) -> Iterator[int]:
        """Step until this many rounds were queued; yields the number of each step."""
        step, last = 0, self.rounds + number
        while self.rounds < last:
            if step % 3 == 0 and len(self.engine.waiting) < 3:
                self._arrive()
            if step % 41 == 40 and self.engine.running:
                self.engine.abort(self.engine.running[step % len(self.engine.running)])
            self._step()
            yield step
            step += 1

    def drain(self) -> None:
        """Step until nothing is left."""
        while self.engine.has_work:
            self._step()

    def _step(self) -> None:
        deltas = self.engine.step()
        self.rounds += bool(self.engine.runner.in_flight)
        self.finished += [delta.output for delta in deltas if delta.output is not None]

    def _draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.generator))

    def _arrive(self) -> None:
        asked = PARAMS[next(self._arrivals) % len(PARAMS)]
        length = self._draw(1, self.longest)
        prompt = torch.randint(2, self.vocab_size, (length,), generator=self.generator).tolist()
        params = SamplingParams(seed=length, max_tokens=self._draw(4, self.longest), **asked)  # type: ignore[arg-type]
        self.engine.enqueue(self.engine.prepare(prompt, params))
