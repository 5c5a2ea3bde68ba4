"""The order of the fused kernel: a permutation, the library's own, exact in scales, and never applied twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv41.backends.cuda.mega_weights import FusedMatrix, fused_output_columns, fused_query_rows
from dsv41.backends.portable.gemm import grouped_linear, linear
from dsv41.backends.portable.weights import Matrix
from dsv41.errors import BackendError
from dsv41.fp8 import dequantize_blocks, quantize_blocks
from dsv41.hal.types import BlockScaledWeight

from ...model.portables import DEVICE
from . import emulated_mega

DIM = 512
BLOCKS = [(32, 32), (128, 128), (1, 32), (48, 64), (8, 16)]


def query_places(heads: int) -> Tensor:
    """int64 `[heads, DIM]`: where the kernel looks for each dim of each head."""
    return torch.tensor([[(d // 16) * (heads * 16) + h * 16 + d % 16 for d in range(DIM)] for h in range(heads)])


OUTPUT_PLACES = torch.tensor([[((d // 32) * 8 + h) * 32 + d % 32 for d in range(DIM)] for h in range(8)])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numbers(matrix: FusedMatrix) -> Tensor:
    """float32, by the block that the matrix declares."""
    if matrix.scale is None:
        return matrix.data.float()
    return dequantize_blocks(BlockScaledWeight(matrix.data.view(torch.float8_e4m3fn), matrix.scale, matrix.block))


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_query_rows_are_where_the_kernel_looks(heads: int) -> None:
    row = torch.arange(heads * DIM)
    fused = fused_query_rows(row[:, None], heads).data[:, 0]
    assert torch.equal(fused[query_places(heads)].flatten(), row)
    assert torch.equal(fused.sort().values, row)  # every row once


def test_output_columns_are_where_the_kernel_puts_them() -> None:
    column = torch.arange(8 * DIM)
    fused = fused_output_columns(column[None].expand(3, -1)).data
    assert torch.equal(fused[1][OUTPUT_PLACES].flatten(), column)
    assert torch.equal(fused[2].sort().values, column)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_scales_move_with_what_they_scale(block: tuple[int, int]) -> None:
    """Rows and columns leave their blocks, and no number changes. The last block of a dim may be a part of one."""
    wide = torch.exp2(random(8 * DIM, 96).mul(4).round()) * random(8 * DIM, 96, seed=1)
    wq_b = quantize_blocks(wide, block)
    fused = fused_query_rows(wq_b, 8)
    assert torch.equal(numbers(fused)[query_places(8).flatten()], dequantize_blocks(wq_b))
    wo_a = quantize_blocks(wide.t().contiguous(), block)
    fused = fused_output_columns(wo_a)
    assert torch.equal(numbers(fused)[:, OUTPUT_PLACES.flatten()], dequantize_blocks(wo_a))
    assert fused.block == (block[0], min(block[1], 32))


def test_the_released_blocks_stay_as_coarse_as_the_runs_are() -> None:
    """Runs of 16 rows share a scale, and blocks of `wo_a` are moved whole."""
    weight = quantize_blocks(random(8 * DIM, 64))
    assert fused_query_rows(weight, 8).block == (16, 32)
    weight = quantize_blocks(random(64, 8 * DIM))
    fused = fused_output_columns(weight)
    assert (fused.block, fused.scale.shape) == ((32, 32), weight.scale.shape)


@pytest.mark.parametrize("heads", [8, 64])
def test_the_librarys_helpers_do_the_same(heads: int) -> None:
    """Which take and give a scale for each row and 32 columns, four in a word."""

    def by_row(matrix: Matrix | BlockScaledWeight) -> Tensor:
        scale = matrix.scale
        assert scale is not None
        assert matrix.block[1] == 32
        return scale.repeat_interleave(matrix.block[0], 0)[: matrix.data.shape[0]].contiguous().view(torch.int32)

    wq_b = quantize_blocks(random(heads * DIM, 128) * torch.exp2(random(heads * DIM, 1)))
    data, words = emulated_mega.permute_q_b_proj((wq_b.data, by_row(wq_b)), heads, DIM)
    mine = fused_query_rows(wq_b, heads)
    assert torch.equal(mine.data, data.view(torch.uint8))
    assert torch.equal(by_row(mine), words)

    wo_a = quantize_blocks(random(64, 8 * DIM) * torch.exp2(random(1, 8 * DIM)))
    data, words = emulated_mega.permute_wv_proj((wo_a.data, by_row(wo_a)), 8, DIM)
    mine = fused_output_columns(wo_a)
    assert torch.equal(mine.data, data.view(torch.uint8))
    assert torch.equal(by_row(mine), words)


# Projections


def small(*shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers, whose products and sums are exact."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def on_device(matrix: FusedMatrix) -> tuple[Tensor, Tensor | None]:
    return matrix.data.to(DEVICE), None if matrix.scale is None else matrix.scale.to(DEVICE)


@pytest.mark.parametrize("coded", [True, False])
def test_a_permuted_projection_is_the_plain_one_in_another_order(coded: bool) -> None:
    wide, x = small(8 * DIM, 64), small(3, 64, seed=1)
    fused = fused_query_rows(quantize_blocks(wide) if coded else wide, 8)
    found = torch.empty(3, 8 * DIM, device=DEVICE)
    linear(x.to(DEVICE), None, *on_device(fused), *fused.block, found)
    assert torch.equal(found.cpu()[:, query_places(8).flatten()], x @ wide.T)


@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("tokens", [3, 70])
def test_an_output_in_the_kernels_order_projects_to_what_the_plain_one_does(tokens: int, coded: bool) -> None:
    """Codes with scales, over two groups; 70 tokens are widened first."""
    wide, codes = small(2 * 16, 8 * DIM), small(tokens, 2, 8 * DIM, seed=1).to(torch.float8_e4m3fn)
    powers = torch.randint(-2, 3, (tokens, 2, 8 * DIM // 32), generator=torch.Generator().manual_seed(2))
    plain = codes.float() * torch.exp2(powers.float()).repeat_interleave(32, 2)
    expected = torch.einsum("tgk,gnk->tgn", plain, wide.view(2, 16, -1)).flatten(1)

    fused = fused_output_columns(quantize_blocks(wide) if coded else wide)
    place = OUTPUT_PLACES.flatten()
    data, scale = torch.empty(codes.shape, dtype=torch.uint8), torch.empty(powers.shape, dtype=torch.uint8)
    data[:, :, place] = codes.view(torch.uint8)
    scale[:, :, place[::32] // 32] = (powers + 127).to(torch.uint8)
    found = torch.empty(tokens, 2 * 16, device=DEVICE)
    grouped_linear(data.to(DEVICE), scale.to(DEVICE), *on_device(fused), *fused.block, found)
    assert torch.equal(found.cpu(), expected)


def test_a_second_time_is_refused() -> None:
    for weight in (quantize_blocks(random(8 * DIM, 32)), random(8 * DIM, 32)):
        fused = fused_query_rows(weight, 8)
        with pytest.raises(BackendError, match=r"FusedMatrix \[4096, 32\] .*expected a weight in checkpoint layout"):
            fused_query_rows(fused, 8)  # type: ignore[arg-type]
        with pytest.raises(BackendError, match="expected a weight in checkpoint layout"):
            fused_output_columns(replace(fused, data=fused.data.t()))  # type: ignore[arg-type]


def test_the_checkpoint_is_left_as_it_is() -> None:
    weight = quantize_blocks(random(8 * DIM, 32))
    before = weight.data.view(torch.uint8).clone(), weight.scale.clone()
    fused = fused_query_rows(weight, 8)
    fused.data.zero_()
    assert fused.scale is not None
    fused.scale.zero_()
    assert torch.equal(weight.data.view(torch.uint8), before[0])
    assert torch.equal(weight.scale, before[1])
