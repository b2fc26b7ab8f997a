"""`peregrine conformance`: hold an attention backend against float64 answers and its own bits."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from peregrine.cli.flags import Commands, add_parser
from peregrine.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from peregrine.attention import AttentionBackend

EPILOG = """examples:
  peregrine conformance --attention triton
  peregrine conformance --attention numba --quick
  peregrine conformance --attention torch --dtype bfloat16 --json
  TRITON_INTERPRET=1 peregrine conformance --attention triton --device cpu --quick

Errors are measured against a bound that follows from the dtype; everything else is compared bit for bit. The exit
code is 1 if anything failed. For a backend of your own: peregrine.attention.conformance.run_conformance.
"""


def add_command(commands: Commands) -> None:
    """Add the command and its flags."""
    description = "Compare an attention backend with float64 results, and its bits across batches, windows and pages."
    parser = add_parser(commands, "conformance", run, "check an attention backend on this machine", description, EPILOG)
    parser.add_argument("--attention", required=True, metavar="BACKEND", help="the backend's name")
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="(default: auto)")
    parser.add_argument("--dtype", metavar="DTYPE", help="one dtype (default: all that the backend has)")
    parser.add_argument("--quick", action="store_true", help="each setting once, with small shapes")
    parser.add_argument("--part", type=part, default=(0, 1), metavar="I/N", help="the I-th of N parts of the cases")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def part(text: str) -> tuple[int, int]:
    """I/N as (I - 1, N)."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 1 to N, such as 2/4")
    return int(index) - 1, int(count)


def run(args: argparse.Namespace) -> int:
    """Run the cases and print the report; 0 if all passed, else 1."""
    from peregrine.attention.conformance import conformance_cases, run_conformance
    from peregrine.hardware import resolve_device, triton_interprets
    from peregrine.synthetic.interpreter import mend_interpreter

    if triton_interprets():
        mend_interpreter()
    device = resolve_device(args.device)
    backend = find_backend(args.attention, device)
    index, count = args.part
    cases = conformance_cases(backend.traits, pick_dtypes(args.dtype, backend), args.quick)
    if count > len(cases):
        raise ConfigError(f"part={index + 1}/{count}: there are {len(cases)} cases; ask for no more parts")
    cases = cases[index::count]

    def watch(name: str) -> None:
        if sys.stderr.isatty():
            print(name, file=sys.stderr)

    report = run_conformance(backend, cases, device, watch)
    print(json.dumps(report.facts(), indent=2) if args.json else "\n".join(report.lines()))
    return 0 if report.passed else 1


def find_backend(name: str, device: "torch.device") -> "AttentionBackend":
    """The backend of that name, if it can run on the device."""
    from peregrine.attention.routing import BACKENDS

    backends = {backend.name: backend for backend in BACKENDS}
    if name not in backends:
        raise ConfigError(f"attention={name!r}: no such backend; choose one of {', '.join(backends)}")
    backend = backends[name]
    devices = backend.traits.devices
    reasons = backend.missing()
    if devices is not None and device.type not in devices:
        reasons.append(f"runs on {', '.join(sorted(devices))}, not on {device.type}; choose with --device")
    if reasons:
        raise ConfigError(f"attention={name!r} cannot run here: {'; '.join(reasons)}")
    return backend


def pick_dtypes(name: str | None, backend: "AttentionBackend") -> "list[torch.dtype]":
    """The dtypes to compute in, widest first."""
    from peregrine.hardware import DTYPES

    promised = {word: dtype for word, dtype in DTYPES.items() if dtype in backend.traits.dtypes}
    if name is None:
        return list(promised.values())
    if name not in promised:
        raise ConfigError(f"dtype={name!r}: {backend.name} computes in {', '.join(promised)}; choose one of them")
    return [promised[name]]
