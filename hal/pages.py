"""Cache pages outside a process: bytes that say what they are.

Pages of different layouts may have one size, so nothing but the header can tell them apart.
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from torch import Tensor

from dsv41.errors import InputError, LayoutError
from dsv41.hal.layout import CacheLayout, PagedCache

_MAGIC = b"dsv41pg1"


def dump_page(cache: PagedCache, page: int) -> bytes:
    """One page with its header: magic, header length (4 bytes, little-endian), JSON layout, values, pooled scales.

    The tail is not dumped, it may belong to another cache. Raises InputError for a page that the cache lacks.
    """
    header = {
        "layout": replace(cache.layout, page_stride=None).to_dict(),
        "tensor_scale": None if cache.tensor_scale is None else float(cache.tensor_scale),
    }
    text = json.dumps(header).encode()
    body = b"".join(part.cpu().numpy().tobytes() for part in _parts(cache, page))
    return _MAGIC + len(text).to_bytes(4, "little") + text + body


def load_page(cache: PagedCache, page: int, data: bytes) -> None:
    """Put a dumped page in place of one of `cache`; the tail stays as it is.

    Raises LayoutError for data without a header, of another layout or tensor scale, or of another length, and
    InputError for a page that the cache lacks; nothing has been written then.
    """
    parts = _parts(cache, page)
    start = len(_MAGIC) + 4
    if data[: len(_MAGIC)] != _MAGIC:
        raise LayoutError(f"this is no dumped page: it starts with {data[:8]!r}, not {_MAGIC!r}; use dump_page")
    stop = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    try:
        header = json.loads(data[start:stop])
        layout, tensor_scale = CacheLayout.from_dict(header["layout"]), header["tensor_scale"]
    except (ValueError, KeyError, TypeError) as error:
        raise LayoutError(f"the header of this dumped page is broken ({error}); dump the page again") from error
    if found := layout.differences(cache.layout):
        raise LayoutError(f"this page does not fit the cache: {'; '.join(found)}; load it elsewhere and transcode")
    if cache.tensor_scale is not None and tensor_scale != float(cache.tensor_scale):
        raise LayoutError(
            f"this page has tensor_scale {tensor_scale}, the cache {float(cache.tensor_scale)}: make them equal, or "
            "load the page into a cache of its own and transcode"
        )
    sizes = [part.numel() for part in parts]
    if len(data) - stop != sum(sizes):
        raise LayoutError(f"this page has {len(data) - stop} bytes after its header, expected {sum(sizes)}: it was cut")
    body = torch.frombuffer(bytearray(data[stop:]), dtype=torch.uint8)
    for part, new in zip(parts, torch.split(body, sizes), strict=True):
        part.copy_(new)


def _parts(cache: PagedCache, page: int) -> list[Tensor]:
    """The page's bytes, as views: those in the main buffer, then those in the scale pool if there is one."""
    if not 0 <= page < cache.num_pages:
        raise InputError(f"page {page} is outside this cache of {cache.num_pages} pages")
    main = cache.data[page, : cache.layout.page_bytes]
    return [main] if cache.scale_pool is None else [main, cache.scale_pool[page, : cache.layout.pool_page_bytes]]
