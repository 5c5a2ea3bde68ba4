"""Sparse attention against a dense softmax written out here, over every mix of caches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv41.backends.reference import attention
from dsv41.backends.reference.attention import gather, sparse_mqa
from dsv41.errors import InputError
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import NVFP4_288, PLAIN_BF16, PLAIN_FP32, RECORDS, Dialect, v4_584, v41_528

from ..hal.layout_cases import interleaved, layouts_of, random_rows

SCALE = 512**-0.5
PAGE, PAGES = 16, 3
LAYOUTS = [layout for record in RECORDS.values() if record.dim == 512 for layout in layouts_of(record, PAGE)]


def dense(q: Tensor, keys: list[list[Tensor]], sink: Tensor, scale: float = SCALE) -> Tensor:
    """The formula in float64: `keys[t]` are the rows that token t attends to, as often as they are there."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t, rows in enumerate(keys):
        for h in range(q.shape[1]):
            if not rows or sink[h] == math.inf:
                continue
            kv = torch.stack(rows).double()
            logits = kv @ q[t, h].double() * scale
            top = max(float(logits.max()), float(sink[h]))
            weights = (logits - top).exp()
            out[t, h] = weights @ kv / (weights.sum() + math.exp(float(sink[h]) - top))
    return out


def attend(q: Tensor, caches: list[tuple[PagedCache, Tensor]], sink: Tensor, scale: float = SCALE) -> Tensor:
    return sparse_mqa(q, [gather(cache, slots, q.dtype) for cache, slots in caches], sink, scale)


