"""The slots that attention reads: selected positions through the block table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.early import wait_for_launch_ahead
from dsv41.backends.portable.launch import launch

BLOCK = 512
"""Indices that a program translates."""


@triton.jit
def load_slots(topk, place, width, visible, pages, table_width, PAGE_SIZE: tl.constexpr):
    """The slots (int64) of the positions at `place` of the row `topk` of `width` positions; -1 where there is none.

    `pages` is the row of the token's request, in which `visible` positions can be seen; with none visible it is not
    read.
    """
    position = tl.load(topk + place, place < width, other=-1)
    page = position // PAGE_SIZE
    known = (position >= 0) & (position < visible) & (page < table_width)
    found = tl.load(pages + page, known, other=-1).to(tl.int64)
    return tl.where(found >= 0, found * PAGE_SIZE + position % PAGE_SIZE, -1)


@triton.jit(do_not_specialize=["width", "table_width", "topk_stride", "pages_stride"])
def _selection_slots(
    topk,
    num_visible,
    token_request,
    pages,
    out,
    width,
    table_width,
    topk_stride,
    pages_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch_ahead(EARLY)
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    request = tl.load(token_request + token)
    visible = tl.where(request >= 0, tl.load(num_visible + token), 0)
    row = pages + request * pages_stride
    slot = load_slots(topk + token * topk_stride, place, width, visible, row, table_width, PAGE_SIZE)
    tl.store(out + token * width + place, slot, place < width)


@torch.library.custom_op("dsv41::selection_slots", mutates_args=())
def selection_slots(topk: Tensor, num_visible: Tensor, token_request: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """Slots of the selected positions `topk` int64 `[T, K]`, in their places: int64 `[T, K]`.

    `pages` int32 `[R, n]`, `token_request` and `num_visible` int64 `[T]`. -1 where the position is -1 or not visible,
    has no page, or the token is padding.
    """
    tokens, width = topk.shape
    out = torch.empty(tokens, width, dtype=torch.int64, device=topk.device)
    launch(
        _selection_slots,
        (tokens, triton.cdiv(width, BLOCK)),
        topk=topk,
        num_visible=num_visible,
        token_request=token_request,
        pages=pages,
        out=out,
        width=width,
        table_width=pages.shape[1],
        topk_stride=topk.stride(0),
        pages_stride=pages.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=BLOCK,
    )
    return out


@selection_slots.register_fake
def _(topk: Tensor, num_visible: Tensor, token_request: Tensor, pages: Tensor, page_size: int) -> Tensor:
    return topk.new_empty(topk.shape)
