"""Caches: rows land where the layout says and nowhere else, and come back."""

import math
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.errors import InputError, LayoutError
from dsv41.hal.layout import WHOLE_PAGE, CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import (
    INDEX_MXFP4_68,
    NVFP4_288,
    PLAIN_FP32,
    RECORDS,
    Dialect,
    ScaleFormat,
    index_fp8_132,
    pack,
    plain_fp8,
    unpack,
    v4_584,
    v41_528,
)

from .layout_cases import SENTINEL, all_layouts, interleaved, layouts_of, random_rows

TOKEN, PAGE, POOL = ScalePlacement.TOKEN, ScalePlacement.PAGE, ScalePlacement.POOL
V4, V41 = v4_584(Dialect.OCP), v41_528(Dialect.OCP)
INDEX_FP8 = index_fp8_132(Dialect.OCP, ScaleFormat.FP32)


def value_offset(layout: CacheLayout, row: int, byte: int) -> int:
    """Where byte `byte` of row `row` lies in its page, by the formulas of the libraries."""
    width, size = layout.record.value_bytes, layout.page_size
    if layout.scale_placement is TOKEN:
        return row * (width + layout.record.scale_bytes) + byte
    rows, columns = layout.value_tile or (1, width)
    rows = rows or size
    return row // rows * (rows * width) + byte // columns * (rows * columns) + row % rows * columns + byte % columns


