"""How the device reads a row out of a page: values in tiles, then the scales of all rows."""

import torch
from torch import Tensor

TILE_ROWS = 8
TILE_BYTES = 64


def untile(pages: Tensor, page_rows: int, row_bytes: int) -> Tensor:
    """`[P, page_rows, row_bytes]` of uint8 pages `[P, >= page_rows * row_bytes]`."""
    tiles = pages[:, : page_rows * row_bytes].reshape(
        len(pages), page_rows // TILE_ROWS, row_bytes // TILE_BYTES, TILE_ROWS, TILE_BYTES
    )
    return tiles.transpose(2, 3).reshape(len(pages), page_rows, row_bytes)


def latents(pages: Tensor, page_rows: int, form: str, rows: Tensor) -> Tensor:
    """float32 `[N, 512]` of `rows` int64 `[N]`, as `form` "bf16" or "mxfp8" (groups of 32, their scales after the
    page's values)."""
    page, place = rows // page_rows, rows % page_rows
    needed, where = page.unique(return_inverse=True)
    held = pages[needed]
    if form == "bf16":
        return untile(held, page_rows, 1024)[where, place].view(torch.bfloat16).float()
    codes = untile(held, page_rows, 512)[where, place].view(torch.float8_e4m3fn).float()
    scales = held[:, page_rows * 512 : page_rows * 528].reshape(len(held), page_rows, 16)[where, place]
    groups: Tensor = codes.unflatten(1, (16, 32)) * torch.exp2(scales.float() - 127).unsqueeze(-1)
    return groups.flatten(1)
