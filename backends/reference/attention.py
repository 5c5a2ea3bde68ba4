"""Sparse multi-query attention over two paged caches, with a sink."""

import torch
from torch import Tensor

from dsv41.hal.layout import PagedCache

_ROWS_AT_ONCE = 1 << 16
"""Gathered key rows held at a time; 128 MiB at 512 dims in fp32."""


def gather(cache: PagedCache, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows `[U + 1, D]`, rounded to `dtype`, and where each of `slots` `[T, K]` finds its own (int64 `[T, K]`).

    Each row is read once, however many tokens see it. Row 0 is zeros and stands for an empty slot (-1), so nothing
    is read for it.
    """
    unique, where = slots.unique(return_inverse=True)
    rows = cache.read(unique).to(dtype)
    if unique.numel() and unique[0] < 0:
        return rows, where
    return torch.cat((rows.new_zeros(1, cache.layout.record.dim), rows)), where + 1


def sparse_mqa(q: Tensor, parts: list[tuple[Tensor, Tensor]], sink: Tensor, scale: float) -> Tensor:
    """Attention of `q` `[T, H, D]` over the union of `parts`: `[T, H, D]` in `q`'s dtype.

    Each part is what `gather` returned: rows and int64 `[T, K]` indices into them, 0 = none. One latent row is key
    and value for every head; a row that two indices name counts twice. `sink` fp32 `[H]` joins the denominator only.
    A query with nothing to attend to yields zeros.
    """
    out = torch.zeros_like(q)
    width = sum(where.shape[1] for _, where in parts)
    step = max(1, _ROWS_AT_ONCE // max(1, width))
    parts = [(rows.float(), where) for rows, where in parts]
    for start in range(0, q.shape[0], step):
        part = slice(start, start + step)
        kv = torch.cat([rows[where[part]] for rows, where in parts], dim=1)
        empty = torch.cat([where[part] == 0 for _, where in parts], dim=1)
        out[part] = _attend(q[part].float(), kv, empty, sink, scale).to(q.dtype)
    return out


def _attend(q: Tensor, kv: Tensor, empty: Tensor, sink: Tensor, scale: float) -> Tensor:
    if kv.shape[1] == 0:
        return torch.zeros_like(q)
    scores = (torch.matmul(q, kv.transpose(1, 2)) * scale).masked_fill(empty[:, None, :], -torch.inf)
    top = torch.maximum(scores.amax(-1), sink)
    # Rows without a key or a sink have top = -inf, an infinite sink has top = inf: both differences would be NaN.
    shift = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - shift[..., None])
    sink_weight = torch.where(sink == shift, 1.0, torch.exp(sink - shift))
    total = weights.sum(-1) + sink_weight
    out = torch.matmul(weights, kv) / total.masked_fill(total == 0, 1.0)[..., None]
    return out.masked_fill(empty.all(-1)[:, None, None], 0.0)
