"""Contract 2: how the device's caches lie, and which bound caches it reads as what they are."""

from dsv41.errors import LayoutError
from dsv41.hal.codecs import Dialect, ScaleFormat
from dsv41.hal.layout import CacheLayout, CacheLayouts, PagedCache, ScalePlacement
from dsv41.hal.records import PLAIN_BF16, Record, index_fp8_132, v41_528

PAGE_SIZE = 32
TILE = (8, 64)
"""Rows and bytes: as the device fetches them."""
MOST_SLOTS = 2**31 - 1
_KV = {"auto": "fp8_ds_mla", "fp8": "fp8_ds_mla", "fp8_ds_mla": "fp8_ds_mla", "bfloat16": "bfloat16"}
_INDEX = {"auto": "fp8", "fp8": "fp8"}


def resolve_layouts(kv_cache_dtype: str, index_cache_dtype: str) -> tuple[str, str, CacheLayouts]:
    """The specific names and their layouts. Raises LayoutError for names that the device does not read."""
    for what, name, known in (
        ("kv_cache_dtype", kv_cache_dtype, _KV),
        ("index_cache_dtype", index_cache_dtype, _INDEX),
    ):
        if name not in known:
            raise LayoutError(f"{what} {name!r} is none that toy reads: use one of {', '.join(known)}")
    kv, index = _KV[kv_cache_dtype], _INDEX[index_cache_dtype]
    rows = _tiled(v41_528(Dialect.OCP) if kv == "fp8_ds_mla" else PLAIN_BF16)
    keys = CacheLayout(index_fp8_132(Dialect.OCP, ScaleFormat.FP32), PAGE_SIZE, ScalePlacement.PAGE)
    return kv, index, CacheLayouts(rows, rows, keys)


def check_cache(cache: PagedCache, layout: CacheLayout) -> None:
    """Raise LayoutError unless `cache` is in `layout`, with pages of any whole number of tiles."""
    cache.expect(layout.with_page_size(cache.layout.page_size), "toy")
    if cache.num_slots > MOST_SLOTS:
        raise LayoutError(
            f"a cache of {cache.num_slots} rows: toy reaches {MOST_SLOTS} with its int32 rows; use fewer pages"
        )


def _tiled(record: Record) -> CacheLayout:
    placement = ScalePlacement.PAGE if record.scale_bytes else ScalePlacement.NONE
    return CacheLayout(record, PAGE_SIZE, placement, value_tile=TILE)
