"""The kernels around the library's: tables, gathered rows, rows that are cleared."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from dsv41.backends.cuda.rows import gather_rows
from dsv41.backends.cuda.tables import pack_gathered, pack_selection, pack_slots
from dsv41.backends.portable.caches import flat
from dsv41.backends.portable.selection import selection_slots
from dsv41.hal.layout import CacheLayout
from dsv41.hal.records import RECORDS

from ...hal.layout_cases import layouts_of
from ..portable.common import DEVICE, make_cache, name_of, noise

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

LAYOUTS = [layout for record in RECORDS.values() if record.dim == 512 for layout in layouts_of(record, 4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_rows_of_any_record_are_gathered_as_they_read(layout: CacheLayout) -> None:
    """Rows in the middle of requests, over pages in any order, none of what is around them, and rounded once."""
    cache = make_cache(layout, num_pages=5)
    pages = torch.tensor([[3, 1, 0], [4, -1, -1]], dtype=torch.int32, device=DEVICE)
    spans = torch.tensor([[[0] * 3, [2, 7, 5]], [[0] * 3, [1, 4, 1]]], device=DEVICE)
    slots = torch.tensor([14, 15, 4, 5, 6, 7, 0, 17, 18, 19], device=DEVICE)
    cache.write(slots, noise(len(slots), 512, seed=1) * 3)
    out = torch.full((13, 512), math.nan, dtype=torch.bfloat16, device=DEVICE)
    gather_rows(*flat(cache), pages, spans, True, 7, out)
    expected = cache.read(slots).to(torch.bfloat16)
    assert torch.equal(out[5:12], expected[:7])
    assert torch.equal(out[1:4], expected[7:])
    assert (out[4] == 0).all()  # which has no page
    assert out[[0, 12]].isnan().all()


def test_slots_are_packed_in_their_order() -> None:
    generator = torch.Generator().manual_seed(0)
    for width, multiple, wide in ((0, 64, 64), (1, 64, 64), (64, 64, 64), (133, 64, 192), (300, 128, 384)):
        slots = torch.randint(0, 2**31, (5, width), generator=generator)
        slots[torch.rand(5, width, generator=generator) < 0.4] = -1
        if width:
            slots[1], slots[2] = -1, slots[2].abs()
        padded = torch.full((5, width + 3), 7)
        padded[:, :width] = slots  # rows need not follow one another
        packed, lengths = pack_slots(padded.to(DEVICE)[:, :width], multiple)
        assert (packed.dtype, packed.shape, lengths.dtype) == (torch.int32, (5, wide), torch.int32)
        for row, found, length in zip(slots, packed.cpu(), lengths.tolist(), strict=True):
            valid = row[row >= 0]
            assert length == len(valid)
            assert torch.equal(found[:length].long(), valid)
            assert (found[length:] == -1).all()
    assert pack_slots(torch.zeros(0, 5, dtype=torch.long, device=DEVICE), 64)[0].shape == (0, 64)


@pytest.mark.parametrize("width", [0, 1, 7, 512, 700])
def test_a_selection_becomes_slots_and_is_packed_at_once(width: int) -> None:
    """Positions that are empty, not visible, on missing pages and past the table, in any order; padding tokens."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randperm(28, generator=generator).view(4, 7).int()
    wide[1, 2], wide[:, 5:] = -1, 1 << 30  # rows of a wider table
    positions = torch.randint(-1, 24, (6, width + 3), generator=generator)
    topk, pages = positions.to(DEVICE)[:, :width], wide.to(DEVICE)[:, :5]
    visible = torch.tensor([20, 40, 2, 0, 20, 3], device=DEVICE)
    requests = torch.tensor([0, 1, 3, 0, -1, 2], device=DEVICE)
    slots, packed, lengths = pack_selection(topk, visible, requests, pages, 4, 64)
    expected = selection_slots(topk, visible, requests, pages, 4)
    assert torch.equal(slots, expected)
    for found, wanted in zip((packed, lengths), pack_slots(expected, 64), strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    assert width < 512 or 0 < int(lengths[1]) < int(lengths[0]) < width


def test_packing_a_selection_is_a_custom_op_like_any() -> None:
    one, pages = torch.ones(2, dtype=torch.int64, device=DEVICE), torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    topk = torch.tensor([[0, -1], [3, 0]], device=DEVICE)
    torch.library.opcheck(pack_selection, (topk, one, one, pages, 4, 64))


def test_gathered_rows_are_found_by_position() -> None:
    """Two requests, of which the first begins at row 3 of its own counting, and padding that belongs to none."""
    position = torch.tensor([5, 6, 0, -1], device=DEVICE)
    request = torch.tensor([4, 4, 5, -1], device=DEVICE)
    spans = torch.tensor([[[3, 4, 0], [0, 9, 5]], [[0, 1, 4], [0, 2, 14]]], device=DEVICE)
    window = torch.tensor([[30, 31, 32], [-1, 32, 33], [-1, -1, 90], [-1, -1, -1]], device=DEVICE)
    topk = torch.tensor([[8, -1, 2], [0, 7, -1], [1, 0, 5], [-1, -1, -1]], device=DEVICE)
    slots = torch.tensor([[80, -1, 20], [10, 70, -1], [90, 91, -1], [-1, -1, -1]], device=DEVICE)
    packed, lengths = pack_gathered(position, request, spans, 4, window, topk, slots, 128)
    assert lengths.tolist() == [5, 4, 3, 0]
    assert packed.shape == (4, 128)
    expected = [[0, 1, 2, 13, 7], [2, 3, 5, 12], [4, 15, 14], []]
    assert [row[:count] for row, count in zip(packed.tolist(), lengths.tolist(), strict=True)] == expected
    assert all((row[count:] == -1).all() for row, count in zip(packed, lengths.tolist(), strict=True))
    alone, counts = pack_gathered(position, request, spans, 4, window, None, None, 128)
    assert counts.tolist() == [3, 2, 1, 0]
    assert alone[0, :3].tolist() == [0, 1, 2]


def test_the_kernels_compile_once_for_each_architecture_and_keep_nothing_in_memory() -> None:
    """By the compiler and not the interpreter, which takes more than the compiler does. One build serves runs that
    begin with any token."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(Path(__file__).parent / "compile_facts.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name.split()[0] for name in found["spills"]} == {"sm_90", "sm_100"}
    assert len(found["spills"]) == 8
    assert set(found["spills"].values()) == {0}
    assert set(found["builds"].values()) == {1}, found["builds"]
