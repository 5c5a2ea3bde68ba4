"""Index tables as FlashMLA reads them: int32, the valid entries first, -1 behind, in rows of a whole number of blocks.

Packed, since a length then says all: work behind it is saved, and it follows from how many rows a token sees.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.early import wait_for_launch_ahead
from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.selection import BLOCK, load_slots

_BLOCK = 128
"""Entries that a program takes at a time."""


@triton.jit
def _append(out, count, value, valid):
    """Store the valid ones of `value` behind the `count` entries that `out` has; how many it has then."""
    place = count + tl.cumsum(valid.to(tl.int32), 0) - 1
    tl.store(out + place, value.to(tl.int32), valid)
    return count + tl.sum(valid.to(tl.int32), 0)


@triton.jit
def _finish(out, out_width, count, lengths, BLOCK: tl.constexpr):
    """-1 behind the `count` entries, and their number."""
    for start in range(0, out_width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(out + column, -1, (column >= count) & (column < out_width))
    tl.store(lengths, count)


@triton.jit(do_not_specialize=["slots_stride", "width", "out_width"])
def _pack_slots(slots, slots_stride, width, out, out_width, lengths, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_launch_ahead(EARLY)
    token = tl.program_id(0).to(tl.int64)
    out += token * out_width
    count = tl.zeros((), tl.int32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        slot = tl.load(slots + token * slots_stride + column, column < width, other=-1)
        count = _append(out, count, slot, slot >= 0)
    _finish(out, out_width, count, lengths + token, BLOCK)


@torch.library.custom_op("dsv41::pack_slots", mutates_args=())
def pack_slots(slots: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """The entries >= 0 of each row of `slots` int64 `[T, n]` (dense rows, any distance), in their order.

    Returns int32 `[T, W]`, -1 behind them, with W = n rounded up to a `multiple`, at least one; and their numbers int32
    `[T]`. Slots are below 2**31.
    """
    packed, lengths = _room(slots, multiple)
    launch(
        _pack_slots,
        (slots.shape[0],),
        slots=slots,
        slots_stride=slots.stride(0),
        width=slots.shape[1],
        out=packed,
        out_width=packed.shape[1],
        lengths=lengths,
        BLOCK=_BLOCK,
    )
    return packed, lengths


@pack_slots.register_fake
def _room(slots: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    return _table(slots, slots.shape[1], multiple)


def _table(like: Tensor, width: int, multiple: int) -> tuple[Tensor, Tensor]:
    width = max(1, -(-width // multiple)) * multiple
    tokens = like.shape[0]
    return like.new_empty(tokens, width, dtype=torch.int32), like.new_empty(tokens, dtype=torch.int32)


@triton.jit(do_not_specialize=["width", "table_width", "topk_stride", "pages_stride", "out_width"])
def _pack_selection(
    topk, num_visible, token_request, pages, slots, width, table_width, topk_stride, pages_stride,
    out, out_width, lengths,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launch_ahead(EARLY)
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(token_request + token)
    visible = tl.where(request >= 0, tl.load(num_visible + token), 0)
    topk += token * topk_stride
    pages += request * pages_stride
    slots += token * width
    out += token * out_width
    count = tl.zeros((), tl.int32)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        slot = load_slots(topk, place, width, visible, pages, table_width, PAGE_SIZE)
        tl.store(slots + place, slot, place < width)
        count = _append(out, count, slot, slot >= 0)
    _finish(out, out_width, count, lengths + token, BLOCK)


@torch.library.custom_op("dsv41::pack_selection", mutates_args=())
def pack_selection(
    topk: Tensor, num_visible: Tensor, token_request: Tensor, pages: Tensor, page_size: int, multiple: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`selection_slots` of the portable backend, and `pack_slots` of what it gives, in one launch.

    Returns the slots int64 `[T, K]` in their places, and packed int32 `[T, W]` with their numbers int32 `[T]`. Slots
    are below 2**31.
    """
    slots, packed, lengths = _selection_room(topk, num_visible, token_request, pages, page_size, multiple)
    launch(
        _pack_selection,
        (topk.shape[0],),
        topk=topk,
        num_visible=num_visible,
        token_request=token_request,
        pages=pages,
        slots=slots,
        width=topk.shape[1],
        table_width=pages.shape[1],
        topk_stride=topk.stride(0),
        pages_stride=pages.stride(0),
        out=packed,
        out_width=packed.shape[1],
        lengths=lengths,
        PAGE_SIZE=page_size,
        BLOCK=BLOCK,
    )
    return slots, packed, lengths


