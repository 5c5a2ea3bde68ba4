"""Sparse multi-query attention over two paged caches, with a sink: decode and prefill, any record, 1 to 128 heads.

A token has few keys (128 window rows, at most 512 compressed ones), so attention is two launches of small tiles, many
of which fit on a multiprocessor at a time, instead of one whose accumulators fill it. `_score` owns a tile of keys: its
scores, and their softmax relative to the tile's own maximum. `_mix` owns a slice of the output's dims: it puts the
tiles on one scale, with the sink, and sums the rows. Both split a single token's work over many programs, by keys and
by dims, and neither has state that grows with the heads' 512 dims.

The query's rotation is part of `_score`; the output's inverse rotation and its cast to MXFP8 are part of `_mix`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable import formats
from dsv41.backends.portable.caches import kernel_arguments
from dsv41.backends.portable.early import wait_for_launch_ahead
from dsv41.backends.portable.formats import RowFormat
from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.numbers import decode_e4m3, decode_ue8m0, dot, narrow, round_to
from dsv41.backends.portable.quantize import GROUP, mxfp8
from dsv41.backends.portable.rotation import rotate
from dsv41.backends.portable.rows import load_codes, load_plain, load_scales, scale_offset, scale_rows
from dsv41.backends.portable.target import native_fp8
from dsv41.backends.portable.tuning import attention_tiles
from dsv41.errors import InputError

_E4M3_SCALE = tl.constexpr(formats.E4M3_SCALE)
_TENSOR_SCALE, _NO_SCALE = tl.constexpr(formats.TENSOR_SCALE), tl.constexpr(formats.NO_SCALE)
_GROUP = tl.constexpr(GROUP)
_LOG2_E = tl.constexpr(1.4426950408889634)
_SLICE = tl.constexpr(64)
"""Dims that are handled together. No record changes its encoding inside one, and rotated dims are in the last."""


@triton.jit
def _row_scales(cache, slot, live, start, F: tl.constexpr):
    """float32 scales of a slice from dim `start` on: `[keys, its groups]`. A row's scale bytes are fetched eight at a
    time where they are in one piece."""
    GROUPS: tl.constexpr = max(_SLICE // F.group, 1)
    group = start // F.group + tl.arange(0, GROUPS)[None, :]
    if F.scale_tile_rows == 0 and F.scale_bytes % 8 == 0:
        page, row = scale_rows(cache, slot, F)
        where = page + scale_offset(row, start // F.group // 8 * 8, F)
        eight = tl.load(where.to(tl.pointer_type(tl.int64)), live, other=0)
        codes = (eight[:, None] >> (group % 8 * 8)).to(tl.uint8)
        scales = decode_e4m3(codes, False) if F.scale == _E4M3_SCALE else decode_ue8m0(codes)
    else:
        scales = load_scales(cache, slot[:, None], live[:, None], group, F)
    return scales


@triton.jit
def _slice(cache, slot, live, start, PLAIN: tl.constexpr, F: tl.constexpr, DTYPE: tl.constexpr):
    """A slice from dim `start` on of a tile's rows: float32 `[keys, 64]`. `PLAIN` says that these are dims behind the
    coded."""
    KEYS: tl.constexpr = slot.shape[0]
    dim = start + tl.arange(0, _SLICE)[None, :]
    slots, lives = slot[:, None], live[:, None]
    if PLAIN:
        x = load_plain(cache, slots, lives, dim, F)
    elif F.scale == _NO_SCALE:
        x = round_to(load_codes(cache, slots, lives, dim, F), DTYPE)
    elif F.scale == _TENSOR_SCALE:
        x = round_to(load_codes(cache, slots, lives, dim, F) * load_scales(cache, slots, lives, 0, F), DTYPE)
    elif F.group >= _SLICE:
        x = load_codes(cache, slots, lives, dim, F) * _row_scales(cache, slot, live, start, F)
    else:
        GROUPS: tl.constexpr = _SLICE // F.group
        x = tl.reshape(load_codes(cache, slots, lives, dim, F), (KEYS, GROUPS, F.group))
        x = tl.reshape(x * _row_scales(cache, slot, live, start, F)[:, :, None], (KEYS, _SLICE))
    return x


@triton.jit
def _load_slots(slots, key, count, capacity):
    """The slots of some of a token's keys, and whether each is one; nothing is read for those that are not."""
    slot = tl.load(slots + key, key < count, other=-1)
    return slot, (slot >= 0) & (slot < capacity)


