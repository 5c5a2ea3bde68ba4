"""The backend: what the Toy A1 does better is replaced, the rest is the reference's.

A port for a device that Triton compiles for would inherit `PortableBackend` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import toyaccel
from torch import Tensor
from toyaccel.attention import Part

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.errors import BackendError
from dsv41.hal.layout import CacheLayouts, PagedCache
from dsv41.hal.requirements import padded_heads
from dsv41.hal.types import AttnInputs, AttnOutput, LayerCaches, LayerSpec, LayerState, Selection, StepPlan
from dsv41_toy.layouts import check_cache, resolve_layouts
from dsv41_toy.spec import HEADS

FARTHEST = 1e30
"""A sink at which nothing in float32 tells it from inf."""


@dataclass(frozen=True)
class Rows:
    """Slots as the library wants them: the first `lengths[t]` (int32 `[T]`) of `rows[t]` (int32 `[T, K]`)."""

    rows: Tensor
    lengths: Tensor

    @staticmethod
    def of(slots: Tensor) -> Rows:
        """From slots `[T, K]` with -1 at any place, which must not be read as a row."""
        order = (slots < 0).to(torch.int8).argsort(dim=1, stable=True)
        return Rows(slots.gather(1, order).int(), (slots >= 0).sum(1, dtype=torch.int32))


@dataclass(frozen=True)
class ToyWeights:
    """The `sink` float32 `[Hp]`; that of padded heads is -inf, and none is inf, which the library cannot subtract."""

    sink: Tensor


class ToyBackend(ReferenceBackend):
    """Attention and index scores by toyaccel."""

    name = "toy"
    packed_kv_cache_dtype = "fp8_ds_mla"

    # Contract 1

    def get_padded_num_q_heads(self, num_heads: int) -> int:
        padded = padded_heads(HEADS, num_heads)
        if padded is None:
            raise BackendError(f"{num_heads} heads a rank: toy takes up to {HEADS[-1]}; use a larger tp_size")
        return padded

    # Contract 2

    def resolve_layouts(self, kv_cache_dtype: str, index_cache_dtype: str) -> tuple[str, str, CacheLayouts]:
        return resolve_layouts(kv_cache_dtype, index_cache_dtype)

    def check_caches(self, spec: LayerSpec, caches: LayerCaches) -> None:
        check_cache(caches.window, self.layouts.window)
        if caches.compressed is not None and caches.index is not None:
            check_cache(caches.compressed, self.layouts.compressed)
            check_cache(caches.index, self.layouts.index)

    # Contract 3

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        caches, weights = layer.caches, layer.prepared
        assert caches is not None and isinstance(weights, ToyWeights)
        parts = [_part(caches.window, plan.extra)]
        if selection is not None:
            assert caches.compressed is not None
            parts.append(_part(caches.compressed, selection.derived))
        # The library leaves tokens without a row as they are, and padded heads are nobody's to read.
        out.data.zero_()
        toyaccel.attend(inputs.q.contiguous(), parts, weights.sink, layer.spec.scale, out.data)

    # Contract 4, `o_proj`, is the reference's: it drops the padded heads.

    # Hooks

    def complete_plan(self, plan: StepPlan, specs: Sequence[LayerSpec]) -> StepPlan:
        return replace(plan, extra=Rows.of(plan.window_indices))

    def complete_selection(self, slots: Tensor) -> Rows:
        return Rows.of(slots)

    def prepare_weights(self, layer: LayerState) -> ToyWeights:
        super().prepare_weights(layer)
        spec, sink = layer.spec, layer.weights.attn_sink.float().clamp(max=FARTHEST)
        return ToyWeights(torch.nn.functional.pad(sink, (0, spec.padded_heads - spec.num_heads), value=-torch.inf))

    # One more op

    def index_scores(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan) -> Tensor:
        assert layer.caches is not None and layer.caches.index is not None
        keys, ratio = layer.caches.index, layer.spec.ratio
        query, head_weights = self.index_queries(inputs, layer)
        return toyaccel.score(
            query,
            head_weights,
            keys.data,
            keys.layout.page_size,
            plan.batch.compressed_tables[ratio].pages,
            plan.token_request,
            plan.max_visible[ratio],
        )


def _part(cache: PagedCache, rows: Rows) -> Part:
    form = "mxfp8" if cache.layout.record.scale_bytes else "bf16"
    return Part(cache.data, cache.layout.page_size, form, rows.rows, rows.lengths)
