"""Projections of up to 256 tokens by our products for Hopper, and of more by the portable kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.backends.cuda import products, products_wide
from dsv41.backends.portable.backend import Codes, PortableBackend
from dsv41.backends.portable.weights import Matrix
from dsv41.hal.types import LayerState


class ProjectsOnHopper(PortableBackend):
    """Ours are taken where `multiplies_on_hopper` says so and the kernel reads what it is given."""

    @property
    def multiplies_on_hopper(self) -> bool:
        """Whether our products may be used."""
        return False

    def project_groups(self, heads: Tensor, scale: Tensor | None, layer: LayerState, dtype: torch.dtype) -> Tensor:
        wo_a = layer.prepared.wo_a
        latent = torch.empty(len(heads), wo_a.rows, dtype=dtype, device=heads.device)
        if scale is None and self._takes(heads, wo_a, latent):
            self.multiply_on_hopper(heads, wo_a, latent)
            return latent
        return super().project_groups(heads, scale, layer, dtype)

    def _product(self, x: Tensor, matrix: Matrix, codes: Codes | None = None, out: Tensor | None = None) -> Tensor:
        out = x.new_empty(len(x), matrix.rows) if out is None else out
        if codes is None and self._takes(x[:, None], matrix, out):
            self.multiply_on_hopper(x[:, None], matrix, out)
            return out
        return super()._product(x, matrix, codes, out)

    def multiply_on_hopper(self, x: Tensor, matrix: Matrix, out: Tensor) -> None:
        """`x` `[N, groups, in]` by `matrix` into `out` `[N, groups * rows]`."""
        multiply = products.products if len(x) <= products.MOST_TOKENS else products_wide.products_wide
        multiply(x, matrix.data, matrix.scale, out)

    def _takes(self, x: Tensor, matrix: Matrix, out: Tensor) -> bool:
        if not self.multiplies_on_hopper or len(x) > products_wide.MOST_TOKENS or matrix.block != products.BLOCK:
            return False
        misread = products.misread if len(x) <= products.MOST_TOKENS else products_wide.misread
        return not misread(x, matrix.data, matrix.scale, out)
