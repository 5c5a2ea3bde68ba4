"""One attention layer, top to bottom."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from torch import Tensor

from dsv41.errors import InputError, LayoutError
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.types import AttnInputs, LayerCaches, LayerSpec, LayerState, LayerWeights, Selection, StepPlan


class Tap(Protocol):
    """Looks at a layer's segment borders while it runs; for verification and diagnosis."""

    def inputs(self, layer: LayerState, plan: StepPlan, inputs: AttnInputs) -> None:
        """After the projections; the window and compressed caches hold this step's rows."""

    def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
        """After an index source chose; what is returned is published instead."""

    def output(self, layer: LayerState, plan: StepPlan, output: Tensor) -> None:
        """After the output projection."""


class DeepseekV41Attention:
    """One V4.1 attention layer on one backend and one tensor-parallel rank.

    `spec` and `weights` are what `load_checkpoint` returns for the layer; `cos_sin` float32 `[max_len, rope_dim]` is
    `rope.cos_sin_table` for its ratio. `bind` gives it caches, `forward` runs one step.
    """

    def __init__(self, spec: LayerSpec, weights: LayerWeights, backend: AttentionBackend, cos_sin: Tensor) -> None:
        padded = backend.get_padded_num_q_heads(spec.num_heads)
        self.backend = backend
        self.state = LayerState(replace(spec, padded_heads=padded), weights, cos_sin)
        self.state.prepared = backend.prepare_weights(self.state)

    @property
    def spec(self) -> LayerSpec:
        return self.state.spec

    def bind(self, caches: LayerCaches) -> None:
        """Use these caches from now on. Raises LayoutError where one is missing or cannot be read."""
        spec = self.spec
        needed = {"compressed": spec.ratio > 0, "index": spec.owns_selection, "compressor_state": self.keeps_state}
        if missing := [name for name, need in needed.items() if need and getattr(caches, name) is None]:
            raise LayoutError(
                f"{spec.name} (ratio {spec.ratio}) was given no {', '.join(missing)}: expected what `cache_specs` "
                "lists for each layer; give one that owns none those of its KV source"
            )
        self.backend.check_caches(spec, caches)
        self.state.caches = caches

    @property
    def keeps_state(self) -> bool:
        """Whether a group of this layer's compressor can stay open between steps."""
        return self.spec.owns_compressed and self.spec.ratio > 1

    def forward(
        self, hidden: Tensor, plan: StepPlan, published: Selection | None = None, *, tap: Tap | None = None
    ) -> tuple[Tensor, Selection | None]:
        """Attention of one step: `hidden` `[T, hidden_size]` to the same shape, a partial sum under tensor parallelism.

        `published` is the selection that the layers before left; it is returned as the layers behind shall see it.
        The steps are those of the model: projections, rotation, window insert and compressor; index keys, scores and
        top-k; attention with a sink; inverse rotation and output projection.
        """
        spec, layer, backend = self.spec, self.state, self.backend
        self.check(hidden, plan)
        if spec.owns_compressed:
            published = None  # the rows that the selection before spoke of are another layer's

        inputs = backend.prepare_inputs(hidden, layer, plan)
        if tap is not None:
            tap.inputs(layer, plan, inputs)
        if spec.owns_selection:
            published = backend.select(inputs, layer, plan, published)
            if tap is not None:
                published = tap.selection(layer, plan, published)
            published = backend.prepare_selection(published, layer, plan)
        elif spec.ratio and published is None:
            raise InputError(
                f"{spec.name} was given no selection: expected that of layer {spec.index_source}, which it takes over; "
                "run that layer first and pass on what its forward returned"
            )
        attended = backend.attend(inputs, layer, plan, published if spec.ratio else None)
        output = backend.project(attended, layer, plan)
        if tap is not None:
            tap.output(layer, plan, output)
        return output, published

    def check(self, hidden: Tensor, plan: StepPlan) -> None:
        """Raise InputError or LayoutError for a step that `forward` could not run; writes nothing."""
        spec, caches = self.spec, self.state.caches
        expected = (plan.batch.num_tokens, spec.hidden_size)
        if tuple(hidden.shape) != expected:
            raise InputError(
                f"hidden states of {spec.name} have shape {list(hidden.shape)}: expected [tokens, hidden_size] = "
                f"{list(expected)}; give one row for each token of the batch, padding included"
            )
        if hidden.device != self.state.cos_sin.device:
            raise InputError(
                f"hidden states are on {hidden.device}: expected {self.state.cos_sin.device}, where {spec.name} is; "
                "move them"
            )
        if not hidden.dtype.is_floating_point or hidden.dtype.itemsize < 2:
            raise InputError(f"hidden states are {hidden.dtype}: expected bfloat16 or float32; convert them")
        if caches is None:
            raise LayoutError(f"{spec.name} has no caches: expected some; call `bind` first, or use a Session")
        batch = plan.batch
        if batch.causal != spec.causal:
            raise InputError(
                f"the batch has causal={batch.causal}: expected {spec.causal}, since {spec.name} is "
                f"{'causal' if spec.causal else 'a draft layer'}; build a batch of its own for it"
            )
        tables = [(caches.window, batch.window_table)]
        if spec.ratio:
            if spec.ratio not in batch.compressed_tables:
                raise InputError(
                    f"the batch has compressed tables for the ratios {sorted(batch.compressed_tables)}: expected one "
                    f"for ratio {spec.ratio}, which {spec.name} reads; add it to compressed_pages"
                )
            assert caches.compressed is not None
            tables.append((caches.compressed, batch.compressed_tables[spec.ratio]))
        for cache, table in tables:
            if cache.layout.page_size != table.page_size:
                raise LayoutError(
                    f"the batch has a table of {table.page_size} rows a page: expected {cache.layout.page_size}, as "
                    f"the caches of {spec.name} have; build the batch with the page size of the bound caches"
                )
