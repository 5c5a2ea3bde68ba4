"""Index scores and the choice by them on Hopper: the launches of `kernels/index_*.cu`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from dsv41.backends import vendor
from dsv41.backends.cuda.build import Build
from dsv41.backends.cuda.launch import Kernel, int32, int64, pointer, uint32
from dsv41.errors import BackendError
from dsv41.hal.layout import CacheLayout, ScalePlacement
from dsv41.hal.records import INDEX_MXFP4_68
from dsv41.hal.types import LayerSpec

BLOCK = 8
"""Neighbouring positions of which the best score is kept: a candidate block."""
PADDING = 128
"""Columns, at most, that a row of scores or of best scores has room for beyond its own."""
_RECORD = INDEX_MXFP4_68
_HEADS, _TILE, _LEAST_PAGE = 32, 64, 16
_WAVES, _WORTH_A_CTA = 8, 32
"""How often as many scoring CTAs as run at a time there are, for some tokens see less than others, as long as each has
so many tiles."""
_KEYS = 32768
"""Scores that a CTA of the choice holds."""
_MOST_CHOSEN = 2048
_ALL_BLOCKS = 2048
"""Blocks of which the rows are looked at without a choice among the blocks before."""
_RANKS = (16, 8, 4, 2, 1)
"""CTAs that share a token's choice."""
_LOOKED_AT = 4096
"""Scores from which on two CTAs are faster than one: they cost each other half a microsecond a digit."""


def scoring(*, candidates: bool, ctas: int, depth: int) -> Build:
    """`ctas` on a multiprocessor, each with `depth` tiles on their way."""
    defines = {"CANDIDATES": int(candidates), "CTAS": ctas, "DEPTH": depth}
    lane_bytes = _RECORD.dim // 4 + 2 * _RECORD.scale_bytes
    return Build("index_scores", "scores", 128, ctas, _HEADS * _RECORD.dim * 2 + depth * 128 * lane_bytes, defines)