@pack_selection.register_fake
def _selection_room(
    topk: Tensor, num_visible: Tensor, token_request: Tensor, pages: Tensor, page_size: int, multiple: int
) -> tuple[Tensor, Tensor, Tensor]:
    return topk.new_empty(topk.shape, dtype=torch.int64), *_table(topk, topk.shape[1], multiple)


# Runs of a step begin anywhere, so alignment is no compile key.
@triton.jit(
    do_not_specialize=[
        "first_request", "num_window", "num_compressed", "topk_stride", "compressed_stride", "out_width",
    ],
    do_not_specialize_on_alignment=["positions", "token_request", "window_slots", "topk", "compressed_slots"],
)  # fmt: skip
def _pack_gathered(
    positions, token_request, spans, first_request, window_slots, num_window,
    topk, compressed_slots, num_compressed, topk_stride, compressed_stride, out, out_width, lengths,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    request = tl.maximum(tl.load(token_request + token) - first_request, 0)  # padding, of none, has no slot either
    out += token * out_width
    spans += request * 6
    count = tl.zeros((), tl.int32)
    shift = tl.load(spans + 2) - tl.load(spans)
    for start in range(0, num_window, BLOCK):
        column = start + tl.arange(0, BLOCK)
        slot = tl.load(window_slots + token * num_window + column, column < num_window, other=-1)
        row = position - (num_window - 1) + column + shift
        count = _append(out, count, row, slot >= 0)
    if topk is not None:
        shift = tl.load(spans + 5) - tl.load(spans + 3)
        for start in range(0, num_compressed, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < num_compressed
            slot = tl.load(compressed_slots + token * compressed_stride + column, inside, other=-1)
            row = tl.load(topk + token * topk_stride + column, inside, other=-1) + shift
            count = _append(out, count, row, slot >= 0)
    _finish(out, out_width, count, lengths + token, BLOCK)


@torch.library.custom_op("dsv41::pack_gathered", mutates_args=())
def pack_gathered(
    positions: Tensor,
    token_request: Tensor,
    spans: Tensor,
    first_request: int,
    window_slots: Tensor,
    topk: Tensor | None,
    compressed_slots: Tensor | None,
    multiple: int,
) -> tuple[Tensor, Tensor]:
    """Where the rows that each token sees lie among those that were gathered: one table for both caches.

    `positions`, `token_request` int64 `[T]` are those of a plan, of the requests from `first_request` on, and
    `window_slots` int64 `[T, n]` (contiguous) those of a causal one: column j is the row at position - (n - 1 - j).
    `topk` and `compressed_slots` int64 `[T, K]` (dense rows) are a selection's positions and their slots, None without
    one. What has no slot has no entry. `spans` is `Gathered.spans`.

    Returns int32 `[T, W]`, -1 behind the entries, with W = n + K rounded up to a `multiple`; and their numbers `[T]`.
    """
    packed, lengths = _gathered_room(
        positions, token_request, spans, first_request, window_slots, topk, compressed_slots, multiple
    )
    launch(
        _pack_gathered,
        (positions.shape[0],),
        positions=positions,
        token_request=token_request,
        spans=spans,
        first_request=first_request,
        window_slots=window_slots,
        num_window=window_slots.shape[1],
        topk=topk,
        compressed_slots=compressed_slots,
        num_compressed=topk.shape[1] if topk is not None else 0,
        topk_stride=topk.stride(0) if topk is not None else 0,
        compressed_stride=compressed_slots.stride(0) if compressed_slots is not None else 0,
        out=packed,
        out_width=packed.shape[1],
        lengths=lengths,
        BLOCK=_BLOCK,
    )
    return packed, lengths


@pack_gathered.register_fake
def _gathered_room(
    positions: Tensor,
    token_request: Tensor,
    spans: Tensor,
    first_request: int,
    window_slots: Tensor,
    topk: Tensor | None,
    compressed_slots: Tensor | None,
    multiple: int,
) -> tuple[Tensor, Tensor]:
    return _table(positions, window_slots.shape[1] + (topk.shape[1] if topk is not None else 0), multiple)
