"""Queries in fp8 with one scale, for attention over plain fp8 rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.numbers import encode_e4m3

_BLOCK = 4096
_LARGEST = tl.constexpr(448.0)


@triton.jit
def _quantize_query(
    q, q_stride, token_request, scale, codes, clamped, LIVE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Programs: tokens x blocks of numbers."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(q + token * q_stride + place, place < LIVE, other=0.0).to(tl.float32)
    x = tl.div_rn(x, tl.load(scale) + tl.zeros_like(x))
    tl.store(codes + token * WIDTH + place, encode_e4m3(x, False), place < WIDTH)
    over = tl.sum((tl.abs(x) > _LARGEST).to(tl.int64))
    tl.atomic_add(clamped, over, mask=(over > 0) & (tl.load(token_request + token) >= 0))


@torch.library.custom_op("dsv41::quantize_query", mutates_args=("clamped",))
def quantize_query(q: Tensor, num_heads: int, token_request: Tensor, scale: Tensor, clamped: Tensor) -> Tensor:
    """`q` `[T, Hp, D]` (dense in a token) divided by `scale` float32 `[1]`, as e4m3 (OCP): float8 `[T, Hp, D]`.

    Heads from `num_heads` on become zeros. Numbers beyond 448 become 448, and `clamped` int64 `[1]` grows by how many
    there were; tokens whose `token_request` int64 `[T]` is -1 do not count. NaN stays NaN.
    """
    codes = torch.empty(q.shape, dtype=torch.uint8, device=q.device)
    width = q.shape[1] * q.shape[2]
    launch(
        _quantize_query,
        (q.shape[0], triton.cdiv(width, _BLOCK)),
        q=q,
        q_stride=q.stride(0),
        token_request=token_request,
        scale=scale,
        codes=codes,
        clamped=clamped,
        LIVE=num_heads * q.shape[2],
        WIDTH=width,
        BLOCK=_BLOCK,
    )
    return codes.view(torch.float8_e4m3fn)


@quantize_query.register_fake
def _(q: Tensor, num_heads: int, token_request: Tensor, scale: Tensor, clamped: Tensor) -> Tensor:
    return q.new_empty(q.shape, dtype=torch.float8_e4m3fn)
