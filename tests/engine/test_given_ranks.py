"""Tensor parallel in the processes of a torchrun."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from peregrine.engine import parallel
from peregrine.engine.given_ranks import ADDRESS, given_ranks
from peregrine.errors import ConfigError
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.llm import LLM
from peregrine.sampling import SamplingParams
from spec.harness import tiny_model


@pytest.mark.skipif(not NUMBA_PRESENT, reason="CPU ranks need numba")
def test_the_processes_of_a_torchrun_are_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In rank 0, this process, the program goes on; in the other one the engine's constructor is the end of it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    given = {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    program = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from peregrine.engine import parallel\n"
        "parallel.usable_cores = lambda: 64\n"
        "from peregrine import LLM\n"
        f"LLM({str(tiny_model())!r}, tensor_parallel=2, drafter='none', num_pages=200)\n"
        "print('went on')\n"
    )
    monkeypatch.setattr(parallel, "usable_cores", lambda: 64)
    for name, value in {**given, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    with subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "RANK": "1"}, stdout=subprocess.PIPE, text=True
    ) as other:
        with LLM(tiny_model(), tensor_parallel=2, drafter="none", num_pages=200) as llm:
            together = llm.generate([1, 2, 3], params)[0].token_ids
        assert other.communicate(timeout=60)[0] == ""
    assert other.returncode == 0
    with LLM(tiny_model(), drafter="none", num_pages=200) as alone:
        assert alone.generate([1, 2, 3], params)[0].token_ids == together


def test_where_ranks_cannot_join_it_is_said_at_once() -> None:
    class Store(dict[str, bytes]):
        def set(self, name: str, value: str) -> None:
            self[name] = value.encode()

    def join() -> None:
        with given_ranks(Store({ADDRESS: b"/nowhere/rank0"}), 1, [torch.device("cpu")] * 2):
            pass

    with pytest.raises(ConfigError, match="tensor_parallel=2: rank 1 is on another machine than rank 0"):
        join()
    with ThreadPoolExecutor() as threads, pytest.raises(ConfigError, match="a server starts its ranks itself"):
        threads.submit(join).result()
