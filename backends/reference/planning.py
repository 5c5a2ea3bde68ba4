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

    seen = position[:, None] - torch.arange(window - 1, -1, -1, device=device)
    seen = torch.where(live[:, None] & (seen >= 0), seen, -1)

    compressed_slots, num_visible, max_visible = {}, {}, {}
    stepping = batch.query_start_loc_cpu.diff() > 0
    for ratio, table in batch.compressed_tables.items():
        closes = live & ((position + 1) % ratio == 0)
        compressed_slots[ratio] = slots_of(table, request, torch.where(closes, position // ratio, -1))
        num_visible[ratio] = (position + 1) // ratio
        lengths = batch.seq_lens_cpu[stepping]
        max_visible[ratio] = int(lengths.max()) // ratio if lengths.numel() else 0
    return StepPlan(
        batch=batch,
        token_request=request,
        window_slots=slots_of(batch.window_table, request, position),
        window_indices=slots_of(batch.window_table, request[:, None].expand_as(seen), seen),
        compressed_slots=compressed_slots,
        num_visible=num_visible,
        max_visible=max_visible,
    )
