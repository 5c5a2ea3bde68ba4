"""Rows go where their layout says, in its bytes, and come back: in every record, placement and tiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable import rows
from dsv41.backends.portable.caches import kernel_arguments
from dsv41.backends.portable.formats import RowFormat
from dsv41.backends.portable.launch import launch
from dsv41.backends.reference.quantize import round_trip
from dsv41.errors import LayoutError
from dsv41.hal.layout import CacheLayout, PagedCache
from dsv41.hal.records import NVFP4_288, RECORDS, Dialect, Encoding, Field, Record, ScaleFormat, v41_528

from ...hal.layout_cases import all_layouts, random_rows
from .common import DEVICE, copy_of, jit, layout_of, make_cache, memory, name_of

# numpy says so where numbers become infinite, as they shall.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

PAGE_SIZE = 16
CUT = [
    layout for layout in all_layouts(PAGE_SIZE) if layout.scale_tile and layout.record.scale_format is ScaleFormat.FP32
]
"""Their tiles of one byte cut float32 scales, which nobody's do."""
LAYOUTS = [layout for layout in all_layouts(PAGE_SIZE) if layout not in CUT]
SLOTS = [17, 63, -1, 0, 38, 16, 31, 5]
"""Page borders, the last slot, none, and pages out of order."""


@jit
def _store(x, slots, cache, cache_pool, cache_scale, cache_stride, cache_pool_stride, F: tl.constexpr):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        numbers = tl.load(x + row * F.dim + tl.arange(0, F.dim))
        rows.store_row((cache, cache_pool, cache_scale, cache_stride, cache_pool_stride), slot, numbers, F)


