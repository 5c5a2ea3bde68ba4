"""Cache rows gathered in bf16, as FlashMLA's prefill kernel takes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.caches import kernel_arguments
from dsv41.backends.portable.formats import RowFormat
from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.numbers import narrow
from dsv41.backends.portable.rows import load_rows

_ROWS = 16
"""Rows of one program."""
_SLICE = tl.constexpr(64)
"""Dims that are handled together. No record changes its encoding inside one."""


@triton.jit(do_not_specialize=["pages_stride", "table_width"], do_not_specialize_on_alignment=["pages"])
def _gather_rows(
    cache, cache_pool, cache_scale, cache_stride, cache_pool_stride, pages, pages_stride, table_width,
    spans, out, KIND: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Programs: requests x blocks of ROWS rows, of the longest request."""
    request = tl.program_id(0).to(tl.int64)
    spans += request * 6 + KIND * 3
    first, count, target = tl.load(spans), tl.load(spans + 1), tl.load(spans + 2)
    start = tl.program_id(1).to(tl.int64) * ROWS
    if start < count:
        place = start + tl.arange(0, ROWS)
        live = place < count
        page = (first + place) // F.page_size
        found = tl.load(pages + request * pages_stride + page, live & (page < table_width), other=-1).to(tl.int64)
        slot = found * F.page_size + (first + place) % F.page_size
        source = (cache, cache_pool, cache_scale, cache_stride, cache_pool_stride)
        SLICES: tl.constexpr = F.dim // _SLICE
        for i in tl.static_range(SLICES):
            x = load_rows(source, slot, live & (found >= 0), i * _SLICE, _SLICE, F)
            at = (target + place)[:, None] * F.dim + i * _SLICE + tl.arange(0, _SLICE)[None, :]
            tl.store(out + at, narrow(x, tl.bfloat16), live[:, None])


@torch.library.custom_op("dsv41::gather_rows", mutates_args=("out",))
def gather_rows(
    data: Tensor,
    pool: Tensor | None,
    tensor_scale: Tensor | None,
    format: list[int],
    pages: Tensor,
    spans: Tensor,
    compressed: bool,
    longest: int,
    out: Tensor,
) -> None:
    """Copy the rows of one cache that `spans` names into `out` bf16 `[N, D]`, dequantised and rounded once.

    `pages` int32 `[R, n]` is the block table of the requests of `spans` (`Gathered.spans`), of which the window's or
    the `compressed` rows' part is followed; `longest` is its largest count. A row without a page becomes zeros.
    """
    form = RowFormat.from_numbers(format)
    launch(
        _gather_rows,
        (pages.shape[0], triton.cdiv(longest, _ROWS)),
        **kernel_arguments("cache", data, pool, tensor_scale),
        pages=pages,
        pages_stride=pages.stride(0),
        table_width=pages.shape[1],
        spans=spans,
        out=out,
        KIND=int(compressed),
        ROWS=_ROWS,
        F=form,
    )
