"""RMSNorm in fp32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.numbers import narrow, round_to
from dsv41.backends.portable.quantize import GROUP, store_mxfp8

_WARPS = 4


@triton.jit
def normed(x, weight, eps, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """Float32 `x` `[n]` over its root mean square, times `weight`, rounded to `DTYPE`, in float32.

    Numbers past the first `COUNT` are 0. The root and its reciprocal are exact where they can be, so that rows of a
    mean square of 1 are not touched.
    """
    mean = tl.div_rn(tl.sum(x * x, axis=0), tl.full((), COUNT, tl.float32))
    scale = tl.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    return round_to(x * scale * weight, DTYPE)


@triton.jit
def load_normed(x, weight, eps, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The row of `COUNT` numbers at `x`, normed and rounded to its own dtype: float32 `[BLOCK]`, zeros behind it."""
    column = tl.arange(0, BLOCK)
    numbers = tl.load(x + column, column < COUNT, other=0.0).to(tl.float32)
    weights = tl.load(weight + column, column < COUNT, other=0.0).to(tl.float32)
    return normed(numbers, weights, eps, COUNT, x.dtype.element_ty)


@triton.jit
def _norm_inputs(
    fused,
    fused_stride,
    q_weight,
    kv_weight,
    qr,
    qr_codes,
    qr_scales,
    kv,
    eps,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
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
        tl.store(kv + token * DIM + tl.arange(0, DIM), narrow(latent, kv.dtype.element_ty))


@torch.library.custom_op("dsv41::norm_inputs", mutates_args=())
def norm_inputs(
    fused: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float, quantize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split `fused` `[T, Rq + D]`, the product of `wq_a` and `wkv`, and norm both parts.

    Returns `qr` `[T, Rq]`, its MXFP8 codes uint8 `[T, Rq]` and scale bytes uint8 `[T, ceil(Rq / 32)]` (empty unless
    `quantize`), and `kv` `[T, D]`; D is a power of two.
    """
    qr, codes, scales, kv = _empty_inputs(fused, q_weight, kv_weight, eps, quantize)
    rank, dim = q_weight.shape[0], kv_weight.shape[0]
    launch(
        _norm_inputs,
        (fused.shape[0], 2),
        num_warps=_WARPS,
        fused=fused,
        fused_stride=fused.stride(0),
        q_weight=q_weight,
        kv_weight=kv_weight,
        qr=qr,
        qr_codes=codes,
        qr_scales=scales,
        kv=kv,
        eps=eps,
        RANK=rank,
        RANK_BLOCK=max(GROUP, triton.next_power_of_2(rank)),
        DIM=dim,
        GROUPS=triton.cdiv(rank, GROUP),
        QUANTIZE=quantize,
    )
    return qr, codes, scales, kv


@norm_inputs.register_fake
def _empty_inputs(
    fused: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float, quantize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, rank, dim = fused.shape[0], q_weight.shape[0], kv_weight.shape[0]
    coded = (tokens, rank) if quantize else (0, rank)
    scaled = (coded[0], -(-rank // GROUP))
    codes, scales = (fused.new_empty(shape, dtype=torch.uint8) for shape in (coded, scaled))
    return fused.new_empty(tokens, rank), codes, scales, fused.new_empty(tokens, dim)


@triton.jit
def _rms_norm(x, x_stride, weight, out, eps, DIM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    numbers = load_normed(x + row * x_stride, weight, eps, DIM, BLOCK)
    column = tl.arange(0, BLOCK)
    tl.store(out + row * DIM + column, narrow(numbers, out.dtype.element_ty), column < DIM)


@torch.library.custom_op("dsv41::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` `[N, D]` over its root mean square, times `weight` `[D]`, in `x`'s dtype; rows any distance apart."""
    out, dim = x.new_empty(x.shape), x.shape[1]
    launch(
        _rms_norm,
        (x.shape[0],),
        num_warps=_WARPS,
        x=x,
        x_stride=x.stride(0),
        weight=weight,
        out=out,
        eps=eps,
        DIM=dim,
        BLOCK=triton.next_power_of_2(dim),
    )
    return out


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)
