"""Projections: the reference's numbers in any shape, form of weights and number of tokens, through every kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv41.backends.portable.gemm import gemm_tiles, grouped_linear, linear, splits_of
from dsv41.backends.portable.launch import Launch, watching
from dsv41.backends.portable.target import pretending
from dsv41.backends.reference import linear as reference
from dsv41.fp8 import dequantize_blocks
from dsv41.hal import codecs
from dsv41.hal.types import BlockScaledWeight, Weight

from .common import DEVICE, covering

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS = [0, 1, 3, 16, 17, 40, 70, 257]
"""All numbers of tokens that choose another kernel or other tiles, with tiles that are full and that are not."""
SHAPES = [(70, 100), (33, 64), (16, 513), (5, 20)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def random_weight(rows: int, cols: int, block: tuple[int, int] = (32, 32), seed: int = 0) -> BlockScaledWeight:
    """Codes of every kind but NaN, scales from 2**-20 to 2**7."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, cols), generator=generator, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    grid = (-(-rows // block[0]), -(-cols // block[1]))
    scale = torch.randint(107, 135, grid, generator=generator, dtype=torch.uint8)
    return BlockScaledWeight(codes.view(torch.float8_e4m3fn), scale, block).to(DEVICE)


def weight_of(kind: str, rows: int, cols: int) -> Weight:
    if kind == "fp8":
        return random_weight(rows, cols)
    return random(rows, cols, seed=1).to(BF16 if kind == "bf16" else FP32)


def mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes of groups of 32 of the last dim, as the reference rounds."""
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    bytes_ = codecs.ue8m0_of(groups.abs().amax(-1).clamp_min(1e-4), 448.0)
    codes = codecs.encode_e4m3(groups / codecs.decode_ue8m0(bytes_)[..., None], codecs.Dialect.OCP)
    return codes.flatten(-2)[..., : x.shape[-1]].contiguous(), bytes_


def product(x: Tensor, weight: Weight, *, quantize: bool = False, out: Tensor | None = None) -> Tensor:
    """`linear`, or `grouped_linear` of three dims, as a backend calls them; what they do not write stays NaN."""
    x_scale = None
    if out is None:
        out = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=x.dtype, device=DEVICE)
    if quantize:
        x, x_scale = mxfp8(x)
    op = linear if x.ndim == 2 else grouped_linear
    if isinstance(weight, Tensor):
        op(x, x_scale, weight, None, 1, 1, out)
    else:
        op(x, x_scale, weight.data.view(torch.uint8), weight.scale, *weight.block, out)
    return out


def check(found: Tensor, expected: Tensor, x: Tensor, weight: Weight) -> None:
    """Equal but for the order of the sum in fp32, and one last bit of bf16 where that decides a rounding."""
    wide = dequantize_blocks(weight) if isinstance(weight, BlockScaledWeight) else weight
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    bound = 1e-6 * (x.double().abs() @ wide.double().abs().T)
    if found.dtype == BF16:
        bound += 2.0**-7 * expected.double().abs()
    excess = (found.double() - expected.double()).abs() - bound
    assert excess.numel() == 0 or excess.max() <= 0, f"{excess.max()} above its bound"


@pytest.mark.parametrize(
    ("tokens", "shape", "kind", "dtype", "quantize"),
    covering(TOKENS, SHAPES, ["fp8", "bf16", "fp32"], [FP32, BF16], [False, True]),
    ids=str,
)
def test_products_are_those_of_the_reference(
    tokens: int, shape: tuple[int, int], kind: str, dtype: torch.dtype, quantize: bool
) -> None:
    x, weight = random(tokens, shape[1]).to(dtype), weight_of(kind, *shape)
    quantize = quantize and kind == "fp8"
    expected = reference.linear(x, weight, quantize=quantize)
    check(product(x, weight, quantize=quantize), expected, x, weight)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "quantize"), [(2, True), (33, True), (65, True), (2, False), (20, False)])
def test_sums_that_are_exact_are_equal_bit_for_bit(tokens: int, quantize: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (tokens, 96), generator=generator).to(dtype).to(DEVICE) / 4
    weight = random_weight(40, 96)
    few = torch.tensor([0x00, 0x80, 0x30, 0xB8, 0x38, 0x40], dtype=torch.uint8)  # 0, -0, 0.5, -1, 1, 2
    weight.data.view(torch.uint8).copy_(few[torch.randint(0, 6, (40, 96), generator=generator)])
    weight.scale.copy_(torch.randint(125, 130, weight.scale.shape, generator=generator))
    assert torch.equal(product(x, weight, quantize=quantize), reference.linear(x, weight, quantize=quantize))


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("native", [False, True])
def test_every_code_is_its_number(native: bool, dtype: torch.dtype, quantize: bool) -> None:
    """By a device's own conversion, and by bits where there is none."""
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    codes[codes & 0x7F == 0x7F] = 0
    scale = torch.tensor([[123]], dtype=torch.uint8)
    weight = BlockScaledWeight(codes.view(torch.float8_e4m3fn), scale).to(DEVICE)
    with pretending("sm_89" if native else "sm_80"):  # of which neither begins early, so that they run anywhere
        found = product(torch.eye(32, dtype=dtype, device=DEVICE), weight, quantize=quantize)
    assert torch.equal(found.T, weight.data.to(dtype) / 16)


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("byte", [0, 1, 20, 126, 200, 246, 254])
def test_scale_bytes_are_exponents_down_to_0_and_up_to_254(byte: int, quantize: bool) -> None:
    """2**-127 is a subnormal in bf16 and in fp32. Sums beyond fp32 are infinite, not another number."""
    numbers = torch.tensor([2.0**-9, 0.875, -1.0, 1.875, 448.0])
    weight = torch.zeros(5, 32)
    weight[:, 3] = numbers
    scale = torch.tensor([[byte]], dtype=torch.uint8)
    fp8 = BlockScaledWeight(weight.to(torch.float8_e4m3fn), scale).to(DEVICE)
    x = torch.full((1, 32), 1.5, device=DEVICE)
    found = product(x, fp8, quantize=quantize).double().cpu()
    expected = (1.5 * numbers.double() * 2.0 ** (byte - 127)).float().double()
    torch.testing.assert_close(found[0], expected, rtol=0, atol=2.0**-132)


