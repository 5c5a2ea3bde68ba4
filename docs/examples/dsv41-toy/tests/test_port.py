"""What is this port's own, and no clause of a contract: its devices, its requirement, its library's particulars."""

import pytest
import torch
import toyaccel
from dsv41_toy.backend import Rows
from dsv41_toy.layouts import check_cache, resolve_layouts
from dsv41_toy.spec import SPEC, devices, rows_a_query
from toyaccel.attention import Part
from toyaccel.pages import latents

from dsv41.errors import LayoutError
from dsv41.hal import CacheLayout, Geometry, PagedCache, Platform, Request, ScalePlacement, explain_backends
from dsv41.hal.records import PLAIN_BF16


def test_the_driver_says_how_many_devices_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOYACCEL_DEVICES", "2")
    assert [device.key for device in devices()] == ["toy:0", "toy:1"]
    monkeypatch.setenv("TOYACCEL_DEVICES", "0")
    assert devices() == []


def test_it_is_chosen_on_its_device_and_nowhere_else() -> None:
    assert explain_backends(device="toy:0").chosen == SPEC.name
    (reason,) = explain_backends("toy", device="cpu").candidate("toy").reasons
    assert reason.cls == "arch"


@pytest.mark.parametrize(("topk", "fits"), [(896, True), (897, False)])
def test_a_query_of_too_many_rows_is_refused_with_the_numbers(topk: int, fits: bool) -> None:
    request = Request(Geometry(window=128, topk=topk))
    reason = rows_a_query(1024)(devices()[0], Platform.load("cpu"), request)
    assert (reason is None) == fits
    assert reason is None or "a window of 128 and a top-k of 897 are 1025" in reason.text


def test_slots_become_dense_rows() -> None:
    rows = Rows.of(torch.tensor([[-1, 7, -1, 3], [5, 6, 7, 8], [-1, -1, -1, -1]]))
    assert rows.lengths.tolist() == [2, 4, 0]
    assert rows.rows[0, :2].tolist() == [7, 3]
    assert rows.rows.dtype == rows.lengths.dtype == torch.int32


@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "bfloat16"])
def test_the_device_reads_what_the_layout_writes(dtype: str) -> None:
    layout = resolve_layouts(dtype, "auto")[2].window
    cache = PagedCache.allocate(layout, 3, fill=0xFF)
    slots = torch.tensor([0, 9, 31, 32, 95])
    cache.write(slots, torch.randn(5, 512, generator=torch.Generator().manual_seed(0)))
    form = {"fp8_ds_mla": "mxfp8", "bfloat16": "bf16"}[dtype]
    assert torch.equal(latents(cache.data, layout.page_size, form, slots), cache.read(slots))


def test_a_cache_of_another_layout_is_refused() -> None:
    plain = PagedCache.allocate(CacheLayout(PLAIN_BF16, 32, ScalePlacement.NONE), 1)
    with pytest.raises(LayoutError, match="toy cannot read this cache: value_tile"):
        check_cache(plain, resolve_layouts("bfloat16", "auto")[2].window)


def test_the_library_takes_heads_in_sixteens_alone() -> None:
    q = torch.zeros(1, 8, 512)
    empty = torch.zeros(1, 0, dtype=torch.int32)
    part = Part(torch.zeros(1, 32 * 1024, dtype=torch.uint8), 32, "bf16", empty, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="a multiple of 16"):
        toyaccel.attend(q, [part], torch.zeros(8), 1.0, q.clone())
