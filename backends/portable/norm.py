"""RMSNorm in fp32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.early import wait_for_launch_ahead
from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.numbers import narrow, round_to

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
def _rms_norm(x, x_stride, weight, out, eps, DIM: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_launch_ahead(EARLY)
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
