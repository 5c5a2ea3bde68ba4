"""How far two right backends may differ: from the bits of a record and of the activations, nothing else.

`unit(dtype)` is the largest relative step between two activations, 2**-8 in bfloat16. A number that is rounded to an
activation may land one unit away when a sum is taken in another order. Such a number then lies on the other side of a
border of a quantiser with a probability of about a unit over the quantiser's step, and is a whole step away if it does:
over many numbers that is `sqrt(unit * step)` of their norm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv41.hal.layout import CacheLayouts
from dsv41.hal.records import Encoding, Record, ScaleFormat

_STEP = {Encoding.E4M3: 2.0**-3, Encoding.E2M1: 0.5, Encoding.BF16: 2.0**-7, Encoding.FP32: 2.0**-22}
"""The largest relative distance between neighbours above the subnormal numbers; of e2m1, from 1 to 1.5."""
MXFP8_STEP = _STEP[Encoding.E4M3]
_ROUNDINGS = 4
"""Roundings to the activation dtype between what two backends share and what is compared: a projection, a norm, a
rotation and the product behind them."""


def unit(dtype: torch.dtype) -> float:
    """The largest relative step between neighbours of an activation dtype."""
    return 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20  # fp32 sums of a few thousand products lose four bits


def record_step(record: Record) -> float:
    """The coarsest relative step of a record's numbers."""
    return max(_STEP[field.encoding] for field in record.fields)


def same_bytes(dtype: torch.dtype) -> float:
    """Largest relative error, by norm, of what is computed from the same cache bytes."""
    return _ROUNDINGS * unit(dtype)


def quantised(dtype: torch.dtype, *steps: float) -> float:
    """The same where numbers that may differ by a unit are put through quantisers of these steps on the way."""
    return same_bytes(dtype) + 2 * sum(math.sqrt(unit(dtype) * step) for step in steps)


def own_rows(dtype: torch.dtype, layouts: CacheLayouts) -> float:
    """The same where each side attends to rows that it wrote itself."""
    return quantised(dtype, record_step(layouts.window.record), record_step(layouts.compressed.record))


def row_bound(record: Record, stored: Tensor, dtype: torch.dtype, tensor_scale: Tensor | None = None) -> Tensor:
    """float32 `[N, dim]`: how far a stored number may lie from the one that the reference `stored`.

    One step of the record at that place, since on a border either neighbour is right, on the coarser of two scales
    where a group's largest number lies on the border of a scale; and the units that the numbers may differ by.
    """
    bound = same_bytes(dtype) * (stored.abs() + stored.square().mean(-1, keepdim=True).sqrt())
    for field in record.fields:
        dims = slice(field.start, field.stop)
        part, step = stored[:, dims].abs(), _STEP[field.encoding]
        if record.scale_format is ScaleFormat.E4M3:
            step += _STEP[Encoding.E4M3]  # that of the scale
        bound[:, dims] += part * step
        if field.group:
            # The least step, in units of the group's largest number, which a scale that is a power of two may leave at
            # half of what it reaches.
            least = 2 * (2.0**-9 / 240 if field.encoding is Encoding.E4M3 else 0.5 / 6)
            amax = part.unflatten(1, (-1, field.group)).amax(-1, keepdim=True)
            bound[:, dims] += (amax * least).expand(-1, -1, field.group).flatten(1)
        elif tensor_scale is not None:
            bound[:, dims] += 2.0**-9 * tensor_scale
    return bound


def norm_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of what was expected, the largest over rows, in float32. NaN counts as
    infinite; a row of zeros is held to the norm of a mean row."""
    if not expected.numel():
        return 0.0
    found, expected = (part.float().flatten(1) for part in (found, expected))
    norms = expected.norm(dim=1)
    floor = norms.mean().clamp_min(torch.finfo(torch.float32).tiny)
    errors = (found - expected).norm(dim=1) / torch.where(norms > 0, norms, floor)
    return float(errors.nan_to_num(nan=float("inf")).max())


def total_error(found: Tensor, expected: Tensor) -> float:
    """The same over all rows at once."""
    return norm_error(found.reshape(1, -1), expected.reshape(1, -1))
