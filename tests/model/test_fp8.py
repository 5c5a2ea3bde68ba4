"""The block quantiser of weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv41.fp8 import dequantize_blocks, quantize_blocks, scale_bytes
from dsv41.hal.codecs import count_nan
from dsv41.hal.types import BlockScaledWeight


@given(rows=st.integers(1, 70), cols=st.integers(1, 70), exponent=st.integers(-100, 100), seed=st.integers(0, 9))
def test_blocks_round_to_half_a_step(rows: int, cols: int, exponent: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator) * 2.0**exponent
    quantized = quantize_blocks(weight)
    assert quantized.data.dtype == torch.float8_e4m3fn
    assert quantized.shape == weight.shape
    assert quantized.scale.shape == (-(-rows // 32), -(-cols // 32))
    back = dequantize_blocks(quantized)
    for row in range(0, rows, 32):
        for col in range(0, cols, 32):
            block = (slice(row, row + 32), slice(col, col + 32))
            amax = weight[block].abs().max()
            scale = torch.ldexp(torch.tensor(1.0), quantized.scale[row // 32, col // 32].int() - 127)
            assert amax <= 448 * scale < 2 * amax or amax == 0
            assert ((back[block] - weight[block]).abs() <= weight[block].abs() / 16 + scale * 2.0**-10).all()
    assert torch.equal(dequantize_blocks(quantize_blocks(back)), back)


def test_scales_are_powers_of_two_at_their_borders() -> None:
    for amax, byte in ((448.0, 127), (448.5, 128), (896.0, 128), (224.0, 126), (0.0, 127), (448.0 * 2**-20, 107)):
        assert quantize_blocks(torch.full((32, 32), amax)).scale.item() == byte


def test_zeros_and_nan() -> None:
    weight = torch.zeros(64, 64)
    weight[40, 3] = float("nan")
    quantized = quantize_blocks(weight)
    assert quantized.scale.tolist() == [[127, 127], [255, 127]]
    assert count_nan(quantized) == 32 * 32
    assert int(dequantize_blocks(quantized).isnan().sum()) == 32 * 32


@pytest.mark.parametrize("shape", [(40, 40), (64, 32), (1, 33), (96, 70)], ids=str)
def test_nan_is_counted_once_an_element(shape: tuple[int, int]) -> None:
    """By code, by scale, by both, up to the ragged edges: what the numbers themselves say."""
    generator = torch.Generator().manual_seed(1)
    for codes, scales in ((0.02, 0.0), (0.0, 0.5), (0.02, 0.5), (1.0, 1.0)):
        data = torch.where(torch.rand(shape, generator=generator) < codes, 0xFF, 0x38).to(torch.uint8)
        grid = (-(-shape[0] // 32), -(-shape[1] // 32))
        scale = torch.where(torch.rand(grid, generator=generator) < scales, 255, 127).to(torch.uint8)
        weight = BlockScaledWeight(data.view(torch.float8_e4m3fn), scale)
        assert count_nan(weight) == int(dequantize_blocks(weight).isnan().sum())


def test_dequantised_in_bf16_is_rounded_once() -> None:
    weight = quantize_blocks(torch.randn(40, 50))
    assert torch.equal(dequantize_blocks(weight, torch.bfloat16), dequantize_blocks(weight).bfloat16())


def test_every_scale_byte_is_read_back_from_fp32() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(scale_bytes(every.view(torch.float8_e8m0fnu).float()), every)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.0, -1.0, 3.0, float("inf"), 2.0**-128, -(2.0**-127)])
def test_what_is_no_power_of_two_has_no_scale_byte(value: float) -> None:
    assert scale_bytes(torch.tensor([1.0, value])) is None
