"""Which caches the layers need, the memory for them, and where a prefix of a request can be shared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dsv41.config import DeepseekV41Config
from dsv41.errors import InputError
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.layout import CacheLayout, PagedCache
from dsv41.hal.types import LayerCaches
from dsv41.topology import layer_specs

WINDOW = 0
"""Key of the window pages among pools and tables; the compressed pages of a ratio go by that ratio."""


@dataclass(frozen=True)
class CacheSpec:
    """One cache that a layer owns.

    `kind` is "window", "compressed" or "index" and `ratio` its tokens a row. `pool` names the pages that it shares with
    every other cache of the same pool: `WINDOW`, of which a request keeps the last rows, or the ratio, of which it
    keeps all.
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

    @property
    def page_bytes(self) -> int:
        """From a page to the next, its tail included."""
        return self.layout.stride + self.layout.pool_page_bytes

    @property
    def tokens_per_page(self) -> int:
        return self.layout.page_size * self.ratio


def cache_specs(
    config: DeepseekV41Config,
    backend: AttentionBackend,
    layers: Sequence[int] | None = None,
    *,
    page_size: int | None = None,
) -> list[CacheSpec]:
    """The caches that these layers own (None = all target layers), in the layouts of the backend.

    Layers that read the compressed rows of a KV source own only their window. `page_size` (rows) replaces that of the
    layouts. Caches are replicated under tensor parallelism. Raises ConfigError for layers that cannot be chosen.
    """
    layouts = backend.layouts
    if page_size is not None:
        layouts = layouts.with_page_size(window=page_size, compressed=page_size)
    found = []
    for spec in layer_specs(config, layers=layers):
        found.append(CacheSpec(f"{spec.name}.window", spec.layer_id, "window", layouts.window, 1, WINDOW))
        if spec.owns_compressed:
            for kind, layout in (("compressed", layouts.compressed), ("index", layouts.index)):
                found.append(CacheSpec(f"{spec.name}.{kind}", spec.layer_id, kind, layout, spec.ratio, spec.ratio))
    return found


def bytes_per_token(specs: Sequence[CacheSpec]) -> dict[str, float]:
    """Bytes that one more token costs, by kind of cache. Of the window only the last rows are kept."""
    total = dict.fromkeys(("window", "compressed", "index"), 0.0)
    for spec in specs:
        total[spec.kind] += spec.bytes_per_token
    return total


def request_bytes(specs: Sequence[CacheSpec], tokens: int, window_rows: int) -> dict[str, int]:
    """The most bytes, in whole pages, that a request of `tokens` tokens holds, by kind of cache.

    `window_rows` are those that are kept of the window: the model's `sliding_window`, and what a cut may take more.
    """
    total = dict.fromkeys(("window", "compressed", "index"), 0)
    for spec in specs:
        pages = -(-tokens // spec.tokens_per_page)
        if spec.pool == WINDOW:  # the first and the last of its pages may hold one row each
            pages = min(pages, (window_rows - 2) // spec.layout.page_size + 2)
        total[spec.kind] += pages * spec.page_bytes
    return total


def allocate_caches(
    specs: Sequence[CacheSpec],
    num_pages: Mapping[int, int],
    *,
    state_slots: int,
    ring: int,
    device: torch.device | str,
) -> dict[int, LayerCaches]:
    """Memory for every cache and compressor state, by layer id. `num_pages` is keyed by pool; `ring` counts the raw
    rows that a compressor keeps of each request."""
    parts: dict[int, dict[str, PagedCache]] = {}
    states: dict[int, torch.Tensor] = {}
    for spec in specs:
        cache = PagedCache.allocate(spec.layout, num_pages[spec.pool], device)
        parts.setdefault(spec.layer_id, {})[spec.kind] = cache
        if spec.kind == "compressed" and spec.ratio > 1:
            states[spec.layer_id] = torch.zeros(state_slots, ring, 2, spec.layout.record.dim, device=device)
    return {layer: LayerCaches(**caches, compressor_state=states.get(layer)) for layer, caches in parts.items()}


@dataclass(frozen=True)
class PrefixHit:
    """What sharing the first `length` tokens of a request takes.

    `pages` of each pool of compressed rows (index keys lie in the same ones) are shared as they are. Of the window, the
    rows from `window_start` on must be cached too, or the tokens there replayed. No raw row of a compressor is needed,
    since every group is closed.
    """

    length: int
    pages: dict[int, int]
    window_start: int


def prefix_hit(specs: Sequence[CacheSpec], tokens: int, window: int) -> PrefixHit:
    """The longest prefix of at most `tokens` tokens whose compressed pages are all full, and what a hit needs.

    Schedulers call this for what they store and for what they look up, so that the two agree. `window` is the model's
    `sliding_window`. A prefix of only window layers can be cut after any token.
    """
    if tokens < 0 or window < 1:
        raise InputError(f"tokens is {tokens} and window {window}: expected at least 0 and 1; count a request's tokens")
    unit = math.lcm(*(spec.tokens_per_page for spec in specs if spec.pool != WINDOW))
    length = tokens // unit * unit
    pages = {spec.pool: length // spec.tokens_per_page for spec in specs if spec.pool != WINDOW}
    return PrefixHit(length, pages, max(0, length - window))
