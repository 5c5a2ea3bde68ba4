"""Codes against formulas typed here, over every byte there is."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv41.errors import InputError
from dsv41.hal import codecs
from dsv41.hal.codecs import Dialect

BYTES = torch.arange(256, dtype=torch.uint8)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3_number(code: int, dialect: Dialect) -> float:
    """The definition: sign, four bits of exponent, three of mantissa."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if dialect is Dialect.OCP:
        bias, is_nan = 7, exponent == 15 and mantissa == 7
    else:
        bias, is_nan = 8, code == 0x80
    if is_nan:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0 ** (1 - bias)
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - bias)


def finite_codes(dialect: Dialect) -> list[int]:
    return [code for code in range(256) if not math.isnan(e4m3_number(code, dialect))]


def nearest_even(x: float, codes: list[int], values: list[float]) -> float:
    """The value that is nearest to x; of two, the one with the even code; saturating."""
    return min(zip(codes, values, strict=True), key=lambda cv: (abs(cv[1] - x), cv[0] & 1))[1]


@pytest.mark.parametrize("dialect", Dialect)
def test_fr_18_every_e4m3_code_decodes_by_the_definition(dialect: Dialect) -> None:
    expected = torch.tensor([e4m3_number(code, dialect) for code in range(256)])
    assert torch.equal(codecs.decode_e4m3(BYTES, dialect).nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


def test_fr_18_the_dialects_differ_where_it_hurts() -> None:
    ocp, fnuz = (codecs.decode_e4m3(BYTES, dialect) for dialect in Dialect)
    assert (codecs.e4m3_max(Dialect.OCP), codecs.e4m3_max(Dialect.FNUZ)) == (448.0, 240.0)
    assert ocp[~ocp.isnan()].max() == 448
    assert fnuz[~fnuz.isnan()].max() == 240
    assert ocp[0x80] == 0
    assert fnuz[0x80].isnan()
    assert ocp.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert fnuz.isnan().nonzero().flatten().tolist() == [0x80]


@pytest.mark.parametrize("dialect", Dialect)
def test_e4m3_encodes_every_number_and_every_tie(dialect: Dialect) -> None:
    codes = finite_codes(dialect)
    numbers = sorted({e4m3_number(code, dialect) for code in codes})
    ties = [(a + b) / 2 for a, b in pairwise(numbers)]
    limit = numbers[-1]
    probes = [*numbers, *ties, limit * 1.04, limit * 2, -limit * 2, 1e30, math.inf, -math.inf]
    probes += [
        math.nextafter(tie, math.copysign(math.inf, sign)) * (1 + sign * 1e-6) for tie in ties for sign in (-1, 1)
    ]
    x = torch.tensor(probes, dtype=torch.float32)
    values = [e4m3_number(code, dialect) for code in codes]
    expected = [nearest_even(max(-limit, min(limit, p)), codes, values) for p in x.tolist()]
    assert codecs.decode_e4m3(codecs.encode_e4m3(x, dialect), dialect).tolist() == expected


def test_fnuz_never_writes_nan_for_a_negative_zero() -> None:
    x = torch.tensor([-0.0, -1e-30, -(2.0**-12), 0.0])
    assert codecs.encode_e4m3(x, Dialect.FNUZ).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("dialect", Dialect)
def test_e4m3_keeps_nan(dialect: Dialect) -> None:
    code = codecs.encode_e4m3(torch.tensor([math.nan, -math.nan]), dialect)
    assert codecs.decode_e4m3(code, dialect).isnan().all()


def test_e2m1_decodes_every_byte_low_nibble_first() -> None:
    signed = [*E2M1, *(-value for value in E2M1)]
    expected = [[signed[byte & 15], signed[byte >> 4]] for byte in range(256)]
    assert codecs.decode_e2m1(BYTES.unsqueeze(1)).tolist() == expected


def test_e2m1_encodes_every_number_tie_and_neighbour() -> None:
    ties = [(a + b) / 2 for a, b in pairwise(E2M1)]
    around = torch.tensor([*E2M1, *ties, 6.1, 1e30, math.inf])
    x = torch.cat([around, around.nextafter(torch.tensor(0.0)), around.nextafter(torch.tensor(math.inf))])
    x = torch.cat([x, -x])
    signed = [*E2M1, *(-value for value in E2M1)]
    expected = [nearest_even(max(-6.0, min(6.0, p)), list(range(16)), signed) for p in x.tolist()]
    pairs = torch.stack([x, x.flip(0)], dim=1)
    assert codecs.decode_e2m1(codecs.encode_e2m1(pairs))[:, 0].tolist() == expected
    assert codecs.decode_e2m1(codecs.encode_e2m1(pairs))[:, 1].tolist() == expected[::-1]


def test_every_exponent_byte_decodes() -> None:
    expected = [math.ldexp(1.0, byte - 127) for byte in range(255)]
    numbers = codecs.decode_ue8m0(BYTES)
    assert numbers[:255].tolist() == expected
    assert numbers[255].isnan()


@pytest.mark.parametrize("limit", [448.0, 240.0, 6.0])
def test_exponents_are_exact_at_powers_of_two_and_their_neighbours(limit: float) -> None:
    exact = [math.ldexp(limit, exponent) for exponent in range(-125, 119)]
    amax = torch.tensor(exact)
    bytes_ = codecs.ue8m0_of(amax, limit)
    assert torch.equal(bytes_, torch.arange(2, 246, dtype=torch.uint8))
    assert torch.equal(codecs.ue8m0_of(amax.nextafter(torch.tensor(0.0)), limit), bytes_)
    assert torch.equal(codecs.ue8m0_of(amax.nextafter(torch.tensor(math.inf)), limit), bytes_ + 1)


@given(st.floats(min_value=2.0**-100, max_value=2.0**120, width=32), st.sampled_from([448.0, 240.0, 6.0]))
def test_the_exponent_is_the_smallest_that_holds_amax(amax: float, limit: float) -> None:
    byte = int(codecs.ue8m0_of(torch.tensor([amax]), limit))
    assert math.ldexp(limit, byte - 127) >= amax > math.ldexp(limit, byte - 128)


def test_exponents_clamp_and_carry_nan() -> None:
    amax = torch.tensor([0.0, 1e-45, 2.0**-130, math.inf, math.nan])
    assert codecs.ue8m0_of(amax, 448.0).tolist() == [0, 0, 0, 247, 255]
    assert codecs.ue8m0_of(amax, 6.0).tolist() == [0, 0, 0, 253, 255]


def test_fr_20_scales_double_by_their_bytes() -> None:
    doubled = codecs.double_ue8m0(BYTES)
    assert doubled.tolist() == [*range(1, 255), 254, 255]
    before, after = codecs.decode_ue8m0(BYTES), codecs.decode_ue8m0(doubled)
    assert torch.equal(after[:254], before[:254] * 2)


def test_fr_20_codes_cross_to_fnuz_at_half_their_worth() -> None:
    crossed = codecs.e4m3_ocp_to_fnuz(BYTES)
    before, after = codecs.decode_e4m3(BYTES, Dialect.OCP), codecs.decode_e4m3(crossed, Dialect.FNUZ)
    assert torch.equal(before.isnan(), after.isnan())
    assert torch.equal(before[~before.isnan()], 2 * after[~after.isnan()])
    assert (crossed == BYTES).sum() == 253


def test_fr_20_the_way_back_has_no_code_for_fnuzs_largest() -> None:
    """Every FNUZ code, whose bits in OCP are worth the double, but for two that are NaN there; so numbers cross by
    value: exactly at half the scale, where the largest, 2 x 240, is clamped to 448 and no code wraps."""
    fnuz, ocp = (codecs.decode_e4m3(BYTES, dialect) for dialect in (Dialect.FNUZ, Dialect.OCP))
    same = ~fnuz.isnan() & ~ocp.isnan()
    assert (~same).nonzero().flatten().tolist() == [0x7F, 0x80, 0xFF]
    assert torch.equal(ocp[same], 2 * fnuz[same])
    crossed = codecs.decode_e4m3(codecs.encode_e4m3(2 * fnuz, Dialect.OCP), Dialect.OCP)
    assert torch.equal(crossed.isnan(), fnuz.isnan())
    assert torch.equal(crossed.nan_to_num(0), (2 * fnuz).clamp(-448, 448).nan_to_num(0))


@pytest.mark.parametrize(
    "decode",
    [codecs.decode_ue8m0, codecs.double_ue8m0, codecs.decode_e2m1, lambda x: codecs.decode_e4m3(x, Dialect.OCP)],
)
def test_fr_22_raw_bytes_are_never_floats(decode: object) -> None:
    assert callable(decode)
    for wrong in (torch.ones(2), torch.ones(2, dtype=torch.int8), torch.ones(2).to(torch.float8_e8m0fnu)):
        with pytest.raises(InputError, match="uint8"):
            decode(wrong)
