"""Attention outputs in whatever documented form they come, as numbers, and numbers put into that form."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsv41.hal.records import Dialect, pack, unpack, v41_528
from dsv41.hal.types import AttnOutput
from dsv41.testing.scene import Side

_MXFP8_ROW = "mxfp8_row"
_HEAD = v41_528(Dialect.OCP)
"""512 dims in groups of 32: one head of an output in MXFP8."""


def rotate(x: Tensor, side: Side, *, inverse: bool = False) -> Tensor:
    """`x` `[T, H, D]` with its last dims turned, or turned back, at the step's positions. Interleaved pairs."""
    table = side.state.cos_sin[side.plan.batch.positions.clamp(min=0)]
    angle_cos, angle_sin = table.chunk(2, dim=-1)
    turn = torch.complex(angle_cos, -angle_sin if inverse else angle_sin)[:, None]
    rotated = x[..., -table.shape[-1] :].float().contiguous()
    turned = torch.view_as_real(torch.view_as_complex(rotated.unflatten(-1, (-1, 2))) * turn).flatten(-2)
    return torch.cat((x[..., : -table.shape[-1]], turned.to(x.dtype)), dim=-1)


def is_documented(out: AttnOutput) -> bool:
    """Whether an output is in a form that `AttnOutput` describes, and not in one of the backend's own."""
    return out.scale_layout in (None, _MXFP8_ROW)


def heads_of(out: AttnOutput, side: Side) -> Tensor:
    """float32 `[T, H, D]` of the live heads, rotated back. The form is a documented one."""
    heads, dim = side.spec.num_heads, side.spec.head_dim
    if out.scale_layout == _MXFP8_ROW:
        assert out.scale is not None
        found = unpack(_HEAD, out.data.reshape(-1, dim), out.scale.reshape(-1, dim // 32)).view(-1, heads, dim)
    else:
        found = out.data[:, :heads].float()
    return found if out.rotated_back else rotate(found, side, inverse=True)


def with_heads(out: AttnOutput, heads: Tensor, side: Side) -> AttnOutput:
    """An output of the same form that holds `heads` `[T, H, D]`, which are rotated back; padded heads hold NaN."""
    if out.scale_layout == _MXFP8_ROW:
        codes, scales = pack(_HEAD, heads.reshape(-1, heads.shape[-1]).float())
        assert out.scale is not None
        return replace(out, data=codes.view_as(out.data), scale=scales.view_as(out.scale))
    data = torch.full_like(out.data, torch.nan)
    data[:, : heads.shape[1]] = heads if out.rotated_back else rotate(heads, side)
    return replace(out, data=data)


def poison(out: AttnOutput) -> None:
    """Fill the room for an output with what a step before may have left: NaN wherever that can be."""
    for part in (out.data, out.scale):
        if part is not None and part.numel():
            part.view(torch.uint8).fill_(0xFF)
