"""The indexer's ops: scores by the formula, top-k and candidate blocks by their contracts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv41.backends.reference import index
from dsv41.backends.reference.index import candidate_blocks, in_blocks, index_scores, top_k
from dsv41.backends.reference.planning import make_plan
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import INDEX_FP32, RECORDS
from dsv41.hal.types import ForwardBatch

from ..hal.layout_cases import layouts_of

NAN, INF = math.nan, math.inf
# Few values, so that equal ones are everywhere.
SCORES = st.sampled_from([-INF, -1.0, -0.0, 0.0, 0.0, 0.0, 0.5, 2.0, INF, NAN])


def right_choice(scores: list[float], allowed: list[bool], k: int) -> list[int]:
    """Sorted by hand: the best first, of equal ones the smallest position, NaN never."""
    ranked = sorted((-s, i) for i, s in enumerate(scores) if allowed[i] and not math.isnan(s))
    return sorted(i for _, i in ranked[:k])


def best_values(scores: Tensor, k: int) -> list[float]:
    return scores.sort(descending=True).values[:k].tolist()


def complaints(found: Tensor, scores: Tensor, allowed: Tensor, k: int) -> list[str]:
    """What the contract of a top-k says that `found` `[T, k]` breaks."""
    wrong = []
    if found.shape != (len(scores), k) or found.dtype != torch.int64:
        return ["shape"]
    for row, given_, may in zip(found.tolist(), scores, allowed, strict=True):
        chosen = [i for i in row if i != -1]
        usable = may & ~given_.isnan()
        if any(not 0 <= i < len(given_) for i in chosen):
            wrong.append("range")
        elif len(set(chosen)) < len(chosen):
            wrong.append("unique")
        elif len(chosen) != min(k, int(usable.sum())):
            wrong.append("count")
        elif not usable[chosen].all():
            wrong.append("allowed")
        elif given_[chosen].sort(descending=True).values.tolist() != best_values(given_[usable], len(chosen)):
            wrong.append("values")
    return wrong


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(SCORES, st.booleans()), min_size=1, max_size=24), st.integers(1, 30))
def test_top_k_is_what_sorting_by_hand_gives(entries: list[tuple[float, bool]], k: int) -> None:
    scores, allowed = (list(part) for part in zip(*entries, strict=True))
    # Rows around it do not matter.
    rows = torch.tensor([scores, scores[::-1], scores])
    masks = torch.tensor([allowed, allowed[::-1], allowed])
    found = top_k(rows, masks, k)
    assert complaints(found, rows, masks, k) == []
    expected = right_choice(scores, allowed, k)
    assert found[0].tolist() == found[2].tolist() == expected + [-1] * (k - len(expected))


@pytest.mark.parametrize("width", [5, 8, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fr_50_nan_is_never_selected_and_every_slot_is_written(width: int, dtype: torch.dtype) -> None:
    """Fewer positions than k = 8, as many, more; rows with some, most and only NaN, and infinities of both signs."""
    some = torch.randn(width, generator=torch.Generator().manual_seed(0))
    some[::3] = NAN
    most = torch.full((width,), NAN)
    most[-1] = -INF
    rows = torch.stack((some, most, torch.full((width,), NAN), torch.full((width,), INF), torch.full((width,), -INF)))
    rows = rows.to(dtype)
    allowed = torch.ones_like(rows, dtype=torch.bool)
    found = top_k(rows, allowed, 8)
    assert complaints(found, rows, allowed, 8) == []
    assert found[1].tolist() == [width - 1] + [-1] * 7
    assert found[2].tolist() == [-1] * 8
    assert found[3].tolist() == found[4].tolist() == [i if i < width else -1 for i in range(8)]
    assert found.min() >= -1


def test_a_row_that_may_see_nothing_selects_nothing() -> None:
    found = top_k(torch.tensor([[1.0, 2, 3], [1, 2, 3]]), torch.tensor([[False] * 3, [False, True, False]]), 2)
    assert found.tolist() == [[-1, -1], [1, -1]]


@pytest.mark.parametrize(("rows", "width", "k"), [(0, 5, 3), (2, 0, 3), (2, 5, 0), (0, 0, 0)])
def test_fr_44_nothing_to_choose_from_is_ordinary(rows: int, width: int, k: int) -> None:
    found = top_k(torch.zeros(rows, width), torch.ones(rows, width, dtype=torch.bool), k)
    assert found.shape == (rows, k)
    assert (found == -1).all()
    blocks = candidate_blocks(torch.zeros(rows, width), torch.full((rows,), width), 4, 3)
    assert blocks.shape == (rows, 3)
    assert in_blocks(blocks, width, 4).shape == (rows, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fr_53_of_thousands_of_equal_scores_the_smaller_positions_win(dtype: torch.dtype) -> None:
    """And the choice of a row depends neither on the rows beside it nor on the width of the matrix."""
    scores = torch.zeros(4, 6000, dtype=dtype)
    scores[1, 4000:4100] = 1
    scores[2, ::2] = -1
    scores[3, 17] = NAN
    allowed = torch.ones_like(scores, dtype=torch.bool)
    allowed[3, :10] = False
    found = top_k(scores, allowed, 512)
    assert complaints(found, scores, allowed, 512) == []
    assert found[0].tolist() == list(range(512))
    assert found[1].tolist() == [*range(412), *range(4000, 4100)]
    assert found[2].tolist() == list(range(1, 1024, 2))
    assert found[3].tolist() == [*range(10, 17), *range(18, 523)]
    for _ in range(100):
        assert torch.equal(top_k(scores[:1, :1000], allowed[:1, :1000], 512), found[:1])


def test_fr_52_indexer_like_scores_lose_nothing() -> None:
    """Sums over heads of w * relu(x), most of them exactly zero: every value above the border is selected."""
    generator = torch.Generator().manual_seed(0)
    dots = torch.randn(16, 4, 3000, generator=generator) - torch.tensor([0.5, 1, 1.5, 2.5]).repeat(4)[:, None, None]
    scores = (dots.relu() * torch.rand(16, 4, 1, generator=generator)).sum(1)
    zeros = (scores == 0).float().mean(1)
    assert zeros.min() < 0.5
    assert zeros.max() > 0.9
    allowed = torch.ones_like(scores, dtype=torch.bool)
    assert complaints(top_k(scores, allowed, 512), scores, allowed, 512) == []


def test_fr_54_a_top_k_that_repeats_itself_is_caught() -> None:
    """What `complaints` is worth: each way to be wrong that has right-looking values is named."""
    scores, allowed = torch.zeros(1, 9), torch.ones(1, 9, dtype=torch.bool)
    allowed[0, 8] = False
    for found, wrong in (
        ([0, 1, 1], "unique"),
        ([0, 1, 9], "range"),
        ([0, 1, -1], "count"),
        ([0, 1, 8], "allowed"),
        ([5, 0, 3], None),
    ):
        assert complaints(torch.tensor([found]), scores, allowed, 3) == ([wrong] if wrong else [])
    scores[0, 4] = 1
    assert complaints(torch.tensor([[0, 1, 2]]), scores, allowed, 3) == ["values"]


# Candidate blocks


def right_blocks(scores: list[float], visible: int, size: int, budget: int) -> list[int]:
    """By hand: the newest visible block, then the best ones, of equal ones the first."""
    if visible == 0:
        return []
    newest = (visible - 1) // size
    best = [
        max((s for s in scores[b * size : min((b + 1) * size, visible)] if not math.isnan(s)), default=-INF)
        for b in range(newest)
    ]
    order = sorted(range(newest), key=lambda b: (-best[b], b))
    return sorted([newest, *order[: budget - 1]])


@settings(max_examples=200, deadline=None)
@given(st.lists(SCORES, min_size=1, max_size=30), st.data())
def test_candidate_blocks_are_what_sorting_by_hand_gives(scores: list[float], data: st.DataObject) -> None:
    visible, size = data.draw(st.integers(0, len(scores))), data.draw(st.sampled_from([1, 3, 4, 8]))
    budget = data.draw(st.integers(1, 9))
    found = candidate_blocks(torch.tensor([scores] * 2), torch.tensor([visible, len(scores)]), size, budget)
    assert found.shape == (2, budget)
    for row, count in zip(found.tolist(), (visible, len(scores)), strict=True):
        expected = right_blocks(scores, count, size, budget)
        assert [b for b in row if b != -1] == expected


@pytest.mark.parametrize("best", [1.0, INF], ids=["finite", "infinite"])
@pytest.mark.parametrize("visible", [0, 1, 7, 8, 9, 16, 17, 100])
def test_fr_60_the_newest_visible_block_is_always_a_candidate(visible: int, best: float) -> None:
    """All scores favour old blocks; the newest takes a place within the budget, and counts where it is partial."""
    scores = torch.full((1, 104), best)
    scores[0, max(visible - 1, 0) // 8 * 8 :] = -5.0
    scores[0, visible:] = best  # what a query cannot see is no reason
    found = [b for b in candidate_blocks(scores, torch.tensor([visible]), 8, 3)[0].tolist() if b != -1]
    count = -(-visible // 8)
    assert len(found) == min(3, count)
    if count:
        assert found == [*range(min(2, count - 1)), count - 1]


def test_the_best_score_of_a_block_counts_not_its_sum() -> None:
    scores = torch.tensor([[0.9, 0.9, 0.9, 0.9, 1.0, -9, -9, -9, 0.5, 0.5, 0.5, 0.5, 0, 0, 0, 0]])
    assert candidate_blocks(scores, torch.tensor([16]), 4, 2).tolist() == [[1, 3]]


def test_in_blocks_names_the_positions_of_the_blocks() -> None:
    member = in_blocks(torch.tensor([[2, -1, 0], [-1, -1, -1], [5, 1, 99]]), 10, 4)
    assert member.nonzero().tolist() == [[0, i] for i in (0, 1, 2, 3, 8, 9)] + [[2, i] for i in (4, 5, 6, 7)]


# Scores


def filled(layout: CacheLayout, keys: list[Tensor]) -> tuple[PagedCache, ForwardBatch]:
    """The keys of several requests in pages of one cache, out of order, and a batch in which each adds some tokens."""
    size, counts = layout.page_size, [len(k) for k in keys]
    widths = [-(-n // size) for n in counts]
    order = torch.randperm(sum(widths) + 2, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    cache = PagedCache.allocate(layout, len(order), fill=255)
    pages = torch.full((len(keys), max(widths, default=0)), -1, dtype=torch.int32)
    for r, key in enumerate(keys):
        mine = order[sum(widths[:r]) : sum(widths[: r + 1])]
        pages[r, : widths[r]] = mine
        row = torch.arange(len(key))
        cache.write(mine.long()[row // size] * size + row % size, key)
    window = torch.zeros(len(keys), 1, dtype=torch.int32)
    batch = ForwardBatch.from_host(
        query_lens=[min(n, 3) for n in counts],
        seq_lens=counts,
        window_pages=window,
        window_page_size=1 << 20,
        compressed_pages={1: pages},
        compressed_page_size={1: size},
    )
    return cache, batch


@pytest.mark.parametrize("record", [r for r in RECORDS.values() if r.dim == 128], ids=lambda r: r.name)
@pytest.mark.parametrize("at_once", [1, 1 << 25], ids=["token by token", "at once"])
def test_fr_58_scores_are_the_formula_with_its_relu(
    record: object, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sum_h w[h] * relu(q[h] . k[j])`, written out in float64 over the rows that each cache holds."""
    monkeypatch.setattr(index, "_SCORES_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    keys = [torch.randn(n, 128, generator=generator) for n in (21, 0, 5, 32)]
    for layout in layouts_of(record, 16):
        cache, batch = filled(layout, keys)
        plan = make_plan(batch, 4)
        queries = torch.randn(batch.num_tokens, 6, 128, generator=generator)
        weights = torch.randn(batch.num_tokens, 6, generator=generator)
        scores = index_scores(queries, weights, cache, 1, plan)
        assert scores.shape == (9, 32)
        starts = batch.query_start_loc_cpu.tolist()
        for r, key in enumerate(keys):
            if not len(key):
                continue
            row = torch.arange(len(key))
            pages = batch.compressed_tables[1].pages_cpu[r].long()
            stored = cache.read(pages[row // 16] * 16 + row % 16).double()
            span = slice(starts[r], starts[r + 1])
            dots = torch.einsum("thd,jd->thj", queries[span].double(), stored)
            assert (dots < 0).float().mean() > 0.3
            expected = (dots.clamp(min=0) * weights[span].double()[..., None]).sum(1)
            torch.testing.assert_close(scores[span, : len(key)].double(), expected, rtol=1e-5, atol=1e-4)


def test_scores_round_where_the_release_rounds() -> None:
    """In bfloat16 the dot product, its product with the head weight, and the sum are each rounded.

    Head 0: 257 becomes 256. Head 1: (1 + 2**-7) * (1 - 2**-8) becomes 1. Their sum, 257, is a tie and becomes 256;
    with either of the two left out it would be above the tie and become 258.
    """
    cache, batch = filled(CacheLayout(INDEX_FP32, 8, ScalePlacement.NONE), [torch.tensor([[1.0] * 3 + [0.0] * 125])])
    queries = torch.zeros(1, 2, 128, dtype=torch.bfloat16)
    queries[0, 0, :2] = torch.tensor([256.0, 1.0])
    queries[0, 1, :2] = torch.tensor([1.0, 2**-7])
    weights = torch.tensor([[1.0, 1 - 2**-8]], dtype=torch.bfloat16)
    found = index_scores(queries, weights, cache, 1, make_plan(batch, 4))
    assert found.dtype == torch.bfloat16
    assert found.item() == 256