def rows_seen(caches: list[tuple[PagedCache, Tensor]], dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    tokens = caches[0][1].shape[0]
    return [
        [cache.read(slot[None])[0].to(dtype) for cache, slots in caches for slot in slots[t] if slot >= 0]
        for t in range(tokens)
    ]


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    assert not found.isnan().any()
    assert (found.double() - expected).norm() <= tolerance * expected.norm()


def filled(layout: CacheLayout, seed: int, gap: int = 0) -> PagedCache:
    """A cache in a shared buffer of sentinel bytes, every slot but the last two written."""
    cache, _ = interleaved(layout, PAGES, gap)
    written = torch.arange(cache.num_slots - 2)
    cache.write(written, random_rows(512, len(written), seed))
    return cache


def random_slots(tokens: int, width: int, seed: int) -> Tensor:
    """Slots with holes anywhere and with repeats; token 1 sees nothing."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(0, PAGE * PAGES - 2, (tokens, width), generator=generator)
    slots[torch.rand(tokens, width, generator=generator) < 0.3] = -1
    slots[1] = -1
    return slots


def random_q(tokens: int, heads: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, heads, 512, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shift", [0, 1, 7, 19])
@pytest.mark.parametrize("window", LAYOUTS, ids=lambda c: f"{c.record.name} {c.scale_placement} {c.value_tile}")
def test_every_mix_of_layouts_agrees_with_the_dense_softmax(window: CacheLayout, shift: int) -> None:
    """Records, dialects, placements, tiles and page strides of the two caches of a call may all differ."""
    compressed = LAYOUTS[(LAYOUTS.index(window) + shift) % len(LAYOUTS)]
    caches = [
        (filled(window, 1, gap=shift % 3), random_slots(4, 6, 1)),
        (filled(compressed, 2), random_slots(4, 5, 2)),
    ]
    q, sink = random_q(4, 3), torch.tensor([0.5, -math.inf, 2.0])
    close(attend(q, caches, sink), dense(q, rows_seen(caches), sink))


def test_fr_18_both_dialects_and_both_placements_in_one_call() -> None:
    """The same rows in an OCP and in an FNUZ cache, each read by its own rules."""
    ocp = CacheLayout(v41_528(Dialect.OCP), PAGE, ScalePlacement.TOKEN)
    fnuz = CacheLayout(v4_584(Dialect.FNUZ), PAGE, ScalePlacement.PAGE)
    exact = filled(CacheLayout(PLAIN_FP32, PAGE, ScalePlacement.NONE), 1)
    slots = random_slots(4, 6, 3)
    q, sink = random_q(4, 3) * 0.3, torch.zeros(3)
    found = attend(q, [(filled(ocp, 1), slots), (filled(fnuz, 1), slots)], sink)
    expected = dense(q, rows_seen([(exact, torch.cat((slots, slots), dim=1))]), sink)
    assert (found.double() - expected).norm() < 0.1 * expected.norm()  # misread, it would be off by a factor


@pytest.mark.parametrize("heads", [1, 2, 8, 16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fr_69_any_number_of_heads_is_the_slice_of_more(heads: int, dtype: torch.dtype) -> None:
    layouts = [LAYOUTS[0], CacheLayout(NVFP4_288, PAGE, ScalePlacement.TOKEN)]
    caches = [(filled(layout, i), random_slots(3, 6, i)) for i, layout in enumerate(layouts)]
    q = random_q(3, 128).to(dtype)
    sink = torch.randn(128, generator=torch.Generator().manual_seed(1)) * 2
    found = attend(q[:, :heads], caches, sink[:heads])
    expected = dense(q[:, :heads].float(), rows_seen(caches, dtype), sink)
    close(found, expected, 2e-6 if dtype == torch.float32 else 4e-3)
    assert found.dtype == dtype
    if dtype == torch.float32:
        close(found, attend(q, caches, sink)[:, :heads].double())


def test_rows_are_rounded_to_the_activation_type() -> None:
    cache = filled(CacheLayout(PLAIN_FP32, PAGE, ScalePlacement.NONE), 1)
    rows, where = gather(cache, torch.tensor([[5, -1, 5, 2]]), torch.bfloat16)
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows[where[0]][[0, 2, 3]].float(), cache.read(torch.tensor([5, 5, 2])).bfloat16().float())


@settings(max_examples=60, deadline=None)
@given(
    slots=st.lists(st.lists(st.integers(-1, 5), min_size=4, max_size=4), min_size=1, max_size=3),
    sinks=st.lists(st.sampled_from([-math.inf, -3.0, 0.0, 1.5, 60.0, math.inf]), min_size=2, max_size=2),
    size=st.sampled_from([1e-3, 1.0, 300.0]),
)
def test_any_indices_and_sinks(slots: list[list[int]], sinks: list[float], size: float) -> None:
    """-1 in any place, rows named twice (they count twice), tokens that see nothing, sinks of every kind."""
    caches = [
        (PLAIN, torch.tensor(slots)[:, :3]),
        (PLAIN, torch.tensor(slots)[:, 3:]),
    ]
    q, sink = random_q(len(slots), 2) * size, torch.tensor(sinks)
    found, expected = attend(q, caches, sink), dense(q, rows_seen(caches), sink)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)


PLAIN = PagedCache.allocate(CacheLayout(PLAIN_FP32, 2, ScalePlacement.NONE), 4, fill=255)
PLAIN.write(torch.arange(6), random_rows(512, 6, 5) / 8)


def test_a_row_that_is_named_twice_counts_twice() -> None:
    q = torch.zeros(1, 1, 512)
    caches = [(PLAIN, torch.tensor([[2, 2]])), (PLAIN, torch.tensor([[3, 2]]))]
    row2, row3 = PLAIN.read(torch.tensor([2, 3]))
    found = attend(q, caches, torch.tensor([-math.inf]))
    torch.testing.assert_close(found[0, 0], (3 * row2 + row3) / 4)


def test_minus_one_before_valid_entries_hides_nothing() -> None:
    q, sink = random_q(1, 2), torch.zeros(2)
    for order in ([-1, -1, 4, -1, 1], [1, 4, -1, -1, -1], [4, -1, -1, -1, 1]):
        found = attend(q, [(PLAIN, torch.tensor([order]))], sink)
        torch.testing.assert_close(found, attend(q, [(PLAIN, torch.tensor([[1, 4]]))], sink))


def test_fr_76_the_sink_joins_the_denominator_and_is_not_scaled() -> None:
    """One row whose logit is 0: its weight is 1 / (1 + exp(sink)) by whatever scale."""
    sink = torch.tensor([-math.inf, 0.0, math.log(3), math.inf])
    for scale in (SCALE, 4.0):
        found = attend(torch.zeros(1, 4, 512), [(PLAIN, torch.tensor([[0]]))], sink, scale)
        row = PLAIN.read(torch.tensor([0]))[0]
        for head, weight in enumerate((1.0, 0.5, 0.25, 0.0)):
            torch.testing.assert_close(found[0, head], weight * row)


@pytest.mark.parametrize("sink", [-math.inf, -1.0, 0.0, 80.0, math.inf])
@pytest.mark.parametrize("width", [0, 3])
def test_fr_47_a_query_that_sees_nothing_gives_zeros(sink: float, width: int) -> None:
    empty = torch.full((2, width), -1)
    found = attend(random_q(2, 3) * 100, [(PLAIN, empty), (PLAIN, empty)], torch.full((3,), sink))
    assert found.shape == (2, 3, 512)
    assert (found == 0).all()


@pytest.mark.parametrize("sink", [-math.inf, 1.0])
def test_fr_47_a_part_without_rows_changes_nothing(sink: float) -> None:
    q, slots, sinks = random_q(2, 3), torch.tensor([[0, 3], [5, -1]]), torch.full((3,), sink)
    alone = attend(q, [(PLAIN, slots)], sinks)
    for empty in (torch.full((2, 0), -1), torch.full((2, 4), -1)):
        together = attend(q, [(PLAIN, slots), (PLAIN, empty)], sinks)
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("tokens", "width"), [(0, 4), (0, 0), (3, 0)])
def test_fr_44_no_tokens_and_no_indices_are_ordinary(tokens: int, width: int) -> None:
    slots = torch.full((tokens, width), -1)
    found = attend(random_q(tokens, 2), [(PLAIN, slots)], torch.zeros(2))
    assert found.shape == (tokens, 2, 512)
    assert (found == 0).all()


def test_logits_far_from_zero_neither_overflow_nor_vanish() -> None:
    """Softmax is taken against the largest logit, not against zero and not against the sink."""
    q = torch.stack((PLAIN.read(torch.tensor([1]))[0] * 1e4, -PLAIN.read(torch.tensor([1]))[0] * 1e4))[None]
    slots, sink = torch.tensor([[1, 2]]), torch.full((2,), -math.inf)
    found = attend(q, [(PLAIN, slots)], sink)
    torch.testing.assert_close(found.double(), dense(q, rows_seen([(PLAIN, slots)]), sink))


@pytest.mark.parametrize("record", [PLAIN_BF16, NVFP4_288, v41_528(Dialect.OCP), v4_584(Dialect.FNUZ)])
def test_fr_38_rows_that_no_index_names_may_hold_nan(record: object) -> None:
    """The last page is half written, the first not at all."""
    layout = layouts_of(record, 4)[0]
    rows, slots = random_rows(512, 2, 4), torch.tensor([[4, -1, 5], [5, -1, -1]])
    q, sink = random_q(2, 2), torch.zeros(2)
    results = []
    for fill in (0, 255):
        cache = PagedCache.allocate(layout, 2, fill=fill)
        cache.write(torch.tensor([4, 5]), rows)
        results.append(attend(q, [(cache, slots)], sink))
    assert torch.equal(*results)
    assert not results[0].isnan().any()


def test_a_slot_beyond_the_cache_is_refused() -> None:
    """What a batch names is checked before; this is the last line."""
    with pytest.raises(InputError, match=r"slot 8 is outside this cache of 4 pages x 2 rows"):
        gather(PLAIN, torch.tensor([[0, 8]]), torch.float32)


def test_the_size_of_a_block_of_queries_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    q, slots, sink = random_q(7, 2), random_slots(7, 5, 3) % 6, torch.zeros(2)
    at_once = attend(q, [(PLAIN, slots)], sink)
    monkeypatch.setattr(attention, "_ROWS_AT_ONCE", 11)
    torch.testing.assert_close(attend(q, [(PLAIN, slots)], sink), at_once, rtol=1e-6, atol=1e-6)
