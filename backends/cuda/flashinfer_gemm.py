"""Products with MXFP8 weights by FlashInfer, which wants scales in tiles.

The tiled order, which cuBLAS calls 128x4: scales `[rows, columns]` padded to multiples of 128 and 4; the byte of row m
and column j is ((m // 128) * C + j // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + j % 4, of C tiles of columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.quantize import GROUP, mxfp8
from dsv41.backends.portable.weights import Matrix
from dsv41.backends.vendor import call
from dsv41.hal.types import Weight

_ROWS, _COLUMNS = 128, 4
_SMALLEST = 128
"""Of either side of a weight; below it the library's product may be NaN."""
_BLOCK = 2048
_GROUP = tl.constexpr(GROUP)


def tiled_scales(weight: Weight) -> Tensor | None:
    """The scales of `weight` `[out, in]`, one for 32 numbers of a row, in tiles: uint8, 1-D.

    None for a weight that the library has no product for: plain, of other blocks, or too small.
    """
    if isinstance(weight, Tensor) or weight.block[1] != GROUP:
        return None
    rows, width = weight.shape
    if min(rows, width) < _SMALLEST or rows % GROUP or width % GROUP:
        return None
    return tiled(weight.scale.repeat_interleave(weight.block[0], dim=0)[:rows])


def tiled(scales: Tensor) -> Tensor:
    """`scales` uint8 `[rows, columns]` in tiles, zeros where it is padded: uint8, 1-D."""
    rows, columns = scales.shape
    padded = F.pad(scales, (0, -columns % _COLUMNS, 0, -rows % _ROWS))
    tiles = padded.view(padded.shape[0] // _ROWS, 4, 32, padded.shape[1] // _COLUMNS, _COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


@triton.jit
def _quantize_tiled(x, x_stride, count, codes, scales, WIDTH: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Programs: rows, those of the padding too, x blocks of numbers."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    inside = column < tl.where(row < count, WIDTH, 0)
    numbers = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
    code, scale = mxfp8(numbers)
    tl.store(codes + row * WIDTH + column, code, inside)
    group = first // _GROUP + tl.arange(0, BLOCK // _GROUP)
    tile = (row // 128 * TILES + group // 4) * 512
    scale = tl.where(group < tl.where(row < count, WIDTH // _GROUP, 0), scale, 0)
    tl.store(scales + tile + row % 32 * 16 + row % 128 // 32 * 4 + group % 4, scale.to(tl.uint8), group < TILES * 4)


@torch.library.custom_op("dsv41::quantize_mxfp8_tiled", mutates_args=())
def quantize_tiled(x: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP8 of `x` `[N, K]`, K a multiple of 32: uint8 e4m3 codes (OCP) `[N, K]`, and its UE8M0 scales in tiles."""
    codes, scales = _empty(x)
    rows, width = x.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    launch(
        _quantize_tiled,
        (-(-rows // _ROWS) * _ROWS, triton.cdiv(width, block)),
        x=x,
        x_stride=x.stride(0),
        count=rows,
        codes=codes,
        scales=scales,
        WIDTH=width,
        TILES=triton.cdiv(width // GROUP, _COLUMNS),
        BLOCK=max(block, GROUP * _COLUMNS),
    )
    return codes, scales


@quantize_tiled.register_fake
def _empty(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, groups = -(-x.shape[0] // _ROWS) * _ROWS, -(-x.shape[1] // (GROUP * _COLUMNS)) * _COLUMNS
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(rows * groups, dtype=torch.uint8)


def product(library: Any, x: Tensor, matrix: Matrix, scales: Tensor) -> Tensor:
    """`x` bf16 `[N, in]`, rounded to MXFP8, by an fp8 matrix with `tiled_scales`: bf16 `[N, out]`."""
    out = x.new_empty(x.shape[0], matrix.rows)
    if x.shape[0]:
        codes, code_scales = quantize_tiled(x)
        call(
            library.mm_mxfp8,
            a=codes.view(torch.float8_e4m3fn),
            b=matrix.data.view(torch.float8_e4m3fn).t(),
            a_descale=code_scales,
            b_descale=scales,
            out=out,
            out_dtype=torch.bfloat16,
            backend="cutlass",
        )
    return out
