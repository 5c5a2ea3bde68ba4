"""Index scores and choices by our kernels for Hopper: against torch, on such a GPU or by emulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.backends.cuda import index, nvrtc
from dsv41.backends.cuda.index import BLOCK
from dsv41.config import DeepseekV41Config
from dsv41.errors import BackendError
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import INDEX_MXFP4_68
from dsv41.hal.types import LayerSpec
from dsv41.topology import layer_specs

from ...wording import refused
from .emulator.fixture import EmulatedGPU

MISSING = nvrtc.missing()
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER or MISSING is not None, reason=MISSING or "needs a Hopper GPU")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch's own modules, where memory is checked

INF, NAN = math.inf, math.nan
BF16 = torch.bfloat16
UNWRITTEN = 0x7FA5
"""The bits of a NaN that no arithmetic makes."""


# Anywhere


def spec_of(**changes: Any) -> LayerSpec:
    """The release's layer that publishes candidates."""
    [spec] = layer_specs(DeepseekV41Config(), layers=[20])
    return replace(spec, **changes)


def layout_of(**changes: Any) -> CacheLayout:
    return replace(CacheLayout(INDEX_MXFP4_68, 64, ScalePlacement.PAGE), **changes)


SERVED: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({}, {}, True),
    ({}, {"page_size": 16}, True),
    ({}, {"page_size": 256}, True),
    ({}, {"page_size": 8}, False),
    ({}, {"page_size": 48}, False),
    ({}, {"alignment": 8}, False),
    ({}, {"alignment": 48}, True),
    ({}, {"scale_placement": ScalePlacement.TOKEN}, False),
    ({}, {"scale_placement": ScalePlacement.POOL}, False),
    ({}, {"value_tile": (16, 16)}, False),
    ({}, {"scale_tile": (16, 1)}, False),
    ({"index_heads": 33}, {}, False),
    ({"index_heads": 1}, {}, True),
    ({"candidate_block_size": 4}, {}, False),
    ({"topk": 2047, "candidate_blocks": 2048}, {}, True),
    ({"topk": 2048, "candidate_blocks": 2048}, {}, False),
    ({"candidate_blocks": 2049}, {}, False),
    ({"topk": 2048, "publishes_candidates": False, "candidate_blocks": 0}, {}, True),
    ({"topk": 2049, "publishes_candidates": False, "candidate_blocks": 0}, {}, False),
]


@pytest.mark.parametrize(("of_layer", "of_cache", "expected"), SERVED, ids=str)
def test_what_is_served(of_layer: dict[str, Any], of_cache: dict[str, Any], expected: bool) -> None:
    assert index.serves(spec_of(**of_layer), layout_of(**of_cache), BF16) is expected
    assert not index.serves(spec_of(**of_layer), layout_of(**of_cache), torch.float32)


def test_as_much_is_held_as_a_cluster_has_room_for() -> None:
    most = 16 * 32768 * BLOCK
    assert index.holds(most, restricted=False)
    assert not index.holds(most + 1, restricted=False)
    most = 16 * 2048 * BLOCK
    assert index.holds(most, restricted=True)
    assert not index.holds(most + 1, restricted=True)


def test_blocks_are_chosen_where_there_are_more_than_all_are_looked_into() -> None:
    assert not index.chooses_blocks(16384, 0)
    assert index.chooses_blocks(16385, 0)
    assert not index.chooses_blocks(640 * BLOCK, 640)
    assert index.chooses_blocks(640 * BLOCK + 1, 640)


