"""RMSNorm and rotary embedding, each rounded once."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dim, all in fp32, rounded once to `x`'s dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last `rope_dim` dims of `x` `[T, ..., D]` at `positions` `[T]`; the others pass through.

    Interleaved (GPT-J) form: dims 2i and 2i + 1 are a pair. `cos_sin` float32 `[max_len, rope_dim]`. Padding
    (position -1) is rotated at 0, since nobody reads it.
    """
    rope_dim = cos_sin.shape[-1]
    table = cos_sin[positions.clamp(min=0)]
    table = table.view(table.shape[0], *[1] * (x.ndim - 2), rope_dim)
    cos, sin = table.chunk(2, dim=-1)
    if inverse:
        sin = -sin
    even, odd = x[..., -rope_dim::2].float(), x[..., -rope_dim + 1 :: 2].float()
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-rope_dim], turned.to(x.dtype)), dim=-1)
