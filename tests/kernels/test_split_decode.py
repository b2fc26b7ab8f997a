"""Split-KV decode by `split_decode.cu`: what it knows of splits, and what NVRTC makes of it, without a GPU."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

from kernels.test_cuda_linear import disassembled, needs_nvrtc
from peregrine.kernels.attention import split_decode
from peregrine.kernels.attention.plan import split_of_index, start_of_split
from peregrine.kernels.attention.split_decode import Sizes, SplitShape, split_source
from peregrine.kernels.runtime.gpu import HOPPER_SHARED_BYTES

SOURCE = Path(split_decode.__file__).with_suffix(".cu").read_text()


def evaluated(name: str, argument: str, value: int) -> int:
    """A function of the source for a number that is not negative: lines `const int ...;` and a `return`."""
    found = re.search(rf"int {name}\(int {argument}\) {{(.*?)}}", SOURCE, re.DOTALL)
    assert found
    python = re.sub(r"^ *(const int )?|;$", "", found[1].strip(), flags=re.MULTILINE).replace("/", "//")
    known: dict[str, int] = {argument: value}
    *lines, result = python.split("\n")
    exec("\n".join(lines), {"min": min, "max": max}, known)
    return int(eval(result.removeprefix("return "), {}, known))


def test_splits_begin_where_those_of_the_other_kernels_do() -> None:
    for index in [*range(0, 40000, 61), 4095, 4096, 8191, 8192, 16383, 16384, 32767, 32768, 131071]:
        assert evaluated("split_of", "index", index) == split_of_index(index)
    for split in range(200):
        assert evaluated("split_start", "split", split) == start_of_split(split)


@needs_nvrtc
@pytest.mark.parametrize(
    ("tiles", "group", "head_dim", "page_size"), [(1, 4, 128, 16), (2, 8, 128, 64), (4, 8, 128, 16), (2, 7, 64, 8)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_shape_compiles_to_the_intended_instructions(
    tiles: int, group: int, head_dim: int, page_size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    shape = SplitShape(tiles, group, 4, head_dim, page_size, torch.int64, dtype)
    code, registers = disassembled(split_source(shape), tmp_path)
    assert code.count("HMMA") == code.count("HMMA.16816.F32" + (".BF16" if dtype is torch.bfloat16 else " ")) > 0
    assert "UTMALDG" in code
    assert re.search(r"\b(LDL|STL)\b", code) is None, "registers are spilled"
    assert registers * 32 * -(-shape.threads // 32) <= 65536
    assert "ACQBULK" in code, "it does not wait for the kernel before"
    assert "PREEXIT" in code, "the next kernel cannot start early"
    assert "FFMA.FTZ" not in code, "small numbers are lost"
    assert shape.shared_bytes <= HOPPER_SHARED_BYTES


def test_what_it_is_given_has_the_size_that_it_reads() -> None:
    assert ctypes.sizeof(Sizes) == 16
