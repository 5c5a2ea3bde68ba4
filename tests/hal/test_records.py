"""Records against the golden vectors, and what pack and unpack promise."""

import inspect
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv41.errors import InputError, LayoutError
from dsv41.hal import codecs, records
from dsv41.hal.records import (
    INDEX_BF16,
    INDEX_FP32,
    INDEX_MXFP4_68,
    NVFP4_288,
    PLAIN_BF16,
    PLAIN_FP32,
    RECORDS,
    Dialect,
    Encoding,
    Field,
    Record,
    ScaleFormat,
    index_fp8_132,
    pack,
    plain_fp8,
    unpack,
    v4_584,
    v41_528,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "records"
OCP, FNUZ = Dialect.OCP, Dialect.FNUZ
ALL = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())
VECTORS = pytest.mark.parametrize(
    ("file", "prefix", "record"),
    [
        ("kv", "v4_584", v4_584(OCP)),
        ("kv", "v41_528", v41_528(OCP)),
        ("kv", "nvfp4_288", NVFP4_288),
        ("index", "mxfp4_68", INDEX_MXFP4_68),
        ("index", "fp8_132", index_fp8_132(OCP, ScaleFormat.FP32)),
    ],
    ids=["v4_584", "v41_528", "nvfp4_288", "mxfp4_68", "fp8_132"],
)


def tensor_scale_for(record: Record) -> torch.Tensor | None:
    return torch.tensor([0.25]) if record.tensor_scale else None


