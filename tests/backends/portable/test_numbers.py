"""Numbers as bits inside kernels: every code, and floats around every border between two codes."""

from __future__ import annotations

import struct

import pytest
import torch
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable import numbers
from dsv41.backends.portable.launch import launch
from dsv41.hal import codecs
from dsv41.hal.codecs import Dialect, Encoding

from .common import DEVICE, jit

# numpy says so of sums with NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

DIALECTS = list(Dialect)
_BLOCK = 1 << 12


@jit
def _apply(x, out, OP: tl.constexpr, OPTION: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place)
    if OP == "decode_e4m3":
        result = numbers.decode_e4m3(value, OPTION)
    elif OP == "decode_e2m1":
        result = numbers.decode_e2m1(value)
    elif OP == "decode_ue8m0":
        result = numbers.decode_ue8m0(value)
    elif OP == "encode_e4m3":
        result = numbers.encode_e4m3(value, OPTION)
    elif OP == "encode_e2m1":
        result = numbers.encode_e2m1(value)
    elif OP == "ue8m0_of":
        result = numbers.ue8m0_of(value, OPTION)
    elif OP == "round_to":
        result = numbers.round_to(value, tl.bfloat16)
    else:
        result = numbers.narrow(value, out.dtype.element_ty)
    tl.store(out + place, result)


def apply(op: str, x: Tensor, dtype: torch.dtype, option: int | bool | None = None) -> Tensor:
    """A function of `numbers` on every element of `x` `[n]`."""
    block = min(_BLOCK, 1 << (len(x) - 1).bit_length())
    padded = torch.nn.functional.pad(x, (0, -len(x) % block)).to(DEVICE)
    out = torch.full(padded.shape, 77, dtype=dtype, device=DEVICE)
    launch(_apply, (len(padded) // block,), x=padded, out=out, OP=op, OPTION=option, BLOCK=block)
    return out[: len(x)].cpu()


def sweep() -> Tensor:
    """float32 of every sign, exponent and first seven mantissa bits, and behind them bits that make it a tie, or the
    neighbour of one, for every encoding here; infinities among them, and NaN."""
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    return torch.cat([(high | low).view(torch.float32) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])


def same(found: Tensor, expected: Tensor) -> None:
    """Bit for bit, zeros' signs too, but any NaN is like any other."""
    assert torch.equal(found.isnan(), expected.isnan())
    kind = torch.int16 if found.dtype == torch.bfloat16 else torch.int32
    known = ~found.isnan()
    assert torch.equal(found[known].view(kind), expected[known].view(kind))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_e4m3_code_is_decoded(dialect: Dialect) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    found = apply("decode_e4m3", codes, torch.float32, dialect is Dialect.FNUZ)
    same(found, codecs.decode_e4m3(codes, dialect))


def test_a_dialect_taken_for_the_other_is_wrong_by_two() -> None:
    """Why the tables above would catch it: no number but zero is the same in both."""
    codes = torch.arange(256, dtype=torch.uint8)
    ocp, fnuz = (apply("decode_e4m3", codes, torch.float32, fnuz) for fnuz in (False, True))
    number = ~(ocp.isnan() | fnuz.isnan())
    assert number.sum() == 253
    assert torch.equal(ocp[number], 2 * fnuz[number])


def test_every_e2m1_code_is_decoded() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    same(apply("decode_e2m1", codes, torch.float32), codecs.decode_e2m1(codes)[0::2])


def test_every_ue8m0_code_is_decoded() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    found = apply("decode_ue8m0", codes, torch.float32)
    same(found, codecs.decode_ue8m0(codes))
    assert found[0] == 2.0**-127
    assert found[254] == 2.0**127


@pytest.mark.parametrize("dialect", DIALECTS)
def test_floats_are_encoded_as_e4m3(dialect: Dialect) -> None:
    """Subnormals, ties, saturation, infinities and both zeros included; -0 is 0 where a dialect has none."""
    x = torch.cat((sweep(), _borders(Encoding.E4M3, dialect)))
    found, expected = apply("encode_e4m3", x, torch.uint8, dialect is Dialect.FNUZ), codecs.encode_e4m3(x, dialect)
    nan = x.isnan()
    assert torch.equal(found[~nan], expected[~nan])
    assert codecs.decode_e4m3(found[nan], dialect).isnan().all()


def test_floats_are_encoded_as_e2m1() -> None:
    x = torch.cat((sweep(), _borders(Encoding.E2M1, None)))
    x = x[~x.isnan()]
    expected = codecs.encode_e2m1(x.repeat_interleave(2)) & 15
    assert torch.equal(apply("encode_e2m1", x, torch.int32), expected.int())


@pytest.mark.parametrize("limit", [448.0, 240.0, 6.0])
def test_scales_are_powers_of_two_rounded_up(limit: float) -> None:
    amax = sweep()
    amax = amax[amax >= 0].abs()
    edges = limit * torch.exp2(torch.arange(-126, 118).float())
    amax = torch.cat((amax, edges, edges.nextafter(torch.tensor(0.0)), edges.nextafter(torch.tensor(torch.inf))))
    bits = struct.unpack("<i", struct.pack("<f", limit))[0]
    assert torch.equal(apply("ue8m0_of", amax, torch.int32, bits), codecs.ue8m0_of(amax, limit).int())


def test_floats_are_rounded_to_bf16() -> None:
    x = sweep()
    same(apply("round_to", x, torch.float32), x.bfloat16().float())
    same(apply("narrow", x, torch.bfloat16), x.bfloat16())
    same(apply("narrow", x, torch.float32), x)


def _borders(encoding: Encoding, dialect: Dialect | None) -> Tensor:
    """The numbers of an encoding, the middles between them, and the floats next to both."""
    numbers_ = codecs.positive_numbers(encoding, dialect)
    x = torch.cat((numbers_, (numbers_[1:] + numbers_[:-1]) / 2))
    x = torch.cat((x, x.nextafter(torch.tensor(0.0)), x.nextafter(torch.tensor(torch.inf))))
    return torch.cat((x, -x))
