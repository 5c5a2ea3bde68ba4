"""Attention against the reference's in the same records: every record, placement, dialect and head count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.backends.portable.attention import KEYS, attend, workspace_bytes
from dsv41.backends.portable.caches import flat
from dsv41.backends.reference.attention import gather, sparse_mqa
from dsv41.backends.reference.norm import rotate
from dsv41.backends.reference.quantize import mxfp8_round
from dsv41.config import DeepseekV41Config
from dsv41.hal import codecs
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import (
    NVFP4_288,
    PLAIN_BF16,
    PLAIN_FP32,
    Dialect,
    Record,
    plain_fp8,
    v4_584,
    v41_528,
)
from dsv41.rope import cos_sin_table

from .common import DEVICE, covering, layout_of, make_cache, noise

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BF16, FP32 = torch.bfloat16, torch.float32
DIM = 512
SCALE = DIM**-0.5
PAGE = 16
TABLE = cos_sin_table(DeepseekV41Config(), 1, 300, DEVICE)
POSITIONS = torch.tensor([299, -1, 130, 0], device=DEVICE)
LAST = DIM // 32
RECORDS: list[tuple[Record, Record]] = [
    *((v4_584(a), v4_584(b)) for a, b in ((Dialect.OCP, Dialect.OCP), (Dialect.FNUZ, Dialect.OCP))),
    *((v41_528(d), v41_528(d)) for d in Dialect),
    *((v41_528(d), NVFP4_288) for d in Dialect),
    (PLAIN_BF16, plain_fp8(Dialect.OCP)),
    (plain_fp8(Dialect.FNUZ), PLAIN_BF16),
    (PLAIN_FP32, PLAIN_FP32),
]


@dataclass
class Case:
    """Caches that hold only the rows that some token sees; all else is poison."""

    window: PagedCache
    compressed: PagedCache
    window_slots: Tensor
    compressed_slots: Tensor

    @staticmethod
    def make(
        records: tuple[Record, Record],
        placement: ScalePlacement | None = None,
        tiled: bool = False,
        keys: tuple[int, int] = (20, 40),
        tokens: int = 4,
    ) -> Case:
        caches = [make_cache(_layout(record, placement, tiled), 12) for record in records]
        generator = torch.Generator().manual_seed(1)
        slots = []
        for cache, count in zip(caches, keys, strict=True):
            chosen = [torch.randperm(cache.num_slots, generator=generator)[:count] for _ in range(tokens)]
            slots.append(
                torch.stack(chosen).to(DEVICE) if chosen else torch.zeros(0, count, dtype=torch.long, device=DEVICE)
            )
        for which, cache in zip(slots, caches, strict=True):
            used = which.unique()
            rows = noise(len(used), DIM, seed=2) * torch.exp2(noise(len(used), DIM // 32, seed=3)).repeat_interleave(
                32, dim=1
            )
            cache.write(used, rows)
        return Case(*caches, *slots)

    def expected(self, q: Tensor, sink: Tensor, *, compressed: bool = True) -> Tensor:
        parts = [gather(self.window, self.window_slots, q.dtype)]
        if compressed:
            parts.append(gather(self.compressed, self.compressed_slots, q.dtype))
        return sparse_mqa(q, parts, sink, SCALE)

    def found(
        self,
        q: Tensor,
        sink: Tensor,
        *,
        compressed: bool = True,
        rotate_query: bool = False,
        rotate_back: bool = False,
        quantize: bool = False,
        turns: bool = False,
        padded: int = 0,
    ) -> Tensor:
        """What the op makes of it, into poisoned memory. `turns` gives it workspace for one token at a time."""
        tokens, heads, _ = q.shape
        num_compressed = self.compressed_slots.shape[1] if compressed else 0
        size = workspace_bytes(
            1 if turns else max(tokens, 1), heads, self.window_slots.shape[1], num_compressed, q.dtype
        )
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)
        q = torch.cat((q, q.new_full((tokens, padded, DIM), float("nan"))), dim=1)
        out, scale = torch.full_like(q, float("nan")), None
        if quantize:
            out = torch.full((tokens, heads * DIM), 0x7F, dtype=torch.uint8, device=DEVICE)
            scale = torch.full((tokens, heads * LAST), 0xFF, dtype=torch.uint8, device=DEVICE)
        attend(
            q, heads, sink, SCALE, *flat(self.window), self.window_slots,
            *(flat(self.compressed) if compressed else (None, None, None, [])),
            self.compressed_slots if compressed else None,
            POSITIONS[:tokens], TABLE, rotate_query, rotate_back, workspace, out, scale,
        )  # fmt: skip
        if scale is None:
            assert out[:, heads:].isnan().all()  # padded heads are nobody's
            return out[:, :heads]
        numbers = codecs.decode_e4m3(out, Dialect.OCP).view(tokens, -1, 32)
        return (numbers * codecs.decode_ue8m0(scale)[..., None]).view(tokens, heads, DIM).to(q.dtype)


def _layout(record: Record, placement: ScalePlacement | None, tiled: bool) -> CacheLayout:
    if not record.scale_bytes:
        placement = None
    return layout_of(record, PAGE, placement, tiled and placement is not ScalePlacement.TOKEN)


def query(tokens: int, heads: int, dtype: torch.dtype = BF16) -> Tensor:
    return (noise(tokens, heads, DIM, seed=4) * 2).to(dtype)


def sinks(heads: int) -> Tensor:
    """Ordinary ones; where there are enough heads, one that takes everything and one that takes nothing."""
    sink = noise(heads, seed=5)
    if heads > 2:
        sink[0], sink[1] = float("inf"), float("-inf")
    return sink


def agree(found: Tensor, expected: Tensor) -> None:
    """Weights and their products are rounded to fp16 and bf16, which float32 activations are spared."""
    error = (found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30)
    assert error <= (6e-3 if expected.dtype == BF16 else 2e-5)


def distinct(case: tuple[Any, ...]) -> tuple[Any, ...]:
    """Without what means nothing to a case: a placement where there are no scales, tiles where scales are between."""
    records, placement, tiled, heads, dtype = case
    if not any(record.scale_bytes for record in records):
        placement = ScalePlacement.PAGE
    return records, placement, tiled and placement is not ScalePlacement.TOKEN, heads, dtype


@pytest.mark.parametrize(
    ("records", "placement", "tiled", "heads", "dtype"),
    dict.fromkeys(
        map(
            distinct,
            covering(
                RECORDS,
                (ScalePlacement.TOKEN, ScalePlacement.PAGE, ScalePlacement.POOL),
                (False, True),
                (1, 8, 16, 64, 128),
                (BF16, FP32),
            ),
        )
    ),
)
def test_every_record_and_head_count(
    records: tuple[Record, Record], placement: ScalePlacement, tiled: bool, heads: int, dtype: torch.dtype
) -> None:
    case = Case.make(records, placement, tiled, keys=(5, 20), tokens=1 if heads > 16 else 2)
    q, sink = query(len(case.window_slots), heads, dtype), sinks(heads)
    agree(case.found(q, sink), case.expected(q, sink))


@pytest.mark.parametrize(
    ("keys", "turns"), [((1, 0), True), ((1, 1), False), ((KEYS - 1, KEYS + 1), False), ((KEYS, 2 * KEYS), True)]
)
def test_borders_of_tiles(keys: tuple[int, int], turns: bool) -> None:
    case = Case.make(RECORDS[0], keys=keys, tokens=2)
    q, sink = query(2, 3), sinks(3)
    agree(case.found(q, sink, turns=turns), case.expected(q, sink))


def test_a_window_only_layer() -> None:
    case = Case.make(RECORDS[0], tokens=2)
    q, sink = query(2, 3), sinks(3)
    agree(case.found(q, sink, compressed=False), case.expected(q, sink, compressed=False))


def test_empty_slots_are_not_read_and_may_stand_anywhere() -> None:
    """-1 before, between and after valid slots; slots past the cache's end count as empty too."""
    case = Case.make(RECORDS[0], keys=(20, KEYS + 6))
    case.window_slots[0, ::2] = -1
    case.window_slots[1, :15] = -1
    case.compressed_slots[0, 3:] = -1
    case.compressed_slots[1] = -1
    case.compressed_slots[3, KEYS:] = -1
    q, sink = query(4, 5), sinks(5)
    expected = case.expected(q, sink)
    case.window_slots[1, :15] = torch.tensor([-1, -5, -(2**31), 2**31 - 1, 10**12] * 3, device=DEVICE)
    case.compressed_slots[1, ::3] = case.compressed.num_slots
    agree(case.found(q, sink), expected)


