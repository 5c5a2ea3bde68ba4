"""What is around attention on ROCm: products by aiter where these are exact, and one fork in captured steps.

A layer's queries and its compressed rows come from the same hidden states and touch nothing of one another's, so a
captured step computes them side by side.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dsv41.backends.portable.backend import PortableBackend
from dsv41.backends.portable.fork import Fork
from dsv41.backends.portable.weights import Matrix, PortableWeights
from dsv41.backends.portable.workspace import capturing
from dsv41.backends.rocm.matrices import TiledMatrix, coarse, fine
from dsv41.backends.rocm.products import asked_products, grouped_product, product
from dsv41.backends.vendor import load
from dsv41.errors import BackendError
from dsv41.hal.aiter_ops import BLOCK128, PORTABLE
from dsv41.hal.arch import ARCHS
from dsv41.hal.builtin import INSTALL_AITER
from dsv41.hal.libraries import inspect
from dsv41.hal.records import Dialect
from dsv41.hal.types import AttnInputs, LayerState, StepPlan, Weight


class RocmBackend(PortableBackend):
    """`products` is what DSV41_AITER_PRODUCTS named when this was made: one of AITER_PRODUCTS.

    `max_tokens_for_overlap` was not tuned; with many tokens each branch fills the GPU alone.
    """

    max_tokens_for_overlap = 256

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.products = asked_products()
        self.fork = Fork.of(self.device)
        self.failed: dict[str, str] = {}
        """What those of the library's modules said that failed. The portable kernels do their work since."""

    @cached_property
    def features(self) -> frozenset[str]:
        """What the installed aiter can do, as `dsv41 probe` says it too."""
        return inspect("aiter", str(torch.__version__)).features

    @cached_property
    def gemm(self) -> Any:
        """Raises BackendError where it cannot be imported, as `bmm` does."""
        return load("aiter.ops.gemm_op_a8w8", INSTALL_AITER)

    @cached_property
    def bmm(self) -> Any:
        return load("aiter.ops.batched_gemm_op_a8w8", INSTALL_AITER)

    def prepare_weights(self, layer: LayerState) -> PortableWeights:
        """The matrices that the library multiplies by are in tiles, the others as the portable kernels take them."""
        plain, weights, groups = super().prepare_weights(layer), layer.weights, layer.spec.o_groups
        rounds = layer.spec.quantize_activations
        wo_a = fine([weights.wo_a], groups) if rounds and self._knows_mxfp8("bmm_mxfp8") else None
        wo_b = self._tiled([weights.wo_b], rounds)
        down = self._tiled([weights.wq_a, weights.wkv], rounds)
        return replace(
            plain, wo_a=wo_a or plain.wo_a, wo_b=wo_b or plain.wo_b, down=plain.down if down is None else (down,)
        )

    def prepare_inputs(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> AttnInputs:
        forks = layer.spec.owns_compressed and len(hidden) <= self.max_tokens_for_overlap and self.fork.is_open
        if not forks:
            return super().prepare_inputs(hidden, layer, plan)
        hidden = hidden.contiguous()
        with self.fork.branch():
            latent = self.insert_compressed(hidden, layer, plan)
        inputs = self.project_inputs(hidden, layer, plan)
        self.fork.join()
        return replace(inputs, latent=latent)

    def project_down(self, hidden: Tensor, layer: LayerState) -> Tensor:
        matrix = _prepared(layer).down[0]
        if isinstance(matrix, TiledMatrix):
            made = self._by_library("gemm", hidden.dtype, lambda: product(self.gemm, hidden, matrix))
            if made is not None:
                return made
            layer = _untiled(layer)
        return super().project_down(hidden, layer)

    def project_groups(self, heads: Tensor, scale: Tensor | None, layer: LayerState, dtype: torch.dtype) -> Tensor:
        matrix = _prepared(layer).wo_a
        if isinstance(matrix, TiledMatrix):
            assert scale is not None
            made = self._by_library("bmm", dtype, lambda: grouped_product(self.bmm, heads, scale, matrix))
            if made is not None:
                return made
            layer = _untiled(layer)
        return super().project_groups(heads, scale, layer, dtype)

    def project_latent(self, latent: Tensor, layer: LayerState) -> Tensor:
        matrix = _prepared(layer).wo_b
        if isinstance(matrix, TiledMatrix):
            made = self._by_library("gemm", latent.dtype, lambda: product(self.gemm, latent, matrix))
            if made is not None:
                return made
            layer = _untiled(layer)
        return super().project_latent(latent, layer)

    def _tiled(self, weights: Sequence[Weight], rounds: bool) -> TiledMatrix | None:
        """The rows of all `weights` for the library's product, of activations that the layer `rounds` to MXFP8 or not;
        None where the portable product takes them."""
        if rounds and self._knows_mxfp8("gemm_mxfp8") and (matrix := fine(weights)) is not None:
            return matrix
        if self.products == BLOCK128 and "gemm_blockscale" in self.features:
            return coarse(weights, Dialect(str(ARCHS[self.arch].fp8_dialect)))
        return None

    def _knows_mxfp8(self, feature: str) -> bool:
        return self.products != PORTABLE and self.arch == "gfx950" and feature in self.features

    def _by_library(self, module: str, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor | None:
        """What `make` makes of activations in `dtype`. None where the library has no such product, or where one of
        `module` failed, now or before: what is missing in an installation shows at the first call."""
        if dtype != torch.bfloat16 or module in self.failed:
            return None
        try:
            return make()
        except BackendError as error:
            if capturing(self.device):
                raise
            warnings.warn(f"{error}. From now on the portable kernels do this product", RuntimeWarning, stacklevel=4)
            self.failed[module] = str(error)
            return None


def _prepared(layer: LayerState) -> PortableWeights:
    assert isinstance(layer.prepared, PortableWeights)
    return layer.prepared


def _untiled(layer: LayerState) -> LayerState:
    """The layer with the matrices of its checkpoint, which are in memory as they are."""
    prepared, weights = _prepared(layer), layer.weights
    down = (Matrix.of(weights.wq_a), Matrix.of(weights.wkv))
    return replace(
        layer, prepared=replace(prepared, down=down, wo_a=Matrix.of(weights.wo_a), wo_b=Matrix.of(weights.wo_b))
    )
