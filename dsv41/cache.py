"""Which caches the layers need, the memory for them, and who holds which page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dsv41.errors import PoolExhausted
from dsv41.hal.layout import CacheLayout, CacheLayouts, PagedCache
from dsv41.hal.types import LayerCaches, LayerSpec

WINDOW = 0
"""Key of the window pages among pools and tables; the compressed pages of a ratio go by that ratio."""


@dataclass(frozen=True)
class CacheSpec:
    """One cache that a layer owns: `kind` is "window", "compressed" or "index", `ratio` its tokens a row.

    `pool` names the pages that it shares with every other cache of the same pool (`WINDOW`, or the ratio).
    """

    name: str
    layer_id: int
    kind: str
    layout: CacheLayout
    ratio: int
    pool: int

    @property
    def bytes_per_token(self) -> float:
        return self.layout.row_bytes / self.ratio


def cache_specs(specs: Sequence[LayerSpec], layouts: CacheLayouts) -> list[CacheSpec]:
    """The caches that these layers own. Layers that read those of a KV source own only their window."""
    found = []
    for spec in specs:
        found.append(CacheSpec(f"{spec.name}.window", spec.layer_id, "window", layouts.window, 1, WINDOW))
        if spec.owns_compressed:
            for kind, layout in (("compressed", layouts.compressed), ("index", layouts.index)):
                found.append(CacheSpec(f"{spec.name}.{kind}", spec.layer_id, kind, layout, spec.ratio, spec.ratio))
    return found


def bytes_per_token(specs: Sequence[CacheSpec]) -> dict[str, float]:
    """Bytes that one more token costs, by kind of cache. Window rows behind the window are dead weight."""
    total = dict.fromkeys(("window", "compressed", "index"), 0.0)
    for spec in specs:
        total[spec.kind] += spec.bytes_per_token
    return total


def allocate_caches(
    specs: Sequence[LayerSpec],
    layouts: CacheLayouts,
    num_pages: Mapping[int, int],
    *,
    state_slots: int,
    ring: int,
    device: torch.device | str,
) -> dict[int, LayerCaches]:
    """Memory for every cache and compressor state, by layer id. `num_pages` is keyed by pool."""
    parts: dict[int, dict[str, PagedCache]] = {spec.layer_id: {} for spec in specs}
    for cache in cache_specs(specs, layouts):
        parts[cache.layer_id][cache.kind] = PagedCache.allocate(cache.layout, num_pages[cache.pool], device)
    return {
        spec.layer_id: LayerCaches(
            **parts[spec.layer_id],
            compressor_state=torch.zeros(state_slots, ring, 2, spec.head_dim, device=device)
            if spec.owns_compressed and spec.ratio > 1
            else None,
        )
        for spec in specs
    }


class PagePool:
    """Free pages of one pool. Pages are taken all or none."""

    def __init__(self, name: str, num_pages: int) -> None:
        self.name, self.num_pages = name, num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def check(self, count: int) -> None:
        """Raise PoolExhausted unless `count` pages are free."""
        if count > len(self._free):
            raise PoolExhausted(
                f"the step needs {count} {self.name} pages: expected at most {len(self._free)}, the free ones of "
                f"{self.num_pages}; free a request and step again, or make the session with more max_tokens; nothing "
                "has been changed"
            )

    def take(self, count: int) -> list[int]:
        self.check(count)
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))
