"""Our kernels for Hopper on the emulator, and whether the emulator can fail."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv41.backends.cuda.hopper import attend
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import Dialect, v4_584

from .emulator.fixture import EmulatedGPU

Part = tuple[PagedCache, Tensor, Tensor]


def cache_of(pages: int, page_size: int) -> PagedCache:
    """Normal rows in all pages but the last, whose bytes are all NaN or worse."""
    cache = PagedCache.allocate(CacheLayout(v4_584(Dialect.OCP), page_size, ScalePlacement.PAGE), pages)
    slots = torch.arange((pages - 1) * page_size)
    cache.write(slots, torch.randn(len(slots), 512))
    cache.data[-1] = 255
    return cache


def rows_of(cache: PagedCache, lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
    """Indices with holes, which are NaN past the lengths."""
    last = (cache.num_pages - 1) * cache.layout.page_size
    indices = torch.randint(last, (len(lengths), width), dtype=torch.int32)
    indices[torch.rand(indices.shape) < 0.2] = -1
    beyond = torch.arange(width) >= torch.tensor(lengths)[:, None]
    indices[beyond] = last + 1
    return indices, torch.tensor(lengths, dtype=torch.int32)


def exact(q: Tensor, sink: Tensor, scale: float, parts: list[Part]) -> Tensor:
    """In float64."""
    rows, live = [], []
    for cache, indices, lengths in parts:
        there = (torch.arange(indices.shape[1]) < lengths[:, None]) & (indices >= 0)
        read = cache.read(torch.where(there, indices, 0).long().flatten()).double().view(*indices.shape, 512)
        rows.append(torch.where(there[:, :, None], read, 0.0))
        live.append(there)
    kv, there = torch.cat(rows, 1), torch.cat(live, 1)
    scores = (q.double() @ kv.transpose(1, 2) * scale).masked_fill(~there[:, None], -math.inf)
    with_sink = torch.cat((scores, sink.double()[None, :, None].expand(len(q), -1, 1)), dim=2)
    return torch.softmax(with_sink, -1)[:, :, :-1].nan_to_num(0.0) @ kv


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("heads", "multiprocessors", "window_lengths", "compressed_lengths"),
    [
        (8, 1, [70, 0, 1], [40, 3, 0]),
        (7, 8, [128], [200]),
        (16, 4, [96, 33], None),
        (64, 1, [70, 0, 1], [40, 3, 0]),
        (64, 4, [128], [90]),
    ],
)
def test_attention_agrees_with_float64(
    emulated_gpu: EmulatedGPU,
    heads: int,
    multiprocessors: int,
    window_lengths: list[int],
    compressed_lengths: list[int] | None,
    seed: int,
) -> None:
    torch.manual_seed(1)
    emulated_gpu.resize(multiprocessors)
    emulated_gpu.schedule(seed)
    parts = [(cache := cache_of(3, 64), *rows_of(cache, window_lengths, 128))]
    given = [cache.data, 64, *parts[0][1:], None, 1, None, None]
    if compressed_lengths is not None:
        parts.append((cache := cache_of(5, 16), *rows_of(cache, compressed_lengths, 200)))
        given[4:] = [cache.data, 16, *parts[1][1:]]
    q = torch.randn(len(window_lengths), heads + 3, 512).bfloat16()
    q[:, heads:] = math.nan
    sink = torch.randn(heads)
    sink[0] = -math.inf
    out = torch.full_like(q, math.nan)
    attend(q, heads, sink, 512**-0.5, *given, out)
    assert out[:, heads:].isnan().all()
    expected = exact(q[:, :heads], sink, 512**-0.5, parts)
    found = out[:, :heads].double()
    assert (found - expected).norm() < 4e-3 * expected.norm()
