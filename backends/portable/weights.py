"""A layer's weights as the kernels take them: fp8 as bytes, and matrices with the same input as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv41.hal.types import LayerState, LayerWeights, Weight


@dataclass(frozen=True)
class Matrix:
    """`data` `[out, in]`: uint8 e4m3 codes (OCP) with `scale`, one UE8M0 byte a block of `block`, or plain without."""

    data: Tensor
    scale: Tensor | None = None
    block: tuple[int, int] = (1, 1)

    @staticmethod
    def of(weight: Weight) -> Matrix:
        """The same memory, seen as bytes."""
        if isinstance(weight, Tensor):
            return Matrix(weight)
        return Matrix(weight.data.view(torch.uint8), weight.scale, weight.block)

    @property
    def rows(self) -> int:
        return self.data.shape[0]


@dataclass(frozen=True)
class PortableWeights:
    """`down` is `wq_a` and then `wkv`, and `compress` `wkv` and then `wgate` of the compressor, in one matrix each
    where they have one form. The other names are those of the checkpoint."""

    down: tuple[Matrix, ...]
    wq_b: Matrix
    wkv: Matrix
    wo_a: Matrix
    wo_b: Matrix
    compress: tuple[Matrix, ...] = ()
    index_wq_b: Matrix | None = None
    index_weights_proj: Matrix | None = None
    index_wk: Matrix | None = None

    @staticmethod
    def of(weights: LayerWeights) -> PortableWeights:
        compressor, indexer = weights.compressor, weights.indexer
        parts = [] if compressor is None else [compressor.wkv, compressor.wgate]
        return PortableWeights(
            down=joined([weights.wq_a, weights.wkv]),
            **{name: Matrix.of(getattr(weights, name)) for name in ("wq_b", "wkv", "wo_a", "wo_b")},
            compress=joined([part for part in parts if part is not None]),
            index_wq_b=None if indexer is None else Matrix.of(indexer.wq_b),
            index_weights_proj=None if indexer is None else Matrix.of(indexer.weights_proj),
            index_wk=None if indexer is None or indexer.wk is None else Matrix.of(indexer.wk),
        )


def joined(weights: Sequence[Weight]) -> tuple[Matrix, ...]:
    """One matrix of all rows where all are plain in one dtype, or fp8 in whole blocks of one shape; else each."""
    matrices = [Matrix.of(weight) for weight in weights]
    kinds = {(part.data.dtype, part.scale is not None, part.block, part.data.shape[1]) for part in matrices}
    if len(matrices) < 2 or len(kinds) > 1 or any(part.rows % part.block[0] for part in matrices[:-1]):
        return tuple(matrices)
    scales = [part.scale for part in matrices if part.scale is not None]
    return (
        Matrix(torch.cat([part.data for part in matrices]), torch.cat(scales) if scales else None, matrices[0].block),
    )


def padded_sink(layer: LayerState) -> Tensor:
    """The sink float32 `[Hp]`, -inf for heads that are padding, as libraries take it whose heads are padded."""
    padding = layer.spec.padded_heads - layer.spec.num_heads
    return torch.nn.functional.pad(layer.weights.attn_sink.float(), (0, padding), value=-torch.inf)


def types_of(weights: LayerWeights) -> dict[str, Any]:
    """What a step's kernels are compiled for beside shapes: the types of weights, and of activations as far as these
    tell (bf16 for fp8 weights)."""
    first, compressor = weights.wq_a, weights.compressor
    dtype, block = (first.dtype, None) if isinstance(first, Tensor) else (torch.bfloat16, first.block)
    return {
        "dtype": dtype,
        "block": block,
        "norms": weights.q_norm.dtype,
        "compressors": torch.float32 if compressor is None else compressor.wkv.dtype,
    }
