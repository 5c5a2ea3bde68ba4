"""Faults of ports, drawn up from the contract and from field reports alone: by someone who knew none of the checks.

Each is the reference with one mistake. A kit that lets one pass has a gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.hal.layout import PagedCache, ScalePlacement
from dsv41.hal.records import Dialect, pack, unpack
from dsv41.hal.types import AttnInputs, AttnOutput, ForwardBatch, LayerSpec, LayerState, Selection, StepPlan


def _with_caches(layer: LayerState, **caches: Any) -> LayerState:
    assert layer.caches is not None
    return replace(layer, caches=replace(layer.caches, **caches))


def _with_sink(layer: LayerState, sink: Tensor) -> LayerState:
    return replace(layer, weights=replace(layer.weights, attn_sink=sink))


# Padded heads


class LeakyHeadPadding(ReferenceBackend):
    """Padding heads are left as the allocator gave them, and all heads of a token share one scale on their way to
    fp16."""

    name = "leaky-head-padding"

    def get_padded_num_q_heads(self, num_heads: int) -> int:
        return max(16, num_heads)

    def _pad_heads(self, q: Tensor, spec: LayerSpec) -> Tensor:
        left_over = q.new_full((len(q), spec.padded_heads - spec.num_heads, spec.head_dim), 1e30)
        return torch.cat((q, left_over), dim=1)

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        wide = inputs.q.float()
        scale = wide.abs().amax((1, 2), keepdim=True).clamp_min(1e-30) / torch.finfo(torch.float16).max
        q = ((wide / scale).half() * scale).to(inputs.q.dtype)
        super().forward_mqa(replace(inputs, q=q), layer, selection, plan, out)


# Cache layouts


class PrivateDialect(ReferenceBackend):
    """Rows are written and read as FNUZ in caches that are declared OCP, so all is well until someone else reads
    them."""

    name = "private-dialect"

    def prepare_inputs(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> AttnInputs:
        return super().prepare_inputs(hidden, self._as_fnuz(layer), plan)

    def insert_window(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> None:
        super().insert_window(hidden, self._as_fnuz(layer), plan)

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        super().forward_mqa(inputs, self._as_fnuz(layer), selection, plan, out)

    def _as_fnuz(self, layer: LayerState) -> LayerState:
        def fnuz(cache: PagedCache | None) -> PagedCache | None:
            if cache is None or cache.layout.record.dialect is None:
                return cache
            record = replace(cache.layout.record, dialect=Dialect.FNUZ)
            return replace(cache, layout=replace(cache.layout, record=record))

        assert layer.caches is not None
        return _with_caches(layer, window=fnuz(layer.caches.window), compressed=fnuz(layer.caches.compressed))


class InterleavedIndexScales(ReferenceBackend):
    """Index keys are written with their scales after the page's values, and read with them after each key."""

    name = "interleaved-index-scales"

    def index_scores(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan) -> Tensor:
        assert layer.caches is not None
        assert layer.caches.index is not None
        keys = layer.caches.index
        if keys.layout.scale_placement is ScalePlacement.PAGE:
            keys = replace(keys, layout=replace(keys.layout, scale_placement=ScalePlacement.TOKEN))
        return super().index_scores(inputs, _with_caches(layer, index=keys), plan)


