"""Layouts: where the rows of a cache lie. Nothing else computes a cache offset by hand.

A slot is a physical row, page * page_size + offset. What is declared here and never inferred from a width: the
record, where the scales lie, tiles, and the distance between pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from dsv41.errors import InputError, LayoutError
from dsv41.hal.records import NVFP4_288, RECORDS, Dialect, Record, pack, unpack, v41_528

WHOLE_PAGE = 0
"""As the row count of a tile: as many rows as a page has, whatever the page size becomes."""


class ScalePlacement(StrEnum):
    """Where the scale bytes of a page's rows lie."""

    NONE = "none"
    """The record has no scale bytes."""
    TOKEN = "token"
    """Each row's scales right after its values."""
    PAGE = "page"
    """All value rows of the page, then all its scale rows."""
    POOL = "pool"
    """In a buffer of their own, page by page."""


@dataclass(frozen=True)
class CacheLayout:
    """The bytes of one cache page.

    `alignment` (bytes; 0 = what the record asks for) divides the distance between pages, `page_stride` is that
    distance (None = the page rounded up to `alignment`). `value_tile` (rows r, bytes b) cuts the page's value rows
    into tiles, each contiguous, which follow one another along a row first: byte c of row t lies at
    t // r * (r * width) + c // b * (r * b) + t % r * b + c % b. `scale_tile` does the same to the scale rows. Before
    these are cut, n `scale_lanes` put row t in the place of row t % n * (page_size / n) + t // n: what each of n lanes
    loads, the scales of every n-th row, is then in one piece.

    Raises LayoutError for anything that cannot be.
    """

    record: Record
    page_size: int
    scale_placement: ScalePlacement
    alignment: int = 0
    value_tile: tuple[int, int] | None = None
    scale_tile: tuple[int, int] | None = None
    page_stride: int | None = None
    scale_lanes: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "alignment", self.alignment or self.record.alignment)
        name = self.record.name
        if self.page_size < 1:
            raise LayoutError(f"page_size {self.page_size} for {name}: a page holds at least one row")
        if (self.scale_placement is ScalePlacement.NONE) != (self.record.scale_bytes == 0):
            raise LayoutError(
                f"scale_placement {str(self.scale_placement)!r} for {name}, which has {self.record.scale_bytes} scale "
                "bytes a row: declare 'token', 'page' or 'pool' for a record with scale bytes, 'none' for one without"
            )
        if self.alignment < 1:
            raise LayoutError(f"alignment {self.alignment} for {name}: give a number of bytes, or 0 for its own")
        self._check_tile("value_tile", self.value_tile, self.record.value_bytes)
        self._check_tile("scale_tile", self.scale_tile, self.record.scale_bytes)
        if self.scale_lanes != 1:
            if self.scale_tile is None:
                raise LayoutError(
                    f"scale_lanes {self.scale_lanes} of {name}: its scales are in no tiles; leave it at 1"
                )
            if self.scale_lanes < 1 or self.page_size % self.scale_lanes:
                raise LayoutError(
                    f"scale_lanes {self.scale_lanes} of {name} does not divide a page of {self.page_size} rows: change "
                    "the lanes or the page size"
                )
        if self.page_stride is not None:
            if self.page_stride < self.page_bytes:
                raise LayoutError(
                    f"page_stride {self.page_stride} is less than the {self.page_bytes} bytes of a page of "
                    f"{self.page_size} rows of {name}: pages would overlap"
                )
            if self.page_stride % self.alignment:
                raise LayoutError(
                    f"page_stride {self.page_stride} of {name} is no multiple of its alignment {self.alignment}: "
                    f"use {_round_up(self.page_stride, self.alignment)}"
                )

    def _check_tile(self, what: str, tile: tuple[int, int] | None, width: int) -> None:
        if tile is None:
            return
        if self.scale_placement is ScalePlacement.TOKEN:
            raise LayoutError(f"{what} {tile} of {self.record.name}: rows with scales between them have no tiles")
        rows, columns = self.tile_shape(tile)
        if min(rows, columns, width) < 1 or self.page_size % rows or width % columns:
            raise LayoutError(
                f"{what} {tile} of {self.record.name} does not divide a page of {self.page_size} rows x {width} bytes: "
                "change the tile or the page size; WHOLE_PAGE rows fit every page size"
            )

    def tile_shape(self, tile: tuple[int, int]) -> tuple[int, int]:
        """Rows and bytes of a tile, with WHOLE_PAGE resolved."""
        return (self.page_size if tile[0] == WHOLE_PAGE else tile[0]), tile[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row wherever they lie: the cache's cost of a token, page tails aside."""
        return self.record.bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in the main buffer, without its tail."""
        pooled = self.scale_placement is ScalePlacement.POOL
        return self.page_size * (self.record.value_bytes if pooled else self.record.bytes)

    @property
    def pool_page_bytes(self) -> int:
        """Bytes of a page's scales in the buffer of their own; 0 if there is none."""
        return self.page_size * self.record.scale_bytes if self.scale_placement is ScalePlacement.POOL else 0

    @property
    def stride(self) -> int:
        """Bytes from a page to the next."""
        return self.page_stride if self.page_stride is not None else _round_up(self.page_bytes, self.alignment)

    @property
    def tail_bytes(self) -> int:
        """Bytes of a page's stride that hold no row of it; they may belong to another cache."""
        return self.stride - self.page_bytes

    def with_page_size(self, page_size: int) -> CacheLayout:
        """The same layout with other pages; a declared `page_stride` is dropped, since it was for the old size."""
        return self if page_size == self.page_size else replace(self, page_size=page_size, page_stride=None)

    def describe(self) -> str:
        """One line for people."""
        where = {
            ScalePlacement.NONE: "no scales",
            ScalePlacement.TOKEN: "scales after each row",
            ScalePlacement.PAGE: "scales after the page's rows",
            ScalePlacement.POOL: "scales in a pool of their own",
        }[self.scale_placement]
        tiles = "".join(
            f", {what} in tiles of {self.tile_shape(tile)[0]} rows x {tile[1]} bytes"
            for what, tile in (("values", self.value_tile), ("scales", self.scale_tile))
            if tile
        )
        if self.scale_lanes > 1:
            tiles += f", those of every {self.scale_lanes}th row together"
        return (
            f"{self.record.name}: {self.page_size} rows a page of {self.row_bytes} bytes, {where}{tiles}, page "
            f"{self.page_bytes} + {self.tail_bytes} tail = {self.stride} bytes"
        )

    def differences(self, other: CacheLayout) -> list[str]:
        """What a reader of `other` would misread here, one phrase each. Strides belong to the tensor, so not they."""
        return [
            f"{name} {mine} where {theirs} is expected"
            for (name, mine), theirs in zip(self._facts().items(), other._facts().values(), strict=True)
            if mine != theirs
        ]

    def _facts(self) -> dict[str, object]:
        return {
            "record": self.record.name,
            "page_size": self.page_size,
            "scale_placement": str(self.scale_placement),
            "value_tile": self.value_tile and self.tile_shape(self.value_tile),
            "scale_tile": self.scale_tile and self.tile_shape(self.scale_tile),
            "scale_lanes": self.scale_lanes,
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-able. Facts that follow from the record are written out too, for readers that do not know it."""
        return {
            "record": self.record.name,
            "page_size": self.page_size,
            "scale_placement": str(self.scale_placement),
            "alignment": self.alignment,
            "value_tile": list(self.value_tile) if self.value_tile else None,
            "scale_tile": list(self.scale_tile) if self.scale_tile else None,
            "page_stride": self.page_stride,
            "scale_lanes": self.scale_lanes,
            "dialect": _text(self.record.dialect),
            "scale_format": _text(self.record.scale_format),
            "encodings": [[f.start, f.stop, str(f.encoding), f.group] for f in self.record.fields],
            "value_bytes": self.record.value_bytes,
            "scale_bytes": self.record.scale_bytes,
            "page_bytes": self.page_bytes,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> CacheLayout:
        """The layout of `to_dict`. Raises LayoutError for entries that are missing, unknown, or contradict others."""
        if not isinstance(data, Mapping):
            raise LayoutError(f"this is no cache layout but {data!r:.200}: give the dictionary that to_dict makes")
        if missing := sorted({"record", *(field.name for field in fields(CacheLayout))} - set(data)):
            raise LayoutError(f"this is no cache layout: it lacks {', '.join(missing)}")
        if data["record"] not in list(RECORDS):
            raise LayoutError(f"unknown record {data['record']!r}; known are {', '.join(RECORDS)}")
        record = RECORDS[data["record"]]
        if data["scale_placement"] not in list(ScalePlacement):
            raise LayoutError(
                f"unknown scale_placement {data['scale_placement']!r}; known are {', '.join(ScalePlacement)}"
            )
        stride = data["page_stride"]
        layout = CacheLayout(
            record=record,
            page_size=_whole("page_size", data["page_size"]),
            scale_placement=ScalePlacement(data["scale_placement"]),
            alignment=_whole("alignment", data["alignment"]),
            value_tile=_tile("value_tile", data["value_tile"]),
            scale_tile=_tile("scale_tile", data["scale_tile"]),
            page_stride=None if stride is None else _whole("page_stride", stride),
            scale_lanes=_whole("scale_lanes", data["scale_lanes"]),
        )
        truth = layout.to_dict()
        for key in {**truth, **data}:
            told, true = data.get(key, "absent"), truth.get(key, "absent")
            if told != true:
                raise LayoutError(
                    f"{key} is {told!r} but must be {true!r} with record {record.name}: this description was made for "
                    "another layout, or by hand"
                )
        return layout


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _text(value: StrEnum | None) -> str | None:
    return None if value is None else str(value)


def _whole(what: str, value: Any) -> int:
    if type(value) is not int:
        raise LayoutError(f"{what} {value!r} in a cache layout: give a whole number")
    return value


def _tile(what: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise LayoutError(f"{what} {value!r} in a cache layout: give null or [rows, bytes]")
    return _whole(what, value[0]), _whole(what, value[1])


@dataclass(frozen=True)
class CacheLayouts:
    """The layouts of a layer's three caches. Compressed rows and their index keys share slots, hence a page size.

    Raises LayoutError for a combination that no model writes.
    """

    window: CacheLayout
    compressed: CacheLayout
    index: CacheLayout

    def __post_init__(self) -> None:
        if self.window.record == NVFP4_288:
            raise LayoutError(
                f"{NVFP4_288.name} for the window cache: it holds compressed rows only; use {v41_528(Dialect.OCP).name}"
            )
        mxfp8 = [v41_528(dialect) for dialect in Dialect]
        if self.compressed.record == NVFP4_288 and self.window.record not in mxfp8:
            raise LayoutError(
                f"{NVFP4_288.name} for the compressed cache beside a window cache in {self.window.record.name}: the "
                f"window must be its MXFP8 companion, {' or '.join(record.name for record in mxfp8)}"
            )
        if self.window.record.dim != self.compressed.record.dim:
            raise LayoutError(
                f"window rows of {self.window.record.dim} dims beside compressed rows of {self.compressed.record.dim}: "
                "attention reads both as one latent, give records of the same dim"
            )
        if self.compressed.page_size != self.index.page_size:
            raise LayoutError(
                f"compressed pages of {self.compressed.page_size} rows beside index pages of {self.index.page_size}: "
                "they share slots, give both the same page_size"
            )

    def with_page_size(self, *, window: int | None = None, compressed: int | None = None) -> CacheLayouts:
        """The same layouts with other pages; the index keys follow the compressed rows."""
        window = self.window.page_size if window is None else window
        compressed = self.compressed.page_size if compressed is None else compressed
        return CacheLayouts(
            window=self.window.with_page_size(window),
            compressed=self.compressed.with_page_size(compressed),
            index=self.index.with_page_size(compressed),
        )

    @property
    def block_alignment(self) -> int:
        """What the page stride must be a multiple of, in bytes, where the caches share one block of memory."""
        return math.lcm(self.window.alignment, self.compressed.alignment, self.index.alignment)


@dataclass(frozen=True, eq=False)
class PagedCache:
    """A cache: bytes and the layout they are in.

    `data` uint8 `[pages, >= page_bytes]`, dense inside a page, any page stride that the layout allows, so a view into
    a buffer shared with other caches will do. `scale_pool` uint8 `[pages, >= pool_page_bytes]` where scales have a
    pool, `tensor_scale` float32 `[1]` where the record asks for one, otherwise None.

    Raises LayoutError for tensors that do not fit the layout.
    """

    layout: CacheLayout
    data: Tensor
    scale_pool: Tensor | None = None
    tensor_scale: Tensor | None = None

    def __post_init__(self) -> None:
        layout, name = self.layout, self.layout.record.name
        _check_pages("data", self.data, layout.page_bytes, name)
        stride = self.data.stride(0)
        if self.num_pages > 1 and (stride % layout.alignment or stride != (layout.page_stride or stride)):
            raise LayoutError(
                f"data of {name} has pages {stride} bytes apart: need a multiple of {layout.alignment}"
                + (f", exactly {layout.page_stride}" if layout.page_stride else "")
            )
        if (self.scale_pool is not None) != (layout.pool_page_bytes > 0):
            raise LayoutError(
                f"scale_pool {'given' if self.scale_pool is not None else 'missing'} for {name} with scale_placement "
                f"{str(layout.scale_placement)!r}: it belongs to 'pool' alone"
            )
        if self.scale_pool is not None:
            _check_pages("scale_pool", self.scale_pool, layout.pool_page_bytes, name)
            if len(self.scale_pool) != self.num_pages or self.scale_pool.device != self.data.device:
                raise LayoutError(
                    f"scale_pool of {name} has {len(self.scale_pool)} pages on {self.scale_pool.device}, data has "
                    f"{self.num_pages} on {self.data.device}: they must be alike"
                )
        if (self.tensor_scale is not None) != layout.record.tensor_scale:
            raise LayoutError(
                f"tensor_scale {'given' if self.tensor_scale is not None else 'missing'} for {name}: it belongs to "
                "records with one scale for the whole cache, and to no other"
            )
        scale = self.tensor_scale
        if scale is not None and (
            scale.dtype != torch.float32 or scale.shape != (1,) or scale.device != self.data.device
        ):
            raise LayoutError(
                f"tensor_scale of {name} must be float32 [1] on {self.data.device}, found {scale.dtype} "
                f"{list(scale.shape)} on {scale.device}"
            )

    @staticmethod
    def allocate(layout: CacheLayout, num_pages: int, device: torch.device | str = "cpu", fill: int = 0) -> PagedCache:
        """A cache of its own, every byte `fill`. A tensor scale starts at 1."""
        pool, record = layout.pool_page_bytes, layout.record
        return PagedCache(
            layout,
            torch.full((num_pages, layout.stride), fill, dtype=torch.uint8, device=device),
            torch.full((num_pages, pool), fill, dtype=torch.uint8, device=device) if pool else None,
            torch.ones(1, dtype=torch.float32, device=device) if record.tensor_scale else None,
        )

    @property
    def num_pages(self) -> int:
        return self.data.shape[0]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.layout.page_size

    def expect(self, layout: CacheLayout, reader: str) -> None:
        """Raises LayoutError, naming every difference, where `reader` would misread this cache as `layout`."""
        if found := self.layout.differences(layout):
            raise LayoutError(
                f"{reader} cannot read this cache: {'; '.join(found)}. Create the cache with the layout of its reader, "
                "or transcode it"
            )

    def value_view(self) -> Tensor:
        """Values as a view `[pages, page_size, value_bytes]`; tiled ones `[pages, page_size / rows, rows,
        value_bytes / bytes, bytes]`."""
        layout, record = self.layout, self.layout.record
        if layout.scale_placement is ScalePlacement.TOKEN:
            return self._plane(self.data, 0, record.bytes, None)[..., : record.value_bytes]
        return self._plane(self.data, 0, record.value_bytes, layout.value_tile)

    def scale_view(self) -> Tensor:
        """Scales as a view `[pages, page_size, scale_bytes]` (0 bytes where there are none), each in its place by
        `scale_lanes`; tiled ones as in `value_view`."""
        layout, record = self.layout, self.layout.record
        match layout.scale_placement:
            case ScalePlacement.NONE:
                return self.data.new_empty(self.num_pages, layout.page_size, 0)
            case ScalePlacement.TOKEN:
                return self._plane(self.data, 0, record.bytes, None)[..., record.value_bytes :]
            case ScalePlacement.PAGE:
                after_values = layout.page_size * record.value_bytes
                return self._plane(self.data, after_values, record.scale_bytes, layout.scale_tile)
            case ScalePlacement.POOL:
                assert self.scale_pool is not None
                return self._plane(self.scale_pool, 0, record.scale_bytes, layout.scale_tile)

    def _plane(self, data: Tensor, start: int, width: int, tile: tuple[int, int] | None) -> Tensor:
        """The page's rows of `width` bytes that lie one after the other from byte `start`, tiled or not."""
        pages, size = self.num_pages, self.layout.page_size
        plane = data[:, start : start + size * width]
        if tile is None:
            return plane.view(pages, size, width)
        rows, columns = self.layout.tile_shape(tile)
        return plane.view(pages, size // rows, width // columns, rows, columns).transpose(2, 3)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Pack `rows` `[N, dim]` (bf16 or float32) into `slots` int64 `[N]`; -1 writes nothing.

        No slot may occur twice. Raises InputError, before anything is written, for slots out of range or rows of
        another shape, dtype or device.
        """
        self._check_rows(slots, rows)
        values, scales = pack(self.layout.record, rows, self.tensor_scale)
        self._scatter(slots, values, scales)

    def read(self, slots: Tensor) -> Tensor:
        """float32 `[N, dim]` of the rows in `slots` int64 `[N]`; for -1 nothing is read and the row is zero.

        Raises InputError for slots out of range.
        """
        values, scales = self.read_bytes(slots)
        rows = unpack(self.layout.record, values, scales, self.tensor_scale)
        return rows.masked_fill_((slots < 0).unsqueeze(1), 0.0)

    def write_bytes(self, slots: Tensor, values: Tensor, scales: Tensor) -> None:
        """`write` for rows that are packed already: uint8 `[N, value_bytes]` and `[N, scale_bytes]`."""
        record = self.layout.record
        for what, found, width in (("values", values, record.value_bytes), ("scales", scales, record.scale_bytes)):
            if found.dtype != torch.uint8 or found.shape != (len(slots), width):
                raise InputError(
                    f"{what} of {record.name} must be uint8 [{len(slots)}, {width}], found {found.dtype} "
                    f"{list(found.shape)}"
                )
        self._check_rows(slots, values)
        self._scatter(slots, values, scales)

    def read_bytes(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The bytes in `slots` int64 `[N]`, zeros for -1: uint8 values `[N, value_bytes]`, scales `[N, scale_bytes]`.

        Raises InputError for slots out of range.
        """
        self.check_slots(slots)
        live = slots >= 0
        if bool(live.all()):
            return self._gather(slots)
        values, scales = self._gather(slots[live])
        full_values, full_scales = (part.new_zeros(len(slots), part.shape[1]) for part in (values, scales))
        full_values[live], full_scales[live] = values, scales
        return full_values, full_scales

    def _gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        values = self.value_view()[self._index(slots, self.layout.value_tile)]
        scales = self.scale_view()[self._index(slots, self.layout.scale_tile, self.layout.scale_lanes)]
        return values.flatten(1), scales.flatten(1)

    def _scatter(self, slots: Tensor, values: Tensor, scales: Tensor) -> None:
        live = slots >= 0
        if not bool(live.all()):
            slots, values, scales = slots[live], values[live], scales[live]
        for view, tile, lanes, codes in (
            (self.value_view(), self.layout.value_tile, 1, values),
            (self.scale_view(), self.layout.scale_tile, self.layout.scale_lanes, scales),
        ):
            index = self._index(slots, tile, lanes)
            view[index] = codes.reshape(len(slots), *view.shape[len(index) :])

    def _index(self, slots: Tensor, tile: tuple[int, int] | None, lanes: int = 1) -> tuple[Tensor, ...]:
        """What indexes a row in `value_view` or `scale_view`."""
        size = self.layout.page_size
        page, offset = slots // size, slots % size
        offset = offset % lanes * (size // lanes) + offset // lanes
        if tile is None:
            return page, offset
        rows, _ = self.layout.tile_shape(tile)
        return page, offset // rows, offset % rows

    def check_slots(self, slots: Tensor) -> None:
        """Raises InputError unless `slots` are int64 `[N]` on the cache's device and in range, or -1."""
        if slots.dtype != torch.int64 or slots.ndim != 1 or slots.device != self.data.device:
            raise InputError(
                f"slots must be int64 [N] on {self.data.device}, found {slots.dtype} {list(slots.shape)} on "
                f"{slots.device}"
            )
        wrong = (slots < -1) | (slots >= self.num_slots)
        if bool(wrong.any()):
            raise InputError(
                f"slot {int(slots[wrong][0])} is outside this cache of {self.num_pages} pages x "
                f"{self.layout.page_size} rows: need 0..{self.num_slots - 1}, or -1 for none"
            )

    def _check_rows(self, slots: Tensor, rows: Tensor) -> None:
        self.check_slots(slots)
        if len(rows) != len(slots) or rows.device != slots.device:
            raise InputError(f"{len(rows)} rows on {rows.device} for {len(slots)} slots on {slots.device}: match them")


def _check_pages(what: str, data: Tensor, page_bytes: int, name: str) -> None:
    if not isinstance(data, Tensor):
        # Kernels walk a cache from its first byte to its last, so it cannot be made of separate allocations.
        raise LayoutError(f"{what} of {name} must be one tensor, found {type(data).__name__}")
    if data.dtype != torch.uint8 or data.ndim != 2 or data.shape[1] < page_bytes:
        raise LayoutError(
            f"{what} of {name} must be uint8 [pages, >= {page_bytes}], found {data.dtype} {list(data.shape)}"
        )
    if data.stride(1) != 1 or (len(data) > 1 and data.stride(0) < page_bytes):
        raise LayoutError(
            f"{what} of {name} has strides {list(data.stride())}: a page must be dense (stride 1) and pages at least "
            f"{page_bytes} bytes apart"
        )
