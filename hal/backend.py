"""The contract that every backend fulfils. Abstract only: the shared behaviour is in `backends/reference`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from dsv41.hal.layout import CacheLayouts
from dsv41.hal.types import (
    AttnInputs,
    AttnOutput,
    ForwardBatch,
    LayerCaches,
    LayerSpec,
    LayerState,
    Selection,
    StepPlan,
)

if TYPE_CHECKING:
    from dsv41.hal.device import Device
    from dsv41.hal.report import SelectionReport

CONTRACT_VERSION = 1
"""Raised by one whenever a change below breaks a backend written against it; checked when a backend is loaded."""


class AttentionBackend(ABC):
    """One way to compute V4.1 attention on one device.

    Four contracts: padded heads, cache layouts, `forward_mqa`, `o_proj`. Over them stand four segments
    (`prepare_inputs`, `select`, `attend`, `project`), each of which a vendor that ships a fused run may replace.
    `facts` are those of its device and `selection` the report that chose it, None for a backend made by hand.
    """

    contract_version: ClassVar[int] = CONTRACT_VERSION
    name: ClassVar[str]
    packed_kv_cache_dtype: ClassVar[str]
    """What the unspecific request `auto` becomes."""

    accepts_unnormed_unroped_query: ClassVar[bool] = False
    """Attention rotates the query itself, so `AttnInputs.q` is not rotated, and the layer only pads it and inserts KV.
    Such a backend may also keep q in an order of its own, by permuting the rows of `wq_b` in `prepare_weights`."""
    supports_graph_capture: ClassVar[bool] = False
    """A step waits for nothing on the host and decides nothing by what lies on the device, so it can be captured once
    and replayed over the same tensors with other contents; see `dsv41.CapturedStep`."""
    replays_window: ClassVar[bool] = False
    """It can clamp the window at a replay start, as a prefix hit needs."""
    trusts_cache_bytes: ClassVar[bool] = False
    """It reads caches without scrubbing, so only pages that the canonical writer filled may be given to it."""
    max_tokens_for_overlap: int = 0
    """A captured step of at most so many tokens runs what does not depend on one another side by side."""

    def __init__(
        self,
        *,
        device: torch.device | str = "cpu",
        kv_cache_dtype: str = "auto",
        index_cache_dtype: str = "auto",
        facts: Device | None = None,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.facts = facts
        self.kv_cache_dtype, self.index_cache_dtype, self.layouts = self.resolve_layouts(
            kv_cache_dtype, index_cache_dtype
        )
        self.selection: SelectionReport | None = None

    # Contract 1: padded heads

    @abstractmethod
    def get_padded_num_q_heads(self, num_heads: int) -> int:
        """How many query heads the attention kernel is given for `num_heads` live ones; never fewer."""

    # Contract 2: cache layouts

    @abstractmethod
    def resolve_layouts(self, kv_cache_dtype: str, index_cache_dtype: str) -> tuple[str, str, CacheLayouts]:
        """The specific names that the two requests become, and the layouts of the window, compressed and index caches.

        Called by the constructor, when `device` and `facts` are set; they may depend on the architecture.

        Raises LayoutError, listing what this backend reads, for a name that is unknown or that it cannot read.
        """

    # Contract 3: attention

    @abstractmethod
    def alloc_attn_out(self, inputs: AttnInputs, layer: LayerState) -> AttnOutput:
        """Room for the attention output of one step, in whatever form `o_proj` takes."""

    @abstractmethod
    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        """Attention of every query over its window rows and selected compressed rows, into `out`.

        Prefill and decode tokens in one call. Padding tokens and rows that attend to nothing become zeros, whatever
        `out` held before.
        """

    # Contract 4: output projection

    @abstractmethod
    def o_proj(self, out: AttnOutput, layer: LayerState, positions: Tensor) -> Tensor:
        """Rotate back where that is still due, then `wo_a` by groups, then `wo_b`: `[T, hidden]`.

        On a tensor-parallel rank the result is a partial sum.
        """

    # Hooks

    @abstractmethod
    def plan(self, batch: ForwardBatch, specs: Sequence[LayerSpec]) -> StepPlan:
        """Everything that a step's kernels need and that does not depend on the layer, derived once for all `specs`."""

    def complete_plan(self, plan: StepPlan, specs: Sequence[LayerSpec]) -> StepPlan:
        """Add to slots and visibilities what this backend's kernels need besides: the last part of `plan`, apart so
        that rows which no batch would give can be planned too, as a bench or a test does."""
        return plan

    def check_caches(self, spec: LayerSpec, caches: LayerCaches) -> None:  # noqa: B027  (the reference reads any)
        """Raise LayoutError where this backend would misread one of a layer's caches: another record or placement, a
        page stride or a size that its kernels cannot address. Called when caches are bound."""

    def prepare_selection(self, selection: Selection, layer: LayerState, plan: StepPlan) -> Selection:
        """Derive once, for all layers that consume a selection, what this backend's attention reads."""
        return selection

    def complete_selection(self, slots: Tensor) -> Any:
        """`Selection.derived` of rows that are known by their slots, int64 `[T, K]`, -1 = none: the last part of
        `prepare_selection`, apart for the same reason as `complete_plan`."""
        return slots

    def prepare_weights(self, layer: LayerState) -> Any:
        """This backend's form of the layer's weights; None = checkpoint layout.

        A pure function of `layer.weights`, which it leaves as they are. The result is made of tensors (and dataclasses,
        dicts, lists and tuples of them, and plain values), of the same shapes whatever the weights hold, since new
        weights are copied into the tensors of the first. Raises InputError for weights that it cannot compute with.
        """
        return None

    def reserve(self, max_tokens: int, max_requests: int, max_len: int) -> int:
        """Allocate every workspace for steps of at most that size, of the layers prepared so far; returns their bytes.

        A workspace is scratch memory of a segment, such as attention's partial results or index scores: its size
        depends on the step and not only on what the step returns. Steps within the size given here allocate no
        workspace. What a step passes on (projections, selections, outputs, and what `plan` derives), and what two
        launches of one product or choice do, so that products side by side each have their own, comes from torch's
        caching allocator, which reuses the same blocks from step to step and, while a graph is captured, takes them
        from the graph's own pool, so a replay allocates nothing at all. A larger step grows the workspace, except while
        a graph is captured: then BackendError is raised. Memory that a captured graph uses stays where it is.

        The default, which the reference keeps, has no workspace.
        """
        return 0

    def warmup(self, specs: Sequence[LayerSpec] | None = None) -> None:  # noqa: B027  (most have nothing to compile)
        """Compile what steps over layers of these `specs` can meet (None = of the layers prepared so far)."""

    # Segments

    @abstractmethod
    def prepare_inputs(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> AttnInputs:
        """Projections, norms and rotations; writes the window cache, and on KV sources the compressed cache."""

    @abstractmethod
    def insert_window(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> None:
        """Write the window rows of `hidden` `[T, hidden]` without a query, as draft layers take the target's tokens."""

    @abstractmethod
    def select(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None) -> Selection:
        """Write index keys (KV sources), score, choose candidates and top-k. Called on index sources only.

        `published` is the selection of the index source before, where it scored the same keys.
        """

    @abstractmethod
    def index_scores(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan) -> Tensor:
        """The scores `[T, W]` that `select` chooses by, over the index keys as they are: W = `plan.max_visible[ratio]`.
        What a token cannot see holds something or other. For verification and diagnosis, not part of a step."""

    def attend(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, selection: Selection | None) -> AttnOutput:
        """`forward_mqa` into a fresh output."""
        out = self.alloc_attn_out(inputs, layer)
        self.forward_mqa(inputs, layer, selection, plan, out)
        return out

    def project(self, out: AttnOutput, layer: LayerState, plan: StepPlan) -> Tensor:
        """`o_proj` at the step's positions."""
        return self.o_proj(out, layer, plan.batch.positions)