def choosing(*, threads: int) -> Build:
    """`threads` of a CTA, at least 256."""
    bins = 256
    held = _KEYS * 2 + _MOST_CHOSEN * 4
    counted = 2 * _RANKS[0] * bins * 2 + 5 * (bins + BLOCK) * 4 + bins * 4 + threads // 32 * 4
    defines = {"THREADS": threads, "KEYS": _KEYS, "MOST_BLOCKS": _MOST_CHOSEN}
    return Build("index_choice", "other", threads, 1024 // threads, held + counted + 32, defines)


_ALL = scoring(candidates=False, ctas=6, depth=4)
_CANDIDATES = scoring(candidates=True, ctas=5, depth=4)
_CHOICE = choosing(threads=512)
BUILDS = (_ALL, _CANDIDATES, _CHOICE)


def serves(spec: LayerSpec, layout: CacheLayout, dtype: torch.dtype) -> bool:
    """Whether these kernels score keys of this layout for layers like this, and choose as they do."""
    size = layout.page_size
    plain = layout.value_tile is None and layout.scale_tile is None and layout.scale_placement is ScalePlacement.PAGE
    pages = _whole(size) and layout.alignment % 16 == 0
    restricts = spec.publishes_candidates or spec.reads_candidates
    # One block more than rows, for the newest need not hold any of the best.
    blocks = not restricts or (spec.candidate_block_size == BLOCK and spec.topk < spec.candidate_blocks <= _MOST_CHOSEN)
    return (
        layout.record == _RECORD
        and plain
        and pages
        and blocks
        and dtype == torch.bfloat16
        and spec.index_heads <= _HEADS
        and spec.index_dim == _RECORD.dim
        and spec.topk <= _MOST_CHOSEN
    )


def holds(columns: int, restricted: bool) -> bool:
    """Whether so many columns can be chosen among; restricted to candidates, each is looked at, and not only blocks."""
    return _blocks(columns) <= _RANKS[0] * (_MOST_CHOSEN if restricted else _KEYS)


def chooses_blocks(columns: int, num_blocks: int) -> bool:
    """Whether blocks are chosen by their best before rows are, where `num_blocks` of them are asked for (0 = none)."""
    return _blocks(columns) > (num_blocks or _ALL_BLOCKS)


@torch.library.custom_op("dsv41::index_scores_mxfp4", mutates_args=("scores", "best"))
def index_scores(
    queries: Tensor,
    head_weights: Tensor,
    pages: Tensor,
    token_request: Tensor,
    num_visible: Tensor,
    candidates: Tensor | None,
    data: Tensor,
    page_size: int,
    scores: Tensor,
    best: Tensor | None,
) -> None:
    """`scores[t, c] = sum_h w[h] * relu(q[h] . k[j])` of every token and every position j that it sees, and the `best`
    of every 8 columns, NaN where none is a number.

    As the portable `index_scores`, in bf16, of keys in MXFP4, uint8 `[pages, bytes]`, 16-byte aligned pages with the
    scales behind all values: `queries` `[T, at most 32, 128]`, `scores` `[T, W]`, `best` `[T, >= ceil(W / 8)]`
    or None where nobody asks for them. With `candidates` int64 `[T, B]`, and no `best`, a column stands for a position
    of a block of 8.

    Raises BackendError for tensors that the kernel would misread.
    """
    tokens, heads, _ = queries.shape
    columns = scores.shape[1]
    if candidates is not None:
        columns = min(columns, candidates.shape[1] * BLOCK)
    _check(queries, head_weights, pages, token_request, num_visible, candidates, data, page_size, scores, best, columns)
    if tokens == 0 or columns == 0:
        return
    build = _ALL if candidates is None else _CANDIDATES
    kernel = _loaded(build, queries.device.index)
    splits = _splits(tokens, -(-columns // _TILE), build.ctas_per_sm * kernel.multiprocessors)
    value_bytes = page_size * (_RECORD.bytes - _RECORD.scale_bytes)
    arguments = [
        pointer(queries), int64(queries.stride(0)), int64(queries.stride(1)),
        pointer(head_weights), int64(head_weights.stride(0)), int32(heads),
        pointer(token_request), pointer(num_visible),
        pointer(data), uint32(data.stride(0)), uint32(page_size.bit_length() - 1), uint32(page_size - 1),
        uint32(value_bytes), int32(len(data)), pointer(pages), int64(pages.stride(0)), int32(pages.shape[1]),
        pointer(candidates), int64(candidates.stride(0) if candidates is not None else 0),
        pointer(scores), int64(scores.stride(0)),
        pointer(best), int64(best.stride(0) if best is not None else 0), int32(columns),
        uint32(splits),
    ]  # fmt: skip
    with torch.cuda.device(queries.device):
        kernel.launch(queries.device, splits * tokens, *arguments, early=True)


@torch.library.custom_op("dsv41::index_choice", mutates_args=())
def index_choice(
    scores: Tensor,
    best: Tensor | None,
    num_visible: Tensor,
    candidates: Tensor | None,
    num_rows: int,
    num_blocks: int,
) -> tuple[Tensor, Tensor]:
    """The `num_rows` best positions of each token, int64 `[T, num_rows]`, and the `num_blocks` best blocks, int64
    `[T, num_blocks]` with the newest always among them; both ascending, -1 where there are fewer.

    `scores` and `best` are what `index_scores` left, rows of them 16-byte aligned with room for a multiple of 8; with
    `candidates` no blocks are chosen and no `best` is taken. It may also be None where not `chooses_blocks`. As the
    portable `top_k`: NaN is never selected, -inf is, -0 equals 0, and of equal scores the smaller columns win. A block
    of no number comes after all others. At most 2,048 rows, or blocks, of which there must be more than rows, are
    chosen. Positions are below 2^35.

    Raises BackendError for what the kernel would misread, or cannot hold.
    """
    tokens, columns = scores.shape
    rows, blocks = _empty(scores, best, num_visible, candidates, num_rows, num_blocks)
    if candidates is not None:
        columns = min(columns, candidates.shape[1] * BLOCK)
    _check_choice(scores, best, num_visible, candidates, num_rows, num_blocks, columns)
    if tokens == 0:
        return rows, blocks
    kernel, clusters = _chooser(scores.device.index)
    ranks = _ranks(tokens, columns, candidates is not None, num_rows, num_blocks, clusters)
    arguments = [
        pointer(scores), int64(scores.stride(0)), pointer(best), int64(best.stride(0) if best is not None else 0),
        int32(columns), pointer(num_visible), pointer(candidates),
        int64(candidates.stride(0) if candidates is not None else 0),
        pointer(rows), int32(num_rows), pointer(blocks) if num_blocks else 0, int32(num_blocks or num_rows),
        int32(num_blocks or _ALL_BLOCKS),
    ]  # fmt: skip
    with torch.cuda.device(scores.device):
        kernel.launch(scores.device, tokens, *arguments, ranks=ranks, early=True)
    return rows, blocks


@index_choice.register_fake
def _empty(
    scores: Tensor,
    best: Tensor | None,
    num_visible: Tensor,
    candidates: Tensor | None,
    num_rows: int,
    num_blocks: int,
) -> tuple[Tensor, Tensor]:
    tokens = scores.shape[0]
    return num_visible.new_empty(tokens, num_rows), num_visible.new_empty(tokens, num_blocks)


def _whole(page_size: int) -> bool:
    """Whether pages are a power of two of rows, and the 16 of a warp lie in one."""
    return page_size >= _LEAST_PAGE and page_size & (page_size - 1) == 0


def _blocks(columns: int) -> int:
    return -(-columns // BLOCK)


def _splits(tokens: int, tiles: int, at_once: int) -> int:
    """CTAs that share a token of so many tiles: those that run at a time, more where each has enough to do."""
    wave = max(1, at_once // tokens)
    return min(tiles, max(wave, min(_WAVES * wave, tiles // _WORTH_A_CTA)))


def _ranks(
    tokens: int, columns: int, restricted: bool, num_rows: int, num_blocks: int, clusters: Mapping[int, int]
) -> int:
    """CTAs that share a token: as many as have enough to do and all run at once, but enough to hold its scores. Raises
    BackendError where none are."""
    blocks = _blocks(columns)
    by_blocks = not restricted and chooses_blocks(columns, num_blocks)
    room = _KEYS if by_blocks else _MOST_CHOSEN
    fitting = [ranks for ranks in _RANKS if blocks <= ranks * room]
    if not fitting:
        raise BackendError(
            f"index_choice was given {blocks} blocks a token to hold: expected at most {_RANKS[0] * room}; use the "
            "portable kernels"
        )
    looked_at = max(blocks, (num_blocks or num_rows) * BLOCK) if by_blocks else blocks * BLOCK
    useful = (ranks for ranks in fitting if looked_at * 2 > ranks * _LOOKED_AT and tokens <= clusters[ranks])
    return next(useful, fitting[-1])


def _check(
    queries: Tensor,
    head_weights: Tensor,
    pages: Tensor,
    token_request: Tensor,
    num_visible: Tensor,
    candidates: Tensor | None,
    data: Tensor,
    page_size: int,
    scores: Tensor,
    best: Tensor | None,
    columns: int,
) -> None:
    """Raise BackendError for what the kernel would misread."""
    if best is not None and candidates is not None:
        raise BackendError(
            "index_scores_mxfp4 writes the best of every block, or takes candidates: expected one of them, not both"
        )
    tokens, heads, dim = queries.shape
    narrow = {"queries": queries, "head_weights": head_weights, "scores": scores, "best": best}
    wrong = _misread(narrow, torch.bfloat16, tokens)
    apart = (*queries.stride()[:2], queries.data_ptr() // 2)
    if not 1 <= heads <= _HEADS or dim != _RECORD.dim or any(n % 8 for n in apart):
        wrong.append("queries")
    if head_weights.shape[1] != heads:
        wrong.append("head_weights")
    if best is not None and best.shape[1] * BLOCK < columns:
        wrong.append("best")
    if not _whole(page_size) or data.shape[1] < page_size * _RECORD.bytes:
        wrong.append(f"data of {page_size} rows a page")
    if data.dtype != torch.uint8 or data.stride(-1) != 1 or (data.data_ptr() | data.stride(0)) % 16:
        wrong.append("data")
    if pages.dtype != torch.int32 or pages.stride(-1) != 1:
        wrong.append("pages")
    wide = {"token_request": token_request, "num_visible": num_visible, "candidates": candidates}
    wrong += _misread(wide, torch.int64, tokens)
    _refuse("index_scores_mxfp4", wrong, narrow)


def _check_choice(
    scores: Tensor,
    best: Tensor | None,
    num_visible: Tensor,
    candidates: Tensor | None,
    num_rows: int,
    num_blocks: int,
    columns: int,
) -> None:
    """Raise BackendError for what the kernel would misread, or cannot hold."""
    if best is not None and candidates is not None:
        raise BackendError("index_choice takes the best of every block, or candidates: expected one of them, not both")
    if best is None and candidates is None and chooses_blocks(columns, num_blocks):
        raise BackendError(
            f"index_choice was given {columns} columns without the best of every block: expected it, for so many are "
            "first chosen by it; give it, or candidates"
        )
    most = _MOST_CHOSEN if candidates is None else 0
    if not 1 <= num_rows <= _MOST_CHOSEN or (num_blocks and not num_rows < num_blocks <= most):
        raise BackendError(
            f"index_choice was asked for {num_rows} rows and {num_blocks} blocks: expected 1 to {_MOST_CHOSEN} rows, "
            f"and no blocks or more than rows, up to {most}; ask for so many, or use the portable kernels"
        )
    tokens = len(scores)
    narrow = {"scores": scores, "best": best}
    wrong = _misread(narrow, torch.bfloat16, tokens)
    wrong += [name for name, x in narrow.items() if x is not None and (x.stride(0) % 8 or x.data_ptr() % 16)]
    if best is not None and best.shape[1] * BLOCK < columns:
        wrong.append("best")
    wide = {"num_visible": num_visible, "candidates": candidates}
    wrong += _misread(wide, torch.int64, tokens)
    _refuse("index_choice", wrong, narrow)


def _misread(tensors: Mapping[str, Tensor | None], dtype: torch.dtype, tokens: int) -> list[str]:
    """Names of those that are no dense rows of `dtype`, one a token."""
    there = {name: x for name, x in tensors.items() if x is not None}
    return [name for name, x in there.items() if x.dtype != dtype or len(x) != tokens or x.stride(-1) != 1]


def _refuse(op: str, wrong: list[str], tensors: Mapping[str, Tensor | None]) -> None:
    """Raise BackendError where something is wrong."""
    if wrong:
        given = vendor.words({name: x for name, x in tensors.items() if x is not None})
        raise BackendError(
            f"{op} was given {', '.join(dict.fromkeys(wrong))} in another form ({given}): expected what its "
            "documentation says; give it so, or use the portable kernels"
        )


@cache
def _loaded(build: Build, device: int) -> Kernel:
    return Kernel(build.kernel, build.cubin(), device, build.threads, build.shared_bytes)


@cache
def _chooser(device: int) -> tuple[Kernel, dict[int, int]]:
    """The kernel, and how many clusters of each size run at a time."""
    kernel = _loaded(_CHOICE, device)
    return kernel, {ranks: kernel.most_clusters(ranks) for ranks in _RANKS}
