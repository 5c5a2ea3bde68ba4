"""Scores of index queries against the index keys of their request."""

import torch
from torch import Tensor

DIM = 128


def score(
    q: Tensor, head_weights: Tensor, pages: Tensor, page_rows: int, table: Tensor, request: Tensor, width: int
) -> Tensor:
    """`sum_h w[t, h] * relu(q[t, h] . k[j])` for the keys j < `width` of each token's request: `[T, width]`, like `q`.

    `q` `[T, H, 128]`, `head_weights` `[T, H]`; `pages` uint8: 128 e4m3 codes a key, then a float32 scale for each key;
    `table` int32 `[R, n]`, the pages of each request; `request` int64 `[T]`, -1 = none. A key without a page scores 0.
    """
    out = q.new_zeros(len(q), width)
    for number in request[request >= 0].unique().tolist():
        mine = request == number
        held = table[number, : -(-width // page_rows)].long()
        keys = _keys(pages[held.clamp(min=0)], page_rows)
        keys[held.repeat_interleave(page_rows) < 0] = 0
        dots = (q[mine].float() @ keys[:width].T).relu()
        out[mine, : dots.shape[-1]] = (dots * head_weights[mine, :, None].float()).sum(1).to(q.dtype)
    return out


def _keys(pages: Tensor, page_rows: int) -> Tensor:
    codes = pages[:, : page_rows * DIM].reshape(-1, DIM).view(torch.float8_e4m3fn)
    scales = pages[:, page_rows * DIM : page_rows * (DIM + 4)].reshape(-1, 4).view(torch.float32)
    return codes.float() * scales
