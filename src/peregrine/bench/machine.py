"""The machine that a figure was measured on."""

from dataclasses import asdict

from peregrine.hardware import read_hardware


def machine_facts() -> dict[str, object]:
    """Facts about this machine, as plain values."""
    return asdict(read_hardware())
