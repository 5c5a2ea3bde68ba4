"""Caches of more than 2**31 bytes: a step whose pages are the last of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsv41.hal.layout import PagedCache
from dsv41.hal.types import BlockTable, LayerCaches
from dsv41.testing.case import Case
from dsv41.testing.clause import Inapplicable, expect
from dsv41.testing.mqa import Attention
from dsv41.testing.scene import Scene
from dsv41.testing.subject import Subject

_FAR = 1 << 31


def far_pages(subject: Subject, case: Case) -> None:
    attention = Attention.of(subject, case)
    scene = attention.scene
    near = attention.numbers(scene.mine, attention.output(scene.mine))
    slots = scene.mine.plan.window_slots
    _move(scene)
    try:
        found = attention.numbers(scene.mine, attention.output(scene.mine))
    except torch.OutOfMemoryError as error:
        raise Inapplicable(f"memory for caches of more than 2**31 bytes is not to be had: {error}") from error
    live = attention.live
    expect(
        torch.equal(found[live], near[live]),
        "attention over pages that begin past 2**31 bytes gives other bits than over the same pages near the beginning",
    )
    window = scene.mine.caches.window
    before = window.read(scene.mine.plan.window_slots)
    scene.inputs(scene.mine)
    after = window.read(scene.mine.plan.window_slots)
    expect(
        bool((after[live] != before[live]).any()) and len(slots) == len(after),
        "the window rows of a step were not written where its pages lie, past 2**31 bytes",
    )


def _move(scene: Scene) -> None:
    """Put the pages of the side under check at the end of large caches."""
    caches, batch = scene.mine.caches, scene.batch
    window, first = _large(caches.window)
    moved = LayerCaches(window, caches.compressed, caches.index, caches.compressor_state)
    batch = replace(batch, window_table=_shifted(batch.window_table, first))
    if caches.compressed is not None:
        compressed, first = _large(caches.compressed)
        assert caches.index is not None
        index, _ = _large(caches.index, pages=compressed.num_pages)
        moved = replace(moved, compressed=compressed, index=index)
        tables = {ratio: _shifted(table, first) for ratio, table in batch.compressed_tables.items()}
        batch = replace(batch, compressed_tables=tables)
    scene.mine.caches = moved
    scene.mine.plan = scene.mine.backend.plan(batch, [scene.mine.spec])


def _large(cache: PagedCache, pages: int | None = None) -> tuple[PagedCache, int]:
    """A cache with the same pages at its end, and the first of these. Its other memory is not touched."""
    stride = cache.data.stride(0) if cache.num_pages > 1 else cache.layout.stride
    pool = cache.layout.pool_page_bytes
    count = pages or _FAR // min(size for size in (stride, pool) if size) + cache.num_pages + 1

    def grown(part: Tensor, width: int) -> Tensor:
        large = torch.empty(count, width, dtype=torch.uint8, device=part.device)
        large[-len(part) :, : part.shape[1]] = part
        return large

    data = grown(cache.data, stride)
    scales = None if cache.scale_pool is None else grown(cache.scale_pool, pool)
    return PagedCache(cache.layout, data, scales, cache.tensor_scale), count - cache.num_pages


def _shifted(table: BlockTable, by: int) -> BlockTable:
    pages = torch.where(table.pages_cpu >= 0, table.pages_cpu + by, -1).int()
    return BlockTable(pages.to(table.pages.device), pages, table.page_size)
