"""Top-k choices compared: as sets, for what no choice may be, and for what only a tie excuses."""

from __future__ import annotations

import torch
from torch import Tensor

TIE = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Scores nearer than this count as equal, by activation dtype: either choice may be right. Scores in bfloat16 are sums
of rounded products of rounded dot products."""


def as_sets(indices: Tensor, width: int) -> Tensor:
    """bool `[T, width]`: which positions each row of `indices` names; what lies outside is left out."""
    member = torch.zeros(indices.shape[0], width + 1, dtype=torch.bool, device=indices.device)
    inside = (indices >= 0) & (indices < width)
    member.scatter_(1, torch.where(inside, indices.long(), width), True)
    return member[:, :width]


def invalid_rows(indices: Tensor, visible: Tensor, count: Tensor) -> Tensor:
    """bool `[T]`: rows that repeat an index, name one that is not below `visible` `[T]`, or name not `count` `[T]`."""
    named = indices >= 0
    in_order = indices.sort(dim=-1).values
    repeated = ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)).any(-1)
    outside = (named & (indices >= visible[:, None])) | (indices < -1)
    return repeated | outside.any(-1) | (named.sum(-1) != count)


def untied_rows(found: Tensor, own: Tensor, scores: Tensor, allowed: Tensor, margin: float) -> Tensor:
    """bool `[T]`: rows of `found` that differ from `own`, both `[T, K]`, in more than ties.

    `scores` and `allowed` `[T, W]` are what `own` was chosen by. Entries may be exchanged whose scores lie within
    `margin` of the worst chosen one, in units of the row's largest score.
    """
    width = scores.shape[1]
    theirs, ours = as_sets(found, width), as_sets(own, width)
    border = scores.masked_fill(~ours, torch.inf).amin(-1, keepdim=True) if width else scores.new_zeros(len(scores), 1)
    finite = scores.masked_fill(~allowed | scores.isinf(), 0.0)
    slack = margin * finite.abs().amax(-1, keepdim=True).clamp_min(1.0) if width else border
    taken_wrongly = theirs & ~ours & ~(allowed & (scores >= border - slack))
    left_wrongly = ours & ~theirs & (scores > border + slack)
    return (taken_wrongly | left_wrongly).any(-1)


def block_scores(scores: Tensor, num_visible: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Best score of each block `[T, B]`, the newest visible block's infinite, and which blocks are visible."""
    tokens, width = scores.shape
    count = -(-width // block_size)
    number = torch.arange(count, device=scores.device)
    seen = torch.arange(width, device=scores.device) < num_visible[:, None]
    hidden = scores.masked_fill(~seen, -torch.inf)
    padded = torch.nn.functional.pad(hidden, (0, count * block_size - width), value=-torch.inf)
    best = padded.view(tokens, count, block_size).amax(-1) if count else padded.view(tokens, 0)
    newest = (number == (num_visible[:, None] - 1) // block_size) & (num_visible[:, None] > 0)
    return best.masked_fill(newest, torch.inf), number * block_size < num_visible[:, None]
