"""`peregrine doctor`: what this machine has and can serve, whether its bits are right, and whether a model loads."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from peregrine import __version__
from peregrine.cli.checkpoint_report import checkpoint_lines, checkpoint_report
from peregrine.cli.flags import ENGINE_FLAGS, Commands, add_flags, add_parser, engine_options, open_llm
from peregrine.errors import ConfigError, PeregrineError
from peregrine.log import style, visible

if TYPE_CHECKING:
    import torch

    from peregrine.hardware import Hardware

EPILOG = """examples:
  peregrine doctor
  peregrine doctor --model /models/llama --device cuda
  peregrine doctor model.gguf              what is in a checkpoint, without loading it
  peregrine doctor --json

The exit code is 1 if a device, dtype or model that was asked for cannot be used, or if on this CPU the bits of a row
depend on the batch that it is computed in.
"""
ASKABLE = tuple(flag for flag in ENGINE_FLAGS if flag.field in ("model", "device", "dtype", "tensor_parallel"))
# The shape attention backends are asked about: what most dense checkpoints have.
HEAD_DIM, PAGE_SIZE = 128, 16
THREADS = (1, 2)  # with which the bits are checked
GIB = 2**30

Report = dict[str, Any]


def add_command(commands: Commands) -> None:
    """Add the command and its flags."""
    description = "Report what this machine has and can serve, whether its bits are right, and whether a model loads."
    parser = add_parser(commands, "doctor", run, "what this machine has and what can serve on it", description, EPILOG)
    parser.add_argument("checkpoint", nargs="?", metavar="FILE", help="explain a GGUF file or folder, and stop there")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_flags(parser, "asked for", ASKABLE)


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if everything that was asked for works and the bits are right, else 1."""
    from peregrine.hardware import read_hardware

    options = engine_options(args)
    if args.checkpoint is not None:
        for name, value in options.items():
            problem = "a checkpoint is explained without loading it"
            raise ConfigError(f"{name}={value}: {problem}; leave it out, or use --model {args.checkpoint}")
        return explain(args.checkpoint, args.json)
    if "tensor_parallel" in options and "model" not in options:
        raise ConfigError(f"tensor_parallel={options['tensor_parallel']}: depends on the model; pass --model, too")
    hardware = read_hardware()
    target = target_report(options.get("device", "auto"), options.get("dtype", "auto"))
    bits = bits_report()
    model = model_report(options) if "model" in options else None
    healthy = target["error"] is None and (model is None or model["error"] is None) and not bits["differences"]
    if args.json:
        parts = {"peregrine": __version__, "hardware": asdict(hardware), "target": target, "bits": bits, "model": model}
        print(json.dumps(parts | {"healthy": healthy}, indent=2))
    else:
        print("\n".join([*hardware_lines(hardware), *target_lines(target), *bits_lines(bits), *model_lines(model)]))
    return 0 if healthy else 1


def explain(checkpoint: str, as_json: bool) -> int:
    """Print what a checkpoint is; 0 if it can be served, else 1."""
    report = checkpoint_report(checkpoint)
    print(json.dumps(report, indent=2) if as_json else "\n".join(checkpoint_lines(report)))
    return 1 if report["problems"] else 0


def target_report(device_name: str, dtype_name: str) -> Report:
    """The device and dtype that the flags resolve to, and each attention backend's reasons not to serve them."""
    import torch

    from peregrine.hardware import arithmetic_dtype, resolve_device, resolve_dtype

    try:
        device = resolve_device(device_name)
        # Most checkpoints hold bfloat16; the one asked about may say otherwise when it is loaded.
        dtype = resolve_dtype(dtype_name, device, torch.bfloat16)
    except PeregrineError as error:
        return {"device": None, "dtype": None, "backends": {}, "kernels": {}, "error": str(error)}
    names = {"device": str(device), "dtype": str(dtype).removeprefix("torch.")}
    dtype = arithmetic_dtype(dtype, device)
    backends = backend_reasons(device, dtype)
    return {**names, "backends": backends, "kernels": kernel_reasons(backends, device, dtype), "error": None}


def backend_reasons(device: "torch.device", dtype: "torch.dtype") -> dict[str, list[str]]:
    """By backend: why it cannot serve; an empty list if it can."""
    from peregrine.attention import Needs, refusals
    from peregrine.attention.routing import BACKENDS

    needs = Needs(
        device=device.type,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=PAGE_SIZE,
        head_dim=HEAD_DIM,
        tree_masks=False,
        windows=False,
        sinks=False,
        caps=False,
        shared_kv=False,
    )
    return {backend.name: backend.missing() + refusals(needs, backend.traits) for backend in BACKENDS}


