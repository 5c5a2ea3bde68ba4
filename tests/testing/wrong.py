"""Backends that are wrong on purpose, each in one way, and the clause that has to say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.backends.reference.norm import rotate
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.layout import CacheLayout, CacheLayouts, PagedCache
from dsv41.hal.records import RECORDS
from dsv41.hal.types import (
    AttnInputs,
    AttnOutput,
    BlockScaledWeight,
    ForwardBatch,
    LayerSpec,
    LayerState,
    Selection,
    StepPlan,
)


def relabelled(layer: LayerState, relabel: Any) -> LayerState:
    """The layer over the same bytes in other layouts."""
    caches = layer.caches
    assert caches is not None

    def seen(cache: PagedCache | None) -> PagedCache | None:
        if cache is None:
            return None
        return PagedCache(relabel(cache.layout), cache.data, cache.scale_pool, cache.tensor_scale)

    window = seen(caches.window)
    assert window is not None
    return replace(layer, caches=replace(caches, window=window, compressed=seen(caches.compressed)))


class Reference(ReferenceBackend):
    """The reference, seeing a layer and a plan as the others make it see them."""

    name = "wrong"

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        super().forward_mqa(inputs, self.seen(layer), selection, self.believed(plan), out)

    def seen(self, layer: LayerState) -> LayerState:
        return layer

    def believed(self, plan: StepPlan) -> StepPlan:
        return plan


# Declarations


class TooFewHeads(Reference):
    def get_padded_num_q_heads(self, num_heads: int) -> int:
        return num_heads // 8 * 8 or 8


class AutoIsAnother(Reference):
    packed_kv_cache_dtype = "fp8_ds_mla"


class TakesAnyName(Reference):
    def resolve_layouts(self, kv_cache_dtype: str, index_cache_dtype: str) -> tuple[str, str, CacheLayouts]:
        known = "auto" if kv_cache_dtype.startswith("no-") else kv_cache_dtype
        return super().resolve_layouts(known, index_cache_dtype)


# Records


class ScalesWhereItPutsThem(Reference):
    """Looks for scales where its own layouts have them, whatever is bound."""

    def seen(self, layer: LayerState) -> LayerState:
        def own(layout: CacheLayout) -> CacheLayout:
            usual = self.layouts.window if layout.record == self.layouts.window.record else self.layouts.compressed
            if usual.record != layout.record or layout.value_tile or layout.pool_page_bytes:
                return layout
            return replace(layout, scale_placement=usual.scale_placement)

        return relabelled(layer, own)


class FnuzAsOcp(Reference):
    def seen(self, layer: LayerState) -> LayerState:
        def ocp(layout: CacheLayout) -> CacheLayout:
            return replace(layout, record=RECORDS[layout.record.name.removesuffix("_fnuz")])

        return relabelled(layer, ocp)


class NarrowOffsets(Reference):
    """Byte offsets wrap at 2**31."""

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        assert layer.caches is not None
        cache, slots = layer.caches.window, plan.window_indices
        size, stride = cache.layout.page_size, cache.data.stride(0)
        wrapped = slots // size * stride % (1 << 31) // stride * size + slots % size
        narrow = replace(plan, window_indices=torch.where(slots >= 0, wrapped, -1))
        super().forward_mqa(inputs, layer, selection, narrow, out)


# Attention


class WithSinks(Reference):
    def sinks(self, sink: Tensor) -> Tensor:
        raise NotImplementedError

    def seen(self, layer: LayerState) -> LayerState:
        return replace(layer, weights=replace(layer.weights, attn_sink=self.sinks(layer.weights.attn_sink)))


class SinkIgnored(WithSinks):
    def sinks(self, sink: Tensor) -> Tensor:
        return torch.full_like(sink, -torch.inf)


class SinkScaled(WithSinks):
    def sinks(self, sink: Tensor) -> Tensor:
        return sink * 512**-0.5


class SinksOfPaddedHeads(WithSinks):
    """Pads on the wrong side, so that live heads get the sinks of padded ones."""

    def sinks(self, sink: Tensor) -> Tensor:
        return torch.cat((torch.full_like(sink[:1], -torch.inf), sink[:-1]))


class WindowTooShort(Reference):
    def believed(self, plan: StepPlan) -> StepPlan:
        return replace(plan, window_indices=plan.window_indices[:, 1:])


class WindowTooLong(Reference):
    def plan(self, batch: ForwardBatch, specs: Sequence[LayerSpec]) -> StepPlan:
        return super().plan(batch, [replace(spec, window=spec.window + 1) for spec in specs])


class CausalDrafts(Reference):
    """A query of a draft block does not see the rows behind it."""

    def believed(self, plan: StepPlan) -> StepPlan:
        if plan.batch.causal:
            return plan
        behind = plan.window_slots[None, :] == plan.window_indices[:, :, None]
        later = behind & (plan.batch.positions[None, :] > plan.batch.positions[:, None])[:, None, :]
        return replace(plan, window_indices=plan.window_indices.masked_fill(later.any(-1), -1))


class ReplaysTooMuch(Reference):
    def plan(self, batch: ForwardBatch, specs: Sequence[LayerSpec]) -> StepPlan:
        return super().plan(replace(batch, window_starts=torch.zeros_like(batch.window_starts)), specs)


class CountsOnce(Reference):
    """Drops selected rows that the window shows."""

    def prepare_selection(self, selection: Selection, layer: LayerState, plan: StepPlan) -> Selection:
        ratio = layer.spec.ratio
        first = (plan.batch.positions - layer.spec.window + 1).clamp(min=0)
        shown = selection.topk_indices * ratio >= first[:, None]
        return super().prepare_selection(
            replace(selection, topk_indices=selection.topk_indices.masked_fill(shown, -1)), layer, plan
        )


class ReadsTheLastRow(Reference):
    """-1 reads the row before the first, which is the last."""

    def complete_selection(self, slots: Tensor) -> Tensor:
        return torch.where(slots < 0, 3, slots)


class StalePadding(Reference):
    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        made = AttnOutput(torch.empty_like(out.data))
        super().forward_mqa(inputs, layer, selection, plan, made)
        live = plan.token_request >= 0
        out.data[live] = made.data[live]


class LeaksNaN(Reference):
    """Multiplies rows that it should not read by zero."""

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        super().forward_mqa(inputs, layer, selection, plan, out)
        assert layer.caches is not None
        cache = layer.caches.window
        every = torch.arange(cache.num_slots, device=out.data.device)
        out.data[plan.token_request >= 0] += (0 * cache.read(every).sum()).to(out.data.dtype)


class Wavers(Reference):
    calls = 0

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        super().forward_mqa(inputs, layer, selection, plan, out)
        self.calls += 1
        out.data *= 1 + self.calls % 2 * 2.0**-7


# Projection


class NeverRotatedBack(Reference):
    def o_proj(self, out: AttnOutput, layer: LayerState, positions: Tensor) -> Tensor:
        return super().o_proj(replace(out, rotated_back=True), layer, positions)


class GroupsMixed(Reference):
    """Takes heads in turn instead of group by group."""

    def o_proj(self, out: AttnOutput, layer: LayerState, positions: Tensor) -> Tensor:
        heads, groups = layer.spec.num_heads, layer.spec.o_groups
        order = torch.arange(heads).view(groups, -1).flip(0).flatten()
        return super().o_proj(replace(out, data=out.data[:, order]), layer, positions)


# Inputs, keys and choices


class RotatesAtTheGroupsEnd(Reference):
    def _group_start(self, layer: LayerState, plan: StepPlan) -> Tensor:
        return plan.batch.positions.clamp(min=0)


class ForgetsOpenGroups(Reference):
    """Every step begins with an empty compressor."""

    def prepare_inputs(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> AttnInputs:
        inputs = super().prepare_inputs(hidden, layer, plan)
        if layer.caches is not None and layer.caches.compressor_state is not None:
            layer.caches.compressor_state.zero_()
        return inputs


class WritesPadding(Reference):
    """Padding goes to the first row of the pool."""

    def plan(self, batch: ForwardBatch, specs: Sequence[LayerSpec]) -> StepPlan:
        plan = super().plan(batch, specs)
        padding = (plan.token_request < 0) & (torch.arange(batch.num_tokens) == batch.num_tokens - 1)
        return replace(plan, window_slots=plan.window_slots.masked_fill(padding, 0))


class NoRelu(Reference):
    def index_scores(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan) -> Tensor:
        negative = replace(inputs, hidden=-inputs.hidden)
        return super().index_scores(inputs, layer, plan) + super().index_scores(negative, layer, plan).abs()


class SeesTheFuture(Reference):
    def select(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None) -> Selection:
        found = super().select(inputs, layer, plan, published)
        rows = found.topk_indices.clone()
        rows[:, 0] = plan.num_visible[layer.spec.ratio]
        return replace(found, topk_indices=rows)


class NewestNotPinned(Reference):
    def select(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None) -> Selection:
        found, spec = super().select(inputs, layer, plan, published), layer.spec
        if not spec.publishes_candidates or found.candidates is None:
            return found
        newest = (plan.num_visible[spec.ratio] - 1) // spec.candidate_block_size
        free = torch.stack([self._unused(row) for row in found.candidates])
        return replace(
            found, candidates=torch.where(found.candidates == newest[:, None], free[:, None], found.candidates)
        )

    @staticmethod
    def _unused(row: Tensor) -> Tensor:
        return torch.tensor(next((block for block in range(64) if block not in row.tolist()), 0))


class IgnoresCandidates(Reference):
    def select(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None) -> Selection:
        free = replace(layer, spec=replace(layer.spec, reads_candidates=False))
        return super().select(inputs, free, plan, published)


# Capture and weights


class WaitsForTheDevice(Reference):
    supports_graph_capture = True

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        if int(plan.batch.seq_lens.max()) > 0:
            super().forward_mqa(inputs, layer, selection, plan, out)


class PreparesInPlace(Reference):
    """Turns the rows of `wq_b` around where they lie, so that the second time turns them back."""

    def prepare_weights(self, layer: LayerState) -> Any:
        weight = layer.weights.wq_b
        data = weight.data if isinstance(weight, BlockScaledWeight) else weight
        data.view(torch.uint8).copy_(data.view(torch.uint8).flip(0))
        return None


class KeepsOldWeights(Reference):
    """Norms by a copy of the weights that it was first given, which no update reaches."""

    def prepare_weights(self, layer: LayerState) -> Any:
        self.kept = getattr(self, "kept", {})
        self.kept[layer.weights.q_norm] = layer.weights.q_norm.clone()
        return None

    def prepare_inputs(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> AttnInputs:
        old = replace(layer.weights, q_norm=self.kept[layer.weights.q_norm])
        return super().prepare_inputs(hidden, replace(layer, weights=old), plan)


class TurnsKeysTwice(Reference):
    """Index keys are rotated once more than they should be."""

    def _insert_index_keys(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan) -> None:
        assert inputs.latent is not None
        turned = rotate(inputs.latent, self._group_start(layer, plan), layer.cos_sin)
        super()._insert_index_keys(replace(inputs, latent=turned), layer, plan)


WRONG: list[tuple[type[AttentionBackend], str]] = [
    (TooFewHeads, "H1"),
    (TakesAnyName, "L1"),
    (AutoIsAnother, "L2"),
    (ForgetsOpenGroups, "P3"),
    (RotatesAtTheGroupsEnd, "P2"),
    (TurnsKeysTwice, "S1"),
    (NoRelu, "S2"),
    (SeesTheFuture, "S3"),
    (NewestNotPinned, "S4"),
    (IgnoresCandidates, "S5"),
    (WindowTooShort, "M1"),
    (WindowTooLong, "M2"),
    (CausalDrafts, "M5"),
    (SinksOfPaddedHeads, "M7"),
    (ScalesWhereItPutsThem, "M9"),
    (FnuzAsOcp, "M9"),
    (SinkIgnored, "M10"),
    (SinkScaled, "M10"),
    (CountsOnce, "M11"),
    (ReplaysTooMuch, "M12"),
    (NeverRotatedBack, "O1"),
    (GroupsMixed, "O1"),
    (WaitsForTheDevice, "G1"),
    (LeaksNaN, "R1"),
    (WritesPadding, "R2"),
    (StalePadding, "R3"),
    (ReadsTheLastRow, "R4"),
    (NarrowOffsets, "R7"),
    (Wavers, "T1"),
    (PreparesInPlace, "U1"),
    (KeepsOldWeights, "U4"),
]
"""A backend, and the clause that must fail on it. With a contract or a stage in its place, one of its clauses must."""
