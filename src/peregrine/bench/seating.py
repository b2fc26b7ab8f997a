"""Running requests for benchmarks: their prompts are not read, their pages hold noise, the same each time."""

import torch

from peregrine.bench.roofline import stores_of
from peregrine.engine.engine import Engine
from peregrine.engine.request import Request
from peregrine.sampling import SamplingParams


def seat(engine: Engine, rows: int, context: int, max_tokens: int) -> list[Request]:
    """Admit `rows` requests with random prompts of `context` tokens, which count as read."""
    fill_stores(engine)
    generator = torch.Generator().manual_seed(context)
    prompts = torch.randint(0, engine.limits.vocab_size, (rows, context), generator=generator).tolist()
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False}
    requests = [
        engine.prepare(prompt, SamplingParams(seed=row, **params))  # type: ignore[arg-type]
        for row, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.enqueue(request)
    engine.seat_unread()
    return requests


def unseat(engine: Engine, requests: list[Request]) -> None:
    """Abort the requests, and let the rounds in flight end."""
    for request in requests:
        engine.abort(request)
    while engine.has_work:
        engine.step()


def step(engine: Engine, rounds: int) -> None:
    """Run rounds, and wait for the device."""
    for _ in range(rounds):
        engine.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def mean_tokens(requests: list[Request]) -> float:
    """The requests' mean length."""
    return sum(request.num_tokens for request in requests) / len(requests)


def fill_stores(engine: Engine) -> None:
    """Fill keys and values with noise; for zeros a device draws less power and runs faster.

    All pages of a layer hold the same noise, each time: what a request reads does not depend on the pages it gets, nor
    on the requests that had them before.
    """
    generator = torch.Generator().manual_seed(0)
    for store in stores_of(engine):
        for layer in (layer for part in store.parts for layer in part):  # [slots, Hkv, D]
            page = torch.randn(store.page_size, *layer.shape[1:], generator=generator).bfloat16()
            layer.view(store.num_pages, *page.shape).copy_(page.to(layer.device))
