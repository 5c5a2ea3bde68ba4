"""Rotate, quantise and insert: what becomes of compressed rows and keys on their way into a cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.caches import kernel_arguments
from dsv41.backends.portable.early import wait_for_launch_ahead
from dsv41.backends.portable.formats import RowFormat
from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.norm import load_normed
from dsv41.backends.portable.rotation import rotated_row
from dsv41.backends.portable.rows import store_row

_WARPS = 4


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
    EARLY: tl.constexpr,
):
    wait_for_launch_ahead(EARLY)
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
