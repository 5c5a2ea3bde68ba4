"""Projections by plain and by block-scaled fp8 weights, which stay fp8 in memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv41.backends.reference.quantize import mxfp8_round
from dsv41.hal.types import BlockScaledWeight, Weight

_ELEMENTS_AT_ONCE = 1 << 21
"""Weights widened at a time: small enough to stay in a CPU's cache between widening and product."""


def widen(weight: BlockScaledWeight, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Tensor:
    """Rows `start : stop` of a block-scaled weight in bf16 or fp32, exactly; `start` is a multiple of the block.

    Bits are moved and multiplied, which is three times as fast on a CPU as torch's conversion. No number on the way is
    a subnormal of bf16 or fp32, so that `torch.set_flush_denormal` changes nothing, except under the scale 2**-127,
    itself a subnormal. NaN codes read as 480: `prepare_weights` refuses them first.
    """
    block_rows, block_cols = weight.block
    data = weight.data[start:stop]
    scale = weight.scale[start // block_rows : start // block_rows + -(-data.shape[0] // block_rows)]
    # As the fields of fp16, whose subnormals are never flushed, a float8_e4m3fn byte reads as value * 2**-8; the fp16
    # number, as the fields of bf16, as value * 2**-112.
    bits = data.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    bits = bits.view(torch.float16).mul_(2.0**8).view(torch.int16)
    values = bits.bitwise_right_shift_(3).bitwise_and_(-0x7010).view(torch.bfloat16).mul_(2.0**112)
    # 2**-127 is bf16's subnormal 0x0040; every other exponent byte is bf16's own exponent field.
    powers = scale.to(torch.int16).bitwise_left_shift_(7).masked_fill_(scale == 0, 0x0040).view(torch.bfloat16)
    rows, cols = values.shape
    if rows % block_rows == 0 and cols % block_cols == 0:
        blocks = values.view(rows // block_rows, block_rows, cols // block_cols, block_cols)
        blocks.mul_(powers[:, None, :, None])
    else:
        full = powers.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(block_cols, 1)[:, :cols]
        values.mul_(full)
    return values.to(dtype)


def linear(x: Tensor, weight: Weight, *, quantize: bool = False) -> Tensor:
    """`x` `[..., in]` times `weight` `[out, in]`, summed in fp32 and rounded once to `x`'s dtype.

    `quantize` rounds `x` to MXFP8 (groups of 32) first where the weight is fp8, as the release does.
    """
    if isinstance(weight, Tensor):
        return F.linear(x, weight.to(x.dtype))
    if quantize:
        x = mxfp8_round(x)
    out_features, in_features = weight.shape
    step = max(1, _ELEMENTS_AT_ONCE // in_features // weight.block[0]) * weight.block[0]
    out = x.new_empty(*x.shape[:-1], out_features)
    for start in range(0, out_features, step):
        stop = min(start + step, out_features)
        out[..., start:stop] = F.linear(x, widen(weight, x.dtype, start, stop))
    return out


def grouped_linear(x: Tensor, weight: Weight, *, quantize: bool = False) -> Tensor:
    """`x` `[T, G, in]` times a block-diagonal `weight` `[G * out, in]`: `[T, G * out]`, group g by its own rows."""
    groups = x.shape[1]
    rows = weight.shape[0] // groups
    parts = []
    for group in range(groups):
        start, stop = group * rows, (group + 1) * rows
        if isinstance(weight, Tensor):
            parts.append(linear(x[:, group], weight[start:stop], quantize=quantize))
            continue
        # A block that two groups share has one scale: the rows before the group's own are computed and dropped.
        block = weight.block[0]
        first = start // block * block
        scale = weight.scale[first // block : -(-stop // block)]
        part = linear(x[:, group], BlockScaledWeight(weight.data[first:stop], scale, weight.block), quantize=quantize)
        parts.append(part[..., start - first :])
    return torch.cat(parts, dim=-1)
