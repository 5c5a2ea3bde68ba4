"""Projections: block-scaled fp8 weights are the numbers that they stand for, in any shape and at any scale."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from dsv41.backends.reference import linear as module
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.backends.reference.linear import grouped_linear, linear, widen
from dsv41.backends.reference.quantize import mxfp8_round, round_trip
from dsv41.errors import InputError
from dsv41.fp8 import dequantize_blocks, quantize_blocks
from dsv41.hal.codecs import count_nan
from dsv41.hal.records import INDEX_MXFP4_68, NVFP4_288
from dsv41.hal.types import BlockScaledWeight, IndexerWeights, LayerState, LayerWeights
from dsv41.topology import layer_specs

from ..model.toys import TOY
from ..wording import refused


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_weight(rows: int, cols: int, seed: int = 0) -> BlockScaledWeight:
    """Codes of every kind but NaN, scales from 2**-20 to 2**7."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, cols), generator=generator, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    scale = torch.randint(107, 135, (-(-rows // 32), -(-cols // 32)), generator=generator, dtype=torch.uint8)
    return BlockScaledWeight(codes.view(torch.float8_e4m3fn), scale)


def by_definition(weight: BlockScaledWeight) -> Tensor:
    """Float64, element by element: the code's number times 2 ** (byte of its block - 127)."""
    rows, cols = weight.shape
    exponent = weight.scale.double() - 127
    full = exponent.repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :cols]
    return weight.data.double() * 2.0**full


RAGGED = [(64, 96), (1, 1), (33, 32), (32, 33), (70, 45), (31, 200)]


