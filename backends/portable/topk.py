"""Exact top-k over long rows, a radix select: the digits of the k-th best score first, then one ordered pass.

A program reads its columns three times or more, so long rows are cut into spans. What is best of a row is among the
best of its spans; so these are found side by side, then the best of them, in spans again while they are many.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.early import wait_for_launch_ahead
from dsv41.backends.portable.launch import launch

COLUMNS = 4096
"""Scores that a program looks at together; below 2**16, since two counts share a number."""
WARPS = 16
WHOLE = 8
"""Scores that a thread reads at once where rows are a multiple apart: else the compiler reads them one by one."""
SPAN = 4096
"""Columns of a span, unless four times as many as are selected are more; then a multiple of `WHOLE`."""


@triton.jit
def _columns(picks, first, start, length, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """The columns `start` ... of a program's span, which begins at `first`: themselves, or those that were picked
    before (int32, -1 = none). Which of them can be read, in groups of `WHOLE`, and which are any."""
    place = start + tl.arange(0, COLUMNS)
    if picks is None:
        column = first + place
        live = place < length
        readable = place < (length + WHOLE - 1) // WHOLE * WHOLE
    else:
        column = tl.load(picks + first + place, place < length, other=-1)
        live = column >= 0
        readable = live
    return column, readable, live


@triton.jit
def _ranks(scores, column, readable, live, BITS: tl.constexpr):
    """uint32 numbers of `BITS` bits that order as the scores do; 0, which no number has, for NaN and what is not live.

    The bits of a float order like an integer once those of negative numbers are flipped. bf16 fills the upper half.
    """
    x = tl.load(scores + column, readable, other=0.0).to(tl.float32)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0 counts as 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ -0x80000000
    rank = ordered.to(tl.uint32, bitcast=True) >> (32 - BITS)
    return tl.where(live & (x == x), rank, 0)


@triton.jit
def _positions(column, live, candidates, visible, BLOCK_SIZE: tl.constexpr):
    """The position that each column stands for (int64), and whether it may be selected."""
    if candidates is None:
        position = column.to(tl.int64)
    else:
        block = tl.load(candidates + column // BLOCK_SIZE, live, other=-1)
        position = block * BLOCK_SIZE + column % BLOCK_SIZE
        live = (block >= 0) & (position < visible)
    return position, live


@triton.jit(do_not_specialize=["width", "span", "candidates_stride"])
def _top_k(
    scores,
    lengths,
    candidates,
    num_visible,
    picks,
    out,
    width,
    span,
    scores_stride,
    candidates_stride,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch_ahead(EARLY)
    row, first = tl.program_id(0).to(tl.int64), tl.multiple_of(tl.program_id(1) * span, 8)
    scores += row * scores_stride
    out += (row * tl.num_programs(1) + tl.program_id(1)) * K
    length = width
    if picks is not None:
        picks += row * width
    elif lengths is not None:
        length = tl.minimum(tl.load(lengths + row), width).to(tl.int32)
    length = tl.minimum(length - first, span)
    visible = 0
    if candidates is not None:
        candidates += row * candidates_stride
        visible = tl.load(num_visible + row)

    # The rank of the k-th best, 8 bits at a time from the top, and how many of that rank there is room for. A row that
    # is no longer than k needs no search: its border stays below every rank.
    border = tl.full((), 0, tl.uint32)
    room = tl.full((), K, tl.int32)
    value = tl.arange(0, 256)
    for turn in range(tl.where(length > K, BITS // 8, 0)):
        shift = BITS - 8 - 8 * turn
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, length, COLUMNS):
            column, readable, live = _columns(picks, first, start, length, COLUMNS, WHOLE)
            _, live = _positions(column, live, candidates, visible, BLOCK_SIZE)
            # The border's lower digits are still 0: where the upper ones agree, this is the next digit.
            digit = (_ranks(scores, column, readable, live, BITS) ^ border) >> shift.to(tl.uint32)
            counts += tl.histogram(digit.to(tl.int32), 256, mask=digit < 256)
        at_least = tl.cumsum(counts, reverse=True)
        found = tl.sum((at_least >= room).to(tl.int32)) - 1
        room -= tl.sum(tl.where(value == found + 1, at_least, 0))
        border |= found.to(tl.uint32) << shift.to(tl.uint32)

    above = tl.full((), 0, tl.int32)
    level = tl.full((), 0, tl.int32)
    for start in range(0, length, COLUMNS):
        column, readable, live = _columns(picks, first, start, length, COLUMNS, WHOLE)
        position, live = _positions(column, live, candidates, visible, BLOCK_SIZE)
        rank = _ranks(scores, column, readable, live, BITS)
        is_above = rank > border
        is_level = (rank == border) & (rank > 0)
        # Both are counted at once, one in each half of a number.
        both = (is_above.to(tl.int32) << 16) | is_level.to(tl.int32)
        before = tl.cumsum(both) - both
        level_before = level + (before & 0xFFFF)
        place = above + (before >> 16) + tl.minimum(level_before, room)
        found = position if out.dtype.element_ty == tl.int64 else column
        tl.store(out + place, found, is_above | (is_level & (level_before < room)))
        total = tl.sum(both)
        above += total >> 16
        level += total & 0xFFFF

    place = tl.arange(0, K_PADDED)
    empty = (place >= above + tl.minimum(level, room)) & (place < K)
    tl.store(out + place, tl.full((K_PADDED,), -1, out.dtype.element_ty), empty)


@torch.library.custom_op("dsv41::top_k", mutates_args=())
def top_k(
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    candidates: Tensor | None,
    block_size: int,
    num_visible: Tensor | None,
) -> Tensor:
    """Positions of the `k` largest scores of each row: int64 `[T, k]`, ascending, -1 where there are fewer.

    `scores` `[T, W]` bf16 or fp32, of which row t has the first `lengths[t]` (int64 `[T]`, None = all). What is behind
    them can be anything; where rows are a multiple of 8 apart, it may be read up to the next multiple. NaN is never
    selected, -inf is, -0 equals 0. Of equal scores the smaller columns win, so the result is unique.

    A column is its position, unless `candidates` int64 `[T, B]` names blocks of `block_size` positions (none twice, -1
    = none): then column c stands for position `c % block_size` of block `candidates[t, c // block_size]`, and counts if
    it is below `num_visible[t]`. The result is in the order of the columns.
    """
    rows, width = scores.shape
    if candidates is not None:
        width = min(width, candidates.shape[1] * block_size)
    span, picks = triton.cdiv(max(SPAN, 4 * k), WHOLE) * WHOLE, None

    def best(width: int, spans: int, dtype: torch.dtype) -> Tensor:
        """Of each span: positions, or as int32 columns, `[T, spans * k]`."""
        out = torch.empty(rows, spans * k, dtype=dtype, device=scores.device)
        launch(
            _top_k,
            (rows if k else 0, spans),
            num_warps=WARPS,
            scores=scores,
            lengths=lengths,
            candidates=candidates,
            num_visible=num_visible,
            picks=picks,
            out=out,
            width=width,
            span=span if spans > 1 else width,
            scores_stride=scores.stride(0),
            candidates_stride=candidates.stride(0) if candidates is not None else 0,
            K=k,
            K_PADDED=triton.next_power_of_2(max(k, 1)),
            BLOCK_SIZE=block_size,
            BITS=16 if scores.dtype == torch.bfloat16 else 32,
            COLUMNS=COLUMNS,
            WHOLE=WHOLE if scores.stride(0) % WHOLE == 0 else 1,
        )
        return out

    while width > 2 * span:
        spans = triton.cdiv(width, span)
        picks = best(width, spans, torch.int32)
        width = spans * k
    return best(width, 1, torch.int64)


@top_k.register_fake
def _(
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    candidates: Tensor | None,
    block_size: int,
    num_visible: Tensor | None,
) -> Tensor:
    return scores.new_empty(scores.shape[0], k, dtype=torch.int64)
