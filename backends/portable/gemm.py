"""Projections: activations times block-scaled fp8 or plain weights, which stay as they are in memory.

A program owns a tile of output features of one group and a tile of tokens. e4m3 codes are exact in fp16, and so are
they in bf16 once they are multiplied by a power of two: products are exact, and only their sum, in fp32, rounds.

Many tokens are bound by the products: a tile of weights is widened and scaled once for all tokens of a wide tile. Few
tokens are bound by reading the weights. Then slices of the rows are multiplied side by side and added up at the end, so
that narrow tiles, of which there are many, still keep the memory busy; and if both sides are coded, the columns that
share a scale are a slice, and scales multiply sums instead of codes. Where tiles are few all the same, programs share
the columns of one, and a second launch adds up what each found, always in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable.early import wait_for_launch_ahead
from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.numbers import INTERPRETED, decode_ue8m0, e4m3_fields, narrow, round_to
from dsv41.backends.portable.quantize import GROUP
from dsv41.backends.portable.target import native_fp8

_GROUP = tl.constexpr(GROUP)
_BAND = tl.constexpr(8)
"""Tiles of tokens that meet one tile of weights before the next does: what both read stays in the cache."""
_WIDEN = (16, 256)
"""Tokens and columns that a program widens."""
_PROGRAMS = 512
"""So many programs, or fewer, share the columns of tiles: a few on each multiprocessor of a large GPU."""
_MOST_SPLITS, _FEWEST_TURNS = 8, 4
"""Programs that share a tile, and turns of the loop over columns that each of them keeps."""
_ADDED = 1024
"""Results that a program adds up."""


@triton.jit
def _place(num_rows, num_tokens, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """The features `[ROWS]` (of the program's group) and tokens `[TOKENS]` of a program."""
    row_tiles, token_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_tokens, TOKENS)
    band = tl.program_id(0) // (_BAND * row_tiles)
    place = tl.program_id(0) - band * _BAND * row_tiles
    height = tl.minimum(token_tiles - band * _BAND, _BAND)
    row = place // height * ROWS + tl.arange(0, ROWS)
    token = (band * _BAND + place % height) * TOKENS + tl.arange(0, TOKENS)
    return row, token


@triton.jit
def _store(out, out_stride, acc, row, token, num_rows, num_tokens):
    """Write `acc` `[rows, tokens]`."""
    column = tl.program_id(1) * num_rows + row
    where = out + token.to(tl.int64)[None, :] * out_stride + column[:, None]
    tl.store(where, narrow(acc, out.dtype.element_ty), (row < num_rows)[:, None] & (token < num_tokens)[None, :])


