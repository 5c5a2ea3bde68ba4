"""Rotate, quantise and insert: what becomes of latents and keys on their way into a cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.caches import kernel_arguments
from dsv41.backends.portable.formats import RowFormat
from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.norm import load_normed
from dsv41.backends.portable.numbers import narrow, round_to
from dsv41.backends.portable.rotation import load_angles, rotate, turn
from dsv41.backends.portable.rows import store_row

_HEADS_AT_ONCE = 16
_WARPS = 4


@triton.jit
def rotated_row(x, cos_sin, position, DTYPE: tl.constexpr, ROPE: tl.constexpr):
    """Float32 `x` `[D]` rotated at `position` and rounded to `DTYPE`, in float32."""
    row = rotate(tl.reshape(x, (1, x.shape[0])), cos_sin, position, ROPE)
    return round_to(tl.reshape(row, (x.shape[0],)), DTYPE)


@triton.jit
def _rotate_heads(q, head_stride, cos_sin, position, first, HEADS, PADDED, DIM, ROPE, BLOCK):
    """Rotate the heads `first` to `first + BLOCK` of the token at `q` in place, and zero those that are padding."""
    head = first + tl.arange(0, BLOCK)[:, None]
    at = q + head.to(tl.int64) * head_stride
    tail = at + DIM - ROPE + tl.arange(0, ROPE)[None, :]
    cos, sin = load_angles(cos_sin, position, ROPE)
    x = tl.load(tail, head < HEADS, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all are loaded before any is overwritten
    tl.store(tail, narrow(turn(x, cos, sin), q.dtype.element_ty), head < HEADS)
    if PADDED > HEADS and first + BLOCK > HEADS:
        zeros = tl.zeros((BLOCK, DIM), q.dtype.element_ty)
        tl.store(at + tl.arange(0, DIM)[None, :], zeros, (head >= HEADS) & (head < PADDED))


@triton.jit
def _rotate_insert(
    q,
    q_stride,
    head_stride,
    kv,
    kv_stride,
    positions,
    cos_sin,
    slots,
    window,
    window_pool,
    window_scale,
    window_stride,
    window_pool_stride,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    F: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(positions + token)
    if part == 0:
        where = kv + token * kv_stride + tl.arange(0, DIM)
        row = tl.load(where).to(tl.float32)
        tl.debug_barrier()
        row = rotated_row(row, cos_sin, position, kv.dtype.element_ty, ROPE)
        tl.store(where, narrow(row, kv.dtype.element_ty))
        slot = tl.load(slots + token)
        if slot >= 0:
            store_row((window, window_pool, window_scale, window_stride, window_pool_stride), slot, row, F)
    else:
        first = (part - 1) * BLOCK
        _rotate_heads(q + token * q_stride, head_stride, cos_sin, position, first, HEADS, PADDED, DIM, ROPE, BLOCK)


@torch.library.custom_op("dsv41::rotate_insert", mutates_args=("q", "kv", "data", "pool"))
def rotate_insert(
    q: Tensor,
    num_heads: int,
    kv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    data: Tensor,
    pool: Tensor | None,
    tensor_scale: Tensor | None,
    format: list[int],
) -> None:
    """Rotate queries and latents in place, and write the latents into the window cache: one launch.

    The last dims of the first `num_heads` heads of `q` `[T, Hp, D]` and those of `kv` `[T, D]` are rotated at
    `positions` `[T]`, the heads behind become zeros; Hp may be 0. The rotated `kv` goes into `slots` `[T]`, -1 =
    nowhere. `cos_sin` float32 `[max_len, rope_dim]`.
    """
    tokens, padded, dim = q.shape
    block = min(_HEADS_AT_ONCE, triton.next_power_of_2(max(1, padded)))
    launch(
        _rotate_insert,
        (tokens, 1 + triton.cdiv(padded, block)),
        num_warps=_WARPS,
        q=q,
        q_stride=q.stride(0),
        head_stride=q.stride(1),
        kv=kv,
        kv_stride=kv.stride(0),
        positions=positions,
        cos_sin=cos_sin,
        slots=slots,
        **kernel_arguments("window", data, pool, tensor_scale),
        HEADS=num_heads,
        PADDED=padded,
        DIM=dim,
        ROPE=cos_sin.shape[1],
        BLOCK=block,
        F=RowFormat.from_numbers(format),
    )


@triton.jit
def _insert_rows(
    x,
    x_stride,
    norm_weight,
    eps,
    positions,
    cos_sin,
    slots,
    cache,
    cache_pool,
    cache_scale,
    cache_stride,
    cache_pool_stride,
    RATIO: tl.constexpr,
    ROPE: tl.constexpr,
    F: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        where = x + token * x_stride
        if norm_weight is None:
            row = tl.load(where + tl.arange(0, F.dim)).to(tl.float32)
        else:
            row = load_normed(where, norm_weight, eps, F.dim, F.dim)
        position = tl.maximum(tl.load(positions + token), 0) // RATIO * RATIO
        row = rotated_row(row, cos_sin, position, x.dtype.element_ty, ROPE)
        store_row((cache, cache_pool, cache_scale, cache_stride, cache_pool_stride), slot, row, F)


@torch.library.custom_op("dsv41::insert_rows", mutates_args=("data", "pool"))
def insert_rows(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    ratio: int,
    cos_sin: Tensor,
    slots: Tensor,
    data: Tensor,
    pool: Tensor | None,
    tensor_scale: Tensor | None,
    format: list[int],
) -> None:
    """Rotate the rows of `x` `[T, D]` and write them into `slots` `[T]` of a cache; `x` stays as it is.

    Each row is rotated at the position of its group's first token, `positions // ratio * ratio`, after an RMSNorm where
    `norm_weight` `[D]` is given. Both round to `x`'s dtype. Rows of slot -1 are not even read.
    """
    launch(
        _insert_rows,
        (x.shape[0],),
        num_warps=_WARPS,
        x=x,
        x_stride=x.stride(0),
        norm_weight=norm_weight,
        eps=eps,
        positions=positions,
        cos_sin=cos_sin,
        slots=slots,
        **kernel_arguments("cache", data, pool, tensor_scale),
        RATIO=ratio,
        ROPE=cos_sin.shape[1],
        F=RowFormat.from_numbers(format),
    )
