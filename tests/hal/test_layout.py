"""What a layout says about a page, and which layouts and combinations are refused."""

import inspect
import io
import json
import math
import tokenize
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41.errors import LayoutError
from dsv41.hal.layout import WHOLE_PAGE, CacheLayout, CacheLayouts, ScalePlacement
from dsv41.hal.records import (
    INDEX_BF16,
    INDEX_MXFP4_68,
    NVFP4_288,
    PLAIN_BF16,
    PLAIN_FP32,
    RECORDS,
    Dialect,
    ScaleFormat,
    index_fp8_132,
    v4_584,
    v41_528,
)

from .layout_cases import all_layouts, layouts_of

ROOT = Path(__file__).parents[2]
NONE, TOKEN, PAGE, POOL = ScalePlacement.NONE, ScalePlacement.TOKEN, ScalePlacement.PAGE, ScalePlacement.POOL
V4, V41, V41_FNUZ = v4_584(Dialect.OCP), v41_528(Dialect.OCP), v41_528(Dialect.FNUZ)
INDEX_FP8 = index_fp8_132(Dialect.OCP, ScaleFormat.FP32)

CHUNKS = CacheLayout(INDEX_MXFP4_68, 64, POOL, value_tile=(WHOLE_PAGE, 16), scale_tile=(WHOLE_PAGE, 1))

# (record, page size): page bytes, distance between pages
PAGES = {
    ("fp8_ds_mla_v4", 32): (18688, 19008),
    ("fp8_ds_mla_v4", 64): (37376, 37440),
    ("fp8_ds_mla_v4", 128): (74752, 74880),
    ("fp8_ds_mla_v4", 256): (149504, 149760),
    ("fp8_ds_mla_v41", 32): (16896, 16896),
    ("fp8_ds_mla_v41", 64): (33792, 33792),
    ("fp8_ds_mla_v41", 128): (67584, 67584),
    ("fp8_ds_mla_v41", 256): (135168, 135168),
    ("nvfp4_ds_mla", 32): (9216, 9216),
    ("nvfp4_ds_mla", 64): (18432, 18432),
    ("nvfp4_ds_mla", 128): (36864, 36864),
    ("nvfp4_ds_mla", 256): (73728, 73728),
    ("bfloat16", 64): (65536, 65536),
    ("fp8_e4m3", 64): (32768, 32768),
    ("float32", 64): (131072, 131072),
    ("index_mxfp4", 32): (2176, 2176),
    ("index_mxfp4", 64): (4352, 4352),
    ("index_mxfp4", 256): (17408, 17408),
    ("index_fp8", 32): (4224, 4224),
    ("index_fp8", 64): (8448, 8448),
    ("index_fp8", 256): (33792, 33792),
}


def test_fr_29_pages_and_their_tails_are_published() -> None:
    for (name, page_size), (page_bytes, stride) in PAGES.items():
        for placement in (TOKEN, PAGE) if RECORDS[name].scale_bytes else (NONE,):
            layout = CacheLayout(RECORDS[name], page_size, placement)
            assert (layout.page_bytes, layout.stride, layout.tail_bytes) == (page_bytes, stride, stride - page_bytes)


def test_a_pool_takes_the_scales_out_of_the_page() -> None:
    layout = CacheLayout(INDEX_MXFP4_68, 64, POOL)
    assert (layout.page_bytes, layout.pool_page_bytes, layout.row_bytes) == (4096, 256, 68)
    assert CacheLayout(INDEX_MXFP4_68, 64, PAGE).pool_page_bytes == 0


def test_fr_18_the_placement_must_be_said() -> None:
    parameters = inspect.signature(CacheLayout).parameters
    for name in ("record", "page_size", "scale_placement"):
        assert parameters[name].default is inspect.Parameter.empty


@pytest.mark.parametrize("page_size", [1, 64])
def test_strides_follow_the_alignment(page_size: int) -> None:
    for layout in all_layouts(page_size):
        assert layout.stride % layout.record.alignment == 0
        assert 0 <= layout.tail_bytes < layout.alignment


def test_fr_31_a_shared_block_keeps_every_record_aligned() -> None:
    for window, compressed in ((V4, V4), (V41, V41), (V41, NVFP4_288), (V41_FNUZ, NVFP4_288)):
        for index in (INDEX_MXFP4_68, INDEX_FP8):
            layouts = CacheLayouts(*(CacheLayout(record, 64, PAGE) for record in (window, compressed, index)))
            block = layouts.block_alignment
            assert all(block % record.alignment == 0 for record in (window, compressed, index))
    own = CacheLayout(V41, 64, TOKEN, alignment=V41.bytes)
    both = CacheLayouts(own, CacheLayout(NVFP4_288, 64, TOKEN, alignment=NVFP4_288.bytes), layouts.index)
    assert both.block_alignment == math.lcm(528, 288, 16)