class TruncatingCast(ReferenceBackend):
    """Window rows are rounded to fp8 towards zero, not to the nearest code."""

    name = "truncating-cast"

    def _write_window(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> Tensor:
        kv = super()._write_window(hidden, layer, plan)
        assert layer.caches is not None
        cache = layer.caches.window
        record = cache.layout.record
        if record.dialect is not None and record.value_bytes == record.dim:
            values, scales = pack(record, kv, cache.tensor_scale)
            too_large = unpack(record, values, scales, cache.tensor_scale).abs() > kv.float().abs()
            cache.write_bytes(plan.window_slots, values - too_large.to(torch.uint8), scales)
        return kv


class CompactPages(ReferenceBackend):
    """Attention takes pages to lie one right after the other, and knows no page stride."""

    name = "compact-pages"

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        def compact(cache: PagedCache | None) -> PagedCache | None:
            if cache is None:
                return None
            layout = replace(cache.layout, alignment=1, page_stride=None)
            data = cache.data.as_strided((cache.num_pages, layout.page_bytes), (layout.page_bytes, 1))
            return replace(cache, layout=layout, data=data)

        assert layer.caches is not None
        caches = {"window": compact(layer.caches.window), "compressed": compact(layer.caches.compressed)}
        super().forward_mqa(inputs, _with_caches(layer, **caches), selection, plan, out)


# The plan


class SlotZeroPadding(ReferenceBackend):
    """Padding tokens write their window row to slot 0, which this port keeps for nobody."""

    name = "slot-zero-padding"

    def plan(self, batch: ForwardBatch, specs: Sequence[LayerSpec]) -> StepPlan:
        plan = super().plan(batch, specs)
        return replace(plan, window_slots=plan.window_slots.clamp(min=0))


class OpenGroupVisible(ReferenceBackend):
    """A query sees the compressed row of its own group before the group is closed."""

    name = "open-group-visible"

    def plan(self, batch: ForwardBatch, specs: Sequence[LayerSpec]) -> StepPlan:
        plan = super().plan(batch, specs)
        live = plan.token_request >= 0
        return replace(
            plan,
            num_visible={ratio: torch.where(live, batch.positions // ratio + 1, 0) for ratio in plan.num_visible},
            max_visible={ratio: visible + ratio - 1 for ratio, visible in plan.max_visible.items()},
        )


class UniformRequests(ReferenceBackend):
    """Tokens are dealt to requests as if each brought the same number of them, as in a step of decodes alone."""

    name = "uniform-requests"

    def plan(self, batch: ForwardBatch, specs: Sequence[LayerSpec]) -> StepPlan:
        requests = batch.num_requests
        starts = torch.arange(requests + 1, dtype=torch.int32) * (batch.num_tokens // max(requests, 1))
        on_device = starts.to(batch.positions.device)
        return super().plan(replace(batch, query_start_loc=on_device, query_start_loc_cpu=starts), specs)


# Inputs


class ShortRing(ReferenceBackend):
    """The compressor state keeps one group of tokens, however long its ring is, so rejected drafts overwrite rows that
    are needed again."""

    name = "short-ring"

    def prepare_inputs(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> AttnInputs:
        assert layer.caches is not None
        state = layer.caches.compressor_state
        if state is not None:
            layer = _with_caches(layer, compressor_state=state[:, : layer.spec.ratio])
        return super().prepare_inputs(hidden, layer, plan)


# Selection


class KeylessShortCut(ReferenceBackend):
    """Where all visible rows are selected, scoring is skipped and so is the writing of index keys, which later steps
    miss."""

    name = "keyless-short-cut"

    def _insert_index_keys(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan) -> None:
        if plan.max_visible[layer.spec.ratio] > layer.spec.topk:
            super()._insert_index_keys(inputs, layer, plan)


class SelfRestrictedSource(ReferenceBackend):
    """The layer that publishes candidate blocks chooses its own top-k inside them too."""

    name = "self-restricted-source"

    def select(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None) -> Selection:
        found = super().select(inputs, layer, plan, published)
        if not layer.spec.publishes_candidates:
            return found
        spec = replace(layer.spec, publishes_candidates=False, reads_candidates=True)
        return super().select(inputs, replace(layer, spec=spec), plan, found)


# Attention


class SinkTwice(ReferenceBackend):
    """Window and compressed rows are attended to in two calls, each with the sink, and merged by their log-sums."""

    name = "sink-twice"

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        if selection is not None:
            layer = _with_sink(layer, layer.weights.attn_sink + math.log(2))
        super().forward_mqa(inputs, layer, selection, plan, out)


class NoOverlap(ReferenceBackend):
    """A selected row whose tokens all lie in the window is left out, as if it were the same row twice."""

    name = "no-overlap"

    def attend(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, selection: Selection | None) -> AttnOutput:
        if selection is not None:
            oldest = (inputs.positions - layer.spec.window + 1)[:, None]
            covered = selection.topk_indices * layer.spec.ratio >= oldest
            selection = replace(selection, derived=selection.derived.masked_fill(covered, -1))
        return super().attend(inputs, layer, plan, selection)


# Output projection


class GroupsOfPaddedHeads(ReferenceBackend):
    """The output groups are cut from the padded heads, and the padding is dropped from the end of each group."""

    name = "groups-of-padded-heads"

    def get_padded_num_q_heads(self, num_heads: int) -> int:
        return 2 * num_heads

    def o_proj(self, out: AttnOutput, layer: LayerState, positions: Tensor) -> Tensor:
        spec = layer.spec
        groups = out.data.unflatten(1, (spec.o_groups, -1))
        live = groups[:, :, : spec.num_heads // spec.o_groups].flatten(1, 2)
        return super().o_proj(replace(out, data=live), layer, positions)


class OneRotaryTable(ReferenceBackend):
    """Outputs are rotated back by the table of the layer that came first, whatever the base of the others."""

    name = "one-rotary-table"
    _table: Tensor | None = None

    def project(self, out: AttnOutput, layer: LayerState, plan: StepPlan) -> Tensor:
        if self._table is None:
            self._table = layer.cos_sin
        return super().project(out, replace(layer, cos_sin=self._table), plan)


# Weights


class LazySinks(ReferenceBackend):
    """Sinks are copied to the kernel's own buffer at a layer's first step, so new weights come with the old sinks."""

    name = "lazy-sinks"

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self._sinks: dict[str, Tensor] = {}

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        sink = self._sinks.setdefault(layer.spec.name, layer.weights.attn_sink.clone())
        super().forward_mqa(inputs, _with_sink(layer, sink), selection, plan, out)


OUTSIDERS: list[tuple[type[ReferenceBackend], str]] = [
    (LeakyHeadPadding, "padded heads"),
    (PrivateDialect, "cache layout"),
    (InterleavedIndexScales, "cache layout"),
    (TruncatingCast, "cache layout"),
    (CompactPages, "cache layout"),
    (SlotZeroPadding, "plan"),
    (OpenGroupVisible, "plan"),
    (UniformRequests, "plan"),
    (ShortRing, "prepare_inputs"),
    (KeylessShortCut, "select"),
    (SelfRestrictedSource, "select"),
    (SinkTwice, "forward_mqa"),
    (NoOverlap, "attend"),
    (GroupsOfPaddedHeads, "o_proj"),
    (OneRotaryTable, "project"),
    (LazySinks, "prepare_weights"),
]
"""Every class, and the contract or segment that it violates."""
