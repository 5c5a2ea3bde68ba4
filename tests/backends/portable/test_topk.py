"""Top-k: exact, by the contract of the reference, on every kind of score that an indexer makes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv41.backends.portable import topk
from dsv41.backends.portable.launch import Launch, watching
from dsv41.backends.portable.topk import COLUMNS, top_k
from dsv41.backends.reference import index

from ..test_reference_index import complaints, right_choice
from .common import DEVICE

NAN, INF = math.nan, math.inf
SCORES = st.sampled_from([-INF, -1.0, -0.0, 0.0, 0.0, 0.0, 0.5, 2.0, INF, NAN])
DTYPES = [torch.float32, torch.bfloat16]


def chosen(scores: Tensor, k: int, lengths: list[int] | None = None) -> Tensor:
    """What the op selects, on the CPU."""
    held = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    return top_k(scores.to(DEVICE), held, k, None, 1, None).cpu()


def within(scores: Tensor, lengths: list[int]) -> Tensor:
    return torch.arange(scores.shape[1]) < torch.tensor(lengths)[:, None]


def indexer_like(rows: int, width: int, zeros: float = 0.8) -> Tensor:
    """Sums over heads of w * relu(x) with weights of both signs, a share of `zeros` of them exactly zero."""
    generator = torch.Generator().manual_seed(0)
    dots = torch.randn(rows, 4, width, generator=generator) - 0.5
    scores = (dots.relu() * torch.randn(rows, 4, 1, generator=generator)).sum(1)
    return scores * (torch.rand(rows, width, generator=generator) > zeros)


@settings(max_examples=40, deadline=None)
@given(st.lists(SCORES, min_size=1, max_size=24), st.data())
def test_it_is_what_sorting_by_hand_gives(scores: list[float], data: st.DataObject) -> None:
    k, length = data.draw(st.integers(1, 30)), data.draw(st.integers(0, len(scores)))
    dtype = data.draw(st.sampled_from(DTYPES))
    found = chosen(torch.tensor([scores[::-1], scores], dtype=dtype), k, [len(scores), length])
    for row, values in zip(found.tolist(), (scores[::-1], scores[:length]), strict=True):
        expected = right_choice(values, [True] * len(values), k)
        assert row == expected + [-1] * (k - len(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 512, 2048])
def test_fr_52_indexer_like_scores_lose_nothing(dtype: torch.dtype, k: int) -> None:
    """Rows of every length: of several tiles, that end at a tile or beside it, shorter than k. What lies behind a row
    would be selected if it were read."""
    width = 3 * COLUMNS + 100
    lengths = [width, width - 1, 2 * COLUMNS, COLUMNS + 1, k + 1, k, k - 1, 0]
    scores = indexer_like(len(lengths), width).to(dtype)
    scores[:, 5] = NAN
    allowed = within(scores, lengths)
    scores[~allowed] = INF
    found = chosen(scores, k, lengths)
    assert complaints(found, scores, allowed, k) == []
    assert torch.equal(found, index.top_k(scores, allowed, k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("apart", [128, 120, 100])
def test_rows_of_a_wider_tensor_end_where_they_end(dtype: torch.dtype, apart: int) -> None:
    """Read whole or one by one, whatever is behind them, in the row or past it, is not selected."""
    lengths = [97, 96, 90, 41, 7, 1, 0]
    wide = torch.full((len(lengths), apart), INF, dtype=dtype)
    wide[:, :97] = indexer_like(len(lengths), 97).to(dtype)
    scores = wide.to(DEVICE)[:, :97]
    everywhere = torch.ones(scores.shape, dtype=torch.bool)
    for held, allowed in ((None, everywhere), (lengths, within(scores, lengths))):
        assert torch.equal(chosen(scores, 40, held), index.top_k(wide[:, :97], allowed, 40))
    blocks = torch.arange(25, device=DEVICE).flip(0).expand(len(lengths), 25).contiguous()
    visible = torch.tensor(lengths, device=DEVICE)
    found = top_k(scores, None, 40, blocks, 4, visible).cpu()
    dense = top_k(scores.contiguous(), None, 40, blocks, 4, visible).cpu()
    assert torch.equal(found, dense)


def test_a_row_of_a_million_positions() -> None:
    scores = indexer_like(1, 1 << 20).abs().bfloat16()
    assert 0.7 < (scores == 0).float().mean() < 0.9
    found = chosen(scores, 2048)
    assert torch.equal(found, index.top_k(scores, torch.ones_like(scores, dtype=torch.bool), 2048))


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_spans_find_what_one_program_finds(k: int, restricted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through several levels, with ties, NaN, rows of every length, and candidates that are missing or out of sight."""
    generator = torch.Generator().manual_seed(k)
    scores = indexer_like(6, 700).bfloat16().to(DEVICE)
    scores[:, 100:103] = NAN
    lengths = torch.tensor([700, 699, 100, 17, 1, 0], device=DEVICE)
    arguments: tuple[Tensor | None, int, Tensor | None] = (None, 1, None)
    if restricted:
        blocks = torch.stack([torch.randperm(250, generator=generator)[:175] for _ in range(6)])
        blocks[:, ::7] = -1
        arguments, lengths = (blocks.to(DEVICE), 4, lengths), None  # type: ignore[assignment]
    whole = top_k(scores, lengths, k, *arguments)
    monkeypatch.setattr(topk, "SPAN", 16)
    launches: list[Launch] = []
    with watching(lambda launch: launches.append(launch) is None):
        found = top_k(scores, lengths, k, *arguments)
    assert len(launches) > 2
    assert torch.equal(found, whole)


