"""Records: the bytes of one token's row in a cache.

A record is its values (fields of consecutive dims, in order) and the scales of their groups. Where the scales lie is
no property of a record but of a layout (`layout.py`). Two records of one width exist, so a record is known by its
name and never by its size. A port may add records of its own to `RECORDS`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv41.errors import InputError, LayoutError
from dsv41.hal import codecs
from dsv41.hal.codecs import Dialect, Encoding, ScaleFormat

__all__ = [
    "INDEX_BF16",
    "INDEX_FP32",
    "INDEX_MXFP4_68",
    "NVFP4_288",
    "PLAIN_BF16",
    "PLAIN_FP32",
    "RECORDS",
    "Dialect",
    "Encoding",
    "Field",
    "Record",
    "ScaleFormat",
    "code_distance",
    "index_fp8_132",
    "pack",
    "plain_fp8",
    "unpack",
    "v4_584",
    "v41_528",
]


@dataclass(frozen=True)
class Field:
    """Dims `start` to `stop` (exclusive) of a row in one encoding; each `group` of them shares a scale (0 = none)."""

    start: int
    stop: int
    encoding: Encoding
    group: int

    @property
    def dims(self) -> int:
        return self.stop - self.start

    @property
    def bytes(self) -> int:
        return self.dims * self.encoding.bits // 8

    @property
    def num_scales(self) -> int:
        return self.dims // self.group if self.group else 0


@dataclass(frozen=True)
class Record:
    """One row of `dim` numbers as bytes.

    `scale_format` is that of the group scales (None = no groups), `scale_pad` the zero bytes after them, `dialect`
    that of fp8 values (None = no fp8 values). `tensor_scale` says that one float32 scale, kept beside the cache,
    serves all rows. A group's scale comes from max(amax, `amax_floor`). `alignment` is the multiple, in bytes, that
    readers of this record want as the distance between pages.
    """

    name: str
    dim: int
    fields: tuple[Field, ...]
    scale_format: ScaleFormat | None
    dialect: Dialect | None
    alignment: int
    amax_floor: float = 0.0
    scale_pad: int = 0
    tensor_scale: bool = False

    def __post_init__(self) -> None:
        def demand(condition: bool, message: str) -> None:
            if not condition:
                raise LayoutError(f"record {self.name!r}: {message}")

        borders = [0, *(field.stop for field in self.fields)]
        demand(
            [field.start for field in self.fields] == borders[:-1] and borders[-1] == self.dim,
            f"its fields must cover the dims 0..{self.dim} in order, found "
            f"{[(field.start, field.stop) for field in self.fields]}",
        )
        for field in self.fields:
            demand(
                field.dims > 0 and field.dims % max(field.group, 1) == 0 and field.dims * field.encoding.bits % 8 == 0,
                f"dims {field.start}..{field.stop} are not whole groups of {field.group} in whole bytes",
            )
            demand(
                (field.group > 0) <= (field.encoding in (Encoding.E4M3, Encoding.E2M1)),
                f"{field.encoding} dims take no group scale; give them group 0",
            )
        grouped = any(field.group for field in self.fields)
        fp8 = any(field.encoding is Encoding.E4M3 for field in self.fields)
        loose = any(field.encoding in (Encoding.E4M3, Encoding.E2M1) and not field.group for field in self.fields)
        demand(
            grouped == (self.scale_format is not None), "a scale format goes with groups of dims, and only with them"
        )
        demand(fp8 == (self.dialect is not None), "a dialect goes with e4m3 values, and only with them")
        demand(
            loose == self.tensor_scale, "tensor_scale goes with e4m3 or e2m1 dims without groups, and only with them"
        )
        demand(self.scale_pad == 0 or grouped, "scale_pad without scales; set it to 0")
        demand(self.alignment > 0, f"alignment {self.alignment} must be a positive number of bytes")

    @property
    def value_bytes(self) -> int:
        return sum(field.bytes for field in self.fields)

    @property
    def num_scales(self) -> int:
        return sum(field.num_scales for field in self.fields)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales, the padding included."""
        return self.num_scales * self.scale_format.bytes + self.scale_pad if self.scale_format else 0

    @property
    def bytes(self) -> int:
        """Bytes of a row, scales included."""
        return self.value_bytes + self.scale_bytes


