"""Numbers as bits, inside kernels: e4m3 in both dialects, e2m1, UE8M0, bf16.

Everything here is integer arithmetic or exact in fp16 and fp32, so it gives the same bits on every target, those
without fp8 instructions and Triton's interpreter included. The interpreter computes wrongly on bf16, and rounds
wrongly to bf16 and fp8: kernels widen bf16 right after the load, and round through `round_to` and the encoders here.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter, which has no bf16 arithmetic."""


@triton.jit
def _bf16_bits(x):
    """int32 bits of float32 `x` rounded to bf16."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(x != x, 0x7FC00000, rounded)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """float32 `x` rounded to nearest even as `DTYPE` (bf16 or fp32) would, still in float32."""
    if DTYPE == tl.bfloat16:
        x = _bf16_bits(x).to(tl.float32, bitcast=True) if INTERPRETED else x.to(tl.bfloat16).to(tl.float32)
    return x


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """The same as `DTYPE` itself, for a store."""
    if DTYPE == tl.bfloat16:
        x = (_bf16_bits(x) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True) if INTERPRETED else x.to(tl.bfloat16)
    return x


@triton.jit
def dot(a, b, acc, DTYPE: tl.constexpr):
    """`acc` plus the product of two blocks of numbers of `DTYPE`, summed in fp32. Interpreted, it is in fp32."""
    NARROW: tl.constexpr = tl.float32 if INTERPRETED else DTYPE
    return tl.dot(a.to(NARROW), b.to(NARROW), acc, input_precision="ieee")


@triton.jit
def e4m3_fields(codes):
    """fp16 whose fields are those of e4m3 bytes (uint8): value * 2**-8, in FNUZ * 2**-7, subnormals too. NaN codes are
    numbers."""
    wide = codes.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def decode_e4m3(codes, FNUZ: tl.constexpr):
    """float32 of e4m3 bytes (uint8)."""
    wide = codes.to(tl.int16)
    value = e4m3_fields(codes).to(tl.float32)
    if FNUZ:
        value = tl.where(wide == 0x80, float("nan"), value * 128.0)
    else:
        value = tl.where((wide & 0x7F) == 0x7F, float("nan"), value * 256.0)
    return value


@triton.jit
def decode_e2m1(nibbles):
    """float32 of e2m1 codes (0 to 15, any integer type): as the fields of fp16 they read as value * 2**-14."""
    wide = nibbles.to(tl.int16)
    fields = ((wide & 8) << 12) | ((wide & 7) << 9)
    return fields.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def decode_ue8m0(codes):
    """float32 powers of two of UE8M0 bytes (uint8); 0 is the subnormal 2**-127, 255 is NaN."""
    exponent = codes.to(tl.int32)
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(x, FNUZ: tl.constexpr):
    """uint8 codes of float32: nearest even, saturating at the largest finite number; NaN stays NaN.

    Subnormal codes come from adding a power of two whose last mantissa bit is worth one step of theirs.
    """
    LIMIT: tl.constexpr = 240.0 if FNUZ else 448.0
    BIAS: tl.constexpr = 8 if FNUZ else 7
    SMALLEST: tl.constexpr = 2.0**-7 if FNUZ else 2.0**-6
    MAGIC: tl.constexpr = 8192.0 if FNUZ else 16384.0
    MAGIC_BITS: tl.constexpr = 0x46000000 if FNUZ else 0x46800000
    magnitude = tl.minimum(tl.abs(x), LIMIT)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - BIAS) << 3)
    small = (magnitude + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    code = tl.where(magnitude < SMALLEST, small, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    if FNUZ:  # which has no -0
        sign = tl.where(code == 0, 0, sign)
    NAN: tl.constexpr = 0x80 if FNUZ else 0x7F
    return tl.where(x != x, NAN, code | sign).to(tl.uint8)


@triton.jit
def encode_e2m1(x):
    """int32 codes (0 to 15) of float32: nearest even, saturating at 6.

    There is no NaN, whose code here is that of 6 and means nothing, since the scale of its group is NaN.
    """
    magnitude = tl.minimum(tl.abs(x), 6.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - (126 << 1)
    small = (magnitude + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    code = tl.where(magnitude < 1.0, small, normal) & 7
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def ue8m0_of(amax, LIMIT_BITS: tl.constexpr):
    """UE8M0 byte, as int32, of 2**ceil(log2(amax / limit)), from the bits of both: exact at powers of two."""
    exponent = (amax.to(tl.int32, bitcast=True) - LIMIT_BITS + 0x7FFFFF) >> 23
    return tl.minimum(tl.maximum(exponent + 127, 0), 254)
