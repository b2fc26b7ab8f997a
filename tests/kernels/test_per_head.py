"""One linear per head: each head has its own weight, and a row has the same bits in any batch."""

import pytest
import torch
from torch import Tensor

from peregrine.kernels.attention import DeferredMLARope, mla_rope
from peregrine.kernels.linear import pack_per_head
from peregrine.kernels.linear import reference as linear

SHAPES = [(1, 1, 8, 16), (5, 3, 12, 32), (40, 4, 33, 17)]  # N, h, K, O: sizes that are multiples of nothing


def problem(rows: int, heads: int, size: int, out: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, heads, size, generator=generator), torch.randn(heads, out, size, generator=generator)


@pytest.fixture(params=["compiled", "torch"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(linear, "numba_ready", lambda *tensors: False)
    return str(request.param)


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("shape", SHAPES)
def test_each_head_has_its_own_weight(shape: tuple[int, int, int, int]) -> None:
    x, weight = problem(*shape)
    expected = torch.einsum("nhk,hok->nho", x.double(), weight.double())
    torch.testing.assert_close(pack_per_head(weight).linear(x).double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.usefixtures("kind")
def test_other_rows_and_layout_change_no_bit() -> None:
    x, weight = problem(40, 4, 33, 17)
    packed = pack_per_head(weight)
    whole = packed.linear(x)
    for rows in ([7], [39, 0], list(range(5, 23))):
        assert torch.equal(packed.linear(x[rows]), whole[rows])
    wide = torch.randn(40, 4, 50)
    wide[..., 9:42] = x
    assert torch.equal(packed.linear(wide[..., 9:42]), whole)


def test_it_writes_into_the_given_output() -> None:
    x, weight = problem(5, 3, 12, 32)
    room = torch.full((5, 3, 40), 7.0)
    out = pack_per_head(weight).linear(x, out=room[..., :32])
    assert out.data_ptr() == room.data_ptr()
    assert torch.equal(room[..., :32], pack_per_head(weight).linear(x))
    assert torch.equal(room[..., 32:], torch.full((5, 3, 8), 7.0))


def test_no_rows_give_an_empty_result() -> None:
    x, weight = problem(0, 3, 12, 32)
    assert pack_per_head(weight).linear(x).shape == (0, 3, 32)


def test_an_mla_key_is_the_normed_latent_and_the_rotated_part() -> None:
    """In float64, with rotation as complex numbers; queries are rotated at their own positions."""
    rank, size, heads = 12, 6, 3
    generator = torch.Generator().manual_seed(1)
    q_rope, k = torch.randn(2, heads, size, generator=generator), torch.randn(4, 1, rank + size)
    weight, angles = torch.rand(rank) + 0.5, torch.rand(9, size // 2) * 6
    rope = DeferredMLARope(
        q_rope=q_rope,
        q_positions=torch.tensor([8, 3]),
        positions=torch.tensor([2, 0, 8, 5]),
        table=torch.cat((angles.cos(), angles.sin()), dim=1),
        kv_norm=weight,
        eps=1e-2,
    )
    absorbed = torch.full((2, heads, rank + size), torch.nan)  # what is past the absorbed part is not read
    absorbed[..., :rank] = torch.randn(2, heads, rank)
    q, key = mla_rope(absorbed, k, rope)

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        first, second = x.double().chunk(2, dim=-1)
        at = angles[positions].double()[:, None]
        out = torch.complex(first, second) * torch.polar(torch.ones_like(at), at)
        return torch.cat((out.real, out.imag), dim=-1)

    latent = k[..., :rank].double()
    normed = latent / (latent.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight
    expected = torch.cat((normed, rotated(k[..., rank:], rope.positions)), dim=2)
    torch.testing.assert_close(key.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(q[..., :rank], absorbed[..., :rank])
    torch.testing.assert_close(q[..., rank:].double(), rotated(q_rope, rope.q_positions), atol=1e-5, rtol=1e-5)