# The numbers of the format, each said once. HEAD_DIM is one latent row, INDEX_DIM one index key.

HEAD_DIM = 512
ROPE_DIM = 64
INDEX_DIM = 128

_FP8_FLOOR = 1e-4
_MXFP4_FLOOR = 6 * 2.0**-126
_NVFP4_FLOOR = 6 * 2.0**-9  # so that the scale, amax / 6, is at least the smallest e4m3 number

_VECTOR = 16  # bytes of the widest load, and what TMA wants of every stride


def _name(name: str, dialect: Dialect) -> str:
    return name if dialect is Dialect.OCP else f"{name}_{dialect}"


def v4_584(dialect: Dialect) -> Record:
    """`fp8_ds_mla` of V4: the NoPE dims as e4m3 in groups of 64, the RoPE dims as bf16; seven UE8M0, one zero byte."""
    nope = HEAD_DIM - ROPE_DIM
    fields = (Field(0, nope, Encoding.E4M3, 64), Field(nope, HEAD_DIM, Encoding.BF16, 0))
    return Record(
        name=_name("fp8_ds_mla_v4", dialect),
        dim=HEAD_DIM,
        fields=fields,
        scale_format=ScaleFormat.UE8M0,
        dialect=dialect,
        alignment=sum(field.bytes for field in fields),  # the decode kernel's TMA walks pages in value rows
        amax_floor=_FP8_FLOOR,
        scale_pad=1,
    )


def v41_528(dialect: Dialect) -> Record:
    """`fp8_ds_mla` of V4.1 (MXFP8): all dims as e4m3 in groups of 32, sixteen UE8M0."""
    return Record(
        name=_name("fp8_ds_mla_v41", dialect),
        dim=HEAD_DIM,
        fields=(Field(0, HEAD_DIM, Encoding.E4M3, 32),),
        scale_format=ScaleFormat.UE8M0,
        dialect=dialect,
        alignment=512,
        amax_floor=_FP8_FLOOR,
    )


NVFP4_288 = Record(
    name="nvfp4_ds_mla",
    dim=HEAD_DIM,
    fields=(Field(0, HEAD_DIM, Encoding.E2M1, 16),),
    scale_format=ScaleFormat.E4M3,
    dialect=None,
    alignment=512,
    amax_floor=_NVFP4_FLOOR,
)
"""`nvfp4_ds_mla`: e2m1 pairs in groups of 16 with e4m3 scales (OCP on every machine), no scale for the tensor."""


def _plain(name: str, dim: int, encoding: Encoding, dialect: Dialect | None) -> Record:
    # Aligned to whole rows, so that libraries which count in rows can express the distance between pages.
    field = Field(0, dim, encoding, 0)
    return Record(name, dim, (field,), None, dialect, field.bytes, tensor_scale=encoding is Encoding.E4M3)


PLAIN_BF16 = _plain("bfloat16", HEAD_DIM, Encoding.BF16, None)
PLAIN_FP32 = _plain("float32", HEAD_DIM, Encoding.FP32, None)
"""Unquantised, for exact comparison."""
INDEX_BF16 = _plain("index_bfloat16", INDEX_DIM, Encoding.BF16, None)
INDEX_FP32 = _plain("index_float32", INDEX_DIM, Encoding.FP32, None)


def plain_fp8(dialect: Dialect) -> Record:
    """All dims as e4m3, with one float32 scale for the whole cache."""
    return _plain(_name("fp8_e4m3", dialect), HEAD_DIM, Encoding.E4M3, dialect)


INDEX_MXFP4_68 = Record(
    name="index_mxfp4",
    dim=INDEX_DIM,
    fields=(Field(0, INDEX_DIM, Encoding.E2M1, 32),),
    scale_format=ScaleFormat.UE8M0,
    dialect=None,
    alignment=_VECTOR,
    amax_floor=_MXFP4_FLOOR,
)


def index_fp8_132(dialect: Dialect, scale_format: ScaleFormat) -> Record:
    """Index key as e4m3 with four scale bytes: one FP32 scale for all dims, or four UE8M0 for 32 dims each.

    Raises LayoutError for another scale format.
    """
    groups = {ScaleFormat.FP32: INDEX_DIM, ScaleFormat.UE8M0: 32}
    if scale_format not in groups:
        raise LayoutError(f"an fp8 index key has fp32 or ue8m0 scales, found {scale_format}")
    return Record(
        name=_name("index_fp8" if scale_format is ScaleFormat.FP32 else "index_fp8_ue8m0", dialect),
        dim=INDEX_DIM,
        fields=(Field(0, INDEX_DIM, Encoding.E4M3, groups[scale_format]),),
        scale_format=scale_format,
        dialect=dialect,
        alignment=_VECTOR,
        amax_floor=_FP8_FLOOR,
    )


