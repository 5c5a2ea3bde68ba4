"""Selected positions become slots as in the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv41.backends.portable.selection import BLOCK, selection_slots
from dsv41.backends.reference.planning import slots_of
from dsv41.hal.types import BlockTable

from .common import DEVICE


def found(
    topk: Tensor, num_visible: Tensor, token_request: Tensor, pages: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """Slots by the op, and as the reference derives them, on the CPU."""
    request = torch.where(topk < num_visible[:, None], token_request[:, None], -1)
    expected = slots_of(BlockTable(pages, pages, page_size), request, topk)
    arguments = [x.to(DEVICE) for x in (topk, num_visible, token_request, pages)]
    return selection_slots(*arguments, page_size).cpu(), expected


@pytest.mark.parametrize("width", [1, 7, BLOCK, BLOCK + 3])
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_slots_are_those_of_the_reference(width: int, page_size: int) -> None:
    """Positions that are empty, not visible, on missing pages and past the table, in any order; padding tokens."""
    generator = torch.Generator().manual_seed(0)
    requests, columns, tokens = 3, 5, 6
    pages = torch.randperm(requests * columns, generator=generator).view(requests, columns).to(torch.int32)
    pages[1, 2] = -1
    # Rows of a wider table, as an engine may bring it.
    wide = torch.full((requests, columns + 2), 1 << 30, dtype=torch.int32)
    wide[:, :columns] = pages
    topk = torch.randint(-1, (columns + 1) * page_size, (tokens, width), generator=generator)
    topk[:, -1] = -1
    num_visible = torch.tensor([columns * page_size, 2 * columns * page_size, 2, 0, columns * page_size, 0])
    token_request = torch.tensor([0, 1, 2, 0, -1, -1])
    slots, expected = found(topk, num_visible, token_request, wide[:, :columns], page_size)
    assert torch.equal(slots, expected)
    if width > 7:
        assert (slots[:3] >= 0).any(1).all()
        assert (slots[1] == -1).sum() > 1
    assert (slots[3:] == -1).all()


def test_fr_65_slots_of_high_pages_do_not_wrap() -> None:
    pages = torch.tensor([[2**31 - 1, 2**26]], dtype=torch.int32)
    slots, expected = found(torch.tensor([[64, 63]]), torch.tensor([65]), torch.tensor([0]), pages, 64)
    assert torch.equal(slots, expected)
    assert slots.tolist() == [[2**32, (2**31 - 1) * 64 + 63]]


@pytest.mark.parametrize(("tokens", "width", "columns"), [(0, 4, 2), (2, 0, 2), (2, 4, 0)])
def test_nothing_selected_is_ordinary(tokens: int, width: int, columns: int) -> None:
    slots, _ = found(
        torch.zeros(tokens, width, dtype=torch.int64),
        torch.ones(tokens, dtype=torch.int64),
        torch.zeros(tokens, dtype=torch.int64),
        torch.zeros(1, columns, dtype=torch.int32),
        4,
    )
    assert slots.shape == (tokens, width)
    assert (slots == -1).all()


def test_it_is_a_custom_op_like_any() -> None:
    one = torch.ones(2, dtype=torch.int64, device=DEVICE)
    pages = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    topk = torch.tensor([[0, -1], [3, 0]], device=DEVICE)
    torch.library.opcheck(selection_slots, (topk, one, one, pages, 4))
