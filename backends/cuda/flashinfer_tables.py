"""Index tables as FlashInfer reads them: int32 rows packed to the left, with how many each token has."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.launch import launch
from dsv41.hal.layout import PagedCache, ScalePlacement


@triton.jit(do_not_specialize=["count", "width", "slots_stride", "table_stride", "page_rows"])
def _pack_rows(
    slots, slots_stride, count, table, table_stride, width, counts, page_rows, PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs: tokens."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    slot = tl.load(slots + token * slots_stride + place, place < count, other=-1)
    live = slot >= 0
    ones = live.to(tl.int32)
    found = tl.sum(ones)
    row = slot // PAGE_SIZE * page_rows + slot % PAGE_SIZE
    table += token * table_stride
    tl.store(table + tl.cumsum(ones) - ones, row.to(tl.int32), live)
    tl.store(table + place, tl.full((BLOCK,), -1, tl.int32), (place >= found) & (place < width))
    tl.store(counts + token, found)


@torch.library.custom_op("dsv41::pack_rows", mutates_args=("table", "counts"))
def pack_rows(slots: Tensor, page_size: int, page_rows: int, table: Tensor, counts: Tensor) -> None:
    """Write the rows of `slots` int64 `[T, K]` (-1 = none) into `table` int32 `[T, >= K]`, in order, without holes.

    Slot page * `page_size` + offset becomes row page * `page_rows` + offset; what is behind the last one becomes -1.
    `counts` int32 `[T]` says how many there are. Tables may be columns of wider ones.
    """
    tokens, width = table.shape
    launch(
        _pack_rows,
        (tokens,),
        slots=slots,
        slots_stride=slots.stride(0),
        count=slots.shape[1],
        table=table,
        table_stride=table.stride(0),
        width=width,
        counts=counts,
        page_rows=page_rows,
        PAGE_SIZE=page_size,
        BLOCK=triton.next_power_of_2(max(width, 1)),
    )


@triton.jit
def _clear_empty(out, out_stride, window_counts, lengths, fixed, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    if (tl.load(window_counts + token) == 0) & (tl.load(lengths + token) <= fixed):
        for start in range(0, WIDTH, BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(out + token * out_stride + place, tl.zeros((BLOCK,), out.dtype.element_ty), place < WIDTH)


@torch.library.custom_op("dsv41::clear_empty", mutates_args=("out",))
def clear_empty(out: Tensor, window_counts: Tensor, lengths: Tensor, fixed: int) -> None:
    """Zero `out` `[T, H, D]`, dense in a token, where a token has no window row and `lengths` at most `fixed`."""
    width = out.shape[1] * out.shape[2]
    launch(
        _clear_empty,
        (out.shape[0],),
        out=out,
        out_stride=out.stride(0),
        window_counts=window_counts,
        lengths=lengths,
        fixed=fixed,
        WIDTH=width,
        BLOCK=min(4096, triton.next_power_of_2(width)),
    )


def page_rows(cache: PagedCache) -> int:
    """Rows from a page to the next as a library counts them that addresses rows at one distance from each other.

    Where a page has its scales behind its rows it counts slots; a cache of one page has no distance.
    """
    layout = cache.layout
    if layout.scale_placement is ScalePlacement.PAGE or cache.num_pages <= 1:
        return layout.page_size
    return cache.data.stride(0) // layout.row_bytes


@dataclass(frozen=True, eq=False)
class SlotTables:
    """Rows known by slot, int64 `[T, K]` (-1 = none), and the tables that were made of them.

    How a row is counted depends on the distance of a cache's pages, which a plan does not know, so a table is made when
    a layer first asks for it; layers whose caches lie alike share it.
    """

    slots: Tensor
    _made: dict[tuple[object, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def alone(self, cache: PagedCache, width: int) -> tuple[Tensor, Tensor]:
        """Table int32 `[T, width]` into `cache`, and counts int32 `[T]`."""
        key = (cache.layout.page_size, page_rows(cache), width)
        if key not in self._made:
            table = torch.empty(len(self.slots), width, dtype=torch.int32, device=self.slots.device)
            self._made[key] = table, self._pack(cache, table)
        return self._made[key]

    def behind(self, window: Tensor, cache: PagedCache, width: int) -> tuple[Tensor, Tensor]:
        """One table int32 `[T, columns of window + width]`: a table of window rows, and these rows of `cache` behind
        it. The lengths int32 `[T]` count every column of the window."""
        key = (window, cache.layout.page_size, page_rows(cache), width)
        if key not in self._made:
            first = window.shape[1]
            table = torch.empty(len(window), first + width, dtype=torch.int32, device=window.device)
            table[:, :first] = window
            self._made[key] = table, self._pack(cache, table[:, first:]) + first
        return self._made[key]

    def _pack(self, cache: PagedCache, table: Tensor) -> Tensor:
        counts = torch.empty(len(table), dtype=torch.int32, device=table.device)
        pack_rows(self.slots, cache.layout.page_size, page_rows(cache), table, counts)
        return counts
