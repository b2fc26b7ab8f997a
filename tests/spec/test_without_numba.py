"""Identity holds with the torch twins alone: part of the identity tests runs in a process without numba."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
# None in sys.modules makes find_spec and import behave as if numba were not installed.
SCRIPT = """
import sys
sys.modules["numba"] = None
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_without_numba() -> None:
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        str(TESTS / "spec" / "without_numba.py"),
        str(TESTS / "models" / "test_bits.py"),
    ]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