@jit
def _load(
    out,
    slots,
    cache,
    cache_pool,
    cache_scale,
    cache_stride,
    cache_pool_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    F: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    slot = tl.load(slots + row)
    for part in tl.static_range(F.dim // WIDTH):
        found = (cache, cache_pool, cache_scale, cache_stride, cache_pool_stride)
        x = rows.load_rows(found, slot, slot >= 0, part * WIDTH, WIDTH, F)
        tl.store(out + row[:, None] * F.dim + part * WIDTH + tl.arange(0, WIDTH)[None, :], x)


@jit
def _round(x, out, ROWS: tl.constexpr, F: tl.constexpr):
    place = tl.arange(0, ROWS)[:, None] * F.dim + tl.arange(0, F.dim)[None, :]
    tl.store(out + place, rows.round_trip(tl.load(x + place), F))


@jit
def _page_distance(data, stride, slot, out, F: tl.constexpr):
    page, row = rows._values((data, None, None, stride, 0), tl.load(slot), F)
    tl.store(out, page.to(tl.int64) - data.to(tl.int64))
    tl.store(out + 1, row.to(tl.int64))


def _arguments(cache: PagedCache) -> dict[str, Any]:
    return {
        **kernel_arguments("cache", cache.data, cache.scale_pool, cache.tensor_scale),
        "F": RowFormat.of(cache.layout),
    }


def _slots(*slots: int) -> Tensor:
    return torch.tensor(slots or SLOTS, device=DEVICE)


def hard_rows(dim: int) -> Tensor:
    """Rows of very different sizes, zeros of both signs, numbers far below and above what any scale can follow."""
    x = random_rows(dim, len(SLOTS)) * torch.logspace(-7, 5, len(SLOTS))[:, None]
    x[0], x[1] = 0.0, -0.0
    x[3, ::2] = 1e-9
    x[3, 1::8] = -300.0
    x[4] = torch.arange(dim) % 33 - 16.0  # ties of every encoding
    x[5, 3] = torch.finfo(torch.float32).max
    x[5, 40] = -1e-42
    return x.to(DEVICE)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def read(cache: PagedCache, slots: Tensor, width: int) -> Tensor:
    out = torch.full((len(slots), cache.layout.record.dim), 9.0, device=DEVICE)
    launch(_load, (1,), out=out, slots=slots, ROWS=len(slots), WIDTH=width, **_arguments(cache))
    return out


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_a_row_is_written_where_and_as_its_layout_says(layout: CacheLayout) -> None:
    """Every byte is compared, those between rows and around pages too."""
    expected, slots, x = make_cache(layout), _slots(), hard_rows(layout.record.dim)
    found = copy_of(expected)
    launch(_store, (len(slots),), x=x, slots=slots, **_arguments(found))
    expected.write(slots, x)
    assert torch.equal(memory(found), memory(expected))


@pytest.mark.parametrize(
    ("layout", "width"),
    [(layout, 64) for layout in LAYOUTS]
    + [
        (layout_of(record, PAGE_SIZE), width)
        for record in RECORDS.values()
        for width in (32, 128)
        if record.fields[0].stop % width == 0
    ],
    ids=name_of,
)
def test_a_row_comes_back(layout: CacheLayout, width: int) -> None:
    """For slot -1 nothing is read: it is zeros, although all unwritten memory is NaN."""
    cache, slots = make_cache(layout), _slots()
    cache.write(slots, hard_rows(layout.record.dim))
    same(read(cache, slots, width), cache.read(slots))


@pytest.mark.parametrize("name", RECORDS)
def test_nan_is_kept(name: str) -> None:
    """It makes its scale group NaN, or stays alone where there is none, and touches no other number."""
    cache, slots = make_cache(layout_of(RECORDS[name], PAGE_SIZE)), _slots(3, 20)
    x = random_rows(RECORDS[name].dim, 2).to(DEVICE)
    x[0, 37], x[1, -1] = torch.nan, -torch.nan
    expected = copy_of(cache)
    launch(_store, (2,), x=x, slots=slots, **_arguments(cache))
    expected.write(slots, x)
    assert expected.read(slots).isnan().any(1).all()
    same(cache.read(slots), expected.read(slots))
    same(read(cache, slots, 32), expected.read(slots))


@pytest.mark.parametrize("name", [name for name, record in RECORDS.items() if not record.tensor_scale])
def test_a_round_trip_is_what_a_cache_gives_back(name: str) -> None:
    record = RECORDS[name]
    x, out = hard_rows(record.dim), torch.empty(len(SLOTS), record.dim, device=DEVICE)
    x[2, 37] = torch.nan
    launch(_round, (1,), x=x, out=out, ROWS=len(SLOTS), F=RowFormat.of(layout_of(record, PAGE_SIZE)))
    same(out, round_trip(record, x))


def test_a_dialect_taken_for_the_other_shows() -> None:
    caches = {dialect: make_cache(layout_of(v41_528(dialect), PAGE_SIZE)) for dialect in Dialect}
    written, other = caches[Dialect.FNUZ], caches[Dialect.OCP]
    slots, x = _slots(1), random_rows(512, 1).to(DEVICE)
    written.write(slots, x)
    mistaken = PagedCache(other.layout, written.data)
    right, wrong = read(written, slots, 64), read(mistaken, slots, 64)
    assert ((right - x).norm() / x.norm()) < 0.05
    assert ((wrong / 2 - x).norm() / x.norm()) < 0.05


@pytest.mark.parametrize("stride", [(1 << 31) + 512, (1 << 28) + 512])
def test_offsets_do_not_wrap(stride: int) -> None:
    """Pages lie further apart, or further from the first, than 32 bits count."""
    layout = layout_of(NVFP4_288, PAGE_SIZE)
    data, out = torch.zeros(16, dtype=torch.uint8, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    slot = _slots(9 * PAGE_SIZE + 3)
    launch(_page_distance, (1,), data=data, stride=stride, slot=slot, out=out, F=RowFormat.of(layout))
    assert out.tolist() == [9 * stride, 3]


def test_a_format_survives_as_numbers() -> None:
    formats = [RowFormat.of(layout) for layout in LAYOUTS]
    assert [RowFormat.from_numbers(found.numbers()) for found in formats] == formats
    assert len(set(formats)) == len(formats)


def test_a_layout_without_kernels_is_refused() -> None:
    for layout in CUT:
        with pytest.raises(LayoutError, match="tiles that cut a number in two"):
            RowFormat.of(layout)
    fields = (Field(0, 64, Encoding.BF16, 0), Field(64, 128, Encoding.E4M3, 64))
    record = Record("reversed", 128, fields, ScaleFormat.UE8M0, Dialect.OCP, 16)
    with pytest.raises(LayoutError, match="portable cannot read reversed"):
        RowFormat.of(CacheLayout(record, PAGE_SIZE, layout_of(NVFP4_288).scale_placement))
