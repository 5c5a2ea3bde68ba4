"""Caches as custom ops and kernels take them: tensors and numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from dsv41.backends.portable.formats import RowFormat
from dsv41.hal.layout import CacheLayout, PagedCache


def flat(cache: PagedCache) -> tuple[Tensor, Tensor | None, Tensor | None, list[int]]:
    """A cache as the consecutive arguments `data, pool, tensor_scale, format` of a custom op."""
    return cache.data, cache.scale_pool, cache.tensor_scale, list(_numbers(cache.layout))


@cache  # asked for every cache of every layer in every step
def _numbers(layout: CacheLayout) -> tuple[int, ...]:
    return tuple(RowFormat.of(layout).numbers())


def kernel_arguments(
    name: str, data: Tensor | None, pool: Tensor | None, tensor_scale: Tensor | None
) -> dict[str, Any]:
    """What a kernel takes for the cache called `name`, to make the tuple of `rows.py` from."""
    return {
        name: data,
        f"{name}_pool": pool,
        f"{name}_scale": tensor_scale,
        f"{name}_stride": data.stride(0) if data is not None else 0,
        f"{name}_pool_stride": pool.stride(0) if pool is not None else 0,
    }
