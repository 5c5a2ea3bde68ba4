"""FR-30: pages carry their layout across processes."""

import pytest
import torch

from dsv41.errors import InputError, LayoutError
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.pages import dump_page, load_page
from dsv41.hal.records import NVFP4_288, Dialect, plain_fp8, v4_584, v41_528

from .layout_cases import SENTINEL, all_layouts, interleaved, random_rows

V4 = CacheLayout(v4_584(Dialect.OCP), 64, ScalePlacement.PAGE)


def filled(layout: CacheLayout) -> PagedCache:
    cache, _ = interleaved(layout, 2, gap=1)
    cache.write(torch.arange(cache.num_slots), random_rows(layout.record.dim, cache.num_slots))
    return cache


def test_fr_30_every_layout_survives_and_tails_do_not_travel() -> None:
    for layout in all_layouts(16):
        source = filled(layout)
        target, buffer = interleaved(layout, 3, gap=4)
        load_page(target, 2, dump_page(source, 1))
        assert torch.equal(target.read(torch.arange(32, 48)), source.read(torch.arange(16, 32)))
        written = int((buffer != SENTINEL).sum())
        assert written <= layout.page_bytes
        assert (target.data[:2] == SENTINEL).all()


def test_fr_30_a_page_without_header_is_refused() -> None:
    cache = filled(V4)
    raw = bytes(cache.data[0].tolist())
    with pytest.raises(LayoutError, match="no dumped page"):
        load_page(cache, 0, raw)
    with pytest.raises(LayoutError, match="no dumped page"):
        load_page(cache, 0, b"")


@pytest.mark.parametrize(
    "other",
    [
        CacheLayout(v4_584(Dialect.FNUZ), 64, ScalePlacement.PAGE),
        CacheLayout(v4_584(Dialect.OCP), 64, ScalePlacement.TOKEN),
        CacheLayout(v4_584(Dialect.OCP), 32, ScalePlacement.PAGE),
        CacheLayout(NVFP4_288, 64, ScalePlacement.PAGE),
    ],
)
def test_fr_30_a_page_of_another_layout_is_refused(other: CacheLayout) -> None:
    cache = filled(V4)
    before = cache.data.clone()
    with pytest.raises(LayoutError, match=r"does not fit the cache: .* is expected; load it elsewhere and transcode"):
        load_page(cache, 0, dump_page(filled(other), 0))
    assert torch.equal(cache.data, before)


def test_fr_22_the_tensor_scale_travels_with_the_page() -> None:
    layout = CacheLayout(plain_fp8(Dialect.OCP), 16, ScalePlacement.NONE)
    source, target = filled(layout), PagedCache.allocate(layout, 2)
    with pytest.raises(LayoutError, match=r"tensor_scale 0\.5, the cache 1\.0"):
        load_page(target, 0, dump_page(source, 0))


def test_damage_is_noticed() -> None:
    cache = filled(CacheLayout(v41_528(Dialect.OCP), 16, ScalePlacement.TOKEN))
    page = dump_page(cache, 0)
    with pytest.raises(LayoutError, match="it was cut"):
        load_page(cache, 0, page[:-1])
    for broken in (page.replace(b'"ocp"', b'"fnuz"'), page[:40], page[:10], page.replace(b'"layout"', b'"lay_out"')):
        with pytest.raises(LayoutError, match=r"header of this dumped page is broken|it was cut"):
            load_page(cache, 0, broken)


def test_pages_that_are_not_there() -> None:
    cache = filled(V4)
    for page in (-1, 2):
        with pytest.raises(InputError, match=f"page {page} is outside this cache of 2 pages"):
            dump_page(cache, page)
        with pytest.raises(InputError, match=f"page {page} is outside"):
            load_page(cache, page, b"")
