"""Rotations and inserts against the reference's, bytes and all."""

from __future__ import annotations

import pytest
import torch

from dsv41.backends.portable.caches import flat
from dsv41.backends.portable.insert import insert_rows
from dsv41.backends.reference.norm import rms_norm, rotate
from dsv41.config import DeepseekV41Config
from dsv41.hal.layout import CacheLayout
from dsv41.hal.records import INDEX_MXFP4_68, NVFP4_288, PLAIN_BF16, RECORDS, Dialect, v41_528
from dsv41.rope import cos_sin_table

from ...hal.layout_cases import layouts_of
from .common import DEVICE, copy_of, covering, layout_of, make_cache, memory, name_of, noise

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BF16, FP32 = torch.bfloat16, torch.float32
PAGE_SIZE = 16
EPS = 1e-20
TABLE = cos_sin_table(DeepseekV41Config(), 1, 4096, DEVICE)
POSITIONS = torch.tensor([0, 4095, -1, 130, 77], device=DEVICE)
SLOTS = torch.tensor([16, 0, -1, -1, 63], device=DEVICE)
"""A page border, the first slot, none for padding, none for a token, the last slot."""

KEYS = [
    layout
    for record in RECORDS.values()
    if record.dim == 128
    for layout in layouts_of(record, PAGE_SIZE)
    if not (layout.scale_tile and "fp32" in str(record.scale_format))
]


@pytest.mark.parametrize(
    ("layout", "dtype", "ratio"), covering([*KEYS, layout_of(NVFP4_288)], (BF16, FP32), (1, 2)), ids=name_of
)
def test_rows_are_normed_rotated_and_inserted(layout: CacheLayout, dtype: torch.dtype, ratio: int) -> None:
    """At the position of the group's first token; rows without a slot may be anything, and nothing of them is read."""
    dim = layout.record.dim
    expected = make_cache(layout)
    found = copy_of(expected)
    x = (torch.where(noise(5, dim) < 0, -1.0, 1.0)).to(dtype)
    x[2:4] = torch.nan
    weight = torch.exp2(torch.arange(dim, device=DEVICE) % 7 - 3.0)
    before = x.clone()
    insert_rows(x, weight, EPS, POSITIONS, ratio, TABLE, SLOTS, *flat(found))
    start = POSITIONS.clamp(min=0) // ratio * ratio
    live = SLOTS >= 0
    expected.write(SLOTS[live], rotate(rms_norm(x, weight, EPS), start, TABLE)[live])
    assert torch.equal(memory(found), memory(expected))
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_rows_go_without_a_norm(ratio: int) -> None:
    x, expected = noise(5, 512).to(BF16), make_cache(layout_of(v41_528(Dialect.OCP)))
    found = copy_of(expected)
    insert_rows(x, None, 0.0, POSITIONS, ratio, TABLE, SLOTS, *flat(found))
    expected.write(SLOTS, rotate(x, POSITIONS.clamp(min=0) // ratio * ratio, TABLE))
    assert torch.equal(memory(found), memory(expected))
    insert_rows(x[:0], None, 0.0, POSITIONS[:0], ratio, TABLE, SLOTS[:0], *flat(found))
    assert torch.equal(memory(found), memory(expected))


def test_nan_and_infinity_in_front_of_the_rotated_dims_stay_there() -> None:
    x, cache = noise(1, 512), make_cache(layout_of(PLAIN_BF16))
    x[0, 0], x[0, 3], x[0, 447] = torch.nan, torch.inf, torch.nan
    insert_rows(x, None, 0.0, POSITIONS[1:2], 1, TABLE, SLOTS[:1], *flat(cache))
    torch.testing.assert_close(
        cache.read(SLOTS[:1]), rotate(x, POSITIONS[1:2], TABLE).bfloat16().float(), equal_nan=True
    )


def test_the_ops_keep_the_rules_of_custom_ops() -> None:
    row, key = noise(2, 512), noise(2, 128)
    latents = flat(make_cache(layout_of(v41_528(Dialect.OCP), placement="pool")))
    positions, slots = POSITIONS[:2], SLOTS[:2]
    keys = flat(make_cache(layout_of(INDEX_MXFP4_68)))
    torch.library.opcheck(insert_rows, (key, noise(128), EPS, positions, 2, TABLE, slots, *keys))
    torch.library.opcheck(insert_rows, (row, None, EPS, positions, 1, TABLE, slots, *latents))
