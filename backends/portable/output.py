"""The attention output on its way to the output projection: rotated back, and quantised where that wants it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.early import wait_for_launch_ahead
from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.numbers import narrow, round_to
from dsv41.backends.portable.quantize import GROUP, store_mxfp8
from dsv41.backends.portable.rotation import load_angles, rotate, turn
from dsv41.hal.types import AttnOutput

_HEADS = 4
"""Heads of one program."""
_WARPS = 4


@triton.jit
def _finish_output(
    heads,
    token_stride,
    head_stride,
    positions,
    cos_sin,
    codes,
    scales,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    GROUPS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch_ahead(EARLY)
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    head = first + tl.arange(0, BLOCK)[:, None]
    row = heads + token * token_stride + head * head_stride
    position = tl.load(positions + token)
    if QUANTIZE:  # which needs every dim; the others only those that turn
        dim = tl.arange(0, DIM)[None, :]
        x = tl.load(row + dim, head < HEADS, other=0.0).to(tl.float32)
        x = round_to(rotate(x, cos_sin, position, ROPE, INVERSE=True), heads.dtype.element_ty)
        numbers = tl.reshape(x, (BLOCK * DIM,))
        store_mxfp8(numbers, codes + token * (HEADS * DIM), scales + token * GROUPS, first * DIM, HEADS * DIM)
    else:
        dim = DIM - ROPE + tl.arange(0, ROPE)[None, :]
        cos, sin = load_angles(cos_sin, position, ROPE)
        x = turn(tl.load(row + dim, head < HEADS, other=0.0).to(tl.float32), cos, -sin)
    tl.store(row + dim, narrow(x, heads.dtype.element_ty), (head < HEADS) & (dim >= DIM - ROPE))


def empty_codes(q: Tensor, num_heads: int) -> AttnOutput:
    """Room for the output of the queries `[T, Hp, D]`, as MXFP8 of its first `num_heads` heads."""
    tokens, width = q.shape[0], num_heads * q.shape[2]
    codes, scale = (q.new_empty(tokens, n, dtype=torch.uint8) for n in (width, width // GROUP))
    return AttnOutput(codes, scale=scale, scale_layout="mxfp8_row", dtype=q.dtype)


@torch.library.custom_op("dsv41::finish_output", mutates_args=("heads",))
def finish_output(
    heads: Tensor, num_heads: int, positions: Tensor, cos_sin: Tensor, quantize: bool
) -> tuple[Tensor, Tensor]:
    """Rotate the last dims of the first `num_heads` heads of `heads` `[T, Hp, D]` back in place, at `positions`.

    Returns their MXFP8 codes uint8 `[T, num_heads * D]` and scale bytes uint8 `[T, num_heads * D / 32]`, of the
    rounded numbers, if `quantize`; otherwise both have no rows. `cos_sin` float32 `[max_len, rope]`; D and rope are
    powers of two. Padding (position -1) turns as at 0.
    """
    codes, scales = _empty(heads, num_heads, positions, cos_sin, quantize)
    launch(
        _finish_output,
        (heads.shape[0], triton.cdiv(num_heads, _HEADS)),
        num_warps=_WARPS,
        overlaps=False,  # behind attention, which may be a library's
        heads=heads,
        token_stride=heads.stride(0),
        head_stride=heads.stride(1),
        positions=positions,
        cos_sin=cos_sin,
        codes=codes,
        scales=scales,
        HEADS=num_heads,
        DIM=heads.shape[2],
        ROPE=cos_sin.shape[1],
        GROUPS=scales.shape[1],
        QUANTIZE=quantize,
        BLOCK=min(_HEADS, triton.next_power_of_2(num_heads)),
    )
    return codes, scales


@finish_output.register_fake
def _empty(heads: Tensor, num_heads: int, positions: Tensor, cos_sin: Tensor, quantize: bool) -> tuple[Tensor, Tensor]:
    width = num_heads * heads.shape[2]
    rows = heads.shape[0] if quantize else 0
    return heads.new_empty(rows, width, dtype=torch.uint8), heads.new_empty(rows, width // GROUP, dtype=torch.uint8)
