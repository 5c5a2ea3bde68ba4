"""The calls of aiter's preshuffled fp8 products, and which of them may take the place of the portable ones.

Facts of `aiter.ops.gemm_op_a8w8` and `aiter.ops.batched_gemm_op_a8w8` as in the sources of autumn 2026. On gfx950 both
know MXFP8: UE8M0 scales for 32 numbers of an activation and for 32 x 32 of a weight, as the release has them. What they
compute is then what the portable products compute, but for the order of sums. Elsewhere, and in older versions, the
first knows float32 scales for 128 numbers and for 128 x 128 alone, which weights and activations are rounded to.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from dsv41.backends.portable.quantize import quantize_mxfp8
from dsv41.backends.rocm.group_quantize import quantize_groups
from dsv41.backends.rocm.matrices import CoarseMatrix, TiledMatrix
from dsv41.backends.vendor import call
from dsv41.errors import BackendError
from dsv41.hal.aiter_ops import AITER_PRODUCTS, ENV_AITER_PRODUCTS, asked_for
from dsv41.hal.codecs import E4M3_DTYPES
from dsv41.hal.records import Dialect


def asked_products() -> str:
    """Of AITER_PRODUCTS, what DSV41_AITER_PRODUCTS names. Raises BackendError where it names none of them."""
    named = asked_for(os.environ.get(ENV_AITER_PRODUCTS))
    if named not in AITER_PRODUCTS:
        raise BackendError(
            f"{ENV_AITER_PRODUCTS} is {os.environ[ENV_AITER_PRODUCTS]!r}: expected {', '.join(AITER_PRODUCTS)}; name "
            "one of these, or unset it"
        )
    return named


def product(library: Any, x: Tensor, matrix: TiledMatrix) -> Tensor:
    """`x` bf16 `[N, K]`, quantised as the matrix `[M, K]` is, by it: bf16 `[N, M]`. `library` is
    `aiter.ops.gemm_op_a8w8`."""
    if not len(x):
        return x.new_empty(0, matrix.rows)
    assert matrix.scale is not None
    if isinstance(matrix, CoarseMatrix):
        dtype, scale = E4M3_DTYPES[matrix.dialect], matrix.scale
        codes, code_scale = quantize_groups(x, matrix.dialect is Dialect.FNUZ)
    else:
        dtype, scale = torch.float8_e4m3fn, matrix.scale.view(torch.float8_e8m0fnu)
        codes, bytes_ = quantize_mxfp8(x)
        code_scale = bytes_.view(torch.float8_e8m0fnu)
    made: Tensor = call(
        library.gemm_a8w8_blockscale_bpreshuffle,
        XQ=codes.view(dtype),
        WQ=matrix.data.view(dtype),
        x_scale=code_scale,
        w_scale=scale,
        dtype=torch.bfloat16,
    )
    return made


def grouped_product(library: Any, codes: Tensor, scale: Tensor, matrix: TiledMatrix) -> Tensor:
    """MXFP8 `codes` `[N, G, K]` with `scale` `[N, G, K / 32]`, each group by its rows of the matrix `[G * M, K]`: bf16
    `[N, G * M]`. `library` is `aiter.ops.batched_gemm_op_a8w8`."""
    if not len(codes):
        return codes.new_empty(0, matrix.rows, dtype=torch.bfloat16)
    assert matrix.scale is not None
    groups = codes.shape[1]
    made: Tensor = call(
        library.batched_gemm_a8w8_mxscale_bpreshuffle,
        x=codes.view(torch.float8_e4m3fn),
        wo_a=matrix.data.view(torch.float8_e4m3fn).unflatten(0, (groups, -1)),
        x_scale=scale,
        w_scale=matrix.scale.unflatten(0, (groups, -1)),
        dtype=torch.bfloat16,
    )
    return made.flatten(1)
