"""Rows moved between layouts: exact where the target is not coarser, honest where it is."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.errors import InputError, LayoutError
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import (
    INDEX_BF16,
    INDEX_FP32,
    INDEX_MXFP4_68,
    NVFP4_288,
    PLAIN_BF16,
    PLAIN_FP32,
    RECORDS,
    Dialect,
    Record,
    ScaleFormat,
    index_fp8_132,
    plain_fp8,
    v4_584,
    v41_528,
)
from dsv41.hal.transcode import TranscodeReport, transcode

from .layout_cases import interleaved, layouts_of, random_rows

OCP, FNUZ = Dialect.OCP, Dialect.FNUZ
TOKEN, PAGE, NONE = ScalePlacement.TOKEN, ScalePlacement.PAGE, ScalePlacement.NONE
V4, V41, V41_FNUZ = v4_584(OCP), v41_528(OCP), v41_528(FNUZ)
FP32_SCALE, UE8M0_SCALE = (index_fp8_132(OCP, form) for form in (ScaleFormat.FP32, ScaleFormat.UE8M0))


def layout_of(record: Record, page_size: int = 16) -> CacheLayout:
    return CacheLayout(record, page_size, PAGE if record.scale_bytes else NONE)


def cache_of(record: Record, rows: torch.Tensor) -> PagedCache:
    cache = PagedCache.allocate(layout_of(record), -(-len(rows) // 16))
    cache.write(torch.arange(len(rows)), rows)
    return cache


def move(source: PagedCache, target: Record | CacheLayout, count: int) -> tuple[PagedCache, TranscodeReport]:
    layout = target if isinstance(target, CacheLayout) else layout_of(target)
    cache = PagedCache.allocate(layout, -(-count // layout.page_size))
    return cache, transcode(source, cache, torch.arange(count), torch.arange(count))


KV = [record for record in RECORDS.values() if record.dim == 512]
INDEX = [record for record in RECORDS.values() if record.dim == 128]
EXACT = {
    *((record.name, record.name) for record in RECORDS.values()),
    *((record.name, PLAIN_FP32.name) for record in KV),
    *((record.name, INDEX_FP32.name) for record in INDEX),
    *((record.name, PLAIN_BF16.name) for record in KV if record != PLAIN_FP32),
    *((record.name, INDEX_BF16.name) for record in INDEX if record != INDEX_FP32),
    *((make(OCP).name, make(FNUZ).name) for make in (v4_584, v41_528)),
    *((index_fp8_132(OCP, f).name, index_fp8_132(FNUZ, f).name) for f in (ScaleFormat.FP32, ScaleFormat.UE8M0)),
    (FP32_SCALE.name, UE8M0_SCALE.name),
    (FP32_SCALE.name, index_fp8_132(FNUZ, ScaleFormat.UE8M0).name),
    (plain_fp8(OCP).name, V41.name),
}


@pytest.mark.parametrize(
    ("source", "target"),
    [*product(KV, KV), *product(INDEX, INDEX)],
    ids=lambda record: record.name,
)
def test_every_pair_of_records(source: Record, target: Record) -> None:
    rows = random_rows(source.dim, 40)
    cache = cache_of(source, rows)
    before = cache.read(torch.arange(40))
    moved, report = move(cache, target, 40)
    after = moved.read(torch.arange(40))
    assert report.rows == 40
    assert report.nan_rows == 0
    assert report.exact == torch.equal(before, after)
    assert (report.max_relative_error == 0) == report.exact
    assert report.max_relative_error <= 0.26  # half an e2m1 step, at worst
    if (source.name, target.name) in EXACT:
        assert report.exact
    for row in range(40):
        assert (after[row] - before[row]).abs().max() <= before[row].abs().max() * report.max_relative_error * 1.001


def test_fr_20_ocp_to_fnuz_keeps_codes_and_doubles_scales() -> None:
    """Every code with every exponent byte, through the bytes alone."""
    source = PagedCache.allocate(layout_of(V41), 16)
    codes = torch.arange(256, dtype=torch.uint8).repeat(2).expand(256, 512).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1).expand(256, 16).contiguous()
    source.write_bytes(torch.arange(256), codes, scales)
    target, report = move(source, V41_FNUZ, 256)
    values, doubled = target.read_bytes(torch.arange(256))
    assert doubled[:, 0].tolist() == [*range(1, 255), 254, 255]
    assert values[0, :256].tolist() == [
        0x00 if code == 0x80 else 0x80 if code in (0x7F, 0xFF) else code for code in range(256)
    ]
    before, after = source.read(torch.arange(254)), target.read(torch.arange(254))
    assert torch.equal(before.nan_to_num(1e9), after.nan_to_num(1e9))
    assert target.read(torch.tensor([255])).isnan().all()
    assert report.nan_rows == 256
    assert not report.exact  # the row whose exponent was 254 already, now halved
    assert transcode(source, target, torch.arange(254), torch.arange(254)).exact


def test_fr_20_the_other_records_cross_too() -> None:
    for make in (v4_584, lambda d: index_fp8_132(d, ScaleFormat.FP32), lambda d: index_fp8_132(d, ScaleFormat.UE8M0)):
        record = make(OCP)
        rows = random_rows(record.dim, 30)
        rows[3, 7] = math.nan
        rows[4] = -0.0
        source = cache_of(record, rows)
        target, report = move(source, make(FNUZ), 30)
        assert report == TranscodeReport(rows=30, exact=True, max_relative_error=0.0, nan_rows=1)
        before, after = (cache.read(torch.arange(30)).nan_to_num(1e9) for cache in (source, target))
        assert torch.equal(before, after)
        if record.scale_pad:
            assert (target.scale_view()[..., -1] == 0).all()


@pytest.mark.parametrize("exponent", [127, 140])
def test_fr_20_every_fnuz_code_crosses_to_ocp_by_value(exponent: int) -> None:
    """A row of each code, whose group has a scale that holds it."""
    source = PagedCache.allocate(layout_of(V41_FNUZ), 16)
    codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 512)
    source.write_bytes(torch.arange(256), codes, torch.full((256, 16), exponent, dtype=torch.uint8))
    target, report = move(source, V41, 256)
    assert report == TranscodeReport(rows=256, exact=True, max_relative_error=0.0, nan_rows=1)
    before, after = (cache.read(torch.arange(256)) for cache in (source, target))
    assert before[0x80].isnan().all()
    assert torch.equal(before.nan_to_num(1e9), after.nan_to_num(1e9))
    assert float(after[0x7F, 0]) == 240 * 2.0 ** (exponent - 127)


def test_fnuz_to_ocp_is_exact_unless_a_group_reaches_240() -> None:
    rows = random_rows(512, 40)
    source = cache_of(V41_FNUZ, rows)
    codes, _ = source.read_bytes(torch.arange(40))
    reaches = ((codes & 0x7F) == 0x7F).any(1)
    ordinary = (~reaches).nonzero().flatten()
    assert 0 < len(ordinary) < 40
    target = PagedCache.allocate(layout_of(V41), 3)
    assert transcode(source, target, ordinary, ordinary).exact
    assert transcode(source, target, torch.arange(40), torch.arange(40)).max_relative_error < 2.0**-8


def test_placements_and_tiles_change_by_copying_bytes() -> None:
    """Down to NaN payloads and negative zeros, which only a copy preserves."""
    generator = torch.Generator().manual_seed(5)
    for record in RECORDS.values():
        for old, new in product(layouts_of(record, 16), layouts_of(record, 32)):
            source, _ = interleaved(old, 4, gap=1)
            slots = torch.arange(source.num_slots)
            values = torch.randint(0, 256, (len(slots), record.value_bytes), dtype=torch.uint8, generator=generator)
            scales = torch.randint(0, 256, (len(slots), record.scale_bytes), dtype=torch.uint8, generator=generator)
            source.write_bytes(slots, values, scales)
            target, _ = interleaved(new, 2, gap=2)
            report = transcode(source, target, slots, slots.flip(0))
            assert report.exact
            assert report.max_relative_error == 0
            found = target.read_bytes(slots.flip(0))
            assert torch.equal(found[0], values)
            assert torch.equal(found[1], scales)


def test_another_tensor_scale_is_not_copied_over() -> None:
    record = plain_fp8(OCP)
    source = cache_of(record, random_rows(512, 16))
    target = PagedCache.allocate(layout_of(record), 1)
    assert target.tensor_scale is not None
    target.tensor_scale.fill_(0.25)
    report = transcode(source, target, torch.arange(16), torch.arange(16))
    assert torch.allclose(target.read(torch.arange(16)), source.read(torch.arange(16)), atol=2.0**-9)
    assert report.max_relative_error < 0.01


def test_528_to_bf16_is_exact_but_at_the_extremes() -> None:
    source = PagedCache.allocate(layout_of(V41), 16)
    codes = torch.arange(256, dtype=torch.uint8).repeat(2).expand(256, 512).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1).expand(256, 16).contiguous()
    source.write_bytes(torch.arange(256), codes, scales)
    target = PagedCache.allocate(layout_of(PLAIN_BF16), 16)
    middle = torch.arange(10, 246)
    assert transcode(source, target, middle, middle).exact
    assert not transcode(source, target, torch.tensor([0]), torch.tensor([0])).exact


def test_the_error_is_the_worst_of_any_group() -> None:
    rows = torch.ones(2, 512)
    rows[1, 100] = 1 + 2.0**-5  # half a bf16-sized step too fine for e4m3: rounds to 1
    report = move(cache_of(PLAIN_FP32, rows), V41, 2)[1]
    assert not report.exact
    assert report.max_relative_error == pytest.approx(2.0**-5 / (1 + 2.0**-5))


def test_what_becomes_infinite_is_infinitely_wrong() -> None:
    rows = torch.ones(1, 512)
    rows[0, 0] = torch.finfo(torch.float32).max
    assert move(cache_of(PLAIN_FP32, rows), PLAIN_BF16, 1)[1].max_relative_error == math.inf


def test_nan_rows_are_counted_and_leave_other_groups_alone() -> None:
    rows = random_rows(512, 4)
    rows[2, 40] = math.nan
    target, report = move(cache_of(PLAIN_FP32, rows), V41, 4)
    assert report.nan_rows == 1
    assert report.max_relative_error < 0.07
    assert not report.exact  # the other 31 dims of the group went with it
    assert int(target.read(torch.arange(4)).isnan().sum()) == 32


def test_pairs_with_minus_one_are_skipped() -> None:
    source = cache_of(V41, random_rows(512, 16))
    target = PagedCache.allocate(CacheLayout(V41, 16, TOKEN), 1, fill=7)
    report = transcode(source, target, torch.tensor([3, -1, 5]), torch.tensor([0, 1, -1]))
    assert report.rows == 1
    assert torch.equal(target.read(torch.tensor([0])), source.read(torch.tensor([3])))
    assert (target.value_view()[:, 1:] == 7).all()
    assert transcode(source, target, torch.tensor([-1]), torch.tensor([-1])) == TranscodeReport(0, True, 0.0, 0)


def test_more_rows_than_a_chunk() -> None:
    count = 9000
    source = PagedCache.allocate(CacheLayout(INDEX_MXFP4_68, 100, PAGE), 90)
    source.write(torch.arange(count), random_rows(128, count))
    target, report = move(source, CacheLayout(INDEX_BF16, 50, NONE), count)
    assert report.exact
    assert report.rows == count
    assert torch.equal(target.read(torch.arange(count)), source.read(torch.arange(count)))


def test_refusals_come_before_writing() -> None:
    source = cache_of(V41, random_rows(512, 16))
    target = PagedCache.allocate(layout_of(NVFP4_288), 1)
    with pytest.raises(LayoutError, match="fp8_ds_mla_v41 has rows of 512 dims, index_mxfp4 of 128"):
        transcode(source, PagedCache.allocate(layout_of(INDEX_MXFP4_68), 1), torch.arange(1), torch.arange(1))
    for pair in ((torch.tensor([0, 16]), torch.tensor([0, 1])), (torch.tensor([0, 1]), torch.tensor([0, 16]))):
        with pytest.raises(InputError, match="slot 16 is outside"):
            transcode(source, target, *pair)
    with pytest.raises(InputError, match="2 source slots for 1 target slots"):
        transcode(source, target, torch.arange(2), torch.arange(1))
    assert (target.data == 0).all()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KV), st.sampled_from(KV), st.integers(0, 2**31), st.integers(-8, 8))
def test_going_on_to_float32_never_adds_an_error(old: Record, new: Record, seed: int, exponent: int) -> None:
    source = cache_of(old, random_rows(512, 5, seed) * 2.0**exponent)
    target, first = move(source, new, 5)
    wide, second = move(target, PLAIN_FP32, 5)
    assert second.exact
    direct = move(source, PLAIN_FP32, 5)[0]
    assert first.exact == torch.equal(wide.read(torch.arange(5)), direct.read(torch.arange(5)))


def test_a_renamed_record_is_another_record() -> None:
    """A record of the same bytes under another name is decoded and encoded, never taken for the other."""
    custom = replace(V4, name="toy", scale_pad=0)
    source = cache_of(V4, random_rows(512, 4))
    target, report = move(source, custom, 4)
    assert report.exact
    assert target.layout.record.scale_bytes == 7
