"""Finding numbers in cache rows that would spread to every output, and taking them out."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.hal.layout import PagedCache
from dsv41.hal.records import pack, unpack

_CHUNK = 8192  # rows at a time, so that memory stays bounded whatever the cache holds


@torch.no_grad()
def scrub(cache: PagedCache, slots: Tensor, *, repair: bool) -> int:
    """How many groups in the rows `slots` int64 `[N]` hold NaN or infinite numbers; -1 is skipped.

    Groups are those of the record, all dims of a field where it has none. `repair` makes them zero, as bytes that the
    canonical writer writes for zeros, and leaves every other byte as it is. Raises InputError for slots out of range.
    """
    record, found = cache.layout.record, 0
    zeros = pack(record, torch.zeros(1, record.dim, device=cache.data.device), cache.tensor_scale)
    for part in torch.split(slots[slots >= 0], _CHUNK):
        values, scales = cache.read_bytes(part)
        finite = unpack(record, values, scales, cache.tensor_scale).isfinite()
        if bool(finite.all()):
            continue
        value = scale = 0
        for field in record.fields:
            groups = field.num_scales or 1
            bad = ~finite[:, field.start : field.stop].reshape(len(part), groups, -1).all(2)
            found += int(bad.sum())
            width = field.num_scales * record.scale_format.bytes if record.scale_format else 0
            for codes, zero, start, size in ((values, zeros[0], value, field.bytes), (scales, zeros[1], scale, width)):
                mask = bad.repeat_interleave(size // groups, 1)
                codes[:, start : start + size] = torch.where(
                    mask, zero[:, start : start + size], codes[:, start : start + size]
                )
            value, scale = value + field.bytes, scale + width
        if repair:
            cache.write_bytes(part, values, scales)
    return found