def scale_offset(layout: CacheLayout, row: int, byte: int) -> int:
    """The same for a scale byte, in the page or in the pool's page."""
    width, size = layout.record.scale_bytes, layout.page_size
    if layout.scale_placement is TOKEN:
        return row * layout.record.bytes + layout.record.value_bytes + byte
    if layout.scale_placement is PAGE:
        return size * layout.record.value_bytes + row * width + byte
    lanes = layout.scale_lanes
    row = row % lanes * (size // lanes) + row // lanes
    return byte * size + row if layout.scale_tile else row * width + byte


def slots_of(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


@pytest.mark.parametrize("page_size", [1, 16])
def test_fr_25_every_byte_lies_where_the_formulas_say(page_size: int) -> None:
    for layout in all_layouts(page_size):
        cache, buffer = interleaved(layout, num_pages=3, gap=2)
        rows = random_rows(layout.record.dim, 2)
        page, row = 1, page_size - 1
        cache.write(slots_of(page * page_size + row, 2 * page_size), rows)
        values, scales = pack(layout.record, rows, cache.tensor_scale)
        for i, (page, row) in enumerate(((1, page_size - 1), (2, 0))):
            start = cache.data.storage_offset() + page * cache.data.stride(0)
            pool = buffer[start:] if cache.scale_pool is None else cache.scale_pool[page]
            found = [int(buffer[start + value_offset(layout, row, c)]) for c in range(layout.record.value_bytes)]
            assert found == values[i].tolist(), layout.describe()
            found = [int(pool[scale_offset(layout, row, c)]) for c in range(layout.record.scale_bytes)]
            assert found == scales[i].tolist(), layout.describe()


@pytest.mark.parametrize("page_size", [1, 32, 64, 128, 256])
def test_fr_25_rows_come_back_in_every_layout_and_page_size(page_size: int) -> None:
    for layout in all_layouts(page_size):
        cache, _ = interleaved(layout, num_pages=2, gap=1)
        slots = slots_of(0, page_size - 1, page_size, 2 * page_size - 1).unique()
        rows = random_rows(layout.record.dim, len(slots))
        cache.write(slots, rows)
        expected = unpack(layout.record, *pack(layout.record, rows, cache.tensor_scale), cache.tensor_scale)
        assert torch.equal(cache.read(slots), expected), layout.describe()


@pytest.mark.parametrize("page_size", [1, 32, 64, 128, 256])
def test_fr_25_a_reader_of_another_placement_is_caught(page_size: int) -> None:
    """All pairs of layouts of one record: the tag differs, and where the bytes do too, reading them so would be wrong
    at token 1 of page 1 although token 0 of page 0 may look right."""
    for record in (V4, V41, NVFP4_288, INDEX_MXFP4_68, INDEX_FP8):
        layouts = layouts_of(record, page_size)
        slots = slots_of(*range(2 * page_size))
        for writer in layouts:
            cache = PagedCache.allocate(writer, 2)
            cache.write(slots, random_rows(record.dim, len(slots)))
            for reader in layouts:
                if reader is writer:
                    cache.expect(reader, "it")
                    continue
                with pytest.raises(LayoutError, match="it cannot read this cache: "):
                    cache.expect(reader, "it")
                same_buffers = writer.stride == reader.stride and writer.pool_page_bytes == reader.pool_page_bytes
                if page_size > 1 and same_buffers:
                    misread = PagedCache(reader, cache.data, cache.scale_pool).read(slots)
                    probe = page_size + 1
                    assert not torch.equal(misread[probe], cache.read(slots)[probe])


def test_fr_26_a_shuffled_page_read_flat_loses_its_needle() -> None:
    flat = CacheLayout(INDEX_FP8, 64, PAGE)
    shuffled = CacheLayout(INDEX_FP8, 64, PAGE, value_tile=(16, 16))
    keys = torch.nn.functional.normalize(torch.randn(256, 128, generator=torch.Generator().manual_seed(1)), dim=1)
    cache = PagedCache.allocate(shuffled, 4)
    slots = torch.arange(256)
    cache.write(slots, keys)
    needle = 200
    assert int((cache.read(slots) @ keys[needle]).argmax()) == needle
    misread = PagedCache(flat, cache.data).read(slots)
    assert float(misread[needle] @ keys[needle]) < 0.9
    with pytest.raises(LayoutError, match=r"value_tile \(16, 16\) where None is expected"):
        cache.expect(flat, "the indexer")


def test_fr_26_tiles_are_the_vendors() -> None:
    """16 x 16 bytes as aiter shuffles fp8 keys; [4 chunks, page, 16] and [4, page] as gfx950 keeps MXFP4."""
    cache = PagedCache.allocate(CacheLayout(INDEX_FP8, 64, PAGE, value_tile=(16, 16)), 2)
    slots = torch.arange(128)
    rows = random_rows(128, 128)
    cache.write(slots, rows)
    values, _ = pack(INDEX_FP8, rows)
    shuffled = values.view(2, 4, 16, 8, 16).transpose(2, 3).reshape(2, -1)
    assert torch.equal(cache.data[:, : 64 * 128], shuffled)

    layout = CacheLayout(INDEX_MXFP4_68, 64, POOL, value_tile=(WHOLE_PAGE, 16), scale_tile=(WHOLE_PAGE, 1))
    cache = PagedCache.allocate(layout, 2)
    cache.write(slots, rows)
    values, scales = pack(INDEX_MXFP4_68, rows)
    assert torch.equal(cache.data.view(2, 4, 64, 16), values.view(2, 64, 4, 16).transpose(1, 2))
    assert cache.scale_pool is not None
    assert torch.equal(cache.scale_pool.view(2, 4, 64), scales.view(2, 64, 4).transpose(1, 2))

    # Later builds of its reader want a lane's four rows together: those 16 apart.
    lanes = PagedCache.allocate(replace(layout, scale_lanes=16), 2)
    lanes.write(slots, rows)
    assert lanes.scale_pool is not None
    assert torch.equal(lanes.data, cache.data)
    for slot in slots.tolist():
        page, row = divmod(slot, 64)
        places = torch.arange(4) * 64 + row % 16 * 4 + row // 16
        assert torch.equal(lanes.scale_pool[page, places], scales[slot])
    assert torch.equal(lanes.read(slots), cache.read(slots))


@pytest.mark.parametrize("gap", [0, 1, 7])
def test_fr_27_pages_of_a_shared_buffer_are_read_at_their_stride(gap: int) -> None:
    for layout in all_layouts(16):
        cache, _ = interleaved(layout, num_pages=4, gap=gap)
        dense = PagedCache.allocate(layout, 4)
        if dense.tensor_scale is not None:
            dense.tensor_scale.copy_(cache.tensor_scale)  # type: ignore[arg-type]
        slots = torch.randperm(64, generator=torch.Generator().manual_seed(2))
        rows = random_rows(layout.record.dim, 64)
        for each in (cache, dense):
            each.write(slots, rows)
        assert torch.equal(cache.read(slots), dense.read(slots)), layout.describe()


@pytest.mark.parametrize("gap", [0, 3])
def test_fr_28_writers_touch_the_bytes_of_their_rows_alone(gap: int) -> None:
    for layout in all_layouts(16):
        cache, buffer = interleaved(layout, num_pages=3, gap=gap)
        rows = random_rows(layout.record.dim, 3)
        cache.write(slots_of(17, -1, 47), rows)
        mine = torch.zeros_like(buffer, dtype=torch.bool)
        pool = torch.zeros(3, layout.pool_page_bytes, dtype=torch.bool)
        for page, row in ((1, 1), (2, 15)):
            start = cache.data.storage_offset() + page * cache.data.stride(0)
            mine[[start + value_offset(layout, row, c) for c in range(layout.record.value_bytes)]] = True
            places = torch.tensor([scale_offset(layout, row, c) for c in range(layout.record.scale_bytes)]).long()
            if layout.scale_placement is POOL:
                pool[page, places] = True
            else:
                mine[start + places] = True
        assert (buffer[~mine] == SENTINEL).all(), layout.describe()
        if cache.scale_pool is not None:
            assert (cache.scale_pool[~pool] == SENTINEL).all()


def test_fr_29_tails_are_never_written() -> None:
    for layout in all_layouts(7):
        cache = PagedCache.allocate(layout, 3, fill=SENTINEL)
        cache.write(torch.arange(21), random_rows(layout.record.dim, 21))
        assert cache.data.shape == (3, layout.page_bytes + layout.tail_bytes)
        assert (cache.data[:, layout.page_bytes :] == SENTINEL).all()


def test_fr_28_two_caches_share_one_block() -> None:
    """Blocks of a window page and a compressed page, as engines pack them."""
    window, compressed = CacheLayout(V4, 64, PAGE), CacheLayout(V4, 32, PAGE)
    block = window.stride + compressed.stride
    buffer = torch.zeros(5, block, dtype=torch.uint8)
    first = PagedCache(window, buffer[:, : window.page_bytes])
    second = PagedCache(compressed, buffer[:, window.stride : window.stride + compressed.page_bytes])
    a, b = random_rows(512, first.num_slots, 1), random_rows(512, second.num_slots, 2)
    first.write(torch.arange(first.num_slots), a)
    second.write(torch.arange(second.num_slots), b)
    assert torch.equal(first.read(torch.arange(first.num_slots)), unpack(V4, *pack(V4, a)))
    assert torch.equal(second.read(torch.arange(second.num_slots)), unpack(V4, *pack(V4, b)))


def test_fr_32_geometry_is_the_caches_own() -> None:
    """The same calls, one after the other, on caches of other page sizes."""
    rows = random_rows(512, 128)
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(3))
    for page_size in (64, 16, 128, 1):
        cache = PagedCache.allocate(CacheLayout(V41, page_size, PAGE), 128 // page_size)
        cache.write(slots, rows)
        assert torch.equal(cache.read(slots), unpack(V41, *pack(V41, rows)))
        other = CacheLayout(V41, 2 * page_size, PAGE)
        with pytest.raises(LayoutError, match=f"page_size {page_size} where {2 * page_size} is expected"):
            cache.expect(other, "this plan")


def test_fr_34_a_cache_is_one_mapping() -> None:
    layout = CacheLayout(V41, 64, PAGE)
    chunks: Any = [torch.zeros(2, layout.stride, dtype=torch.uint8) for _ in range(2)]
    with pytest.raises(LayoutError, match="data of fp8_ds_mla_v41 must be one tensor"):
        PagedCache(layout, chunks)


def test_unwritten_bytes_reach_no_other_row() -> None:
    for layout in all_layouts(16):
        cache = PagedCache.allocate(layout, 2, fill=0xFF)  # NaN in every format that has one
        slots = slots_of(3, 16, 31)
        rows = random_rows(layout.record.dim, 3)
        cache.write(slots, rows)
        assert not cache.read(slots).isnan().any()
        again = cache.read(slots_of(16, -1, 3, 31, -1))
        assert torch.equal(again[[2, 0, 3]], cache.read(slots))
        assert (again[[1, 4]] == 0).all()


def test_slot_minus_one_writes_and_reads_nothing() -> None:
    cache = PagedCache.allocate(CacheLayout(V41, 4, TOKEN), 2, fill=SENTINEL)
    cache.write(slots_of(-1, -1), torch.full((2, 512), math.nan))
    assert (cache.data == SENTINEL).all()
    assert torch.equal(cache.read(slots_of(-1, -1)), torch.zeros(2, 512))
    values, scales = cache.read_bytes(slots_of(-1, 0))
    assert (values[0] == 0).all()
    assert (scales[0] == 0).all()
    assert (values[1] == SENTINEL).all()


def test_empty_work_is_fine() -> None:
    for layout in all_layouts(16):
        cache = PagedCache.allocate(layout, 0)
        assert cache.num_slots == 0
        cache.write(slots_of(), torch.zeros(0, layout.record.dim))
        assert cache.read(slots_of()).shape == (0, layout.record.dim)
        assert torch.equal(cache.read(slots_of(-1)), torch.zeros(1, layout.record.dim))


@pytest.mark.parametrize("slot", [-2, 32, 2**40, -(2**40)])
def test_slots_out_of_range_are_refused_before_anything_is_written(slot: int) -> None:
    cache = PagedCache.allocate(CacheLayout(V41, 16, PAGE), 2)
    with pytest.raises(InputError, match=rf"slot {slot} is outside this cache of 2 pages x 16 rows: need 0..31, or -1"):
        cache.write(slots_of(0, slot), torch.ones(2, 512))
    assert (cache.data == 0).all()
    for read in (cache.read, cache.read_bytes):
        with pytest.raises(InputError, match=f"slot {slot} is outside"):
            read(slots_of(0, slot))


@pytest.mark.parametrize(
    ("slots", "rows", "match"),
    [
        (torch.zeros(2, dtype=torch.int32), torch.ones(2, 512), "slots must be int64.*int32"),
        (torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 512), r"slots must be int64 \[N\].*\[2, 1\]"),
        (torch.zeros(3, dtype=torch.int64), torch.ones(2, 512), "2 rows on cpu for 3 slots"),
        (torch.arange(2), torch.ones(2, 511), r"\[2, 511\]"),
        (torch.arange(2), torch.ones(2, 512, dtype=torch.float64), "float64"),
    ],
)
def test_wrong_input_is_named_and_nothing_written(slots: torch.Tensor, rows: torch.Tensor, match: str) -> None:
    cache = PagedCache.allocate(CacheLayout(V41, 16, PAGE), 2)
    with pytest.raises(InputError, match=match):
        cache.write(slots, rows)
    assert (cache.data == 0).all()


def test_bytes_of_another_width_are_named() -> None:
    cache = PagedCache.allocate(CacheLayout(V4, 16, PAGE), 2)
    values, scales = pack(V4, torch.ones(2, 512))
    cache.write_bytes(torch.arange(2), values, scales)
    with pytest.raises(InputError, match=r"scales of fp8_ds_mla_v4 must be uint8 \[2, 8\]"):
        cache.write_bytes(torch.arange(2), values, scales[:, :7])
    with pytest.raises(InputError, match="values of"):
        cache.write_bytes(torch.arange(3), values, scales)


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


V4_PAGE = CacheLayout(V4, 64, PAGE)
POOLED = CacheLayout(INDEX_MXFP4_68, 64, POOL)
FP8 = CacheLayout(plain_fp8(Dialect.OCP), 64, ScalePlacement.NONE)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: PagedCache(V4_PAGE, torch.zeros(2, 37440)), "must be uint8.*float32"),
        (lambda: PagedCache(V4_PAGE, bytes_of(2, 64, 584)), r"must be uint8 \[pages, >= 37376\].*\[2, 64, 584\]"),
        (lambda: PagedCache(V4_PAGE, bytes_of(2, 37375)), "must be uint8"),
        (lambda: PagedCache(V4_PAGE, bytes_of(2, 37376)), "37376 bytes apart: need a multiple of 576"),
        (lambda: PagedCache(V4_PAGE, bytes_of(2, 2 * 37440)[:, ::2]), "a page must be dense"),
        (lambda: PagedCache(V4_PAGE, bytes_of(37440).expand(2, 37440)), "at least 37376 bytes apart"),
        (
            lambda: PagedCache(CacheLayout(V4, 64, PAGE, page_stride=576 * 100), bytes_of(2, 37440)),
            "need a multiple of 576, exactly 57600",
        ),
        (lambda: PagedCache(POOLED, bytes_of(2, 4096)), "scale_pool missing"),
        (lambda: PagedCache(V4_PAGE, bytes_of(2, 37440), bytes_of(2, 512)), "scale_pool given"),
        (lambda: PagedCache(POOLED, bytes_of(2, 4096), bytes_of(2, 255)), "scale_pool of index_mxfp4 must be uint8"),
        (lambda: PagedCache(POOLED, bytes_of(2, 4096), bytes_of(3, 256)), "3 pages on cpu, data has 2"),
        (lambda: PagedCache(FP8, bytes_of(2, 32768)), "tensor_scale missing"),
        (lambda: PagedCache(V4_PAGE, bytes_of(2, 37440), None, torch.ones(1)), "tensor_scale given"),
        (lambda: PagedCache(FP8, bytes_of(2, 32768), None, torch.tensor(1.0)), r"must be float32 \[1\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(build: Any, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        build()


def test_one_page_may_have_any_stride() -> None:
    PagedCache(V4_PAGE, bytes_of(1, 37376))
    PagedCache(CacheLayout(V4, 64, PAGE, page_stride=576 * 100), bytes_of(1, 37376))


def test_views_are_views() -> None:
    for layout in all_layouts(16):
        cache = PagedCache.allocate(layout, 2)
        cache.value_view().fill_(1)
        assert int((cache.data == 1).sum()) == 2 * 16 * layout.record.value_bytes
        cache.scale_view().fill_(2)
        pool = 0 if cache.scale_pool is None else int((cache.scale_pool == 2).sum())
        assert int((cache.data == 2).sum()) + pool == 2 * 16 * layout.record.scale_bytes
        if layout.value_tile is None:
            assert cache.value_view().shape == (2, 16, layout.record.value_bytes)


def test_slots_past_two_gigabytes_are_addressed_in_64_bits() -> None:
    """Views far into a buffer that is never touched in between (the kernel maps only what is written)."""
    layout = CacheLayout(PLAIN_FP32, 64, ScalePlacement.NONE)
    pages = 2**31 // layout.stride + 2
    cache = PagedCache(layout, torch.empty(pages, layout.stride, dtype=torch.uint8))
    slots = slots_of(cache.num_slots - 1, 0)
    rows = random_rows(512, 2)
    cache.write(slots, rows)
    assert torch.equal(cache.read(slots), rows)


def test_a_model_under_autograd_can_write() -> None:
    cache = PagedCache.allocate(CacheLayout(NVFP4_288, 16, TOKEN), 1)
    rows = random_rows(512, 2).requires_grad_()
    cache.write(slots_of(0, 1), rows)
    assert not cache.read(slots_of(0, 1)).requires_grad


def test_reading_is_safe_from_threads() -> None:
    cache = PagedCache.allocate(CacheLayout(NVFP4_288, 16, TOKEN), 2)
    cache.write(torch.arange(32), random_rows(512, 32))
    expected = cache.read(torch.arange(32))
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(torch.equal(cache.read(torch.arange(32)), expected)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(RECORDS)), st.sampled_from([1, 3, 16, 48]), st.integers(0, 5), st.data())
def test_any_rows_in_any_slots_come_back(name: str, page_size: int, gap: int, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(layouts_of(RECORDS[name], page_size)))
    cache, _ = interleaved(layout, num_pages=3, gap=gap)
    slots = data.draw(st.lists(st.integers(0, cache.num_slots - 1), unique=True, max_size=12))
    holes = data.draw(st.lists(st.integers(0, len(slots)), max_size=3))
    for hole in holes:
        slots.insert(hole, -1)
    rows = random_rows(layout.record.dim, len(slots), seed=data.draw(st.integers(0, 2**31)))
    cache.write(slots_of(*slots), rows)
    expected = unpack(layout.record, *pack(layout.record, rows, cache.tensor_scale), cache.tensor_scale)
    expected[slots_of(*slots) < 0] = 0
    assert torch.equal(cache.read(slots_of(*slots)), expected)
