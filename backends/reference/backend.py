"""The reference backend: `model.md` in torch, rounding where it says and fp32 between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv41.backends.reference import attention, compress, index
from dsv41.backends.reference.layouts import resolve_layouts
from dsv41.backends.reference.linear import grouped_linear, linear
from dsv41.backends.reference.norm import rms_norm, rotate
from dsv41.backends.reference.planning import make_plan, slots_of
from dsv41.backends.reference.quantize import round_trip
from dsv41.errors import InputError
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.codecs import count_nan
from dsv41.hal.layout import CacheLayouts
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


class ReferenceBackend(AttentionBackend):
    """Every op and segment in plain torch, on any device, over any layout that is bound to a layer."""

    name = "reference"
    packed_kv_cache_dtype = "nvfp4_ds_mla"
    replays_window = True

    # The four contracts

    def get_padded_num_q_heads(self, num_heads: int) -> int:
        return num_heads

    def resolve_layouts(self, kv_cache_dtype: str, index_cache_dtype: str) -> tuple[str, str, CacheLayouts]:
        return resolve_layouts(kv_cache_dtype, index_cache_dtype)

    def alloc_attn_out(self, inputs: AttnInputs, layer: LayerState) -> AttnOutput:
        return AttnOutput(torch.empty_like(inputs.q))

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        caches, heads, dtype = layer.caches, layer.spec.num_heads, inputs.q.dtype
        assert caches is not None
        parts = [attention.gather(caches.window, plan.window_indices, dtype)]
        if selection is not None:
            assert caches.compressed is not None
            parts.append(attention.gather(caches.compressed, selection.derived, dtype))
        live = attention.sparse_mqa(inputs.q[:, :heads], parts, layer.weights.attn_sink, layer.spec.scale)
        out.data.zero_()
        out.data[:, :heads] = torch.where(plan.token_request[:, None, None] >= 0, live, 0)

    def o_proj(self, out: AttnOutput, layer: LayerState, positions: Tensor) -> Tensor:
        spec, weights = layer.spec, layer.weights
        heads = out.data[:, : spec.num_heads]
        if not out.rotated_back:
            heads = rotate(heads, positions, layer.cos_sin, inverse=True)
        tokens, width = heads.shape[0], spec.num_heads // spec.o_groups * spec.head_dim
        grouped = heads.reshape(tokens, spec.o_groups, width)
        latent = grouped_linear(grouped, weights.wo_a, quantize=spec.quantize_activations)
        return linear(latent, weights.wo_b, quantize=spec.quantize_activations)

    # Hooks

    def plan(self, batch: ForwardBatch, specs: Sequence[LayerSpec]) -> StepPlan:
        return self.complete_plan(make_plan(batch, specs[0].window), specs)

    def prepare_selection(self, selection: Selection, layer: LayerState, plan: StepPlan) -> Selection:
        """`derived` int64 `[T, K]`: the slots of the selected rows, -1 = none, as for one that the query cannot see."""
        rows, ratio = selection.topk_indices, layer.spec.ratio
        request = torch.where(rows < plan.num_visible[ratio][:, None], plan.token_request[:, None], -1)
        slots = slots_of(plan.batch.compressed_tables[ratio], request, rows)
        return Selection(rows, selection.candidates, self.complete_selection(slots))

    def prepare_weights(self, layer: LayerState) -> Any:
        """Nothing to prepare; NaN codes, which `widen` does not know, are refused here once."""
        weights = layer.weights
        projections = {name: getattr(weights, name) for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")}
        if weights.indexer is not None:
            projections["indexer.wq_b"] = weights.indexer.wq_b
        for name, weight in projections.items():
            if isinstance(weight, BlockScaledWeight) and (count := count_nan(weight)):
                raise InputError(
                    f"{layer.spec.name}.{name}.weight holds {count} NaN values: expected finite fp8 codes and scales; "
                    "the checkpoint is damaged, fetch this shard again"
                )
        return None

    def single_products(self, layer: LayerState) -> dict[str, Callable[[Tensor], Tensor]]:
        """The products with a layer's large matrices, for who times them one by one: each of `[T, in]`, but that with
        `wo_a` of `[T, groups, in]`."""
        weights, quantize = layer.weights, layer.spec.quantize_activations

        def down(hidden: Tensor) -> Tensor:
            return torch.cat([linear(hidden, each, quantize=quantize) for each in (weights.wq_a, weights.wkv)], dim=-1)

        found: dict[str, Callable[[Tensor], Tensor]] = {
            "wq_a, wkv": down,
            "wq_b": partial(linear, weight=weights.wq_b, quantize=quantize),
            "wo_a": partial(grouped_linear, weight=weights.wo_a, quantize=quantize),
            "wo_b": partial(linear, weight=weights.wo_b, quantize=quantize),
        }
        if weights.indexer is not None:
            found["indexer's wq_b"] = partial(linear, weight=weights.indexer.wq_b, quantize=quantize)
        return found

    # The segments

    def prepare_inputs(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> AttnInputs:
        spec, weights, caches = layer.spec, layer.weights, layer.caches
        assert caches is not None
        positions = plan.batch.positions
        quantize = spec.quantize_activations

        qr = rms_norm(linear(hidden, weights.wq_a, quantize=quantize), weights.q_norm, spec.eps)
        q = linear(qr, weights.wq_b, quantize=quantize).view(-1, spec.num_heads, spec.head_dim)
        q = self._pad_heads(rotate(q, positions, layer.cos_sin), spec)
        kv = self._write_window(hidden, layer, plan)

        latent = None
        if spec.owns_compressed:
            assert caches.compressed is not None
            latent = compress.compress(hidden, layer, plan)
            rotated = rotate(latent, self._group_start(layer, plan), layer.cos_sin)
            caches.compressed.write(plan.compressed_slots[spec.ratio], rotated)
        return AttnInputs(hidden, qr, q, kv, positions, latent)

    def insert_window(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> None:
        self._write_window(hidden, layer, plan)

    def select(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None) -> Selection:
        spec = layer.spec
        if spec.owns_compressed:
            self._insert_index_keys(inputs, layer, plan)
        visible, num_visible = plan.max_visible[spec.ratio], plan.num_visible[spec.ratio]
        position = torch.arange(visible, device=num_visible.device)
        allowed = position < num_visible[:, None]
        block_size, budget = spec.candidate_block_size, spec.candidate_blocks
        restricts = spec.publishes_candidates or spec.reads_candidates
        if visible <= spec.topk and (not restricts or -(-visible // block_size) <= budget):
            # Everything that a query can see is selected, so there is nothing to score.
            everything = torch.where(allowed, position, -1)
            blocks = published.candidates if published is not None else None
            if spec.publishes_candidates:
                number = torch.arange(-(-visible // block_size), device=position.device)
                blocks = torch.where(number * block_size < num_visible[:, None], number, -1)
            return Selection(everything, blocks)

        scores = self.index_scores(inputs, layer, plan)
        candidates = published.candidates if published is not None else None
        if spec.publishes_candidates:
            blocks = index.candidate_blocks(scores, num_visible, block_size, budget)
            return Selection(index.top_k(scores, allowed, spec.topk), blocks)
        if spec.reads_candidates and candidates is not None:
            allowed = allowed & index.in_blocks(candidates, visible, block_size)
        return Selection(index.top_k(scores, allowed, spec.topk), candidates)

    def index_scores(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan) -> Tensor:
        """As `index.index_scores` gives them."""
        assert layer.caches is not None and layer.caches.index is not None
        query, head_weight = self.index_queries(inputs, layer)
        return index.index_scores(query, head_weight, layer.caches.index, layer.spec.ratio, plan)

    def index_queries(self, inputs: AttnInputs, layer: LayerState) -> tuple[Tensor, Tensor]:
        """The queries that keys are scored by, rotated and quantised like the keys, `[T, heads, dim]`; and the weight
        of each head, `[T, heads]`."""
        spec, weights, caches = layer.spec, layer.weights.indexer, layer.caches
        assert weights is not None and caches is not None and caches.index is not None
        query = linear(inputs.qr, weights.wq_b, quantize=spec.quantize_activations)
        query = rotate(query.view(-1, spec.index_heads, spec.index_dim), inputs.positions, layer.cos_sin)
        query = round_trip(caches.index.layout.record, query)
        head_weight = linear(inputs.hidden, weights.weights_proj) * (spec.index_dim**-0.5 * spec.index_heads**-0.5)
        return query, head_weight

    # Parts of the segments

    def _write_window(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> Tensor:
        """The latents `[T, D]`, normed and rotated, as they went to the window cache."""
        assert layer.caches is not None
        spec, weights = layer.spec, layer.weights
        kv = rms_norm(linear(hidden, weights.wkv, quantize=spec.quantize_activations), weights.kv_norm, spec.eps)
        kv = rotate(kv, plan.batch.positions, layer.cos_sin)
        layer.caches.window.write(plan.window_slots, kv)
        return kv

    def _pad_heads(self, q: Tensor, spec: LayerSpec) -> Tensor:
        return torch.nn.functional.pad(q, (0, 0, 0, spec.padded_heads - spec.num_heads))

    def _group_start(self, layer: LayerState, plan: StepPlan) -> Tensor:
        """The position that a compressed row and its index key are rotated at: that of the group's first token."""
        ratio = layer.spec.ratio
        return plan.batch.positions.clamp(min=0) // ratio * ratio

    def _insert_index_keys(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan) -> None:
        weights, caches = layer.weights.indexer, layer.caches
        assert weights is not None and weights.wk is not None and weights.k_norm is not None
        assert inputs.latent is not None and caches is not None and caches.index is not None
        key = rms_norm(linear(inputs.latent, weights.wk), weights.k_norm, layer.spec.eps)
        key = rotate(key, self._group_start(layer, plan), layer.cos_sin)
        caches.index.write(plan.compressed_slots[layer.spec.ratio], key)
