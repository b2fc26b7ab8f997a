"""top-k, top-p and min-p by histogram and by digits, in the interpreter: the twin's sets, with ties and edge cases."""

import pytest
import torch

from kernels.exact_sampling import Params, sampling_of
from kernels.interpreted import needs_interpreter, send_to_triton
from peregrine.kernels.sampling.filters import lowest_kept_torch

pytestmark = [needs_interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy, of inf and NaN

ROWS = [
    Params(temperature=0.7, top_k=1),
    Params(temperature=1.3, top_k=5),
    Params(temperature=1.0, top_k=40, top_p=0.9, min_p=0.05),
    Params(temperature=0.3, top_p=0.5),
    Params(temperature=2.0, top_p=0.95),
    Params(temperature=1.0, top_p=1e-6),
    Params(temperature=1.0, min_p=0.1),
    Params(temperature=1.0),
    Params(temperature=5.0, top_k=10_000, top_p=0.3),
    Params(temperature=1.0, top_k=12, top_p=0.6),
]


@pytest.fixture(autouse=True)
def _triton_serves(monkeypatch):
    """The twin adds up the kernels' masses, so that the sets must be equal."""
    send_to_triton(monkeypatch)


def logits_of(kind, vocab_size, dtype):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(len(ROWS), 1, vocab_size, generator=generator) * 3
    match kind:
        case "ties":
            logits = logits.round()  # both zeros among them
        case "flat":
            logits = torch.full_like(logits, -1.5)
        case "wide":
            logits = logits * torch.logspace(-6, 1.5, vocab_size)
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["normal", "ties", "flat", "wide"])
@pytest.mark.parametrize("vocab_size", [1, 300])
def test_kept_sets_are_the_twins(kind, vocab_size, dtype):
    from peregrine.kernels.sampling.filters_triton import lowest_kept

    logits, sampling = logits_of(kind, vocab_size, dtype), sampling_of(ROWS)
    scores = logits.float() / sampling.temperature[:, None, None]
    got, expected = lowest_kept(logits, sampling), lowest_kept_torch(scores, sampling)[:, :, 0]
    assert got.shape == expected.shape
    assert torch.equal(scores >= got[:, :, None], scores >= expected[:, :, None])


@pytest.mark.parametrize("kind", ["normal", "ties", "wide"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_histogram_and_digits_find_the_same_score(kind, dtype):
    from peregrine.kernels.sampling.filters_triton import lowest_kept

    logits, sampling = logits_of(kind, 300, dtype), sampling_of(ROWS)
    assert torch.equal(lowest_kept(logits, sampling), lowest_kept(logits.float(), sampling))


def test_scores_that_are_impossible_are_not_kept():
    from peregrine.kernels.sampling.filters_triton import lowest_kept

    logits, sampling = logits_of("normal", 90, torch.float32), sampling_of(ROWS)
    logits[:, :, ::2] = -torch.inf
    scores = logits / sampling.temperature[:, None, None]
    got, expected = lowest_kept(logits, sampling), lowest_kept_torch(scores, sampling)[:, :, 0]
    assert torch.equal(scores >= got[:, :, None], scores >= expected[:, :, None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_broken_node_harms_no_other(dtype):
    from peregrine.kernels.sampling.filters_triton import lowest_kept

    logits, sampling = logits_of("normal", 90, dtype), sampling_of(ROWS)
    expected = lowest_kept(logits, sampling)
    logits[::2, 0, 17:30] = torch.tensor(torch.nan)
    logits[4] = torch.nan
    got = lowest_kept(logits, sampling)
    assert torch.equal(got[1::2], expected[1::2])


def test_masses_add_up_exactly():
    """Four equal tokens and a share just above a half: three of four are needed, and ties keep the fourth."""
    from peregrine.kernels.sampling.filters_triton import lowest_kept

    logits = torch.tensor([[[3.0, 3.0, 2.0, 2.0, -40.0]]], dtype=torch.bfloat16)
    share = 2 / (2 + 2 * torch.exp(torch.tensor(-1.0))).item()  # the mass of the two largest
    for top_p, least in [(share - 1e-4, 3.0), (share + 1e-4, 2.0)]:
        assert lowest_kept(logits, sampling_of([Params(top_p=top_p)])).item() == least
