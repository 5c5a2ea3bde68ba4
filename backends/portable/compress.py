"""The compressor: pools the tokens of a group into one latent row, across step borders, and writes it to its cache."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.caches import kernel_arguments
from dsv41.backends.portable.early import wait_for_launch_ahead
from dsv41.backends.portable.formats import RowFormat
from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.norm import normed
from dsv41.backends.portable.numbers import narrow, round_to
from dsv41.backends.portable.rotation import rotated_row
from dsv41.backends.portable.rows import store_row

_WARPS = 4


@triton.jit
def _keep_row(raw, state, state_stride, ring_stride, ring, token, request, position, state_slots, seq_lens, DIM):
    """Copy the raw row of a token into the ring of its request, unless a later one of the step takes its place."""
    held = tl.load(seq_lens + request, request >= 0, other=0)
    if request >= 0 and position >= held - ring:
        row = state + tl.load(state_slots + request) * state_stride + position % ring * ring_stride
        both = tl.arange(0, 2 * DIM)
        tl.store(row + both, tl.load(raw + token * 2 * DIM + both))


@triton.jit
def _pool(
    raw,
    state,
    state_stride,
    ring_stride,
    ring,
    token_request,
    positions,
    state_slots,
    query_start_loc,
    seq_lens,
    norm_weight,
    latent,
    eps,
    cos_sin,
    slots,
    cache,
    cache_pool,
    cache_scale,
    cache_stride,
    cache_pool_stride,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    F: tl.constexpr,
    KEEP: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch_ahead(EARLY)
    token = tl.program_id(0).to(tl.int64)
    request, position = tl.load(token_request + token), tl.load(positions + token)
    dim = tl.arange(0, DIM)
    out = tl.zeros((DIM,), tl.float32)
    if request >= 0 and (position + 1) % RATIO == 0:
        first = tl.load(query_start_loc + request)
        slot = tl.load(state_slots + request)
        values = tl.load(raw + token * 2 * DIM + dim)
        top = tl.load(raw + token * 2 * DIM + DIM + dim)
        total = tl.full((DIM,), 1.0, tl.float32)
        for back in tl.static_range(1, RATIO):
            # Padding may stand before a request's first token, so the row before is not always the token before.
            earlier = token - back
            in_step = earlier >= first
            in_step = in_step & (tl.load(positions + earlier, in_step, other=-1) == position - back)
            if in_step:
                before = raw + earlier * 2 * DIM
                value, gate = tl.load(before + dim), tl.load(before + DIM + dim)
            else:
                held = state + slot * state_stride + (position - back) % ring * ring_stride
                value, gate = tl.load(held + dim), tl.load(held + DIM + dim)
            most = tl.maximum(top, gate)
            kept, added = tl.exp(top - most), tl.exp(gate - most)
            values = values * kept + value * added
            total = total * kept + added
            top = most
        pooled = round_to(tl.div_rn(values, total), latent.dtype.element_ty)
        out = normed(pooled, tl.load(norm_weight + dim).to(tl.float32), eps, DIM, latent.dtype.element_ty)
        slot = tl.load(slots + token)
        if slot >= 0:
            row = rotated_row(out, cos_sin, position // RATIO * RATIO, latent.dtype.element_ty, ROPE)
            store_row((cache, cache_pool, cache_scale, cache_stride, cache_pool_stride), slot, row, F)
    tl.store(latent + token * DIM + dim, narrow(out, latent.dtype.element_ty))
    if KEEP:
        _keep_row(raw, state, state_stride, ring_stride, ring, token, request, position, state_slots, seq_lens, DIM)


@triton.jit
def _keep(
    raw,
    state,
    state_stride,
    ring_stride,
    ring,
    token_request,
    positions,
    state_slots,
    seq_lens,
    DIM: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch_ahead(EARLY)
    token = tl.program_id(0).to(tl.int64)
    request, position = tl.load(token_request + token), tl.load(positions + token)
    _keep_row(raw, state, state_stride, ring_stride, ring, token, request, position, state_slots, seq_lens, DIM)


@torch.library.custom_op("dsv41::compress_rows", mutates_args=("state", "data", "pool"))
def compress_rows(
    raw: Tensor,
    state: Tensor,
    token_request: Tensor,
    positions: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    norm_weight: Tensor,
    eps: float,
    ratio: int,
    dtype: torch.dtype,
    cos_sin: Tensor,
    slots: Tensor,
    data: Tensor,
    pool: Tensor | None,
    tensor_scale: Tensor | None,
    format: list[int],
) -> Tensor:
    """The latent `[T, D]` of the group that each token closes, normed and not rotated, in `dtype`; zeros elsewhere.

    `raw` float32 `[T, 2, D]`, dense: each token's value and gate row. `state` float32 `[slots, ring, 2, D]` holds those
    of earlier tokens and takes those of the last `ring` tokens of each request. The rest is as in `ForwardBatch` and
    `StepPlan`: int64 `token_request` `[T]` (-1 = padding), `positions` `[T]` and `state_slots` `[R]`, int32
    `query_start_loc` `[R + 1]` and `seq_lens` `[R]`. A group's values are averaged with the softmax of its gates per
    channel; the average is rounded to `dtype` before its RMSNorm.

    Rotated at the position of its group's first token, by `cos_sin` float32 `[max_len, rope_dim]`, each goes into
    `slots` int64 `[T]` of a cache, -1 = nowhere.
    """
    latent = raw.new_empty(raw.shape[0], raw.shape[2], dtype=dtype)
    # Of several tokens, one may overwrite a row of the ring that another still needs: then that is a launch of its own.
    alone = raw.shape[0] == 1
    shared: dict[str, Any] = {
        "raw": raw,
        "state": state,
        "state_stride": state.stride(0),
        "ring_stride": state.stride(1),
        "ring": state.shape[1],
        "token_request": token_request,
        "positions": positions,
        "state_slots": state_slots,
        "seq_lens": seq_lens,
        "DIM": raw.shape[2],
    }
    launch(
        _pool,
        (raw.shape[0],),
        num_warps=_WARPS,
        **shared,
        query_start_loc=query_start_loc,
        norm_weight=norm_weight,
        latent=latent,
        eps=eps,
        cos_sin=cos_sin,
        slots=slots,
        **kernel_arguments("cache", data, pool, tensor_scale),
        RATIO=ratio,
        ROPE=cos_sin.shape[1],
        F=RowFormat.from_numbers(format),
        KEEP=alone,
    )
    if not alone:
        launch(_keep, (raw.shape[0],), num_warps=_WARPS, **shared)
    return latent


@compress_rows.register_fake
def _(
    raw: Tensor,
    state: Tensor,
    token_request: Tensor,
    positions: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    norm_weight: Tensor,
    eps: float,
    ratio: int,
    dtype: torch.dtype,
    cos_sin: Tensor,
    slots: Tensor,
    data: Tensor,
    pool: Tensor | None,
    tensor_scale: Tensor | None,
    format: list[int],
) -> Tensor:
    return raw.new_empty(raw.shape[0], raw.shape[2], dtype=dtype)