def rows_like(record: Record, count: int = 9, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-6, 5, (count, record.dim // 16), generator=generator).float())
    return torch.randn(count, record.dim, generator=generator) * spread.repeat_interleave(16, 1)


def without_negative_zeros(record: Record, values: torch.Tensor) -> torch.Tensor:
    """Value bytes with e4m3 0x80 as 0x00 and e2m1 8 as 0; bf16 bytes as they are."""
    parts, byte = [], 0
    for field in record.fields:
        part = values[:, byte : byte + field.bytes]
        if field.encoding is Encoding.E4M3:
            part = torch.where(part == 0x80, 0, part)
        if field.encoding is Encoding.E2M1:
            low, high = part & 15, part >> 4
            part = torch.where(low == 8, 0, low) | (torch.where(high == 8, 0, high) << 4)
        parts.append(part)
        byte += field.bytes
    return torch.cat(parts, 1)


@VECTORS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_agree_with_the_vectors(file: str, prefix: str, record: Record, dtype: torch.dtype) -> None:
    golden = load_file(GOLDEN / f"{file}.safetensors")
    values, scales = pack(record, golden["rows"].to(dtype))
    assert torch.equal(scales, golden[f"{prefix}.scales"])
    expected = golden[f"{prefix}.values"]
    assert torch.equal(without_negative_zeros(record, values), without_negative_zeros(record, expected))


@VECTORS
def test_rows_agree_with_the_vectors(file: str, prefix: str, record: Record) -> None:
    golden = load_file(GOLDEN / f"{file}.safetensors")
    rows = unpack(record, golden[f"{prefix}.values"], golden[f"{prefix}.scales"])
    assert torch.equal(rows.bfloat16(), golden[f"{prefix}.dequant"])


def test_the_float32_scale_of_an_index_key_is_the_vectors() -> None:
    golden = load_file(GOLDEN / "index.safetensors")
    _, scales = pack(index_fp8_132(OCP, ScaleFormat.FP32), golden["rows"])
    assert torch.equal(scales.view(torch.float32).flatten(), golden["fp8_132.scale_f32"])


# name: value bytes, scale bytes, padding among them
SIZES = {
    "fp8_ds_mla_v4": (576, 8, 1),
    "fp8_ds_mla_v4_fnuz": (576, 8, 1),
    "fp8_ds_mla_v41": (512, 16, 0),
    "fp8_ds_mla_v41_fnuz": (512, 16, 0),
    "nvfp4_ds_mla": (256, 32, 0),
    "bfloat16": (1024, 0, 0),
    "fp8_e4m3": (512, 0, 0),
    "fp8_e4m3_fnuz": (512, 0, 0),
    "float32": (2048, 0, 0),
    "index_mxfp4": (64, 4, 0),
    "index_fp8": (128, 4, 0),
    "index_fp8_fnuz": (128, 4, 0),
    "index_fp8_ue8m0": (128, 4, 0),
    "index_fp8_ue8m0_fnuz": (128, 4, 0),
    "index_bfloat16": (256, 0, 0),
    "index_float32": (512, 0, 0),
}


def test_sizes_are_those_of_the_libraries() -> None:
    assert {r.name: (r.value_bytes, r.scale_bytes, r.scale_pad) for r in RECORDS.values()} == SIZES
    assert all(r.bytes == r.value_bytes + r.scale_bytes for r in RECORDS.values())


def test_functions_give_the_registered_records() -> None:
    for dialect in Dialect:
        made = [v4_584(dialect), v41_528(dialect), plain_fp8(dialect)]
        made += [index_fp8_132(dialect, form) for form in (ScaleFormat.FP32, ScaleFormat.UE8M0)]
        assert all(RECORDS[record.name] == record and record.dialect is dialect for record in made)
    constants = [NVFP4_288, PLAIN_BF16, PLAIN_FP32, INDEX_MXFP4_68, INDEX_BF16, INDEX_FP32]
    assert all(RECORDS[record.name] == record and record.dialect is None for record in constants)
    with pytest.raises(LayoutError, match="fp32 or ue8m0"):
        index_fp8_132(OCP, ScaleFormat.E4M3)


def test_fr_18_dialect_and_scale_format_have_no_default() -> None:
    must = {"dialect", "scale_format", "scale_placement", "encoding", "record"}
    found = set()
    for module in (records, codecs):
        for name, thing in vars(module).items():
            if name.startswith("_") or not callable(thing) or getattr(thing, "__module__", "") != module.__name__:
                continue
            for parameter in inspect.signature(thing).parameters.values():
                if parameter.name in must:
                    found.add((name, parameter.name))
                    assert parameter.default is inspect.Parameter.empty, f"{name}({parameter.name}=...) has a default"
    assert {("Record", "dialect"), ("v4_584", "dialect"), ("index_fp8_132", "scale_format")} <= found


def test_a_dialect_read_as_the_other_is_off_by_two() -> None:
    rows = rows_like(v41_528(OCP))
    packed = pack(v41_528(OCP), rows)
    right, wrong = unpack(v41_528(OCP), *packed), unpack(v41_528(FNUZ), *packed)
    live = (right != 0) & ~wrong.isnan()
    assert torch.equal(right[live], 2 * wrong[live])


@ALL
def test_zeros_pack_to_zeros(record: Record) -> None:
    for zero in (0.0, -0.0):
        packed = pack(record, torch.full((2, record.dim), zero), tensor_scale_for(record))
        assert (unpack(record, *packed, tensor_scale_for(record)) == 0).all()


@ALL
def test_packing_again_changes_nothing(record: Record) -> None:
    scale = tensor_scale_for(record)
    rows = rows_like(record) * 16  # at the smallest e4m3 scales an NVFP4 group may find a better one the second time
    once = unpack(record, *pack(record, rows, scale), scale)
    again = unpack(record, *pack(record, once, scale), scale)
    assert torch.equal(once, again)


@ALL
def test_fr_33_values_in_the_edge_dims_survive(record: Record) -> None:
    """Only the dims of the last groups are set; a geometry of another width would drop or move them."""
    scale = tensor_scale_for(record)
    for start in (0, record.dim - 64, record.dim - 16, record.dim - 1):
        rows = torch.zeros(1, record.dim)
        rows[0, start : start + 64] = 1.5
        assert torch.equal(unpack(record, *pack(record, rows, scale), scale), rows)


@ALL
def test_fr_36_slices_with_odd_offsets_are_as_good_as_dense_rows(record: Record) -> None:
    scale = tensor_scale_for(record)
    rows = rows_like(record)
    wide = torch.full((9, record.dim + 3), math.nan)
    wide[:, 1 : 1 + record.dim] = rows
    values, scales = pack(record, wide[:, 1 : 1 + record.dim], scale)
    assert torch.equal(values, pack(record, rows, scale)[0])
    odd_values = torch.zeros(9, record.value_bytes + 5, dtype=torch.uint8)
    odd_scales = torch.zeros(9, record.scale_bytes + 5, dtype=torch.uint8)
    odd_values[:, 3 : 3 + record.value_bytes] = values
    odd_scales[:, 3 : 3 + record.scale_bytes] = scales
    for count in (9, 1):
        parts = odd_values[:count, 3 : 3 + record.value_bytes], odd_scales[:count, 3 : 3 + record.scale_bytes]
        assert torch.equal(unpack(record, *parts, scale), unpack(record, values, scales, scale)[:count])


@ALL
def test_nan_stays_in_its_group(record: Record) -> None:
    scale = tensor_scale_for(record)
    rows = rows_like(record)
    rows[2, 5] = math.nan
    rows[4, record.dim - 1] = math.nan
    back = unpack(record, *pack(record, rows, scale), scale)
    clean = unpack(record, *pack(record, rows.nan_to_num(0.0), scale), scale)
    lost = back.isnan()
    for row, dim in ((2, 5), (4, record.dim - 1)):
        field = next(field for field in record.fields if field.start <= dim < field.stop)
        group = field.group or 1
        start = dim // group * group
        assert lost[row, start : start + group].all()
        lost[row, start : start + group] = False
        back[row, start : start + group] = clean[row, start : start + group] = 0
    assert not lost.any()
    assert torch.equal(back, clean)


@ALL
def test_infinite_and_huge_rows_do_not_crash_or_turn_into_nan(record: Record) -> None:
    scale = tensor_scale_for(record)
    rows = torch.full((2, record.dim), torch.finfo(torch.float32).max)
    rows[1] = -math.inf
    assert not unpack(record, *pack(record, rows, scale), scale).isnan().any()


def test_fr_18_fnuz_records_hold_the_same_rows() -> None:
    rows = rows_like(v41_528(OCP), count=50)
    for make in (v4_584, v41_528):
        ocp, fnuz = (unpack(make(dialect), *pack(make(dialect), rows)) for dialect in Dialect)
        error = (rows - fnuz).abs().max()
        assert 0 < error <= 2 * (rows - ocp).abs().max()
        scales = pack(make(FNUZ), rows)[1][:, :7].float()
        assert (scales - pack(make(OCP), rows)[1][:, :7].float()).unique().tolist() == [0.0, 1.0]


def test_fnuz_scales_follow_240_and_its_floor() -> None:
    rows = torch.zeros(4, 512)
    rows[0, 0], rows[1, 0], rows[2, 0] = 240.0, 240.5, 1e-6
    scales = pack(v41_528(FNUZ), rows)[1][:, 0].tolist()
    assert scales == [127, 128, 127 + math.ceil(math.log2(1e-4 / 240)), 127 + math.ceil(math.log2(1e-4 / 240))]


def test_nvfp4_saturates_where_its_scale_rounded_down() -> None:
    rows = torch.zeros(1, 512)
    rows[0, 0] = 6.0 * 17  # 17 is between the e4m3 numbers 16 and 18, a tie that goes to 16
    values, scales = pack(NVFP4_288, rows)
    assert codecs.decode_e4m3(scales[0, :1], OCP).item() == 16
    assert unpack(NVFP4_288, values, scales)[0, 0] == 96


def test_a_tensor_scale_scales_and_saturates() -> None:
    for dialect in Dialect:
        record, scale = plain_fp8(dialect), torch.tensor([0.5])
        rows = torch.zeros(1, 512)
        rows[0, :3] = torch.tensor([3.0, 1e6, -1e6])
        limit = codecs.e4m3_max(dialect) / 2
        assert unpack(record, *pack(record, rows, scale), scale)[0, :3].tolist() == [3.0, limit, -limit]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(RECORDS)), st.integers(0, 2**31), st.integers(-12, 8))
