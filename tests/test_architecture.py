"""The layers of the code base: imports point down, files stay small, some calls stay in some packages.

Every check is a function from a parsed file to complaints. It runs over the package, and over small bad examples that
it must complain about.
"""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "peregrine"
LAYERS = (
    {"errors", "files", "log", "hardware", "threads", "control_groups", "config", "sampling", "assets"},
    {"kernels", "text"},
    {"cache", "grammar"},
    {"attention"},
    {"models"},
    {"spec"},
    {"synthetic"},
    {"engine"},
    {"llm"},
    {"serve", "train", "bench"},
    {"cli"},
)
LAYER = {unit: height for height, units in enumerate(LAYERS) for unit in units}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_ARGUMENTS = 300, 60, 8
MAX_LAUNCH_ARGUMENTS = 12  # of a function that launches a kernel
COMPILED = re.compile(r"jit|cfunc|cpu_kernel|intrinsic")  # decorators of kernels: the hardware sets their size
# peregrine.kernels.FOLDER.FILE.name; device files may be imported by the code that chose the device.
KERNEL_FILE = re.compile(r"peregrine\.kernels\.(?P<folder>\w+)\.(?P<file>[a-z]\w*)\.\w+$")
DEVICE_FILE = re.compile(r"triton|hopper|cpu|tiles")
VAGUE_NAMES = {"utils", "util", "common", "base", "manager", "misc", "helpers", "v2"}
READS_RESULTS = {"engine", "llm", "train", "bench", "serve", "cli"}
# call -> the only units that may make it
HOMES = {
    "item": READS_RESULTS,
    "cpu": READS_RESULTS,
    "tolist": READS_RESULTS | {"cache"},
    "synchronize": READS_RESULTS,
    "getattr": {"models", "kernels", "sampling", "config"},  # layers by name, device files, own fields
    "hasattr": set[str](),
    "getenv": {"log", "hardware", "cli"},
}
ENVIRONMENT_HOMES = {"log", "hardware", "threads", "cli"}
# The front door: loads LLM, which lies above everything it is made of, on first use.
DOOR = SRC / "__init__.py"

FILES = sorted(SRC.rglob("*.py"))
Complaints = Iterator[str]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """All of them, found once for all checks."""
    return list(ast.walk(tree))


