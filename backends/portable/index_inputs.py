"""Index queries and the weights of their heads, ready for scoring."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.early import wait_for_launch_ahead
from dsv41.backends.portable.formats import RowFormat
from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.numbers import narrow, round_to
from dsv41.backends.portable.rotation import rotate
from dsv41.backends.portable.rows import round_trip

_HEADS_AT_ONCE = 16
_WARPS = 4


@triton.jit
def _index_queries(
    query,
    query_stride,
    head_weights,
    weights_stride,
    positions,
    cos_sin,
    head_scale,
    out,
    out_weights,
    HEADS: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    F: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch_ahead(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = head < HEADS
    place = head[:, None] * F.dim + tl.arange(0, F.dim)[None, :]
    x = tl.load(query + token * query_stride + place, live[:, None], other=0.0).to(tl.float32)
    x = rotate(x, cos_sin, tl.load(positions + token), ROPE)
    x = round_trip(round_to(x, query.dtype.element_ty), F)
    tl.store(out + token * (HEADS * F.dim) + place, narrow(x, out.dtype.element_ty), live[:, None])
    weight = tl.load(head_weights + token * weights_stride + head, live, other=0.0).to(tl.float32)
    tl.store(out_weights + token * HEADS + head, narrow(weight * head_scale, out_weights.dtype.element_ty), live)


@torch.library.custom_op("dsv41::index_queries", mutates_args=())
def index_queries(
    query: Tensor, head_weights: Tensor, positions: Tensor, cos_sin: Tensor, head_scale: float, format: list[int]
) -> tuple[Tensor, Tensor]:
    """`query` `[T, Hi, Di]` rotated at `positions` `[T]` and rounded as the index cache of this format rounds keys, and
    `head_weights` `[T, Hi]` times `head_scale`; both in their own dtype.

    A token's heads are dense, tokens any distance apart. `cos_sin` float32 `[max_len, rope_dim]`.
    """
    out, out_weights = _empty(query, head_weights, positions, cos_sin, head_scale, format)
    tokens, heads, _ = query.shape
    block = min(_HEADS_AT_ONCE, triton.next_power_of_2(heads))
    launch(
        _index_queries,
        (tokens, triton.cdiv(heads, block)),
        num_warps=_WARPS,
        query=query,
        query_stride=query.stride(0),
        head_weights=head_weights,
        weights_stride=head_weights.stride(0),
        positions=positions,
        cos_sin=cos_sin,
        head_scale=head_scale,
        out=out,
        out_weights=out_weights,
        HEADS=heads,
        ROPE=cos_sin.shape[1],
        BLOCK=block,
        F=RowFormat.from_numbers(format),
    )
    return out, out_weights


@index_queries.register_fake
def _empty(
    query: Tensor, head_weights: Tensor, positions: Tensor, cos_sin: Tensor, head_scale: float, format: list[int]
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), head_weights.new_empty(head_weights.shape)
