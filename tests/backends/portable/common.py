"""What the tests of several portable ops share: the device, hostile caches, sets of cases that cover all pairs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from dsv41.backends.portable.numbers import INTERPRETED
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import Record

from ...hal.layout_cases import layouts_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Kernels run here: compiled on a GPU, in Triton's interpreter on a CPU."""

POISON = 0xFF
"""Fills memory that nobody wrote: NaN as e4m3 (OCP), UE8M0, bf16 and fp32, and -6 as e2m1."""


def jit(kernel: Callable[..., None]) -> Any:
    """`triton.jit` for a test's own kernels, which run as those of the package do."""
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": str(int(INTERPRETED.value))}):
        return triton.jit(kernel)


def layout_of(
    record: Record, page_size: int = 16, placement: ScalePlacement | str | None = None, tiled: bool = False
) -> CacheLayout:
    """A record in one of its placements (None = the first that it has), in tiles or not.

    Raises ValueError where the record has no such layout.
    """
    for layout in layouts_of(record, page_size):
        if placement in (None, layout.scale_placement) and tiled == (layout.value_tile is not None):
            return layout
    raise ValueError(f"{record.name} has no layout with scales by {placement}, tiled={tiled}")


def name_of(value: object) -> str:
    """A test's id of a layout, or of another value."""
    if not isinstance(value, CacheLayout):
        return str(value)
    return f"{value.record.name}-{value.scale_placement}{'-tiled' if value.value_tile else ''}"


def make_cache(layout: CacheLayout, num_pages: int = 4, gap: int = 1, poison: int = POISON) -> PagedCache:
    """A cache on DEVICE that holds no row: every byte is `poison`, in the pages and around them.

    Pages lie `gap` alignment units further apart than they need, from an offset on, in a larger buffer; so do the pages
    of a pool. A tensor scale is 0.5.
    """
    data = _pages(num_pages, layout.page_bytes, layout.stride + gap * layout.alignment, layout.alignment, poison)
    pool = None
    if layout.pool_page_bytes:
        pool = _pages(num_pages, layout.pool_page_bytes, layout.pool_page_bytes + 16 * gap, 16, poison)
    scale = torch.full((1,), 0.5, device=DEVICE) if layout.record.tensor_scale else None
    return PagedCache(layout, data, pool, scale)


def _pages(count: int, width: int, stride: int, offset: int, poison: int) -> Tensor:
    buffer = torch.full((offset + count * stride,), poison, dtype=torch.uint8, device=DEVICE)
    return torch.as_strided(buffer, (count, width), (stride, 1), offset)


def memory(cache: PagedCache) -> Tensor:
    """uint8: every byte of the buffers that the cache lies in, so also what is between and around its pages."""
    parts = [part for part in (cache.data, cache.scale_pool) if part is not None]
    return torch.cat([torch.tensor([], dtype=torch.uint8, device=DEVICE).set_(p.untyped_storage()) for p in parts])


def copy_of(cache: PagedCache) -> PagedCache:
    """The same cache in memory of its own."""

    def copy(part: Tensor) -> Tensor:
        whole = torch.tensor([], dtype=torch.uint8, device=DEVICE).set_(part.untyped_storage()).clone()
        return torch.as_strided(whole, part.shape, part.stride(), part.storage_offset())

    pool = None if cache.scale_pool is None else copy(cache.scale_pool)
    return PagedCache(cache.layout, copy(cache.data), pool, cache.tensor_scale)


def covering(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each axis, so that every pair of values of two axes occurs in one of them.

    All combinations if the environment variable DSV41_FULL is 1. The values of an axis are distinct.
    """
    if os.environ.get("DSV41_FULL") == "1" or len(axes) < 2:
        return list(product(*axes))
    places = [range(len(axis)) for axis in axes]
    missing = {
        ((first, i), (second, j)): None
        for first, second in combinations(range(len(axes)), 2)
        for i, j in product(places[first], places[second])
    }

    def news(row: dict[int, int], axis: int, place: int) -> int:
        return sum(tuple(sorted(((axis, place), other))) in missing for other in row.items())

    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for axis in range(len(axes)):
            if axis not in row:
                row[axis] = max(places[axis], key=partial(news, row, axis))
        for pair in combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        rows.append(tuple(axes[axis][place] for axis, place in sorted(row.items())))
    return rows


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Normal float32 numbers on DEVICE, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(found: Tensor, expected: Tensor, rtol: float = 1e-6, atol: float = 0.0) -> None:
    """Equal but for the order of a sum: within `rtol` and `atol` in fp32, in bf16 one step in the few numbers next to a
    tie."""
    narrow = found.dtype == torch.bfloat16
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2**-7 if narrow else rtol, atol=atol, equal_nan=True)
    if narrow:
        assert (found != expected).sum() <= 0.01 * found.numel() + expected.isnan().sum()
