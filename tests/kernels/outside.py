"""Scripts of this folder in a process of their own, where Triton compiles instead of interpreting."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def output_of(script: str) -> str:
    """What a script prints; it has to end without an error."""
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE.parent)])
    command, environment = [sys.executable, str(HERE / script)], {**outside, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
