"""Norms and MXFP8 against the reference's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv41.backends.portable.norm import rms_norm
from dsv41.backends.portable.quantize import quantize_mxfp8
from dsv41.backends.reference import norm as reference
from dsv41.backends.reference.quantize import mxfp8_round
from dsv41.hal.codecs import Dialect, decode_e4m3, decode_ue8m0

from .common import DEVICE, close, covering, noise

BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-20
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def decoded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    factor = decode_ue8m0(scales).repeat_interleave(32, 1)[:, : codes.shape[1]]
    return (decode_e4m3(codes, Dialect.OCP) * factor).to(dtype)


@pytest.mark.parametrize(("dim", "dtype", "weight"), covering((8, 96, 128, 512), (BF16, FP32), (BF16, FP32)))
def test_a_norm_is_the_references(dim: int, dtype: torch.dtype, weight: torch.dtype) -> None:
    """Rows of a wider tensor, of sizes far apart; widths that are no power of two."""
    x = (noise(4, dim + 8) * torch.tensor([1e-12, 1.0, 50.0, 1e15], device=DEVICE)[:, None]).to(dtype)[:, 8:]
    w = noise(dim, seed=1).to(weight)
    close(rms_norm(x, w, EPS), reference.rms_norm(x, w, EPS))


def test_rows_of_a_mean_square_of_one_are_not_touched() -> None:
    x = torch.where(noise(3, 512) < 0, -1.0, 1.0)
    weight = torch.exp2(torch.arange(512, device=DEVICE) % 5 - 2.0)
    assert torch.equal(rms_norm(x, weight, EPS), x * weight)


def test_a_norm_has_its_epsilon_inside_the_root() -> None:
    x, weight = noise(2, 64) * 1e-3, noise(64, seed=1)
    x[1] = 0.0
    for eps in (1e-3, EPS):
        close(rms_norm(x, weight, eps), reference.rms_norm(x, weight, eps))


def test_nan_stays_in_its_row() -> None:
    x = noise(3, 64)
    x[1, 5] = torch.nan
    found = rms_norm(x, noise(64, seed=1), EPS)
    assert found[1].isnan().all()
    assert not found[[0, 2]].isnan().any()


@pytest.mark.parametrize(("columns", "dtype"), covering((1, 31, 32, 100, 2048, 2080), (BF16, FP32)))
def test_mxfp8_is_the_references(columns: int, dtype: torch.dtype) -> None:
    """Groups far apart in size, zeros, saturation, a short last group, NaN and what follows it."""
    x = (noise(5, columns) * torch.logspace(-8, 6, columns, device=DEVICE)).to(dtype)
    x[1] = 0.0
    x[2, -1] = torch.nan
    x[3, 0] = torch.inf
    x[4, :: max(1, columns // 7)] = 3e38
    codes, scales = quantize_mxfp8(x)
    assert codes.shape == x.shape
    assert scales.shape == (5, -(-columns // 32))
    torch.testing.assert_close(decoded(codes, scales, dtype), mxfp8_round(x), rtol=0, atol=0, equal_nan=True)


def test_rows_of_a_wider_tensor_are_quantised() -> None:
    x = noise(3, 96)
    codes, scales = quantize_mxfp8(x[:, 32:])
    whole_codes, whole_scales = quantize_mxfp8(x)
    assert torch.equal(codes, whole_codes[:, 32:])
    assert torch.equal(scales, whole_scales[:, 1:])
    assert quantize_mxfp8(x[:0])[1].shape == (0, 3)


def test_the_ops_keep_the_rules_of_custom_ops() -> None:
    x, weight = noise(2, 96), noise(64, seed=1)
    torch.library.opcheck(rms_norm, (x[:, :64], weight, EPS))
    torch.library.opcheck(quantize_mxfp8, (x,))
