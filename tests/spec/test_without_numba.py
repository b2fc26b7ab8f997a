"""Identity holds with the torch twins alone: part of the identity tests runs in a process without numba."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# None in sys.modules makes find_spec and import behave as if numba were not installed.
SCRIPT = """
import sys
sys.modules["numba"] = None
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("file", ["spec/without_numba.py", "models/test_bits.py"])
def test_without_numba(file: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(TESTS / file)]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
