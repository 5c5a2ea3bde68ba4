"""Rounding through a record or through MXFP8, for numbers that are quantised but not stored."""

from torch import Tensor
from torch.nn.functional import pad

from dsv41.hal import codecs
from dsv41.hal.records import Record, pack, unpack

_GROUP = 32
_AMAX_FLOOR = 1e-4


def round_trip(record: Record, x: Tensor) -> Tensor:
    """`x` `[..., dim]` as it would come back from a cache of this record, in its own dtype."""
    return unpack(record, *pack(record, x.reshape(-1, record.dim))).view(x.shape).to(x.dtype)


def mxfp8_round(x: Tensor) -> Tensor:
    """`x` `[..., n]` as OCP e4m3 in groups of 32 (the last may be shorter) with power-of-two scales, and back."""
    dims = x.shape[-1]
    groups = pad(x.float(), (0, -dims % _GROUP)).unflatten(-1, (-1, _GROUP))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(_AMAX_FLOOR)
    scale = codecs.decode_ue8m0(codecs.ue8m0_of(amax, codecs.e4m3_max(codecs.Dialect.OCP)))
    codes = codecs.encode_e4m3(groups / scale, codecs.Dialect.OCP)
    return (codecs.decode_e4m3(codes, codecs.Dialect.OCP) * scale).flatten(-2)[..., :dims].to(x.dtype)
