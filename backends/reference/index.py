"""The lightning indexer: scores over compressed positions, candidate blocks, top-k."""

from itertools import pairwise

import torch
from torch import Tensor

from dsv41.backends.reference.planning import slots_of
from dsv41.hal.layout import PagedCache
from dsv41.hal.types import StepPlan

_SCORES_AT_ONCE = 1 << 25
"""Elements of the `[tokens, heads, keys]` product held at a time."""


def top_k(scores: Tensor, allowed: Tensor, k: int) -> Tensor:
    """Positions of the `k` largest allowed scores of each row: int64 `[T, k]`, ascending, -1 where there are fewer.

    NaN is never selected. Of equal scores the smaller positions win, so the result is deterministic and, with
    thousands of exact ties at the border, still valid and unique. `scores` `[T, W]` float, `allowed` `[T, W]` bool.
    """
    rows, width = scores.shape
    out = torch.full((rows, k), -1, dtype=torch.int64, device=scores.device)
    if rows == 0 or width == 0 or k == 0:
        return out
    allowed = allowed & ~scores.isnan()
    scores = scores.masked_fill(~allowed, -torch.inf)
    border = scores.topk(min(k, width), dim=-1).values[:, -1:]
    above = allowed & (scores > border)
    level = allowed & (scores == border)
    room = k - above.sum(-1, keepdim=True)
    taken = above | (level & (level.cumsum(-1) <= room))
    row, position = taken.nonzero(as_tuple=True)
    out[row, (taken.cumsum(-1) - 1)[row, position]] = position
    return out


def candidate_blocks(scores: Tensor, num_visible: Tensor, block_size: int, budget: int) -> Tensor:
    """The `budget` blocks with the best scores, the newest visible one always among them: int64 `[T, budget]`.

    `scores` `[T, W]`, of which row t may see the first `num_visible[t]`. Blocks are `block_size` positions; the last
    may be partial. -1 where a row sees fewer blocks.
    """
    rows, width = scores.shape
    blocks = -(-width // block_size)
    seen = torch.arange(blocks * block_size, device=scores.device) < num_visible[:, None]
    padded = torch.nn.functional.pad(scores, (0, blocks * block_size - width), value=-torch.inf)
    # Infinity is kept for the newest block.
    best = padded.nan_to_num(nan=-torch.inf, neginf=-torch.inf).masked_fill(~seen, -torch.inf)
    best = best.view(rows, blocks, block_size).amax(-1) if blocks else best.view(rows, 0)
    number = torch.arange(blocks, device=scores.device)
    newest = (num_visible[:, None] - 1) // block_size
    best = best.masked_fill((number == newest) & (num_visible[:, None] > 0), torch.inf)
    return top_k(best, number * block_size < num_visible[:, None], budget)


def in_blocks(blocks: Tensor, width: int, block_size: int) -> Tensor:
    """Which of `width` positions lie in a row's blocks: bool `[T, width]` from int64 `[T, B]`, -1 = none."""
    count = -(-width // block_size)
    member = torch.zeros(blocks.shape[0], count + 1, dtype=torch.bool, device=blocks.device)
    member.scatter_(1, torch.where((blocks >= 0) & (blocks < count), blocks, count), True)
    return member[:, :count].repeat_interleave(block_size, dim=1)[:, :width]


def index_scores(queries: Tensor, head_weights: Tensor, keys: PagedCache, ratio: int, plan: StepPlan) -> Tensor:
    """`sum_h w[h] * relu(q[h] . k[j])` of every token and compressed position j: `[T, W]` in the queries' dtype.

    `queries` `[T, heads, dim]`, `head_weights` `[T, heads]`; W = `plan.max_visible[ratio]`. The dot product, its
    product with the head weight and the sum are each rounded to the queries' dtype. Entries that a token cannot see
    hold something or other.
    """
    dtype, device = queries.dtype, queries.device
    tokens, heads, _ = queries.shape
    table, width = plan.batch.compressed_tables[ratio], plan.max_visible[ratio]
    scores = torch.zeros(tokens, width, dtype=dtype, device=device)
    starts = plan.batch.query_start_loc_cpu.tolist()
    row = torch.arange(width, device=device)
    for request, (start, stop) in enumerate(pairwise(starts)):
        held = int(plan.batch.seq_lens_cpu[request]) // ratio
        if start == stop or held == 0:
            continue
        slots = slots_of(table, torch.full_like(row[:held], request), row[:held])
        key = keys.read(slots).to(dtype)
        step = max(1, _SCORES_AT_ONCE // (heads * held))
        for first in range(start, stop, step):
            part = slice(first, min(first + step, stop))
            dots = torch.matmul(queries[part], key.T).relu_()
            scores[part, :held] = (dots * head_weights[part, :, None]).sum(1)
    return scores
