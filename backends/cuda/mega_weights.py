"""Weights around FlashMLA's fused kernel, in the order in which it takes queries and gives outputs.

It cuts the dims of a head into runs and puts the same run of all heads side by side: runs of 16 dims of all query heads
in a query, and runs of 32 dims of the 8 heads of a `wo_a` group in its output. Rows of `wq_b` and columns of `wo_a` are
put into that order once, so that no activation ever is. A run that is no longer than a block keeps one scale, so scales
are moved, or repeated for smaller blocks, and never computed anew.

    query   (d // 16) * (16 * heads) + h * 16 + d % 16    holds dim d of head h
    output  ((d // 32) * 8 + h) * 32 + d % 32             of a group, holds dim d of its head h
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import gcd

import torch
from torch import Tensor

from dsv41.backends.portable.weights import Matrix, PortableWeights, padded_sink
from dsv41.errors import BackendError, InputError
from dsv41.hal.types import LayerState, Weight

QUERY_RUN, OUTPUT_RUN = 16, 32
GROUP_HEADS = 8


@dataclass(frozen=True)
class FusedMatrix(Matrix):
    """A matrix whose rows or columns are in the kernel's order. The portable projections of queries and outputs take
    none."""


@dataclass(frozen=True)
class MegaWeights(PortableWeights):
    """`wq_b` and `wo_a` are of the type `FusedMatrix`; `sink` float32 `[Hp]` is -inf for the padded heads."""

    sink: Tensor = field(kw_only=True)

    @staticmethod
    def made_of(layer: LayerState) -> MegaWeights:
        """Raises InputError, naming the layer, for `wq_b` or `wo_a` of another shape than the layer's heads ask for."""
        spec, weights = layer.spec, layer.weights
        for name, weight, dim, size in (
            ("wq_b", weights.wq_b, 0, spec.num_heads * spec.head_dim),
            ("wo_a", weights.wo_a, 1, GROUP_HEADS * spec.head_dim),
        ):
            if weight.shape[dim] != size:
                raise InputError(
                    f"{spec.name}.{name}.weight is {list(weight.shape)}: expected {size} {('rows', 'columns')[dim]}, "
                    f"for {spec.num_heads} heads of {spec.head_dim}; load the checkpoint that this config belongs to"
                )
        plain = PortableWeights.of(weights)
        kept = {f.name: getattr(plain, f.name) for f in fields(plain) if f.name not in ("wq_b", "wo_a")}
        return MegaWeights(
            **kept,
            wq_b=fused_query_rows(weights.wq_b, spec.num_heads),
            wo_a=fused_output_columns(weights.wo_a),
            sink=padded_sink(layer),
        )


def fused_query_rows(weight: Weight, num_heads: int) -> FusedMatrix:
    """`wq_b` `[num_heads * D, q_rank]` with its rows in the order of a query of `num_heads` heads.

    Blocks of scales become at most 16 rows high. Raises BackendError for rows that are in that order already.
    """
    return _fused(weight, 0, num_heads, QUERY_RUN)


def fused_output_columns(weight: Weight) -> FusedMatrix:
    """`wo_a` `[groups * rank, 8 * D]` with its columns in the order of the output of one group.

    Blocks of scales become at most 32 columns wide. Raises BackendError for columns that are in that order already.
    """
    return _fused(weight, 1, GROUP_HEADS, OUTPUT_RUN)


def _fused(weight: Weight, dim: int, heads: int, run: int) -> FusedMatrix:
    if isinstance(weight, Matrix):
        raise BackendError(
            f"a {type(weight).__name__} {list(weight.data.shape)} was given to be put in the kernel's order: expected "
            "a weight in checkpoint layout, since a second time would mix all heads; take the layer's own"
        )
    # Run r of the new order: the same dims of head after head.
    runs = torch.arange(weight.shape[dim] // run, device=_device(weight)).view(heads, -1).t().flatten()
    if isinstance(weight, Tensor):
        return FusedMatrix(_moved(weight, runs, run, dim))
    # The longest piece of a dim that is moved as a whole and has one scale.
    piece = gcd(run, weight.block[dim])
    scale = weight.scale.repeat_interleave(weight.block[dim] // piece, dim).narrow(dim, 0, weight.shape[dim] // piece)
    block = (piece, weight.block[1]) if dim == 0 else (weight.block[0], piece)
    data = weight.data.view(torch.uint8)  # torch indexes no float8
    return FusedMatrix(_moved(data, runs, run, dim), _moved(scale, runs, run // piece, dim), block)


def _moved(x: Tensor, runs: Tensor, length: int, dim: int) -> Tensor:
    """`x` with its runs of `length` along `dim` in the order `runs`."""
    cut: Tensor = x.unflatten(dim, (-1, length))
    return cut.index_select(dim, runs).flatten(dim, dim + 1)


def _device(weight: Weight) -> torch.device:
    return weight.device if isinstance(weight, Tensor) else weight.data.device
