"""What the two FlashInfer backends share: the library, heads and sinks that are padded, the last projection."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from dsv41.backends.cuda import flashinfer_gemm
from dsv41.backends.cuda.flashinfer_tables import SlotTables, page_rows
from dsv41.backends.portable.backend import PortableBackend
from dsv41.backends.portable.weights import PortableWeights, padded_sink
from dsv41.backends.portable.workspace import capturing
from dsv41.backends.vendor import load
from dsv41.errors import BackendError, LayoutError
from dsv41.hal.builtin import INSTALL_FLASHINFER
from dsv41.hal.layout import CacheLayout, PagedCache
from dsv41.hal.requirements import padded_heads
from dsv41.hal.types import LayerCaches, LayerSpec, LayerState, StepPlan

HEADS = (8, 16, 32, 64, 128)
_ROWS = 2**31 - 1
"""What an int32 index reaches."""
_ALIGNED = 16


@dataclass(frozen=True)
class FlashInferWeights(PortableWeights):
    """`sink` float32 `[Hp]`, -inf for heads that are padding; `wo_b_scales` as `flashinfer_gemm.tiled_scales`, None
    where the portable product does it."""

    sink: Tensor | None = None
    wo_b_scales: Tensor | None = None


class FlashInferBackend(PortableBackend):
    """Everything but attention, and the product with `wo_b`, is the portable backend's."""

    fuses_rotation: ClassVar[bool] = False

    def __init__(self, **options: Any) -> None:
        self.library = load("flashinfer.mla", INSTALL_FLASHINFER)
        self.gemm = load("flashinfer.gemm", INSTALL_FLASHINFER)
        super().__init__(**options)
        self._multiplies = hasattr(self.gemm, "mm_mxfp8")

    @property
    def entry(self) -> Callable[..., Tensor]:
        """The library's attention."""
        function: Callable[..., Tensor] = self.library.trtllm_batch_decode_sparse_mla_dsv4
        return function

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Of the entry; later versions have more."""
        return inspect.signature(self.entry).parameters

    def get_padded_num_q_heads(self, num_heads: int) -> int:
        padded = padded_heads(HEADS, num_heads) if num_heads > 0 else None
        if padded is None:
            raise BackendError(
                f"{self.name} was given {num_heads} query heads on a rank: expected 1 to {max(HEADS)}; use a larger "
                "tp_size, or another backend"
            )
        return padded

    def check_caches(self, spec: LayerSpec, caches: LayerCaches) -> None:
        super().check_caches(spec, caches)
        self.check_pool(f"the window cache of {spec.name}", caches.window, self.layouts.window)
        if spec.ratio and caches.compressed is not None:
            self.check_pool(f"the compressed cache of {spec.name}", caches.compressed, self.layouts.compressed)

    def check_pool(self, what: str, cache: PagedCache, layout: CacheLayout) -> None:
        """Raise LayoutError where the library would misread a cache that this backend wants in `layout`."""
        try:
            cache.expect(layout.with_page_size(cache.layout.page_size), self.name)
        except LayoutError as error:
            raise LayoutError(f"{what}: {error}") from None
        stride = cache.data.stride(0) if cache.num_pages > 1 else 0
        for place, number in (("first byte", cache.data.data_ptr()), ("page stride", stride)):
            if number % _ALIGNED:
                raise LayoutError(
                    f"{what} has its {place} at {number}: expected a multiple of {_ALIGNED} bytes, as the library "
                    "loads it; align it"
                )
        if cache.num_pages * page_rows(cache) > _ROWS:
            raise LayoutError(
                f"{what} has {cache.num_pages} pages of {page_rows(cache)} rows: expected at most {_ROWS} rows in all, "
                "which int32 indices reach; give it fewer pages"
            )

    def prepare_weights(self, layer: LayerState) -> FlashInferWeights:
        portable, wo_b = super().prepare_weights(layer), layer.weights.wo_b
        return FlashInferWeights(
            **{part.name: getattr(portable, part.name) for part in fields(PortableWeights)},
            sink=padded_sink(layer),
            wo_b_scales=flashinfer_gemm.tiled_scales(wo_b) if layer.spec.quantize_activations else None,
        )

    def complete_plan(self, plan: StepPlan, specs: Sequence[LayerSpec]) -> StepPlan:
        return replace(plan, extra=SlotTables(plan.window_indices))

    def complete_selection(self, slots: Tensor) -> SlotTables:
        return SlotTables(slots)

    def project_latent(self, latent: Tensor, layer: LayerState) -> Tensor:
        prepared = prepared_of(layer)
        if prepared.wo_b_scales is None or not self._multiplies or latent.dtype != torch.bfloat16:
            return super().project_latent(latent, layer)
        try:
            return flashinfer_gemm.product(self.gemm, latent, prepared.wo_b, prepared.wo_b_scales)
        except BackendError as error:
            if capturing(self.device):
                raise
            # It compiles this product when it is first called, and that takes headers which attention does without.
            warnings.warn(f"{error}. From now on the portable kernels do this product", RuntimeWarning, stacklevel=2)
            self._multiplies = False
            return super().project_latent(latent, layer)


def prepared_of(layer: LayerState) -> FlashInferWeights:
    assert isinstance(layer.prepared, FlashInferWeights)
    return layer.prepared


def tables_of(derived: Any) -> SlotTables:
    """`StepPlan.extra` or `Selection.derived`, which this backend made."""
    assert isinstance(derived, SlotTables)
    return derived
