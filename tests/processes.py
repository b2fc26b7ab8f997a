"""Processes that tests did not start themselves."""

import os
from pathlib import Path


def is_running(process: int) -> bool:
    """Whether a process that is not our child is there; one that has ended may wait to be noticed by its parent."""
    try:
        os.kill(process, 0)
        status = Path(f"/proc/{process}/stat")
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