@pytest.mark.parametrize("width", [5, 8, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fr_50_nan_is_never_selected_and_every_slot_is_written(width: int, dtype: torch.dtype) -> None:
    """Fewer positions than k = 8, as many, more; rows with some, most and only NaN, and infinities of both signs."""
    some = torch.randn(width, generator=torch.Generator().manual_seed(0))
    some[::3] = NAN
    most = torch.full((width,), NAN)
    most[-1] = -INF
    rows = torch.stack((some, most, torch.full((width,), -NAN), torch.full((width,), INF), torch.full((width,), -INF)))
    rows = rows.to(dtype)
    found = chosen(rows, 8)
    assert complaints(found, rows, torch.ones_like(rows, dtype=torch.bool), 8) == []
    assert found[1].tolist() == [width - 1] + [-1] * 7
    assert found[2].tolist() == [-1] * 8
    assert found[3].tolist() == found[4].tolist() == [i if i < width else -1 for i in range(8)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fr_53_of_thousands_of_equal_scores_the_smaller_positions_win(dtype: torch.dtype) -> None:
    """Across tiles too; and the choice of a row depends neither on the rows beside it nor on the width."""
    scores = torch.zeros(3, 2 * COLUMNS, dtype=dtype)
    scores[0, 1::2] = -0.0
    scores[1, COLUMNS + 10 : COLUMNS + 110] = 1
    scores[2, : 2 * COLUMNS - 300] = -1
    found = chosen(scores, 512)
    assert found[0].tolist() == list(range(512))
    assert found[1].tolist() == [*range(412), *range(COLUMNS + 10, COLUMNS + 110)]
    assert found[2].tolist() == [*range(212), *range(2 * COLUMNS - 300, 2 * COLUMNS)]
    # Rows of a wider buffer, which begin anywhere in it.
    buffer = torch.full((3, 1003), INF, dtype=dtype)
    buffer[:, 2:1002] = scores[:, :1000]
    for _ in range(5):
        assert torch.equal(chosen(buffer[:, 2:1002], 512)[0], found[0])


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_digit_of_a_score_counts(shift: int) -> None:
    """Scores of both signs that differ in eight of their 32 bits alone, whichever these are."""
    step = torch.arange(1, 128, dtype=torch.int32).repeat_interleave(3) << shift
    bits = torch.cat((step | 0x00010101, (step | 0x00010101) ^ -0x80000000))
    bits = bits[torch.randperm(len(bits), generator=torch.Generator().manual_seed(0))]
    scores = bits.view(torch.float32)[None]
    allowed = torch.ones_like(scores, dtype=torch.bool)
    for k in (100, 381, 382, 700):
        assert torch.equal(chosen(scores, k), index.top_k(scores, allowed, k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [3, 8])
def test_with_candidates_only_the_visible_positions_of_the_blocks_count(block_size: int, dtype: torch.dtype) -> None:
    """Empty entries stand among the blocks, the newest block is partial, some blocks are not visible at all, and what
    was not scored holds something or other."""
    generator = torch.Generator().manual_seed(1)
    positions, blocks, k = 700, 40, 64
    visible = [700, 699, 350, 17, 1, 0]
    everything = indexer_like(len(visible), positions, 0.6).to(dtype)
    candidates = torch.stack([torch.randperm(positions // block_size, generator=generator) for _ in visible])
    candidates = candidates[:, :blocks].sort().values
    candidates[:, -1] = (torch.tensor(visible) - 1).clamp(min=0) // block_size
    candidates[:3, 1:-1:3] = -1
    position = (candidates[:, :, None] * block_size + torch.arange(block_size)).flatten(1)
    named = (candidates >= 0).repeat_interleave(block_size, 1) & (position < torch.tensor(visible)[:, None])
    scores = everything.gather(1, position.clamp(0, positions - 1)).masked_fill(~named, INF)

    # A block that is named twice would be chosen from twice.
    for row in candidates.tolist():
        named_blocks = [block for block in row[:-1] if block >= 0]
        assert len(set(named_blocks)) == len(named_blocks)
    repeated = (candidates[:, :-1] == candidates[:, -1:]).any(1)
    candidates[repeated, -1] = -1

    allowed = index.in_blocks(candidates, positions, block_size) & within(everything, visible)
    found = top_k(
        scores.to(DEVICE), None, k, candidates.to(DEVICE), block_size, torch.tensor(visible, device=DEVICE)
    ).cpu()
    assert torch.equal(found.sort().values, index.top_k(everything, allowed, k).sort().values)
    assert (found[0] >= 0).all()
    assert (found[-1] == -1).all()


@pytest.mark.parametrize(("rows", "width", "k"), [(0, 5, 3), (2, 0, 3), (2, 5, 0), (0, 0, 0)])
def test_nothing_to_choose_from_is_ordinary(rows: int, width: int, k: int) -> None:
    found = chosen(torch.zeros(rows, width), k)
    assert found.shape == (rows, k)
    assert (found == -1).all()


@pytest.mark.parametrize("restricted", [False, True])
def test_it_is_a_custom_op_like_any(restricted: bool) -> None:
    scores, lengths = torch.rand(2, 16, device=DEVICE), torch.tensor([16, 3], device=DEVICE)
    candidates = torch.tensor([[0, 3], [-1, 1]], device=DEVICE) if restricted else None
    arguments = (scores, None if restricted else lengths, 4, candidates, 8, lengths if restricted else None)
    torch.library.opcheck(top_k, arguments)