def test_errors_stay_within_the_format(name: str, seed: int, exponent: int) -> None:
    record = RECORDS[name]
    scale = torch.tensor([2.0**exponent / 16]) if record.tensor_scale else None
    rows = torch.randn(3, record.dim, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    back = unpack(record, *pack(record, rows, scale), scale)
    for field in record.fields:
        a, b = (x[:, field.start : field.stop].reshape(3, -1, field.group or 1) for x in (rows, back))
        # Half a step beside the largest magnitude, and the smallest step where a scale is at its floor.
        bound = {Encoding.E4M3: 2.0**-4, Encoding.E2M1: 0.25, Encoding.BF16: 2.0**-8, Encoding.FP32: 0.0}[
            field.encoding
        ]
        slack = 2.0**-8 if record == NVFP4_288 else 1e-6 if scale is None else float(scale) / 16
        assert ((a - b).abs().amax(-1) <= a.abs().amax(-1) * bound + (slack if bound else 0)).all()


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (torch.zeros(2, 511), r"\[N, 512\].*\[2, 511\]"),
        (torch.zeros(512), r"\[512\]"),
        (torch.zeros(2, 512, dtype=torch.float16), "float16"),
        (torch.zeros(2, 512, dtype=torch.uint8), "uint8"),
    ],
)
def test_wrong_rows_are_named(rows: torch.Tensor, match: str) -> None:
    with pytest.raises(InputError, match=match):
        pack(v41_528(OCP), rows)


