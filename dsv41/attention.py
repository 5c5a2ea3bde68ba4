"""One attention layer, top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from dsv41.errors import BackendError, InputError, LayoutError
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.types import AttnInputs, LayerCaches, LayerSpec, LayerState, LayerWeights, Selection, StepPlan
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

    def insert_window(self, hidden: Tensor, plan: StepPlan) -> None:
        """Write window rows apart from queries: how a draft layer is told the target's tokens, which `hidden`
        `[T, hidden_size]` is projected from. The batch is causal. Raises as `check` does."""
        self.check(hidden, plan, causal=True)
        self.backend.insert_window(hidden, self.state, plan)

    def check(self, hidden: Tensor, plan: StepPlan, *, causal: bool | None = None) -> None:
        """Raise InputError or LayoutError for a step that `forward` could not run; writes nothing. `causal` is what the
        batch must be (None = what the layer is)."""
        spec, caches = self.spec, self.state.caches
        if self.asleep:
            raise BackendError(f"{spec.name} is asleep: expected its weights in memory; call `wake` with a checkpoint")
        if self.state.prepared_by != self.backend.name:
            raise BackendError(
                f"the weights of {spec.name} were prepared by {self.state.prepared_by!r}: expected "
                f"{self.backend.name!r}, which is to run it; make a new layer from the checkpoint"
            )
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
        if batch.causal != (spec.causal if causal is None else causal):
            raise InputError(
                f"the batch has causal={batch.causal}: expected {not batch.causal}, since {spec.name} is "
                f"{'causal' if spec.causal else 'a draft layer, whose blocks are not causal'}; build a batch of its "
                "own for it"
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