CLUSTERS = {16: 7, 8: 15, 4: 30, 2: 60, 1: 132}


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("columns", [0, 1, 511, 4096, 4097, 16384, 16385, 65536, 200_000, 4_000_000])
@pytest.mark.parametrize("tokens", [1, 7, 8, 132, 10_000])
@pytest.mark.parametrize("num_blocks", [0, 2048])
def test_a_tokens_ctas_have_room_for_it_and_run_at_once(
    tokens: int, columns: int, restricted: bool, num_blocks: int
) -> None:
    if restricted and not index.holds(columns, restricted):
        return
    ranks = index._ranks(tokens, columns, restricted, 512, num_blocks, CLUSTERS)
    blocks = -(-columns // BLOCK)
    by_blocks = not restricted and index.chooses_blocks(columns, num_blocks)

    def fits(ranks: int) -> bool:
        share = -(-blocks // ranks)
        each = -(-share // 8) * 8  # as the kernel cuts them
        return each <= (index._KEYS if by_blocks else index._MOST_CHOSEN)

    looked_at = max(blocks, (num_blocks or 512) * BLOCK) if by_blocks else blocks * BLOCK
    least = next(n for n in (1, 2, 4, 8, 16) if fits(n))
    assert ranks == least or (fits(ranks) and tokens <= CLUSTERS[ranks] and looked_at > ranks // 2 * 4096)


def test_few_tokens_of_many_columns_have_many_ctas() -> None:
    def ranks(tokens: int, columns: int, restricted: bool = False, num_blocks: int = 0) -> int:
        return index._ranks(tokens, columns, restricted, 512, num_blocks, CLUSTERS)

    assert ranks(1, 4096) == 1
    assert ranks(1, 4097) == 2
    assert ranks(1, 32768) == 1
    assert ranks(1, 32768, num_blocks=2048) == 4
    assert ranks(1, 16384, restricted=True) == 4
    assert ranks(60, 16384, restricted=True) == 2
    assert ranks(1, 524288) == 16
    assert ranks(8, 524288) == 8
    assert ranks(133, 524288) == 2
    with refused(BackendError, "75000 blocks a token to hold: expected at most 32768"):
        ranks(1, 600_000, restricted=True)


# Scores


@dataclass
class Scoring:
    """Tokens and the keys that they are scored against; `scores` and `best` hold UNWRITTEN before."""

    queries: Tensor
    head_weights: Tensor
    pages: Tensor
    token_request: Tensor
    num_visible: Tensor
    candidates: Tensor | None
    cache: PagedCache
    scores: Tensor
    best: Tensor | None

    def run(self) -> None:
        index.index_scores(
            self.queries,
            self.head_weights,
            self.pages,
            self.token_request,
            self.num_visible,
            self.candidates,
            self.cache.data,
            self.cache.layout.page_size,
            self.scores,
            self.best,
        )


def unwritten(rows: int, columns: int, device: str, room: int = 13) -> Tensor:
    """bf16 `[rows, columns]`, rows `room` elements further apart than they must be."""
    bits = torch.full((rows, columns + room), UNWRITTEN, dtype=torch.int16, device=device)
    return bits.view(BF16)[:, :columns]


def bits_of(x: Tensor) -> Tensor:
    """Of the whole buffer that `x` is the left part of."""
    return x.as_strided((len(x), x.stride(0)), (x.stride(0), 1), 0).contiguous().view(torch.int16)


def cache_of(rows: Sequence[int], page_size: int, device: str, lost: bool = False) -> tuple[PagedCache, Tensor]:
    """Requests of so many random rows and the table of their pages, which are out of order in a cache that is NaN
    elsewhere. The last page of the table is none's, and with `lost` the second one neither."""
    layout = CacheLayout(INDEX_MXFP4_68, page_size, ScalePlacement.PAGE)
    counts = [-(-n // page_size) for n in rows]
    random = torch.Generator(device).manual_seed(sum(rows))
    order = torch.randperm(sum(counts) + 2, generator=random, device=device).int()
    cache = PagedCache.allocate(layout, len(order), device, fill=255)
    pages = torch.full((len(rows), max(counts) + 1), -1, dtype=torch.int32, device=device)
    for request, (n, count) in enumerate(zip(rows, counts, strict=True)):
        mine = order[sum(counts[:request]) : sum(counts[: request + 1])]
        pages[request, :count] = mine
        slots = slots_of(pages, page_size, request, torch.arange(n, device=device))
        sizes = torch.exp2(torch.randint(0, 4, (n, 4), generator=random, device=device).float())
        keys = torch.randn(n, 128, generator=random, device=device) * sizes.repeat_interleave(32, 1)
        cache.write(slots, keys)
    if lost:
        pages[:, 1] = -1
    return cache, pages


def slots_of(pages: Tensor, page_size: int, request: int, positions: Tensor) -> Tensor:
    """-1 for positions that have no page, or are -1."""
    page = positions // page_size
    there = (positions >= 0) & (page < pages.shape[1])
    found = torch.where(there, pages[request, torch.where(there, page, 0)].long(), -1)
    return torch.where(found >= 0, found * page_size + positions % page_size, -1)


def scoring(
    device: str,
    visible: Sequence[tuple[int, int]],
    *,
    heads: int = 32,
    page_size: int = 64,
    lost: bool = False,
    columns: int | None = None,
    blocks: int | None = None,
    held: int | None = None,
) -> Scoring:
    """Tokens as pairs of a request and how many rows they see of it, in `columns` (None = all that one sees), or in
    random candidates, `blocks` of them with -1 between. Requests hold what is seen, or `held`."""
    rows = [max([0, *(n for who, n in visible if who == r)]) for r in range(max(who for who, _ in visible) + 1)]
    cache, pages = cache_of([n if held is None else held for n in rows], page_size, device, lost)
    tokens, most = len(visible), max(n for _, n in visible)
    random = torch.Generator(device).manual_seed(tokens)
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)
    queries = torch.full((tokens, heads + 1, 136), NAN, dtype=BF16, device=device)[:, :heads, :128]
    drawn = torch.randint(8, queries.shape, generator=random, device=device)
    signs = torch.randint(2, queries.shape, generator=random, device=device) * 2 - 1
    queries.copy_(codes[drawn] * signs)  # as the model quantises them, so sums are exact in fp32
    weights = torch.full((tokens, heads + 3), NAN, dtype=BF16, device=device)[:, :heads]
    weights.copy_(torch.randn(weights.shape, generator=random, device=device))
    candidates = None
    if blocks is not None:
        candidates = torch.full((tokens, blocks), -1, device=device)
        for token, (_, n) in enumerate(visible):
            there = torch.randperm(-(-n // BLOCK), generator=random, device=device)[: blocks - blocks // 4]
            if len(there) and not bool((there == (n - 1) // BLOCK).any()):
                there[0] = (n - 1) // BLOCK  # the newest, which is mostly seen in part
            places = torch.randperm(blocks, generator=random, device=device)[: len(there)].sort().values
            candidates[token, places] = there.sort().values
    width = columns if columns is not None else most if blocks is None else blocks * BLOCK
    request, counts = (torch.tensor(x, device=device) for x in zip(*visible, strict=True))
    best = unwritten(tokens, -(-width // BLOCK), device) if blocks is None else None
    return Scoring(queries, weights, pages, request, counts, candidates, cache, unwritten(tokens, width, device), best)


def positions_of(columns: int, visible: int, candidates: Tensor | None, device: Any) -> tuple[Tensor, Tensor]:
    """The position of each column, and whether it is one and seen."""
    column = torch.arange(columns, device=device)
    if candidates is None:
        return column, column < visible
    block = candidates[torch.where(column // BLOCK < len(candidates), column // BLOCK, 0)]
    live = (column // BLOCK < len(candidates)) & (block >= 0)
    position = torch.where(live, block * BLOCK + column % BLOCK, -1)
    return position, live & (position < visible)


def expected_scores(case: Scoring, token: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """float64, of these positions: before the sum is rounded, and the sum of the magnitudes in it."""
    slots = slots_of(case.pages, case.cache.layout.page_size, int(case.token_request[token]), positions)
    keys = case.cache.read(slots).bfloat16().double()
    dots = (case.queries[token].double() @ keys.T).bfloat16().relu()
    terms = (dots * case.head_weights[token, :, None]).double()
    terms[:, slots < 0] = 0
    return terms.sum(0), terms.abs().sum(0)


def best_of(scores: Tensor, seen: Tensor) -> Tensor:
    """The largest number of each eight, NaN where there is none."""
    blocks = -(-len(scores) // BLOCK)
    padded = torch.full((blocks * BLOCK,), NAN, device=scores.device)
    padded[: len(scores)] = torch.where(seen, scores.float(), NAN)
    numbers = ~padded.isnan().view(blocks, BLOCK)
    return padded.nan_to_num(-INF, INF, -INF).view(blocks, BLOCK).amax(1).where(numbers.any(1), NAN).bfloat16()


def agree_on_scores(case: Scoring, repeats: int = 0) -> None:
    """With torch where a token sees something, and written nowhere else; and with itself."""
    case.run()
    columns = case.scores.shape[1]
    written = torch.zeros(bits_of(case.scores).shape, dtype=torch.bool, device=case.scores.device)
    for token, request in enumerate(case.token_request.tolist()):
        visible = int(case.num_visible[token]) if request >= 0 else 0
        candidates = case.candidates[token] if case.candidates is not None else None
        positions, seen = positions_of(columns, visible, candidates, case.scores.device)
        written[token, :columns] = seen
        found = case.scores[token]
        exact, size = expected_scores(case, token, positions[seen])
        ordinary = exact.isfinite()
        assert torch.equal(
            found[seen][~ordinary].nan_to_num(7.0, INF, -INF), exact[~ordinary].bfloat16().nan_to_num(7.0, INF, -INF)
        )
        # Half a step of bf16 and what fp32 loses.
        room = exact.abs() * 2**-8 + size * 2**-20 + 2**-134
        wrong = ((found[seen].double() - exact).abs() <= room).logical_not() & ordinary
        assert not wrong.any(), (token, positions[seen][wrong][:5], found[seen][wrong][:5], exact[wrong][:5])
        if case.best is not None:
            blocks = -(-min(visible, columns) // BLOCK)
            assert torch.equal(
                *(x[:blocks].nan_to_num(7.0, INF, -INF) for x in (case.best[token], best_of(found, seen)))
            )
            assert (bits_of(case.best)[token, blocks:] == UNWRITTEN).all()
    assert (bits_of(case.scores)[~written] == UNWRITTEN).all()
    before = bits_of(case.scores)
    for _ in range(repeats):
        case.scores.view(torch.int16).fill_(UNWRITTEN)
        case.run()
        assert torch.equal(bits_of(case.scores), before)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("queries", lambda x: x.float()),
        ("queries", lambda x: torch.zeros(3, 4, 132).bfloat16()[:, :, :128]),
        ("queries", lambda x: torch.zeros(3, 4, 64).bfloat16()),
        ("queries", lambda x: torch.zeros(3, 33, 128).bfloat16()),
        ("head_weights", lambda x: x[:, :3]),
        ("head_weights", lambda x: x.float()),
        ("pages", lambda x: x.long()),
        ("token_request", lambda x: x.int()),
        ("num_visible", lambda x: x[:2]),
        ("scores", lambda x: x.half()),
        ("best", lambda x: x[:, :-1]),
        ("best", lambda x: x[:2]),
    ],
)
def test_what_scores_would_misread_is_refused(name: str, change: Callable[[Any], Tensor]) -> None:
    case = scoring("cpu", [(0, 70)] * 3, heads=4)
    with refused(BackendError, f"was given {name}"):
        replace(case, **{name: change(getattr(case, name))}).run()


@pytest.mark.parametrize("change", [{"page_size": 8}, {"page_size": 96}, {"page_size": 128}])
def test_a_cache_that_scores_would_misread_is_refused(change: dict[str, int]) -> None:
    case = scoring("cpu", [(0, 70)], heads=4)
    arguments = [case.queries, case.head_weights, case.pages, case.token_request, case.num_visible, None]
    with refused(BackendError, f"data of {change['page_size']} rows a page"):
        index.index_scores(*arguments, case.cache.data, change["page_size"], case.scores, case.best)
    with refused(BackendError, "data"):
        index.index_scores(*arguments, case.cache.data[:, 8:], 16, case.scores, case.best)


def test_candidates_have_no_best_of_every_block() -> None:
    case, restricted = scoring("cpu", [(0, 70)] * 3, heads=4), scoring("cpu", [(0, 70)] * 3, heads=4, blocks=8)
    with refused(BackendError, "the best of every block, or takes candidates"):
        replace(restricted, best=case.best).run()
    with refused(BackendError, "was given candidates"):
        replace(restricted, candidates=torch.zeros(3, 16).long()[:, ::2]).run()


RAGGED = [(0, 131), (1, 0), (1, 1), (0, 130), (-1, 0), (2, 77), (1, 64)]


def extremes(device: str, heads: int) -> Scoring:
    """Rows of the least and the largest scales, and of NaN and infinity, the last three beside ordinary ones."""
    case = scoring(device, [(0, 80)], heads=heads)
    case.queries.copy_(torch.where(case.queries == 0, 1.0, case.queries) * 2.0**-20)
    slots = slots_of(case.pages, case.cache.layout.page_size, 0, torch.arange(80, device=device))
    values, scales = case.cache.read_bytes(slots)
    scales[:16], scales[16:24] = 0, 254
    values[16:24] &= 0x99  # codes up to a half, which are finite
    scales[40, 2], scales[41] = 255, 255
    values[40:42] &= 0x99
    scales[48:56, 1] = 128
    scales[56:64] = 129
    scales[64:68], values[64:68] = 254, 0
    values[64, 3], values[65, 63], values[66, 20], values[67, 20] = 0x04, 0xC0, 0x07, 0x44
    case.cache.write_bytes(slots, values, scales)
    return case


@without_gpu
@pytest.mark.parametrize("heads", [1, 5, 32])
@pytest.mark.parametrize("page_size", [16, 64])
def test_emulated_scores(heads: int, page_size: int, emulated_gpu: EmulatedGPU) -> None:
    agree_on_scores(scoring("cpu", RAGGED, heads=heads, page_size=page_size, lost=True), repeats=1)


@without_gpu
@pytest.mark.parametrize("heads", [1, 5, 32])
def test_emulated_scores_of_candidates(heads: int, emulated_gpu: EmulatedGPU) -> None:
    agree_on_scores(scoring("cpu", RAGGED, heads=heads, page_size=16, lost=True, blocks=11), repeats=1)


@without_gpu
@pytest.mark.parametrize("heads", [5, 32])
def test_emulated_scores_of_extreme_scales(heads: int, emulated_gpu: EmulatedGPU) -> None:
    agree_on_scores(extremes("cpu", heads))


@without_gpu
@pytest.mark.parametrize(("columns", "blocks"), [(20, None), (83, None), (83, 20), (200, 20), (40, 3)])
def test_emulated_scores_in_fewer_or_more_columns(columns: int, blocks: int | None, emulated_gpu: EmulatedGPU) -> None:
    cases = [scoring("cpu", [(0, 150), (0, 9)], columns=columns, blocks=blocks) for _ in range(2)]
    agree_on_scores(cases[0])
    agree_on_scores(replace(cases[1], best=None))


@without_gpu
@pytest.mark.parametrize(("visible", "blocks"), [(700, None), (4500, None), (2600, 330)])
def test_emulated_scores_of_many_tiles(
    visible: int, blocks: int | None, emulated_gpu: EmulatedGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long ones in one run, of which the pages are looked up in several batches."""
    monkeypatch.setattr(index, "_WAVES", 1)
    emulated_gpu.resize(4 if visible == 700 else 0)
    for seed in range(2):
        emulated_gpu.schedule(seed)
        agree_on_scores(scoring("cpu", [(0, visible)] * (3 if visible == 700 else 1), heads=2, blocks=blocks))


@pytest.mark.parametrize(
    ("tokens", "tiles", "expected"),
    [(1, 5, 5), (1, 1024, 792), (1, 10**6, 6336), (32, 256, 24), (32, 1024, 32), (32, 16384, 192), (1000, 64, 2)],
)
def test_a_tokens_tiles_are_shared_by_as_many_ctas_as_have_enough_to_do(tokens: int, tiles: int, expected: int) -> None:
    assert index._splits(tokens, tiles, at_once=6 * 132) == expected


@on_hopper
@pytest.mark.parametrize("heads", [1, 5, 31, 32])
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("blocks", [None, 11, 300])
def test_scores(heads: int, page_size: int, blocks: int | None) -> None:
    tokens = [*RAGGED, (3, 5000), (3, 4999)]
    agree_on_scores(scoring("cuda", tokens, heads=heads, page_size=page_size, lost=True, blocks=blocks), repeats=20)


@on_hopper
@pytest.mark.parametrize("heads", [1, 5, 32])
def test_scores_of_extreme_scales(heads: int) -> None:
    agree_on_scores(extremes("cuda", heads), repeats=20)


@on_hopper
@pytest.mark.parametrize("columns", [65536, 1048576])
@pytest.mark.parametrize("tokens", [1, 32])
@pytest.mark.parametrize("blocks", [None, 2048])
def test_scores_of_long_requests(columns: int, tokens: int, blocks: int | None) -> None:
    visible = [(0, columns - 3 * token) for token in range(tokens)]
    agree_on_scores(scoring("cuda", visible, blocks=blocks), repeats=2)


@on_hopper
def test_scores_of_more_tokens_than_a_side_of_a_grid() -> None:
    case = scoring("cuda", [(0, 24)] * 65600, heads=4)
    case.run()
    last = replace(
        case,
        queries=case.queries[-5:],
        head_weights=case.head_weights[-5:],
        token_request=case.token_request[-5:],
        num_visible=case.num_visible[-5:],
        scores=unwritten(5, 24, "cuda"),
        best=unwritten(5, 3, "cuda"),
    )
    agree_on_scores(last)
    assert torch.equal(case.scores[-5:], last.scores)


# Choices


@dataclass
class Choosing:
    scores: Tensor
    best: Tensor | None
    num_visible: Tensor
    candidates: Tensor | None
    num_rows: int
    num_blocks: int

    def run(self) -> tuple[Tensor, Tensor]:
        rows, blocks = index.index_choice(
            self.scores, self.best, self.num_visible, self.candidates, self.num_rows, self.num_blocks
        )
        return rows, blocks


def any_bits(random: torch.Generator, rows: int, columns: int) -> Tensor:
    """Every score that there is: infinities, subnormals, both zeros, NaN."""
    return torch.randint(-(2**15), 2**15, (rows, columns), generator=random, device=random.device).short().view(BF16)


def normal(random: torch.Generator, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=random, device=random.device)


def filled(value: float) -> Callable[[torch.Generator, int, int], Tensor]:
    return lambda random, rows, columns: torch.full((rows, columns), value, device=random.device)


def drawn_from(*values: float) -> Callable[[torch.Generator, int, int], Tensor]:
    def draw(random: torch.Generator, rows: int, columns: int) -> Tensor:
        which = torch.randint(len(values), (rows, columns), generator=random, device=random.device)
        return torch.tensor(values, device=random.device)[which]

    return draw


SCORES: dict[str, Callable[[torch.Generator, int, int], Tensor]] = {
    "normal": normal,
    "any": any_bits,
    "zeros of the ReLU": lambda *shape: normal(*shape).sub(0.8).relu(),
    "equal": filled(-1.5),
    "no numbers": filled(NAN),
    "both zeros": drawn_from(-0.0, 0.0, -0.0, -1.0, NAN),
    "minus infinity": drawn_from(-INF, *[NAN] * 7),
    "one digit": lambda *shape: normal(*shape).abs().remainder(2.0**-7).add(1.0),
}


def choosing(
    device: str,
    visible: Sequence[int],
    *,
    scores: str = "normal",
    columns: int | None = None,
    num_rows: int = 16,
    num_blocks: int = 0,
    blocks: int | None = None,
) -> Choosing:
    """Tokens that see so many columns, or with `blocks` so many positions in random candidates; what they do not see is
    infinite or NaN."""
    tokens = len(visible)
    random = torch.Generator(device).manual_seed(tokens)
    width = columns if columns is not None else max(visible) if blocks is None else blocks * BLOCK
    candidates, counts = None, torch.tensor(visible, device=device)
    if blocks is not None:
        most = max(max(visible) // BLOCK + 3, blocks)  # some are behind all that a token sees
        order = torch.rand(tokens, most, generator=random, device=device).argsort(1)[:, :blocks]
        candidates = order.sort(1).values
        candidates[torch.rand(tokens, blocks, generator=random, device=device) < 0.2] = -1
    room = -(-width // 128) * 128 + 8
    made = torch.full((tokens, room), INF, dtype=BF16, device=device)
    made[:, 1::2] = NAN
    drawn = SCORES[scores](random, tokens, width).to(BF16)
    best = torch.full((tokens, room), INF, dtype=BF16, device=device) if blocks is None else None
    for token, n in enumerate(visible):
        chosen = candidates[token] if candidates is not None else None
        _, seen = positions_of(width, n, chosen, device)
        made[token, :width] = torch.where(seen, drawn[token], made[token, :width])
        if best is not None:
            end = -(-min(n, width) // BLOCK)
            best[token, :end] = best_of(drawn[token], seen)[:end]
    if best is not None:
        best = best[:, : -(-width // BLOCK)]
    return Choosing(made[:, :width], best, counts, candidates, num_rows, num_blocks)


def first(scores: Tensor, allowed: Tensor, k: int) -> Tensor:
    """The `k` largest that are allowed, of equal ones the first; their places in order, and -1 up to `k`."""
    places = allowed.nonzero().flatten()
    order = scores[places].argsort(descending=True, stable=True)[:k]
    found = torch.full((k,), -1, device=scores.device)
    found[: len(order)] = places[order].sort().values
    return found


def expected_choice(case: Choosing, token: int) -> tuple[Tensor, Tensor]:
    columns, visible = case.scores.shape[1], int(case.num_visible[token])
    candidates = case.candidates[token] if case.candidates is not None else None
    positions, seen = positions_of(columns, visible, candidates, case.scores.device)
    scores = case.scores[token].double()
    rows = first(scores, seen & ~scores.isnan(), case.num_rows)
    rows = torch.where(rows >= 0, positions[rows], -1)
    blocks = rows.new_empty(0)
    if case.num_blocks:
        given = case.best[token] if case.best is not None else best_of(case.scores[token], seen)
        # The newest is before infinity, and what is no number behind it.
        best = given.double().clamp(-1e300, 1e300).nan_to_num(-INF)
        there = -(-min(visible, columns) // BLOCK)
        if there:
            best[there - 1] = INF
        blocks = first(best, torch.arange(len(best), device=best.device) < there, case.num_blocks)
    return rows, blocks


def agree_on_choice(case: Choosing, repeats: int = 0) -> None:
    """With sorting, and with itself."""
    rows, blocks = case.run()
    for token in range(len(case.scores)):
        expected_rows, expected_blocks = expected_choice(case, token)
        assert torch.equal(rows[token], expected_rows), token
        assert torch.equal(blocks[token], expected_blocks), token
    for _ in range(repeats):
        assert all(map(torch.equal, case.run(), (rows, blocks)))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("scores", lambda x: x.float()),
        ("scores", lambda x: torch.zeros(3, 100).bfloat16()),
        ("scores", lambda x: torch.zeros(3 * 104 + 1).bfloat16()[1:].view(3, 104)),
        ("best", lambda x: x[:, :-1]),
        ("best", lambda x: torch.zeros(3, 13).bfloat16()),
        ("num_visible", lambda x: x.int()),
        ("num_visible", lambda x: x[:2]),
    ],
)
def test_what_a_choice_would_misread_is_refused(name: str, change: Callable[[Any], Tensor]) -> None:
    case = choosing("cpu", [100, 7, 0])
    with refused(BackendError, f"was given {name}"):
        replace(case, **{name: change(getattr(case, name))}).run()


@pytest.mark.parametrize(("num_rows", "num_blocks"), [(0, 0), (2049, 0), (16, 16), (16, 2049)])
def test_a_choice_that_is_not_held_is_refused(num_rows: int, num_blocks: int) -> None:
    with refused(BackendError, f"{num_rows} rows and {num_blocks} blocks"):
        choosing("cpu", [100], num_rows=num_rows, num_blocks=num_blocks).run()


def test_blocks_are_chosen_by_their_best_or_given() -> None:
    case, restricted = choosing("cpu", [100]), choosing("cpu", [100], blocks=5)
    with refused(BackendError, "the best of every block, or candidates"):
        replace(case, candidates=restricted.candidates).run()
    for many in (choosing("cpu", [16385]), choosing("cpu", [145], num_blocks=18)):
        with refused(BackendError, f"{many.scores.shape[1]} columns without the best of every block"):
            replace(many, best=None).run()
    with refused(BackendError, "16 rows and 17 blocks"):
        replace(restricted, num_blocks=17).run()


def test_no_tokens_are_no_launch() -> None:
    scores, none = torch.zeros(0, 16).bfloat16(), torch.zeros(0).long()
    rows, blocks = Choosing(scores, scores[:, :8], none, None, 4, 5).run()
    assert rows.shape == (0, 4)
    assert blocks.shape == (0, 5)


every_kind = pytest.mark.parametrize("scores", SCORES)
SHORT = [323, 0, 1, 8, 9, 322]


def with_limits(monkeypatch: pytest.MonkeyPatch, all_blocks: int, looked_at: int) -> None:
    """With fewer blocks of which all are looked into, and fewer scores that are worth a second CTA, a short row is
    treated as long ones are."""
    monkeypatch.setattr(index, "_ALL_BLOCKS", all_blocks)
    monkeypatch.setattr(index, "_LOOKED_AT", looked_at)


@without_gpu
@every_kind
@pytest.mark.parametrize("num_blocks", [0, 17])
@pytest.mark.parametrize(("tokens", "looked_at"), [(6, 4096), (2, 64), (1, 8)])
@pytest.mark.parametrize("all_blocks", [2048, 17])
def test_emulated_choice(
    scores: str,
    num_blocks: int,
    tokens: int,
    looked_at: int,
    all_blocks: int,
    emulated_gpu: EmulatedGPU,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one CTA, by eight, and by sixteen: more tokens would have fewer again."""
    emulated_gpu.resize(8)
    with_limits(monkeypatch, all_blocks, looked_at)
    agree_on_choice(choosing("cpu", SHORT[:tokens], scores=scores, num_blocks=num_blocks))


@without_gpu
@every_kind
@pytest.mark.parametrize(("tokens", "looked_at"), [(6, 4096), (1, 8)])
def test_emulated_choice_of_candidates(
    scores: str, tokens: int, looked_at: int, emulated_gpu: EmulatedGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated_gpu.resize(8)
    with_limits(monkeypatch, 2048, looked_at)
    agree_on_choice(choosing("cpu", SHORT[:tokens], scores=scores, blocks=21), repeats=1)


@without_gpu
def test_emulated_choice_of_candidates_far_behind_what_is_seen(emulated_gpu: EmulatedGPU) -> None:
    case = choosing("cpu", [323], blocks=21)
    assert case.candidates is not None
    case.candidates[0, -1] = 2**29 + 1  # 32 bits of its position are those of one that is seen
    agree_on_choice(case)


@without_gpu
@pytest.mark.parametrize("seed", range(8))
def test_emulated_choice_in_any_order(seed: int, emulated_gpu: EmulatedGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """CTAs of a cluster run ahead of others as far as these let them."""
    with_limits(monkeypatch, 2048, 64)
    emulated_gpu.schedule(seed)
    agree_on_choice(choosing("cpu", [323], num_blocks=17), repeats=1)


@without_gpu
@pytest.mark.parametrize(
    ("columns", "num_rows", "num_blocks"),
    [(20, 30, 40), (700, 512, 600), (65, 1, 2), (64, 64, 0), (9, 1, 0), (83, 7, 8), (64, 7, 8), (65, 7, 8), (72, 7, 8)],
)
@pytest.mark.parametrize("all_blocks", [2048, 8])
@pytest.mark.parametrize("looked_at", [4096, 40])
def test_emulated_choice_of_any_size(
    columns: int,
    num_rows: int,
    num_blocks: int,
    all_blocks: int,
    looked_at: int,
    emulated_gpu: EmulatedGPU,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of tokens that see more than there are columns."""
    with_limits(monkeypatch, all_blocks, looked_at)
    case = choosing("cpu", [columns, columns + 90], columns=columns, num_rows=num_rows, num_blocks=num_blocks)
    agree_on_choice(case)
    if not index.chooses_blocks(columns, num_blocks):
        agree_on_choice(replace(case, best=None))


@without_gpu
@pytest.mark.parametrize("columns", [4095, 4097, 16384, 16385])
@pytest.mark.parametrize("num_blocks", [0, 520])
@pytest.mark.parametrize("threads", [256, 512, 1024])
def test_emulated_choice_around_the_limits(
    columns: int, num_blocks: int, threads: int, emulated_gpu: EmulatedGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of more eights than a CTA has threads, and of fewer."""
    monkeypatch.setattr(index, "_CHOICE", index.choosing(threads=threads))
    agree_on_choice(choosing("cpu", [columns], num_rows=512, num_blocks=num_blocks))


@on_hopper
@every_kind
@pytest.mark.parametrize("num_blocks", [0, 640])
@pytest.mark.parametrize("tokens", [1, 4, 30, 300])
@pytest.mark.parametrize("columns", [900, 40001])
def test_choice(scores: str, num_blocks: int, tokens: int, columns: int) -> None:
    """More tokens have fewer CTAs each."""
    visible = [columns, 0, 1, 8, 9, *range(columns, columns // 2, -61)]
    visible = (visible * (1 + tokens // len(visible)))[:tokens]
    agree_on_choice(choosing("cuda", visible, scores=scores, num_rows=512, num_blocks=num_blocks), repeats=20)


@on_hopper
@every_kind
@pytest.mark.parametrize("columns", [4096, 4097, 8193, 16384, 16385, 32769, 131073])
@pytest.mark.parametrize("num_blocks", [0, 640, 2048])
def test_choice_around_the_limits(scores: str, columns: int, num_blocks: int) -> None:
    case = choosing("cuda", [columns, columns - 1], scores=scores, num_rows=512, num_blocks=num_blocks)
    agree_on_choice(case, repeats=20)
    if not index.chooses_blocks(columns, num_blocks):
        agree_on_choice(replace(case, best=None))


@on_hopper
@every_kind
@pytest.mark.parametrize("tokens", [1, 4, 300])
@pytest.mark.parametrize("blocks", [60, 2048])
def test_choice_of_candidates(scores: str, tokens: int, blocks: int) -> None:
    visible = ([30000, 0, 1, 9, 5000] * tokens)[:tokens]
    agree_on_choice(choosing("cuda", visible, scores=scores, num_rows=512, blocks=blocks), repeats=20)


@on_hopper
@every_kind
@pytest.mark.parametrize("columns", [65536, 1048576])
@pytest.mark.parametrize("tokens", [1, 32])
@pytest.mark.parametrize(("num_rows", "num_blocks"), [(512, 0), (512, 2048), (2048, 0)])
def test_choice_of_long_requests(scores: str, columns: int, tokens: int, num_rows: int, num_blocks: int) -> None:
    visible = [columns - 5 * token for token in range(tokens)]
    agree_on_choice(choosing("cuda", visible, scores=scores, num_rows=num_rows, num_blocks=num_blocks), repeats=2)


@on_hopper
def test_choice_of_as_many_as_are_held() -> None:
    columns = index._RANKS[0] * index._KEYS * BLOCK
    assert index.holds(columns, restricted=False)
    agree_on_choice(choosing("cuda", [columns, columns - 9], num_rows=512, num_blocks=2048))


@on_hopper
def test_a_graph_follows_its_tensors() -> None:
    case = scoring("cuda", [(0, 5000)] * 3)
    case.scores = torch.empty(3, 5120, dtype=BF16, device="cuda")[:, :5000]
    case.best = torch.empty(3, 640, dtype=BF16, device="cuda")[:, :625]

    def step() -> tuple[Tensor, ...]:
        case.run()
        return Choosing(case.scores, case.best, case.num_visible, None, 512, 600).run()

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for visible in ([5000, 1, 0], [3, 4999, 700]):
        case.num_visible.copy_(torch.tensor(visible))
        case.queries.mul_(-1)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(found, step(), strict=True))


@on_hopper
def test_the_ops_are_declared_right() -> None:
    case = scoring("cuda", [(0, 70)])
    arguments = [getattr(case, name) for name in vars(case)]
    arguments[6:7] = [case.cache.data, 64]
    torch.library.opcheck(index.index_scores, tuple(arguments))
    # It also takes copies without the room behind each row, so columns and blocks are whole multiples of 8.
    choices = choosing("cuda", [192, 9], num_blocks=17)
    torch.library.opcheck(index.index_choice, tuple(vars(choices).values()))
    torch.library.opcheck(index.index_choice, tuple(vars(replace(choices, best=None, num_blocks=0)).values()))
