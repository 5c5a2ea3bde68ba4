"""Which bound caches aiter reads as what they are."""

from __future__ import annotations

from dsv41.errors import LayoutError
from dsv41.hal.layout import CacheLayout, PagedCache

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
