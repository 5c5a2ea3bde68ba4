"""Rows of slots one behind the other, with prefix sums that say where each begins: the index streams of aiter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.launch import launch

_BLOCK = 128
"""Entries that a program takes at a time."""


@dataclass(frozen=True)
class Ragged:
    """The rows of T tokens: `indptr` int32 `[T + 1]`, `indices` int32; those of token t are
    `indices[indptr[t] : indptr[t + 1]]`. What lies behind the last row is not defined."""

    indptr: Tensor
    indices: Tensor

    @staticmethod
    def of(slots: Tensor) -> Ragged:
        return Ragged(*pack_ragged(slots))

    def of_tokens(self, first: int, last: int) -> Ragged:
        """The rows of the tokens `first : last`, where they lie."""
        return Ragged(self.indptr[first : last + 1], self.indices)


@triton.jit(do_not_specialize=["slots_stride", "width"])
def _pack_rows(slots, slots_stride, width, indptr, indices, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    count = tl.load(indptr + token).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        slot = tl.load(slots + token * slots_stride + column, column < width, other=-1)
        valid = slot >= 0
        place = count + tl.cumsum(valid.to(tl.int32), 0) - 1
        tl.store(indices + place, slot.to(tl.int32), valid)
        count += tl.sum(valid.to(tl.int32), 0)


@torch.library.custom_op("dsv41::pack_ragged", mutates_args=())
def pack_ragged(slots: Tensor) -> tuple[Tensor, Tensor]:
    """The entries >= 0 of each row of `slots` int64 `[T, n]` (dense rows, any distance), in their order, row by row.

    Returns `indptr` int32 `[T + 1]` and `indices` int32 `[max(1, T * n)]`, as `Ragged` holds them: of one size whatever
    is valid, so that a graph can be replayed, and none of the entries in use is -1. Slots and T * n are below 2**31.
    """
    indptr, indices = _room(slots)
    indptr[:1].zero_()
    torch.cumsum((slots >= 0).sum(1, dtype=torch.int32), 0, dtype=torch.int32, out=indptr[1:])
    launch(
        _pack_rows,
        (slots.shape[0],),
        slots=slots,
        slots_stride=slots.stride(0),
        width=slots.shape[1],
        indptr=indptr,
        indices=indices,
        BLOCK=_BLOCK,
    )
    return indptr, indices


@pack_ragged.register_fake
def _room(slots: Tensor) -> tuple[Tensor, Tensor]:
    tokens, width = slots.shape
    indices = slots.new_empty(max(1, tokens * width), dtype=torch.int32)
    return slots.new_empty(tokens + 1, dtype=torch.int32), indices
