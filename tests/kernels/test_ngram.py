"""Look-up in the text: twin and kernel find the longest, then latest, run that a plain loop finds."""

import pytest
import torch

from kernels.interpreted import needs_interpreter
from peregrine.kernels.round.ngram import MAX_GRAM, MIN_GRAM, find_repeats_torch


@pytest.fixture(params=["twin", pytest.param("triton", marks=needs_interpreter)])
def find(request, monkeypatch):
    if request.param == "twin":
        return find_repeats_torch
    from peregrine.kernels.round import ngram_triton

    monkeypatch.setattr(ngram_triton, "TEXT_BLOCK", 32)  # several blocks, the last one not whole
    return lambda history, newest, count: ngram_triton.find_repeats(history, newest, count, MAX_GRAM, MIN_GRAM)


def look_back(text, newest, count):
    """The drafts after text[: newest + 1], by trying every place."""
    best, place = 0, 0
    for p in range(newest):
        run = 0
        while run < MAX_GRAM and run <= p and text[p - run] == text[newest - run]:
            run += 1
        if run >= max(best, MIN_GRAM):
            best, place = run, p
    return text[place + 1 : min(place + 1 + count, newest + 1)] if best else []


@pytest.mark.parametrize("variety", [2, 4, 12])
@pytest.mark.parametrize(("width", "count"), [(5, 1), (40, 4), (100, 7)])
def test_the_longest_latest_run_is_repeated(find, variety, width, count):
    generator = torch.Generator().manual_seed(variety + width)
    history = torch.randint(0, variety, (12, width + 3), generator=generator)[:, :width]
    newest = torch.randint(0, width, (12,), generator=generator)
    tokens, known = find(history, newest, count)
    assert tokens.shape == (12, count)
    for row in range(12):
        expected = look_back(history[row].tolist(), int(newest[row]), count)
        assert tokens[row, : int(known[row])].tolist() == expected
    assert width == 5 or known.any()
    assert ((tokens >= 0) & (tokens < variety)).all()