@pytest.mark.parametrize("rows", [32, 20, 48])
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("tokens", [3, 66])
def test_groups_keep_their_own_rows_and_scales(tokens: int, rows: int, quantize: bool) -> None:
    """Also where a block of 32 rows belongs to two groups."""
    x, weight = random(tokens, 3, 64).to(BF16), random_weight(3 * rows, 64)
    found = product(x, weight, quantize=quantize)
    expected = reference.grouped_linear(x, weight, quantize=quantize)
    for group in range(3):
        part = slice(group * rows, (group + 1) * rows)
        check(found[:, part], expected[:, part], x[:, group], dequantize_blocks(weight)[part])


@pytest.mark.parametrize("block", [(16, 64), (128, 128), (48, 48), (1, 8), (7, 3)], ids=str)
@pytest.mark.parametrize("quantize", [False, True])
def test_the_block_of_a_weight_is_its_own(block: tuple[int, int], quantize: bool) -> None:
    x, weight = random(3, 200).to(BF16), random_weight(50, 200, block)
    check(product(x, weight, quantize=quantize), reference.linear(x, weight, quantize=quantize), x, weight)


@pytest.mark.parametrize("tokens", [2, 20, 40])
def test_fp32_weights_into_fp32_keep_all_their_bits(tokens: int) -> None:
    """As the gated compressor wants them: activations of bf16, products and sums of fp32."""
    x, weight = random(tokens, 100).to(BF16), random(20, 100, seed=1)
    found = product(x, weight, out=torch.full((tokens, 20), torch.nan, device=DEVICE))
    check(found, reference.linear(x.float(), weight), x, weight)
    # An addend that bf16 would lose, once for each third of a weight's bits.
    weight = torch.tensor([[1.0, 2.0**-23], [1 + 2.0**-12, 0.0], [1 + 2.0**-23, 0.0]], device=DEVICE)
    found = product(torch.ones(tokens, 2, dtype=BF16, device=DEVICE), weight, out=found[:, :3].clone())
    assert torch.equal(found, weight.sum(1).expand(tokens, 3))


