"""Slots and visibilities of a step, by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from dsv41.backends.reference.planning import make_plan, slots_of
from dsv41.hal.types import BlockTable, ForwardBatch


def table(page_size: int, *rows: list[int]) -> BlockTable:
    pages = torch.tensor(rows, dtype=torch.int32)
    return BlockTable(pages, pages, page_size)


def test_a_slot_is_a_row_of_a_page() -> None:
    pages = table(4, [7, 0, 3], [2, -1, 1])
    request = torch.tensor([0, 0, 0, 1, 1])
    row = torch.tensor([0, 6, 11, 3, 8])
    assert slots_of(pages, request, row).tolist() == [28, 2, 15, 11, 4]


def test_fr_48_what_has_no_page_has_no_slot() -> None:
    """No row, no request, no page, a row behind the table; page 0 is an ordinary page."""
    pages = table(4, [0, -1], [5, 6])
    request = torch.tensor([0, -1, 0, 0, 1, 0])
    row = torch.tensor([-1, 2, 4, 8, 2**31 - 1, 3])
    assert slots_of(pages, request, row).tolist() == [-1, -1, -1, -1, -1, 3]
    for empty in (torch.zeros(0, 3, dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int32)):
        assert slots_of(BlockTable(empty, empty, 4), request, row).tolist() == [-1] * 6


def test_a_plan_by_hand() -> None:
    """Request 0 adds tokens 3 and 4, request 1 none of its 100, request 2 token 0; two rows are padding."""
    wide = [-1] * 24
    batch = ForwardBatch.from_host(
        query_lens=[2, 0, 1],
        seq_lens=[5, 100, 1],
        window_pages=torch.tensor([[3, 1, *wide[:-1]], [*range(10, 35)], [0, *wide]], dtype=torch.int32),
        window_page_size=4,
        compressed_pages={
            1: torch.tensor([[4, 2, *wide[:-1]], [*range(10, 35)], [1, *wide]], dtype=torch.int32),
            2: torch.tensor([[6], [8], [9]], dtype=torch.int32),
        },
        compressed_page_size={1: 4, 2: 64},
        num_tokens=5,
    )
    plan = make_plan(batch, 3)
    assert batch.positions.tolist() == [3, 4, 0, -1, -1]
    assert plan.token_request.tolist() == [0, 0, 2, -1, -1]
    assert plan.window_slots.tolist() == [15, 4, 0, -1, -1]
    assert plan.window_indices.tolist() == [[13, 14, 15], [14, 15, 4], [-1, -1, 0], [-1] * 3, [-1] * 3]
    assert plan.compressed_slots[1].tolist() == [19, 8, 4, -1, -1]
    assert plan.compressed_slots[2].tolist() == [6 * 64 + 1, -1, -1, -1, -1]
    assert plan.num_visible[1].tolist() == [4, 5, 1, 0, 0]
    assert plan.num_visible[2].tolist() == [2, 2, 0, 0, 0]
    # Of the requests that step: the 100 tokens of the one that does not widen no score matrix.
    assert plan.max_visible == {1: 5, 2: 2}
    # Unless a graph is to be replayed for longer requests, of which this batch is one step.
    assert make_plan(replace(batch, max_seq_len=64), 3).max_visible == {1: 64, 2: 32}
