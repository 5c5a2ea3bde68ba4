"""Which cache rows the calls of `dsv41 bench attention` read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv41.errors import InputError
from dsv41.hal.layout import PagedCache


@dataclass(frozen=True)
class Rows:
    """Slots that one call reads: int64 `[T, window]` and `[T, topk]`."""

    window: Tensor
    compressed: Tensor


def random_rows(slots: int, calls: int, tokens: int, width: int, generator: torch.Generator) -> Tensor:
    """int64 `[calls, tokens, width]`: a random permutation of `slots`, over and over, cut into rows."""
    if width > slots:
        raise InputError(
            f"a token reads {width} rows of a cache of {slots}: expected at least as many; give more pages"
        )
    order = torch.randperm(slots, generator=generator, device=generator.device)
    count = calls * tokens * width
    return order.repeat(-(-count // slots))[:count].view(calls, tokens, width)


def chunk_rows(
    window_cache: PagedCache,
    compressed_cache: PagedCache,
    calls: int,
    tokens: int,
    window: int,
    topk: int,
    generator: torch.Generator,
) -> tuple[Rows, ...]:
    """What `calls` chunks of as many consecutive tokens read, or fewer where the pages do not suffice. Each chunk is
    of another request, on pages of its own.

    A token reads `window` consecutive rows, one further on than the token before, and `topk` distinct rows at random of
    the first max(topk, tokens) compressed rows of its request. Raises InputError without pages for one chunk.
    """
    held = max(topk, tokens)
    windows = _request_slots(window_cache, calls, tokens + window - 1, generator)
    compressed = _request_slots(compressed_cache, calls, held, generator)
    device = generator.device
    seen = torch.arange(tokens, device=device)[:, None] + torch.arange(window, device=device)
    found = []
    for near, far in zip(windows, compressed, strict=False):  # the cache with fewer requests decides
        chosen = torch.rand(tokens, held, generator=generator, device=device).topk(topk).indices
        found.append(Rows(near[seen], far[chosen]))
    return tuple(found)


def _request_slots(cache: PagedCache, requests: int, rows: int, generator: torch.Generator) -> Tensor:
    """int64 `[N, rows]`: slots of the consecutive rows of at most so many requests, on random pages that none share."""
    size = cache.layout.page_size
    needed = -(-rows // size)
    number = min(requests, cache.num_pages // needed)
    if number == 0:
        raise InputError(
            f"a chunk reads {needed} pages of a cache of {cache.num_pages}: expected at least as many; give more pages"
        )
    order = torch.randperm(cache.num_pages, generator=generator, device=generator.device)
    pages = order[: number * needed].view(number, needed, 1)
    return (pages * size + torch.arange(size, device=pages.device)).flatten(1)[:, :rows]
