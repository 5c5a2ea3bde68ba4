"""aiter's preshuffled fp8 products without a GPU: their signatures, their rules checked, their answers in torch.

Written from the rules of the library and from the bytes of its tiles, and from nothing of ours. What the real ones
would refuse or misread raises AssertionError with the rule.
"""

# ruff: noqa: PT018  (a rule is one assertion, however many parts it has)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .emulated_aiter import e4m3

_DTYPES = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


class Products:
    """Both modules. `calls` holds the name and the keyword arguments of every call."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def gemm_a8w8_blockscale_bpreshuffle(
        self, XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        given = {"XQ": XQ, "WQ": WQ, "x_scale": x_scale, "w_scale": w_scale, "dtype": dtype}
        self.calls.append(("gemm_a8w8_blockscale_bpreshuffle", given))
        self._check_codes(XQ, WQ)
        (tokens, columns), rows = XQ.shape, len(WQ)
        assert WQ.shape == (rows, columns) and rows % 16 == 0 and columns % 128 == 0, "N of 16, K of 128"
        if x_scale.dtype == torch.float8_e8m0fnu:
            assert self.arch == "gfx950", "MXFP8 is for gfx950"
            assert x_scale.shape == (tokens, columns // 32) and x_scale.is_contiguous(), "row-major, one for 32"
            return self._product(XQ[:, None], WQ[None], _powers(x_scale)[:, None], _fine(w_scale, rows, columns)[None])
        assert x_scale.dtype == w_scale.dtype == torch.float32, "fp32 scales for 128"
        assert x_scale.shape == (tokens, columns // 128) and x_scale.stride(0) == 1, "column-major, one for 128"
        assert x_scale.stride(1) == tokens or columns == 128, "without gaps"
        assert w_scale.shape == (-(-rows // 128), columns // 128) and w_scale.is_contiguous(), "one for 128 x 128"
        weight_scale = w_scale.repeat_interleave(128, 0)[:rows].repeat_interleave(4, 1)
        return self._product(XQ[:, None], WQ[None], x_scale.repeat_interleave(4, 1)[:, None], weight_scale[None])

    def batched_gemm_a8w8_mxscale_bpreshuffle(
        self, x: Tensor, wo_a: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        given = {"x": x, "wo_a": wo_a, "x_scale": x_scale, "w_scale": w_scale, "dtype": dtype}
        self.calls.append(("batched_gemm_a8w8_mxscale_bpreshuffle", given))
        assert self.arch == "gfx950", "MXFP8 is for gfx950"
        self._check_codes(x, wo_a)
        (tokens, groups, columns), rows = x.shape, wo_a.shape[1]
        assert wo_a.shape == (groups, rows, columns), "x is [M, G, K], wo_a [G, N, K]"
        assert x_scale.shape == (tokens, groups, columns // 32), "x_scale is [M, G, K / 32]"
        assert x_scale.dtype == torch.uint8 and x_scale.is_contiguous()
        return self._product(
            x, wo_a, _powers(x_scale), torch.stack([_fine(scale, rows, columns) for scale in w_scale])
        ).unflatten(1, (groups, rows))

    def _check_codes(self, x: Tensor, weight: Tensor) -> None:
        assert x.dtype == weight.dtype == _DTYPES[self.arch], f"fp8 of {self.arch}"
        assert x.is_contiguous() and weight.is_contiguous(), "codes are dense"
        assert len(x) > 0, "a grid has programs"

    def _product(self, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
        """bf16 `[M, G * N]`; scales are float32, one for 32 numbers of each row."""
        tokens, groups, columns = x.shape
        rows = weight.shape[1]
        if x.is_meta:
            return x.new_empty(tokens, groups * rows, dtype=torch.bfloat16)
        bias = 8 if self.arch == "gfx942" else 7
        n, k = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
        place = n // 16 * 16 * columns + k // 16 * 256 + n % 16 * 16 + k % 16
        parts = []
        for group in range(groups):
            codes = weight[group].view(torch.uint8).flatten()[place]
            numbers = e4m3(codes, bias) * weight_scale[group].repeat_interleave(32, 1)
            inputs = e4m3(x[:, group].contiguous().view(torch.uint8), bias) * x_scale[:, group].repeat_interleave(32, 1)
            parts.append(inputs @ numbers.T)
        return torch.cat(parts, 1).to(torch.bfloat16)


def _powers(scale: Tensor) -> Tensor:
    return scale.float() if scale.is_meta else torch.exp2(scale.view(torch.uint8).double() - 127).float()


def _fine(scale: Tensor, rows: int, columns: int) -> Tensor:
    assert scale.dtype in (torch.uint8, torch.float8_e8m0fnu) and scale.is_contiguous(), "e8m0"
    assert scale.shape == (rows // 32, columns // 32) and rows % 32 == 0, "one for 32 x 32"
    return _powers(scale).repeat_interleave(32, 0)
