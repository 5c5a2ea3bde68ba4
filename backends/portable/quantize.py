"""MXFP8 of activations: OCP e4m3 in groups of 32 with power-of-two scales, for products with fp8 weights."""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable import formats
from dsv41.backends.portable.early import wait_for_launch_ahead
from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.numbers import encode_e4m3
from dsv41.backends.portable.rows import group_scales

GROUP = 32
_GROUP = tl.constexpr(GROUP)
_UE8M0, _OCP = tl.constexpr(formats.UE8M0), tl.constexpr(formats.OCP)
_FLOOR_BITS = tl.constexpr(struct.unpack("<i", struct.pack("<f", 1e-4))[0])
_BLOCK = 2048


@triton.jit
def mxfp8(x):
    """uint8 codes `[n]` and scale bytes `[n // 32]` of float32 `x` `[n]`, n a multiple of 32."""
    grouped = tl.reshape(x, (x.shape[0] // _GROUP, _GROUP))
    exponents, scales = group_scales(grouped, _UE8M0, _OCP, _FLOOR_BITS)
    codes = encode_e4m3(tl.div_rn(grouped, scales[:, None] + tl.zeros_like(grouped)), False)
    return tl.reshape(codes, (x.shape[0],)), exponents.to(tl.uint8)


@triton.jit
def store_mxfp8(x, codes, scales, first, COUNT: tl.constexpr):
    """Write `x` float32 `[n]`, the numbers from `first` (a multiple of 32) on of a row of `COUNT`, as MXFP8.

    `codes` and `scales` point at the row's first. What is past `COUNT` must be 0 and is not written.
    """
    code, scale = mxfp8(x)
    column = first + tl.arange(0, x.shape[0])
    tl.store(codes + column, code, column < COUNT)
    group = first // _GROUP + tl.arange(0, x.shape[0] // _GROUP)
    tl.store(scales + group, scale, group < (COUNT + _GROUP - 1) // _GROUP)


@triton.jit
def _quantize_mxfp8(x, x_stride, codes, scales, COUNT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_launch_ahead(EARLY)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    numbers = tl.load(x + row * x_stride + column, column < COUNT, other=0.0).to(tl.float32)
    groups = (COUNT + _GROUP - 1) // _GROUP
    store_mxfp8(numbers, codes + row * COUNT, scales + row * groups, first, COUNT)


@torch.library.custom_op("dsv41::quantize_mxfp8", mutates_args=())
def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP8 of `x` `[N, K]` (bf16 or fp32; rows any distance apart): uint8 codes `[N, K]`, bytes `[N, ceil(K / 32)]`.

    The bytes are UE8M0 scales; the last group of a row may be shorter.
    """
    codes, scales = _empty(x)
    count = x.shape[1]
    block = min(_BLOCK, max(GROUP, triton.next_power_of_2(count)))
    launch(
        _quantize_mxfp8,
        (x.shape[0], triton.cdiv(count, block)),
        x=x,
        x_stride=x.stride(0),
        codes=codes,
        scales=scales,
        COUNT=count,
        BLOCK=block,
    )
    return codes, scales


@quantize_mxfp8.register_fake
def _empty(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    return codes, x.new_empty(x.shape[0], -(-x.shape[1] // GROUP), dtype=torch.uint8)