@triton.jit
def _decode(codes, NATIVE: tl.constexpr):
    """fp16 of e4m3 bytes (OCP) but NaN: weights hold none, and activations have it in their scale."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16) if NATIVE else e4m3_fields(codes) * 256.0


@triton.jit
def _load(row, live, start, K, WIDTH: tl.constexpr):
    """`[rows, WIDTH]`: columns from `start` on of the rows at the pointers `row` `[rows, 1]`, zeros outside."""
    column = start + tl.arange(0, WIDTH)[None, :]
    return tl.load(row + column, live & (column < K), other=0)


@triton.jit
def _load_scales(row, live, start, K, COLS: tl.constexpr, SHARE: tl.constexpr, COUNT: tl.constexpr):
    """float32 `[rows, COUNT]`: the scales of columns `start`, `start + SHARE`, ...; a byte is for `COLS` columns."""
    column = start + tl.arange(0, COUNT)[None, :] * SHARE
    return decode_ue8m0(tl.load(row + column // COLS, live & (column < K), other=0))


@triton.jit
def _scaled(codes, scales, NATIVE: tl.constexpr):
    """float32 `[rows, n]` of codes, each of `scales` `[rows, m]` multiplying n / m neighbours."""
    SHARE: tl.constexpr = codes.shape[1] // scales.shape[1]
    grouped = tl.reshape(_decode(codes, NATIVE).to(tl.float32), (scales.shape[0], scales.shape[1], SHARE))
    return tl.reshape(grouped * scales[:, :, None], codes.shape)


@triton.jit
def _sliced(x, SLICES: tl.constexpr):
    """`[SLICES, rows, n // SLICES]` of `[rows, n]`."""
    return tl.permute(tl.reshape(x, (x.shape[0], SLICES, x.shape[1] // SLICES)), (1, 0, 2))


@triton.jit(do_not_specialize=["num_tokens", "x_scale_stride", "x_scale_group_stride"])
def _coded_gemm(
    x,
    x_stride,
    x_group_stride,
    x_scale,
    x_scale_stride,
    x_scale_group_stride,
    weight,
    weight_scale,
    out,
    out_stride,
    num_tokens,
    num_rows,
    K,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch_ahead(EARLY)
    SLICES: tl.constexpr = WIDTH // _GROUP
    group = tl.program_id(1)
    row, token = _place(num_rows, num_tokens, ROWS, TOKENS)
    row_live, token_live = (row < num_rows)[:, None], (token < num_tokens)[:, None]
    weight_row, x_row = (group * num_rows + row).to(tl.int64)[:, None], token.to(tl.int64)[:, None]
    weight_scale += weight_row // BLOCK_ROWS * tl.cdiv(K, BLOCK_COLS)
    x_scale += x_row * x_scale_stride + group * x_scale_group_stride
    weight += weight_row * K
    x += x_row * x_stride + group * x_group_stride

    acc = tl.zeros((SLICES, ROWS, TOKENS), tl.float32)
    for start in range(0, K, WIDTH):
        w = _sliced(_decode(_load(weight, row_live, start, K, WIDTH), NATIVE), SLICES)
        a = _sliced(_decode(_load(x, token_live, start, K, WIDTH), NATIVE), SLICES)
        sums = tl.dot(w, tl.permute(a, (0, 2, 1)), out_dtype=tl.float32)
        w_scale = _load_scales(weight_scale, row_live, start, K, BLOCK_COLS, _GROUP, SLICES)
        a_scale = _load_scales(x_scale, token_live, start, K, _GROUP, _GROUP, SLICES)
        acc += sums * tl.trans(a_scale)[:, None, :] * tl.trans(w_scale)[:, :, None]
    _store(out, out_stride, tl.sum(acc, axis=0), row, token, num_rows, num_tokens)


@triton.jit
def _multiply(w, x, acc, DOT: tl.constexpr):
    """`acc` plus the products of float32 `w` `[rows, n]` and `x` `[tokens, n]`: `[rows, tokens]`, or
    `[slices, rows, tokens]` with the products of each slice of n apart."""
    if not INTERPRETED:
        w, x = w.to(DOT), x.to(DOT)
    if len(acc.shape) == 2:
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        w, x = _sliced(w, acc.shape[0]), _sliced(x, acc.shape[0])
        acc = tl.dot(w, tl.permute(x, (0, 2, 1)), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_tokens", "turns"])
def _gemm(
    x,
    x_stride,
    x_group_stride,
    weight,
    weight_scale,
    out,
    out_stride,
    partial,
    turns,
    num_tokens,
    num_rows,
    K,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SHARE: tl.constexpr,
    DOT: tl.constexpr,
    EXACT_FP32: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLICES: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch_ahead(EARLY)
    group = tl.program_id(1)
    row, token = _place(num_rows, num_tokens, ROWS, TOKENS)
    row_live, token_live = (row < num_rows)[:, None], (token < num_tokens)[:, None]
    weight_row = (group * num_rows + row).to(tl.int64)[:, None]
    if weight_scale is not None:
        weight_scale += weight_row // BLOCK_ROWS * tl.cdiv(K, BLOCK_COLS)
    weight += weight_row * K
    x += token.to(tl.int64)[:, None] * x_stride + group * x_group_stride

    SHAPE: tl.constexpr = (ROWS, TOKENS) if SLICES == 1 else (SLICES, ROWS, TOKENS)
    acc = tl.zeros(SHAPE, tl.float32)
    begin, end = 0, K
    if partial is not None:
        begin = tl.program_id(2) * turns * WIDTH
        end = tl.minimum(begin + turns * WIDTH, K)
    for start in range(begin, end, WIDTH):
        w = _load(weight, row_live, start, K, WIDTH)
        if weight_scale is None:
            w = w.to(tl.float32)
        else:
            w = _scaled(w, _load_scales(weight_scale, row_live, start, K, BLOCK_COLS, SHARE, WIDTH // SHARE), NATIVE)
        a = _load(x, token_live, start, K, WIDTH).to(tl.float32)
        high = round_to(w, DOT)
        if EXACT_FP32:
            # The 24 bits of a float32 weight are three bf16 numbers, whose products are exact.
            middle = round_to(w - high, DOT)
            acc = _multiply(w - high - middle, a, acc, DOT)
            acc = _multiply(middle, a, acc, DOT)
        acc = _multiply(high, a, acc, DOT)
    if SLICES > 1:
        acc = tl.sum(acc, axis=0)
    if partial is None:
        _store(out, out_stride, acc, row, token, num_rows, num_tokens)
    else:
        width = tl.num_programs(1).to(tl.int64) * num_rows
        mine = partial + tl.program_id(2).to(tl.int64) * num_tokens * width
        _store(mine, width, acc, row, token, num_rows, num_tokens)


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def _add(partial, out, out_stride, num_tokens, num_rows, splits, ADDED: tl.constexpr, EARLY: tl.constexpr):
    """`out` `[tokens, rows]` of `partial` `[splits, tokens, rows]`."""
    wait_for_launch_ahead(EARLY)
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * ADDED + tl.arange(0, ADDED)
    live = row < num_rows
    acc = tl.zeros((ADDED,), tl.float32)
    partial += token * num_rows
    for _ in range(splits):
        acc += tl.load(partial + row, live, other=0.0)
        partial += num_tokens.to(tl.int64) * num_rows
    tl.store(out + token * out_stride + row, narrow(acc, out.dtype.element_ty), live)


@triton.jit(do_not_specialize=["num_tokens", "x_scale_stride", "x_scale_group_stride"])
def _widen(
    x,
    x_stride,
    x_group_stride,
    x_scale,
    x_scale_stride,
    x_scale_group_stride,
    out,
    num_tokens,
    K,
    NATIVE: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch_ahead(EARLY)
    group, start = tl.program_id(1), tl.program_id(2) * WIDTH
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    live = token < num_tokens
    codes = _load(x + token * x_stride + group * x_group_stride, live, start, K, WIDTH)
    x_scale += token * x_scale_stride + group * x_scale_group_stride
    wide = _scaled(codes, _load_scales(x_scale, live, start, K, _GROUP, _GROUP, WIDTH // _GROUP), NATIVE)
    column = start + tl.arange(0, WIDTH)[None, :]
    where = out + (token * tl.num_programs(1) + group) * K + column
    tl.store(where, narrow(wide, out.dtype.element_ty), live & (column < K))


@dataclass(frozen=True)
class GemmTiles:
    """`rows` x `tokens` of a program's tile, `width` columns at a time in `slices`."""

    rows: int
    tokens: int
    width: int
    slices: int
    num_warps: int
    num_stages: int


