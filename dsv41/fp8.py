"""Block-scaled fp8 matrices: to and from the form in which the checkpoint stores them."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.hal.codecs import Dialect, decode_ue8m0, e4m3_max, encode_e4m3, ue8m0_of
from dsv41.hal.types import BlockScaledWeight

_DIALECT = Dialect.OCP  # of every checkpoint
_NAN_SCALE = 255


def quantize_blocks(weight: Tensor, block: tuple[int, int] = (32, 32)) -> BlockScaledWeight:
    """`weight` `[out, in]`, any float type, as fp8 e4m3 with one UE8M0 scale a block.

    A block's scale is 2 ** ceil(log2(amax / 448)), and 1 for a block of zeros; values round to nearest even. A NaN
    makes its block's scale NaN.
    """
    rows, cols = weight.shape
    grid = (-(-rows // block[0]), -(-cols // block[1]))
    padded = torch.zeros(grid[0] * block[0], grid[1] * block[1], dtype=torch.float32, device=weight.device)
    padded[:rows, :cols] = weight
    blocks = padded.view(grid[0], block[0], grid[1], block[1])
    amax = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(amax == 0, 127, ue8m0_of(amax, e4m3_max(_DIALECT))).to(torch.uint8)
    codes = encode_e4m3(blocks / decode_ue8m0(scale)[:, None, :, None], _DIALECT)
    data = codes.view_as(padded)[:rows, :cols].contiguous()
    return BlockScaledWeight(data.view(torch.float8_e4m3fn), scale, block)


def dequantize_blocks(weight: BlockScaledWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix `[out, in]` in `dtype`; exact in float32, rounded once otherwise."""
    rows, cols = weight.shape
    scale = decode_ue8m0(weight.scale).repeat_interleave(weight.block[1], dim=1)[:, :cols]
    out = torch.empty(rows, cols, dtype=dtype, device=weight.data.device)
    # One row of blocks at a time, so that neither the scales nor the fp32 values need a second matrix.
    for i, start in enumerate(range(0, rows, weight.block[0])):
        part = slice(start, start + weight.block[0])
        out[part] = weight.data[part].float() * scale[i]
    return out


def scale_bytes(values: Tensor) -> Tensor | None:
    """Float32 scales as UE8M0 bytes, or None where one is no power of two from 2 ** -127 to 2 ** 127. NaN is 255."""
    bits = values.view(torch.int32)
    byte = torch.where(values.isnan(), _NAN_SCALE, (bits >> 23).clamp(0, 254)).to(torch.uint8)
    exact = (decode_ue8m0(byte) == values) | values.isnan()
    return byte if bool(exact.all()) else None
