"""What each dtype name means to the reference backend, which reads every layout there is."""

from dsv41.errors import LayoutError
from dsv41.hal.layout import CacheLayout, CacheLayouts, ScalePlacement
from dsv41.hal.records import (
    INDEX_FP32,
    INDEX_MXFP4_68,
    NVFP4_288,
    PLAIN_BF16,
    PLAIN_FP32,
    Dialect,
    Record,
    ScaleFormat,
    index_fp8_132,
    plain_fp8,
    v4_584,
    v41_528,
)

PAGE_SIZE = 64

_MXFP8 = v41_528(Dialect.OCP)

# name -> records of the window and of the compressed cache
KV_RECORDS: dict[str, tuple[Record, Record]] = {
    "nvfp4_ds_mla": (_MXFP8, NVFP4_288),
    "fp8_ds_mla": (_MXFP8, _MXFP8),
    "fp8_ds_mla_v4": (v4_584(Dialect.OCP), v4_584(Dialect.OCP)),
    "bfloat16": (PLAIN_BF16, PLAIN_BF16),
    "fp8_e4m3": (plain_fp8(Dialect.OCP), plain_fp8(Dialect.OCP)),
    "float32": (PLAIN_FP32, PLAIN_FP32),
}
INDEX_RECORDS: dict[str, Record] = {
    "mxfp4": INDEX_MXFP4_68,
    "fp8": index_fp8_132(Dialect.OCP, ScaleFormat.FP32),
    "float32": INDEX_FP32,
}
_KV_ALIASES = {"auto": "nvfp4_ds_mla", "fp8": "fp8_ds_mla"}
_INDEX_ALIASES = {"auto": "mxfp4"}


def resolve_layouts(
    kv_cache_dtype: str, index_cache_dtype: str, *, reader: str = "reference"
) -> tuple[str, str, CacheLayouts]:
    """The specific names and their layouts. Raises LayoutError, saying what `reader` reads, for a name that is none of
    these."""
    kv = _KV_ALIASES.get(kv_cache_dtype, kv_cache_dtype)
    index = _INDEX_ALIASES.get(index_cache_dtype, index_cache_dtype)
    for what, asked, name, aliases, known in (
        ("kv_cache_dtype", kv_cache_dtype, kv, _KV_ALIASES, KV_RECORDS),
        ("index_cache_dtype", index_cache_dtype, index, _INDEX_ALIASES, INDEX_RECORDS),
    ):
        if name not in known:
            raise LayoutError(f"{what} {asked!r} is unknown: {reader} reads {', '.join([*aliases, *known])}")
    window, compressed = (_layout(record) for record in KV_RECORDS[kv])
    return kv, index, CacheLayouts(window, compressed, _layout(INDEX_RECORDS[index]))


def _layout(record: Record) -> CacheLayout:
    """Index keys and the V4 record keep a page's scales together, as all their readers do; the others keep them with
    each row, as the newest builds do."""
    if not record.scale_bytes:
        return CacheLayout(record, PAGE_SIZE, ScalePlacement.NONE)
    footer = record.dim != _MXFP8.dim or record == v4_584(Dialect.OCP)
    return CacheLayout(record, PAGE_SIZE, ScalePlacement.PAGE if footer else ScalePlacement.TOKEN)
