"""fp8 of activations in groups of 128, as aiter's products by 128 x 128 blocks take them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.numbers import encode_e4m3

GROUP = 128
_GROUP = tl.constexpr(GROUP)
_LIMIT_OCP, _LIMIT_FNUZ = tl.constexpr(448.0), tl.constexpr(240.0)
_FLOOR = tl.constexpr(1e-4)
_BLOCK = 2048


@triton.jit(do_not_specialize=["x_stride", "num_rows"])
def _quantize_groups(
    x, x_stride, num_rows, codes, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FNUZ: tl.constexpr
):
    """Programs: rows x blocks of numbers."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    numbers = tl.load(x + row * x_stride + column, column < WIDTH, other=0.0).to(tl.float32)
    grouped = tl.reshape(numbers, (BLOCK // _GROUP, _GROUP))
    amax = tl.maximum(tl.max(tl.abs(grouped), axis=1), _FLOOR)
    scale = tl.div_rn(amax, tl.full(amax.shape, _LIMIT_FNUZ if FNUZ else _LIMIT_OCP, tl.float32))
    code = encode_e4m3(tl.div_rn(grouped, scale[:, None] + tl.zeros_like(grouped)), FNUZ)
    tl.store(codes + row * WIDTH + column, tl.reshape(code, (BLOCK,)), column < WIDTH)
    group = first // _GROUP + tl.arange(0, BLOCK // _GROUP)
    tl.store(scales + group.to(tl.int64) * num_rows + row, scale, group < WIDTH // _GROUP)


@torch.library.custom_op("dsv41::quantize_groups", mutates_args=())
def quantize_groups(x: Tensor, fnuz: bool) -> tuple[Tensor, Tensor]:
    """`x` `[N, K]` (bf16 or fp32; rows any distance apart), K a multiple of 128, as e4m3 codes uint8 `[N, K]` and
    float32 scales `[N, K / 128]`, column by column in memory.

    A scale brings the largest number of its group, but for 1e-4 at least, to the largest of the dialect: 240 in FNUZ
    and 448 in OCP.
    """
    codes, scales = _empty(x, fnuz)
    rows, width = x.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    launch(
        _quantize_groups,
        (rows, triton.cdiv(width, block)),
        x=x,
        x_stride=x.stride(0),
        num_rows=rows,
        codes=codes,
        scales=scales,
        WIDTH=width,
        BLOCK=block,
        FNUZ=fnuz,
    )
    return codes, scales


@quantize_groups.register_fake
def _empty(x: Tensor, fnuz: bool) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    return x.new_empty(rows, width, dtype=torch.uint8), x.new_empty(width // GROUP, rows, dtype=torch.float32).t()