@pytest.mark.parametrize("shape", RAGGED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_widened_weight_is_exact(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = random_weight(*shape)
    found = widen(weight, dtype)
    assert found.dtype == dtype
    assert torch.equal(found.double(), by_definition(weight))
    assert torch.equal(found, dequantize_blocks(weight, dtype))


def test_every_code_is_widened_to_its_number() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[None].clone()
    codes[codes & 0x7F == 0x7F] = 0
    weight = BlockScaledWeight(codes.view(torch.float8_e4m3fn), torch.full((1, 8), 127, dtype=torch.uint8))
    assert torch.equal(widen(weight, torch.float32), weight.data.float())


@pytest.mark.parametrize("byte", [1, 100, 127, 246])
def test_subnormals_survive_where_torch_flushes_them(byte: int) -> None:
    codes = torch.cat((torch.arange(0, 0x7F), torch.arange(0x80, 0xFF))).to(torch.uint8)[None]
    weight = BlockScaledWeight(codes.view(torch.float8_e4m3fn), torch.full((1, 8), byte, dtype=torch.uint8))
    expected = by_definition(weight)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        found = widen(weight, torch.float32)
    finally:
        torch.set_flush_denormal(False)
    normal = expected.abs() >= 2.0**-126
    assert torch.equal(found.double()[normal], expected[normal])


@pytest.mark.parametrize("byte", [0, 1, 20, 126, 127, 128, 240, 246, 254])
def test_scale_bytes_are_exponents_down_to_0_and_up_to_254(byte: int) -> None:
    """2**-127 is a subnormal in bfloat16 and in fp32, 2**127 overflows with any number of 2 or more: infinite, not
    another number. Products below 2**-133, bfloat16's smallest, may become zero."""
    numbers = torch.tensor([[2.0**-9, 0.875, -1.0, 1.875, 448.0]]).to(torch.float8_e4m3fn)
    weight = BlockScaledWeight(numbers, torch.tensor([[byte]], dtype=torch.uint8))
    expected = numbers.double() * 2.0 ** (byte - 127)
    found = widen(weight, torch.float32).double()
    torch.testing.assert_close(found, expected.float().double(), rtol=0, atol=2.0**-133)


@pytest.mark.parametrize("shape", RAGGED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1, 1 << 21], ids=["a block at a time", "at once"])
def test_linear_is_dequantise_then_multiply(
    shape: tuple[int, int], dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ELEMENTS_AT_ONCE", at_once)
    weight, x = random_weight(*shape), random(5, shape[1]).to(dtype)
    expected = x.double() @ by_definition(weight).T
    for w in (weight, by_definition(weight).to(dtype)):
        found = linear(x, w)
        assert found.dtype == dtype
        error = (found.double() - expected).norm() / expected.norm()
        assert error < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("shape", [(3, 7, 64), (0, 64), (64,)], ids=str)
def test_linear_keeps_the_shape_in_front(shape: tuple[int, ...]) -> None:
    found = linear(random(*shape), random_weight(70, 64))
    assert found.shape == (*shape[:-1], 70)


@pytest.mark.parametrize("rows", [32, 64, 16, 48, 20])
@pytest.mark.parametrize("groups", [1, 3, 4])
def test_groups_keep_their_own_rows_and_scales(rows: int, groups: int) -> None:
    """Also where a group's rows begin or end inside a block of 32, which two groups then share."""
    weight, x = random_weight(groups * rows, 64), random(4, groups, 64)
    whole = by_definition(weight).view(groups, rows, 64)
    expected = torch.einsum("tgi,goi->tgo", x.double(), whole).flatten(1)
    for w in (weight, by_definition(weight).float()):
        found = grouped_linear(x, w).double()
        assert (found - expected).norm() / expected.norm() < 1e-6


def test_the_block_of_a_weight_is_its_own() -> None:
    """Another grid is read as it says, not as 32 x 32."""
    weight = quantize_blocks(random(64, 64) * torch.logspace(-3, 3, 64)[:, None], (16, 64))
    assert torch.equal(widen(weight, torch.float32), dequantize_blocks(weight))


# NaN


@pytest.mark.parametrize("name", ["wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b"])
@pytest.mark.parametrize("where", ["code", "negative code", "scale"])
def test_nan_weights_are_refused_before_the_first_step(name: str, where: str) -> None:
    """`widen` would read NaN codes as numbers, so no layer is made of them."""
    weight = random_weight(32, 64)
    if where == "scale":
        weight.scale[0, 1] = 255
    else:
        weight.data.view(torch.uint8)[3, 5] = 0x7F if where == "code" else 0xFF
    assert count_nan(weight) == (32 * 32 if where == "scale" else 1)
    fine = random_weight(32, 64)
    values = {f.name: fine for f in fields(LayerWeights)}
    indexer = IndexerWeights(wq_b=fine, weights_proj=random(2, 64))
    weights = LayerWeights(**{**values, "compressor": None, "indexer": indexer})
    backend, spec = ReferenceBackend(), layer_specs(TOY)[1]
    assert backend.prepare_weights(LayerState(spec, weights, torch.zeros(1, 64))) is None
    if name == "indexer.wq_b":
        weights = replace(weights, indexer=replace(indexer, wq_b=weight))
    else:
        weights = replace(weights, **{name: weight})
    with refused(InputError, f"layers.1.attn.{name}.weight", "NaN"):
        backend.prepare_weights(LayerState(spec, weights, torch.zeros(1, 64)))


# Rounding of what is multiplied


def mxfp8_by_hand(row: list[float]) -> list[float]:
    """One group: the scale from amax, codes to nearest even, written out for numbers that are no codes."""
    amax = max(1e-4, *(abs(v) for v in row))
    exponent = -200
    while 448 * 2.0**exponent < amax:
        exponent += 1
    codes = (torch.tensor(row, dtype=torch.float64) / 2.0**exponent).to(torch.float8_e4m3fn)
    return (codes.double() * 2.0**exponent).tolist()


@pytest.mark.parametrize("dims", [32, 64, 128, 40, 5])
def test_activations_are_rounded_in_groups_of_32(dims: int) -> None:
    x = random(5, dims) * 2.0 ** (torch.arange(dims) // 32 * 5)
    x[3] *= 1e-9  # so far below the floor of amax that its codes are subnormal
    x[4] = 0
    found = mxfp8_round(x)
    assert found.shape == x.shape
    for row, rounded in zip(x.tolist(), found.tolist(), strict=True):
        for start in range(0, dims, 32):
            assert rounded[start : start + 32] == mxfp8_by_hand(row[start : start + 32])


@pytest.mark.parametrize("in_features", [64, 40])
def test_quantised_activations_change_fp8_projections_alone(in_features: int) -> None:
    x, weight = random(4, in_features), random_weight(33, in_features)
    rounded = linear(mxfp8_round(x), weight)
    assert torch.equal(linear(x, weight, quantize=True), rounded)
    assert not torch.equal(linear(x, weight), rounded)
    plain = random(8, in_features, seed=1)
    assert torch.equal(linear(x, plain, quantize=True), linear(x, plain))
    groups = torch.stack((x, x * 3), dim=1)
    grouped = random_weight(64, in_features)
    assert torch.equal(grouped_linear(groups, grouped, quantize=True), grouped_linear(mxfp8_round(groups), grouped))


def test_a_round_trip_keeps_shape_and_type() -> None:
    x = random(2, 3, 128).bfloat16()
    found = round_trip(INDEX_MXFP4_68, x)
    assert found.shape == x.shape
    assert found.dtype == x.dtype
    assert torch.equal(round_trip(INDEX_MXFP4_68, found), found)
    assert 0 < (found - x).norm() / x.norm() < 0.2
    assert torch.equal(round_trip(NVFP4_288, torch.zeros(0, 512)), torch.zeros(0, 512))
