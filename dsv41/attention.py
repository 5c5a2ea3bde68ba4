"""One attention layer, top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dsv41.errors import BackendError, InputError, LayoutError
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
from dsv41.hal.weights import Facts, check, copy_into, facts, prepare, release, restore


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
        prepare(backend, self.state)
        self._asleep: tuple[Facts, Facts] | None = None

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

    @property
    def asleep(self) -> bool:
        """Whether the weights' memory was given back."""
        return self._asleep is not None

    def sleep(self) -> None:
        """Give back the memory of the weights, as far as no one else holds it; caches and tensor objects stay."""
        if self._asleep is None:
            self._asleep = self._facts()
            release([self.state.weights, self.state.prepared])

    def take(self, weights: LayerWeights) -> Callable[[], None]:
        """What puts other weights in place of this layer's: copied into the same memory, so that captured graphs see
        them, or of a layer that sleeps, taken over as they are, which wakes it.

        They are checked and prepared when this returns, and nothing has been changed. Raises InputError for weights of
        another form, and as the backend's `prepare_weights` does.
        """
        state, (old, old_prepared) = self.state, self._asleep or self._facts()
        check(facts(weights, self.spec.name), old)
        new = replace(state, weights=weights, prepared=None, prepared_by=None)
        prepare(self.backend, new)
        check(facts(new.prepared, f"{self.spec.name}.prepared"), old_prepared)

        def put() -> None:
            move = restore if self.asleep else copy_into
            move(state.weights, new.weights)
            move(state.prepared, new.prepared)
            self._asleep = None

        return put

    def _facts(self) -> tuple[Facts, Facts]:
        name = self.spec.name
        return facts(self.state.weights, name), facts(self.state.prepared, f"{name}.prepared")

    def forward(
        self, hidden: Tensor, plan: StepPlan, published: Selection | None = None, *, tap: Tap | None = None
    ) -> tuple[Tensor, Selection | None]:
        """Attention of one step: `hidden` `[T, hidden_size]` to the same shape, a partial sum under tensor parallelism.

        `published` is the selection that the layers before left; it is returned as the layers behind shall see it.
        The steps are those of the model: projections, rotation, window insert and compressor; index keys, scores and
        top-k; attention with a sink; inverse rotation and output projection.
        """
        self.check(hidden, plan.batch)
        return self.run(hidden, plan, published, tap=tap)

    def run(
        self, hidden: Tensor, plan: StepPlan, published: Selection | None = None, *, tap: Tap | None = None
    ) -> tuple[Tensor, Selection | None]:
        """`forward` for a caller that has called `check`, as a stack does for all its layers before the first runs."""
        spec, layer, backend = self.spec, self.state, self.backend
        if spec.owns_compressed:
            published = None  # the rows that the selection before spoke of are another layer's
        if spec.ratio and not spec.owns_selection and published is None:
            raise InputError(
                f"{spec.name} was given no selection: expected that of layer {spec.index_source}, which it takes over; "
                "run that layer first and pass on what its forward returned"
            )

        inputs = backend.prepare_inputs(hidden, layer, plan)
        if tap is not None:
            tap.inputs(layer, plan, inputs)
        if spec.owns_selection:
            published = backend.select(inputs, layer, plan, published)
            if tap is not None:
                published = tap.selection(layer, plan, published)
            published = backend.prepare_selection(published, layer, plan)
        attended = backend.attend(inputs, layer, plan, published if spec.ratio else None)
        output = backend.project(attended, layer, plan)
        if tap is not None:
            tap.output(layer, plan, output)
        return output, published

    def insert_window(self, hidden: Tensor, plan: StepPlan) -> None:
        """Write window rows apart from queries: how a draft layer is told the target's tokens, which `hidden`
        `[T, hidden_size]` is projected from. The batch is causal. Raises as `check` does."""
        self.check(hidden, plan.batch, causal=True)
        self.backend.insert_window(hidden, self.state, plan)

    def check(
        self,
        hidden: Tensor,
        batch: ForwardBatch,
        *,
        causal: bool | None = None,
        passed: set[tuple[Any, ...]] | None = None,
    ) -> None:
        """Raise InputError or LayoutError for a step that `forward` could not run; writes nothing. `causal` is what the
        batch must be (None = what the layer is).

        `passed` holds what was checked of this batch before, and is added to: layers that share page tables share most
        of what there is to check.
        """
        spec, caches = self.spec, self.state.caches
        if self.asleep:
            raise BackendError(f"{spec.name} is asleep: expected its weights in memory; call `wake` with a checkpoint")
        if self.state.prepared_by != self.backend.name:
            raise BackendError(
                f"the weights of {spec.name} were prepared by {self.state.prepared_by!r}: expected "
                f"{self.backend.name!r}, which is to run it; make a new layer from the checkpoint"
            )
        expected = (batch.num_tokens, spec.hidden_size)
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
        if batch.causal != (spec.causal if causal is None else causal):
            raise InputError(
                f"the batch has causal={batch.causal}: expected {not batch.causal}, since {spec.name} is "
                f"{'causal' if spec.causal else 'a draft layer, whose blocks are not causal'}; build a batch of its "
                "own for it"
            )
        passed = set() if passed is None else passed
        for key, refuse in self._batch_checks(batch, caches):
            if key not in passed:
                refuse()
                passed.add(key)

    def _batch_checks(
        self, batch: ForwardBatch, caches: LayerCaches
    ) -> Iterator[tuple[tuple[Any, ...], Callable[[], None]]]:
        """What is to be checked of a batch, and all that the outcome depends on beside the batch."""
        spec, max_len = self.spec, self.state.cos_sin.shape[0]
        yield ("length", max_len), partial(_check_length, batch, max_len)
        for pool, cache in ((0, caches.window), (spec.ratio, caches.compressed if spec.ratio else None)):
            if cache is None:
                continue
            window = None if pool else spec.window
            key = ("table", pool, window, cache.layout.page_size, cache.num_pages)
            what = f"compressed (ratio {pool}) table of {spec.name}" if pool else f"window table of {spec.name}"
            yield key, partial(self._check_pages, batch, cache, pool, window, what)
        if self.keeps_state:
            assert caches.compressor_state is not None
            slots = caches.compressor_state.shape[0]
            yield ("slots", slots), partial(_check_slots, batch, slots)

    def _check_pages(self, batch: ForwardBatch, cache: PagedCache, pool: int, window: int | None, what: str) -> None:
        if pool and pool not in batch.compressed_tables:
            raise InputError(
                f"the batch has compressed tables for the ratios {sorted(batch.compressed_tables)}: expected one for "
                f"ratio {pool}, which {self.spec.name} reads; add it to compressed_pages"
            )
        table = batch.compressed_tables[pool] if pool else batch.window_table
        _check_table(batch, table, cache, max(pool, 1), window, what)


def _check_length(batch: ForwardBatch, max_len: int) -> None:
    longest = int(batch.seq_lens_cpu.max()) if batch.num_requests else 0
    if batch.max_seq_len is not None and longest > batch.max_seq_len:
        raise InputError(
            f"a request holds {longest} tokens and max_seq_len is {batch.max_seq_len}: expected a bound on all "
            "requests; give a larger one, or None"
        )
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
    if window is None:
        before = before.maximum(batch.shared_lens_cpu // ratio)
    first = torch.zeros_like(last)
    if window is not None:
        first = (last - query - window + batch.causal).clamp(min=0).maximum(batch.window_starts_cpu)
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
