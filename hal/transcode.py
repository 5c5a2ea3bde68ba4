"""Moving rows between caches of different layouts, and saying what that cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv41.errors import InputError, LayoutError
from dsv41.hal import codecs
from dsv41.hal.layout import PagedCache
from dsv41.hal.records import Dialect, Encoding, Record, ScaleFormat, pack, unpack

_CHUNK = 8192  # rows at a time, so that memory stays bounded whatever the caches hold


@dataclass(frozen=True)
class TranscodeReport:
    """What `transcode` did. `exact`: every number came through, NaN as NaN and zeros whatever their sign.

    `max_relative_error` is the largest, over rows and groups, of max|a - b| / max|a|; groups are those of the target
    record (all dims of a field where it has none). A number that became NaN or infinite counts as infinite error.
    `nan_rows` counts source rows that hold a NaN; the groups with the NaN have no relative error and are left out.
    """

    rows: int
    exact: bool
    max_relative_error: float
    nan_rows: int


def transcode(src: PagedCache, dst: PagedCache, src_slots: Tensor, dst_slots: Tensor) -> TranscodeReport:
    """Copy the rows in `src_slots` int64 `[N]` of `src` to `dst_slots` `[N]` of `dst`; a pair with a -1 is skipped.

    Bytes are carried over where the records allow it (the same record, or OCP to FNUZ), otherwise rows are unpacked
    and packed. The slots written must not overlap those read.

    Raises InputError for slots out of range or caches on two devices, LayoutError for records of another dim; nothing
    has been written then.
    """
    if src.layout.record.dim != dst.layout.record.dim:
        raise LayoutError(
            f"{src.layout.record.name} has rows of {src.layout.record.dim} dims, {dst.layout.record.name} of "
            f"{dst.layout.record.dim}: no row of one is a row of the other"
        )
    if src.data.device != dst.data.device:
        raise InputError(f"caches on {src.data.device} and {dst.data.device}: bring both to one device first")
    src.check_slots(src_slots)
    dst.check_slots(dst_slots)
    if src_slots.shape != dst_slots.shape:
        raise InputError(f"{len(src_slots)} source slots for {len(dst_slots)} target slots: give pairs")
    live = (src_slots >= 0) & (dst_slots >= 0)
    error, nan_rows, exact = 0.0, 0, True
    chunks = zip(torch.split(src_slots[live], _CHUNK), torch.split(dst_slots[live], _CHUNK), strict=True)
    for source, target in chunks:
        values, scales = src.read_bytes(source)
        before = unpack(src.layout.record, values, scales, src.tensor_scale)
        converted = _convert_bytes(src, dst, values, scales) or pack(dst.layout.record, before, dst.tensor_scale)
        dst.write_bytes(target, *converted)
        after = unpack(dst.layout.record, *converted, dst.tensor_scale)
        nan_rows += int(before.isnan().any(1).sum())
        error = max(error, _relative_error(dst.layout.record, before, after))
        exact = exact and bool(((before == after) | (before.isnan() & after.isnan())).all())
    return TranscodeReport(int(live.sum()), exact, error, nan_rows)


def _convert_bytes(src: PagedCache, dst: PagedCache, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor] | None:
    """The target's bytes made from the source's without decoding, or None where that cannot be."""
    old, new = src.layout.record, dst.layout.record
    if src.tensor_scale is not None:
        same = old == new and dst.tensor_scale is not None and torch.equal(src.tensor_scale, dst.tensor_scale)
        return (values, scales) if same else None
    if old == new:
        return values, scales
    if old.dialect is Dialect.OCP and replace(old, name=new.name, dialect=Dialect.FNUZ) == new:
        return _ocp_to_fnuz(old, values, scales)
    return None


def _ocp_to_fnuz(record: Record, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The same codes with doubled scales: a FNUZ code is worth half of what it is in OCP.

    The way back has no such form: FNUZ uses the codes 0x7f and 0xff, which OCP has as NaN, for its largest number.
    """
    values, scales = values.clone(), scales.clone()
    byte = 0
    for field in record.fields:
        if field.encoding is Encoding.E4M3:
            part = values[:, byte : byte + field.bytes]
            part.copy_(codecs.e4m3_ocp_to_fnuz(part))
        byte += field.bytes
    used = scales[:, : record.scale_bytes - record.scale_pad]
    if record.scale_format is ScaleFormat.UE8M0:
        used.copy_(codecs.double_ue8m0(used))
    else:
        used.copy_((used.contiguous().view(torch.float32) * 2).view(torch.uint8))
    return values, scales


def _relative_error(record: Record, before: Tensor, after: Tensor) -> float:
    """Largest max|a - b| / max|a| over the rows' groups that hold no NaN in `before`."""
    worst = 0.0
    for field in record.fields:
        shape = (len(before), field.num_scales or 1, field.group or field.dims)
        a, b = (x[:, field.start : field.stop].reshape(shape) for x in (before, after))
        change = (a - b).abs().masked_fill(a == b, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf).amax(-1)
        size = a.abs().amax(-1)
        ratio = (change / size).masked_fill(change == 0, 0.0).masked_fill(change.isinf(), torch.inf)
        ratio = ratio[~size.isnan()]
        worst = max(worst, float(ratio.max()) if ratio.numel() else 0.0)
    return worst