def test_fr_31_cache_sizes_stand_in_the_records_module_alone() -> None:
    """Row sizes and strides of caches, as numbers in code. (512 and 1024 mean other things too.)"""
    sizes = {str(size) for size in (576, 584, 528, 288, 656)}
    found = []
    for room in ("dsv41", "hal", "backends"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if path == ROOT / "hal" / "records.py":
                continue
            for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
                if token.type == tokenize.NUMBER and token.string in sizes:
                    found.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {token.line.strip()}")
    assert not found, "take these from the record or the layout:\n" + "\n".join(found)


@pytest.mark.parametrize("page_size", [1, 64])
def test_layouts_survive_json(page_size: int) -> None:
    for layout in [*all_layouts(page_size), CacheLayout(V4, page_size, PAGE, page_stride=576 * 1000, alignment=64)]:
        assert CacheLayout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout


def test_json_names_what_must_be_said() -> None:
    data = CacheLayout(V41_FNUZ, 64, TOKEN).to_dict()
    assert data["record"] == "fp8_ds_mla_v41_fnuz"
    assert (data["dialect"], data["scale_format"], data["scale_placement"]) == ("fnuz", "ue8m0", "token")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"record": "fp8_ds_mla"}, "unknown record 'fp8_ds_mla'; known are fp8_ds_mla_v4"),
        ({"scale_placement": "inline"}, "unknown scale_placement 'inline'; known are none, token"),
        ({"dialect": "fnuz"}, "dialect is 'fnuz' but must be 'ocp'"),
        ({"scale_format": "fp32"}, "scale_format is 'fp32' but must be 'ue8m0'"),
        ({"value_bytes": 512}, "value_bytes is 512 but must be 576"),
        ({"page_bytes": 37440}, "page_bytes is 37440 but must be 37376"),
        ({"encodings": [[0, 512, "e4m3", 64]]}, "encodings is"),
        ({"record": [1]}, "unknown record"),
        ({"record": None}, "unknown record"),
        ({"scale_placement": [1]}, "unknown scale_placement"),
        ({"color": "red"}, "color is 'red' but must be 'absent'"),
        ({"page_size": "64"}, "page_size '64'"),
        ({"page_size": True}, "page_size True"),
        ({"value_tile": 16}, "value_tile 16"),
        ({"value_tile": [16, 16, 16]}, "value_tile"),
        ({"value_tile": [7, 16]}, "does not divide"),
        ({"alignment": -1}, "alignment -1"),
        ({"page_stride": 1.5}, "page_stride 1.5"),
        ({"scale_lanes": 2.0}, "scale_lanes 2.0"),
    ],
)
def test_json_that_lies_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        CacheLayout.from_dict({**CacheLayout(V4, 64, PAGE).to_dict(), **changes})


@pytest.mark.parametrize("data", [5, None, "bfloat16", [1]])
def test_json_of_another_shape_is_refused(data: Any) -> None:
    with pytest.raises(LayoutError, match="no cache layout"):
        CacheLayout.from_dict(data)


