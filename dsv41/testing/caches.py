"""Caches as hostile as the contract allows: NaN in every byte that nobody wrote, pages in no order, gaps between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dsv41.attention import DeepseekV41Attention
from dsv41.errors import LayoutError
from dsv41.hal.layout import WHOLE_PAGE, CacheLayout, CacheLayouts, PagedCache, ScalePlacement
from dsv41.hal.records import RECORDS, Dialect
from dsv41.hal.types import LayerCaches

POISON = 0xFF
"""NaN as e4m3 (OCP), UE8M0, bf16 and fp32; -6 as e2m1; under a NaN scale in every record with scales."""
FNUZ_POISON = 0x80
"""NaN as e4m3 in the FNUZ dialect."""
RING = 4
_ROWS = 4  # of a page, where the backend takes so few


def poison_of(layout: CacheLayout) -> int:
    """A byte that makes a row NaN where anything can."""
    return FNUZ_POISON if layout.record.dialect is Dialect.FNUZ and not layout.record.scale_bytes else POISON


def hostile_cache(layout: CacheLayout, pages: int, device: torch.device, *, gap: bool = True) -> PagedCache:
    """A cache that holds no row, with `gap` in pages further apart than they need be. A tensor scale is 0.5."""
    extra = layout.alignment if gap and layout.page_stride is None else 0
    poison = poison_of(layout)
    data = torch.full((pages, layout.stride + extra), poison, dtype=torch.uint8, device=device)
    pool = None
    if layout.pool_page_bytes:
        pool = torch.full((pages, layout.pool_page_bytes), poison, dtype=torch.uint8, device=device)
    scale = torch.full((1,), 0.5, device=device) if layout.record.tensor_scale else None
    return PagedCache(layout, data, pool, scale)


def layer_caches(layer: DeepseekV41Attention, layouts: CacheLayouts, pages: dict[str, int], slots: int) -> LayerCaches:
    """Hostile caches for a layer, bound to it. Raises LayoutError where its backend refuses them however they lie."""
    spec, device = layer.spec, layer.state.cos_sin.device

    def made(gap: bool) -> LayerCaches:
        kinds = ["window"] + (["compressed", "index"] if spec.ratio else [])
        found = {
            kind: hostile_cache(
                getattr(layouts, kind), pages["window" if kind == "window" else "compressed"], device, gap=gap
            )
            for kind in kinds
        }
        state = None
        if layer.keeps_state:
            state = torch.full((slots, RING, 2, spec.head_dim), torch.nan, device=device)
        return LayerCaches(**found, compressor_state=state)

    try:
        caches = made(gap=True)
        layer.bind(caches)
    except LayoutError:  # it wants pages side by side, as it may
        caches = made(gap=False)
        layer.bind(caches)
    return caches


def copy_bytes(target: LayerCaches, source: LayerCaches) -> None:
    """Make every byte and state of one layer's caches those of another's."""
    for kind in ("window", "compressed", "index"):
        mine, theirs = getattr(target, kind), getattr(source, kind)
        if mine is not None:
            width = mine.layout.page_bytes
            mine.data[:, :width].copy_(theirs.data[:, :width])
            if mine.scale_pool is not None:
                mine.scale_pool.copy_(theirs.scale_pool)
    if target.compressor_state is not None and source.compressor_state is not None:
        target.compressor_state.copy_(source.compressor_state)


def everything(caches: LayerCaches) -> Tensor:
    """A copy of all memory of a layer's caches, as bytes one behind the other."""
    parts = [caches.compressor_state]
    for cache in (caches.window, caches.compressed, caches.index):
        parts += [None, None] if cache is None else [cache.data, cache.scale_pool]
    return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts if part is not None])


# Layouts besides a backend's own


def _with_pages(layouts: CacheLayouts, rows: int) -> CacheLayouts:
    return layouts.with_page_size(window=rows, compressed=rows)


def _placed(placement: ScalePlacement, tiled: bool = False) -> Callable[[CacheLayouts], CacheLayouts]:
    """The same records in another placement, in tiles where `tiled`."""

    def one(layout: CacheLayout) -> CacheLayout:
        there = placement if layout.record.scale_bytes else ScalePlacement.NONE
        tile = (WHOLE_PAGE, 16) if tiled and there is not ScalePlacement.TOKEN else None
        return replace(
            layout,
            scale_placement=there,
            value_tile=tile,
            scale_tile=(WHOLE_PAGE, 1) if tile and layout.record.scale_bytes else None,
            page_stride=None,
        )

    return lambda layouts: CacheLayouts(
        *(one(layout) for layout in (layouts.window, layouts.compressed, layouts.index))
    )


def _in_fnuz(layouts: CacheLayouts) -> CacheLayouts:
    """The same records with fp8 values in the other dialect. Raises LayoutError where they hold none."""

    def one(layout: CacheLayout) -> CacheLayout:
        twin = RECORDS.get(f"{layout.record.name}_{Dialect.FNUZ}")
        return layout if twin is None else replace(layout, record=twin)

    found = CacheLayouts(*(one(layout) for layout in (layouts.window, layouts.compressed, layouts.index)))
    if found == layouts:
        raise LayoutError("these records hold no fp8 values, or are in FNUZ already")
    return found


VARIANTS: dict[str, Callable[[CacheLayouts], CacheLayouts]] = {
    "own": lambda layouts: _with_pages(layouts, _ROWS),
    "own-pages": lambda layouts: layouts,
    "token": _placed(ScalePlacement.TOKEN),
    "page": _placed(ScalePlacement.PAGE),
    "pool": _placed(ScalePlacement.POOL),
    "tiles": _placed(ScalePlacement.PAGE, tiled=True),
    "fnuz": _in_fnuz,
}
"""Layouts by the name that a case gives them, made from a backend's own. `own` has pages of a few rows, so that short
requests have several; where the backend refuses those, it is as `own-pages`."""
