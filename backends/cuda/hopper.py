"""Attention over 584-byte records on Hopper: the launch of `kernels/few_heads.cu` and of `kernels/many_heads.cu`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from dsv41.backends import vendor
from dsv41.backends.cuda.build import Build
from dsv41.backends.cuda.choice import MOST_OURS
from dsv41.backends.cuda.launch import Kernel, float32, int32, int64, pointer, uint32
from dsv41.errors import BackendError
from dsv41.hal.records import Dialect, v4_584

_RECORD = v4_584(Dialect.OCP)
_ROW_BYTES = _RECORD.bytes - _RECORD.scale_bytes
_RANKS = (10, 8, 5, 4, 3, 2)
"""How many CTAs may share a token. More than 8 are a cluster that a kernel must ask for."""


class AttentionBuild(Build):
    """A kernel for `heads` query heads, and by more CTAs for each so many of a call, with tiles of `keys` rows."""

    @property
    def heads(self) -> int:
        return self.own_defines["HEADS"]

    @property
    def keys(self) -> int:
        return self.own_defines["KEYS"]

    @property
    def defines(self) -> dict[str, int]:
        record = {"DIMS": _RECORD.dim, "ROW_BYTES": _ROW_BYTES, "SCALE_BYTES": _RECORD.scale_bytes}
        return {**record, **super().defines}


def few(heads: int, stages: int) -> AttentionBuild:
    """Of `few_heads.cu`, for 8 or 16 columns of its matrix instructions, with `stages` slices of 32 rows in flight."""
    rows, pitch = 32, _ROW_BYTES + 16  # with which eight rows start in different banks
    piece = rows * (pitch + _RECORD.dim // 64 * (4 + 2))
    query, weights = _RECORD.dim * heads * 2, 2 * 2 * 64 * heads * 2
    ends = heads * (2 + 2 * 4) * 4
    shared = _whole(stages * (piece + 2 * 8 + 4 + 4 * 4) + query + weights + ends + 8)
    defines = {"HEADS": heads, "KEYS": 64, "STAGES": stages, "PITCH": pitch}
    return AttentionBuild("few_heads", "attention", 256, 2, shared, defines)


def many(keys: int, stages: int, depth: int) -> AttentionBuild:
    """Of `many_heads.cu`, with `stages` tiles of `keys` rows in bf16 and `depth` times 32 rows of fp8 in flight."""
    heads = 64
    query, tile, weights = heads * _RECORD.dim * 2, keys * _RECORD.dim * 2, heads * 2 * keys * 2
    raw = _whole(32 * _RECORD.bytes + 16)
    turns = 2 * (heads * 4 + 16 + 2 * 8)  # a factor a head, a word a warp, two barriers
    shared = _whole(query + stages * tile + weights + depth * raw + stages * (keys // 8 * 4 + 16) + turns)
    defines = {"HEADS": heads, "KEYS": keys, "STAGES": stages, "DEPTH": depth}
    return AttentionBuild("many_heads", "attention", 512, 1, shared, defines)


def _whole(shared_bytes: int) -> int:
    return -(-shared_bytes // 16) * 16


_EVER = 1 << 62
# For at most so many heads: the build for at most so many tokens. Few tokens leave room for CTAs that take eight heads
# each. Small tiles begin sooner, large ones end sooner.
_TABLE = {
    8: {_EVER: few(8, 5)},
    16: {16: few(8, 5), _EVER: few(16, 4)},
    32: {5: few(8, 5), 8: many(32, 3, 3), _EVER: many(64, 2, 1)},
    64: {2: few(8, 5), 8: many(32, 3, 3), _EVER: many(64, 2, 1)},
}
BUILDS = tuple(dict.fromkeys(build for by_tokens in _TABLE.values() for build in by_tokens.values()))


def build_for(num_heads: int, tokens: int) -> AttentionBuild:
    """The fastest that was measured. Raises BackendError for more than 64 heads."""
    for heads, by_tokens in _TABLE.items():
        if num_heads <= heads:
            return next(build for most, build in by_tokens.items() if tokens <= most)
    raise BackendError(
        f"our kernels for Hopper were given {num_heads} query heads: expected at most {MOST_OURS}; use another kernel"
    )


def builds_for(num_heads: int) -> list[AttentionBuild]:
    """Those of calls of any number of tokens."""
    return list(next(by_tokens for heads, by_tokens in _TABLE.items() if num_heads <= heads).values())


@torch.library.custom_op("dsv41::attend_records", mutates_args=("out",))
def attend(
    q: Tensor,
    num_heads: int,
    sink: Tensor,
    scale: float,
    window: Tensor,
    window_page_size: int,
    window_indices: Tensor,
    window_lengths: Tensor,
    compressed: Tensor | None,
    compressed_page_size: int,
    compressed_indices: Tensor | None,
    compressed_lengths: Tensor | None,
    out: Tensor,
) -> None:
    """Attention of `q` bf16 `[T, >= num_heads, 512]` over its rows of both caches into `out`, of the same form.

    `window` and `compressed` are uint8 `[pages, bytes]`, 16-byte aligned pages of 584-byte records with a page's scales
    behind its rows. Indices are slots, int32 `[T, n]` (contiguous, -1 = none), of which the first `lengths` int32 `[T]`
    count. `sink` float32 `[num_heads]` joins the denominator only. A token with no row gets zeros; heads past
    `num_heads` of `out` stay as they are. Strides of `q` and `out` are multiples of 8, their heads dense.

    It begins before the launch ahead of it in the stream has ended, and waits for that before it reads or writes.

    Raises BackendError for more than 64 heads, and for tensors that the kernel would misread.
    """
    tokens = q.shape[0]
    build = build_for(num_heads, tokens)
    parts = [(window, window_indices, window_lengths)]
    if compressed is not None:
        if compressed_indices is None or compressed_lengths is None:
            raise BackendError(
                "attend_records has a compressed cache without its indices: expected both; give lengths too"
            )
        parts.append((compressed, compressed_indices, compressed_lengths))
    _check(q, num_heads, sink, parts, out)
    if tokens == 0:
        return
    keys = sum(indices.shape[1] for _, indices, _ in parts)
    sizes = (window_page_size, compressed_page_size)
    caches = [_cache(*part, page_size) for part, page_size in zip(parts, sizes, strict=False)]
    if compressed is None:
        caches.append([0, int64(0), uint32(1), uint32(0), 0, 0, int32(0)])
    arguments = [
        pointer(q), int64(q.stride(0)), int64(q.stride(1)), pointer(out), int64(out.stride(0)), int64(out.stride(1)),
        pointer(sink), float32(scale), int32(tokens), int32(num_heads), *caches[0], *caches[1],
    ]  # fmt: skip
    with torch.cuda.device(q.device):
        kernel = _loaded(build, q.device.index)
        groups = -(-num_heads // build.heads)
        ranks = kernel.ranks(tokens * groups, -(-keys // build.keys))
        clusters = tokens if ranks > 1 else min(tokens, max(1, kernel.resident // groups))
        kernel.launch(q.device, (1, clusters, groups), *arguments, ranks=ranks, early=True)


def _check(q: Tensor, num_heads: int, sink: Tensor, parts: list[tuple[Tensor, Tensor, Tensor]], out: Tensor) -> None:
    """Raise BackendError for what the kernel would misread."""
    tokens, shape = q.shape[0], (q.shape[0], _RECORD.dim)
    rows = {"q": q, "out": out}
    wrong = [
        name
        for name, x in rows.items()
        if x.dtype != torch.bfloat16
        or (x.shape[0], x.shape[2]) != shape
        or x.shape[1] < num_heads
        or x.stride(2) != 1
        or any(number % 8 for number in (x.stride(0), x.stride(1), x.data_ptr() // x.element_size()))
    ]
    if sink.dtype != torch.float32 or not sink.is_contiguous() or len(sink) < num_heads:
        wrong.append("sink")
    for name, (pages, indices, lengths) in zip(("window", "compressed"), parts, strict=False):
        if pages.dtype != torch.uint8 or pages.stride(-1) != 1 or (pages.data_ptr() | pages.stride(0)) % 16:
            wrong.append(name)
        if indices.dtype != torch.int32 or not indices.is_contiguous() or len(indices) != tokens:
            wrong.append(f"{name}_indices")
        if lengths.dtype != torch.int32 or not lengths.is_contiguous() or len(lengths) != tokens:
            wrong.append(f"{name}_lengths")
    given = [q, sink, out, *(tensor for part in parts for tensor in part)]
    if len({tensor.device for tensor in given}) > 1:
        wrong.append("a device")
    if wrong:
        raise BackendError(
            f"attend_records was given {', '.join(wrong)} in another form ({vendor.words({**rows, 'sink': sink})}): "
            "expected what its documentation says; give it so, or use another kernel"
        )


def _cache(cache: Tensor, indices: Tensor, lengths: Tensor, page_size: int) -> list[Any]:
    rows = cache.shape[0] * page_size
    return [
        pointer(cache), int64(cache.stride(0)), uint32(page_size), uint32(rows),
        pointer(indices), pointer(lengths), int32(indices.shape[1]),
    ]  # fmt: skip


class _Kernel:
    """A build, loaded on one device."""

    def __init__(self, build: AttentionBuild, device: int) -> None:
        self._kernel = Kernel(build.kernel, build.cubin(), device, build.threads, build.shared_bytes)
        self.launch = self._kernel.launch
        self.resident = build.ctas_per_sm * self._kernel.multiprocessors
        """CTAs that run at a time."""
        self._clusters = {ranks: self._kernel.most_clusters(ranks) for ranks in _RANKS}

    def ranks(self, tokens: int, tiles: int) -> int:
        """CTAs that share a token: as many as still run all at once, since a second wave costs more than they save."""
        fitting = (ranks for ranks in _RANKS if ranks <= tiles and tokens <= self._clusters[ranks])
        return next(fitting, 1)


@cache
def _loaded(build: AttentionBuild, device: int) -> _Kernel:
    return _Kernel(build, device)