def test_json_that_leaves_out_is_refused() -> None:
    for key in CacheLayout(V4, 64, PAGE).to_dict():
        data = CacheLayout(V4, 64, PAGE).to_dict()
        del data[key]
        with pytest.raises(LayoutError, match=key):
            CacheLayout.from_dict(data)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: CacheLayout(V4, 0, PAGE), "page_size 0"),
        (lambda: CacheLayout(NVFP4_288, 64, NONE), "scale_placement 'none' for nvfp4_ds_mla.*32 scale bytes.*declare"),
        (lambda: CacheLayout(PLAIN_BF16, 64, PAGE), "scale_placement 'page' for bfloat16.*0 scale bytes.*'none'"),
        (lambda: CacheLayout(V4, 64, PAGE, alignment=-4), "alignment -4"),
        (lambda: CacheLayout(V4, 64, PAGE, page_stride=36864), "page_stride 36864 is less than the 37376 bytes"),
        (lambda: CacheLayout(V4, 64, PAGE, page_stride=37376), "no multiple of its alignment 576: use 37440"),
        (lambda: CacheLayout(V4, 64, TOKEN, value_tile=(16, 16)), "have no tiles"),
        (lambda: CacheLayout(INDEX_FP8, 24, PAGE, value_tile=(16, 16)), "24 rows x 128 bytes: change the tile or"),
        (lambda: CacheLayout(INDEX_FP8, 64, PAGE, value_tile=(16, 24)), "does not divide"),
        (lambda: CacheLayout(INDEX_FP8, 64, PAGE, value_tile=(-16, 16)), "does not divide"),
        (lambda: CacheLayout(INDEX_FP8, 64, PAGE, value_tile=(16, 0)), "does not divide"),
        (lambda: CacheLayout(INDEX_BF16, 64, NONE, scale_tile=(16, 1)), "does not divide"),
        (lambda: replace(CHUNKS, page_size=24, scale_lanes=16), "scale_lanes 16 .* page of 24 rows: change"),
        (lambda: replace(CHUNKS, scale_lanes=0), "scale_lanes 0"),
        (lambda: CacheLayout(INDEX_MXFP4_68, 64, TOKEN, scale_lanes=16), "its scales are in no tiles"),
        (lambda: CacheLayout(INDEX_MXFP4_68, 64, POOL, scale_lanes=16), "its scales are in no tiles"),
    ],
)
def test_layouts_that_cannot_be_are_refused(build: Any, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        build()


def test_with_page_size_drops_a_stride_made_for_the_old_pages() -> None:
    layout = CacheLayout(V4, 64, PAGE, page_stride=576 * 100)
    assert layout.with_page_size(64) == layout
    assert layout.with_page_size(128) == CacheLayout(V4, 128, PAGE)


def test_fr_26_tiles_are_part_of_the_layout() -> None:
    flat = CacheLayout(INDEX_FP8, 64, PAGE)
    shuffled = replace(flat, value_tile=(16, 16))
    assert shuffled.differences(flat) == ["value_tile (16, 16) where None is expected"]
    assert shuffled.with_page_size(128).value_tile == (16, 16)
    pool = CacheLayout(INDEX_MXFP4_68, 64, POOL, value_tile=(WHOLE_PAGE, 16))
    assert not pool.differences(replace(pool, value_tile=(64, 16)))
    assert pool.with_page_size(128).differences(replace(pool, value_tile=(64, 16), page_size=128))
    assert replace(CHUNKS, scale_lanes=16).differences(CHUNKS) == ["scale_lanes 16 where 1 is expected"]


def test_differences_name_each_misreading_and_ignore_strides() -> None:
    mine, theirs = CacheLayout(V41, 64, TOKEN), CacheLayout(V41_FNUZ, 32, PAGE)
    assert mine.differences(theirs) == [
        "record fp8_ds_mla_v41 where fp8_ds_mla_v41_fnuz is expected",
        "page_size 64 where 32 is expected",
        "scale_placement token where page is expected",
    ]
    assert not mine.differences(replace(mine, page_stride=512 * 100))


def test_fr_25_no_two_layouts_of_a_record_pass_for_one_another() -> None:
    for record in RECORDS.values():
        layouts = layouts_of(record, 64)
        for i, mine in enumerate(layouts):
            for j, theirs in enumerate(layouts):
                assert bool(mine.differences(theirs)) == (i != j)


def test_describe_is_one_line_of_facts() -> None:
    text = CacheLayout(V4, 64, PAGE).describe()
    assert text == (
        "fp8_ds_mla_v4: 64 rows a page of 584 bytes, scales after the page's rows, page 37376 + 64 tail = 37440 bytes"
    )
    assert "scales in a pool of their own, values in tiles of 64 rows x 16 bytes" in (
        CacheLayout(INDEX_MXFP4_68, 64, POOL, value_tile=(WHOLE_PAGE, 16)).describe()
    )
    assert "tiles of 64 rows x 1 bytes, those of every 16th row together, page" in (
        replace(CHUNKS, scale_lanes=16).describe()
    )


def layouts(window: Any = V41, compressed: Any = NVFP4_288, index: Any = INDEX_MXFP4_68) -> CacheLayouts:
    def plain(record: Any) -> CacheLayout:
        return CacheLayout(record, 64, PAGE if record.scale_bytes else NONE)

    return CacheLayouts(plain(window), plain(compressed), plain(index))


def test_the_three_caches_go_together() -> None:
    for pair in ((V41, NVFP4_288), (V41_FNUZ, NVFP4_288), (V4, V4), (PLAIN_FP32, PLAIN_FP32), (V41, PLAIN_BF16)):
        layouts(*pair)


@pytest.mark.parametrize(
    ("window", "compressed", "match"),
    [
        (NVFP4_288, NVFP4_288, "nvfp4_ds_mla for the window cache.*use fp8_ds_mla_v41"),
        (NVFP4_288, V41, "nvfp4_ds_mla for the window cache"),
        (
            V4,
            NVFP4_288,
            "beside a window cache in fp8_ds_mla_v4: the window must be its MXFP8 companion, fp8_ds_mla_v41",
        ),
        (PLAIN_BF16, NVFP4_288, "MXFP8 companion"),
        (V41, INDEX_FP8, "512 dims beside compressed rows of 128"),
    ],
)
def test_combinations_that_no_model_writes_are_refused(window: Any, compressed: Any, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        layouts(window, compressed)


def test_index_keys_share_the_slots_of_compressed_rows() -> None:
    three = layouts()
    with pytest.raises(LayoutError, match="compressed pages of 64 rows beside index pages of 32"):
        CacheLayouts(three.window, three.compressed, three.index.with_page_size(32))
    resized = three.with_page_size(window=128, compressed=32)
    assert [x.page_size for x in (resized.window, resized.compressed, resized.index)] == [128, 32, 32]
    assert three.with_page_size() == three
    with pytest.raises(LayoutError, match="page_size 0"):
        three.with_page_size(window=0)


@given(st.sampled_from(sorted(RECORDS)), st.integers(1, 300), st.data())
def test_any_page_size_gives_a_layout_that_survives_json(name: str, page_size: int, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(layouts_of(RECORDS[name], page_size)))
    assert layout.stride >= layout.page_bytes >= page_size * layout.record.value_bytes
    assert layout.page_bytes + layout.pool_page_bytes == page_size * layout.row_bytes
    assert CacheLayout.from_dict(layout.to_dict()) == layout