def test_wrong_bytes_are_named() -> None:
    record = v4_584(OCP)
    values, scales = pack(record, torch.zeros(2, 512))
    with pytest.raises(InputError, match=r"scales uint8 \[N, 8\], found torch.uint8 \[2, 7\]"):
        unpack(record, values, scales[:, :7])
    with pytest.raises(InputError, match="scales uint8"):
        unpack(record, values, scales[:1])
    with pytest.raises(InputError, match="values uint8"):
        unpack(record, values.float(), scales)


def test_tensor_scales_are_neither_missing_nor_ignored() -> None:
    rows = torch.zeros(1, 512)
    with pytest.raises(InputError, match="needs the cache's tensor_scale"):
        pack(plain_fp8(OCP), rows)
    with pytest.raises(InputError, match="leave tensor_scale out"):
        pack(v41_528(OCP), rows, torch.ones(1))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"fields": (Field(0, 511, Encoding.E4M3, 0),)}, "cover the dims"),
        ({"fields": (Field(0, 512, Encoding.E4M3, 48),)}, "whole groups"),
        ({"fields": (Field(0, 512, Encoding.BF16, 32),)}, "no group scale"),
        ({"scale_format": None}, "scale format"),
        ({"dialect": None}, "dialect"),
        ({"tensor_scale": True}, "tensor_scale"),
        ({"alignment": 0}, "alignment"),
    ],
)
def test_records_that_cannot_be_are_refused(changes: dict[str, object], match: str) -> None:
    good: dict[str, object] = {
        "name": "toy",
        "dim": 512,
        "fields": (Field(0, 512, Encoding.E4M3, 32),),
        "scale_format": ScaleFormat.UE8M0,
        "dialect": OCP,
        "alignment": 16,
    }
    Record(**good)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=match):
        Record(**{**good, **changes})  # type: ignore[arg-type]