@triton.jit
def _load_query(q, start, live_head):
    """A slice of the query, float32 `[heads, 64]`; `q` points at each head `[heads, 1]`."""
    return tl.load(q + start + tl.arange(0, _SLICE)[None, :], live_head[:, None], other=0.0).to(tl.float32)


@triton.jit
def _score_tile(
    q, head, live_head, position, cos_sin, weights, stats, cache, slots, tile, count, capacity, scale, q_stride_h,
    F: tl.constexpr, KEYS: tl.constexpr, ROPE: tl.constexpr, ROTATE_QUERY: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Scores of `KEYS` keys of one cache; `weights` and `stats` point at the tile's place, for each head."""
    slot, live = _load_slots(slots, tile * KEYS + tl.arange(0, KEYS), count, capacity)
    share = tl.zeros((head.shape[0], KEYS), tl.float32)
    top = tl.full(head.shape, float("-inf"), tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    if tl.max(live.to(tl.int32)) > 0:
        scores = tl.zeros((head.shape[0], KEYS), tl.float32)
        # The last slice is apart: it alone may be rotated, or of dims behind the coded.
        LAST: tl.constexpr = F.dim - _SLICE
        query_row = q + head[:, None] * q_stride_h
        for start in range(0, LAST, _SLICE):
            start = tl.multiple_of(start, _SLICE)  # which the compiler does not see, and needs for wide loads
            query = _load_query(query_row, start, live_head)
            rows = _slice(cache, slot, live, start, False, F, DTYPE)
            scores = dot(query, tl.trans(rows), scores, DTYPE)
        query = _load_query(query_row, LAST, live_head)
        if ROTATE_QUERY:
            query = round_to(rotate(query, cos_sin, position, ROPE), DTYPE)
        rows = _slice(cache, slot, live, LAST, F.coded < F.dim, F, DTYPE)
        scores = dot(query, tl.trans(rows), scores, DTYPE)
        scores = tl.where(live[None, :], scores * scale, float("-inf"))
        top = tl.max(scores, axis=1)
        shift = tl.where(top == float("-inf"), 0.0, top)  # as where all scores are -inf
        share = tl.exp2(scores - shift[:, None])
        total = tl.sum(share, axis=1)
    # A key that is none has the weight 0, so that `_mix` needs no mask, which would break its loads into small ones.
    tl.store(weights[:, None] + tl.arange(0, KEYS)[None, :], share, live_head[:, None])
    tl.store(stats, top, live_head)
    tl.store(stats + 1, total, live_head)


@triton.jit(do_not_specialize=["num_heads", "num_window", "num_compressed"])
def _score(
    q, q_stride_t, q_stride_h, num_heads, scale, positions, cos_sin,
    window, window_pool, window_scale, window_stride, window_pool_stride, window_slots, num_window, window_capacity,
    compressed, compressed_pool, compressed_scale, compressed_stride, compressed_pool_stride,
    compressed_slots, num_compressed, compressed_capacity, weights, stats,
    W: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, ROPE: tl.constexpr,
    ROTATE_QUERY: tl.constexpr, DTYPE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs: tokens x blocks of HEADS heads x tiles of KEYS keys, the tiles of a token next to each other."""
    wait_for_launch_ahead(EARLY)
    window_tiles = tl.cdiv(num_window, KEYS)
    tiles = window_tiles + tl.cdiv(num_compressed, KEYS)
    head_blocks = tl.cdiv(num_heads, HEADS)
    tile = tl.program_id(0) % tiles
    token = (tl.program_id(0) // tiles // head_blocks).to(tl.int64)
    head = tl.program_id(0) // tiles % head_blocks * HEADS + tl.arange(0, HEADS)
    live_head = head < num_heads
    position = tl.zeros((), tl.int64)
    if ROTATE_QUERY:
        position = tl.maximum(tl.load(positions + token), 0)

    q += token * q_stride_t
    row = (token * num_heads + head) * tiles + tile
    weights += row * KEYS
    stats += row * 2
    if tile < window_tiles:
        _score_tile(
            q, head, live_head, position, cos_sin, weights, stats,
            (window, window_pool, window_scale, window_stride, window_pool_stride),
            window_slots + token * num_window, tile, num_window, window_capacity, scale * _LOG2_E, q_stride_h,
            W, KEYS, ROPE, ROTATE_QUERY, DTYPE,
        )  # fmt: skip
    else:
        if C is not None:
            _score_tile(
                q, head, live_head, position, cos_sin, weights, stats,
                (compressed, compressed_pool, compressed_scale, compressed_stride, compressed_pool_stride),
                compressed_slots + token * num_compressed, tile - window_tiles, num_compressed, compressed_capacity,
                scale * _LOG2_E, q_stride_h, C, KEYS, ROPE, ROTATE_QUERY, DTYPE,
            )  # fmt: skip


@triton.jit
def _walk(
    sums, weights, stats, live_head, shift, cache, slots, count, capacity, start,
    PLAIN: tl.constexpr, F: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add one cache's rows, weighted, `STEP` keys at a time, to the sums of some slices of dims; `weights` and `stats`
    point at its first tile, for each head. `PLAIN` says that the last slice is of dims behind the coded."""
    SLICES: tl.constexpr = len(sums)
    for step in range(tl.cdiv(count, STEP)):
        key = step * STEP + tl.arange(0, STEP)
        slot, live = _load_slots(slots, key, count, capacity)
        factor = tl.exp2(tl.load(stats + step * STEP // KEYS * 2, live_head, other=float("-inf")) - shift)
        at = weights[:, None] + key[None, :]
        share = tl.load(at, live_head[:, None], other=0.0).to(tl.float32) * factor[:, None]
        added = ()
        for i in tl.static_range(SLICES):
            rows = _slice(cache, slot, live, start + i * _SLICE, PLAIN and i == SLICES - 1, F, DTYPE)
            added = added + (dot(share, rows, sums[i], DTYPE),)
        sums = added
    return sums


@triton.jit
def _mix_cache(
    sums, weights, stats, live_head, shift, cache, slots, count, capacity, start,
    F: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`_walk` over the slices from dim `start` on, whatever their encoding."""
    if F.coded == F.dim or start + len(sums) * _SLICE <= F.coded:
        sums = _walk(
            sums, weights, stats, live_head, shift, cache, slots, count, capacity, start, False, F, KEYS, STEP, DTYPE
        )
    else:
        sums = _walk(
            sums, weights, stats, live_head, shift, cache, slots, count, capacity, start, True, F, KEYS, STEP, DTYPE
        )
    return sums


@triton.jit
def _store_output(
    x, head, live_head, position, out, out_scale, cos_sin, out_stride_h, start,
    DIM: tl.constexpr, ROPE: tl.constexpr, ROTATE_BACK: tl.constexpr, QUANTIZE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A slice from dim `start` on of a token's output, float32 `[heads, 64]`: rounded, rotated back if asked for, and
    stored in `DTYPE` or as MXFP8. `out` and `out_scale` point at the token."""
    HEADS: tl.constexpr = x.shape[0]
    x = round_to(x, DTYPE)
    if ROTATE_BACK and start == DIM - _SLICE:
        x = round_to(rotate(x, cos_sin, position, ROPE, INVERSE=True), DTYPE)
    at = head[:, None] * out_stride_h + start + tl.arange(0, _SLICE)[None, :]
    if QUANTIZE:
        codes, scales = mxfp8(tl.reshape(x, (HEADS * _SLICE,)))
        tl.store(out + at, tl.reshape(codes, (HEADS, _SLICE)), live_head[:, None])
        group = tl.arange(0, _SLICE // _GROUP)[None, :]
        at = (head[:, None] * out_stride_h + start) // _GROUP + group
        tl.store(out_scale + at, tl.reshape(scales, (HEADS, _SLICE // _GROUP)), live_head[:, None])
    else:
        tl.store(out + at, narrow(x, DTYPE), live_head[:, None])


@triton.jit(do_not_specialize=["num_heads", "num_window", "num_compressed"])
def _mix(
    weights, stats, num_heads, sink, positions, cos_sin,
    window, window_pool, window_scale, window_stride, window_pool_stride, window_slots, num_window, window_capacity,
    compressed, compressed_pool, compressed_scale, compressed_stride, compressed_pool_stride,
    compressed_slots, num_compressed, compressed_capacity, out, out_scale, out_stride_t, out_stride_h,
    W: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr,
    SLICES: tl.constexpr, TILES: tl.constexpr, ROPE: tl.constexpr, ROTATE_BACK: tl.constexpr,
    QUANTIZE: tl.constexpr, DTYPE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs: tokens x blocks of HEADS heads x runs of SLICES slices of dims, those of a token next to each other.
    TILES is the number of tiles, rounded up to a power of two."""
    wait_for_launch_ahead(EARLY)
    window_tiles = tl.cdiv(num_window, KEYS)
    tiles = window_tiles + tl.cdiv(num_compressed, KEYS)
    head_blocks = tl.cdiv(num_heads, HEADS)
    RUNS: tl.constexpr = W.dim // (SLICES * _SLICE)
    start = tl.program_id(0) % RUNS * (SLICES * _SLICE)
    token = (tl.program_id(0) // RUNS // head_blocks).to(tl.int64)
    head = tl.program_id(0) // RUNS % head_blocks * HEADS + tl.arange(0, HEADS)
    live_head = head < num_heads
    position = tl.zeros((), tl.int64)
    if ROTATE_BACK:
        position = tl.maximum(tl.load(positions + token), 0)

    row = (token * num_heads + head) * tiles
    weights += row * KEYS
    stats += row * 2
    tile = tl.arange(0, TILES)[None, :]
    known = live_head[:, None] & (tile < tiles)
    tops = tl.load(stats[:, None] + tile * 2, known, other=float("-inf"))
    totals = tl.load(stats[:, None] + tile * 2 + 1, known, other=0.0)
    own_sink = tl.load(sink + head, live_head, other=float("-inf")) * _LOG2_E
    top = tl.maximum(tl.max(tops, axis=1), own_sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    # An infinite sink takes all the weight, and its difference to itself would be NaN.
    sink_weight = tl.where(own_sink == shift, 1.0, tl.exp2(own_sink - shift))
    total = tl.sum(totals * tl.exp2(tops - shift[:, None]), axis=1) + sink_weight

    sums = ()
    for _ in tl.static_range(SLICES):
        sums = sums + (tl.zeros((HEADS, _SLICE), tl.float32),)
    sums = _mix_cache(
        sums, weights, stats, live_head, shift,
        (window, window_pool, window_scale, window_stride, window_pool_stride),
        window_slots + token * num_window, num_window, window_capacity, start, W, KEYS, STEP, DTYPE,
    )  # fmt: skip
    if C is not None:
        sums = _mix_cache(
            sums, weights + window_tiles * KEYS, stats + window_tiles * 2, live_head, shift,
            (compressed, compressed_pool, compressed_scale, compressed_stride, compressed_pool_stride),
            compressed_slots + token * num_compressed, num_compressed, compressed_capacity, start, C, KEYS, STEP, DTYPE,
        )  # fmt: skip

    total = tl.where(total == 0.0, 1.0, total)
    out += token * out_stride_t
    if QUANTIZE:
        out_scale += token * (out_stride_t // _GROUP)
    for i in tl.static_range(SLICES):
        x = tl.div_rn(sums[i], total[:, None] + tl.zeros_like(sums[i]))
        _store_output(
            x, head, live_head, position, out, out_scale, cos_sin, out_stride_h, start + i * _SLICE,
            W.dim, ROPE, ROTATE_BACK, QUANTIZE, DTYPE,
        )  # fmt: skip


_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
KEYS = 64
"""Keys of a tile. The workspace's size follows from it, so it is the same for all."""


def workspace_bytes(tokens: int, heads: int, num_window: int, num_compressed: int, dtype: torch.dtype) -> int:
    """Bytes of workspace that `attend` needs for that many tokens: each key's weight, two statistics a tile."""
    tiles = triton.cdiv(num_window, KEYS) + triton.cdiv(num_compressed, KEYS)
    weight = 4 if dtype == torch.float32 else 2
    return int(tokens * heads * tiles * (KEYS * weight + 8))


@torch.library.custom_op("dsv41::attend", mutates_args=("workspace", "out", "out_scale"))
def attend(
    q: Tensor,
    num_heads: int,
    sink: Tensor,
    scale: float,
    window: Tensor,
    window_pool: Tensor | None,
    window_scale: Tensor | None,
    window_format: list[int],
    window_slots: Tensor,
    compressed: Tensor | None,
    compressed_pool: Tensor | None,
    compressed_scale: Tensor | None,
    compressed_format: list[int],
    compressed_slots: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    rotate_query: bool,
    rotate_back: bool,
    workspace: Tensor,
    out: Tensor,
    out_scale: Tensor | None,
) -> None:
    """Attention of `q` `[T, >= num_heads, D]` over its window rows and, where given, its compressed rows, into `out`.

    `window_slots` and `compressed_slots` int64 `[T, n]` (-1 = none; contiguous); `compressed_format` is empty where
    there is no such cache. `sink` float32 `[num_heads]` joins the denominator only. `rotate_query` rotates the last
    dims of the query at `positions` int64 `[T]` first, `rotate_back` those of the output after. `workspace` is uint8 of
    any size from `workspace_bytes` of one token on, 16-byte aligned; with less than all tokens need, they go in turns.

    `out` is `[T, >= num_heads, D]` in q's dtype (heads past `num_heads` stay as they are), or, where `out_scale` uint8
    `[T, num_heads * D / 32]` is given, MXFP8 codes uint8 `[T, num_heads * D]`. A token with no row gets zeros.
    """
    if cos_sin.shape[1] > 64:
        raise InputError(
            f"cos_sin has {cos_sin.shape[1]} numbers a position: expected at most 64, since attention rotates the last "
            "64 dims; use the reference for wider rotations"
        )
    native = native_fp8(q.device)
    w = _native(tuple(window_format), native)
    c = _native(tuple(compressed_format), native) if compressed_format else None
    num_window = window_slots.shape[1]
    num_compressed = compressed_slots.shape[1] if compressed_slots is not None else 0
    tiles = triton.cdiv(num_window, KEYS) + triton.cdiv(num_compressed, KEYS)
    if q.shape[0] == 0 or num_heads == 0:
        return
    per_token = workspace_bytes(1, num_heads, num_window, num_compressed, q.dtype)
    turn = max(1, workspace.numel() // max(per_token, 1))
    if turn > 16:  # or what a turn begins with is less aligned, which is another kernel
        turn -= turn % 16
    small_groups = any(form is not None and 0 < form.group < 64 for form in (w, c))
    score_tiles, mix_tiles = attention_tiles(q.shape[0], num_heads, small_groups, q.device)
    for first in range(0, q.shape[0], turn):
        part = slice(first, first + turn)
        tokens = q[part].shape[0]
        numbers = tokens * num_heads * tiles
        weights_dtype = torch.float32 if q.dtype == torch.float32 else torch.float16
        weights_end = numbers * KEYS * weights_dtype.itemsize
        weights = workspace[:weights_end].view(weights_dtype)
        stats = workspace[weights_end : weights_end + numbers * 8].view(torch.float32)
        shared = {
            "num_heads": num_heads,
            "positions": positions[part],
            "cos_sin": cos_sin,
            **kernel_arguments("window", window, window_pool, window_scale),
            "window_slots": window_slots[part],
            "num_window": num_window,
            "window_capacity": window.shape[0] * w.page_size,
            **kernel_arguments("compressed", compressed, compressed_pool, compressed_scale),
            "compressed_slots": compressed_slots[part] if compressed_slots is not None else None,
            "num_compressed": num_compressed,
            "compressed_capacity": compressed.shape[0] * c.page_size if compressed is not None and c is not None else 0,
            "weights": weights,
            "stats": stats,
            "W": w,
            "C": c,
            "KEYS": KEYS,
            "ROPE": cos_sin.shape[1],
            "DTYPE": _TRITON_DTYPES[q.dtype],
        }
        blocks = tokens * triton.cdiv(num_heads, score_tiles.heads)
        launch(
            _score,
            (blocks * tiles,),
            num_warps=score_tiles.num_warps,
            num_stages=score_tiles.num_stages,
            max_registers=score_tiles.max_registers,
            fp_fusion=True,
            q=q[part],
            q_stride_t=q.stride(0),
            q_stride_h=q.stride(1),
            scale=scale,
            HEADS=score_tiles.heads,
            ROTATE_QUERY=rotate_query,
            **shared,
        )
        quantize = out_scale is not None
        blocks = tokens * triton.cdiv(num_heads, mix_tiles.heads)
        launch(
            _mix,
            (blocks * (w.dim // (mix_tiles.slices * 64)),),
            num_warps=mix_tiles.num_warps,
            num_stages=mix_tiles.num_stages,
            fp_fusion=True,
            sink=sink,
            out=out[part],
            out_scale=out_scale[part] if out_scale is not None else None,
            out_stride_t=out.stride(0),
            out_stride_h=w.dim if quantize else out.stride(1),
            HEADS=mix_tiles.heads,
            STEP=mix_tiles.keys,
            SLICES=mix_tiles.slices,
            TILES=triton.next_power_of_2(max(tiles, 1)),
            ROTATE_BACK=rotate_back,
            QUANTIZE=quantize,
            **shared,
        )


@cache
def _native(numbers: tuple[int, ...], dialect: str | None) -> RowFormat:
    """A format whose bytes the device converts itself, if they are in the `dialect` that it converts."""
    form = RowFormat.from_numbers(numbers)
    own = {formats.OCP: "ocp", formats.FNUZ: "fnuz"}.get(form.code)
    return replace(form, native=int(own is not None and own == dialect))