def test_fp32_weights_into_bf16_are_rounded_first() -> None:
    x = torch.tensor([[1.0, -1.0]], dtype=BF16, device=DEVICE)
    weight = torch.tensor([[1 + 2.0**-9, 1.0], [1 + 2.0**-8 + 2.0**-10, 1.0]], device=DEVICE)
    found = product(x, weight)
    assert torch.equal(found, reference.linear(x, weight))
    assert found.tolist() == [[0.0, 2.0**-7]]


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("tokens", [3, 66])
def test_rows_may_lie_apart_and_nothing_else_is_read_or_written(tokens: int, quantize: bool) -> None:
    """Rows of a wider tensor whose other columns are NaN, into some columns of another one."""
    x, weight = random(tokens, 64).to(BF16), random_weight(40, 64)
    expected = product(x, weight, quantize=quantize)
    out = torch.full((tokens + 1, 60), 7.0, dtype=BF16, device=DEVICE)
    if quantize:
        codes, scales = mxfp8(x)
        wide_codes = torch.full((tokens + 1, 96), 0x7F, dtype=torch.uint8, device=DEVICE)
        wide_scales = torch.full((tokens + 1, 5), 0xFF, dtype=torch.uint8, device=DEVICE)
        wide_codes[:tokens, 16:80], wide_scales[:tokens, 1:3] = codes, scales
        given, scale = wide_codes[:tokens, 16:80], wide_scales[:tokens, 1:3]
    else:
        wide = torch.full((tokens + 1, 96), torch.nan, dtype=BF16, device=DEVICE)
        wide[:tokens, 16:80] = x
        given, scale = wide[:tokens, 16:80], None
    linear(given, scale, weight.data.view(torch.uint8), weight.scale, 32, 32, out[:tokens, 8:48])
    assert torch.equal(out[:tokens, 8:48], expected)
    out[:tokens, 8:48] = 7.0
    assert bool((out == 7.0).all())


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("tokens", [3, 66])
def test_nan_stays_in_its_token(tokens: int, quantize: bool) -> None:
    x, weight = random(tokens, 100).to(BF16), random_weight(40, 100)
    expected = product(x, weight, quantize=quantize)
    x[1, 70] = torch.nan
    found = product(x, weight, quantize=quantize)
    assert bool(found[1].isnan().all())
    assert torch.equal(found[[0, *range(2, tokens)]], expected[[0, *range(2, tokens)]])


@pytest.mark.parametrize("kind", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("tokens", [3, 20, 40, 100])
def test_programs_share_the_columns_of_a_few_tall_tiles(tokens: int, kind: str) -> None:
    """Into bf16, and of fp32 weights into fp32; the last program of a tile has fewer columns."""
    x, weight = random(tokens, 2052).to(BF16), weight_of(kind, 33, 2052)
    seen: list[Launch] = []
    with watching(lambda launch: seen.append(launch) is None):
        found = product(x, weight)
    assert [launch.kernel.fn.__name__ for launch in seen] == ["_gemm", "_add"]
    check(found, reference.linear(x, weight), x, weight)
    assert torch.equal(found, product(x, weight))
    if kind == "fp32":
        out = torch.full((tokens, 33), torch.nan, dtype=FP32, device=DEVICE)
        check(product(x, weight, out=out), reference.linear(x.float(), weight), x, weight)


def test_columns_are_shared_where_tiles_are_few_and_stay_as_long_as_four_turns() -> None:
    few = gemm_tiles(1, False, 1)
    # The release's wq_a with wkv, wq_b, wo_a and wo_b.
    shapes = [(1792, 1, 5120), (32768, 1, 1280), (1024, 8, 4096), (5120, 1, 8192)]
    assert [splits_of(few, 1, *shape) for shape in shapes] == [4, 1, 2, 2]
    assert [splits_of(gemm_tiles(64, False, 1), 64, *shape) for shape in shapes] == [8, 1, 4, 4]
    assert [splits_of(gemm_tiles(256, False, 1), 256, *shape) for shape in shapes] == [8, 1, 2, 2]
    assert [splits_of(gemm_tiles(4096, False, 1), 4096, *shape) for shape in shapes] == [1, 1, 1, 1]
    assert splits_of(few, 1, 16, 1, 64) == splits_of(few, 0, 16, 1, 64) == 1


@pytest.mark.parametrize("quantize", [False, True])
def test_the_number_of_tokens_makes_no_endless_variants(quantize: bool) -> None:
    """FR-91: what is compiled for one number of tokens serves a range of them."""
    weight, seen = random_weight(64, 64), []

    def note(launch: Launch) -> bool:
        numbers = {k: v for k, v in launch.arguments.items() if not isinstance(v, Tensor) and k != "num_tokens"}
        seen.append(str((launch.kernel, numbers, launch.options)))
        return False

    with watching(note):
        for tokens in [*range(130), 255, 256, 257, 1024, 1025, 4095, 4096]:
            product(torch.zeros(tokens, 64, dtype=BF16, device=DEVICE), weight, quantize=quantize)
    assert len(set(seen)) <= 6


@pytest.mark.parametrize("tokens", [0, 2, 65])
@pytest.mark.parametrize("quantize", [False, True])
def test_ops_are_well_formed(tokens: int, quantize: bool) -> None:
    weight, x = random_weight(40, 64), random(tokens, 64).to(BF16)
    data, scale = mxfp8(x) if quantize else (x, None)
    args = (weight.data.view(torch.uint8), weight.scale, 32, 32, x.new_zeros(tokens, 40))
    torch.library.opcheck(linear, (data, scale, *args))
    grouped = (data.view(tokens, 2, 32), None if scale is None else scale.view(tokens, 2, 1))
    half = random_weight(40, 32)
    args = (half.data.view(torch.uint8), half.scale, 32, 32, x.new_zeros(tokens, 40))
    torch.library.opcheck(grouped_linear, (*grouped, *args))
