"""One linear per head in one launch, in the interpreter: near float64, and bits that no tile changes."""

import pytest
import torch
from torch import Tensor

from peregrine.errors import ConfigError
from peregrine.hardware import triton_interprets
from peregrine.kernels.runtime.gpu import TRITON_PRESENT

if not (TRITON_PRESENT and triton_interprets()):
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from peregrine.kernels.linear import per_head_triton as heads_gpu
from peregrine.kernels.linear.per_head_triton import TritonPerHead, pick_tile


def draw(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size[-1]))


@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(2, 16, 32), (3, 48, 24), (4, 128, 80)])
@pytest.mark.parametrize("rows", [0, 1, 5, 37])
def test_every_head_has_its_own_weight(heads: int, inputs: int, outputs: int, rows: int) -> None:
    x, weight = draw(rows, heads, inputs + 8)[..., :inputs], draw(heads, outputs, inputs)
    expected = torch.einsum("nhk,hok->nho", x.double(), weight.double())
    torch.testing.assert_close(TritonPerHead(weight).linear(x).double(), expected, atol=1e-5, rtol=1e-5)


def test_results_go_into_the_given_output() -> None:
    x, weight = draw(5, 3, 32), draw(3, 48, 32)
    wide = torch.full((5, 3, 48 + 16), 9.0)
    out = TritonPerHead(weight).linear(x, wide[..., :48])
    assert torch.equal(out, TritonPerHead(weight).linear(x))
    assert torch.equal(wide[..., :48], out)
    assert bool((wide[..., 48:] == 9.0).all())


@pytest.mark.parametrize("tile", [(16, 16), (16, 64), (32, 32), (64, 64), (128, 16)])
def test_neither_tile_nor_other_rows_change_a_bit_here(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw(70, 2, 64), draw(2, 72, 64)
    together = TritonPerHead(weight).linear(x)
    monkeypatch.setattr(heads_gpu, "pick_tile", lambda *sizes: tile)
    assert torch.equal(TritonPerHead(weight).linear(x), together)
    assert torch.equal(TritonPerHead(weight).linear(x[3:4]), together[3:4])


def test_tiles_grow_with_the_rows_and_narrow_until_all_multiprocessors_have_one() -> None:
    assert [pick_tile(rows, 16, 512)[0] for rows in (1, 16, 17, 64, 4096)] == [16, 16, 32, 64, 128]
    assert pick_tile(1, 16, 512) == (16, 64)
    assert pick_tile(1, 16, 128) == (16, 16)
    assert pick_tile(1, 128, 128) == (16, 64)
    assert pick_tile(4096, 16, 128) == (128, 64)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="x has 2 heads of 32, but the weight is"):
        TritonPerHead(draw(3, 16, 32)).linear(draw(1, 2, 32))
    with pytest.raises(ValueError, match="out is"):
        TritonPerHead(draw(2, 16, 32)).linear(draw(1, 2, 32), draw(1, 2, 32))
    with pytest.raises(ConfigError, match="24 inputs per head: GPU kernels take multiples of 16"):
        TritonPerHead(draw(2, 16, 24)).linear(draw(1, 2, 24))