def test_a_token_without_rows_gets_zeros() -> None:
    case = Case.make(RECORDS[0])
    case.window_slots[2], case.compressed_slots[2] = -1, -1
    for quantize in (False, True):
        found = case.found(query(4, 5), sinks(5), quantize=quantize, rotate_back=True)
        assert (found[2] == 0).all()
        assert found.isfinite().all()


def test_a_row_named_twice_counts_twice() -> None:
    case = Case.make(RECORDS[0], keys=(2, 3))
    case.compressed_slots[:, 1] = case.compressed_slots[:, 0]
    q, sink = query(4, 3), sinks(3)
    agree(case.found(q, sink), case.expected(q, sink))


def test_nan_in_a_row_reaches_those_that_see_it_and_no_one_else() -> None:
    case = Case.make(RECORDS[0])
    case.compressed.write(case.compressed_slots[0, :1], torch.full((1, DIM), float("nan"), device=DEVICE))
    case.compressed_slots[1:][case.compressed_slots[1:] == case.compressed_slots[0, 0]] = -1
    found = case.found(query(4, 3), noise(3, seed=5))
    assert found[0].isnan().all()
    assert found[1:].isfinite().all()


def test_padded_heads_are_inert() -> None:
    """NaN in them changes no bit of a live head."""
    case, q, sink = Case.make(RECORDS[0]), query(4, 5), sinks(5)
    assert torch.equal(case.found(q, sink, padded=3), case.found(q, sink))


