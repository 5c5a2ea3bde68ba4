"""Numbers as bytes: e4m3 in both dialects, e2m1 pairs, UE8M0 exponents.

Codes are uint8 and numbers float32 throughout. Nothing here indexes or computes on a float8 tensor, since torch
implements little on them.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv41.errors import InputError

if TYPE_CHECKING:
    from dsv41.hal.types import BlockScaledWeight


class Dialect(StrEnum):
    """Which e4m3 a byte is. Reading one as the other is wrong by a factor of two and raises nothing."""

    OCP = "ocp"
    """`e4m3fn`: bias 7, largest value 448, NaN is 0x7f and 0xff. NVIDIA, gfx950 and every checkpoint."""
    FNUZ = "fnuz"
    """`e4m3fnuz`: bias 8, largest value 240, NaN is 0x80 (so there is no -0). The matrix cores of gfx942."""


class Encoding(StrEnum):
    """How a dimension is stored."""

    E4M3 = "e4m3"
    E2M1 = "e2m1"
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def bits(self) -> int:
        return {Encoding.E4M3: 8, Encoding.E2M1: 4, Encoding.BF16: 16, Encoding.FP32: 32}[self]


class ScaleFormat(StrEnum):
    """How the scale of a group is stored."""

    UE8M0 = "ue8m0"
    """One byte, the power of two 2**(byte - 127); 255 is NaN."""
    E4M3 = "e4m3"
    """One byte, e4m3 in the OCP dialect whatever the dialect of the values."""
    FP32 = "fp32"
    """Four bytes, a float32 that holds a power of two."""

    @property
    def bytes(self) -> int:
        return 4 if self is ScaleFormat.FP32 else 1


E2M1_MAX = 6.0
"""The largest e2m1 number."""
E4M3_DTYPES = {Dialect.OCP: torch.float8_e4m3fn, Dialect.FNUZ: torch.float8_e4m3fnuz}
_E4M3_MAX = {Dialect.OCP: 448.0, Dialect.FNUZ: 240.0}
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3_max(dialect: Dialect) -> float:
    """The largest finite number of a dialect."""
    return _E4M3_MAX[dialect]


def _demand_bytes(codes: Tensor) -> None:
    # A scale byte taken for a number is off by many powers of two and looks like any other float.
    if codes.dtype != torch.uint8:
        raise InputError(f"codes must be raw bytes (uint8), found {codes.dtype}: use view(torch.uint8), never a cast")


def encode_e4m3(x: Tensor, dialect: Dialect) -> Tensor:
    """Codes of float32 numbers: nearest even, saturating at the largest finite number; NaN stays NaN."""
    limit = _E4M3_MAX[dialect]
    return x.clamp(-limit, limit).to(E4M3_DTYPES[dialect]).view(torch.uint8)


def decode_e4m3(codes: Tensor, dialect: Dialect) -> Tensor:
    """float32 numbers of e4m3 codes; every code is exact. Raises InputError for anything but uint8."""
    _demand_bytes(codes)
    return codes.view(E4M3_DTYPES[dialect]).float()


def e4m3_ocp_to_fnuz(codes: Tensor) -> Tensor:
    """FNUZ codes worth exactly half of the OCP codes given, so that their scale must double.

    All bits stay but for OCP's -0, which FNUZ reads as NaN, and OCP's NaN, which FNUZ reads as a number.
    """
    codes = torch.where(codes == 0x80, 0, codes)
    return torch.where((codes & 0x7F) == 0x7F, 0x80, codes)


@cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """float32 `[256, 2]`: the two numbers of a byte, low nibble first."""
    magnitudes = torch.tensor(_E2M1_VALUES, device=device)
    numbers = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256, device=device)
    return torch.stack([numbers[byte & 15], numbers[byte >> 4]], dim=1)


def positive_numbers(encoding: Encoding, dialect: Dialect | None) -> Tensor:
    """float32, ascending: 0 and every positive number of a coded encoding."""
    if encoding is Encoding.E2M1:
        return torch.tensor(_E2M1_VALUES)
    assert encoding is Encoding.E4M3 and dialect is not None
    numbers = decode_e4m3(torch.arange(128, dtype=torch.uint8), dialect)
    return numbers[~numbers.isnan()]


def encode_e2m1(x: Tensor) -> Tensor:
    """Bytes `[.., n / 2]` of float32 `[.., n]`, the even index in the low nibble: nearest even, saturating at 6.

    e2m1 has no NaN: the scale of the group must carry it.
    """
    # Steps are 1/2 below 2, 1 below 4 and 2 above, and codes count steps: of the three lines the lowest is the right
    # one everywhere, and rounding before the (even) offset is added makes ties fall to even codes.
    magnitude = x.abs().clamp_max_(E2M1_MAX)
    steps = (magnitude * 2).round_()
    steps = torch.minimum(steps, magnitude.round().add_(2), out=steps)
    steps = torch.minimum(steps, magnitude.div_(2).round_().add_(4), out=steps)
    codes = steps.to(torch.uint8) & 7
    codes |= x.signbit().view(torch.uint8) << 3
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode_e2m1(codes: Tensor) -> Tensor:
    """float32 `[.., 2 n]` of e2m1 bytes `[.., n]`. Raises InputError for anything but uint8."""
    _demand_bytes(codes)
    return _e2m1_pairs(codes.device)[codes.int()].flatten(-2)


def ue8m0_of(amax: Tensor, limit: float) -> Tensor:
    """UE8M0 byte of 2**ceil(log2(amax / limit)); 255 where amax is NaN.

    Integer arithmetic on the float32 bits, so exact at powers of two: the difference of two bit patterns, divided by
    the width of a mantissa and rounded up, is the exponent of the quotient rounded up.
    """
    limit_bits = int.from_bytes(struct.pack("<f", limit), "little")
    exponent = (amax.view(torch.int32) - limit_bits + 0x7FFFFF) >> 23
    byte = (exponent + 127).clamp(0, 254)
    return torch.where(amax.isnan(), 255, byte).to(torch.uint8)


def decode_ue8m0(codes: Tensor) -> Tensor:
    """float32 powers of two of UE8M0 bytes; 0 is the subnormal 2**-127 and 255 is NaN.

    Raises InputError for anything but uint8.
    """
    _demand_bytes(codes)
    exponent = codes.int()
    bits = exponent << 23
    bits = torch.where(exponent == 0, 1 << 22, bits)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def count_nan(weight: BlockScaledWeight) -> int:
    """How many elements of an fp8 matrix are NaN, by their own code or by their block's scale."""
    rows, cols = weight.shape
    nan = weight.data.view(torch.uint8) & 0x7F == 0x7F
    by_scale = weight.scale == 255
    if bool(by_scale.any()):
        nan |= by_scale.repeat_interleave(weight.block[0], 0)[:rows].repeat_interleave(weight.block[1], 1)[:, :cols]
    return int(nan.sum())


def double_ue8m0(codes: Tensor) -> Tensor:
    """UE8M0 bytes of the doubled scales: saturated at 254, 255 (NaN) stays 255. Raises InputError for no uint8."""
    _demand_bytes(codes)
    return torch.where(codes >= 254, codes, codes + 1)
