"""What a step's kernels need to know about its requests, as slots: physical rows, page * page_size + offset."""

import torch
from torch import Tensor

from dsv41.hal.types import BlockTable, ForwardBatch, StepPlan


def slots_of(table: BlockTable, request: Tensor, row: Tensor) -> Tensor:
    """Slots of logical `row`s of `request`s (both int64, any one shape); -1 where either is -1 or has no page."""
    page = row.clamp(min=0) // table.page_size
    known = (row >= 0) & (request >= 0) & (page < table.pages.shape[1])
    if table.pages.numel() == 0:
        return torch.full_like(row, -1)
    physical = table.pages.long()[request.clamp(min=0), page.clamp(max=table.pages.shape[1] - 1)]
    return torch.where(known & (physical >= 0), physical * table.page_size + row % table.page_size, -1)


def make_plan(batch: ForwardBatch, window: int) -> StepPlan:
    """Derive a step's slots and visibilities, without waiting for the device."""
    device = batch.positions.device
    position = batch.positions
    token = torch.arange(batch.num_tokens, device=device)
    ends = batch.query_start_loc[1:].long()
    request = torch.searchsorted(ends, token, right=True)
    live = (request < batch.num_requests) & (position >= 0)
    request = torch.where(live, request, -1)
    position = torch.where(live, position, -1)

    seen = _rows_seen(batch, request, position, window)

    shared = _of_request(batch.shared_lens, request)
    compressed_slots, num_visible, max_visible = {}, {}, {}
    lengths = batch.seq_lens_cpu[batch.query_start_loc_cpu.diff() > 0]
    longest = batch.max_seq_len
    if longest is None:
        longest = int(lengths.max()) if lengths.numel() else 0
    for ratio, table in batch.compressed_tables.items():
        closes = live & ((position + 1) % ratio == 0) & (position >= shared)
        compressed_slots[ratio] = slots_of(table, request, torch.where(closes, position // ratio, -1))
        num_visible[ratio] = (position + 1) // ratio
        max_visible[ratio] = longest // ratio
    return StepPlan(
        batch=batch,
        token_request=request,
        window_slots=slots_of(batch.window_table, request, position),
        window_indices=slots_of(batch.window_table, request[:, None].expand_as(seen), seen),
        compressed_slots=compressed_slots,
        num_visible=num_visible,
        max_visible=max_visible,
    )


def _rows_seen(batch: ForwardBatch, request: Tensor, position: Tensor, window: int) -> Tensor:
    """Window rows that each token's query sees, int64 `[T, n]`, -1 = none.

    Causal: its own and the `window - 1` before. A draft block: the `window` before the block and all of the block.
    """
    device = position.device
    if batch.causal:
        seen = position[:, None] - torch.arange(window - 1, -1, -1, device=device)
        end = position + 1
    else:
        longest = int(batch.query_start_loc_cpu.diff().max()) if batch.num_requests else 0
        end = _of_request(batch.seq_lens.long(), request)
        # Padding may stand inside a request, so a block begins where its first live token is.
        first = batch.seq_lens.new_full((batch.num_requests + 1,), 2**31 - 1).long()
        block = first.scatter_reduce_(0, request % len(first), position, "amin")[request]
        seen = block[:, None] + torch.arange(-window, longest, device=device)
    start = _of_request(batch.window_starts, request)
    held = (request >= 0)[:, None] & (seen >= start[:, None]) & (seen < end[:, None])
    return torch.where(held, seen, -1)


def _of_request(values: Tensor, request: Tensor) -> Tensor:
    """Each token's entry of `values` `[R]`; 0 for padding."""
    if values.numel() == 0:
        return torch.zeros_like(request)
    return torch.where(request >= 0, values[request.clamp(min=0)], 0)
