"""Set-up of every test run: no network, few threads, GPU tests skipped without a GPU."""

import importlib.util
import os
import random
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Set before torch, Triton or transformers is imported: few threads per worker, no hub, the interpreter where there is
# no GPU, or none is to be seen (CUDA_VISIBLE_DEVICES="").
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait for each other leave the cores to other workers
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")  # else torch leaves a /tmp/perf-*.map per process on ARM
if shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"

import torch

from peregrine.synthetic.interpreter import mend_interpreter

GPU_FOLDER = Path(__file__).parent / "gpu"
LOOPBACK = ("127.", "::1", "localhost")
# Single tests of these take seconds; started first, they leave short ones to even out the workers at the end.
SLOW = (
    "test_compiled_gpu.py",
    "test_mla_compiled_gpu.py",
    "test_hopper_compiled.py",
    "test_attention_compiled_gpu.py",
    "test_row_bits.py",
    "test_without_numba.py",
    "test_gpu_round.py",
    "test_conformance.py",
    "test_make_head.py",
    "test_batch.py",
    "test_stress.py",
    "test_parallel.py",
)

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
mend_interpreter()

if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # Every run draws the same examples, and none fails because the machine is busy.
    slow = [HealthCheck.too_slow]
    settings.register_profile("peregrine", deadline=None, derandomize=True, database=None, suppress_health_check=slow)
    settings.load_profile("peregrine")


def pytest_configure(config: pytest.Config) -> None:
    """Put temporary files of this process and its children into one folder, which goes when the tests end.

    Children import this tree, whatever is installed.
    """
    paths = [str(Path(__file__).parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ.setdefault(
        "PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir()
    )  # pytest keeps tmp_path of the last runs itself
    folder = tempfile.mkdtemp(prefix="peregrine-tests-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in tests/gpu, and skip it without CUDA. Slow tests come first."""
    items.sort(key=lambda item: item.path.name not in SLOW)
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if GPU_FOLDER in item.path.parents:
            item.add_marker("gpu")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


@pytest.fixture(scope="session", autouse=True)
def offline() -> Iterator[None]:
    """Connections to other machines fail with the address in the message."""
    patch = pytest.MonkeyPatch()
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        host = str(address[0]) if isinstance(address, tuple) else ""
        if self.family != socket.AF_UNIX and not host.startswith(LOOPBACK):
            raise OSError(f"tests are offline, but something connects to {address}")
        connect(self, address)  # type: ignore[arg-type]

    patch.setattr(socket.socket, "connect", guarded)
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def drawn_seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed get the same ones in every run: a text that ends early fails always or never."""
    monkeypatch.setattr(secrets, "randbits", random.Random(request.node.nodeid).getrandbits)


@pytest.fixture
def peregrine(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Run the command line: (exit code, stdout, stderr). The log is left as it was: stderr is the test's own."""
    from peregrine.cli.main import main
    from peregrine.log import logger

    before = logger.handlers[:], logger.level, logger.propagate

    def run(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield run
    logger.handlers[:], logger.level, logger.propagate = before
