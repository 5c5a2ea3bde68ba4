"""The lightning indexer's scores over paged index keys, and the best score of each candidate block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable import formats
from dsv41.backends.portable.caches import kernel_arguments
from dsv41.backends.portable.early import wait_for_launch_ahead
from dsv41.backends.portable.formats import RowFormat
from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.numbers import INTERPRETED, decode_e2m1, dot, narrow, round_to
from dsv41.backends.portable.rows import load_rows, load_scales, row_of, value_offset

_E2M1 = tl.constexpr(formats.E2M1)

KEYS = 64
"""Keys that a program scores together; in fp32 `WIDE_KEYS`, since these take twice the room."""
WIDE_KEYS = 32
TOKENS = 2
"""Tokens that share the keys they read, where a request has several in a step; in fp32 each reads its own."""
PROGRAMS = 1024
"""Programs that a small step is cut into, over the keys."""
MAXIMA = 512
"""Candidate blocks that a program reduces together."""


@triton.jit
def _load_queries(queries, live, dim, DTYPE: tl.constexpr):
    """`[len(dim), C]`, as narrow as `dot` takes it: a column is a head of a token, `queries` `[C]` where it begins."""
    x = tl.load(queries[None, :] + dim[:, None], live[None, :], other=0.0).to(tl.float32)
    return x.to(tl.float32 if INTERPRETED else DTYPE)


@triton.jit
def _load_pairs(cache, slot, live, F: tl.constexpr):
    """float32 `[N, F.dim / 2]` twice: the even and the odd dims of e2m1 rows, of which one byte holds a pair."""
    GROUPS: tl.constexpr = F.dim // F.group
    byte = tl.arange(0, F.dim // 2)[None, :]
    page = cache[0] + slot // F.page_size * cache[3]
    row = row_of(slot, F)
    codes = tl.load(page[:, None] + value_offset(row[:, None], byte, F), live[:, None], other=0).to(tl.int32)
    scales = load_scales(cache, slot[:, None], live[:, None], tl.arange(0, GROUPS)[None, :], F)
    return _scaled(decode_e2m1(codes & 15), scales), _scaled(decode_e2m1(codes >> 4), scales)


@triton.jit
def _scaled(x, scales):
    """`x` `[N, D]` times `scales` `[N, G]`, one for each run of D / G dims."""
    grouped = tl.reshape(x, (x.shape[0], scales.shape[1], x.shape[1] // scales.shape[1]))
    return tl.reshape(grouped * scales[:, :, None], x.shape)


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_columns",
        "table_width",
        "pages_stride",
        "candidates_stride",
        "out_stride",
    ]
)
def _index_scores(
    queries,
    head_weights,
    pages,
    token_request,
    num_visible,
    candidates,
    keys,
    keys_pool,
    keys_scale,
    keys_stride,
    keys_pool_stride,
    out,
    num_tokens,
    num_heads,
    num_columns,
    table_width,
    queries_stride,
    heads_stride,
    weights_stride,
    pages_stride,
    candidates_stride,
    out_stride,
    F: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch_ahead(EARLY)
    DTYPE: tl.constexpr = queries.dtype.element_ty
    HALF: tl.constexpr = F.dim // 2
    cache = (keys, keys_pool, keys_scale, keys_stride, keys_pool_stride)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    split, splits = tl.program_id(1), tl.num_programs(1)

    index = tl.arange(0, TOKENS)
    token = first + index
    requests = tl.load(token_request + token, token < num_tokens, other=-1)
    visible = tl.load(num_visible + token, requests >= 0, other=0)
    if candidates is not None:
        candidates += first * candidates_stride
        end = tl.where(visible > 0, num_columns, 0)
    else:
        end = tl.minimum(visible, num_columns).to(tl.int32)

    # A column of the product is a head of a token. A program that has no keys reads no queries either.
    column = tl.arange(0, TOKENS * HEADS)
    of_token, head = first + column // HEADS, column % HEADS
    real = (of_token < num_tokens) & (head < tl.where(split * KEYS < tl.max(end), num_heads, 0))
    weights = tl.load(head_weights + of_token * weights_stride + head, real, other=0.0).to(tl.float32)
    start_of = queries + of_token * queries_stride + head * heads_stride
    if F.code == _E2M1:
        query_even = _load_queries(start_of, real, tl.arange(0, HALF) * 2, DTYPE)
        query_odd = _load_queries(start_of, real, tl.arange(0, HALF) * 2 + 1, DTYPE)
    else:
        query = _load_queries(start_of, real, tl.arange(0, F.dim), DTYPE)

    for leader in range(TOKENS):
        # The first token of each request reads the keys for all of its request.
        request = tl.sum(tl.where(index == leader, requests, 0))
        member = (requests == request) & (end > 0)
        limit = tl.max(tl.where(member, end, 0))
        limit = tl.where(tl.sum((member & (index < leader)).to(tl.int32)) == 0, limit, 0)
        for start in range(split * KEYS, limit, splits * KEYS):
            place = start + tl.arange(0, KEYS)
            if candidates is not None:
                block = tl.load(candidates + place // BLOCK_SIZE, place < limit, other=-1)
                position = block * BLOCK_SIZE + place % BLOCK_SIZE
                live = (block >= 0) & (position < tl.max(visible))
            else:
                position = place
                live = place < limit
            if candidates is None or tl.max(live.to(tl.int32)) > 0:
                page = position // F.page_size
                found = tl.load(pages + request * pages_stride + page, live & (page < table_width), other=-1)
                slot = found.to(tl.int64) * F.page_size + position % F.page_size
                dots = tl.zeros((KEYS, TOKENS * HEADS), tl.float32)
                if F.code == _E2M1:
                    even, odd = _load_pairs(cache, slot, found >= 0, F)
                    dots = dot(round_to(even, DTYPE), query_even, dots, DTYPE)
                    dots = dot(round_to(odd, DTYPE), query_odd, dots, DTYPE)
                else:
                    key = load_rows(cache, slot, found >= 0, 0, F.dim, F)
                    dots = dot(round_to(key, DTYPE), query, dots, DTYPE)
                dots = round_to(dots, DTYPE)
                dots = tl.where(dots < 0, 0.0, dots)  # a NaN stays
                terms = tl.where(real[None, :], round_to(dots * weights[None, :], DTYPE), 0.0)
                total = tl.sum(tl.reshape(terms, (KEYS, TOKENS, HEADS)), axis=2)
                seen = live[:, None] & member[None, :] & (place[:, None] < end[None, :])
                where = out + token[None, :] * out_stride + place[:, None]
                tl.store(where, narrow(total, DTYPE), seen)


@torch.library.custom_op("dsv41::index_scores", mutates_args=("out",))
def index_scores(
    queries: Tensor,
    head_weights: Tensor,
    pages: Tensor,
    token_request: Tensor,
    num_visible: Tensor,
    candidates: Tensor | None,
    block_size: int,
    data: Tensor,
    pool: Tensor | None,
    tensor_scale: Tensor | None,
    format: list[int],
    out: Tensor,
    step_tokens: int = 0,
) -> None:
    """`out[t, c] = sum_h w[h] * relu(q[h] . k[j])` of every token and every position j that it sees.

    `queries` `[T, heads, dim]` and `head_weights` `[T, heads]` bf16 or fp32; `out` `[T, W]` in their dtype. `pages`
    int32 `[R, n]` are the pages of each request's index keys, `token_request` int64 `[T]` (-1 = padding) and
    `num_visible` int64 `[T]` as in the plan. The dot product, its product with the head weight and the sum are each
    rounded to the dtype. A position without a page scores 0.

    Column c is position c, or with `candidates` int64 `[T, B]` position `c % block_size` of block
    `candidates[t, c // block_size]` (-1 = none). A column whose position the token does not see is not written.

    `step_tokens` counts the tokens of the whole step where these are a part of it, so that a step runs the same kernel
    however it is cut.
    """
    tokens, heads, _ = queries.shape
    row_format = RowFormat.from_numbers(format)
    columns = out.shape[1]
    if candidates is not None:
        columns = min(columns, candidates.shape[1] * block_size)
    wide = queries.dtype == torch.float32
    keys = WIDE_KEYS if wide else KEYS
    # Tokens of different requests, or with candidates of their own, have no keys in common.
    together = TOKENS if candidates is None and max(tokens, step_tokens) > pages.shape[0] and not wide else 1
    tiles = triton.cdiv(tokens, together)
    splits = min(triton.cdiv(columns, keys), max(1, PROGRAMS // max(tiles, 1)))
    launch(
        _index_scores,
        (tiles, splits),
        queries=queries,
        head_weights=head_weights,
        pages=pages,
        token_request=token_request,
        num_visible=num_visible,
        candidates=candidates,
        **kernel_arguments("keys", data, pool, tensor_scale),
        out=out,
        num_tokens=tokens,
        num_heads=heads,
        num_columns=columns,
        table_width=pages.shape[1],
        queries_stride=queries.stride(0),
        heads_stride=queries.stride(1),
        weights_stride=head_weights.stride(0),
        pages_stride=pages.stride(0),
        candidates_stride=candidates.stride(0) if candidates is not None else 0,
        out_stride=out.stride(0),
        F=row_format,
        BLOCK_SIZE=block_size,
        HEADS=max(16, triton.next_power_of_2(heads)),
        TOKENS=together,
        KEYS=keys,
    )


@triton.jit(do_not_specialize=["width", "scores_stride", "out_stride"])
def _block_maxima(
    scores,
    num_visible,
    out,
    width,
    scores_stride,
    out_stride,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    LARGEST: tl.constexpr,
    MAXIMA: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch_ahead(EARLY)
    row = tl.program_id(0).to(tl.int64)
    visible = tl.minimum(tl.load(num_visible + row), width).to(tl.int32)
    blocks = (visible + BLOCK_SIZE - 1) // BLOCK_SIZE
    inside = tl.arange(0, PADDED)[None, :]
    for start in range(tl.program_id(1) * MAXIMA, blocks, tl.num_programs(1) * MAXIMA):
        block = start + tl.arange(0, MAXIMA)
        column = block[:, None] * BLOCK_SIZE + inside
        seen = (inside < BLOCK_SIZE) & (column < visible)
        x = tl.load(scores + row * scores_stride + column, seen, other=float("-inf")).to(tl.float32)
        # Infinity is kept for the newest block.
        x = tl.where(x != x, float("-inf"), tl.minimum(x, LARGEST))
        best = tl.where(block == blocks - 1, float("inf"), tl.max(x, axis=1))
        tl.store(out + row * out_stride + block, narrow(best, out.dtype.element_ty), block < blocks)


@torch.library.custom_op("dsv41::block_maxima", mutates_args=("out",))
def block_maxima(scores: Tensor, num_visible: Tensor, block_size: int, out: Tensor) -> None:
    """The best score of every block of `block_size` positions, which candidate blocks are chosen by.

    `scores` `[T, W]` bf16 or fp32, of which row t sees the first `num_visible[t]` (int64 `[T]`); `out`
    `[T, >= ceil(W / block_size)]` in the same dtype. NaN counts as -inf. The newest visible block, which may be
    partial, is infinite, and no other is. A block that a row does not see is not written.
    """
    rows, width = scores.shape
    groups = triton.cdiv(triton.cdiv(width, block_size), MAXIMA)
    launch(
        _block_maxima,
        (rows, min(groups, max(1, PROGRAMS // max(rows, 1)))),
        scores=scores,
        num_visible=num_visible,
        out=out,
        width=width,
        scores_stride=scores.stride(0),
        out_stride=out.stride(0),
        BLOCK_SIZE=block_size,
        PADDED=triton.next_power_of_2(block_size),
        LARGEST=torch.finfo(scores.dtype).max,
        MAXIMA=MAXIMA,
    )
