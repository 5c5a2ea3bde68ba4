"""Which bound caches the kernels can address. What a cache holds is `RowFormat.of`; this is about where it lies."""

from __future__ import annotations

import torch

from dsv41.backends.portable import formats
from dsv41.backends.portable.formats import RowFormat
from dsv41.errors import LayoutError
from dsv41.hal.layout import PagedCache


def check_addressable(what: str, cache: PagedCache, dim: int, device: torch.device) -> None:
    """Raise LayoutError where kernels on `device` cannot read rows of `dim` dims from the cache that `what` names."""
    F = RowFormat.of(cache.layout)
    name = cache.layout.record.name
    if F.dim != dim:
        raise LayoutError(f"{what} has rows of {F.dim} dims ({name}): expected {dim}, as the layer has; give it others")
    if cache.data.device != device:
        raise LayoutError(
            f"{what} is on {cache.data.device}: expected {device}, where the kernels run; allocate it there"
        )
    values = {formats.FP32: 4, formats.BF16: 2}.get(F.code, 2 if F.coded < F.dim else 1)
    # Attention fetches a row's scale bytes eight at a time where it can.
    scales = 8 if F.scale_bytes % 8 == 0 and F.scale_tile_rows == 0 else 4 if F.scale == formats.FP32_SCALE else 1
    for part, width, distances in (
        ("values", values, (F.value_stride,)),
        ("scales", scales if F.scale_bytes else 1, (F.scale_start, F.scale_stride)),
    ):
        memory = cache.scale_pool if part == "scales" and cache.scale_pool is not None else cache.data
        places = {"first byte": (memory.data_ptr(),), "page stride": (memory.stride(0),), f"rows of {part}": distances}
        for start, numbers in places.items():
            if any(place % width for place in numbers):
                raise LayoutError(
                    f"{what} ({name}) has its {start} at {numbers[-1]}: expected a multiple of {width} bytes, as its "
                    f"{part} are loaded; align it"
                )
