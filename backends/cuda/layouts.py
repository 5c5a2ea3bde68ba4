"""How FlashMLA is shown caches, and which bound ones it reads as what they are."""

from __future__ import annotations

from torch import Tensor

from dsv41.errors import LayoutError
from dsv41.hal.layout import CacheLayout, PagedCache

_VECTOR = 16
"""Bytes of its widest load, and what TMA wants a cache to begin at."""
_MOST_ROWS = 1 << 31


def check_readable(what: str, cache: PagedCache, layout: CacheLayout, arch: str) -> None:
    """Raise LayoutError where FlashMLA on `arch` would misread the cache that `what` names, or refuse it.

    `layout` is one that it reads; pages may have any number of rows, and lie any distance apart that its loads can
    walk: multiples of 16 bytes, and on the SM100 family, where TMA counts in value rows, of one of these.
    """
    name = cache.layout.record.name
    if differences := cache.layout.differences(layout.with_page_size(cache.layout.page_size)):
        raise LayoutError(
            f"{what} is in {name}: flashmla expected {layout.describe()}, and finds {'; '.join(differences)}; make it "
            "with the layouts of this backend, or transcode it"
        )
    row = layout.record.value_bytes
    multiple = row if arch.startswith("sm_10") else _VECTOR
    stride = cache.data.stride(0)
    if stride % multiple:
        raise LayoutError(
            f"{what} ({name}) has its pages {stride} bytes apart: flashmla on {arch} expected a multiple of "
            f"{multiple}; use {-(-stride // multiple) * multiple}"
        )
    if cache.data.data_ptr() % _VECTOR:
        raise LayoutError(
            f"{what} ({name}) begins at address {cache.data.data_ptr()}: flashmla expected a multiple of {_VECTOR}; "
            "align it"
        )
    # In whole value rows, as TMA counts them, pages hold more than their slots.
    rows = cache.num_pages * max(stride // row, cache.layout.page_size)
    if rows >= _MOST_ROWS:
        raise LayoutError(
            f"{what} ({name}) has {cache.num_pages} pages {stride} bytes apart: flashmla expected less than "
            f"{_MOST_ROWS} rows of {row} bytes, which it counts in 32 bits; use fewer pages"
        )


def record_view(cache: PagedCache) -> Tensor:
    """uint8 `[pages, page_size, 1, record]`, as FlashMLA counts bytes: where scales follow all rows of a page, element
    [p, t] is no token's record."""
    size, width = cache.layout.page_size, cache.layout.record.bytes
    return cache.data.as_strided((cache.num_pages, size, 1, width), (cache.data.stride(0), width, width, 1))