def test_heads_do_not_depend_on_how_many_there_are() -> None:
    case, q, sink = Case.make(RECORDS[4], tokens=2), query(2, 64), sinks(64)
    few = torch.cat([case.found(part, some) for part, some in zip(q.split(16, 1), sink.split(16), strict=True)], dim=1)
    agree(few, case.found(q, sink))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("records", [RECORDS[0], RECORDS[4]], ids=["v4", "release"])
def test_rotations_and_the_cast_are_part_of_the_launch(records: tuple[Record, Record], dtype: torch.dtype) -> None:
    case, q, sink = Case.make(records, keys=(3, 5), tokens=2), query(2, 3, dtype), sinks(3)
    at = POSITIONS[:2]
    expected = case.expected(rotate(q, at, TABLE), sink)
    agree(case.found(q, sink, rotate_query=True), expected)
    back = rotate(expected, at, TABLE, inverse=True)
    agree(case.found(q, sink, rotate_query=True, rotate_back=True), back)
    own = case.found(q, sink, rotate_query=True, rotate_back=True)
    cast = case.found(q, sink, rotate_query=True, rotate_back=True, quantize=True)
    assert torch.equal(cast, mxfp8_round(own.flatten(1)).view_as(own))


def test_no_tokens() -> None:
    case = Case.make(RECORDS[0], tokens=0)
    assert case.found(query(0, 4), sinks(4)).shape == (0, 4, DIM)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs programs one by one")
def test_the_same_bits_every_time() -> None:
    case, q, sink = Case.make(RECORDS[4], keys=(128, 512), tokens=4), query(4, 64), sinks(64)
    first = case.found(q, sink)
    assert all(torch.equal(case.found(q, sink), first) for _ in range(20))


@pytest.mark.parametrize("quantize", [False, True])
def test_the_op_is_well_formed(quantize: bool) -> None:
    case, q = Case.make(RECORDS[0], keys=(2, 2), tokens=1), query(1, 1)
    size = workspace_bytes(1, 1, 2, 2, BF16)
    out = torch.zeros(1, DIM, dtype=torch.uint8, device=DEVICE) if quantize else torch.zeros_like(q)
    torch.library.opcheck(
        attend,
        (
            q, 1, sinks(1), SCALE, *flat(case.window), case.window_slots, *flat(case.compressed), case.compressed_slots,
            POSITIONS[:1], TABLE, True, True, torch.zeros(size, dtype=torch.uint8, device=DEVICE), out,
            torch.zeros(1, LAST, dtype=torch.uint8, device=DEVICE) if quantize else None,
        ),
    )  # fmt: skip