def unit_of(path: Path) -> str:
    """The unit a file belongs to: its top folder, or its own name."""
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Each `peregrine...` name a file imports: at the top, in functions, under TYPE_CHECKING, by string."""
    for node in nodes_of(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__") and node.args:
            names = [str(node.args[0].value)] if isinstance(node.args[0], ast.Constant) else []
        yield from (name for name in names if name.startswith(("peregrine", ".")))


def called_name(node: ast.Call) -> str:
    """`f` for f(...) and for x.f(...)."""
    match node.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def upward_imports(tree: ast.Module, unit: str) -> Complaints:
    """Imports that do not point down. Layer 0 is one folder, so its files may use each other."""
    for name in imports_of(tree):
        if name.startswith("."):
            yield f"{name}: absolute imports only"
            continue
        used = name.split(".")[1] if "." in name else "__init__"
        if used == "__version__":
            continue
        if used not in LAYER:
            yield f"{name}: import it from the file it lives in"
        elif used != unit and LAYER[used] >= max(LAYER[unit], 1):
            yield f"{name}: layer {LAYER[used]} is not below {unit} (layer {LAYER[unit]})"


def inner_imports(tree: ast.Module, unit: str) -> Complaints:
    """Imports from inside a kernel folder: its `__init__` is what other units may import, besides device files."""
    for name in imports_of(tree):
        match = KERNEL_FILE.match(name)
        if unit != "kernels" and match and not DEVICE_FILE.search(match["file"]) and match["folder"] != "runtime":
            yield f"{name}: import it from peregrine.kernels.{match['folder']}"


def oversize(tree: ast.Module, unit: str) -> Complaints:
    """Functions with too many lines or arguments; compiled kernels excepted."""
    for node in nodes_of(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any(COMPILED.search(ast.unparse(mark)) for mark in node.decorator_list):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in arguments if name not in ("self", "cls")])
        if lines > MAX_FUNCTION_LINES:
            yield f"line {node.lineno}: {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}"
        most = MAX_LAUNCH_ARGUMENTS if unit == "kernels" else MAX_ARGUMENTS
        if count > most:
            yield f"line {node.lineno}: {node.name} has {count} arguments, more than {most}"


def misplaced_calls(tree: ast.Module, unit: str) -> Complaints:
    """Waits for the device, peeks at attributes and reads of the environment outside their homes; globals."""
    for node in nodes_of(tree):
        match node:
            case ast.Global():
                yield f"line {node.lineno}: global: no module state"
            case ast.Call() if unit not in HOMES.get(called_name(node), {unit}):
                homes = sorted(HOMES[called_name(node)])
                yield f"line {node.lineno}: {called_name(node)}() belongs in {', '.join(homes) or 'no file'}"
            case ast.Attribute(attr="environ") | ast.alias(name="environ") if unit not in ENVIRONMENT_HOMES:
                yield f"line {node.lineno}: environ belongs in {', '.join(sorted(ENVIRONMENT_HOMES))}"


def undocumented(tree: ast.Module, unit: str) -> Complaints:
    """A file that does not open with what it is for."""
    if not ast.get_docstring(tree):
        yield "the file opens without a docstring that says what it is for"


@pytest.mark.parametrize("check", [upward_imports, inner_imports, oversize, misplaced_calls, undocumented])
def test_every_file(check: Callable[[ast.Module, str], Complaints]) -> None:
    """One test per check, not per file: collecting a thousand tests takes longer than running them."""
    complaints = []
    for path in FILES:
        if path == DOOR and check is upward_imports:
            continue
        unit = unit_of(path) if path != DOOR else "errors"
        assert unit in LAYER, f"{unit} has no layer: add it to LAYERS"
        complaints += [f"{path.relative_to(SRC)}: {said}" for said in check(parsed(path), unit)]
    assert not complaints, "\n".join(complaints)


def test_files_are_short_and_plainly_named() -> None:
    complaints = []
    for path in FILES:
        name, lines = path.relative_to(SRC), path.read_text().count("\n")
        if lines > MAX_FILE_LINES:
            complaints.append(f"{name}: {lines} lines, more than {MAX_FILE_LINES}: cut it where the subject changes")
        if {word for part in name.with_suffix("").parts for word in part.split("_")} & VAGUE_NAMES:
            complaints.append(f"{name}: name the file after what is in it")
    assert not complaints, "\n".join(complaints)


def test_documents_name_files_that_exist() -> None:
    """In backquotes, with folders or without; CONTRIBUTING shows a file that its reader writes."""
    files = [path.relative_to(ROOT) for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*")]
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    named = {(path.name, name) for path in documents for name in re.findall(r"`([\w/]+\.py)`", path.read_text())}
    assert ("DESIGN.md", "kernels/attention/hopper_prompt.py") in named
    missing = [each for each in named if not any(file.match(each[1]) for file in files)]
    assert missing == [("CONTRIBUTING.md", "spec/echo.py")]


def test_there_is_no_import_cycle() -> None:
    modules = {".".join(("peregrine", *path.relative_to(SRC).with_suffix("").parts)): path for path in FILES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items() if path != DOOR}
    graph = {
        name: {module for used in imports_of(parsed(path)) if (module := module_of(used, modules))}
        for name, path in modules.items()
    }
    assert not find_cycle(graph)


def module_of(name: str, modules: dict[str, Path]) -> str | None:
    """The module that an imported name is, or is defined in."""
    return name if name in modules else next((m for m in [name.rpartition(".")[0]] if m in modules), None)


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """One import cycle as a list of modules; empty if there is none."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for used in sorted(graph[name]):
            if cycle := visit(used, [*trail, name]):
                return cycle
        done.add(name)
        return []

    return next((cycle for name in sorted(graph) if (cycle := visit(name, []))), [])