def coded_tiles(tokens: int, rows: int) -> GemmTiles | None:
    """For codes by codes, with `slices` as many as there are scales in `width`; None where tokens are so many that they
    are better widened first."""
    if tokens > 64:
        return None
    if tokens > 16:
        return GemmTiles(32, 32 if tokens <= 32 else 64, 128, 4, num_warps=4, num_stages=3)
    if rows >= 8192:
        return GemmTiles(32, 16, 256, 8, num_warps=4, num_stages=4)
    return GemmTiles(16, 16, 512, 16, num_warps=4, num_stages=4)


def gemm_tiles(tokens: int, fp32_products: bool, weight_bytes: int) -> GemmTiles:
    """For all other products, by weights of 1, 2 or 4 bytes."""
    if fp32_products:
        return GemmTiles(32, 32, 32, 1, num_warps=4, num_stages=2)
    if tokens <= 16 and weight_bytes == 1:
        return GemmTiles(32, 16, 256, 4, num_warps=4, num_stages=3)
    if tokens <= 16:
        return GemmTiles(16, 16, 256 if weight_bytes < 4 else 128, 4, num_warps=4, num_stages=4)
    if tokens <= 32:
        return GemmTiles(16, 32, 256 if weight_bytes == 1 else 128, 4, num_warps=4, num_stages=3)
    if weight_bytes == 4:
        return GemmTiles(64, 64, 32, 1, num_warps=4, num_stages=3)
    if tokens <= 64:
        return GemmTiles(64 if weight_bytes == 1 else 32, 64, 64, 1, num_warps=4, num_stages=3)
    if tokens <= 256:
        return GemmTiles(64, 128, 64, 1, num_warps=4, num_stages=3)
    return GemmTiles(128, 128, 64, 1, num_warps=8, num_stages=3)


