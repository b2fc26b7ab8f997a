"""The host tier on a GPU: the same tokens with copies on a stream of their own, and no wait of the host for them."""

from collections.abc import Iterator

import pytest
import torch

from gpu.random_models import VOCAB, deepseek, disturbed, llama
from gpu.traffic import Traffic
from peregrine.cache.page_copies import PageCopies
from peregrine.cache.store import KVShape, KVStore
from peregrine.engine.build import Built, build_engine
from peregrine.llm import engine_config
from peregrine.sampling import SamplingParams
from spec.harness import Case, check_pages, run, tokens

PREFIXES = [[1 + (place * place * 31 + 7 * place + seed) % (VOCAB - 2) for place in range(400)] for seed in range(12)]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, detokenize=False)
# In all 189 pages, where the device has 109: what is asked for again comes from the host.
CASES = [Case((*prefix[: 150 + 20 * i], 9), PARAMS) for i, prefix in enumerate(PREFIXES)]


def build(model: object, **options: object) -> Built:
    wanted: dict[str, object] = {"device": "cuda", "drafter": "none", "max_rows": 4, "row_sizes": (4,), "max_len": 512}
    return build_engine(engine_config(str(model), wanted | options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bfloat16", "float8"])
def test_pages_come_back_with_their_bytes_while_others_are_written(dtype: torch.dtype) -> None:
    stores = [KVStore(4, 600, 16, KVShape.of_heads(8, 128), dtype, "cuda")]
    parts = [part.view(torch.uint8) for store in stores for part in store.parts]
    for part in parts:
        part.random_(0, 255)
    before = [part.clone().view(4, 600, -1) for part in parts]
    copies = PageCopies(stores, 300)
    out = copies.out(range(1, 301), range(300))
    assert out is not None
    out.synchronize()
    for part in parts:
        part[:, 16 * 1 : 16 * 301].zero_()  # queued before the copies back, which must wait for it
    back = copies.back(range(300), range(300, 0, -1))
    assert back is not None
    for part in parts:
        part[:, 16 * 301 :].zero_()  # beside them
    back.synchronize()
    for part, old in zip(parts, before, strict=True):
        new = part.view(4, 600, -1)
        assert torch.equal(new[:, 1:301], old[:, 1:301].flip(1))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"num_drafts": 3}),
        ("llama", {"kv_dtype": "float8"}),
        ("deepseek", {"drafter": "mtp", "graphs": False}),
    ],
    ids=["chain", "float8", "MLA with its layer"],
)
@torch.inference_mode()
def test_pages_from_the_host_change_no_token(name: str, options: dict[str, object]) -> None:
    model = llama() if name == "llama" else deepseek()
    if "num_drafts" in options:
        options = options | {"drafter": str(disturbed(llama()))}
    plain = options | {"num_pages": 600, "prefix_cache": False, "graphs": False}
    expected = tokens(run(build(model, **plain).engine, CASES))
    engine = build(model, num_pages=110, host_cache=1, **options).engine
    twice = run(engine, CASES + CASES, arrivals=[2 * i for i in range(24)])
    assert tokens(twice) == expected * 2
    tier = engine.ledger.tier
    assert tier is not None
    assert tier.pages_in > 50


@pytest.fixture
def no_waits() -> Iterator[None]:
    """The host may not wait for the device, except for an event; torch raises where it would."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@torch.inference_mode()
def test_the_host_never_waits(request: pytest.FixtureRequest) -> None:
    """Requests join, leave, are aborted and preempted while pages go to the host and come back."""
    engine = build(llama(), drafter="ngram", num_drafts=2, num_pages=90, host_cache=1, row_sizes=(1, 4)).engine
    traffic = Traffic(engine, VOCAB, longest=200)
    for _ in traffic.rounds_of(300):
        pass
    tier = engine.ledger.tier
    assert tier is not None
    request.getfixturevalue("no_waits")
    before = tier.pages_out
    for _ in traffic.rounds_of(500):
        pass
    torch.cuda.set_sync_debug_mode("default")
    assert tier.pages_out > before
    while engine.has_work:
        engine.step()
    check_pages(engine)
