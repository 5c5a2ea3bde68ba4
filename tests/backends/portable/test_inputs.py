"""Both latents of a layer against the reference's, and the window rows byte by byte."""

from __future__ import annotations

import pytest
import torch

from dsv41.backends.portable.caches import flat
from dsv41.backends.portable.inputs import norm_inputs, rotate_heads
from dsv41.backends.reference.norm import rms_norm, rotate
from dsv41.backends.reference.quantize import mxfp8_round
from dsv41.hal.layout import CacheLayout
from dsv41.hal.records import INDEX_MXFP4_68, PLAIN_BF16, RECORDS, Dialect, v4_584, v41_528

from ...hal.layout_cases import layouts_of
from .common import DEVICE, close, copy_of, covering, layout_of, make_cache, memory, name_of, noise
from .test_insert import EPS, PAGE_SIZE, POSITIONS, SLOTS, TABLE
from .test_norm import decoded

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BF16, FP32 = torch.bfloat16, torch.float32
LATENTS = [
    layout
    for record in RECORDS.values()
    if record.dim == 512
    for layout in layouts_of(record, PAGE_SIZE)
    if layout.value_tile is None or layout.record in (PLAIN_BF16, v4_584(Dialect.FNUZ))
]


@pytest.mark.parametrize(
    ("rank", "dim", "tokens", "dtype", "quantize"),
    covering((32, 48, 128, 1280), (128, 512), (0, 1, 3), (BF16, FP32), (False, True)),
)
def test_both_inputs_are_normed_at_once(rank: int, dim: int, tokens: int, dtype: torch.dtype, quantize: bool) -> None:
    """The latent follows the query; behind it in the same rows stands NaN that belongs to others. At position 0 nothing
    turns."""
    fused = torch.full((tokens, rank + dim + 8), torch.nan, dtype=dtype, device=DEVICE)[:, : rank + dim]
    fused.copy_(noise(tokens, rank + dim) * 3)
    q_weight, kv_weight = noise(rank, seed=1).to(BF16), noise(dim, seed=2)
    start = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
    cache = make_cache(layout_of(INDEX_MXFP4_68 if dim == 128 else PLAIN_BF16))
    before = copy_of(cache)
    qr, codes, scales, kv = norm_inputs(
        fused, q_weight, kv_weight, EPS, quantize, start, TABLE, start - 1, *flat(cache)
    )
    close(qr, rms_norm(fused[:, :rank], q_weight, EPS))
    close(kv, rms_norm(fused[:, rank:], kv_weight, EPS))
    assert torch.equal(memory(cache), memory(before))
    if quantize:
        assert scales.shape == (tokens, -(-rank // 32))
        assert torch.equal(decoded(codes, scales, dtype), mxfp8_round(qr))
    else:
        assert codes.numel() == scales.numel() == 0


@pytest.mark.parametrize(("layout", "dtype"), covering(LATENTS, (BF16, FP32)), ids=name_of)
def test_latents_are_rotated_and_inserted(layout: CacheLayout, dtype: torch.dtype) -> None:
    """All memory around the written rows stays as it was. What is rotated is the rounded norm, and what is quantised
    the rounded rotation. Rows of +-1 are normed without a rounding."""
    expected = make_cache(layout)
    found = copy_of(expected)
    fused = torch.where(noise(5, 32 + 512) < 0, -1.0, 1.0).to(dtype)
    q_weight, weight = noise(32, seed=1), noise(512, seed=2)
    *_, kv = norm_inputs(fused, q_weight, weight, EPS, False, POSITIONS, TABLE, SLOTS, *flat(found))
    rotated = rotate(rms_norm(fused[:, 32:], weight, EPS), POSITIONS, TABLE)
    assert torch.equal(kv, rotated)
    expected.write(SLOTS, rotated)
    assert torch.equal(memory(found), memory(expected))


@pytest.mark.parametrize(
    ("heads", "padded", "tokens", "dtype"), covering((1, 3, 20), (0, 1, 17), (0, 1, 5), (BF16, FP32))
)
def test_heads_are_rotated_and_padded_ones_are_zeros(heads: int, padded: int, tokens: int, dtype: torch.dtype) -> None:
    """Padded heads hold NaN before, and so does memory of others between the tokens."""
    total = heads + padded
    memory_ = torch.full((tokens, total + 2, 512), torch.nan, dtype=dtype, device=DEVICE)
    q = memory_[:, :total]
    q[:, :heads] = noise(tokens, heads, 512).to(dtype)
    expected = torch.nn.functional.pad(rotate(q[:, :heads], POSITIONS[:tokens], TABLE), (0, 0, 0, padded))
    rotate_heads(q, heads, POSITIONS[:tokens], TABLE)
    assert torch.equal(q, expected)
    assert memory_[:, total:].isnan().all()


def test_the_ops_keep_the_rules_of_custom_ops() -> None:
    q, fused, weight = noise(2, 3, 512), noise(2, 32 + 512), noise(512)
    positions, slots = POSITIONS[:2], SLOTS[:2]
    torch.library.opcheck(rotate_heads, (q, 2, positions, TABLE))
    caches = make_cache(layout_of(v41_528(Dialect.OCP), placement="pool")), make_cache(layout_of(PLAIN_BF16))
    for quantize, cache in zip((False, True), caches, strict=True):
        step = (positions, TABLE, slots, *flat(cache))
        torch.library.opcheck(norm_inputs, (fused, weight[:32], weight, EPS, quantize, *step))
