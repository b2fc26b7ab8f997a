"""Facts of the machine a figure was measured on."""

from dataclasses import asdict

from peregrine.hardware import read_hardware


def machine_facts() -> dict[str, object]:
    """What this machine is, as plain values."""
    return asdict(read_hardware())
