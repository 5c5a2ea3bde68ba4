"""What becomes of the product of `wq_a` and `wkv`: both parts are normed, and the latents go into the window cache."""

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
from dsv41.backends.portable.numbers import narrow
from dsv41.backends.portable.quantize import GROUP, store_mxfp8
from dsv41.backends.portable.rotation import load_angles, rotated_row, turn
from dsv41.backends.portable.rows import store_row

_HEADS_AT_ONCE = 16
_WARPS = 4


@triton.jit
def _norm_inputs(
    fused,
    fused_stride,
    q_weight,
    kv_weight,
    eps,
    positions,
    cos_sin,
    slots,
    window,
    window_pool,
    window_scale,
    window_stride,
    window_pool_stride,
    qr,
    qr_codes,
    qr_scales,
    kv,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    GROUPS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    F: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch_ahead(EARLY)
    token = tl.program_id(0).to(tl.int64)
    row = fused + token * fused_stride
    if tl.program_id(1) == 0:
        query = load_normed(row, q_weight, eps, RANK, RANK_BLOCK)
        column = tl.arange(0, RANK_BLOCK)
        tl.store(qr + token * RANK + column, narrow(query, qr.dtype.element_ty), column < RANK)
        if QUANTIZE:
            store_mxfp8(query, qr_codes + token * RANK, qr_scales + token * GROUPS, 0, RANK)
    else:
        latent = load_normed(row + RANK, kv_weight, eps, DIM, DIM)
        latent = rotated_row(latent, cos_sin, tl.load(positions + token), kv.dtype.element_ty, ROPE)
        tl.store(kv + token * DIM + tl.arange(0, DIM), narrow(latent, kv.dtype.element_ty))
        slot = tl.load(slots + token)
        if slot >= 0:
            store_row((window, window_pool, window_scale, window_stride, window_pool_stride), slot, latent, F)


@torch.library.custom_op("dsv41::norm_inputs", mutates_args=("data", "pool"))
def norm_inputs(
    fused: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    eps: float,
    quantize: bool,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    data: Tensor,
    pool: Tensor | None,
    tensor_scale: Tensor | None,
    format: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split `fused` `[T, Rq + D]`, the product of `wq_a` and `wkv`, norm both parts, rotate the latents and write them
    into the window cache: one launch.

    Returns `qr` `[T, Rq]`, its MXFP8 codes uint8 `[T, Rq]` and scale bytes uint8 `[T, ceil(Rq / 32)]` (empty unless
    `quantize`), and the latents `[T, D]`, rotated at `positions` `[T]`; norm and rotation round to `fused`'s dtype. The
    latents go into `slots` `[T]`, -1 = nowhere. `cos_sin` is float32 `[max_len, rope_dim]`, D a power of two.
    """
    qr, codes, scales, kv = _empty_inputs(fused, q_weight, kv_weight, quantize)
    rank, dim = q_weight.shape[0], kv_weight.shape[0]
    launch(
        _norm_inputs,
        (fused.shape[0], 2),
        num_warps=_WARPS,
        fused=fused,
        fused_stride=fused.stride(0),
        q_weight=q_weight,
        kv_weight=kv_weight,
        eps=eps,
        positions=positions,
        cos_sin=cos_sin,
        slots=slots,
        **kernel_arguments("window", data, pool, tensor_scale),
        qr=qr,
        qr_codes=codes,
        qr_scales=scales,
        kv=kv,
        RANK=rank,
        RANK_BLOCK=max(GROUP, triton.next_power_of_2(rank)),
        DIM=dim,
        ROPE=cos_sin.shape[1],
        GROUPS=triton.cdiv(rank, GROUP),
        QUANTIZE=quantize,
        F=RowFormat.from_numbers(format),
    )
    return qr, codes, scales, kv


@norm_inputs.register_fake
def _(
    fused: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    eps: float,
    quantize: bool,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    data: Tensor,
    pool: Tensor | None,
    tensor_scale: Tensor | None,
    format: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_inputs(fused, q_weight, kv_weight, quantize)


def _empty_inputs(
    fused: Tensor, q_weight: Tensor, kv_weight: Tensor, quantize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, rank, dim = fused.shape[0], q_weight.shape[0], kv_weight.shape[0]
    coded = (tokens, rank) if quantize else (0, rank)
    scaled = (coded[0], -(-rank // GROUP))
    codes, scales = (fused.new_empty(shape, dtype=torch.uint8) for shape in (coded, scaled))
    return fused.new_empty(tokens, rank), codes, scales, fused.new_empty(tokens, dim)


@triton.jit
def _rotate_heads(
    q,
    q_stride,
    head_stride,
    positions,
    cos_sin,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch_ahead(EARLY)
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    head = first + tl.arange(0, BLOCK)[:, None]
    at = q + token * q_stride + head.to(tl.int64) * head_stride
    tail = at + DIM - ROPE + tl.arange(0, ROPE)[None, :]
    cos, sin = load_angles(cos_sin, tl.load(positions + token), ROPE)
    x = tl.load(tail, head < HEADS, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all are loaded before any is overwritten
    tl.store(tail, narrow(turn(x, cos, sin), q.dtype.element_ty), head < HEADS)
    if PADDED > HEADS and first + BLOCK > HEADS:
        zeros = tl.zeros((BLOCK, DIM), q.dtype.element_ty)
        tl.store(at + tl.arange(0, DIM)[None, :], zeros, (head >= HEADS) & (head < PADDED))


@torch.library.custom_op("dsv41::rotate_heads", mutates_args=("q",))
def rotate_heads(q: Tensor, num_heads: int, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate the last dims of the first `num_heads` heads of `q` `[T, Hp, D]` in place, at `positions` `[T]`; the heads
    behind become zeros. `cos_sin` float32 `[max_len, rope_dim]`."""
    tokens, padded, dim = q.shape
    block = min(_HEADS_AT_ONCE, triton.next_power_of_2(max(1, padded)))
    launch(
        _rotate_heads,
        (tokens, triton.cdiv(padded, block)),
        num_warps=_WARPS,
        q=q,
        q_stride=q.stride(0),
        head_stride=q.stride(1),
        positions=positions,
        cos_sin=cos_sin,
        HEADS=num_heads,
        PADDED=padded,
        DIM=dim,
        ROPE=cos_sin.shape[1],
        BLOCK=block,
    )
