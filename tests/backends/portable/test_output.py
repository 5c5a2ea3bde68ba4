"""The attention output: rotated back in place as the reference rotates, and quantised from the rounded numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv41.backends.portable.output import finish_output
from dsv41.backends.reference.norm import rotate
from dsv41.backends.reference.quantize import mxfp8_round
from dsv41.config import DeepseekV41Config
from dsv41.hal import codecs
from dsv41.rope import cos_sin_table

from .common import DEVICE

TABLE = cos_sin_table(DeepseekV41Config(), 1, 512).to(DEVICE)
POSITIONS = [0, 1, 130, -1, 511]
BF16, FP32 = torch.bfloat16, torch.float32


def attended(tokens: int, heads: int, padded: int, dtype: torch.dtype, dim: int = 512) -> Tensor:
    """Random heads, the padded ones NaN, in every second row of a larger tensor that is otherwise NaN."""
    out = torch.full((tokens, 2, padded, dim), torch.nan, dtype=dtype, device=DEVICE)[:, 1]
    generator = torch.Generator().manual_seed(0)
    out[:, :heads] = torch.randn(tokens, heads, dim, generator=generator).to(DEVICE, dtype)
    return out


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.dtype == BF16 else torch.int32)


@pytest.mark.parametrize(("heads", "padded"), [(1, 1), (3, 16), (4, 4), (6, 8)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("quantize", [False, True])
def test_live_heads_turn_back_in_place(heads: int, padded: int, dtype: torch.dtype, quantize: bool) -> None:
    positions = torch.tensor(POSITIONS, device=DEVICE)
    out = attended(len(POSITIONS), heads, padded, dtype)
    expected = out.clone()
    expected[:, :heads] = rotate(out[:, :heads], positions, TABLE, inverse=True)
    codes, scales = finish_output(out, heads, positions, TABLE, quantize)
    # Compilers may contract a product and a sum that the reference rounds apart, so fp32 has its last bits to itself.
    if dtype == BF16:
        assert torch.equal(bits(out), bits(expected))
    else:
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert torch.equal(bits(out[..., :448]), bits(expected[..., :448]))
    if not quantize:
        assert codes.shape == (0, heads * 512)
        assert scales.shape == (0, heads * 16)
        return
    flat = out[:, :heads].flatten(1)
    groups = flat.float().unflatten(-1, (-1, 32))
    assert torch.equal(scales, codecs.ue8m0_of(groups.abs().amax(-1).clamp_min(1e-4), 448.0))
    numbers = codecs.decode_e4m3(codes, codecs.Dialect.OCP).unflatten(-1, (-1, 32))
    found = (numbers * codecs.decode_ue8m0(scales)[..., None]).flatten(1).to(dtype)
    assert torch.equal(found, mxfp8_round(flat))


def test_a_rotation_and_its_way_back_are_one_another() -> None:
    positions = torch.tensor(POSITIONS, device=DEVICE)
    x = attended(len(POSITIONS), 3, 4, FP32)
    out = x.clone()
    out[:, :3] = rotate(x[:, :3], positions, TABLE)
    finish_output(out, 3, positions, TABLE, False)
    torch.testing.assert_close(out[:, :3], x[:, :3], rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_where_it_is(value: float) -> None:
    """A dim that is not rotated changes no other; NaN makes its own group NaN, by the scale."""
    positions = torch.tensor([5, 7], device=DEVICE)
    out = attended(2, 2, 2, BF16)
    plain = out.clone()
    finish_output(plain, 2, positions, TABLE, False)
    out[1, 1, 40] = plain[1, 1, 40] = value
    _, scales = finish_output(out, 2, positions, TABLE, True)
    assert torch.equal(bits(out), bits(plain))
    groups = out.flatten(1).float().unflatten(-1, (-1, 32))
    assert torch.equal(scales, codecs.ue8m0_of(groups.abs().amax(-1).clamp_min(1e-4), 448.0))
    assert (scales == 255).sum() == (1 if value != value else 0)


def test_tiny_heads_have_the_smallest_scale() -> None:
    out = torch.full((1, 2, 512), 1e-9, dtype=BF16, device=DEVICE)
    _, scales = finish_output(out, 2, torch.zeros(1, dtype=torch.int64, device=DEVICE), TABLE, True)
    smallest = codecs.ue8m0_of(torch.tensor([1e-4]), 448.0).item()
    assert scales.unique().tolist() == [smallest]


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("tokens", [0, 2])
def test_the_op_is_well_formed(tokens: int, quantize: bool) -> None:
    positions = torch.arange(tokens, device=DEVICE)
    heads = torch.ones(tokens, 4, 512, dtype=BF16, device=DEVICE)
    torch.library.opcheck(finish_output, (heads, 3, positions, TABLE, quantize))
