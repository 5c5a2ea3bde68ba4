"""Every kind of layout that a record can lie in, for the tests of layouts, caches and transcoding."""

from dataclasses import replace

import torch

from dsv41.hal.layout import WHOLE_PAGE, CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import INDEX_MXFP4_68, RECORDS, Record

SENTINEL = 0xA5


def layouts_of(record: Record, page_size: int) -> list[CacheLayout]:
    """Every placement of `record`, and tiles as AMD's readers have them."""
    tall = 16 if page_size % 16 == 0 else 1
    if not record.scale_bytes:
        none = ScalePlacement.NONE
        return [
            CacheLayout(record, page_size, none),
            CacheLayout(record, page_size, none, value_tile=(tall, 16)),
        ]
    chunks = CacheLayout(
        record, page_size, ScalePlacement.POOL, value_tile=(WHOLE_PAGE, 16), scale_tile=(WHOLE_PAGE, 1)
    )
    return [
        CacheLayout(record, page_size, ScalePlacement.TOKEN),
        CacheLayout(record, page_size, ScalePlacement.PAGE),
        CacheLayout(record, page_size, ScalePlacement.PAGE, value_tile=(tall, 16)),
        CacheLayout(record, page_size, ScalePlacement.POOL),
        chunks,
        *([replace(chunks, scale_lanes=4)] if record == INDEX_MXFP4_68 and page_size % 4 == 0 else []),
    ]


def all_layouts(page_size: int) -> list[CacheLayout]:
    return [layout for record in RECORDS.values() for layout in layouts_of(record, page_size)]


def random_rows(dim: int, count: int, seed: int = 0) -> torch.Tensor:
    """Rows whose groups differ in size, so that a misplaced scale shows."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-4, 4, (count, dim // 16), generator=generator).float())
    return torch.randn(count, dim, generator=generator) * spread.repeat_interleave(16, 1)


def interleaved(layout: CacheLayout, num_pages: int, gap: int = 0) -> tuple[PagedCache, torch.Tensor]:
    """A cache whose pages lie `gap` alignment units further apart than needed, at an offset, in a buffer of sentinels;
    and that buffer."""
    stride = layout.stride + gap * layout.alignment
    offset = 3 * layout.alignment + 1
    buffer = torch.full((offset + num_pages * stride + 7,), SENTINEL, dtype=torch.uint8)
    data = torch.as_strided(buffer, (num_pages, layout.page_bytes), (stride, 1), offset)
    pool = torch.full((num_pages, layout.pool_page_bytes), SENTINEL, dtype=torch.uint8)
    scale = torch.tensor([0.5]) if layout.record.tensor_scale else None
    return PagedCache(layout, data, pool if layout.pool_page_bytes else None, scale), buffer