def kernel_reasons(
    backends: dict[str, list[str]], device: "torch.device", dtype: "torch.dtype"
) -> dict[str, dict[str, str]]:
    """By backend that can serve: which of its kernels takes each kind of window, and why."""
    import torch

    from peregrine.attention import Window
    from peregrine.attention.kernel_choice import kernel_reason, usual_problem
    from peregrine.attention.routing import BACKENDS
    from peregrine.kernels.attention import gpu_of

    gpu = gpu_of(torch.empty(0, device=device))
    windows = {
        "plain decoding, a draft step": Window.uniform(1, 1),
        "verify of 3 drafts": Window.uniform(1, 4),
        "verify of a tree": Window.uniform(1, 32),
        "prompts": Window.ragged([256, 100]),
    }
    return {
        backend.name: {
            what: kernel_reason(usual_problem(window, HEAD_DIM, PAGE_SIZE, dtype), backend.traits, gpu)
            for what, window in windows.items()
        }
        for backend in BACKENDS
        if not backends[backend.name]
    }


def bits_report() -> Report:
    """How many operations were checked on this CPU, and in which of them a row's bits depend on the batch."""
    import torch

    from peregrine.bench.row_bits import check_rows
    from peregrine.bench.row_operations import operations

    if sys.stderr.isatty():
        print("checking bits: a few seconds, or a minute where kernels must be compiled first", file=sys.stderr)
    table = list(operations())
    return {
        "operations": len(table),
        "threads": list(THREADS),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "differences": [str(finding) for finding in check_rows(THREADS, quick=True, table=table)],
    }


def model_report(options: Report) -> Report:
    """Whether the model loads with these options, and what the engine decided for it."""
    try:
        with open_llm(options) as llm:
            decisions = [f"{made.field} = {made.value}: {made.because}" for made in llm.decisions]
    except PeregrineError as error:
        return {"model": options["model"], "decisions": [], "error": str(error)}
    return {"model": options["model"], "decisions": decisions, "error": None}


def hardware_lines(hardware: "Hardware") -> list[str]:
    """The machine: versions, CPU, memory and GPUs, a line each."""
    hint = "not installed; for compiled CPU kernels run: pip install numba"
    cpu, total, available = hardware.cpu, hardware.memory_total_bytes, hardware.memory_available_bytes
    facts = [
        ("python", f"{hardware.python} on {hardware.system}"),
        ("torch", f"{hardware.torch}, " + (f"CUDA {hardware.cuda}" if hardware.cuda else "no CUDA")),
        ("numba", hardware.numba or hint),
        ("triton", hardware.triton or "not installed"),
        ("cpu", f"{cpu.name}, {cpu.cores} cores, {' '.join(cpu.flags) or 'no flags known'}"),
        ("memory", f"{gibibytes(total)}, {gibibytes(available)} available"),
    ]
    for gpu in hardware.gpus:
        capability = ".".join(str(part) for part in gpu.capability)
        memory = f"{gibibytes(gpu.memory_total_bytes)}, {gibibytes(gpu.memory_free_bytes)} free"
        facts.append((f"cuda:{gpu.index}", f"{gpu.name}, capability {capability}, {memory}"))
    title = style(f"peregrine {__version__}", "bold")
    return [title, *(f"  {name:<8} {fact}" for name, fact in facts)]


def target_lines(target: Report) -> list[str]:
    """The device and dtype that will be used, and the backends for them."""
    if target["error"] is not None:
        return [style("device", "bold"), failed(target["error"])]
    lines = [f"  {'device':<8} {target['device']}, {target['dtype']}"]
    lines.append(style(f"attention backends (for a model with heads of {HEAD_DIM}, pages of {PAGE_SIZE})", "bold"))
    for name, reasons in target["backends"].items():
        lines.append(failed(f"{name}: {'; '.join(reasons)}") if reasons else passed(f"{name}: can serve"))
        lines += [f"      {what}: {reason}" for what, reason in target["kernels"].get(name, {}).items()]
    return lines


def bits_lines(bits: Report) -> list[str]:
    """Whether rows depend on the batch, and what to do if they do."""
    threads = " and ".join(map(str, bits["threads"]))
    checked = f"({bits['operations']} operations, {threads} threads, {bits['vectors']})"
    title = style("bits on this CPU", "bold")
    if not bits["differences"]:
        return [title, passed(f"rows do not depend on the batch {checked}")]
    report = "      this is a bug: please report it with the output of peregrine doctor --json"
    return [
        title,
        failed(f"rows depend on the batch {checked}"),
        *(f"      {text}" for text in bits["differences"]),
        report,
    ]


def model_lines(model: Report | None) -> list[str]:
    """Whether the model loads, and the engine's decisions."""
    if model is None:
        return []
    title = style(f"model {model['model']}", "bold")
    if model["error"] is not None:
        return [title, failed(model["error"])]
    return [title, passed("loads"), *(f"      {visible(decision)}" for decision in model["decisions"])]


def passed(text: str) -> str:
    return f"  {style('yes', 'green')} {visible(text)}"


def failed(text: str) -> str:
    return f"  {style('no', 'red')}  {visible(text)}"


def gibibytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.1f} GiB"
