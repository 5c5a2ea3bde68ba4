"""The index layouts that aiter's kernels read, and which bound caches it reads as what they are."""

from __future__ import annotations

from dsv41.errors import LayoutError
from dsv41.hal.arch import ARCHS
from dsv41.hal.layout import WHOLE_PAGE, CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import INDEX_MXFP4_68, Dialect, ScaleFormat, index_fp8_132

_PAGE_SIZE = 64

_VECTOR = 16
"""Bytes of its widest load. It takes pages at smaller multiples too, but not at odd ones, and loads them narrower."""
_MOST_ROWS = 2**31 - 1


def check_readable(what: str, cache: PagedCache, layout: CacheLayout) -> None:
    """Raise LayoutError where aiter would misread or refuse the cache that `what` names, which is wanted in `layout`.

    Pages may have any number of rows and lie any multiple of 16 bytes apart.
    """
    name = cache.layout.record.name
    if differences := cache.layout.differences(layout.with_page_size(cache.layout.page_size)):
        raise LayoutError(
            f"{what} is in {name}: aiter expected {layout.describe()}, and finds {'; '.join(differences)}; make it "
            "with the layouts of this backend, or transcode it"
        )
    for place, number in (("begins at address", cache.data.data_ptr()), ("has a page stride of", cache.data.stride(0))):
        if number % _VECTOR:
            raise LayoutError(
                f"{what} ({name}) {place} {number}: aiter expected a multiple of {_VECTOR} bytes; align it"
            )
    if cache.num_slots > _MOST_ROWS:
        raise LayoutError(
            f"{what} ({name}) has {cache.num_slots} rows: aiter expected at most {_MOST_ROWS}, which its int32 indices "
            "reach; use fewer pages"
        )


def fp8_keys(dialect: Dialect) -> CacheLayout:
    """Index keys as the paged fp8 logits read them: tiles of 16 x 16 bytes, then a page's float32 scales.

    Pages have a multiple of 16 rows.
    """
    record = index_fp8_132(dialect, ScaleFormat.FP32)
    return CacheLayout(record, _PAGE_SIZE, ScalePlacement.PAGE, value_tile=(16, 16))


def mxfp4_keys() -> CacheLayout:
    """Index keys as gfx950's paged MXFP4 logits read them: values `[pages, 1, 4, page_size, 16]` bytes, and scales
    `[pages, 1, 4, page_size]` in a pool of their own, those of every 16th row together.

    Pages have a multiple of 16 rows.
    """
    return CacheLayout(
        INDEX_MXFP4_68,
        _PAGE_SIZE,
        ScalePlacement.POOL,
        value_tile=(WHOLE_PAGE, 16),
        scale_tile=(WHOLE_PAGE, 1),
        scale_lanes=16,
    )


_KEY_PAGES = (16, 32, 64, 128)
"""Rows of a page of keys that the logits kernel takes whole, in half of its 256 keys at a time."""
_KEY_STRIDE = 64
"""Bytes: it takes a page stride for a multiple of 16, counted in bytes and also in scales of four."""
_KEY_BYTES = 2**31 - 1
"""Of a cache of keys: its offsets have 32 bits in some builds."""


def reads_keys(cache: PagedCache, arch: str) -> bool:
    """Whether the paged fp8 logits of `arch` read the index keys in `cache`, which must be of its dialect."""
    layout, stride, dialect = cache.layout, cache.data.stride(0), ARCHS[arch].fp8_dialect
    return (
        dialect is not None
        and layout.page_size in _KEY_PAGES
        and not layout.differences(fp8_keys(Dialect(dialect)).with_page_size(layout.page_size))
        and stride % _KEY_STRIDE == 0
        and cache.data.data_ptr() % _VECTOR == 0
        and cache.num_pages * stride <= _KEY_BYTES
    )