def splits_of(tiles: GemmTiles, tokens: int, rows: int, groups: int, columns: int) -> int:
    """How many programs share the columns of a tile."""
    programs = triton.cdiv(rows, tiles.rows) * triton.cdiv(tokens, tiles.tokens) * groups
    room: int = min(_PROGRAMS // max(programs, 1), columns // (tiles.width * _FEWEST_TURNS), _MOST_SPLITS)
    return 1 << max(room, 1).bit_length() - 1


def _project(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    block_rows: int,
    block_cols: int,
    out: Tensor,
) -> None:
    """`grouped_linear`, of which `linear` is the case of one group."""
    tokens, groups, columns = x.shape
    rows = weight.shape[0] // groups
    native = native_fp8(x.device) == "ocp"
    common: dict[str, Any] = {
        "weight": weight,
        "weight_scale": weight_scale,
        "out": out,
        "out_stride": out.stride(0),
        "num_tokens": tokens,
        "num_rows": rows,
        "K": columns,
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLS": block_cols,
        "NATIVE": native,
        "fp_fusion": True,
    }

    def run(kernel: Any, tiles: GemmTiles, splits: int = 1, **arguments: Any) -> None:
        launch(
            kernel,
            (triton.cdiv(rows, tiles.rows) * triton.cdiv(tokens, tiles.tokens), groups, splits),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            ROWS=tiles.rows,
            TOKENS=tiles.tokens,
            WIDTH=tiles.width,
            **common,
            **arguments,
        )

    if x_scale is not None:
        coded = coded_tiles(tokens, weight.shape[0])
        if coded is not None and weight_scale is not None and block_cols % GROUP == 0:
            run(
                _coded_gemm,
                coded,
                x=x,
                x_stride=x.stride(0),
                x_group_stride=x.stride(1),
                x_scale=x_scale,
                x_scale_stride=x_scale.stride(0),
                x_scale_group_stride=x_scale.stride(1),
            )
            return
        x = _widened(x, x_scale, torch.float32 if out.dtype == torch.float32 else torch.bfloat16, native)

    fp32 = x.dtype == torch.float32
    tiles = gemm_tiles(tokens, fp32, weight.element_size())
    splits = 1 if fp32 else splits_of(tiles, tokens, rows, groups, columns)
    partial = None
    if splits > 1:
        partial = torch.empty(splits, tokens, rows * groups, dtype=torch.float32, device=x.device)
    run(
        _gemm,
        tiles,
        splits,
        partial=partial,
        turns=triton.cdiv(triton.cdiv(columns, tiles.width), splits),
        x=x,
        x_stride=x.stride(0),
        x_group_stride=x.stride(1),
        # A power of two that divides `block_cols`: so many columns have one scale.
        SHARE=min(tiles.width, block_cols & -block_cols),
        DOT=tl.float32 if fp32 else tl.bfloat16,
        EXACT_FP32=not fp32 and weight.dtype == out.dtype == torch.float32,
        SLICES=tiles.slices,
    )
    if partial is not None:
        launch(
            _add,
            (tokens, triton.cdiv(rows * groups, _ADDED)),
            partial=partial,
            out=out,
            out_stride=out.stride(0),
            num_tokens=tokens,
            num_rows=rows * groups,
            splits=splits,
            ADDED=_ADDED,
        )


def _widened(x: Tensor, scale: Tensor, dtype: torch.dtype, native: bool) -> Tensor:
    """The numbers `[N, G, K]` of MXFP8 codes."""
    tokens, groups, columns = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    rows, width = _WIDEN
    launch(
        _widen,
        (triton.cdiv(tokens, rows), groups, triton.cdiv(columns, width)),
        x=x,
        x_stride=x.stride(0),
        x_group_stride=x.stride(1),
        x_scale=scale,
        x_scale_stride=scale.stride(0),
        x_scale_group_stride=scale.stride(1),
        out=out,
        num_tokens=tokens,
        K=columns,
        NATIVE=native,
        TOKENS=rows,
        WIDTH=width,
    )
    return out


@torch.library.custom_op("dsv41::linear", mutates_args=("out",))
def linear(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    block_rows: int,
    block_cols: int,
    out: Tensor,
) -> None:
    """`x` `[N, K]` times `weight` `[M, K]` into `out` `[N, M]` (bf16 or fp32), summed in fp32 and rounded once.

    `x` is bf16, fp32, or MXFP8: uint8 e4m3 codes (OCP) with UE8M0 bytes `x_scale` `[N, ceil(K / 32)]`. `weight` is
    bf16, fp32, or uint8 codes with one byte a block in `weight_scale` `[ceil(M / block_rows), ceil(K / block_cols)]`.
    Rows of `x`, `x_scale` and `out` may lie any distance apart. Plain weights are first rounded to the dtype of `x`,
    except fp32 weights into an fp32 `out`, whose products with bf16 are exact. NaN codes in `weight`, which
    `prepare_weights` refuses, give something or other.
    """
    scale = None if x_scale is None else x_scale.unsqueeze(1)
    _project(x.unsqueeze(1), scale, weight, weight_scale, block_rows, block_cols, out)


@torch.library.custom_op("dsv41::grouped_linear", mutates_args=("out",))
def grouped_linear(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    block_rows: int,
    block_cols: int,
    out: Tensor,
) -> None:
    """`x` `[N, G, K]` times a block-diagonal `weight` `[G * M, K]` into `out` `[N, G * M]`: group g by its own rows.

    As `linear`, with `x_scale` `[N, G, ceil(K / 32)]`. A block of `weight_scale` may belong to two groups.
    """
    _project(x, x_scale, weight, weight_scale, block_rows, block_cols, out)
