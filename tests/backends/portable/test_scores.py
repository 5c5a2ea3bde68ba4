"""Index scores and block maxima against the reference, on the same keys in the same records."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv41.backends.portable.caches import flat
from dsv41.backends.portable.scores import MAXIMA, block_maxima, index_scores
from dsv41.backends.portable.topk import top_k
from dsv41.backends.reference import index
from dsv41.backends.reference.planning import make_plan
from dsv41.hal.layout import CacheLayout, PagedCache
from dsv41.hal.records import INDEX_BF16, INDEX_FP32, INDEX_MXFP4_68, RECORDS, Record, ScaleFormat
from dsv41.hal.types import ForwardBatch, StepPlan

from ...hal.layout_cases import layouts_of
from .common import DEVICE, covering, layout_of, make_cache

NAN, INF = math.nan, math.inf
DTYPES = [torch.float32, torch.bfloat16]
LAYOUTS = [
    layout
    for record in RECORDS.values()
    if record.dim == 128
    for layout in layouts_of(record, 16)
    # Tiles of one byte would cut a float32 scale into pieces, which these kernels refuse.
    if not (layout.scale_tile and record.scale_format is ScaleFormat.FP32)
]


def name_of(layout: CacheLayout) -> str:
    return f"{layout.record.name}-{layout.scale_placement}{'-tiled' * (layout.value_tile is not None)}"


@dataclass
class Case:
    """Queries of a step and the keys that they are scored against."""

    queries: Tensor
    weights: Tensor
    cache: PagedCache
    plan: StepPlan

    @property
    def width(self) -> int:
        return self.plan.max_visible[1]

    def expected(self) -> Tensor:
        """What the reference says; entries that a token does not see hold something or other."""
        return index.index_scores(self.queries, self.weights, self.cache, 1, self.plan)

    def found(self, candidates: Tensor | None = None, block_size: int = 1, width: int | None = None) -> Tensor:
        """What the op writes over NaN."""
        if width is None:
            width = self.width if candidates is None else candidates.shape[1] * block_size
        # Rows of a wider buffer, as a workspace hands them out.
        out = self.queries.new_full((len(self.queries), width + 5), NAN)[:, :width]
        visible, pages = self.plan.num_visible[1], self.plan.batch.compressed_tables[1].pages
        index_scores(
            self.queries,
            self.weights,
            pages,
            self.plan.token_request,
            visible,
            candidates,
            block_size,
            *flat(self.cache),
            out,
        )
        return out

    def seen(self) -> Tensor:
        return torch.arange(self.width, device=DEVICE) < self.plan.num_visible[1][:, None]


def small_numbers(*shape: int, seed: int) -> Tensor:
    """Few whole numbers, so that a sum of their products is exact in fp32, in whatever order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def keys_of(count: int, seed: int) -> Tensor:
    """Whole numbers too, of another size in every group, so that a misplaced scale shows."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(0, 4, (count, 4), generator=generator).float()).repeat_interleave(32, 1)
    return small_numbers(count, 128, seed=seed + 1) * sizes


def case(
    layout: CacheLayout,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 5,
    held: tuple[int, ...] = (70, 0, 5, 33),
    query_lens: tuple[int, ...] = (3, 0, 1, 2),
    padding: int = 1,
) -> Case:
    """Requests of these lengths, whose pages lie out of order in a cache of poison, and their last tokens."""
    size = layout.page_size
    counts = [-(-n // size) for n in held]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    cache = make_cache(layout, len(order))
    pages = torch.full((len(held), max(counts) + 1), -1, dtype=torch.int32)
    for r, (length, count) in enumerate(zip(held, counts, strict=True)):
        mine = order[sum(counts[:r]) : sum(counts[: r + 1])]
        pages[r, :count] = mine
        row = torch.arange(length)
        slots = mine.long()[row // size] * size + row % size
        cache.write(slots.to(DEVICE), keys_of(length, 10 * r).to(DEVICE))
    batch = ForwardBatch.from_host(
        query_lens=query_lens,
        seq_lens=held,
        window_pages=torch.zeros(len(held), 1, dtype=torch.int32),
        window_page_size=1 << 20,
        compressed_pages={1: pages},
        compressed_page_size={1: size},
        num_tokens=sum(query_lens) + padding,
        device=DEVICE,
    )
    queries = small_numbers(batch.num_tokens, heads, 128, seed=7).to(DEVICE, dtype)
    weights = (small_numbers(batch.num_tokens, heads, seed=8) / 4).to(DEVICE, dtype)
    return Case(queries, weights, cache, make_plan(batch, 4))


def check(case_: Case) -> None:
    """Bit for bit where a token sees, and nothing written elsewhere."""
    found, seen = case_.found(), case_.seen()
    assert found.dtype == case_.queries.dtype
    assert torch.equal(found[seen], case_.expected()[seen])
    assert found[~seen].isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fr_58_scores_are_those_of_the_reference_on_every_layout(layout: CacheLayout, dtype: torch.dtype) -> None:
    check(case(layout, dtype, heads=5, held=(9, 0, 21), query_lens=(1, 0, 1), padding=0))


@pytest.mark.parametrize(
    ("heads", "page_size", "dtype"), covering([1, 2, 16, 17, 32], [1, 3, 64], DTYPES), ids=lambda value: str(value)
)
def test_any_number_of_heads_and_page_size(heads: int, page_size: int, dtype: torch.dtype) -> None:
    check(case(layout_of(INDEX_MXFP4_68, page_size, "page"), dtype, heads, held=(70, 7), query_lens=(1, 1)))


@pytest.mark.parametrize(
    ("held", "query_lens", "padding"),
    [
        ((6,), (6,), 0),  # from the first token on
        ((70,), (9,), 0),
        ((70, 9, 40), (2, 3, 4), 3),  # requests that share a program with others
        ((9, 70, 1, 2, 66), (1, 1, 1, 1, 1), 7),
        ((64, 65, 63), (1, 1, 1), 0),
        ((8, 8), (0, 0), 2),  # padding alone
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_one_request_share_keys_and_others_do_not(
    held: tuple[int, ...], query_lens: tuple[int, ...], padding: int, dtype: torch.dtype
) -> None:
    check(case(layout_of(INDEX_MXFP4_68), dtype, 2, held, query_lens, padding))


def test_padding_between_the_tokens_of_requests_reads_and_writes_nothing() -> None:
    """As in a step of a captured graph, where any token may be at position -1."""
    full = case(layout_of(INDEX_MXFP4_68), held=(30, 20), query_lens=(4, 4), padding=0)
    expected, seen = full.expected(), full.seen()
    away = torch.tensor([True, False, False, True, False, True, True, False], device=DEVICE)
    full.plan.token_request[away] = -1
    kept = seen & ~away[:, None]
    # Nobody looks at the query and the count of a token that is none.
    for query, count in ((NAN, full.plan.num_visible[1][away]), (1.0, 1 << 40)):
        full.queries[away], full.plan.num_visible[1][away] = query, count
        found = full.found()
        assert found[away].isnan().all()
        assert torch.equal(found[kept], expected[kept])


def test_scores_round_where_the_release_rounds() -> None:
    """In bfloat16 the dot product, its product with the head weight, and the sum are each rounded.

    Head 0: 257 becomes 256. Head 1: (1 + 2**-7) * (1 - 2**-8) becomes 1. Their sum, 257, is a tie and becomes 256;
    with either of the two left out it would be above the tie and become 258.
    """
    one = case(layout_of(INDEX_FP32), heads=2, held=(1,), query_lens=(1,), padding=0)
    one.cache.write(one.plan.compressed_slots[1], torch.tensor([[1.0] * 3 + [0.0] * 125], device=DEVICE))
    one.queries.zero_()
    one.queries[0, 0, :2] = torch.tensor([256.0, 1.0])
    one.queries[0, 1, :2] = torch.tensor([1.0, 2**-7])
    one.weights.copy_(torch.tensor([[1.0, 1 - 2**-8]]))
    assert one.found().item() == one.expected().item() == 256


def test_keys_are_rounded_to_the_dtype_of_the_queries() -> None:
    """Else 2**-8 were left of the difference of two dims."""
    one = case(layout_of(INDEX_FP32), heads=1, held=(1,), query_lens=(1,), padding=0)
    key = torch.zeros(1, 128, device=DEVICE)
    key[0, :2] = torch.tensor([1 + 2**-8, 1.0])
    one.cache.write(one.plan.compressed_slots[1], key)
    one.queries.zero_()
    one.queries[0, 0, :2] = torch.tensor([1.0, -1.0])
    one.weights.fill_(1)
    assert one.found().item() == one.expected().item() == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("record", [INDEX_MXFP4_68, INDEX_BF16], ids=lambda record: record.name)
def test_a_nan_key_scores_nan_and_infinity_counts_in_its_own_heads_alone(record: Record) -> None:
    """A key that is damaged must not look like one that scores 0, nor touch its neighbours."""
    one = case(layout_of(record), held=(20,), query_lens=(1,), padding=0)
    broken = torch.zeros(2, 128, device=DEVICE)
    broken[0, 3] = NAN
    broken[1, 3] = INF
    pages = one.plan.batch.compressed_tables[1].pages_cpu[0].long()
    one.cache.write((pages[:1] * 16 + torch.tensor([4, 5])).to(DEVICE), broken)
    one.queries.fill_(1)
    one.weights.fill_(1)
    found, expected = one.found(), one.expected()
    assert found[0, 4].isnan()
    assert not found[0, 5].isnan()
    assert torch.equal(found.nan_to_num(123.0), expected.nan_to_num(123.0))
    assert not found[0, :4].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_position_without_a_page_scores_zero(dtype: torch.dtype) -> None:
    """Pages that are missing in the table, and a table that ends before the request does."""
    one = case(layout_of(INDEX_MXFP4_68), dtype, held=(70, 70), query_lens=(3, 1), padding=0)
    table = one.plan.batch.compressed_tables[1].pages
    before = one.expected()
    table[0, 1] = -1
    short = table[:, :4].clone()
    for pages, gone in ((table, [(0, 16, 32)]), (short, [(0, 16, 32), (0, 64, 70), (1, 64, 70)])):
        one.plan.batch.compressed_tables[1].pages.set_(pages)
        found, expected, seen = one.found(), before.clone(), one.seen()
        for request, start, stop in gone:
            expected[one.plan.token_request == request, start:stop] = 0
        assert torch.equal(found[seen], expected[seen])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 8, 3])
def test_with_candidates_only_their_visible_positions_are_scored(block_size: int, dtype: torch.dtype) -> None:
    """Empty entries stand anywhere; blocks are partly or not at all visible."""
    whole = case(layout_of(INDEX_MXFP4_68), dtype, held=(150, 20), query_lens=(3, 2))
    tokens, count = len(whole.queries), -(-150 // block_size)
    generator = torch.Generator().manual_seed(2)
    candidates = torch.stack([torch.randperm(count, generator=generator) for _ in range(tokens)])[:, : count // 2]
    candidates[:, 1::3] = -1
    candidates[:, 0] = (whole.plan.num_visible[1].cpu() - 1).clamp(min=0) // block_size
    candidates = candidates.to(DEVICE)
    position = (candidates[:, :, None] * block_size + torch.arange(block_size, device=DEVICE)).flatten(1)
    named = (candidates >= 0).repeat_interleave(block_size, 1) & (position < whole.plan.num_visible[1][:, None])
    expected = whole.expected().gather(1, position.clamp(0, whole.width - 1))
    found = whole.found(candidates, block_size)
    assert torch.equal(found[named], expected[named])
    assert found[~named].isnan().all()
    assert named[:5].any(1).all()
    assert not named[5:].any()


def test_a_buffer_for_longer_requests_stays_as_it_is_behind_them() -> None:
    """Captured graphs have buffers for the longest request that may come."""
    one = case(layout_of(INDEX_MXFP4_68))
    found = one.found(width=700)
    assert torch.equal(found[:, : one.width][one.seen()], one.expected()[one.seen()])
    assert found[:, one.width :].isnan().all()


def test_fr_65_keys_behind_two_gibibytes_are_found() -> None:
    """One page lies above 2**31 bytes; the memory before it is never touched."""
    layout = layout_of(INDEX_MXFP4_68, 64, "page")
    near = case(layout, held=(64,), query_lens=(1,), padding=0)
    stride = 1 << 30
    far = PagedCache(layout, torch.empty(3 * stride, dtype=torch.uint8, device=DEVICE).view(3, stride))
    first = int(near.plan.batch.compressed_tables[1].pages_cpu[0, 0])
    far.data[2, : layout.page_bytes] = near.cache.data[first]
    expected, table = near.expected(), near.plan.batch.compressed_tables[1].pages
    table[0, 0] = 2
    near.cache = far
    assert torch.equal(near.found(), expected)


@pytest.mark.parametrize(("tokens", "width"), [(0, 8), (0, 0), (2, 0)])
def test_nothing_to_score_is_ordinary(tokens: int, width: int) -> None:
    one = case(layout_of(INDEX_MXFP4_68), held=(20,), query_lens=(2,), padding=0)
    one.queries, one.weights = one.queries[:tokens], one.weights[:tokens]
    assert one.found(width=width).shape == (tokens, width)


@pytest.mark.parametrize("restricted", [False, True])
def test_scoring_is_a_custom_op_like_any(restricted: bool) -> None:
    one = case(layout_of(INDEX_MXFP4_68, 16, "pool"), held=(20,), query_lens=(2,), padding=0)
    candidates = torch.tensor([[0, 2], [-1, 4]], device=DEVICE) if restricted else None
    table, visible = one.plan.batch.compressed_tables[1].pages, one.plan.num_visible[1]
    out = one.queries.new_zeros(2, 8 if restricted else 20)
    torch.library.opcheck(
        index_scores,
        (one.queries, one.weights, table, one.plan.token_request, visible, candidates, 4, *flat(one.cache), out),
    )


# The best score of each block


def maxima(scores: Tensor, visible: list[int], block_size: int) -> Tensor:
    """What the op writes over NaN, on the CPU."""
    blocks = -(-scores.shape[1] // block_size)
    out = scores.new_full((len(scores), blocks + 2), NAN).to(DEVICE)
    block_maxima(scores.to(DEVICE), torch.tensor(visible, device=DEVICE), block_size, out)
    return out.cpu()


@pytest.mark.parametrize(
    ("block_size", "width", "dtype"),
    covering([1, 3, 8], [1, 7, 8, 9, 100, 3 * MAXIMA + 5], DTYPES),
    ids=lambda value: str(value),
)
def test_maxima_give_the_candidate_blocks_of_the_reference(block_size: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    visible = [width, width - 1, width // 2, 1, 0]
    scores = torch.randn(len(visible), width, generator=generator).to(dtype)
    scores *= torch.rand(scores.shape, generator=generator) > 0.5
    scores[torch.rand(scores.shape, generator=generator) > 0.8] = NAN
    scores[torch.rand(scores.shape, generator=generator) > 0.9] = INF
    scores[torch.rand(scores.shape, generator=generator) > 0.7] = -INF
    best = maxima(scores, visible, block_size)
    lengths = (torch.tensor(visible) + block_size - 1) // block_size
    for budget in (1, 4, 64):
        found = top_k(best.to(DEVICE), lengths.to(DEVICE), budget, None, 1, None).cpu()
        assert torch.equal(found, index.candidate_blocks(scores, torch.tensor(visible), block_size, budget))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fr_60_the_newest_visible_block_is_infinite_and_no_other(dtype: torch.dtype) -> None:
    scores = torch.full((4, 20), INF, dtype=dtype)
    scores[1] = NAN
    scores[2] = -5
    found = maxima(scores, [17, 20, 8, 0], 8)
    largest = torch.finfo(dtype).max
    assert found[0, :3].tolist() == [largest, largest, INF]
    assert found[1, :3].tolist() == [-INF, -INF, INF]
    assert found[2, :1].tolist() == [INF]
    # What no one sees is not written.
    assert found[2, 1:].isnan().all()
    assert found[3].isnan().all()
    assert found[:, 3:].isnan().all()


@pytest.mark.parametrize(("rows", "width"), [(0, 8), (2, 0)])
def test_no_blocks_are_ordinary(rows: int, width: int) -> None:
    assert maxima(torch.zeros(rows, width), [0] * rows, 8).isnan().all()


def test_block_maxima_is_a_custom_op_like_any() -> None:
    scores, out = torch.rand(2, 16, device=DEVICE), torch.zeros(2, 2, device=DEVICE)
    torch.library.opcheck(block_maxima, (scores, torch.tensor([16, 3], device=DEVICE), 8, out))