@pytest.mark.parametrize(
    ("check", "unit", "source"),
    [
        (upward_imports, "attention", "from peregrine.engine.runner import Runner"),
        (upward_imports, "attention", "import peregrine.models.config"),
        (upward_imports, "attention", "from peregrine import models"),
        (upward_imports, "attention", "from peregrine import LLM"),
        (upward_imports, "attention", "from .window import Window"),
        (upward_imports, "attention", "def f():\n    from peregrine.spec import round"),
        (upward_imports, "attention", "if TYPE_CHECKING:\n    from peregrine.engine import runner"),
        (upward_imports, "attention", "importlib.import_module('peregrine.engine')"),
        (upward_imports, "bench", "from peregrine.serve import app"),
        (upward_imports, "kernels", "from peregrine.text.stream import TextStream"),
        (upward_imports, "errors", "from peregrine.kernels import linear"),
        (inner_imports, "spec", "from peregrine.kernels.sampling.reference import choose"),
        (inner_imports, "spec", "import peregrine.kernels.sampling.filters.masses"),
        (oversize, "spec", "def f():\n" + "    x = 1\n" * 60),
        (oversize, "spec", "def f(a, b, c, d, e, f, g, h, i): ..."),
        (oversize, "spec", "def f(a, b, c, d, /, e, f, *, g, h, i): ..."),
        (misplaced_calls, "spec", "x.item()"),
        (misplaced_calls, "kernels", "x.sum().tolist()"),
        (misplaced_calls, "models", "x.cpu()"),
        (misplaced_calls, "attention", "torch.cuda.synchronize()"),
        (misplaced_calls, "engine", "getattr(x, 'y')"),
        (misplaced_calls, "models", "hasattr(x, 'y')"),
        (misplaced_calls, "engine", "os.environ['X']"),
        (misplaced_calls, "engine", "os.getenv('X')"),
        (misplaced_calls, "engine", "from os import environ"),
        (misplaced_calls, "log", "def f():\n    global x"),
        (undocumented, "spec", "import torch"),
    ],
)
def test_check_complains(check: Callable[[ast.Module, str], Complaints], unit: str, source: str) -> None:
    assert list(check(ast.parse(source), unit))


@pytest.mark.parametrize(
    ("check", "unit", "source"),
    [
        (upward_imports, "attention", "from peregrine.cache.store import KVStore"),
        (upward_imports, "attention", "from peregrine.attention.window import Window"),
        (upward_imports, "hardware", "from peregrine.errors import ConfigError"),
        (upward_imports, "cli", "def f():\n    from peregrine.llm import LLM"),
        (upward_imports, "cli", "from peregrine import __version__"),
        (inner_imports, "spec", "from peregrine.kernels.sampling import choose"),
        (inner_imports, "attention", "from peregrine.kernels.attention.triton import decode"),
        (inner_imports, "kernels", "from peregrine.kernels.sampling.noise import gumbel"),
        (oversize, "kernels", "def f(a, b, c, d, e, f, g, h, i): ..."),
        (oversize, "spec", "@triton.jit\ndef f(a, b, c, d, e, f, g, h, i): ..."),
        (oversize, "spec", "class A:\n    def f(self, a, b, c, d, e, f, g, h): ..."),
        (misplaced_calls, "engine", "x.item()"),
        (misplaced_calls, "cache", "x.tolist()"),
        (misplaced_calls, "hardware", "os.environ['X']"),
        (undocumented, "spec", '"""What it is for."""'),
    ],
)
def test_check_accepts_good_code(check: Callable[[ast.Module, str], Complaints], unit: str, source: str) -> None:
    assert not list(check(ast.parse(source), unit))


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
