"""One attention layer, top to bottom."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from dsv41.errors import InputError, LayoutError
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.layout import PagedCache
from dsv41.hal.types import (
    AttnInputs,
    BlockTable,
    ForwardBatch,
    LayerCaches,
    LayerSpec,
    LayerState,
    LayerWeights,
    Selection,
    StepPlan,
)


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
        self.check_caches(caches)
        self.state.caches = caches

    def check_caches(self, caches: LayerCaches) -> None:
        """Raise LayoutError for caches that this layer could not use; binds nothing."""
        spec = self.spec
        needed = {"compressed": spec.ratio > 0, "index": spec.owns_selection, "compressor_state": self.keeps_state}
        if missing := [name for name, need in needed.items() if need and getattr(caches, name) is None]:
            raise LayoutError(
                f"{spec.name} (ratio {spec.ratio}) was given no {', '.join(missing)}: expected what `cache_specs` "
                "lists for each layer; give one that owns none those of its KV source"
            )
        self.backend.check_caches(spec, caches)

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
        if hidden.dtype not in (torch.bfloat16, torch.float32):
            raise InputError(f"hidden states are {hidden.dtype}: expected bfloat16 or float32; convert them")
        if caches is None:
            raise LayoutError(f"{spec.name} has no caches: expected some; call `bind` first, or use a Session")
        batch = plan.batch
        if batch.causal != spec.causal:
            raise InputError(
                f"the batch has causal={batch.causal}: expected {spec.causal}, since {spec.name} is "
                f"{'causal' if spec.causal else 'a draft layer'}; build a batch of its own for it"
            )
        _check_length(batch, self.state.cos_sin.shape[0])
        _check_table(batch, batch.window_table, caches.window, 1, spec.window, f"window table of {spec.name}")
        if spec.ratio:
            if spec.ratio not in batch.compressed_tables:
                raise InputError(
                    f"the batch has compressed tables for the ratios {sorted(batch.compressed_tables)}: expected one "
                    f"for ratio {spec.ratio}, which {spec.name} reads; add it to compressed_pages"
                )
            assert caches.compressed is not None
            table = batch.compressed_tables[spec.ratio]
            what = f"compressed (ratio {spec.ratio}) table of {spec.name}"
            _check_table(batch, table, caches.compressed, spec.ratio, None, what)
        if self.keeps_state:
            assert caches.compressor_state is not None
            _check_slots(batch, caches.compressor_state.shape[0])


def _check_length(batch: ForwardBatch, max_len: int) -> None:
    longest = int(batch.seq_lens_cpu.max()) if batch.num_requests else 0
    if longest > max_len:
        raise InputError(
            f"a request reaches position {longest - 1}: expected at most {max_len - 1}, by max_len; give fewer tokens, "
            "or build the stack with a larger max_len, up to the config's max_position_embeddings"
        )


def _check_slots(batch: ForwardBatch, count: int) -> None:
    slots = batch.state_slots_cpu[batch.query_start_loc_cpu.diff() > 0]
    if bool(((slots < 0) | (slots >= count)).any()) or len(slots.unique()) < len(slots):
        raise InputError(
            f"state_slots are {slots.tolist()}: expected one of 0 to {count - 1} for each request that steps, none "
            "twice, the rows of the bound compressor states; give each request a slot of its own"
        )


def _check_table(
    batch: ForwardBatch, table: BlockTable, cache: PagedCache, ratio: int, window: int | None, what: str
) -> None:
    """Refuse a table of other pages than the cache's, or in which a page that the step reads or writes is missing,
    outside the cache, or written for two requests. Host only.

    A window table needs the pages of the last `window` rows before the step's first token; others need all.
    """
    size, num_pages = table.page_size, cache.num_pages
    if cache.layout.page_size != size:
        raise LayoutError(
            f"the {what} is of {size} rows a page: expected {cache.layout.page_size}, as the bound cache has; "
            "build the batch with the page size of the bound caches"
        )
    query = batch.query_start_loc_cpu.diff().long()
    last = batch.seq_lens_cpu.long() // ratio  # rows held after the step
    before = (batch.seq_lens_cpu.long() - query) // ratio  # and before it
    first = torch.zeros_like(last) if window is None else (last - query - window + 1).clamp(min=0)
    page = torch.arange(table.pages_cpu.shape[1])
    steps = (query > 0)[:, None]
    needed = (page >= (first // size)[:, None]) & (page < -(-last // size)[:, None]) & steps
    wanted = int((-(-last // size))[query > 0].max()) if bool((query > 0).any()) else 0
    if wanted > table.pages_cpu.shape[1]:
        raise InputError(
            f"the {what} has {table.pages_cpu.shape[1]} pages a request: expected at least {wanted} of {size} "
            "rows for these seq_lens; widen it"
        )
    bad = needed & ((table.pages_cpu < 0) | (table.pages_cpu >= num_pages))
    if bool(bad.any()):
        request, column = bad.nonzero()[0].tolist()
        raise InputError(
            f"the {what} names page {int(table.pages_cpu[request, column])} for request {request}, logical page "
            f"{column}: expected 0 to {num_pages - 1}, the pages of the bound cache; allocate a page for these rows"
        )
    written = table.pages_cpu[needed & (page >= (before // size)[:, None]) & (before < last)[:, None]]
    if len(written.unique()) < len(written):
        twice = written.mode().values.item()
        raise InputError(
            f"the {what} names page {twice} twice among the pages that this step writes: expected each once; give each "
            "request pages of its own to write"
        )
