"""Sparse attention of many queries over one or two paged caches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from toyaccel.pages import latents

HEADS = 16


@dataclass(frozen=True)
class Part:
    """One cache and the rows of it that each token sees: the first `lengths[t]` of `rows[t]`.

    `pages` uint8 `[P, page bytes]`; `rows` int32 `[T, K]`; `lengths` int32 `[T]`.
    """

    pages: Tensor
    page_rows: int
    form: str
    rows: Tensor
    lengths: Tensor


def attend(q: Tensor, parts: list[Part], sink: Tensor, scale: float, out: Tensor) -> None:
    """Softmax attention of `q` `[T, H, 512]` over the rows of all parts, into `out`, which is like `q`.

    `sink` float32 `[H]` joins the denominator; -inf is none. A token with no row at all is skipped.
    """
    if q.shape[1] % HEADS or q.shape[2] != 512 or not q.is_contiguous():
        raise ValueError(f"q must be contiguous [T, a multiple of {HEADS}, 512], got {list(q.shape)}")
    if any(part.rows.dtype != torch.int32 or part.lengths.dtype != torch.int32 for part in parts):
        raise ValueError("rows and lengths must be int32")
    for token in range(len(q)):
        seen = [part.rows[token, : int(part.lengths[token])].long() for part in parts]
        if not sum(map(len, seen)):
            continue
        keys = torch.cat(
            [latents(part.pages, part.page_rows, part.form, rows) for part, rows in zip(parts, seen, strict=True)]
        )
        logits = torch.cat((q[token].float() @ keys.T * scale, sink[:, None]), dim=1)
        out[token] = (logits.softmax(-1)[:, :-1] @ keys).to(out.dtype)
