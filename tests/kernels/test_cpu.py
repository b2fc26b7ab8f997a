"""Compiled CPU kernels: the tensors they take, and results independent of threads."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from peregrine.kernels.linear import DenseWeight, pack_weight
from peregrine.kernels.runtime import cpu
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT, numba_ready
from peregrine.log import logger

needs_numba = pytest.mark.skipif(not NUMBA_PRESENT, reason="numba is not installed")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@needs_numba
def test_takes_float32_without_gradients():
    plain, wanted = torch.ones(2), torch.ones(2, requires_grad=True)
    assert numba_ready(plain)
    assert numba_ready(plain, plain)
    assert not numba_ready(plain, plain.double())
    assert not numba_ready(plain.bfloat16())
    assert not numba_ready(plain.to("meta"))
    assert not numba_ready(plain, wanted)
    with torch.inference_mode():
        assert numba_ready(plain, wanted)


def test_without_numba_the_twin_serves(monkeypatch):
    monkeypatch.setattr(cpu, "NUMBA_PRESENT", False)
    packed = pack_weight(torch.ones(3, 7))
    assert type(packed) is DenseWeight
    assert torch.equal(packed.linear(torch.ones(2, 7)), torch.full((2, 3), 7.0))


def test_the_absence_of_numba_is_said_once(monkeypatch):
    said = []
    monkeypatch.setattr(cpu, "NUMBA_PRESENT", False)
    monkeypatch.setattr(logger, "warning", said.append)
    cpu.warn_without_numba.cache_clear()
    assert list(cpu.load_kernels()) == list(cpu.load_kernels()) == []
    assert said == ["numba is not installed: generation takes about ten times as long; run: pip install numba"]


@needs_numba
@pytest.mark.parametrize("threads", [2, 5])
def test_a_call_returns_when_every_piece_is_done(threads):
    """Helpers that are still inside are awaited; with more threads than cores some always are."""
    x, packed, before = torch.randn(5, 320), pack_weight(torch.randn(1536, 320)), torch.get_num_threads()
    torch.set_num_threads(1)
    expected = packed.linear(x)
    torch.set_num_threads(threads)
    try:
        assert all(torch.equal(packed.linear(x), expected) for _ in range(400))
    finally:
        torch.set_num_threads(before)


@needs_numba
@pytest.mark.usefixtures("two_threads")
def test_many_python_threads_may_call_at_once():
    x, packed = torch.randn(5, 320), pack_weight(torch.randn(384, 320))
    expected = packed.linear(x)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: packed.linear(x), range(100)))
    assert all(torch.equal(result, expected) for result in results)


@needs_numba
@pytest.mark.usefixtures("two_threads")
def test_without_helpers_the_calling_thread_computes():
    """Nobody waits for a thread that has claimed nothing: a forked process, which has none, would wait for ever."""
    x, packed = torch.randn(5, 320), pack_weight(torch.randn(384, 320))
    expected = packed.linear(x)  # helpers exist now
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(packed.linear(x), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_importing_the_kernels_leaves_numba_alone():
    imports = "from peregrine.kernels import activation, linear, norm, rope"
    code = f"import sys; {imports}; sys.exit('numba' in sys.modules)"
    path = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env={**os.environ, "PYTHONPATH": path})
