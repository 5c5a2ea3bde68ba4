"""Cache layouts as the plain numbers that kernels are compiled with."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache

from dsv41.errors import LayoutError
from dsv41.hal.layout import CacheLayout, ScalePlacement
from dsv41.hal.records import Dialect, Encoding, ScaleFormat

OCP, FNUZ, E2M1, BF16, FP32 = range(5)
"""`RowFormat.code`: how the first dims of a row are stored."""
NO_SCALE, UE8M0, E4M3_SCALE, FP32_SCALE, TENSOR_SCALE = range(5)
"""`RowFormat.scale`: what multiplies them."""

_SCALES = {None: NO_SCALE, ScaleFormat.UE8M0: UE8M0, ScaleFormat.E4M3: E4M3_SCALE, ScaleFormat.FP32: FP32_SCALE}


@dataclass(frozen=True)
class RowFormat:
    """Where the bytes of a row lie and what they mean; one is a compile-time constant of every kernel that reads or
    writes a cache, whose code is thereby the same for all layouts.

    Dims below `coded` are in `code`, each `group` of them sharing a scale (0 = none); the others are bf16. Byte c of
    row t lies at t * `value_stride` + c from the start of its page, or in tiles of `value_tile_rows` x
    `value_tile_bytes` (0 = untiled); its scales likewise, from `scale_start` on, in a pool of their own if `pooled`,
    and in the place of another row by `scale_lanes`, as `CacheLayout` says.
    `floor_bits` is the smallest amax that a scale is made from, as float32 bits. `native` says that the device itself
    converts e4m3 of this dialect, so that kernels need not take the bytes apart.
    """

    dim: int
    coded: int
    code: int
    group: int
    scale: int
    floor_bits: int
    page_size: int
    value_bytes: int
    value_stride: int
    value_tile_rows: int
    value_tile_bytes: int
    scale_bytes: int
    scale_start: int
    scale_stride: int
    scale_tile_rows: int
    scale_tile_bytes: int
    scale_lanes: int
    pooled: int
    native: int = 0

    @staticmethod
    def of(layout: CacheLayout) -> RowFormat:
        """Raises LayoutError for a record of fields that these kernels have no code for."""
        return _of(layout)

    def numbers(self) -> list[int]:
        """As a custom op takes it; `from_numbers` is the way back."""
        return list(astuple(self))

    @staticmethod
    def from_numbers(numbers: Sequence[int]) -> RowFormat:
        return _from_numbers(tuple(numbers))


@cache
def _from_numbers(numbers: tuple[int, ...]) -> RowFormat:
    return RowFormat(*numbers)


@cache
def _of(layout: CacheLayout) -> RowFormat:
    record, placement = layout.record, layout.scale_placement
    first, *rest = record.fields
    if rest and ([field.encoding for field in rest] != [Encoding.BF16] or first.encoding is not Encoding.E4M3):
        raise LayoutError(
            f"portable cannot read {record.name}: expected one run of dims in one encoding, or e4m3 dims and bf16 "
            "behind them; write kernels for this record, or use the reference"
        )
    codes = {Encoding.E2M1: E2M1, Encoding.BF16: BF16, Encoding.FP32: FP32}
    code = (
        (OCP if record.dialect is Dialect.OCP else FNUZ) if first.encoding is Encoding.E4M3 else codes[first.encoding]
    )
    per_token, per_page = placement is ScalePlacement.TOKEN, placement is ScalePlacement.PAGE
    value_tile = layout.tile_shape(layout.value_tile) if layout.value_tile else (0, 0)
    scale_tile = layout.tile_shape(layout.scale_tile) if layout.scale_tile else (0, 0)
    wide = {BF16: 2, FP32: 4}.get(code, 1) if not rest else 2
    if value_tile[1] % wide or scale_tile[1] % (4 if record.scale_format is ScaleFormat.FP32 else 1):
        raise LayoutError(f"portable cannot read {record.name} in tiles that cut a number in two; use wider tiles")
    return RowFormat(
        dim=record.dim,
        coded=first.stop,
        code=code,
        group=first.group,
        scale=TENSOR_SCALE if record.tensor_scale else _SCALES[record.scale_format],
        floor_bits=struct.unpack("<i", struct.pack("<f", record.amax_floor))[0],
        page_size=layout.page_size,
        value_bytes=record.value_bytes,
        value_stride=record.bytes if per_token else record.value_bytes,
        value_tile_rows=value_tile[0],
        value_tile_bytes=value_tile[1],
        scale_bytes=record.scale_bytes,
        scale_start=record.value_bytes if per_token else layout.page_size * record.value_bytes if per_page else 0,
        scale_stride=record.bytes if per_token else record.scale_bytes,
        scale_tile_rows=scale_tile[0],
        scale_tile_bytes=scale_tile[1],
        scale_lanes=layout.scale_lanes,
        pooled=int(placement is ScalePlacement.POOL),
    )