RECORDS: dict[str, Record] = {
    record.name: record
    for record in (
        *(v4_584(dialect) for dialect in Dialect),
        *(v41_528(dialect) for dialect in Dialect),
        NVFP4_288,
        PLAIN_BF16,
        *(plain_fp8(dialect) for dialect in Dialect),
        PLAIN_FP32,
        INDEX_MXFP4_68,
        *(index_fp8_132(dialect, form) for form in (ScaleFormat.FP32, ScaleFormat.UE8M0) for dialect in Dialect),
        INDEX_BF16,
        INDEX_FP32,
    )
}
"""Every record by name. An fp8 name without a suffix is OCP."""


@torch.no_grad()
def pack(record: Record, rows: Tensor, tensor_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Bytes of rows `[N, dim]` (bf16 or float32): values uint8 `[N, value_bytes]`, scales uint8 `[N, scale_bytes]`.

    Numbers round to nearest even and saturate. A NaN makes its whole scale group NaN; in dims without a group it
    stays alone. The largest magnitudes of float32 may come back infinite, since scales round up.

    Raises InputError for rows of another shape or dtype, or a tensor scale that is missing or not asked for.
    """
    if rows.ndim != 2 or rows.shape[1] != record.dim or rows.dtype not in (torch.bfloat16, torch.float32):
        raise InputError(
            f"{record.name} packs bfloat16 or float32 rows [N, {record.dim}], found {rows.dtype} {list(rows.shape)}"
        )
    _check_tensor_scale(record, tensor_scale)
    values = torch.empty(len(rows), record.value_bytes, dtype=torch.uint8, device=rows.device)
    scales = torch.zeros(len(rows), record.scale_bytes, dtype=torch.uint8, device=rows.device)
    for block in _blocks(rows):
        byte = scale = 0
        for field in record.fields:
            x = rows[block, field.start : field.stop].float()
            if field.group:
                x = x.reshape(len(x), field.num_scales, field.group)
                codes = _encode_scales(record, field.encoding, x.abs().amax(-1))
                x = (x / _decode_scales(record, codes).unsqueeze(-1)).flatten(1)
                scales[block, scale : scale + codes.shape[1]] = codes
                scale += codes.shape[1]
            elif tensor_scale is not None:
                x = x / tensor_scale
            values[block, byte : byte + field.bytes] = _encode(record, field.encoding, x)
            byte += field.bytes
    return values, scales


@torch.no_grad()
def unpack(record: Record, values: Tensor, scales: Tensor, tensor_scale: Tensor | None = None) -> Tensor:
    """float32 `[N, dim]` of a record's bytes: each number times its scale, with no rounding besides float32's.

    Raises InputError for bytes of another shape, or a tensor scale that is missing or not asked for.
    """
    for what, found, width in (("values", values, record.value_bytes), ("scales", scales, record.scale_bytes)):
        if found.dtype != torch.uint8 or found.ndim != 2 or found.shape[1] != width or len(found) != len(values):
            raise InputError(
                f"{record.name} has {what} uint8 [N, {width}], found {found.dtype} {list(found.shape)} "
                f"beside values {list(values.shape)}"
            )
    _check_tensor_scale(record, tensor_scale)
    out = torch.empty(len(values), record.dim, dtype=torch.float32, device=values.device)
    for block in _blocks(values):
        factors = _decode_scales(record, scales[block, : record.scale_bytes - record.scale_pad])
        byte = scale = 0
        for field in record.fields:
            x = _decode(record, field.encoding, values[block, byte : byte + field.bytes])
            if field.group:
                x = x.reshape(len(x), field.num_scales, field.group)
                x = (x * factors[:, scale : scale + field.num_scales].unsqueeze(-1)).flatten(1)
                scale += field.num_scales
            elif tensor_scale is not None:
                x = x * tensor_scale
            out[block, field.start : field.stop] = x
            byte += field.bytes
    return out


def _blocks(rows: Tensor) -> list[slice]:
    """On a CPU, blocks of rows whose intermediates reuse memory (up to three times faster); elsewhere all at once."""
    size = 4096 if rows.device.type == "cpu" else max(len(rows), 1)
    return [slice(start, start + size) for start in range(0, len(rows), size)]


def code_distance(record: Record, values: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """How many codes each number of `rows` `[N, dim]` lies from the stored one, int64 `[N, dim]`.

    Counted on the stored scales, so a number of a group whose scale differs may be far off. Numbers of fields without
    codes are 0 or, where they differ, very far. Raises InputError as `unpack` does.
    """
    stored = unpack(record, values, scales)
    distance = (stored != rows.float()).long() * (1 << 30)
    factors, scale = _decode_scales(record, scales[:, : record.scale_bytes - record.scale_pad]), 0
    for field in record.fields:
        if field.group:
            span, groups = slice(field.start, field.stop), slice(scale, scale + field.num_scales)
            factor = factors[:, groups].repeat_interleave(field.group, dim=1)
            steps = codecs.positive_numbers(field.encoding, record.dialect).to(rows.device)
            places = [
                torch.bucketize((x[:, span].float() / factor).abs(), (steps[1:] + steps[:-1]) / 2)
                * torch.where(x[:, span] < 0, -1, 1)
                for x in (stored, rows)
            ]
            distance[:, span] = (places[0] - places[1]).abs()
            scale += field.num_scales
    return distance


def _check_tensor_scale(record: Record, tensor_scale: Tensor | None) -> None:
    if record.tensor_scale and tensor_scale is None:
        raise InputError(f"{record.name} needs the cache's tensor_scale, a float32 tensor of one element")
    if tensor_scale is not None and not record.tensor_scale:
        raise InputError(f"{record.name} carries its own scales; leave tensor_scale out")


def _encode(record: Record, encoding: Encoding, x: Tensor) -> Tensor:
    match encoding:
        case Encoding.E4M3:
            assert record.dialect is not None
            return codecs.encode_e4m3(x, record.dialect)
        case Encoding.E2M1:
            return codecs.encode_e2m1(x)
        case Encoding.BF16:
            return x.to(torch.bfloat16).view(torch.uint8)
        case Encoding.FP32:
            return x.contiguous().view(torch.uint8)


def _decode(record: Record, encoding: Encoding, codes: Tensor) -> Tensor:
    match encoding:
        case Encoding.E4M3:
            assert record.dialect is not None
            return codecs.decode_e4m3(codes, record.dialect)
        case Encoding.E2M1:
            return codecs.decode_e2m1(codes)
        case Encoding.BF16:
            return _reinterpret(codes, torch.bfloat16)
        case Encoding.FP32:
            return _reinterpret(codes, torch.float32)


def _encode_scales(record: Record, encoding: Encoding, amax: Tensor) -> Tensor:
    """Scale bytes `[N, groups * bytes]` that bring `amax` `[N, groups]` to the largest number of the encoding."""
    limit = codecs.E2M1_MAX
    if encoding is Encoding.E4M3:
        assert record.dialect is not None
        limit = codecs.e4m3_max(record.dialect)
    amax = amax.clamp_min(record.amax_floor)
    if record.scale_format is ScaleFormat.E4M3:
        # By a tensor, since torch on a GPU divides by a number with its reciprocal, which can cross a tie.
        return codecs.encode_e4m3(amax / torch.full_like(amax, limit), Dialect.OCP)
    power = codecs.ue8m0_of(amax, limit)
    return power if record.scale_format is ScaleFormat.UE8M0 else codecs.decode_ue8m0(power).view(torch.uint8)


def _decode_scales(record: Record, codes: Tensor) -> Tensor:
    """float32 `[N, groups]` of scale bytes."""
    match record.scale_format:
        case None:
            return codes
        case ScaleFormat.UE8M0:
            return codecs.decode_ue8m0(codes)
        case ScaleFormat.E4M3:
            return codecs.decode_e4m3(codes, Dialect.OCP)
        case ScaleFormat.FP32:
            return _reinterpret(codes, torch.float32)


def _reinterpret(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes `[N, n]` as wider numbers; copied, since torch wants strides and offsets that fit the wider type."""
    return codes.clone(memory_format=torch.contiguous_format).view(dtype)
